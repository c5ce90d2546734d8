# torchrun --standalone --nproc_per_node=8 train.py config/llama_124m.py
# A small modern Llama in GPT-2's size and on its data: RMSNorm, RoPE, SwiGLU, no biases; 123.6M parameters.
from config.gpt2_124m import *  # noqa: F403

out_dir = "out/llama_124m"
norm, positions, mlp, bias = "rmsnorm", "rope", "swiglu", False
n_hidden = 2048  # 8/3 * n_embd: as many weights as an MLP of 4 * n_embd without a gate
