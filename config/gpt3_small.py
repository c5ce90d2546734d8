# torchrun --standalone --nproc_per_node=8 train.py config/gpt3_small.py
# GPT-3 Small (table 2.1 of https://arxiv.org/abs/2005.14165) with 2,048 tokens of context; all
# layers have dense attention, where GPT-3's alternate with sparse ones. Its loss is not measured;
# its speed is in docs/results.md.
from config.gpt2_124m import *  # noqa: F403

out_dir = "out/gpt3_small"
n_layer, n_head, n_embd = 12, 12, 768
block_size = 2048
batch_size = 32
batch_tokens = 524_288
max_steps = 19_073  # 10B tokens
warmup_steps = 715  # 375M tokens
lr = 6e-4
