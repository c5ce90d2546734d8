# python train.py config/llama3_8b_128k_one_gpu.py
# Continues training of Llama 3.1 8B's base weights at 131,072 tokens on one GPU of 80 GiB, with the
# data of llama3_8b_128k. A step of one row takes 42.0 s and 57.9 GiB on one H200, and 66 GiB of
# pinned memory on its host.
from config.llama3_8b_128k import *  # noqa: F403

out_dir = "out/llama3_8b_128k_one_gpu"
parallel, context_parallel = "ddp", 1
weights, optimizer = "bf16", "adamw8bit"
document_mask = False  # remat=attention does not support it
remat, remat_offload, remat_tile = "attention", True, 16_384
batch_tokens = 131_072  # one micro-step, since sums over several would round the bf16 gradients
max_steps = 4000
