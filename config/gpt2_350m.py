# torchrun --standalone --nproc_per_node=8 train.py config/gpt2_350m.py
# GPT-2 medium (354,823,168 parameters): the recipe of gpt2_124m with GPT-3's learning rate for this
# size. Its loss is not measured; its speed is in docs/results.md.
from config.gpt2_124m import *  # noqa: F403

out_dir = "out/gpt2_350m"
n_layer, n_head, n_embd = 24, 16, 1024
batch_size = 64
lr = 3e-4
