# python train.py config/modern_350m.py
# The recipe of config/modern_124m.py at the size of GPT-2 medium: 24 blocks of width 1,024 with
# eight heads of 128.
from config.modern_124m import *  # noqa: F403

out_dir = "out/modern_350m"
n_layer, n_head, n_embd = 24, 8, 1024
batch_size = 64
cuda_graph = False  # micro-steps of this size keep the GPU busy
