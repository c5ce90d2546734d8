# torchrun --standalone --nproc_per_node=8 train.py config/llama_124m.py
# A Llama of GPT-2's size on the same data: RMSNorm, RoPE, SwiGLU, no biases, 123.6M parameters. Its
# loss is not measured; its speed is in docs/results.md.
from config.gpt2_124m import *  # noqa: F403

out_dir = "out/llama_124m"
norm, positions, mlp, bias = "rmsnorm", "rope", "swiglu", False
# 8/3 * n_embd: three matrices of this width have as many weights as two of 4 * n_embd
n_hidden = 2048
