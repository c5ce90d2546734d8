# torchrun --nnodes=8 --nproc_per_node=8 --rdzv_backend=c10d --rdzv_endpoint=HOST:29500 \
#     train.py config/llama3_70b.py
# The shape of Llama 3 70B. Weights, gradients and AdamW's moments take 1,052 GiB, 16 GiB on each of
# 64 GPUs; in all a rank needs 70 GiB by the estimate of `bench.py memory --world=64`. On four H200s
# all of it ran with --optimizer=adamw8bit --weights=bf16 --batch_size=1, 855 tokens/s each
# (docs/results.md).
from config.llama3_8b import *  # noqa: F403

out_dir = "out/llama3_70b"
n_layer, n_head, n_kv_head, n_embd, n_hidden = 80, 64, 8, 8192, 28_672
batch_size = 2
lr = 1.5e-4
remat = "attention"
