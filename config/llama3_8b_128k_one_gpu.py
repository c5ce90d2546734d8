# python train.py config/llama3_8b_128k_one_gpu.py
# Llama 3.1 8B's base weights, trained on at 131,072 tokens on one GPU of 80 GiB; the data as in llama3_8b_128k. A step
# of one row takes 41.4 s and 62.2 GiB of one H200, and 66 GiB of pinned memory of its host.
from config.llama3_8b_128k import *  # noqa: F403

out_dir = "out/llama3_8b_128k_one_gpu"
parallel, context_parallel = "ddp", 1
weights, optimizer = "bf16", "adamw8bit"
document_mask = False  # not to be had with remat=attention
remat, remat_offload, remat_tile = "attention", True, 16_384
batch_tokens = 131_072  # gradients are bf16: summed over few micro-steps, here none
max_steps = 4000
