"""What a run needs around its loop, and what the scripts need of a run's results.

build             from settings to loaders, model and the start block
flops             operations, FLOPs and unused parameters of the model, from one pass on meta tensors
resume            where a run starts: a new folder, or a checkpoint
checkpoint        checkpoints: written, checked, read by any number of ranks
source            the code that a run was started with, kept and compared; imports no torch
files             files written atomically, read as JSON, hashed; imports no torch
evaluate          the evaluations during a run
multiple_choice   HellaSwag's file, rows and score
sampling          continues text with a model
cache             the KV cache of generate
signals           signals, and ranks that fail, die or hang
lock              one process writes into a run's folder
logger            the console, log.jsonl, status.json and wandb
history           a run as its log.jsonl tells it, for plot.py; imports no torch
fit               loss against size and tokens, from the ends of runs, for plot.py; imports no torch
page              plot.py's HTML page, of the template page.html; imports no torch
hf                Hugging Face's GPT-2 and Llama: their weights read and written
hf_config         their config.json and tokenizer files; imports no torch
trained           loads a trained model and its tokenizer

train.py, the other scripts and the wing measure import this wing; the wing corpus imports run.files alone. It imports
everything but train.py and the scripts.
"""
