"""The operations that model.py calls, each in plain PyTorch: what you read is what runs.

Beside an `operation` stands its fused form of fast/forms.py, which NVIDIA GPUs run in bf16 and fp8
where the comment holds. A form computes the text that stands here, known by its digest
(fast/texts.py): after an edit your text runs, on every device, and the start-up summary says so.
Document masks, remat and caches of `attention` belong to its text as well.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from fast import forms
from fast.forms import operation
from fast.gradients import same_layout

# -- linear layers


class Linear(nn.Linear):
    """x W^T + b; x: (..., K) -> (..., N)."""

    @operation(forms.linear)  # any widths that 8 divides, as of all forms
    def forward(self, x):
        return F.linear(x, forms.weight_of(self), self.bias)


@operation(forms.qkv)  # by a Linear without hooks
def qkv(x, layer, heads, head_dim):
    """q, k and v by one layer; x: (B, T, C), heads: how many each has -> (B, H, T, D) each.

    They are views of one tensor.
    """
    return layer(x).unflatten(-1, (-1, head_dim)).transpose(1, 2).split(heads, dim=1)


def gelu(x):
    return F.gelu(x, approximate="tanh")  # GPT-2's own form


def relu2(x):
    return F.relu(x).square()  # https://arxiv.org/abs/2109.08668


def swiglu(x):
    """silu(gate) * up of the halves of x: (..., 2 H) -> (..., H); arxiv.org/abs/2002.05202."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


@operation(forms.mlp)  # gelu, relu2 or swiglu between two Linear without hooks
def mlp(x, up, activation, down):
    """down(activation(up(x))); x: (..., C) -> (..., C)."""
    return down(activation(up(x)))


# -- residual stream and norms


def residual(x):
    """x in bf16 where GEMMs compute in bf16 (GPT-2 124M, one H200: 4% less time, same loss)."""
    if forms.computed_in(x) == torch.bfloat16:
        return x.to(torch.bfloat16)
    return x


class LayerNorm(nn.LayerNorm):
    @operation(forms.norm)
    def forward(self, x):
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)


class RMSNorm(nn.RMSNorm):
    @operation(forms.norm)  # with a weight and eps
    def forward(self, x):
        return F.rms_norm(x, self.normalized_shape, self.weight, self.eps)


# -- positions and attention


@operation(forms.rope)  # an RMSNorm without hooks, or nn.Identity; tables as of all rows
def rope(x, layer, cos, sin):
    """Rotates layer(x): (B, H, T, D) by position, in float32; layer: any norm, or nn.Identity.

    Dimension i is paired with i + D/2, as in Hugging Face's Llama. cos, sin: (T, D/2), of each
    pair's angle. arxiv.org/abs/2104.09864
    """
    return rotated(layer(x), cos, sin)


def rotated(x, cos, sin):
    in_float32 = x.float()
    first, second = in_float32.chunk(2, dim=-1)
    cos, sin = torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1)  # (T, D)
    return (in_float32 * cos + torch.cat((-second, first), dim=-1) * sin).type_as(x)


# Of each setting's backends the first that takes the shapes, dtype and device runs.
ORDER = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
BACKENDS = {
    "cudnn": ORDER,
    "flash": ORDER[1:],
    "efficient": ORDER[2:],
    "math": ORDER[3:],
    "auto": ORDER[1:],  # of a model that run/build.py has not chosen the device's best for
}


def attention(q, k, v, backend, dropout=0.0):
    """Causal softmax attention; q: (B, H, T, D); k, v: (B, H_kv, T, D) -> (B, H, T, D).

    H_kv divides H. backend: a key of BACKENDS, by which PyTorch chooses one of its own kernels.
    """
    grouped = q.size(1) != k.size(1)
    # within what torch.compile traces, so that its cache knows the choice
    with sdpa_kernel(BACKENDS[backend], set_priority=True):
        y = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, dropout_p=dropout, enable_gqa=grouped
        )
    return same_layout(y) if backend == "cudnn" else y


# -- the loss


def linear_cross_entropy(x, head, targets, reduction, vocab_size):
    """Cross-entropy of softmax(head(x)) in float32, in nats -> (loss, count) as of `mean_loss`.

    x: (B, T, C); head: an nn.Linear without bias, whose rows from vocab_size on are padding and
    take no part; targets: (B, T), -100 does not count. reduction: see `mean_loss`.
    """
    if reduction == "mean":
        count = (targets >= 0).sum(dtype=torch.float32)
        total = cross_entropy(x, head, targets, "sum", vocab_size)
        return total / count.clamp(min=1), count
    losses = cross_entropy(x, head, targets, "none", vocab_size)
    return mean_loss(losses, targets, reduction)


def mean_loss(losses, targets, reduction):
    """(B, T) losses of tokens -> (loss, count) as GPT.forward returns them, for a loss of your own.

    reduction: "mean", over all targets that count: scalars; "rows", over those of each row: (B,);
    "none", each loss: (B, T).
    """
    assert reduction in ("mean", "rows", "none"), f"{reduction=}: expected mean, rows or none"
    counts = targets >= 0
    losses = torch.where(counts, losses, 0)
    if reduction == "none":
        return losses, counts
    dims = None if reduction == "mean" else -1
    count = counts.sum(dims, dtype=torch.float32)
    return losses.sum(dims) / count.clamp(min=1), count


@operation(forms.cross_entropy)  # a sum, and without gradients each loss
def cross_entropy(x, head, targets, reduction, vocab_size):
    """The losses of all targets, "sum", or of each, "none": (B, T), 0 where a target is -100."""
    return plain_cross_entropy(x, head.weight, targets, reduction, vocab_size)


@operation(forms.in_chunks)  # of tokens, on every device, where the logits of all are large
def plain_cross_entropy(x, weight, targets, reduction, vocab_size):
    logits = F.linear(x, weight).float()
    if logits.size(-1) > vocab_size:
        # masked, not sliced off, since an odd length takes 39.6 ms instead of 31.8 (H200, GEMM of
        # 65,536 x 768 x 50,304)
        real = torch.arange(logits.size(-1), device=logits.device) < vocab_size
        logits = torch.where(real, logits, -torch.inf)
    loss = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction=reduction)
    return loss.view_as(targets) if reduction == "none" else loss
