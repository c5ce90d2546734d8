# torchrun --standalone --nproc_per_node=8 train.py config/gpt3_large.py
# GPT-3 Large (table 2.1 of https://arxiv.org/abs/2005.14165) with 2,048 tokens of context; all
# layers have dense attention, where GPT-3's alternate with sparse ones. Its loss is not measured;
# its speed is in docs/results.md.
from config.gpt3_small import *  # noqa: F403

out_dir = "out/gpt3_large"
n_layer, n_head, n_embd = 24, 16, 1536
batch_size = 16
lr = 2.5e-4
