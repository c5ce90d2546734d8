# python train.py config/llama3_8b_one_gpu.py
# Llama 3 8B on one GPU of 80 GiB: weights and gradients in bf16, and AdamW's two moments together, in 8 bits, take
# 15 GiB each, and the activations of a row 27. For fp8 add --precision=fp8 --remat=selective --remat_every=2. Its loss
# is not measured; its speed is in docs/results.md.
from config.llama3_8b import *  # noqa: F403

out_dir = "out/llama3_8b_one_gpu"
parallel = "ddp"
weights, optimizer = "bf16", "adamw8bit"
remat = "none"
batch_size = 1
batch_tokens = 131_072
max_steps = 10_000
