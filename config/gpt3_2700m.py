# torchrun --standalone --nproc_per_node=8 train.py config/gpt3_2700m.py
# GPT-3 2.7B (table 2.1 of https://arxiv.org/abs/2005.14165) with 2,048 tokens of context; all
# layers have dense attention, where GPT-3's alternate with sparse ones. Its loss is not measured;
# its speed is in docs/results.md.
from config.gpt3_xl import *  # noqa: F403

out_dir = "out/gpt3_2700m"
n_layer, n_head, n_embd = 32, 32, 2560
batch_size = 4
lr = 1.6e-4
