# torchrun --standalone --nproc_per_node=8 train.py config/llama3_8b.py
# The shape of Llama 3 8B (https://arxiv.org/abs/2407.21783) on data tokenized with its tokenizer:
#   python fineweb.py --tokenizer=path/to/tokenizer.json --out_dir=data/fineweb-edu-llama3
# Weights, gradients and AdamW's moments take 120 GiB, sharded over the ranks: 15 GiB on each of
# eight. With --reduce_dtype=bf16 four H200s reach 10,590 tokens/s each, four H100s 10,400, and
# 10,627 with --parallel=zero2 (docs/results.md).
out_dir = "out/llama3_8b"
data_dir = "data/fineweb-edu-llama3"

vocab_size = 128_256
norm, positions, mlp, bias = "rmsnorm", "rope", "swiglu", False
rope_theta = 500_000.0
tie_embeddings = False
n_layer, n_head, n_kv_head, n_embd, n_hidden = 32, 32, 8, 4096, 14_336
block_size = 8192

batch_size = 1
batch_tokens = 1_048_576
max_steps = 9_537  # 10B tokens
lr = 3e-4
min_lr_ratio = 0.1
warmup_steps = 200
weight_decay = 0.1
beta1, beta2, clip = 0.9, 0.95, 1.0

parallel = "fsdp"
