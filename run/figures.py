"""A step's figures: its loss and GPT.forward's extras, as means over the targets of all ranks."""

import torch
from torch.distributed.tensor import DTensor

from run import agreement
from scale import parallel
from system.errors import UserError


class Figures:
    """Adds up what GPT.forward returns in the micro-steps of all ranks, on the device.

    A micro-step's sums are a list of float32 scalars: its part of the loss, targets, and then for
    each extra the extra * targets. names: of the extras, as the first forward returned them; every
    later one must return the same.
    """

    def __init__(self, batch_tokens, ranks):
        self.batch_tokens = batch_tokens
        self.ranks = ranks
        self.names = None
        self.own = None  # further names, see `over_ranks`

    def sums(self, part, count, extras):
        """The sums of a micro-step.

        part: loss * count / the tokens that this rank reads in a step.
        """
        names = sorted(extras)
        if self.names is None:
            self.names = names
        if names != self.names:
            raise UserError(f"GPT.forward returned the extras {names}, at first {self.names}")
        count = scalar(count, part.device)
        part = torch.where(count > 0, part.detach(), 0.0)  # the mean of no target may be NaN
        sums = [part, count]
        for name in names:
            value = scalar(extras[name], part.device) * count
            sums.append(torch.where(count > 0, value, 0.0))
        return sums

    def over_ranks(self, totals, norm, own):
        """A step's figures over all ranks, for `means`, on their way to the host: parallel.Later.

        norm: of the gradients; own: {name: a further number of this rank}, the same names in each
        step. It takes one all-reduce, for which no host waits, except in the first step, when the
        ranks compare extras.
        """
        if self.own is None:
            agreement.same_on_all_ranks({"extras of GPT.forward": self.names})
        self.own = list(own)
        if isinstance(norm, DTensor):  # as PyTorch's own clipping returns it
            norm = norm.full_tensor()
        loss = totals[0].float()  # whose device and dtype all have
        figures = [total.to(loss) for total in (*totals, norm)]
        figures += [torch.full_like(loss, number) for number in own.values()]
        sums = parallel.sum_over_ranks(torch.stack(figures))
        return parallel.Later(sums / self.ranks)

    def means(self, later):
        """(loss, norm, {extra: mean}, {name in `own`: mean}); waits for the step's end.

        later: from `over_ranks`. The loss is None where the step had no target.
        """
        part, targets, *values = later.get()
        loss = None  # targets: of a rank, on average
        if targets:
            loss = part * (self.batch_tokens / self.ranks / targets)
        extras = {}
        for name, value in zip(self.names, values):
            extras[name] = value / (targets or 1)
        norm, *own = values[len(extras) :]
        return loss, norm, extras, dict(zip(self.own, own))


def scalar(value, device):
    """A detached float32 scalar of a number or of a tensor with one element."""
    if not torch.is_tensor(value):
        return torch.full((), value, dtype=torch.float32, device=device)
    return value.detach().float().reshape(())
