# python train.py config/gpt2_124m_tuned.py
# GPT-2 124M with AdamW tuned for 300M tokens (docs/modern.md): what config/modern_124m.py is held
# against. It reaches 3.298 on books, Wikipedia and technical documentation, in 9.4 minutes on one
# H100 (530,000 tokens/s).
from config.gpt2_124m import *  # noqa: F403

out_dir = "out/gpt2_124m_tuned"
batch_size = 16
batch_tokens = 16_384
max_steps = 18310  # 300M tokens
lr = 8.5e-4
beta2 = 0.997
schedule, cooldown_fraction, min_lr_ratio = "wsd", 0.6, 0.0
warmup_steps = 1220
shuffle_seed = 1337
cuda_graph = True  # for micro-batches that are over before the host has launched the next kernels

eval_interval = 2000
eval_tokens = 1_048_576
