# python train.py config/quickstart.py
# A Llama of 2.8M parameters, trained with Muon on the bytes of Python's standard library. It takes
# 1 to 4 minutes on 2 CPU cores and ends at 1.44 nats a byte in validation, ± 0.03 over the short
# modules that are held out (Python 3.11 and 3.13). The run reads a tenth of the text, so that
# nothing is learnt by heart.
out_dir = "out/quickstart"
data_dir = "data/quickstart"

vocab_size, vocab_multiple = 257, 1  # 256 bytes and the separator
norm, positions, mlp, bias = "rmsnorm", "rope", "swiglu", False
qk_norm, embed_norm, zero_init, tie_embeddings = True, True, True, False
n_layer, n_head, n_embd, n_hidden = 6, 3, 192, 512
block_size = 256

batch_size = 8
batch_tokens = 2048
max_steps = 230
optimizer = "muon"
lr, lr_embedding, lr_head = 0.06, 0.3, 0.02
beta1, momentum_warmup = 0.8, 100
schedule, cooldown_fraction, min_lr_ratio = "wsd", 0.6, 0.0
warmup_steps = 5
shuffle_seed = 1337
compile = False  # compiling takes longer than it saves here

eval_interval = 230  # before and after: each took 37 s of one CPU core
eval_tokens = 350_000  # all of the modules that quickstart.sh holds out
sample_interval = 230
sample_prompt = "def "
save_interval = 230
log_interval = 10
