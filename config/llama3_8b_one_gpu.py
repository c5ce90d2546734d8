# python train.py config/llama3_8b_one_gpu.py
# Llama 3 8B on one GPU of 80 GiB: weights and gradients in bf16, and AdamW's two moments together,
# in 8 bits, take 15 GiB each; all in all 60 GiB. --remat=none is 11% faster and takes 74 GiB,
# --precision=fp8 --remat_every=2 is 56% faster and takes 75. Its loss is not measured; its speed is
# in docs/results.md.
from config.llama3_8b import *  # noqa: F403

out_dir = "out/llama3_8b_one_gpu"
parallel = "ddp"
weights, optimizer = "bf16", "adamw8bit"
remat = "selective"
batch_size = 1
batch_tokens = 131_072
max_steps = 10_000
