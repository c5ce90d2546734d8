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

import torch
from torch.optim.adamw import adamw

from scale.memory import GROUP
from scale.shards import local, rows_of

# tensors of fewer elements, and vectors, have float32 moments and in bf16 a float32 master copy
SMALL = 4096
# groups in a call of `update`: not compiled it needs 4 GiB for them on a GPU; a CPU caches them
CHUNK, CPU_CHUNK = 2**18, 2**12
# elements up to which tensors are updated together where `update` is not compiled
TOGETHER = 2**18
SHIFT = 20  # bits of a float32 below the third bit of its mantissa
# the codes of a group's largest first and largest second moment; code 0 is zero
M_LEVELS, V_LEVELS = 127, 255
SIGN = 128  # the bit of a first moment's code that says that it is negative
LEAST = 8  # exponent and mantissa bits of the smallest normal float32: no code stands for less


class AdamW8bit(torch.optim.Optimizer):
    """torch.optim.AdamW's update (https://arxiv.org/abs/1711.05101), float32 or bfloat16 weights.

    State, made at once and sharded as the parameter is: step (1,) on the CPU; m, v (rows, cols)
    uint8 and m_scale, v_scale (rows, groups) float32, or exp_avg, exp_avg_sq and master.
    compiled: on CUDA one kernel updates a tensor; it moves 10 bytes a bfloat16 weight.
    """

    def __init__(
        self, params, lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, seed=0, compiled=False
    ):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))
        self.seed = seed
        self.numbers = {}  # of each parameter, for its random numbers
        for group in self.param_groups:
            for p in group["params"]:
                self.numbers[p] = len(self.numbers)
                self.state[p] = new_state(p)
        self.compiled = compiled and p.is_cuda
        self.update = update
        if self.compiled:
            # by default a warp would update 1,024 elements; this tries one with 256 as well
            self.update = torch.compile(update, options={"max_autotune_pointwise": True})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            small, coded = [], {}  # coded: lists of parameters that `update` takes together
            for p in group["params"]:
                if p.grad is None:
                    continue
                if not is_coded(p):
                    small.append(p)
                    continue
                self.state[p]["step"] += 1
                step = int(self.state[p]["step"])
                alone = self.compiled or p.numel() > TOGETHER
                coded.setdefault((step, p if alone else p.dtype), []).append(p)
            self.update_small(small, group)
            for (step, _), params in coded.items():
                self.update_coded(params, step, group)

    def update_small(self, params, group):
        """PyTorch's own AdamW, with float32 moments."""
        states = [self.state[p] for p in params]
        weights = [local(state.get("master", p)) for p, state in zip(params, states)]
        beta1, beta2 = group["betas"]
        adamw(
            weights,
            grads=[local(p.grad).float() for p in params],
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
        for p, state, weight in zip(params, states, weights):
            if "master" in state:
                local(p).copy_(weight)

    def update_coded(self, params, step, group):
        """Updates one parameter in place; small ones as one tensor, which is copied back."""
        changed, rows = [], []  # of each parameter
        for p in params:
            state = self.state[p]
            elements = [local(p), local(state["m"]), local(state["v"])]
            scales = [local(state["m_scale"]), local(state["v_scale"])]
            first = first_elements(p) + random_key(self.seed, step, self.numbers[p])
            changed.append(elements + scales)
            row = [*map(in_groups, elements), *(scale.view(-1, 1) for scale in scales)]
            rows.append([*row, in_groups(local(p.grad)), first])
        tensors = rows[0] if len(rows) == 1 else [*map(torch.cat, zip(*rows))]
        factors = factors_of(group, step)
        chunk = CHUNK if tensors[0].is_cuda else CPU_CHUNK
        for first in range(0, len(tensors[0]), chunk):
            parts = [tensor[first : first + chunk] for tensor in tensors]
            if self.compiled:
                for part in parts:  # one kernel for any number of groups
                    torch._dynamo.maybe_mark_dynamic(part, 0)
            self.update(*parts, factors)
        pieces = [tensor.split([len(row[0]) for row in rows]) for tensor in tensors]
        for xs, updated in zip(changed, zip(*pieces)):
            for x, grouped in zip(xs, updated):
                if x.numel() and x.data_ptr() != grouped.data_ptr():  # a copy, perhaps padded
                    x.copy_(grouped.reshape(len(x), -1)[:, : x.size(1)])


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
            state[f"{moment}_scale"] = torch.zeros_like(scales, dtype=torch.float32)
        return state
    for moment in ("exp_avg", "exp_avg_sq"):
        state[moment] = torch.zeros_like(p, dtype=torch.float32)
    if p.dtype != torch.float32:
        state["master"] = p.float()
    return state


def factors_of(group, step):
    """The numbers of an AdamW step, as tensors: torch.compile takes other numbers for constants."""
    lr = group["lr"]
    beta1, beta2 = group["betas"]
    numbers = [
        1 - lr * group["weight_decay"],  # what is kept of a weight
        lr / (1 - beta1**step),  # the rate of a first moment, its bias correction included
        beta1,
        1 - beta1,
        beta2,
        1 - beta2,
        (1 - beta2**step) ** -0.5,  # of a second moment's root, its bias correction
        group["eps"],
    ]
    return torch.tensor(numbers).unbind()


def in_groups(x):
    """(rows, cols) -> (groups, GROUP): a view, or a copy whose rows end with zeros."""
    padding = -x.size(1) % GROUP
    if padding:
        x = torch.nn.functional.pad(x, (0, padding))
    return x.reshape(-1, GROUP)


def first_elements(p):
    """(groups, 1) int32: the number, in the whole tensor, of the first element of each group."""
    first, last = rows_of(p)
    rows = torch.arange(first, last, device=p.device) * p.size(1)
    columns = torch.arange(0, p.size(1), GROUP, device=p.device)
    return (rows.unsqueeze(1) + columns).int().view(-1, 1)


def update(w, m, v, m_scale, v_scale, g, first, factors):
    """One AdamW step of w, its codes and scales in place.

    w, codes m and v, and the gradient g: (groups, GROUP); scales, and `first`, which `noises`
    takes: (groups, 1); factors: of `factors_of`.
    """
    keep, rate, beta1, rest1, beta2, rest2, root, eps = factors
    noise_m, noise_v, noise_w = noises(first)
    g = g.float()
    codes = m.int()
    mean = decoded(codes & M_LEVELS, m_scale, M_LEVELS)
    mean = torch.where(codes >= SIGN, -mean, mean)
    mean = mean * beta1 + g * rest1
    square = decoded(v.int(), v_scale, V_LEVELS)
    square = square * beta2 + g * g * rest2
    weight = w.float() * keep - mean / (square.sqrt() * root + eps) * rate
    if w.dtype == torch.bfloat16:
        weight = ((weight.view(torch.int32) + noise_w) & -65536).view(torch.float32)
    w.copy_(weight)
    sign = (mean.view(torch.int32) >> 24) & SIGN
    codes, top = encoded(mean.abs(), noise_m, M_LEVELS, to_zero=True)
    m.copy_(codes | sign)
    m_scale.copy_(top)
    codes, top = encoded(square, noise_v, V_LEVELS, to_zero=False)
    v.copy_(codes)
    v_scale.copy_(top)


def decoded(codes, scale, levels):
    """float32 magnitudes of int32 codes, (groups, GROUP); scale: (groups, 1), of code `levels`."""
    steps = (scale.view(torch.int32) >> SHIFT) + codes - levels
    return torch.where(codes > 0, (steps << SHIFT).view(torch.float32), 0.0)


def encoded(x, noise, levels, to_zero):
    """(int32 codes, scales) of magnitudes x: (groups, GROUP), rounded with SHIFT bits of `noise`.

    A value below the smallest code's becomes, with to_zero, that code or zero at random; else
    always that code: a second moment of zero beside a first that is not zero would make Adam's
    update arbitrarily large.
    """
    steps = (x.view(torch.int32) + noise) >> SHIFT
    top = steps.amax(-1, keepdim=True).clamp(min=LEAST + levels)
    zero = top - levels  # the step of code 0
    most = 0.0  # of what becomes zero
    if to_zero:
        least = ((zero + 1) << SHIFT).view(torch.float32)
        most = noise.float() * (least * 2.0**-SHIFT)
    codes = torch.where(x > most, (steps - zero).clamp(min=1), 0)
    return codes, (top << SHIFT).view(torch.float32)


def random_key(*numbers):
    """31 pseudo-random bits, the same for the same integers."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") >> 1


def noises(first):
    """Three (groups, GROUP) int32 tensors of 20, 20 and 16 random bits.

    first: (groups, 1) int32, the number of a group's first element plus a `random_key`. The 32-bit
    arithmetic wraps, and its multipliers are negative where the first bit is set.
    """
    element = first + torch.arange(GROUP, dtype=torch.int32, device=first.device)
    golden = 0x9E3779B1 - 2**32
    a = mixed(element * golden)
    b = mixed(a + (0x9E3779B9 - 2**32))
    return shifted(a, 12), shifted(b, 12), (a & 255) << 8 | b & 255


def mixed(h):
    """Murmur3's finaliser on 32 bits: all bits of the result depend on all of h."""
    h = (h ^ shifted(h, 16)) * (0x85EBCA6B - 2**32)
    h = (h ^ shifted(h, 13)) * (0xC2B2AE35 - 2**32)
    return h ^ shifted(h, 16)


def shifted(h, bits):
    """The unsigned 32-bit h shifted right, as int32."""
    return (h >> bits) & (2 ** (32 - bits) - 1)
