"""The operations that decide the speed: attention and the loss, each behind one function that model.py calls."""

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

LOGITS_BYTES = 2**30  # logits alive at a time where the loss is computed in chunks (fused.py)
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


def pick_attention(name, device, precision):
    """(backend, reason), with auto resolved."""
    return best_attention(device, precision) if name == "auto" else (name, "as set")


def attention(q, k, v, backend, dropout=0.0):
    """Causal softmax attention. q: (B, H, T, D); k, v: (B, H_kv, T, D) with H a multiple of H_kv -> (B, H, T, D).

    The backend is chosen inside the traced function, so that the compile cache keeps the choices apart.
    """
    grouped = q.size(1) != k.size(1)
    with sdpa_kernel(BACKENDS[backend], set_priority=True):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout, enable_gqa=grouped)


def attention_kept(q, k, v, backend):
    """(`attention` without dropout, what its backward takes besides): for KeptAttention, on CUDA cuDNN's or flash."""
    aten = torch.ops.aten
    if not q.is_cuda:
        return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)
    if backend == "cudnn":
        return aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, True)[:8]
    return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[:8]


class KeptAttention(torch.autograd.Function):
    """Attention of q, k, v whose result, from attention_kept, is at hand: no forward, the usual backward."""

    @staticmethod
    def forward(ctx, q, k, v, backend, *kept):
        ctx.save_for_backward(q, k, v)
        ctx.backend, ctx.kept = backend, kept
        return kept[0].view_as(kept[0])

    @staticmethod
    def backward(ctx, dy):
        (q, k, v), (out, lse, *rest), aten = ctx.saved_tensors, ctx.kept, torch.ops.aten
        if not q.is_cuda:
            grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(dy, q, k, v, out, lse, 0.0, True)
            return *grads, None, *(None for _ in ctx.kept)
        *lengths, seed, offset = rest
        if ctx.backend == "cudnn":
            state, last = (seed, offset, None), ()
            backward = aten._scaled_dot_product_cudnn_attention_backward
        else:
            state, last = (), (seed, offset)
            backward = aten._scaled_dot_product_flash_attention_backward
        grads = backward(dy, q, k, v, out, lse, *state, *lengths, 0.0, True, *last)
        return *grads, None, *(None for _ in ctx.kept)


def apply_rope(x, cos, sin):
    """Rotates x (B, H, T, D) by position, halves paired as Hugging Face does (dim i with i + D/2); in float32.

    cos, sin: (T, D). Source: https://arxiv.org/abs/2104.09864.
    """
    first, second = x.float().chunk(2, dim=-1)
    return (x.float() * cos + torch.cat((-second, first), dim=-1) * sin).type_as(x)


def linear_cross_entropy(
    x, weight, targets, reduction="mean", vocab_size=None, softcap=None, smoothing=0.0, z_loss=0.0
):
    """Cross-entropy of softmax(x @ weight.T) in float32, in nats.

    x: (B, T, C); weight: (V, C) with V >= vocab_size, the padding rows taking no part; targets: (B, T), -100 ignored.
    smoothing: the share of the target's probability that is spread evenly over the vocabulary. z_loss: the weight of
    logsumexp(logits)**2 (https://arxiv.org/abs/2204.02311, section 5).
    Returns a scalar for "mean" (over what is not ignored) and "sum", (B, T) for "none" (0 where ignored).
    """
    V = vocab_size or weight.size(0)
    logits = cap(F.linear(x, weight).float(), softcap)
    if weight.size(0) > V:
        # masked, not sliced off: rows of an odd length cost 39.6 ms instead of 31.8 (H200, 65,536 x 768 x 50,304)
        logits = torch.where(torch.arange(weight.size(0), device=x.device) < V, logits, -torch.inf)
    if smoothing or z_loss:
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)
        lse = logits.logsumexp(-1)
        more = smoothing * (lse - loss - logits[..., :V].mean(-1)) + z_loss * lse.square()
        loss = loss + more * (targets >= 0)
        return loss if reduction == "none" else loss.sum() / ((targets >= 0).sum() if reduction == "mean" else 1)
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction=reduction)
    return loss.view_as(targets) if reduction == "none" else loss


def cap(logits, softcap):
    """softcap * tanh(logits / softcap), Gemma 2's bound on the logits; None leaves them."""
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)
