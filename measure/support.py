"""Which fast forms run on a GPU, and why others do not: this machine's, or one that is named.

The answers are those of the functions that choose at run time (fast/chips.py, kernels.py, fast/attention.py).
"""

import torch

import kernels
from fast import attention, chips
from run.flops import Account
from run.logger import device_name
from scale import documents, parallel
from settings import Config


def measure(cfg):
    """Prints the table; cfg: a bench.SupportConfig. Raises UserError for a GPU of another name."""
    device = parallel.pick_device(cfg.device) if cfg.gpu is None else None
    chip = chips.of(device) if cfg.gpu is None else chips.named(cfg.gpu)
    name = (
        f"{device_name(device)}, torch {torch.__version__}"
        if device
        else f"{cfg.gpu.upper()}, by its name alone"
    )
    print(name + (", compute capability {}.{}".format(*chip.capability) if chip.maker == "nvidia" else ""))
    print(f"\n{'':<30}{'runs':<6}how, or why not")
    for form, reason, how in rows(chip, device):
        print(f"{form:<30}{'no' if reason else 'yes':<6}{reason or how}")
    print(f"\n{tested(chip)}")


def rows(chip, device=None):
    """[(form, None or why it does not run, how it does)]. device: its packages are looked for too; None: for none."""
    plain = chips.no_fast_forms(chip) if device is None else kernels.unable(device)
    backend, why = attention.best_on(chip) if device is None else attention.best_attention(device)
    gpu = chip.maker in ("nvidia", "amd")
    in_fp8 = chips.no_fp8(chip) or plain
    not_cudnn = None if backend == "cudnn" else chips.no_cudnn_attention(chip) or "PyTorch has no cuDNN here"
    masks = documents.describe(torch.device("cuda" if gpu else "cpu"), "bf16" if gpu else "fp32")
    return [
        ("precision=bf16, by default", chips.no_bf16(chip), "this GPU has bf16 matrix units"),
        *((f"kernels.{name}", reason, "in bf16") for name, reason in operations(plain)),
        ("precision=fp8", in_fp8, "linear, qkv, mlp and linear_cross_entropy, while they train"),
        (
            "CUDA kernels for Hopper",
            not_hopper(chip, device),
            "GEMMs with activation or softmax; the backward of qkv",
        ),
        ("attention=cudnn", not_cudnn, why),
        ("attention=auto", None, f"{backend}: {why}"),
        ("document_mask", None, masks),
        (
            "optimizer=adamw8bit",
            None if gpu else "plain PyTorch updates, slowly",
            "one Triton kernel for a tensor",
        ),
    ]


def operations(plain):
    """[(operation of kernels.py, None or why its definition runs)]; plain: why all definitions do, or None."""
    before = set(kernels.served)
    (kernels.served.discard if plain else kernels.served.add)("cuda")
    try:
        calls = Account(Config(n_layer=2, positions="rope", precision="bf16"), torch.device("cuda")).calls
    finally:
        kernels.served.clear()
        kernels.served.update(before)
    return [(name, reason and plain or reason) for name, reason in calls]


def not_hopper(chip, device):
    """Why the kernels of fast/hopper.py do not run, or None."""
    reason = chips.no_hopper_kernels(chip)
    if reason or device is None:
        return reason
    if kernels.MISSING:
        return kernels.MISSING
    from fast import hopper

    return None if hopper.available(device) else "NVRTC, which compiles them, is missing"


def tested(chip):
    """What is known of a kind of GPU besides what the code says."""
    if chips.no_fast_forms(chip):
        return "Operations run as kernels.py defines them: with the same results, more slowly."
    if chip == chips.NAMED["h200"]:
        return "H100s and H200s were measured (docs/results.md), and every test for a GPU ran on them."
    if chip in chips.NAMED.values():
        return "The kernels compile and fit (tests/test_targets.py); no run on such a GPU was measured."
    return "No test compiles the kernels for this compute capability, and no run on it was measured."
