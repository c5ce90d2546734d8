"""The fused forms of the operations in kernels.py, and which calls they serve.

For each call a form decides by device, dtype, shapes and layers: the fused kernel (NVIDIA GPUs, in
bf16 and fp8), or None, after which the operation's own text runs. What was edited (texts.py) has no
form.
"""

import functools

import torch
import torch.nn as nn

import fast
from fast import chips, chunks, texts

enabled = set()  # types of device whose calls may take fused kernels, see `enable`
counting = None  # an OperationCounter (run/flops.py); while there is one, plain PyTorch runs
edits = texts.edited()  # {definition in kernels.py: words} of those that were edited, or call one


# -- the choice


def operation(form):
    """Decorator of a definition in kernels.py: its form below runs where it can, else its text."""

    def decorate(definition):
        if definition.__qualname__.partition(".")[0] in edits:
            return definition

        @functools.wraps(definition)
        def chosen(*args, **kwargs):
            if counting is not None:
                return counting.run(form, definition, args, kwargs)
            result = form(definition, *args, **kwargs)
            if result is None:
                return definition(*args, **kwargs)
            return result

        chosen.form = form
        return chosen

    return decorate


def enable(device, ops="auto"):
    """Switches the fused kernels of a torch.device on -> None, or off -> why they are off."""
    if ops == "torch":
        reason = "ops=torch"
    else:
        reason = chips.no_fused_kernels(device) or load()
    if reason is None:
        enabled.add(device.type)
        fast.fusion.register()
    else:
        enabled.discard(device.type)
    return reason


def load():
    """Imports the fused kernels, fast.fp8 and so on, which need Triton; returns why that fails."""
    try:
        from fast import fp8, fusion, linear, loss, mlp, norm, rope  # noqa: F401
    except ImportError as error:
        return f"the package {error.name} is not installed"


def fused(name, x, *layers, unless=None):
    """Whether the fused kernel of an operation serves this call on x and the layers' parameters.

    unless: {why not, in words: whether that is so}.
    """
    if counting is not None:
        counting.note(name, why_not_fused(*counting.where, layers, unless))
        return False
    # kernels take rows: no empty matrix, as for an expert that no token chose, and no vector
    if x.numel() == 0 or x.dim() == 1:
        return False
    return why_not_fused(x.device.type, computed_in(x), layers, unless) is None


def why_not_fused(device_type, dtype, layers, unless):
    """Why a call on this device in this dtype runs in plain PyTorch; None where it does not."""
    for words, stands in (unless or {}).items():
        if stands:
            return words
    if device_type not in enabled:
        return "no fused kernels here"
    if dtype != torch.bfloat16:
        return f"computed in {str(dtype).removeprefix('torch.')}"
    for layer in layers:
        for parameter in layer.parameters():
            if any(size % 8 for size in parameter.shape):
                return "a width is no multiple of 8"
    return None


OTHER_LAYER = "another kind of layer, or one with hooks"
UNUSUAL_NORM = "a norm without weight or eps, or over several dimensions"
UNUSUAL_TABLES = "tables of another shape, or with a gradient"


def has_hooks_or_own_forward(*layers):
    """Whether one of the layers does more than a kernel that only reads its parameters.

    Known are nn.RMSNorm and what has a forward of kernels.py that was not edited.
    """
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    for layer in layers:
        known = type(layer) is nn.RMSNorm or hasattr(type(layer).forward, "form")
        if not known or "forward" in vars(layer) or any(getattr(layer, hook) for hook in hooks):
            return True
    return False


def unusual_norm(x, layer):
    return layer.weight is None or layer.eps is None or layer.weight.shape != x.shape[-1:]


def computed_in(x):
    """The dtype that a GEMM of x computes in: autocast's if it is on, else x's."""
    device = x.device.type
    if device == "meta":  # autocast does not support it
        return x.dtype
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return x.dtype


def operand(x):
    """x as the fused kernels take it; only an edit's slice or transpose is copied."""
    return x.to(torch.bfloat16).contiguous()


def in_fp8(x, *layers):
    """Whether the GEMMs of all these layers run in fp8 in this call on x: fp8.train_in_fp8's."""
    train = all(hasattr(layer, "w_amax") and layer.training for layer in layers)
    return train and x.shape[:-1].numel() % 16 == 0  # as GEMMs that sum over the rows need


def weight_of(layer):
    """The layer's weight as a contiguous matrix, also where FSDP2 gathered it in 8 bits."""
    if counting is not None:
        return counting.weight(layer)
    if hasattr(layer, "w_amax") and layer.w_amax.dim() == 0:
        return fast.fp8.Widened.apply(layer.weight, layer.w_amax)
    return layer.weight.contiguous()


# -- the forms. Each takes the operation's definition and then its arguments, and returns None where
# -- the definition is to run.


def linear(_, layer, x):
    if not fused("linear", x, layer):
        return None
    if in_fp8(x, layer):
        return fast.fp8.LinearFunction.apply(operand(x), *fast.fp8.operands(layer))
    tune = torch.is_grad_enabled()
    return fast.linear.LinearFunction.apply(operand(x), weight_of(layer), layer.bias, tune)


def qkv(_, x, layer, heads, head_dim):
    unless = {OTHER_LAYER: has_hooks_or_own_forward(layer)}
    if not fused("qkv", x, layer, unless=unless):
        return None
    x = operand(x)
    if in_fp8(x, layer):
        return fast.fp8.QKV.apply(x, heads, head_dim, *fast.fp8.operands(layer))
    tune = torch.is_grad_enabled()
    return fast.linear.QKV.apply(x, weight_of(layer), layer.bias, heads, head_dim, tune)


def kind_of(activation):
    """Which of the MLP's kernels computes an activation, "gelu", say; None: none."""
    name = getattr(activation, "__name__", None)
    own = getattr(activation, "__module__", None) == "kernels"
    if own and name in ("gelu", "relu2", "swiglu") and name not in edits:
        return name
    return None


def mlp(_, x, up, activation, down):
    kind = kind_of(activation)
    unless = {
        "another activation": kind is None,
        "one of two layers in fp8": in_fp8(x, up) != in_fp8(x, down),
        OTHER_LAYER: has_hooks_or_own_forward(up, down),
        "few tokens, for tiles of 128": not torch.is_grad_enabled() and x.numel() < 64 * x.size(-1),
    }
    if not fused("mlp", x, up, down, unless=unless):
        return None
    x = operand(x)
    if in_fp8(x, up):
        return fast.fp8.MLPFunction.apply(kind, x, *fast.fp8.operands(up), *fast.fp8.operands(down))
    tune = torch.is_grad_enabled()
    return fast.mlp.MLPFunction.apply(
        kind, x, weight_of(up), up.bias, weight_of(down), down.bias, tune
    )


def norm(_, layer, x):
    centred = isinstance(layer, nn.LayerNorm)
    shift = layer.bias if centred else None  # an edit's bias of an RMSNorm is for the edit to add
    if not fused("norm", x, layer, unless={UNUSUAL_NORM: unusual_norm(x, layer)}):
        return None
    return fast.norm.Norm.apply(x.contiguous(), layer.weight, shift, layer.eps, centred)


def rope(_, x, layer, cos, sin):
    normed = type(layer) is not nn.Identity
    rms = isinstance(layer, nn.RMSNorm)
    T, D = x.shape[-2:]
    usual_tables = all(
        table.shape == (T, D // 2) and table.is_contiguous() and not table.requires_grad
        for table in (cos, sin)
    )
    unless = {
        OTHER_LAYER: normed and (not rms or has_hooks_or_own_forward(layer)),
        UNUSUAL_NORM: rms and unusual_norm(x, layer),
        UNUSUAL_TABLES: not usual_tables,
    }
    if not fused("rope", x, layer, unless=unless):
        return None
    if not normed:
        return fast.rope.RopeFunction.apply(x, None, 0.0, cos, sin)
    return fast.rope.RopeFunction.apply(x, layer.weight, layer.eps, cos, sin)


def cross_entropy(_, x, head, targets, reduction, vocab_size):
    if reduction not in ("sum", "none"):
        return None
    trains = torch.is_grad_enabled()
    # with gradients, a weight for each token is known in the backward only
    unless = {"a loss for each token, with gradients": reduction == "none" and trains}
    if not fused("linear_cross_entropy", x, head, unless=unless):
        return None
    x = operand(x)
    weight = weight_of(head)
    if in_fp8(x, head) and trains:
        ids = targets.flatten().contiguous()
        return fast.fp8.HeadFunction.apply(x, weight, ids, vocab_size, head.x_amax, head.w_amax)
    return fast.loss.linear_cross_entropy(x, weight, targets, reduction, vocab_size)


def in_chunks(definition, x, weight, targets, reduction, vocab_size):
    few = x.device.type == "meta" or targets.numel() <= chunks.rows_that_fit(weight)
    if few or reduction not in ("sum", "none"):
        return None
    compiled = torch.compiler.is_compiling()
    return chunks.chunked(definition, compiled, x, weight, targets, reduction, vocab_size)
