# python train.py config/modern_124m_once.py
# The recipe of config/modern_124m.py for text of which every token is read once (docs/modern.md):
# tables of value embeddings, a gate for each head, a table for pairs of tokens, keys that know the
# token before, keys and values shared by three heads. On text that is read three times the tables
# memorise. No class of Hugging Face has them, so its weights cannot be exported.
from config.modern_124m import *  # noqa: F403

out_dir = "out/modern_124m_once"
weight_decay = None  # 2 / (lr max_steps), near the best in runs on 6M to 100M tokens
n_kv_head = 2
value_embeddings = 2
attention_gate = True
key_offset = True
bigram_embedding = True
