# python train.py config/quickstart.py
# A 2.7M-parameter Llama on the bytes of Python's standard library: 2 to 4 minutes on 2 CPU cores,
# validation loss to 2.04 nats a byte (the unigram entropy is 3.14).
out_dir = "out/quickstart"
data_dir = "data/quickstart"

vocab_size, vocab_multiple = 257, 1  # 256 bytes and the separator
norm, positions, mlp, bias = "rmsnorm", "rope", "swiglu", False
n_layer, n_head, n_embd, n_hidden = 6, 3, 192, 512
block_size = 256

batch_size = 16
batch_tokens = 4096
max_steps = 200
lr = 3e-3
warmup_steps = 30
min_lr_ratio = 0.05
shuffle_seed = 1337
compile = False  # compiling takes longer than it saves here

eval_interval = 50
eval_tokens = 32_768
sample_interval = 100
sample_prompt = "def "
n_samples = 2
sample_tokens = 160
save_interval = 100
log_interval = 10
