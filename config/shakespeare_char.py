# python train.py config/shakespeare_char.py
# A GPT of 0.8M parameters on the characters of one text, after nanoGPT's Shakespeare on a CPU. Data
# of any text:
#   python fineweb.py --dataset=input.txt --tokenizer=chars --out_dir=data/shakespeare_char
# Two minutes on an idle CPU core. 1.1 MB of Shakespeare's plays (--vocab_size=72) end at a loss of
# 1.85.
out_dir = "out/shakespeare_char"
data_dir = "data/shakespeare_char"

vocab_size = 67  # tiny Shakespeare's 65 characters, U+FFFD, the separator; fineweb.py prints others
vocab_multiple = 1
n_layer, n_head, n_embd, bias = 4, 4, 128, False
block_size = 64

batch_size = 12
batch_tokens = 12 * 64
max_steps = 2000
lr = 3e-3  # 1e-3, nanoGPT's, ends at 1.95
warmup_steps = 100
min_lr_ratio = 0.1
beta2 = 0.99  # few tokens in a step
shuffle_seed = 1337
compile = False  # compiling takes longer than it saves here

eval_interval = 250
eval_tokens = 50_000
sample_interval = 1000
sample_prompt = "The "
save_interval = 1000
log_interval = 50
