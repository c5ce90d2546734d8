"""Single operations on one NVIDIA GPU: the fused kernels in fast/ beside torch.compile of plain PyTorch.

The loss is also compared with Liger's and CCE's where those packages are installed.
"""

import contextlib

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
    device = torch.device(cfg.device)
    if reason := kernels.serve(device):
        raise UserError(f"bench.py ops compares the fused kernels, which are off: {reason}")
    print(f"{device_name(device)}, torch {torch.__version__}; bf16; forward and backward together\n")
    print(f"{'linear + cross-entropy, mean':<44}{'ms':>10}{'MiB':>10}")
    for shape in [(65_536, 768, 50_304, 50_257), (32_768, 4_096, 128_256, 128_256)]:
        loss_table(*shape, cfg.rounds)
    print(f"\n{'65,536 x 768':<44}{'ms':>10}")
    sublayer_table(cfg.rounds)


# The same in plain PyTorch, for torch.compile.


def plain_loss(x, head, targets, vocab_size):
    logits = F.linear(x, head.weight)[..., :vocab_size].float()
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def plain_norm(x, norm):
    return F.layer_norm(x.float(), norm.normalized_shape, norm.weight, norm.bias, norm.eps).to(x.dtype)


def plain_mlp(x, mlp):
    return F.linear(kernels.gelu(F.linear(x, mlp.up.weight, mlp.up.bias)), mlp.proj.weight, mlp.proj.bias)


def loss_table(N, C, V, vocab, rounds):
    """Prints time and memory of linear + cross-entropy for x: (N, C), weight: (V, C)."""
    x = torch.randn(1, N, C, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    head = kernels.Linear(C, V, False, "cuda", torch.bfloat16)
    weight = torch.nn.init.normal_(head.weight, std=0.02)
    targets = torch.randint(0, vocab, (1, N), device="cuda")
    compiled = torch.compile(plain_loss)
    rows = {
        "torch.compile": lambda: compiled(x, head, targets, vocab),
        "ours": lambda: kernels.linear_cross_entropy(x, head, targets, "mean", vocab),
    } | others(x, weight, targets)
    print(f"{N:,} x {C:,} x {V:,}")
    print(f"{'  three GEMMs alone':<44}{sum(map(clock, three_matmuls(N, C, V, 'cuda'))):10.1f}")
    torch.cuda.empty_cache()
    for name, compute in rows.items():

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


def others(x, weight, targets):
    """{name: call} of Liger's loss and Apple's cut cross-entropy, where they are installed."""
    calls, flat = {}, targets.flatten()
    with contextlib.suppress(ImportError):
        from liger_kernel.ops import fused_linear_cross_entropy as liger

        calls["Liger"] = lambda: liger.LigerFusedLinearCrossEntropyFunction.apply(x[0], weight, flat)[0]
    with contextlib.suppress(ImportError):
        from cut_cross_entropy import linear_cross_entropy

        calls["CCE"] = lambda: linear_cross_entropy(x, weight, targets)
    return calls


def sublayers(device):
    """(LayerNorm, MLP) of GPT-2 124M as model.py makes them: another class of layer takes no fused kernel."""
    return models.make_norm(GPT2).to(device), models.make_mlp(GPT2).to(device)


def sublayer_table(rounds):
    """Prints times of LayerNorm, the GELU MLP, and attention by backend, at GPT-2 124M's shapes."""
    B, T, C, H = 64, 1024, GPT2.n_embd, GPT2.n_head
    x, dy = (torch.randn(B, T, C, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    x.requires_grad_()
    norm, mlp = sublayers("cuda")
    mlp_16 = sublayers("cuda")[1].bfloat16()
    compiled_norm, compiled_mlp = torch.compile(plain_norm), torch.compile(plain_mlp)
    with torch.autocast("cuda", torch.bfloat16):  # as in training
        timed(rounds, "LayerNorm, torch.compile", lambda: compiled_norm(x, norm), dy)
        timed(rounds, "  ours", lambda: norm(x), dy)
        timed(rounds, "GELU MLP, torch.compile", lambda: compiled_mlp(x, mlp_16), dy)
        timed(rounds, "  ours", lambda: mlp(x), dy)
    q, k, v, dy = (
        torch.randn(B, T, H, C // H, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for _ in range(4)
    )
    for tensor in (q, k, v):
        tensor.requires_grad_()
    for backend in ("cudnn", "flash", "efficient"):
        timed(rounds, f"attention, {backend}", lambda b=backend: kernels.attention(q, k, v, b), dy)


def timed(rounds, name, work, gradient):
    """Prints ms of work() and its backward from `gradient`."""
    print(f"{name:<44}{clock(lambda: work().backward(gradient), rounds):10.3f}", flush=True)
