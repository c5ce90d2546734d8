"""The operations that decide the speed: attention and the loss, each behind one function that model.py calls."""

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

# Order of preference per setting of `attention`; the first that takes the given shapes, dtype and device runs.
BACKENDS = {
    "cudnn": [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH],
    "flash": [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH],
    "efficient": [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH],
    "math": [SDPBackend.MATH],
}
BACKENDS["auto"] = BACKENDS["flash"]  # a model built without `model.build`, which replaces "auto" by the device's best


def best_attention(device, precision="bf16"):
    """(backend, reason) for a torch.device: cuDNN on Hopper and later, where it is 1.5-2.4x as fast as flash."""
    if device.type != "cuda":
        return "flash", f"PyTorch's own on {device.type}"
    if precision in ("fp32", "tf32"):
        return "efficient", "cuDNN and flash take 16-bit numbers only"
    major, minor = torch.cuda.get_device_capability(device)
    if major >= 9 and torch.backends.cudnn.is_available():
        return "cudnn", f"fastest on compute capability {major}.{minor}"
    return "flash", f"fastest on compute capability {major}.{minor}"


def attention(q, k, v, backend, dropout=0.0):
    """Causal softmax attention. q: (B, H, T, D); k, v: (B, H_kv, T, D) with H a multiple of H_kv -> (B, H, T, D).

    The backend is chosen inside the traced function, so that the compile cache keeps the choices apart.
    """
    grouped = q.size(1) != k.size(1)
    with sdpa_kernel(BACKENDS[backend], set_priority=True):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout, enable_gqa=grouped)


def apply_rope(x, cos, sin):
    """Rotates x (B, H, T, D) by position, halves paired as Hugging Face does (dim i with i + D/2); in float32.

    cos, sin: (T, D). Source: https://arxiv.org/abs/2104.09864.
    """
    first, second = x.float().chunk(2, dim=-1)
    return (x.float() * cos + torch.cat((-second, first), dim=-1) * sin).type_as(x)


def linear_cross_entropy(x, weight, targets, vocab_size, reduction="mean", softcap=None):
    """Cross-entropy of softmax(x @ weight.T) in float32, in nats.

    x: (B, T, C); weight: (V, C) with V >= vocab_size, the padding rows taking no part; targets: (B, T), -100 ignored.
    Returns a scalar for "mean" and "sum", (B, T) for "none" (0 where ignored).
    """
    logits = cap(F.linear(x, weight).float(), softcap)
    if vocab_size < weight.size(0):
        # masked, not sliced off: rows of an odd length cost 39.6 ms instead of 31.8 (H200, 65,536 x 768 x 50,304)
        logits = torch.where(torch.arange(weight.size(0), device=x.device) < vocab_size, logits, -torch.inf)
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction=reduction)
    return loss.view_as(targets) if reduction == "none" else loss


def cap(logits, softcap):
    """softcap * tanh(logits / softcap), Gemma 2's bound on the logits; None leaves them."""
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)
