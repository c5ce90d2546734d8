# torchrun --standalone --nproc_per_node=8 train.py config/gpt3_medium.py
# GPT-3 Medium (table 2.1 of https://arxiv.org/abs/2005.14165) with 2,048 tokens of context; all
# layers have dense attention, where GPT-3's alternate with sparse ones. Its loss is not measured;
# its speed is in docs/results.md.
from config.gpt3_small import *  # noqa: F403

out_dir = "out/gpt3_medium"
n_layer, n_head, n_embd = 24, 16, 1024
batch_size = 32
lr = 3e-4
