"""A copy of the definitions in kernels.py that fused forms compute, for edit_check.py to compare.

Only `rotated` is ever run. A new text in kernels.py that the fused form still computes is copied
here as well; tests/test_fast.py then compares the form with it.
"""

# ruff: noqa: F821, names of kernels.py

import torch
import torch.nn as nn
import torch.nn.functional as F


class Linear(nn.Linear):
    def forward(self, x):
        return F.linear(x, forms.weight_of(self), self.bias)


def qkv(x, layer, heads, head_dim, separate_v=False):
    q, k, v = layer(x).unflatten(-1, (-1, head_dim)).transpose(1, 2).split(heads, dim=1)
    if separate_v:
        v = v.transpose(1, 2).contiguous().transpose(1, 2)
    return (q, k, v)


def gelu(x):
    return F.gelu(x, approximate="tanh")


def relu2(x):
    return F.relu(x).square()


def swiglu(x):
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def mlp(x, up, activation, down):
    return down(activation(up(x)))


class LayerNorm(nn.LayerNorm):
    def forward(self, x):
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)


class RMSNorm(nn.RMSNorm):
    def forward(self, x):
        return F.rms_norm(x, self.normalized_shape, self.weight, self.eps)


def rope(x, layer, cos, sin):
    return rotated(layer(x), cos, sin)


def rotated(x, cos, sin):
    first, second = x.float().chunk(2, dim=-1)
    return (x.float() * cos + torch.cat((-second, first), dim=-1) * sin).type_as(x)


def attention(q, k, v, backend, dropout=0.0):
    grouped = q.size(1) != k.size(1)
    with sdpa_kernel(BACKENDS[backend], set_priority=True):
        y = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, dropout_p=dropout, enable_gqa=grouped
        )
    return same_layout(y) if backend == "cudnn" else y


def cross_entropy(x, head, targets, reduction, vocab_size, softcap):
    return plain_loss(x, head.weight, targets, reduction, vocab_size, softcap)


def plain_loss(x, weight, targets, reduction, vocab_size, softcap):
    return plain_cross_entropy(F.linear(x, weight), targets, reduction, vocab_size, softcap)


def plain_cross_entropy(logits, targets, reduction, V, softcap):
    logits = cap(logits.float(), softcap)
    if logits.size(-1) > V:
        real = torch.arange(logits.size(-1), device=logits.device) < V
        logits = torch.where(real, logits, -torch.inf)
    loss = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction=reduction)
    return loss.view_as(targets) if reduction == "none" else loss


def cap(logits, softcap):
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)
