"""--norms_interval: RMS of each matrix' weight, gradient and update, to see how a spike begins."""

import contextlib
import functools
import math

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import optim
from scale import parallel
from scale.shards import local

PARTS = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up")}  # layers that hold several matrices


class Norms:
    """Measures at an interval of steps.

    No host waits for it, since a line is written when its step is read. The update is the
    difference from a copy of the weights, of each rank's own rows. That lies where the activations
    lay, which the backward has freed.
    """

    def __init__(self, model, cfg, log):
        self.interval, self.log = cfg.norms_interval, log
        self.matrices = named_matrices(model, cfg) if self.interval else {}

    @contextlib.contextmanager
    def around_update(self, step):
        """Around an optimizer's step: the weights before it, its gradients and its update."""
        if not self.matrices or step % self.interval:
            yield
            return
        before = {matrix.weight: local(matrix.weight).clone() for matrix in self.matrices.values()}
        grads = {}
        for p, rows in before.items():
            grads[p] = torch.zeros_like(rows) if p.grad is None else local(p.grad)
        sums = [self.squares(before), self.squares(grads)]
        del grads  # so that the step frees them
        yield
        # from here on the copies hold the update, in place
        torch._foreach_sub_([*before.values()], [local(p) for p in before])
        sums = torch.stack([*sums, self.squares(before)])
        a_weight = next(iter(before))
        if isinstance(a_weight, DTensor):  # as all are then
            dist.all_reduce(sums, group=a_weight.device_mesh.get_group("shard"))
        self.log.with_step[step] = functools.partial(self.record, step, parallel.Later(sums))

    def squares(self, tensors):
        """float32 sums of squares, one for each matrix, of this rank's rows.

        tensors: {weight: its rows}.
        """
        rows = [matrix.rows_in(tensors[matrix.weight]) for matrix in self.matrices.values()]
        if rows[0].is_cpu:  # where `norms` has one of each row
            return torch.stack([optim.norms([part]).square().sum() for part in rows])
        return optim.norms(rows).square()

    def record(self, step, later):
        lines = {}
        for quantity, sums in zip(("weight", "gradient", "update"), later.get()):
            lines[quantity] = {}
            for (name, matrix), total in zip(self.matrices.items(), sums):
                rms = math.sqrt(total / math.prod(matrix.shape))
                lines[quantity][name] = float(f"{rms:.4g}")
        self.log.record("norms", step, **lines)


def named_matrices(model, cfg):
    """{name: optim.Matrix} of trained weights.

    A weight of more than two dimensions, such as a stack, is one matrix.
    """
    found = {}
    for name, p in model.named_parameters():
        if not p.requires_grad or p.dim() < 2:
            continue
        matrices = [optim.Matrix(p, first=0, rows=math.prod(p.shape[:-1]))]
        if p.dim() == 2:
            matrices = optim.matrices_of(name, p, cfg)
        name = name.removesuffix(".weight")
        prefix, _, leaf = name.rpartition(".")
        names = [f"{prefix}.{part}" for part in PARTS.get(leaf, ())]
        if len(matrices) == 1:
            names = [name]
        elif len(matrices) != len(names):  # of an edit
            names = [f"{name}.{i}" for i in range(len(matrices))]
        found |= zip(names, matrices)
    return found
