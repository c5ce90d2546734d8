"""AdamW with 8-bit moments: 2.03 bytes of optimizer state a weight; float32 moments take 8.

After https://arxiv.org/abs/2110.02861: 8-bit codes for groups of GROUP elements of the last
dimension, each with a float32 scale. A code is a float32's exponent and three bits of mantissa,
counted down from those of the group's largest: shifts encode and decode, alike on every device, and
a group with a new scale keeps its values. The second moment reaches down to 2^-32 of the largest;
its root and the first moment, to 2^-16.

Both are rounded stochastically, or a second moment that loses 5% a step could stay for ever. So are
bfloat16 weights, since updates below 2^-9 of one would be lost (https://arxiv.org/abs/2010.06192).
The random numbers are a hash of seed, step, tensor and element: alike for any number of ranks and
in a resumed run.
"""

import hashlib
import math
from typing import NamedTuple

import torch
from torch.optim.adamw import adamw

from scale.shards import local, rows_of

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

# tensors of fewer elements, and vectors, have float32 moments and in bf16 a float32 master copy
SMALL = 4096
GROUP = 256  # elements that share a scale
SHIFT = 20  # bits of a float32 below the third bit of its mantissa
# the codes of a group's largest first and largest second moment; code 0 is zero
M_LEVELS, V_LEVELS = 127, 255
SIGN = 128  # the bit of a first moment's code that says that it is negative
LEAST = 8  # exponent and mantissa bits of the smallest normal float32: no code stands for less
MASK = 0xFFFFFFFF
TILE, WARPS = 4, 4  # groups per program of the kernel: one per warp


class Factors(NamedTuple):
    """The numbers of an AdamW step, which are those of a whole tensor."""

    keep: float  # what weight decay leaves of a weight
    rate: float  # of a first moment, its bias correction included
    beta1: float
    rest1: float  # 1 - beta1
    beta2: float
    rest2: float
    root: float  # of a second moment's root, its bias correction
    eps: float


class AdamW8bit(torch.optim.Optimizer):
    """torch.optim.AdamW's update (https://arxiv.org/abs/1711.05101), float32 or bfloat16 weights.

    State, made at once and sharded as the parameter is: step (1,) on the CPU; m, v (rows, cols)
    uint8 and m_scale, v_scale (rows, groups) float32, or exp_avg, exp_avg_sq and master.
    """

    knows_found_inf = True

    def __init__(self, params, lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, seed=0):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))
        self.seed = seed
        self.found_inf = None
        self.numbers = {}  # of each parameter, for its random numbers
        for group in self.param_groups:
            for p in group["params"]:
                self.numbers[p] = len(self.numbers)
                self.state[p] = new_state(p)

    @torch.no_grad()
    def step(self):
        if self.found_inf:  # as in torch.optim.AdamW, but the host waits for it
            return
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            for p in parameters:
                if is_coded(p):
                    self.update_coded(p, self.state[p], group)
            self.update_small([p for p in parameters if not is_coded(p)], group)

    def update_coded(self, p, state, group):
        state["step"] += 1
        w = local(p)
        if w.numel() == 0:  # a rank may hold no rows of a short tensor
            return
        step, lr = int(state["step"]), group["lr"]
        beta1, beta2 = group["betas"]
        factors = Factors(
            keep=1 - lr * group["weight_decay"],
            rate=lr / (1 - beta1**step),
            beta1=beta1,
            rest1=1 - beta1,
            beta2=beta2,
            rest2=1 - beta2,
            root=(1 - beta2**step) ** -0.5,
            eps=group["eps"],
        )
        key = random_key(self.seed, step, self.numbers[p])
        codes = [local(state[name]) for name in ("m", "m_scale", "v", "v_scale")]
        update = update_triton if w.is_cuda and triton is not None else update_torch
        update(w, local(p.grad).contiguous(), *codes, rows_of(p)[0], key, factors)

    def update_small(self, parameters, group):
        """PyTorch's own AdamW, with float32 moments."""
        states = [self.state[p] for p in parameters]
        weights = [local(state.get("master", p)) for p, state in zip(parameters, states)]
        beta1, beta2 = group["betas"]
        adamw(
            weights,
            grads=[local(p.grad).float() for p in parameters],
            exp_avgs=[local(state["exp_avg"]) for state in states],
            exp_avg_sqs=[local(state["exp_avg_sq"]) for state in states],
            max_exp_avg_sqs=[],
            state_steps=[state["step"] for state in states],
            lr=group["lr"],
            beta1=beta1,
            beta2=beta2,
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
        )
        for p, state, weight in zip(parameters, states, weights):
            if "master" in state:
                local(p).copy_(weight)


def is_coded(p):
    return p.dim() == 2 and p.numel() >= SMALL


def new_state(p):
    """The state of parameter p, all zeros but for a master copy."""
    p = p.detach()
    state = {"step": torch.zeros(1)}
    if is_coded(p):
        scales = p[:, : math.ceil(p.size(1) / GROUP)]  # a tensor of their shape, sharded as p is
        for moment in ("m", "v"):
            state[moment] = torch.zeros_like(p, dtype=torch.uint8)
        for scale in ("m_scale", "v_scale"):
            state[scale] = torch.zeros_like(scales, dtype=torch.float32)
        return state
    for moment in ("exp_avg", "exp_avg_sq"):
        state[moment] = torch.zeros_like(p, dtype=torch.float32)
    if p.dtype != torch.float32:
        state["master"] = p.float()
    return state


def update_torch(w, g, m, m_scale, v, v_scale, first, key, factors):
    """One AdamW step of w: (rows, cols) from its gradient g; w, codes and scales change in place.

    m, v: (rows, cols); their scales: (rows, groups). first: w's first row in the tensor.
    key: as `random_key` makes it; factors: Factors.
    """
    keep, rate, beta1, rest1, beta2, rest2, root, eps = factors
    noise_m, noise_v, noise_w = map(grouped, noises(first, *w.shape, key, w.device))
    g = grouped(g.float())
    codes = grouped(m.int())
    mean = decoded(codes & M_LEVELS, m_scale, M_LEVELS)
    mean = torch.where(codes >= SIGN, -mean, mean)
    mean = mean * beta1 + g * rest1
    square = decoded(grouped(v.int()), v_scale, V_LEVELS)
    square = square * beta2 + g * g * rest2
    weight = grouped(w.float()) * keep - mean / (square.sqrt() * root + eps) * rate
    weight = rounded(weight, noise_w, w.dtype)
    m_codes, m_top = encoded(mean.abs(), noise_m, M_LEVELS, to_zero=True)
    m_codes += torch.signbit(mean) * SIGN
    v_codes, v_top = encoded(square, noise_v, V_LEVELS, to_zero=False)
    for old, new in ((w, weight), (m, m_codes), (v, v_codes)):
        old.copy_(new.flatten(1)[:, : w.size(1)])
    m_scale.copy_(m_top)
    v_scale.copy_(v_top)


def grouped(x):
    """(rows, cols) -> (rows, groups, GROUP), the last group padded with zeros."""
    return torch.nn.functional.pad(x, (0, -x.size(1) % GROUP)).unflatten(1, (-1, GROUP))


def decoded(codes, scale, levels):
    """float32 magnitudes of int32 codes, (..., GROUP); scale: (...), the value of code `levels`."""
    steps = (scale.view(torch.int32) >> SHIFT).unsqueeze(-1) + codes - levels
    return torch.where(codes > 0, (steps << SHIFT).view(torch.float32), 0.0)


def encoded(x, noise, levels, to_zero):
    """(int32 codes, scale) of magnitudes x: (..., GROUP), rounded with SHIFT bits of `noise` each.

    A value below the smallest code's becomes, with to_zero, that code or zero at random; else
    always that code: a second moment of zero beside a first that is not zero would make Adam's
    update arbitrarily large.
    """
    steps = (x.view(torch.int32) + noise) >> SHIFT
    top = steps.amax(-1).clamp(min=LEAST + levels)
    least = ((top - levels + 1) << SHIFT).view(torch.float32).unsqueeze(-1)
    up = x > noise.float() * (least * 2.0**-SHIFT) if to_zero else x > 0
    codes = torch.where(x < least, up.int(), steps - (top - levels).unsqueeze(-1))
    return codes, (top << SHIFT).view(torch.float32)


def rounded(x, noise, dtype):
    """float32 x as `dtype`; to bfloat16 stochastically, with 16 bits of `noise` an element."""
    if dtype != torch.bfloat16:
        return x
    return ((x.view(torch.int32) + noise) & -65536).view(torch.float32).to(dtype)


def random_key(*numbers):
    """31 pseudo-random bits, the same for the same integers."""
    return (
        int.from_bytes(hashlib.blake2b(repr(numbers).encode(), digest_size=4).digest(), "little")
        >> 1
    )


def noises(first, rows, cols, key, device):
    """Three (rows, cols) int32 tensors of 20, 20 and 16 random bits, for rows from `first` on."""
    row = torch.arange(first, first + rows, device=device).unsqueeze(1)
    index = row * cols + torch.arange(cols, device=device)
    a = mixed((index * 0x9E3779B1 & MASK) ^ key)
    b = mixed(a + 0x9E3779B9 & MASK)
    return (a >> 12).int(), (b >> 12).int(), ((a & 255) << 8 | b & 255).int()


def mixed(h):
    """Murmur3's finaliser on 32 bits held in int64: all bits of the result depend on all of h."""
    h = (h ^ h >> 16) * 0x85EBCA6B & MASK
    h = (h ^ h >> 13) * 0xC2B2AE35 & MASK
    return h ^ h >> 16


def update_triton(w, g, m, m_scale, v, v_scale, first, key, factors):
    """update_torch in one kernel: it moves 10 bytes a bfloat16 weight.

    The last bits of float32 may differ.
    """
    groups = m_scale.numel()
    sizes = dict(COLS=w.size(1), PER_ROW=m_scale.size(1), ROUND=w.dtype.itemsize == 2, TILE=TILE)
    grid = (math.ceil(groups / TILE),)
    _update[grid](
        w, g, m, m_scale, v, v_scale, groups, first, key, *factors, **sizes, num_warps=WARPS
    )


if triton is not None:
    numbers = GROUP, SHIFT, 2.0**-SHIFT, LEAST, M_LEVELS, V_LEVELS, SIGN
    SIZE, BITS, STEP, FLOOR, M_TOP, V_TOP, MINUS = map(tl.constexpr, numbers)

    @triton.jit(do_not_specialize=["groups", "first", "key"])
    def _update(
        w, g, m, m_scale, v, v_scale, groups, first, key, keep, rate, beta1, rest1, beta2, rest2,
        root, eps, COLS: tl.constexpr, PER_ROW: tl.constexpr, ROUND: tl.constexpr,
        TILE: tl.constexpr,
    ):  # fmt: skip
        group = tl.program_id(0) * TILE + tl.arange(0, TILE)
        here = group < groups
        row = group // PER_ROW
        col = (group % PER_ROW * SIZE)[:, None] + tl.arange(0, SIZE)[None, :]
        inside = here[:, None] & (col < COLS)
        at = (row.to(tl.int64) * COLS)[:, None] + col
        index = ((row + first).to(tl.uint32) * COLS)[:, None] + col.to(tl.uint32)
        a = _mixed((index * 0x9E3779B1) ^ key.to(tl.uint32))
        b = _mixed(a + 0x9E3779B9)
        noise_m, noise_v = (a >> 12).to(tl.int32), (b >> 12).to(tl.int32)
        codes = tl.load(m + at, mask=inside, other=0).to(tl.int32)
        mean = _decoded(codes & M_TOP, tl.load(m_scale + group, mask=here, other=0.0), M_TOP)
        mean = tl.where(codes >= MINUS, -mean, mean)
        codes = tl.load(v + at, mask=inside, other=0).to(tl.int32)
        square = _decoded(codes, tl.load(v_scale + group, mask=here, other=0.0), V_TOP)
        grad = tl.load(g + at, mask=inside, other=0.0).to(tl.float32)
        weight = tl.load(w + at, mask=inside, other=0.0).to(tl.float32)
        mean = mean * beta1 + grad * rest1
        square = square * beta2 + grad * grad * rest2
        weight = weight * keep - mean / (tl.sqrt(square) * root + eps) * rate
        if ROUND:
            noise_w = (((a & 255) << 8) | (b & 255)).to(tl.int32)
            weight = ((weight.to(tl.int32, bitcast=True) + noise_w) & -65536).to(
                tl.float32, bitcast=True
            )
        tl.store(w + at, weight.to(w.dtype.element_ty), mask=inside)
        sign = (mean.to(tl.int32, bitcast=True) >> 24) & MINUS
        size, top = _encoded(tl.abs(mean), noise_m, M_TOP, True)
        tl.store(m + at, (size | sign).to(tl.uint8), mask=inside)
        tl.store(m_scale + group, top, mask=here)
        codes, top = _encoded(square, noise_v, V_TOP, False)
        tl.store(v + at, codes.to(tl.uint8), mask=inside)
        tl.store(v_scale + group, top, mask=here)

    @triton.jit
    def _decoded(codes, scale, LEVELS: tl.constexpr):
        steps = ((scale.to(tl.int32, bitcast=True) >> BITS) - LEVELS)[:, None] + codes
        return tl.where(codes > 0, (steps << BITS).to(tl.float32, bitcast=True), 0.0)

    @triton.jit
    def _encoded(x, noise, LEVELS: tl.constexpr, TO_ZERO: tl.constexpr):
        steps = (x.to(tl.int32, bitcast=True) + noise) >> BITS
        top = tl.maximum(tl.max(steps, 1), FLOOR + LEVELS)
        least = ((top - LEVELS + 1) << BITS).to(tl.float32, bitcast=True)[:, None]
        up = x > 0
        if TO_ZERO:
            up = x > noise.to(tl.float32) * (least * STEP)
        codes = tl.where(x < least, up.to(tl.int32), steps - (top - LEVELS)[:, None])
        return codes, (top << BITS).to(tl.float32, bitcast=True)

    @triton.jit
    def _mixed(h):
        h = (h ^ (h >> 16)) * 0x85EBCA6B  # as in `mixed`
        h = (h ^ (h >> 13)) * 0xC2B2AE35
        return h ^ (h >> 16)
