# torchrun --standalone --nproc_per_node=8 train.py config/llama3_1b.py
# The shape of Llama 3.2 1B: tied embeddings, and RoPE scaled from 8K to 128K tokens of context. The
# recipe trains at 8K tokens; its loss is not measured, its speed is in docs/results.md.
from config.llama3_8b import *  # noqa: F403

out_dir = "out/llama3_1b"
n_layer, n_head, n_kv_head, n_embd, n_hidden = 16, 32, 8, 2048, 8192
tie_embeddings = True
rope_factor = 32.0
batch_size = 4
