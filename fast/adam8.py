"""The 8-bit number format of AdamW's two moments, and one update with it in plain PyTorch.

adam8_triton.py has the same update as a kernel.

After https://arxiv.org/abs/2110.02861: 8-bit codes for groups of GROUP = 256 elements along the last dimension, with a
float32 scale per group, so 2.03 bytes a weight for both moments where float32 takes 8.

A code is the exponent and the three leading mantissa bits of a float32, counted down from the group's largest value.
The representable values form one grid for all scales: neighbours differ by 6 to 12%, and a group whose scale changes
keeps the values that it has. Shifts encode and decode, so that every device gets the same numbers. The second moment
uses all 8 bits and reaches down to 2^-32 of the group's largest value; Adam divides by its square root, which therefore
reaches 2^-16 in steps of 3 to 6%. The first moment uses one sign bit and 7 bits, and reaches 2^-16 as well.

Both moments are rounded stochastically, so that the expected value is exact: with rounding to nearest, a second moment
that loses 5% a step (beta2 = 0.95) could stay where it is for ever. bfloat16 weights are rounded stochastically too,
because updates below 2^-9 of a weight would be lost otherwise (https://arxiv.org/abs/2010.06192). The random numbers
are a hash of seed, step, tensor and element: any number of ranks and any resumed run draw the same ones.
"""

import hashlib

import torch
import torch.nn.functional as F

GROUP = 256  # elements that share a scale
SHIFT = 20  # bits of a float32 below the third bit of its mantissa
M_LEVELS, V_LEVELS = (
    127,
    255,
)  # the code of a group's largest value, for the first and the second moment; 0 is zero
LEAST = 8  # exponent and mantissa bits of the smallest normal float32: no code stands for less
MASK = 0xFFFFFFFF


def update_torch(w, g, m, m_scale, v, v_scale, first, key, keep, rate, beta1, rest1, beta2, rest2, root, eps):
    """One AdamW step of w: (rows, cols) from its gradient g; w, the codes and their scales are updated in place.

    m, v: (rows, cols) uint8; m_scale, v_scale: (rows, groups) float32. first: index of w's first row in the whole
    tensor; key: from random_key, for this step's random numbers. keep: 1 - lr * weight decay;
    rate: lr / (1 - beta1^step); rest1, rest2: 1 - beta1, 1 - beta2; root: 1 / sqrt(1 - beta2^step).
    """
    noise_m, noise_v, noise_w = noises(first, *w.shape, key, w.device)
    codes = grouped(m.int())
    mean = decoded(codes & M_LEVELS, m_scale, M_LEVELS)
    mean = ungrouped(torch.where(codes > M_LEVELS, -mean, mean), w)
    square = ungrouped(decoded(grouped(v.int()), v_scale, V_LEVELS), w)
    g = g.float()
    mean = mean * beta1 + g * rest1
    square = square * beta2 + g * g * rest2
    w.copy_(rounded(w.float() * keep - mean / (square.sqrt() * root + eps) * rate, noise_w, w.dtype))
    size, top = encoded(grouped(mean.abs()), grouped(noise_m), M_LEVELS, True)
    m.copy_(ungrouped(size, w) + torch.signbit(mean) * (M_LEVELS + 1))
    m_scale.copy_(top)
    codes, top = encoded(grouped(square), grouped(noise_v), V_LEVELS, False)
    v.copy_(ungrouped(codes, w))
    v_scale.copy_(top)


def grouped(x):
    """(rows, cols) -> (rows, groups, GROUP), the last group padded with zeros."""
    return F.pad(x, (0, -x.size(1) % GROUP)).unflatten(1, (-1, GROUP))


def ungrouped(x, like):
    """The inverse of `grouped`: (rows, groups, GROUP) -> (rows, cols of `like`)."""
    return x.flatten(1)[:, : like.size(1)]


def decoded(codes, scale, levels):
    """float32 magnitudes of int32 codes from 0 to `levels`: (..., GROUP); scale: (...), the value of code `levels`."""
    steps = (scale.view(torch.int32) >> SHIFT).unsqueeze(-1) + codes - levels
    return torch.where(codes > 0, (steps << SHIFT).view(torch.float32), 0.0)


def encoded(x, noise, levels, to_zero):
    """(int32 codes, scale) of magnitudes x: (..., GROUP), rounded stochastically with SHIFT bits of `noise` an element.

    The expected decoded value is x. A value below the smallest code's becomes, with to_zero, that code or zero at
    random; otherwise always that code, because a second moment of zero beside a first moment that is not zero would
    make Adam's update arbitrarily large.
    """
    steps = (x.view(torch.int32) + noise) >> SHIFT
    top = steps.amax(-1).clamp(min=LEAST + levels)
    least = ((top - levels + 1) << SHIFT).view(torch.float32).unsqueeze(-1)
    up = x > noise.float() * (least * 2.0**-SHIFT) if to_zero else x > 0
    codes = torch.where(x < least, up.int(), steps - (top - levels).unsqueeze(-1))
    return codes, (top << SHIFT).view(torch.float32)


def rounded(x, noise, dtype):
    """float32 x as `dtype`; to bfloat16 it is rounded stochastically with 16 bits of `noise` an element."""
    return (
        ((x.view(torch.int32) + noise) & -65536).view(torch.float32).to(dtype)
        if dtype == torch.bfloat16
        else x
    )


def random_key(*numbers):
    """31 pseudo-random bits, the same for the same integers."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") >> 1


def noises(first, rows, cols, key, device):
    """Three (rows, cols) int32 tensors of 20, 20 and 16 random bits, for a tensor's rows from `first` on."""
    row = torch.arange(first, first + rows, device=device).unsqueeze(1)
    index = row * cols + torch.arange(cols, device=device)
    a = mixed((index * 0x9E3779B1 & MASK) ^ key)
    b = mixed(a + 0x9E3779B9 & MASK)
    return (a >> 12).int(), (b >> 12).int(), ((a & 255) << 8 | b & 255).int()


def mixed(h):
    """Murmur3's finaliser on 32 bits held in int64: every bit of the result depends on every bit of h."""
    h = (h ^ h >> 16) * 0x85EBCA6B & MASK
    h = (h ^ h >> 13) * 0xC2B2AE35 & MASK
    return h ^ h >> 16
