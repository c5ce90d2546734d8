"""Lower bounds of a training step on one GPU: its GEMMs and attention alone, in bf16; clocks for kernels."""

import statistics
import time

import torch

import kernels
from scale import parallel

GPU_CLOCK = 2e9  # cycles a second of a fast GPU: torch.cuda._sleep, which holds the GPU back, takes cycles


def floor_times(cfg, device):
    """{"GEMMs", "attention": ms of a micro-batch in bf16, forward and backward, each kernel timed alone}."""
    heads = [max(1, n // cfg.context_parallel) for n in (cfg.n_head, cfg.kv_heads, cfg.kv_heads)]
    options = dict(device=device, dtype=torch.bfloat16, requires_grad=True)
    q, k, v = (torch.randn(cfg.batch_size, n, cfg.block_size, cfg.head_size, **options) for n in heads)
    forward = lambda: kernels.attention(q, k, v, cfg.attention)
    y = forward()
    dy = torch.randn_like(y)
    attention = [forward, lambda: torch.autograd.grad(y, (q, k, v), dy, retain_graph=True)]
    gemms = [work for M, K in cfg.block_matmuls for work in three_matmuls(cfg.rank_tokens, K, M, device)]
    head = three_matmuls(cfg.rank_tokens, cfg.n_embd, cfg.padded_vocab, device)
    times = {"GEMMs": cfg.n_layer * sum(map(clock, gemms)) + sum(map(clock, head))}
    return times | {"attention": cfg.n_layer * sum(map(clock, attention))}


def three_matmuls(N, K, M, device):
    """Calls of a linear layer's three GEMMs, x @ W.T, dy @ W and dy.T @ x, for x: (N, K) and W: (M, K)."""
    x, w, dy = (torch.randn(s, device=device, dtype=torch.bfloat16) for s in ((N, K), (M, K), (N, M)))
    y, dx, dw = torch.empty_like(dy), torch.empty_like(x), torch.empty_like(w)
    products = [(x, w.t(), y), (dy, w, dx), (dy.t(), x, dw)]
    return [lambda p=p: torch.mm(p[0], p[1], out=p[2]) for p in products]


def clock(work, rounds=10, repeat=3):
    """Median ms of work() on the GPU, which waits until `repeat` calls are queued: launches do not count."""
    for _ in range(2):
        began = parallel.synchronize(torch.device("cuda"))
        work()
        launch = time.perf_counter() - began
    if parallel.synchronize(torch.device("cuda")) - began > 0.1:  # long work needs no repetition
        rounds, repeat = 3, 1
    times = []
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(int(repeat * launch * GPU_CLOCK))
        begin.record()
        for _ in range(repeat):
            work()
        end.record()
        times.append((begin, end))
    torch.cuda.synchronize()
    return statistics.median(b.elapsed_time(e) for b, e in times) / repeat
