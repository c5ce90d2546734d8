"""fast.adam8.update_torch as one Triton kernel per tensor: for a bfloat16 weight it moves 10 bytes an element, once."""

import triton
import triton.language as tl

from fast.adam8 import GROUP, LEAST, M_LEVELS, SHIFT, V_LEVELS
from fast.operators import cdiv

TILE, WARPS = 4, 4  # groups per program: one per warp


def update(w, g, m, m_scale, v, v_scale, first, key, *numbers):
    """As update_torch, for contiguous tensors; on a GPU the results may differ from it in the last bits of float32."""
    groups = m_scale.numel()
    _update[(cdiv(groups, TILE),)](
        w, g, m, m_scale, v, v_scale, groups, first, key, *numbers, COLS=w.size(1), PER_ROW=m_scale.size(1),
        ROUND=w.dtype.itemsize == 2, GROUP=GROUP, SHIFT=SHIFT, LEAST=LEAST, M_LEVELS=M_LEVELS, V_LEVELS=V_LEVELS,
        TILE=TILE, num_warps=WARPS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["groups", "first", "key"])
def _update(
    w, g, m, m_scale, v, v_scale, groups, first, key, keep, rate, beta1, rest1, beta2, rest2, root, eps,
    COLS: tl.constexpr, PER_ROW: tl.constexpr, ROUND: tl.constexpr, GROUP: tl.constexpr, SHIFT: tl.constexpr,
    LEAST: tl.constexpr, M_LEVELS: tl.constexpr, V_LEVELS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0) * TILE + tl.arange(0, TILE)
    here = group < groups
    row = group // PER_ROW
    col = (group % PER_ROW * GROUP)[:, None] + tl.arange(0, GROUP)[None, :]
    inside = here[:, None] & (col < COLS)
    at = (row.to(tl.int64) * COLS)[:, None] + col

    index = ((row + first).to(tl.uint32) * COLS)[:, None] + col.to(tl.uint32)
    a = _mixed((index * 0x9E3779B1) ^ key.to(tl.uint32))
    b = _mixed(a + 0x9E3779B9)
    noise_m, noise_v = (a >> 12).to(tl.int32), (b >> 12).to(tl.int32)

    codes = tl.load(m + at, mask=inside, other=0).to(tl.int32)
    top = tl.load(m_scale + group, mask=here, other=0.0)
    mean = _decoded(codes & M_LEVELS, top, M_LEVELS, SHIFT)
    mean = tl.where(codes > M_LEVELS, -mean, mean)
    codes = tl.load(v + at, mask=inside, other=0).to(tl.int32)
    square = _decoded(codes, tl.load(v_scale + group, mask=here, other=0.0), V_LEVELS, SHIFT)

    grad = tl.load(g + at, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(w + at, mask=inside, other=0.0).to(tl.float32)
    mean = mean * beta1 + grad * rest1
    square = square * beta2 + grad * grad * rest2
    weight = weight * keep - mean / (tl.sqrt(square) * root + eps) * rate
    if ROUND:
        noise_w = (((a & 255) << 8) | (b & 255)).to(tl.int32)
        weight = ((weight.to(tl.int32, bitcast=True) + noise_w) & -65536).to(tl.float32, bitcast=True)
    tl.store(w + at, weight.to(w.dtype.element_ty), mask=inside)

    sign = (mean.to(tl.int32, bitcast=True) >> 24) & (M_LEVELS + 1)
    size, top = _encoded(tl.abs(mean), noise_m, M_LEVELS, True, SHIFT, LEAST)
    tl.store(m + at, (size | sign).to(tl.uint8), mask=inside)
    tl.store(m_scale + group, top, mask=here)
    codes, top = _encoded(square, noise_v, V_LEVELS, False, SHIFT, LEAST)
    tl.store(v + at, codes.to(tl.uint8), mask=inside)
    tl.store(v_scale + group, top, mask=here)


@triton.jit
def _decoded(codes, scale, LEVELS: tl.constexpr, SHIFT: tl.constexpr):
    steps = ((scale.to(tl.int32, bitcast=True) >> SHIFT) - LEVELS)[:, None] + codes
    return tl.where(codes > 0, (steps << SHIFT).to(tl.float32, bitcast=True), 0.0)


@triton.jit
def _encoded(x, noise, LEVELS: tl.constexpr, TO_ZERO: tl.constexpr, SHIFT: tl.constexpr, LEAST: tl.constexpr):
    steps = (x.to(tl.int32, bitcast=True) + noise) >> SHIFT
    top = tl.maximum(tl.max(steps, 1), LEAST + LEVELS)
    least = ((top - LEVELS + 1) << SHIFT).to(tl.float32, bitcast=True)[:, None]
    if TO_ZERO:
        up = x > noise.to(tl.float32) * (least * (1.0 / (1 << SHIFT)))
    else:
        up = x > 0
    return tl.where(x < least, up.to(tl.int32), steps - (top - LEVELS)[:, None]), (top << SHIFT).to(
        tl.float32, bitcast=True
    )


@triton.jit
def _mixed(h):
    h = (h ^ (h >> 16)) * 0x85EBCA6B
    h = (h ^ (h >> 13)) * 0xC2B2AE35
    return h ^ (h >> 16)
