"""Time of a sampled token on one GPU, beside transformers'.

    python results/speed/sampling.py    # GPT-2 124M and Llama 3 8B's shape, random bf16 weights

First it compares greedy tokens in float32 with those without a cache, then prints ms a token of
1,000 tokens and the kernels of a step that take the most time. The weights of 8B take 16 GB.
"""

import importlib.util
import sys
import time
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import model as models
from fast import forms
from fast.chips import best_attention
from run import sampling
from settings import GPTConfig

GPU, NEW = torch.device("cuda"), 1000  # tokens of a text
LLAMA = dict(norm="rmsnorm", positions="rope", mlp="swiglu", bias=False, tie_embeddings=False)
SMALL = dict(vocab_size=512, block_size=512, n_layer=4, n_head=8, n_embd=256)
EIGHT = dict(n_layer=32, n_head=32, n_kv_head=8, n_embd=4096, n_hidden=14336, vocab_size=128256)
SHAPES = {
    "GPT-2 124M": dict(vocab_size=50257, vocab_multiple=128),
    "Llama 3 8B": dict(LLAMA, **EIGHT, block_size=8192, rope_theta=500000.0),
}


def build(shape, dtype):
    """A GPT with random weights, allocated in that dtype."""
    precision = "bf16" if dtype == torch.bfloat16 else "fp32"
    model = models.on_meta(GPTConfig(**shape, attention=best_attention(GPU, precision)[0]))
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return models.allocate(model, GPU, seed=0).eval()


def begin(rows, tokens):
    return torch.randint(0, 512, (rows, tokens), generator=torch.Generator().manual_seed(0)).to(GPU)


def same_tokens(name, shape):
    model = build(SMALL | shape, torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():  # larger, so that the tokens do not repeat
            parameter.add_(0.1 * torch.randn_like(parameter))
    ids = begin(2, 16)
    for kind, options in (("greedy", dict(temperature=0)), ("drawn", dict(top_k=50))):
        cache = sampling.make_cache(model, 0)
        plain = torch.tensor([*sampling.steps(model, ids, 200, **options)])
        found = torch.tensor([*sampling.steps(model, ids, 200, **options, cache=cache)])
        same = f"{int((found == plain).sum())} of {plain.numel()} ids are those without a cache"
        print(f"{name}, float32, {kind}: {same}; {len(plain.unique())} different ones", flush=True)


def timed(model, rows, new, prompt=16, **options):
    """(ms of a token after the first eight, ms until then), of `new` tokens in each row."""
    cache = sampling.make_cache(model, 0)
    began, times = time.perf_counter(), []
    for _ in sampling.steps(model, begin(rows, prompt), new, **options, cache=cache):
        times.append(time.perf_counter() - began)
    return 1e3 * (times[-1] - times[7]) / (len(times) - 8), 1e3 * times[7]


def measure(name, shape):
    model = build(shape, torch.bfloat16)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    print(f"{name}: weights {size / 1e9:.2f} GB, {size / 4.8e9:.2f} ms at 4.8 TB/s", flush=True)
    forms.enable(GPU)
    for rows, top_k in ((1, 50), (1, 1), (32, 50)):
        options = dict(temperature=float(top_k > 1), top_k=top_k)  # 0: greedy
        ms, first = timed(model, rows, NEW, **options)
        words = f"{ms:6.3f} ms a token (the first 8: {first:6.1f} ms)"
        print(f"  batch {rows:2} top_k={top_k:<2}  {words}", flush=True)
    print_kernels(model)
    if model.cfg.block_size > 8000:
        ms, _ = timed(model, 1, 200, prompt=7680, temperature=0)
        print(f"  greedy after 7,680 tokens: {ms:.3f} ms a token", flush=True)


@torch.no_grad()
def print_kernels(model):
    """The GPU's time in one step at batch 1 after 500 tokens, as the graph runs it."""
    ids = begin(1, 501)
    cache = sampling.make_cache(model, 0)
    cache.prefill(ids[:, :-1], room=1016)
    cache.step(ids[:, -1], 500)
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        cache.step(ids[:, -1], 500)
        torch.cuda.synchronize()
    found = sorted(seen.key_averages(), key=lambda row: -row.self_device_time_total)
    total, count = sum(row.self_device_time_total for row in found), sum(row.count for row in found)
    print(f"    a step: {total / 1e3:.3f} ms in {count} kernels; most of it:")
    for row in found[:16]:
        words = f"{row.self_device_time_total:8.1f} us  {row.count:4} x  {row.key[:90]}"
        print(f"      {words}", flush=True)


def peer():
    """transformers' generate for GPT-2 124M, with a static cache; its first calls may compile."""
    import transformers

    config = transformers.GPT2Config()
    theirs = transformers.GPT2LMHeadModel(config).to(GPU, torch.bfloat16).eval()
    ids = begin(1, 16)
    options = dict(do_sample=False, pad_token_id=0, cache_implementation="static")
    for new in (64, 64, 400):
        began = time.perf_counter()
        theirs.generate(ids, min_new_tokens=new, max_new_tokens=new, **options)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - began
        print(f"  transformers, static cache: {1e3 * seconds / new:.3f} ms a token of {new}")


def main():
    if not torch.cuda.is_available():
        sys.exit("error: needs an NVIDIA GPU, and none was found")
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}")
    same_tokens("GPT-2", {})
    same_tokens("Llama", dict(LLAMA, n_kv_head=2, qk_norm=True))
    with torch.autocast("cuda", torch.bfloat16):
        for name, shape in SHAPES.items():
            measure(name, shape)
    if importlib.util.find_spec("transformers"):
        peer()


if __name__ == "__main__":
    main()
