"""The operations that model.py calls: each in plain PyTorch, and the choice of its fused kernel.

For each call, `fused` chooses by device, dtype, shapes and layers: the fused kernel of fast/ (NVIDIA GPUs, in
bf16 and fp8), or plain PyTorch, which computes the same. So an edit of model.py takes effect on every device;
where no fused kernel can serve it, a run's start-up summary lists the operation (run/flops.py).
"""

import functools

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import fast
from fast import chips
from scale.generators import Replay

chips.without_amx()  # on a CPU where it would end the process
served = set()  # types of device whose calls may take fused kernels, see `serve`
compile_once = functools.cache(torch.compile)  # torch keeps what each call of torch.compile returns
counting = None  # the run.flops.Census under way: it notes each call, of which the plain PyTorch runs


# -- the choice


def serve(device, ops="auto"):
    """Switches the fused kernels on where a torch.device runs them, off with ops=torch; returns why off."""
    reason = "ops=torch" if ops == "torch" else chips.no_fused_kernels(chips.of(device)) or load()
    (served.discard if reason else served.add)(device.type)
    if reason is None:
        fast.fusion.register()
    return reason


def load():
    """Imports the fused kernels, fast.fp8 and so on, which need Triton; returns why that fails."""
    try:
        from fast import fp8, fusion, linear, loss, mlp, norm, rope  # noqa: F401
    except ImportError as error:
        return f"the package {error.name} is not installed"


def fused(operation, x, *layers, unless=None, inner=0):
    """Whether the fused kernel serves this call on x and the parameters of these layers.

    unless: {why not, in words: whether that is so}; inner: how many other operations plain PyTorch calls.
    """
    if counting is None:
        return obstacle(x.device.type, computed_in(x), layers, unless) is None
    counting.note(operation, obstacle(*counting.where, layers, unless), inner)
    return False


def obstacle(device_type, dtype, layers, unless):
    """Why a call on this device in this dtype runs in plain PyTorch; None: the fused kernel serves it."""
    for words, stands in (unless or {}).items():
        if stands:
            return words
    if device_type not in served:
        return "no fused kernels here"
    if dtype != torch.bfloat16:
        return f"computed in {str(dtype).removeprefix('torch.')}"
    odd = any(size % 8 for layer in layers for p in layer.parameters() for size in p.shape)
    return "a width is no multiple of 8" if odd else None


OTHER_LAYER = "another kind of layer, or one with hooks"


def other(*layers):
    """Whether the layers must be called, because a kernel that reads their parameters would do less."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    known = (Linear, LayerNorm, RMSNorm, nn.RMSNorm)
    return any(type(layer) not in known or any(getattr(layer, h) for h in hooks) for layer in layers)


def computed_in(x):
    """The dtype that a GEMM of x computes in: autocast's if it is on, else x's."""
    device = x.device.type
    if device == "meta":  # autocast does not support it
        return x.dtype
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def operand(x):
    """x as the fused kernels take it; only an edit's slice or transpose is copied."""
    return x.to(torch.bfloat16).contiguous()


def in_fp8(x, *layers):
    """Whether the GEMMs of all these layers run in fp8 in this call on x (fast/fp8.py, `track`)."""
    tracked = all(hasattr(layer, "w_amax") and layer.training for layer in layers)
    return tracked and x.shape[:-1].numel() % 16 == 0  # as GEMMs that sum over the rows need


def weight(layer):
    """The layer's weight as a matrix, also where FSDP2 gathered it in 8 bits."""
    in_8_bits = hasattr(layer, "w_amax") and layer.w_amax.dim() == 0
    return fast.fp8.Widened.apply(layer.weight, layer.w_amax) if in_8_bits else layer.weight


# -- linear layers


class Linear(nn.Linear):
    """x W^T + b; x: (..., K) -> (..., N)."""

    def forward(self, x):
        if not fused("linear", x, self):
            return F.linear(x, weight(self), self.bias)
        if in_fp8(x, self):
            return fast.fp8.LinearFunction.apply(operand(x), *fast.fp8.operands(self))
        args = operand(x), weight(self), self.bias
        return fast.linear.LinearFunction.apply(*args, torch.is_grad_enabled())


def qkv(x, layer, heads, head_dim, copy_v=False):
    """q, k and v by one layer; x: (B, T, C), heads: how many each has -> (B, H, T, D) each.

    They are views of one tensor; with copy_v, v is none, so that keeping v does not keep q and k in memory.
    """
    if not fused("qkv", x, layer, unless={OTHER_LAYER: other(layer)}, inner=1):
        q, k, v = layer(x).unflatten(-1, (-1, head_dim)).transpose(1, 2).split(heads, dim=1)
    elif in_fp8(x, layer):
        q, k, v = fast.fp8.QKV.apply(operand(x), heads, head_dim, *fast.fp8.operands(layer))
    else:
        args = operand(x), weight(layer), layer.bias, heads, head_dim
        q, k, v = fast.linear.QKV.apply(*args, torch.is_grad_enabled())
    return q, k, v.transpose(1, 2).contiguous().transpose(1, 2) if copy_v else v


def gelu(x):
    return F.gelu(x, approximate="tanh")  # GPT-2's own form


def relu2(x):
    return F.relu(x).square()  # https://arxiv.org/abs/2109.08668


def swiglu(x):
    """silu(gate) * up of the halves of x: (..., 2 H) -> (..., H); https://arxiv.org/abs/2002.05202."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


FUSED = {gelu: "gelu", relu2: "relu2", swiglu: "swiglu"}  # activations of fast/mlp.py and fast/fp8.py


def mlp(x, up, activation, down):
    """down(activation(up(x))); x: (..., C) -> (..., C)."""
    unless = {
        "another activation": activation not in FUSED,
        "one of two layers in fp8": in_fp8(x, up) != in_fp8(x, down),
        OTHER_LAYER: other(up, down),
        "few tokens, for tiles of 128": not torch.is_grad_enabled() and x.numel() < 64 * x.size(-1),
    }
    if not fused("mlp", x, up, down, unless=unless, inner=2):
        return down(activation(up(x)))
    x, kind = operand(x), FUSED[activation]
    if in_fp8(x, up):
        return fast.fp8.MLPFunction.apply(kind, x, *fast.fp8.operands(up), *fast.fp8.operands(down))
    parameters = weight(up), up.bias, weight(down), down.bias
    return fast.mlp.MLPFunction.apply(kind, x, *parameters, torch.is_grad_enabled())


# -- residual stream and norms


def residual(x):
    """x in bf16 where GEMMs compute in bf16 (GPT-2 124M, one H200: 4% less time, same loss)."""
    return x.to(torch.bfloat16) if computed_in(x) == torch.bfloat16 else x


class LayerNorm(nn.LayerNorm):
    def forward(self, x):
        return norm(x, self, super().forward)


class RMSNorm(nn.RMSNorm):
    def forward(self, x):
        return norm(x, self, super().forward)


def norm(x, layer, plain):
    """LayerNorm or RMSNorm of x: (..., C); plain: PyTorch's own."""
    if fused("norm", x, layer, unless={UNUSUAL_NORM: unusual(x, layer)}):
        weights, centred = (layer.weight, getattr(layer, "bias", None)), isinstance(layer, nn.LayerNorm)
        return fast.norm.Norm.apply(x.contiguous(), *weights, layer.eps, centred)
    return plain(x)


UNUSUAL_NORM = "a norm without weight or eps, or over several dimensions"


def unusual(x, layer):
    return layer.weight is None or layer.eps is None or layer.weight.shape != x.shape[-1:]


# -- positions and attention


def rope(x, layer, cos, sin):
    """Rotates layer(x): (B, H, T, D) by position, in float32; layer: any norm, or nn.Identity.

    Dimension i is paired with i + D/2, as in Hugging Face's Llama. cos, sin: (T, D). arxiv.org/abs/2104.09864
    """
    normed, rms = type(layer) is not nn.Identity, isinstance(layer, nn.RMSNorm)
    unless = {
        OTHER_LAYER: normed and (not rms or other(layer)),
        UNUSUAL_NORM: rms and unusual(x, layer),
        "tables of another shape": any(t.shape != x.shape[-2:] or not t.is_contiguous() for t in (cos, sin)),
    }
    if fused("rope", x, layer, unless=unless, inner=int(type(layer) is RMSNorm)):
        weight_and_eps = (layer.weight, layer.eps) if normed else (None, 0.0)
        return fast.rope.RopeFunction.apply(x, *weight_and_eps, cos, sin)
    return Rotation.apply(layer(x), cos, sin)


def rotated(x, cos, sin):
    first, second = x.float().chunk(2, dim=-1)
    return (x.float() * cos + torch.cat((-second, first), dim=-1) * sin).type_as(x)


class Rotation(torch.autograd.Function):
    """Backward of RoPE is RoPE with the opposite angle; torch.compile's takes 3 times as long."""

    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(cos, sin)
        return rotated(x, cos, sin)

    @staticmethod
    def backward(ctx, dy):
        cos, sin = ctx.saved_tensors
        return rotated(dy, cos, -sin), None, None


# Order of preference for each setting of `attention`; the first that takes the shapes, dtype and device runs.
ORDER = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
ORDER += [SDPBackend.MATH]
BACKENDS = {name: ORDER[i:] for i, name in enumerate(("cudnn", "flash", "efficient", "math"))}
BACKENDS["auto"] = BACKENDS["flash"]  # for a model on meta; others have their device's best


def attention(q, k, v, backend, dropout=0.0):
    """Causal softmax attention. q: (B, H, T, D); k, v: (B, H_kv, T, D), H_kv divides H -> (B, H, T, D)."""
    if counting is not None:
        return counting.attended(q, k, v)
    grouped = q.size(1) != k.size(1)
    with sdpa_kernel(BACKENDS[backend], set_priority=True):  # traced: the compile cache knows the choice
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout, enable_gqa=grouped)
    return SameLayout.apply(y.transpose(1, 2)).transpose(1, 2) if backend == "cudnn" else y


class SameLayout(torch.autograd.Function):
    """Identity of (B, T, H, D); lays the gradient out in memory as the output is.

    PyTorch keeps plans of cuDNN's backward by the layouts of q, k and v alone; with another layout of dy, as
    after an edit's gate, a plan computes wrong numbers. A compiled dy is contiguous, so rarely copied.
    """

    @staticmethod
    def forward(ctx, y):
        ctx.strides = y.stride()
        return y.view_as(y)

    @staticmethod
    def backward(ctx, dy):
        if dy.stride() == ctx.strides:
            return dy
        return torch.empty_strided(dy.shape, ctx.strides, dtype=dy.dtype, device=dy.device).copy_(dy)


# -- the loss


def linear_cross_entropy(x, head, targets, reduction="mean", vocab_size=None, softcap=None):
    """Cross-entropy of softmax(head(x)) in float32, in nats -> (loss, count), the number of its targets.

    x: (B, T, C); head: an nn.Linear without bias, whose rows from vocab_size on are padding and take no part;
    targets: (B, T), -100 does not count. reduction: see `mean_loss`, which also says what loss and count are.
    """
    options = vocab_size or head.weight.size(0), softcap
    if reduction == "mean":
        count = (targets >= 0).sum(dtype=torch.float32)
        return cross_entropy(x, head, targets, "sum", *options) / count.clamp(min=1), count
    return mean_loss(cross_entropy(x, head, targets, "none", *options), targets, reduction)


def mean_loss(losses, targets, reduction):
    """(B, T) losses of tokens -> (loss, count) as GPT.forward returns them, for a loss of your own.

    "mean": over all targets that count, scalars; "rows": over those of each row, (B,); "none": each, (B, T).
    """
    assert reduction in ("mean", "rows", "none"), f"{reduction=}: expected mean, rows or none"
    counts = targets >= 0
    losses = torch.where(counts, losses, 0)
    if reduction == "none":
        return losses, counts
    dims = None if reduction == "mean" else -1
    count = counts.sum(dims, dtype=torch.float32)
    return losses.sum(dims) / count.clamp(min=1), count


def cross_entropy(x, head, targets, reduction, vocab_size, softcap):
    """The losses of all targets, "sum", or of each, "none": (B, T), 0 where a target is -100."""
    options, trains = (vocab_size, softcap), torch.is_grad_enabled()
    # with gradients, a weight for each token is known in the backward only
    unless = {"a loss for each token, with gradients": reduction == "none" and trains}
    if not fused("linear_cross_entropy", x, head, unless=unless):
        rows = int(fast.LOGITS_MIB * 2**20) // (4 * head.weight.size(0))
        if targets.numel() <= rows:
            return plain_loss(x, head.weight, targets, reduction, *options)
        rows = 2 ** max(0, rows.bit_length() - 1)  # as in fast/loss.py
        return chunked_loss(torch.compiler.is_compiling(), rows, x, head.weight, targets, reduction, *options)
    x = operand(x)
    if in_fp8(x, head) and trains:
        args = x, head.weight, targets.flatten().contiguous(), *options, head.x_amax, head.w_amax
        return fast.fp8.HeadFunction.apply(*args)
    return fast.loss.linear_cross_entropy(x, head.weight, targets, reduction, *options)


def plain_loss(x, weight, targets, reduction, *options):
    """The plain PyTorch of cross_entropy, with the logits of all tokens at once."""
    return plain_cross_entropy(F.linear(x, weight), targets, reduction, *options)


@torch.compiler.disable  # one graph of all chunks would hold the logits of several: 767 MiB, not 295 (CPU)
def chunked_loss(compiled, rows, x, weight, targets, reduction, *options):
    """plain_loss of `rows` tokens at a time, whose logits the backward computes again: one more GEMM."""
    loss = compile_once(plain_loss) if compiled else plain_loss
    weight = weight.view_as(weight)  # autocast would share a leaf's cast, whose gradients add up in 16 bits
    chunks = zip(x.flatten(0, -2).split(rows), targets.flatten().split(rows), strict=True)
    # a loss of an edit may draw random numbers; a CUDA graph's capture cannot read their state
    replays = not (x.is_cuda and torch.cuda.is_current_stream_capturing())
    losses = []
    for xi, ti in chunks:
        own = dict(use_reentrant=False, preserve_rng_state=replays, context_fn=Replay().contexts)
        losses.append(checkpoint(loss, xi, weight, ti, reduction, *options, **own))
    if reduction == "none":
        return torch.cat(losses).view_as(targets)
    return torch.stack(losses).sum()


def plain_cross_entropy(logits, targets, reduction, V, softcap):
    """Cross-entropy from the logits, (..., V and padding); targets: (...)."""
    logits = cap(logits.float(), softcap)
    if logits.size(-1) > V:
        # masked, not sliced off: an odd length takes 39.6 ms instead of 31.8 (H200, 65,536 x 768 x 50,304)
        logits = torch.where(torch.arange(logits.size(-1), device=logits.device) < V, logits, -torch.inf)
    loss = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction=reduction)
    return loss.view_as(targets) if reduction == "none" else loss


def cap(logits, softcap):
    """softcap * tanh(logits / softcap), Gemma 2's bound on the logits; None leaves them."""
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)
