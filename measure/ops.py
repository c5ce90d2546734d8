"""Single operations on one NVIDIA GPU: the fused kernels in fast/ beside torch.compile of plain PyTorch."""

import torch
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
    device = torch.device("cuda")
    if reason := kernels.serve(device):
        raise UserError(f"bench.py ops compares the fused kernels, which are off: {reason}")
    print(f"{device_name(device)}, torch {torch.__version__}; bf16; forward and backward together\n")
    print(f"{'':<44}{'ms':>10}{'MiB':>10}")
    for shape in [(65_536, 768, 50_304, 50_257), (32_768, 4_096, 128_256, 128_256)]:
        losses(*shape, cfg.rounds)
    sublayers(cfg.rounds)


def row(name, work, rounds, leaves=(), repeat=1):
    """Prints ms of work(), forward and backward, and its peak in MiB with the gradients of `leaves`."""

    def once():
        work()
        for leaf in leaves:
            leaf.grad = None

    once()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    once()
    mib = (torch.cuda.max_memory_allocated() - before) / 2**20
    print(f"  {name:<42}{clock(once, rounds, repeat):10.3f}{mib:10.0f}", flush=True)


def plain_norm(x, norm):
    return F.layer_norm(x.float(), norm.normalized_shape, norm.weight, norm.bias, norm.eps).to(x.dtype)


def plain_mlp(x, mlp):
    return F.linear(kernels.gelu(F.linear(x, mlp.up.weight, mlp.up.bias)), mlp.proj.weight, mlp.proj.bias)


def losses(N, C, V, vocab, rounds):
    """Rows of linear + cross-entropy for x: (N, C), weight: (V, C)."""
    x = torch.randn(1, N, C, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    head = kernels.Linear(C, V, False, "cuda", torch.bfloat16)
    weight = torch.nn.init.normal_(head.weight, std=0.02)
    targets = torch.randint(0, vocab, (1, N), device="cuda")
    compiled = torch.compile(kernels.plain_loss)
    calls = {
        "torch.compile": lambda: compiled(x, weight, targets, "mean", vocab, None),
        "ours": lambda: kernels.linear_cross_entropy(x, head, targets, "mean", vocab),
    }
    print(f"linear + cross-entropy, {N:,} x {C:,} x {V:,}")
    print(f"  {'three GEMMs alone':<42}{sum(map(clock, three_matmuls(N, C, V, 'cuda'))):10.3f}")
    torch.cuda.empty_cache()
    for name, call in calls.items():
        row(name, lambda call=call: call().backward(), rounds, leaves=(x, weight))


def layers(device):
    """(LayerNorm, MLP) of GPT-2 124M as model.py makes them: another class of layer takes no fused kernel."""
    return models.make_norm(GPT2).to(device), models.make_mlp(GPT2).to(device)


def sublayers(rounds):
    """Rows of LayerNorm, the GELU MLP, and attention by backend, at GPT-2 124M's shapes."""
    B, T, C, H = 64, 1024, GPT2.n_embd, GPT2.n_head
    bf16 = dict(device="cuda", dtype=torch.bfloat16)
    x, dy = torch.randn(B, T, C, **bf16, requires_grad=True), torch.randn(B, T, C, **bf16)
    (norm, mlp), mlp_16 = layers("cuda"), layers("cuda")[1].bfloat16()
    compiled_norm, compiled_mlp = torch.compile(plain_norm), torch.compile(plain_mlp)
    print(f"sublayers, {B * T:,} x {C}")
    with torch.autocast("cuda", torch.bfloat16):  # as in training
        for name, call in {
            "LayerNorm, torch.compile": lambda: compiled_norm(x, norm),
            "LayerNorm, ours": lambda: norm(x),
            "GELU MLP, torch.compile": lambda: compiled_mlp(x, mlp_16),
            "GELU MLP, ours": lambda: mlp(x),
        }.items():
            row(name, lambda call=call: call().backward(dy), rounds, repeat=3)
    q, k, v, dy = (torch.randn(B, T, H, C // H, **bf16).transpose(1, 2) for _ in range(4))
    q, k, v = (tensor.requires_grad_() for tensor in (q, k, v))
    for name in ("cudnn", "flash", "efficient"):
        work = lambda name=name: kernels.attention(q, k, v, name).backward(dy)
        row(f"attention, {name}", work, rounds, repeat=3)
