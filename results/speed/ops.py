"""The fused linear + cross-entropy on one NVIDIA GPU, beside torch.compile of plain PyTorch.

python results/speed/ops.py
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import kernels
from fast import forms
from run.logger import device_name


def clock(work):
    """Median ms of work() on the GPU; clearing the L2 cache before it hides its launches."""
    from triton.testing import do_bench

    return do_bench(work, return_mode="median")


def main():
    """Prints ms, forward and backward together, and MiB of each operation."""
    device = torch.device("cuda")
    if reason := forms.enable(device) if torch.cuda.is_available() else "none found":
        sys.exit(f"error: it needs an NVIDIA GPU that runs the fused kernels: {reason}")
    print(
        f"{device_name(device)}, torch {torch.__version__}; bf16; forward and backward together\n"
    )
    print(f"{'':<44}{'ms':>10}{'MiB':>10}")
    for shape in [(65_536, 768, 50_304, 50_257), (32_768, 4_096, 128_256, 128_256)]:
        losses(*shape)


def losses(N, C, V, vocab):
    """Rows of linear + cross-entropy for x: (N, C), weight: (V, C)."""
    x = torch.randn(1, N, C, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    head = kernels.Linear(C, V, False, "cuda", torch.bfloat16)
    weight = torch.nn.init.normal_(head.weight, std=0.02)
    targets = torch.randint(0, vocab, (1, N), device="cuda")
    compiled = torch.compile(kernels.plain_cross_entropy)
    calls = {
        "torch.compile": lambda: compiled(x, weight, targets, "mean", vocab),
        "ours": lambda: kernels.linear_cross_entropy(x, head, targets, "mean", vocab)[0],
    }
    print(f"linear + cross-entropy, {N:,} x {C:,} x {V:,}")
    random = lambda *shape: torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    own, w, dy = random(N, C), random(V, C), random(N, V)
    pairs = [(own, w.t()), (dy, w), (dy.t(), own)]  # the logits, dx and dW
    alone = sum(clock(lambda pair=pair: torch.mm(*pair)) for pair in pairs)
    print(f"  {'three GEMMs alone':<42}{alone:10.3f}")
    del own, w, dy, pairs
    torch.cuda.empty_cache()
    for name, call in calls.items():
        once = lambda call=call: torch.autograd.grad(call(), (x, weight))
        once()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        once()
        mib = (torch.cuda.max_memory_allocated() - before) / 2**20
        print(f"  {name:<42}{clock(once):10.3f}{mib:10.0f}", flush=True)


if __name__ == "__main__":
    main()
