"""What a run needs around its loop, and what the scripts need of a run's results.

build             from settings to loaders, model and the start block
flops             operations, FLOPs and unused parameters of the model, from one pass on meta tensors
resume            where a run starts: a new folder, or a checkpoint
checkpoint        checkpoints: written, checked, read by any number of ranks
source            the code that a run was started with, kept and compared; imports no torch
files             files written atomically, read as JSON, hashed; imports no torch
evaluate          the evaluations during a run
sampling          continues text with a model; top-k, the KV cache
meter             the figures of each step: read, recorded, checked
watch             signals, lost and hanging ranks, status.json: a thread that watches over a run
lock              one process writes into a run's folder
pulse             lines that say what a slow phase is doing
logger            the console, log.jsonl and wandb
history           a run as its log.jsonl tells it, for plot.py; imports no torch
fit               loss against size and tokens, from the ends of runs, for plot.py; imports no torch
page              plot.py's HTML page, of the template page.html; imports no torch
hf                Hugging Face's GPT-2, Llama and Qwen3: config.json, weights and tokenizer files, in and out
trained           loads a trained model and its tokenizer

train.py, the other scripts and the wing measure import this wing; the wing corpus imports run.files alone. It imports
everything but train.py and the scripts.
"""
