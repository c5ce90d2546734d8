# python train.py config/modern_124m.py
# Muon and the modern switches at GPT-2's width (docs/modern.md): 300M tokens of FineWeb-Edu in 6 to
# 7 minutes on one H200 (790,000 tokens/s; 650,000 with --precision=bf16). On books, Wikipedia and
# technical documentation it ends at a loss of 3.177 (3.169 in bf16), where GPT-2 with a tuned AdamW
# ends at 3.298. For text that is read once: config/modern_124m_once.py. On four GPUs:
# --batch_size=32.
out_dir = "out/modern_124m"
data_dir = "data/fineweb-edu"

n_layer, n_head, n_embd = 12, 6, 768
block_size = 1024
norm, positions, mlp, bias = "rmsnorm", "rope", "relu2", False
qk_norm, embed_norm, zero_init, tie_embeddings = True, True, True, False

batch_size = 128
batch_tokens = 131_072
max_steps = 2289  # 300M tokens
optimizer = "muon"
lr, lr_embedding, lr_head = 0.02, 0.3, 0.012
weight_decay = 0.3
beta1, beta2 = 0.8, 0.95
schedule, cooldown_fraction, min_lr_ratio = "wsd", 0.6, 0.0
warmup_steps = 20
momentum_warmup = 300
shuffle_seed = 1337
precision = "auto8"
# four H200s: 2,758,600 tokens/s; without it, at 10ab690, 1,478,374, as the host launches too late
cuda_graph = True

eval_interval = 250
eval_tokens = 1_048_576
hellaswag_interval = 1000
sample_interval = 1000
