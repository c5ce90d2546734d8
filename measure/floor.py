"""Lower bounds of a training step on one GPU: its GEMMs and attention alone, in bf16; a clock for kernels."""

import torch

import kernels


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


def clock(work):
    """Median ms of work() on the GPU; its launches are hidden behind the L2 cache's clearing before it."""
    from triton.testing import do_bench

    return do_bench(work, return_mode="median")
