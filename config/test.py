# torchrun --standalone --nproc_per_node=2 train.py config/test.py --device=cpu --data_dir=DATA
# A run of a few seconds that saves and evaluates: 2 layers of width 64, 32 tokens of context. DATA:
# any 16-bit shards.
out_dir = "out/test"
vocab_size = 50_257
n_layer, n_head, n_embd = 2, 4, 64
block_size = 32
batch_size = 4
batch_tokens = 512
max_steps = 12
warmup_steps = 2
lr = 1e-3
compile = False
eval_interval = 6
eval_tokens = 1024
save_interval = 4
