# torchrun --standalone --nproc_per_node=8 train.py config/gpt2_124m.py
# GPT-2 124M on 10B tokens of FineWeb-Edu, whose shards `python fineweb.py` writes. The run should
# end near a validation loss of 3.29. At the measured speeds it takes 4.4 h on one H200 (637,300
# tokens/s), 3.5 h with --precision=fp8, and 1.1 h on four H200s.
out_dir = "out/gpt2_124m"
data_dir = "data/fineweb-edu"

n_layer, n_head, n_embd = 12, 12, 768
block_size = 1024

batch_size = 64
batch_tokens = 524_288
max_steps = 19_073  # 10B tokens
lr = 6e-4
min_lr_ratio = 0.1
warmup_steps = 715
weight_decay = 0.1
beta1, beta2, clip = 0.9, 0.95, 1.0

eval_interval = 250
hellaswag_interval = 1000
sample_interval = 1000
