# python train.py config/llama3_mini.py --data_dir=DATA
# Llama 3's architecture at a size that a CPU can debug: grouped key/value heads, an untied head,
# scaled RoPE. DATA: any shards of GPT-2 tokens.
from config.llama3_8b import *  # noqa: F403

out_dir = "out/llama3_mini"
data_dir = "data/fineweb-edu"
vocab_size = 50_257
n_layer, n_head, n_kv_head, n_embd, n_hidden = 4, 8, 2, 256, 896
block_size = 256
rope_factor, rope_original = 8.0, 128
batch_size = 4
batch_tokens = 4096
max_steps = 200
warmup_steps = 20
lr = 1e-3
eval_interval = 50
eval_tokens = 32_768
save_interval = 100
