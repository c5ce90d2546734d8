"""The operations that model.py calls: each with its definition in plain PyTorch, and the choice of its fast form.

A call is served by the operation's fast form (fast/, for NVIDIA GPUs in bf16 and fp8) where `choose` says so: by
device, dtype, shapes and layers, for each call. Everywhere else the definition below runs. Both compute the same,
so an edit of model.py takes effect on every device; an edit that takes an operation out of reach of its fast form costs
that operation's speed, and the start of a run lists it (run/flops.py).
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from fast import chips
from fast.attention import SameLayout

try:
    from fast import fp8, fusion
    from fast import linear as fast_linear
    from fast import loss as fast_loss
    from fast import mlp as fast_mlp
    from fast import norm as fast_norm
    from fast import rope as fast_rope

    MISSING = None
except ImportError as error:
    MISSING = f"the package {error.name} is not installed"

chips.without_amx()  # on a CPU where it would end the process
served = set()  # types of device whose calls may take fast forms, see `serve`
LOGITS_MIB = 1024  # of logits that the loss holds at a time: more tokens than fit are computed in chunks
counting = None  # the run.flops.Census under way: it notes each call, of which the definition runs


# -- which form


def serve(device, ops="auto"):
    """Switches the fast forms on or off for calls on a torch.device; returns why they are off, or None.

    ops: auto or fused: on where the device can run them; torch: off.
    """
    reason = "ops=torch" if ops == "torch" else unable(device)
    (served.discard if reason else served.add)(device.type)
    if reason is None:
        fusion.register()
    return reason


def unable(device):
    """Why a device cannot run the fast forms, or None."""
    return chips.no_fast_forms(chips.of(device)) or MISSING


def choose(operation, x, *layers, unless=None, inner=0):
    """Whether the fast form serves this call on x and the parameters of these layers; `unless`: a reason why not.

    inner: how many other operations the definition calls.
    """
    if counting is None:
        return unless is None and unserved(x.device.type, computed_in(x), layers) is None
    counting.note(operation, unless or unserved(*counting.where, layers), inner)
    return False


def edited(*layers):
    """Why the fast form cannot read the layers' parameters instead of calling them: another forward, or hooks."""
    if any(type(layer) not in (Linear, LayerNorm, RMSNorm, nn.RMSNorm) for layer in layers):
        return "another kind of layer"
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return "a layer with hooks" if any(getattr(layer, kind) for layer in layers for kind in kinds) else None


def unserved(device_type, dtype, layers):
    """Why a call on this device in this dtype with these layers takes the definition; None: it takes the fast form."""
    if device_type not in served:
        return "no fast forms here"
    if dtype != torch.bfloat16:
        return f"computed in {str(dtype).removeprefix('torch.')}"
    if any(size % 8 for layer in layers for p in layer.parameters() for size in p.shape):
        return "a width is no multiple of 8"
    return None


def computed_in(x):
    """The dtype that a GEMM of x computes in: autocast's if it is on, else x's."""
    device = x.device.type
    if device == "meta":  # autocast does not support it
        return x.dtype
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def operand(x):
    """x as the fast forms' GEMMs take it; the copy is for an edit's slice or transpose, model.py's x are contiguous."""
    return x.to(torch.bfloat16).contiguous()


def in_fp8(*layers):
    """Whether the GEMMs of all these layers run in fp8 in this call (fast/fp8.py, `track`)."""
    return all(hasattr(layer, "w_amax") and layer.training for layer in layers)


def weight(layer):
    """The layer's weight as a matrix, also where FSDP2 gathered it in 8 bits."""
    return fp8.dense(layer) if hasattr(layer, "w_amax") else layer.weight


# -- linear layers


class Linear(nn.Linear):
    def forward(self, x):
        return linear(x, self)


def linear(x, layer):
    """x W^T + b; x: (..., K) -> (..., N)."""
    if not choose("linear", x, layer):
        return F.linear(x, weight(layer), layer.bias)
    x = operand(x)
    if in_fp8(layer):
        return fp8.linear(x, layer)
    return fast_linear.linear(x, weight(layer), layer.bias, torch.is_grad_enabled())


def qkv(x, layer, heads, head_dim):
    """The projection to q, k and v by one layer; x: (B, T, C), heads: how many each has -> (B, H, T, D) each."""
    if not choose("qkv", x, layer, unless=edited(layer), inner=1):
        return layer(x).unflatten(-1, (-1, head_dim)).transpose(1, 2).split(heads, dim=1)
    x = operand(x)
    if in_fp8(layer):
        return fp8.qkv(x, layer, heads, head_dim)
    return fast_linear.qkv(x, weight(layer), layer.bias, heads, head_dim, torch.is_grad_enabled())


def gelu(x):
    return F.gelu(x, approximate="tanh")  # GPT-2's own form


def relu2(x):
    return F.relu(x).square()  # https://arxiv.org/abs/2109.08668


def swiglu(x):
    """silu(gate) * up of the halves of x: (..., 2 H) -> (..., H); https://arxiv.org/abs/2002.05202."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


FUSED = {gelu: "gelu", relu2: "relu2", swiglu: "swiglu"}  # activations that fast/mlp.py and fast/fp8.py know


def mlp(x, up, activation, down):
    """down(activation(up(x))); x: (..., C) -> (..., C)."""
    kind, reason = FUSED.get(activation), edited(up, down)
    if kind is None or in_fp8(up) != in_fp8(down):
        reason = "another activation" if kind is None else "one of two layers in fp8"
    if not choose("mlp", x, up, down, unless=reason, inner=2):
        return down(activation(up(x)))
    x = operand(x)
    if in_fp8(up):
        return fp8.mlp(kind, x, up, down)
    return fast_mlp.mlp(kind, x, weight(up), up.bias, weight(down), down.bias, torch.is_grad_enabled())


# -- residual stream and norms


def residual(x):
    """x as the residual stream: in bf16 where GEMMs compute in bf16 (GPT-2 124M, one H200: 4% less time, same loss)."""
    return x.to(torch.bfloat16) if computed_in(x) == torch.bfloat16 else x


class LayerNorm(nn.LayerNorm):
    def forward(self, x):
        return norm(x, self, super().forward)


class RMSNorm(nn.RMSNorm):
    def forward(self, x):
        return norm(x, self, super().forward)


def norm(x, layer, definition):
    """LayerNorm or RMSNorm of x: (..., C), whose definition is PyTorch's."""
    if choose("norm", x, layer, unless=unusual(x, layer)):
        return fast_norm.norm(x.contiguous(), *norm_options(layer))
    return definition(x)


def add_norm(x, update, layer):
    """(x + update, layer(x + update)): a residual addition and the norm that follows it; layer: any norm."""
    reason = edited(layer) or unusual(x, layer)
    if update.shape != x.shape or torch.promote_types(x.dtype, update.dtype) != x.dtype:
        reason = "the sum has another shape or dtype than its terms"
    if choose("add_norm", x, layer, unless=reason, inner=1):
        return fast_norm.add_norm(x, update, *norm_options(layer))
    x = x + update
    return x, layer(x)


def unusual(x, layer):
    """A reason against the fast form of a norm, which has a weight and an eps and is taken over the last dimension."""
    if layer.weight is None or layer.eps is None or layer.weight.shape != x.shape[-1:]:
        return "a norm without weight or eps, or over several dimensions"
    return None


def norm_options(layer):
    """(weight, shift, eps, whether it subtracts the mean) of a norm."""
    return layer.weight, getattr(layer, "bias", None), layer.eps, isinstance(layer, nn.LayerNorm)


# -- positions and attention


def rope(x, layer, cos, sin):
    """Rotates layer(x): (B, H, T, D) by position, in float32; layer: any norm, or nn.Identity.

    Dimension i is paired with i + D/2, as in Hugging Face's Llama. cos, sin: (T, D). https://arxiv.org/abs/2104.09864.
    """
    normed, reason = type(layer) is not nn.Identity, None
    if normed:  # `edited` and `unusual` let a LayerNorm pass, whose mean the fast form would not subtract
        reason = (
            edited(layer) or unusual(x, layer) if isinstance(layer, nn.RMSNorm) else "another kind of layer"
        )
    if not all(t.shape == x.shape[-2:] and t.is_contiguous() for t in (cos, sin)):
        reason = "tables of another shape or layout"
    if choose("rope", x, layer, unless=reason, inner=int(type(layer) is RMSNorm)):
        return fast_rope.rope(x, layer.weight if normed else None, layer.eps if normed else 0.0, cos, sin)
    return Rotation.apply(layer(x), cos, sin)


def rotated(x, cos, sin):
    first, second = x.float().chunk(2, dim=-1)
    return (x.float() * cos + torch.cat((-second, first), dim=-1) * sin).type_as(x)


class Rotation(torch.autograd.Function):
    """Backward of RoPE is RoPE with the opposite angle; the one that torch.compile derives takes 3 times as long."""

    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(cos, sin)
        return rotated(x, cos, sin)

    @staticmethod
    def backward(ctx, dy):
        cos, sin = ctx.saved_tensors
        return rotated(dy, cos, -sin), None, None


# Order of preference for each setting of `attention`; the first that takes the shapes, dtype and device runs.
BACKENDS = {
    "cudnn": [
        SDPBackend.CUDNN_ATTENTION,
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.MATH,
    ],
    "flash": [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH],
    "efficient": [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH],
    "math": [SDPBackend.MATH],
}
BACKENDS["auto"] = BACKENDS[
    "flash"
]  # for a model on meta; `model.build` replaces "auto" by the device's best


def attention(q, k, v, backend, dropout=0.0):
    """Causal softmax attention. q: (B, H, T, D); k, v: (B, H_kv, T, D) with H a multiple of H_kv -> (B, H, T, D).

    The backend is chosen inside the traced function, so that the compile cache keeps the choices apart.
    """
    if counting is not None:
        return counting.attended(q, k, v)
    grouped = q.size(1) != k.size(1)
    with sdpa_kernel(BACKENDS[backend], set_priority=True):
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout, enable_gqa=grouped)
    return SameLayout.apply(y) if backend == "cudnn" else y


# -- the loss


def linear_cross_entropy(
    x, head, targets, reduction="mean", vocab_size=None, softcap=None, smoothing=0.0, z_loss=0.0
):
    """Cross-entropy of softmax(head(x)) in float32, in nats; head: an nn.Linear without bias.

    x: (B, T, C); head.weight: (V, C) with V >= vocab_size, the padding rows taking no part; targets: (B, T), -100 is
    ignored. smoothing: the share of the target's probability that is spread evenly over the vocabulary. z_loss: the
    weight of logsumexp(logits)**2 (https://arxiv.org/abs/2204.02311, section 5).
    Returns a scalar for "mean" (over the targets that are not ignored) and "sum", (B, T) for "none" (0 where ignored).
    """
    V, trains = vocab_size or head.weight.size(0), torch.is_grad_enabled()
    options = (V, softcap, smoothing, z_loss)
    # with gradients, a weight for each token is known in the backward only
    reason = "a loss for each token, with gradients" if reduction == "none" and trains else None
    if not choose("linear_cross_entropy", x, head, unless=reason):
        if targets.numel() <= int(LOGITS_MIB * 2**20) // (4 * head.weight.size(0)):
            return plain_loss(x, head.weight, targets, reduction, *options)
        return chunked_loss(torch.compiler.is_compiling(), x, head.weight, targets, reduction, *options)
    x = operand(x)
    if in_fp8(head) and trains and fp8.suits(x):
        loss = fp8.linear_cross_entropy(x, head, targets, options)
        return fast_loss.reduced(loss, targets, reduction)
    return fast_loss.linear_cross_entropy(x, head.weight, targets, reduction, *options)


def plain_loss(x, weight, targets, reduction, *options):
    """The definition of linear_cross_entropy, with the logits of all tokens at once."""
    return plain_cross_entropy(F.linear(x, weight), targets, reduction, *options)


@torch.compiler.disable  # one graph of all chunks holds the logits of several at a time: 767 MiB, not 295 (CPU)
def chunked_loss(compiled, x, weight, targets, reduction, *options):
    """plain_loss of as many tokens at a time as LOGITS_MIB allows, each chunk under activation checkpointing.

    The logits of a chunk are freed after its forward and computed again in its backward: one more GEMM of the head.
    """
    rows = 2 ** max(0, (int(LOGITS_MIB * 2**20) // (4 * weight.size(0))).bit_length() - 1)  # as in fast/loss.py
    loss, each = (
        torch.compile(plain_loss) if compiled else plain_loss,
        "none" if reduction == "none" else "sum",
    )
    weight = weight.view_as(
        weight
    )  # not a leaf: autocast would share one cast, whose gradients add up in 16 bits
    chunks = zip(x.flatten(0, -2).split(rows), targets.flatten().split(rows), strict=True)
    stateless = dict(use_reentrant=False, preserve_rng_state=False)
    losses = [checkpoint(loss, xi, weight, ti, each, *options, **stateless) for xi, ti in chunks]
    if reduction == "none":
        return torch.cat(losses).view_as(targets)
    return torch.stack(losses).sum() / ((targets >= 0).sum() if reduction == "mean" else 1)


def plain_cross_entropy(logits, targets, reduction, V, softcap, smoothing, z_loss):
    """Cross-entropy from the logits, (..., V and padding); targets: (...)."""
    logits = cap(logits.float(), softcap)
    if logits.size(-1) > V:
        # masked, not sliced off: rows of an odd length cost 39.6 ms instead of 31.8 (H200, 65,536 x 768 x 50,304)
        logits = torch.where(torch.arange(logits.size(-1), device=logits.device) < V, logits, -torch.inf)
    if smoothing or z_loss:
        loss = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="none").view_as(targets)
        lse = logits.logsumexp(-1)
        more = smoothing * (lse - loss - logits[..., :V].mean(-1)) + z_loss * lse.square()
        loss = loss + more * (targets >= 0)
        return (
            loss if reduction == "none" else loss.sum() / ((targets >= 0).sum() if reduction == "mean" else 1)
        )
    loss = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction=reduction)
    return loss.view_as(targets) if reduction == "none" else loss


def cap(logits, softcap):
    """softcap * tanh(logits / softcap), Gemma 2's bound on the logits; None leaves them."""
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)
