"""Single operations on one NVIDIA GPU: the forms in fast/ beside what torch.compile makes of plain PyTorch.

The loss is also compared with Liger's and CCE's where those packages are installed.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

import kernels
import model as models
from configurator import UserError, refuse, too_small
from measure.floor import clock, three_matmuls
from run.logger import device_name
from settings import GPTConfig

GPT2 = GPTConfig(n_embd=768, n_head=12)


def measure(cfg):
    """Prints ms, forward and backward together, and MiB of each operation; cfg: a bench.OpsConfig."""
    refuse(too_small(cfg, {"rounds": 1}))
    if not torch.cuda.is_available():
        raise UserError("bench.py ops needs an NVIDIA GPU, none found")
    if reason := kernels.serve(torch.device(cfg.device)):
        raise UserError(f"bench.py ops compares the fast forms, which are off: {reason}")
    from fast import hopper

    print(
        f"{device_name(torch.device(cfg.device))}, torch {torch.__version__}; bf16; forward and backward together\n"
    )
    print(f"{'linear + cross-entropy, mean':<44}{'ms':>10}{'MiB':>10}")
    for N, C, V, vocab in [(65_536, 768, 50_304, 50_257), (32_768, 4_096, 128_256, 128_256)]:
        loss_table(N, C, V, vocab, cfg.rounds)
    print(f"\n{'65,536 x 768':<44}{'ms':>10}")
    sublayer_table(cfg.rounds)
    if hopper.available(torch.device(cfg.device)):
        print(f"\n{'GEMMs, 65,536 x 768 x 3,072, 200 back to back':<55}{'us':>9}")
        gemm_table(cfg.rounds)


# The operations as model.py calls them, which choose their fast form by themselves.


def our_loss(x, head, targets, vocab_size, logits_mib):
    """Mean loss with at most logits_mib of logits alive at a time."""
    kernels.LOGITS_MIB = logits_mib
    return kernels.linear_cross_entropy(x, head, targets, "mean", vocab_size)


def our_add_norm(x, update, norm):
    """(x + update, norm(x + update))"""
    return kernels.add_norm(x, update, norm)


def our_mlp(x, mlp):
    """GELU MLP by kernels.mlp; mlp: model.py's."""
    return kernels.mlp(x, mlp.up, kernels.gelu, mlp.proj)


# The same in plain PyTorch, for torch.compile.


def plain_loss(x, head, targets, vocab_size):
    return kernels.plain_cross_entropy(F.linear(x, head.weight), targets, "mean", vocab_size, None, 0.0, 0.0)


def plain_add_norm(x, update, norm):
    total = x + update
    return total, F.layer_norm(total.float(), norm.normalized_shape, norm.weight, norm.bias, norm.eps).to(
        x.dtype
    )


def plain_mlp(x, mlp):
    return F.linear(kernels.gelu(F.linear(x, mlp.up.weight, mlp.up.bias)), mlp.proj.weight, mlp.proj.bias)


def loss_table(N, C, V, vocab, rounds):
    """Prints time and memory of linear + cross-entropy for x: (N, C), weight: (V, C)."""
    x = torch.randn(1, N, C, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    head = nn.Linear(C, V, bias=False, device="cuda", dtype=torch.bfloat16)
    weight = nn.init.normal_(head.weight, std=0.02)
    targets = torch.randint(0, vocab, (1, N), device="cuda")
    compiled = torch.compile(plain_loss)
    rows = [
        ("torch.compile", lambda: compiled(x, head, targets, vocab)),
        ("ours, 256 MiB of logits at a time", lambda: our_loss(x, head, targets, vocab, 256)),
        ("ours, 1 GiB", lambda: our_loss(x, head, targets, vocab, 1024)),
        ("Liger", liger(x, weight, targets)),
        ("CCE", cce(x, weight, targets)),
    ]
    print(f"{N:,} x {C:,} x {V:,}")
    print(f"{'  three GEMMs alone':<44}{sum(map(clock, three_matmuls(N, C, V, 'cuda'))):10.1f}")
    torch.cuda.empty_cache()
    for name, compute in rows:
        if compute is None:
            print(f"  {name:<42}{'not installed':>20}")
            continue

        def work(compute=compute):
            compute().backward()
            x.grad = weight.grad = None

        work()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        mib = (torch.cuda.max_memory_allocated() - before) / 2**20
        print(f"  {name:<42}{clock(work, rounds, 1):10.1f}{mib:10.0f}", flush=True)


def liger(x, weight, targets):
    """Liger's loss as a call, None where it is not installed."""
    try:
        from liger_kernel.ops.fused_linear_cross_entropy import (
            LigerFusedLinearCrossEntropyFunction as Function,
        )
    except ImportError:
        return None
    flat = targets.flatten()

    def loss():
        result = Function.apply(x[0], weight, flat)
        return result[0] if isinstance(result, tuple) else result

    return loss


def cce(x, weight, targets):
    """Apple's cut cross-entropy as a call, None where it is not installed."""
    try:
        from cut_cross_entropy import linear_cross_entropy
    except ImportError:
        return None
    return lambda: linear_cross_entropy(x, weight, targets)


def sublayers(device):
    """(LayerNorm, MLP) of GPT-2 124M as model.py makes them: another class of layer takes no fast form."""
    return models.make_norm(GPT2).to(device), models.make_mlp(GPT2).to(device)


def sublayer_table(rounds):
    """Prints times of residual add + LayerNorm, the GELU MLP, and attention by backend, at GPT-2 124M's shapes."""
    B, T, C, H = 64, 1024, GPT2.n_embd, GPT2.n_head
    x, update, dy = (torch.randn(B, T, C, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    x.requires_grad_(), update.requires_grad_()
    norm, mlp = sublayers("cuda")
    mlp_16 = sublayers("cuda")[1].bfloat16()
    compiled_norm, compiled_mlp = torch.compile(plain_add_norm), torch.compile(plain_mlp)
    with torch.autocast("cuda", torch.bfloat16):  # as in training
        timed(rounds, "residual + LayerNorm, torch.compile", lambda: compiled_norm(x, update, norm), (dy, dy))
        timed(rounds, "  ours", lambda: our_add_norm(x, update, norm), (dy, dy))
        timed(rounds, "GELU MLP, torch.compile", lambda: (compiled_mlp(x, mlp_16),), (dy,))
        timed(rounds, "  ours", lambda: (our_mlp(x, mlp),), (dy,))
    q, k, v = (
        torch.randn(B, T, H, C // H, device="cuda", dtype=torch.bfloat16).transpose(1, 2).requires_grad_()
        for _ in range(3)
    )
    dy = torch.randn_like(q)
    for backend in ("cudnn", "flash", "efficient"):
        timed(rounds, f"attention, {backend}", lambda b=backend: (kernels.attention(q, k, v, b),), (dy,))


def timed(rounds, name, work, gradients):
    """Prints ms of work() and its backward from `gradients`."""

    def both():
        torch.autograd.backward(work(), gradients)

    print(f"{name:<44}{clock(both, rounds):10.3f}", flush=True)


def gemm_table(rounds):
    """Prints times of fast/hopper.py's GEMMs and cuBLASLt's; 200 in a row reach the power cap, as a step does."""
    from fast import cublas, hopper

    M, C, H = 65_536, 768, 3072
    x, up, down, before = (
        torch.randn(*shape, device="cuda", dtype=torch.bfloat16) for shape in ((M, C), (H, C), (C, H), (M, H))
    )
    bias, out, aux = before[0].clone(), torch.empty_like(before), torch.empty_like(before)

    def dgelu_in_two():
        return cublas.matmul(x, down, out, dgelu=before).sum(0, dtype=torch.float32)

    rows = [
        ("no epilogue, the fastest", lambda: cublas.matmul(x, up.t(), out)),
        (
            "bias + GELU, pre-activation kept, cuBLASLt",
            lambda: cublas.matmul(x, up.t(), out, bias=bias, gelu=aux),
        ),
        ("  ours", lambda: hopper.gelu(x, up, bias)),
        ("times GELU's derivative, column sums, cuBLASLt", dgelu_in_two),
        ("  ours", lambda: hopper.dgelu(x, down, before)),
    ]
    for name, work in rows:
        print(f"{name:<55}{clock(work, rounds, 200) * 1e3:9.0f}", flush=True)
