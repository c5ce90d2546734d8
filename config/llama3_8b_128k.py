# torchrun --standalone --nproc_per_node=8 train.py config/llama3_8b_128k.py
# Continues training of Llama 3.1 8B's base weights at its full context of 131,072 tokens, on long
# documents, after you accepted its licence on the hub:
#   hf download meta-llama/Llama-3.1-8B tokenizer.json --local-dir=data/llama3
#   python fineweb.py --subset=sample-100BT --streaming --tokenizer=data/llama3/tokenizer.json \
#       --pack=131072 --min_document_tokens=16384 --val_tokens=4194304 \
#       --out_dir=data/fineweb-edu-128k
# For books instead: --dataset="books/*.jsonl.zst". Four ranks share a sequence, 32,768 tokens each,
# so that a node of eight works on two. By the estimate of bench.py memory a rank of eight needs 34
# GiB; it is not measured.
from config.llama3_8b import *  # noqa: F403

out_dir = "out/llama3_8b_128k"
init_from = "hf:meta-llama/Llama-3.1-8B"  # or a folder: hf:path/to/Llama-3.1-8B
data_dir = "data/fineweb-edu-128k"
document_mask = True
shuffle_seed = 1337  # shuffles whole rows; each still begins with a packed group

rope_factor, rope_original = 8.0, 8192  # Llama 3.1's
block_size = 131_072

batch_size = 1
batch_tokens = 1_048_576  # 8 rows
max_steps = 1000  # 1B tokens
lr = 1e-5
warmup_steps = 50
eval_interval = 100
eval_tokens = 2_097_152  # 16 rows
save_interval = 100

context_parallel = 4
remat = "block"
