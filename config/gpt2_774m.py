# torchrun --standalone --nproc_per_node=8 train.py config/gpt2_774m.py
# GPT-2 large (774,030,080 parameters): the recipe of gpt2_124m with GPT-3's learning rate for this
# size. Its loss is not measured; its speed is in docs/results.md.
from config.gpt2_124m import *  # noqa: F403

out_dir = "out/gpt2_774m"
n_layer, n_head, n_embd = 36, 20, 1280
batch_size = 32
lr = 2.5e-4
