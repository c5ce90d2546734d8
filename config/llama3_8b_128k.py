# torchrun --standalone --nproc_per_node=8 train.py config/llama3_8b_128k.py
# Llama 3.1 8B's base weights, trained on at its full context of 131,072 tokens, on documents that are long themselves:
#   hf download meta-llama/Llama-3.1-8B tokenizer.json --local-dir=data/llama3      (once its licence is accepted there)
#   python fineweb.py --subset=sample-100BT --streaming --tokenizer=data/llama3/tokenizer.json --pack=131072 \
#       --min_document_tokens=16384 --val_tokens=4194304 --out_dir=data/fineweb-edu-128k
# Or books: --dataset="books/*.jsonl.zst". Four ranks share a sequence, 32,768 tokens each; a node works on two. By
# arithmetic (bench.py memory) 38 GiB a rank of eight, 29 with --context_parallel=8; neither is measured yet.
from config.llama3_8b import *  # noqa: F403

out_dir = "out/llama3_8b_128k"
init_from = "hf:meta-llama/Llama-3.1-8B"  # or a folder: hf:path/to/Llama-3.1-8B
data_dir = "data/fineweb-edu-128k"
document_mask = True
shuffle_seed = 1337  # whole rows, so they still begin where the packed groups do

rope_factor, rope_low_freq, rope_high_freq, rope_original = 8.0, 1.0, 4.0, 8192  # as Llama 3.1 has them
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
