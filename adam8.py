"""AdamW with its two moments in 8 bits an element: 2.03 bytes a weight where float32 takes 8.

After https://arxiv.org/abs/2110.02861: codes for groups of 256 elements along the last dimension, each with a scale of
its own. A code is the exponent and the three leading mantissa bits of a float32, counted down from the group's largest:
a grid of steps of 6 to 12%, logarithmic but for straight lines between powers of two, that is coded and decoded by
shifts, to the same numbers on every device. It is one grid for all scales, so that a scale that moves rounds nothing
anew. The second moment has 8 bits and reaches down to 2^-32 of the group's largest: its root, which Adam divides by, to
2^-16 in steps of 3 to 6%. The first has a sign and 7 bits and reaches 2^-16 as well.

Both are rounded up or down at random in proportion, right in the mean: to the nearest, a second moment that loses 5% a
step (beta2 = 0.95) could stay where it is for ever. bfloat16 weights are rounded so too, or updates under 2^-9 of a
weight would be lost (https://arxiv.org/abs/2010.06192). The random numbers are a hash of seed, step, tensor and
element: any number of ranks and any resumed run draw the same.

Tensors of one dimension (norms, biases) or under 4,096 elements keep float32 moments, and if they are in bfloat16 a
float32 copy that updates are added to: they are few, and a gain near 1 would wander in steps of 2^-7.
"""

import functools
import hashlib

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

import parallel

GROUP = 256  # elements with one scale
SMALL = 4096  # tensors of fewer elements are not coded
SHIFT = 20  # bits of a float32 behind the third of its mantissa
M_LEVELS, V_LEVELS = 127, 255  # the codes of a group's largest; 0 is zero
LEAST = 8  # exponent and mantissa bits of the least normal float32: no code stands for less
MASK = 0xFFFFFFFF


class AdamW8bit(torch.optim.Optimizer):
    """torch.optim.AdamW's update (https://arxiv.org/abs/1711.05101); weights in float32 or bfloat16, FSDP2's too.

    State by parameter, made at once, split over ranks as the parameter is: m, v (rows, cols) uint8, m_scale, v_scale
    (rows, groups) float32; of small tensors exp_avg, exp_avg_sq and, for bfloat16, master. step: (1,), on the CPU.
    """

    def __init__(self, params, lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, seed=0):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))
        self.seed = seed
        self.numbers = {p: i for i, p in enumerate(p for g in self.param_groups for p in g["params"])}
        for p in self.numbers:
            self.state[p] = new_state(p)

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            for p in params:
                if "m" in self.state[p]:
                    self.update_coded(p, group)
            update_plain([(p, self.state[p]) for p in params if "m" not in self.state[p]], group)

    def update_coded(self, p, group):
        state = self.state[p]
        state["step"] += 1
        step, (beta1, beta2), lr = int(state["step"]), group["betas"], group["lr"]
        keep, rate = 1 - lr * group["weight_decay"], lr / (1 - beta1**step)
        numbers = (keep, rate, beta1, 1 - beta1, beta2, 1 - beta2, (1 - beta2**step) ** -0.5, group["eps"])
        w, g, *codes = (parallel.local(t) for t in (p, p.grad, *(state[k] for k in ("m", "m_scale", "v", "v_scale"))))
        if w.numel():  # a rank may hold no row
            key = random_key(self.seed, step, self.numbers[p])
            updater(w.device)(w, g.contiguous(), *codes, parallel.own_rows(p)[0], key, *numbers)

    def load_state_dict(self, state_dict):
        """As torch's, which would cast the states to their parameters' dtype."""
        own = self.state
        super().load_state_dict({**state_dict, "state": {}})
        self.state = own
        params = list(self.numbers)
        for i, saved in state_dict["state"].items():
            for kind, value in saved.items():
                own[params[i]][kind].copy_(value)


def new_state(p):
    step = torch.zeros(1)
    if p.dim() == 2 and p.numel() >= SMALL:
        groups = -(-p.size(1) // GROUP)
        codes = {k: zeros_beside(p, p.size(1), torch.uint8) for k in ("m", "v")}
        return {"step": step, **codes, **{f"{k}_scale": zeros_beside(p, groups, torch.float32) for k in ("m", "v")}}
    moments = {k: torch.zeros_like(p, dtype=torch.float32, requires_grad=False) for k in ("exp_avg", "exp_avg_sq")}
    master = {} if p.dtype == torch.float32 else {"master": p.detach().float()}
    return {"step": step, **moments, **master}


def zeros_beside(p, cols, dtype):
    """Zeros (rows of p, cols), of which a rank has the rows that it has of p."""
    local = parallel.local(p)
    zeros = torch.zeros(local.size(0), cols, dtype=dtype, device=local.device)
    if not isinstance(p, DTensor):
        return zeros
    whole = dict(shape=torch.Size((p.size(0), cols)), stride=(cols, 1))
    return DTensor.from_local(zeros, p.device_mesh, p.placements, run_check=False, **whole)


def update_plain(pairs, group):
    """torch's own AdamW for (parameter, state) pairs with float32 moments."""
    if not pairs:
        return
    (beta1, beta2), local = group["betas"], parallel.local
    weights = [local(state.get("master", p)) for p, state in pairs]
    grads = [local(p.grad).float() for p, _ in pairs]
    moments = [[local(state[k]) for _, state in pairs] for k in ("exp_avg", "exp_avg_sq")]
    options = dict(lr=group["lr"], weight_decay=group["weight_decay"], eps=group["eps"], amsgrad=False, maximize=False)
    adamw(weights, grads, *moments, [], [state["step"] for _, state in pairs], beta1=beta1, beta2=beta2, **options)
    for (p, state), weight in zip(pairs, weights):
        if "master" in state:
            local(p).copy_(weight)


def random_key(*numbers):
    """31 bits that look random, the same for the same integers."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") >> 1


@functools.cache
def updater(device):
    """The function that updates tensors on a device: one kernel on CUDA, where Triton is installed."""
    if device.type == "cuda":
        try:
            from adam8_kernel import update

            return update
        except ImportError:
            print("warning: optimizer=adamw8bit without the package triton is slow", flush=True)
    return update_torch


# -- the numbers in plain torch: for other devices, and what the kernel is compared with


def update_torch(w, g, m, m_scale, v, v_scale, first, key, keep, rate, beta1, rest1, beta2, rest2, root, eps):
    """One AdamW step of w: (rows, cols) from its gradient g; w and the codes are updated in place.

    first: the row of the whole tensor that w begins with; key: of this step's random numbers. keep: 1 - lr * weight
    decay; rate: lr / (1 - beta1^step); rest: 1 - beta; root: 1 / sqrt(1 - beta2^step).
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
    """(rows, cols) -> (rows, groups, GROUP), the last group filled up with zeros."""
    return F.pad(x, (0, -x.size(1) % GROUP)).unflatten(1, (-1, GROUP))


def ungrouped(x, like):
    return x.flatten(1)[:, : like.size(1)]


def decoded(codes, scale, levels):
    """Magnitudes, float32, of int32 codes from 0 to `levels`: (..., GROUP); scale: (...), what code `levels` means."""
    steps = (scale.view(torch.int32) >> SHIFT).unsqueeze(-1) + codes - levels
    return torch.where(codes > 0, (steps << SHIFT).view(torch.float32), 0.0)


def encoded(x, noise, levels, to_zero):
    """(codes in int32, scale) of magnitudes x: (..., GROUP), by SHIFT random bits each; decoded they are x in the mean.

    Under the least code's value: to_zero, that or zero at random; else that, since a second moment of zero beside a
    first that is not would make Adam leap.
    """
    steps = (x.view(torch.int32) + noise) >> SHIFT
    top = steps.amax(-1).clamp(min=LEAST + levels)
    least = ((top - levels + 1) << SHIFT).view(torch.float32).unsqueeze(-1)
    up = x > noise.float() * (least * 2.0**-SHIFT) if to_zero else x > 0
    codes = torch.where(x < least, up.int(), steps - (top - levels).unsqueeze(-1))
    return codes, (top << SHIFT).view(torch.float32)


def rounded(x, noise, dtype):
    """x in `dtype`, for bfloat16 by 16 random bits each, right in the mean."""
    return ((x.view(torch.int32) + noise) & -65536).view(torch.float32).to(dtype) if dtype == torch.bfloat16 else x


def noises(first, rows, cols, key, device):
    """Random int32 of (20, 20, 16) bits, (rows, cols) each, for a tensor's rows from `first` on."""
    row = torch.arange(first, first + rows, device=device).unsqueeze(1)
    index = row * cols + torch.arange(cols, device=device)
    a = mixed((index * 0x9E3779B1 & MASK) ^ key)
    b = mixed(a + 0x9E3779B9 & MASK)
    return (a >> 12).int(), (b >> 12).int(), ((a & 255) << 8 | b & 255).int()


def mixed(h):
    """Murmur3's last step, by which each of 32 bits, held in int64, depends on each."""
    h = (h ^ h >> 16) * 0x85EBCA6B & MASK
    h = (h ^ h >> 13) * 0xC2B2AE35 & MASK
    return h ^ h >> 16
