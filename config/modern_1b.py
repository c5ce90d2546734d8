# torchrun --standalone --nproc_per_node=8 train.py config/modern_1b.py
# Not run. The recipe of config/modern_124m.py at 1.0B parameters in the blocks, 20 of width 2,048
# with sixteen heads of 128, on 20 tokens for each of them: FineWeb-Edu's 10B twice. Assumed, not
# measured: twice the tokens a step take the rate times the square root of two, and Muon's best rate
# holds here, 0.02 of 0.01, 0.02 and 0.04 at 55M and of 0.02 and 0.04 at 133M; and so does the rule
# of the weight decay, found on up to 100M tokens.
from config.modern_124m import *  # noqa: F403

out_dir = "out/modern_1b"
n_layer, n_head, n_embd = 20, 16, 2048
block_size = 2048
batch_size = 8
batch_tokens = 262_144
max_steps = 77_000  # 20.2B tokens
lr = 0.028
weight_decay = None  # 2 / (lr max_steps)
precision = "auto"
cuda_graph = False
