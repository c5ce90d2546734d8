# python train.py config/gpt2_124m_tuned.py
# GPT-2 124M with AdamW tuned for 300M tokens (docs/modern.md): what config/modern_124m.py is held against. It
# reaches 3.322 on books, Wikipedia and technical documentation, in 8.3 minutes on one H200 (605,000
# tokens/s).
from config.gpt2_124m import *  # noqa: F403

out_dir = "out/gpt2_124m_tuned"
batch_size = 32
batch_tokens = 32_768
max_steps = 9155  # 300M tokens
lr = 1.2e-3
beta2 = 0.99
schedule, cooldown_fraction, min_lr_ratio = "wsd", 0.6, 0.0
warmup_steps = 600
shuffle_seed = 1337

eval_interval = 1000
eval_tokens = 1_048_576
