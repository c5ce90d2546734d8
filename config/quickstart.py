# python train.py config/quickstart.py
# A Llama of 2.7M parameters on the bytes of Python's standard library. It takes 2 to 4 minutes on 2 CPU cores and ends
# at a validation loss of 2.17 nats a byte (the unigram entropy is 3.14).
out_dir = "out/quickstart"
data_dir = "data/quickstart"

vocab_size, vocab_multiple = 257, 1  # 256 bytes and the separator
norm, positions, mlp, bias = "rmsnorm", "rope", "swiglu", False
n_layer, n_head, n_embd, n_hidden = 6, 3, 192, 512
block_size = 256

batch_size = 16
batch_tokens = 4096
max_steps = 160
lr = 3e-3
warmup_steps = 30
min_lr_ratio = 0.05
shuffle_seed = 1337
compile = False  # compiling takes longer than it saves here

eval_interval = 40
eval_tokens = 16_384
sample_interval = 160
sample_prompt = "def "
n_samples = 1
sample_tokens = 100
save_interval = 160
log_interval = 10
