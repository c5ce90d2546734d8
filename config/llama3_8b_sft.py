# torchrun --standalone --nproc_per_node=8 train.py config/llama3_8b_sft.py
# Fine-tunes Llama 3.1 8B's base weights on dialogues, of which only the answers carry loss, at
# 8,192 tokens, after you accepted the licence on the hub:
#   hf download meta-llama/Llama-3.1-8B-Instruct tokenizer.json tokenizer_config.json \
#       --local-dir=data/llama3
#   python fineweb.py --dataset=HuggingFaceTB/smoltalk --subset=all --text_key=messages \
#       --tokenizer=data/llama3 --shuffle_seed=1337 --pack=8192 --val_tokens=2097152 \
#       --out_dir=data/smoltalk-llama3
# To answer:
#   python sample.py --checkpoint=out/llama3_8b_sft --chat --temperature=0 --prompt="Why?"
# Two H200s with --optimizer=adamw8bit --weights=bf16 --reduce_dtype=bf16 reach 10,840 tokens/s each
# on random weights. The start of a run shows how many epochs max_steps are.
from config.llama3_8b import *  # noqa: F403

out_dir = "out/llama3_8b_sft"
init_from = "hf:meta-llama/Llama-3.1-8B"
data_dir = "data/smoltalk-llama3"
document_mask = True  # dialogues of a row do not see each other
shuffle_seed = 1337

rope_factor, rope_original = 8.0, 8192  # Llama 3.1's

batch_tokens = 524_288  # 64 rows
max_steps = 2000
lr = 1e-5
warmup_steps = 60
weight_decay = 0.0
eval_interval = 200
eval_tokens = 1_048_576
save_interval = 500

remat = "selective"
