# torchrun --standalone --nproc_per_node=8 train.py config/gpt3_xl.py
# GPT-3 XL (table 2.1 of https://arxiv.org/abs/2005.14165) with 2,048 tokens of context; all layers
# have dense attention, where GPT-3's alternate with sparse ones. Its loss is not measured; its
# speed is in docs/results.md.
from config.gpt3_small import *  # noqa: F403

out_dir = "out/gpt3_xl"
n_layer, n_head, n_embd = 24, 16, 2048
batch_size = 16
batch_tokens = 1_048_576
warmup_steps = 358  # 375M tokens
max_steps = 9_537  # 10B tokens
lr = 2e-4
