"""AdamW with 8-bit moments (fast/adam8.py describes the format): 2.03 bytes of optimizer state a weight instead of 8.

Tensors of one dimension (norms, biases) and tensors of fewer than 4,096 elements keep float32 moments. If such a tensor
is in bfloat16, it also keeps a float32 master copy that receives the updates: these tensors take little memory, and a
norm's gain near 1 would otherwise move in steps of 2^-7.
"""

import functools

import torch
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from fast import adam8
from scale import shards

SMALL = 4096  # tensors of fewer elements keep float32 moments


class AdamW8bit(torch.optim.Optimizer):
    """The update of torch.optim.AdamW (https://arxiv.org/abs/1711.05101) for float32 or bfloat16 weights.

    The state is allocated at construction and sharded over ranks as its parameter is: m, v (rows, cols) uint8 and
    m_scale, v_scale (rows, groups) float32; for small tensors exp_avg, exp_avg_sq and, in bfloat16, master. step: (1,)
    on the CPU.
    """

    def __init__(self, params, lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, seed=0):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))
        self.seed = seed
        self.numbers = {p: i for i, p in enumerate(p for g in self.param_groups for p in g["params"])}
        for p in self.numbers:
            self.state[p] = new_state(p)

    @torch.no_grad()
    def step(self):
        if getattr(self, "found_inf", 0):  # as in torch.optim.AdamW, but the host waits for it
            return
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
        w, g, *codes = (
            shards.local(t) for t in (p, p.grad, *(state[k] for k in ("m", "m_scale", "v", "v_scale")))
        )
        if w.numel():  # a rank may hold no rows of a short tensor
            key = adam8.random_key(self.seed, step, self.numbers[p])
            updater(w.device)(w, g.contiguous(), *codes, shards.own_rows(p)[0], key, *numbers)

    def load_state_dict(self, state_dict):
        """As torch.optim.Optimizer's, which would cast every state to its parameter's dtype."""
        own = self.state
        super().load_state_dict({**state_dict, "state": {}})
        self.state = own
        params = list(self.numbers)
        for i, saved in state_dict["state"].items():
            for kind, value in saved.items():
                own[params[i]][kind].copy_(value)


def new_state(p):
    """The state of parameter p, all zeros but for a master copy."""
    step = torch.zeros(1)
    if p.dim() == 2 and p.numel() >= SMALL:
        groups = -(-p.size(1) // adam8.GROUP)
        codes = {k: zeros_beside(p, p.size(1), torch.uint8) for k in ("m", "v")}
        return {
            "step": step,
            **codes,
            **{f"{k}_scale": zeros_beside(p, groups, torch.float32) for k in ("m", "v")},
        }
    moments = {
        k: torch.zeros_like(p, dtype=torch.float32, requires_grad=False) for k in ("exp_avg", "exp_avg_sq")
    }
    master = {} if p.dtype == torch.float32 else {"master": p.detach().float()}
    return {"step": step, **moments, **master}


def zeros_beside(p, cols, dtype):
    """Zeros of shape (rows of p, cols), sharded over ranks by rows as p is."""
    local = shards.local(p)
    zeros = torch.zeros(local.size(0), cols, dtype=dtype, device=local.device)
    if not isinstance(p, DTensor):
        return zeros
    whole = dict(shape=torch.Size((p.size(0), cols)), stride=(cols, 1))
    return DTensor.from_local(zeros, p.device_mesh, p.placements, run_check=False, **whole)


def update_plain(pairs, group):
    """PyTorch's own AdamW for (parameter, state) pairs with float32 moments."""
    if not pairs:
        return
    (beta1, beta2), local = group["betas"], shards.local
    weights = [local(state.get("master", p)) for p, state in pairs]
    grads = [local(p.grad).float() for p, _ in pairs]
    moments = [[local(state[k]) for _, state in pairs] for k in ("exp_avg", "exp_avg_sq")]
    options = dict(
        lr=group["lr"], weight_decay=group["weight_decay"], eps=group["eps"], amsgrad=False, maximize=False
    )
    adamw(
        weights,
        grads,
        *moments,
        [],
        [state["step"] for _, state in pairs],
        beta1=beta1,
        beta2=beta2,
        **options,
    )
    for (p, state), weight in zip(pairs, weights):
        if "master" in state:
            local(p).copy_(weight)


@functools.cache
def updater(device):
    """The update function for a device: a Triton kernel on CUDA where Triton is installed, else plain PyTorch."""
    if device.type == "cuda":
        try:
            from fast.adam8_triton import update

            return update
        except ImportError:
            print(
                "warning: optimizer=adamw8bit is slow without the package triton; pip install triton",
                flush=True,
            )
    return adam8.update_torch
