# torchrun --standalone --nproc_per_node=8 train.py config/gpt2_1558m.py
# GPT-2 XL (1,557,611,200 parameters): the recipe of gpt2_124m with GPT-3's learning rate for this
# size. Its loss is not measured; its speed is in docs/results.md.
from config.gpt2_124m import *  # noqa: F403

out_dir = "out/gpt2_1558m"
n_layer, n_head, n_embd = 48, 25, 1600
batch_size = 16
lr = 2e-4
