"""run/prove.py: an edit holds in the modes of a run, or the run ends in one line that names one.

Each edit is made in the process of a rank, which then proves a narrow copy of it.
"""

import contextlib
import io
import time

import pytest
import ranks
import torch
import torch.nn.functional as F
from conftest import flags, write_manifest, write_shard

SEPARATOR = 256


def proved(edit, words):
    """(the row of the summary or what the line says, warnings) of a rank."""
    import train
    from configurator import UserError, configure
    from run.build import make_loader
    from run.prove import prove
    from scale import parallel
    from settings import Config

    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        EDITS[edit]() if edit else None
        cfg = configure(Config, list(words))
        world = parallel.join(cfg)
        loader = make_loader(cfg, world)
        before = loader.state_dict()
        try:
            rows = prove(train.Training, cfg, world, loader, loader.eot)
            assert loader.state_dict() == before
            found = rows[0][1]
        except UserError as error:
            rows = []
            found = f"refused: {error}"
        time.sleep(0.5 * world.main)  # it holds the store, from which the others learn the same
    return found, said.getvalue(), rows


EDITS = {}


def edit(function):
    EDITS[function.__name__] = function
    return function


def around(owner, name, make):
    """Replaces a method by make(the method)."""
    setattr(owner, name, make(getattr(owner, name)))


def block_forward(change):
    """Changes what a block returns: change(block, x) -> x."""
    import model as models

    def make(forward):
        def changed(self, x, idx, positions):
            return change(self, forward(self, x, idx, positions))

        return changed

    around(models.Block, "forward", make)


def gpt_forward(change):
    """Changes a loss: change(model, idx, targets, loss, count) -> (loss, count)."""
    import model as models

    def make(forward):
        def changed(self, idx, targets, positions=None, reduction="mean"):
            loss, count, extras = forward(self, idx, targets, positions, reduction)
            return *change(self, idx, targets, loss, count), extras

        return changed

    around(models.GPT, "forward", make)


def shifted(x):
    return F.pad(x, (0, 0, 1, 0))[:, :-1]


@edit
def token_shift():
    block_forward(lambda block, x: x + 0.5 * shifted(x))


@edit
def convolution():
    import model as models

    def make(init):
        def changed(self, cfg, rope, layer):
            init(self, cfg, rope, layer)
            self.conv = torch.nn.Conv1d(cfg.n_embd, cfg.n_embd, 3, groups=cfg.n_embd)

        return changed

    around(models.Block, "__init__", make)
    block_forward(lambda block, x: x + block.conv(F.pad(x.mT, (2, 0))).mT)


@edit
def alibi():
    core_is(lambda q, k, v, *_: with_bias(q, k, v, torch.arange(1, q.size(1) + 1)))


@edit
def alibi_told():
    def core(q, k, v, *_, heads=slice(None)):
        return with_bias(q, k, v, torch.arange(1, 5)[heads])

    core_is(core)


def core_is(core):
    import model as models

    models.Attention.core = staticmethod(core)


def with_bias(q, k, v, rates):
    at = torch.arange(q.size(2))
    bias = 2.0 ** -rates.view(-1, 1, 1) * (at - at.unsqueeze(1))
    bias = bias.masked_fill(at > at.unsqueeze(1), -torch.inf)
    return F.scaled_dot_product_attention(q, k, v, bias)


@edit
def bypass():
    """An attention that does not call its core."""
    import kernels
    import model as models

    def forward(self, x, idx, positions):
        q, k, v = kernels.qkv(x, self.qkv, self.heads, self.head_dim, False)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).flatten(2))

    models.Attention.forward = forward


@edit
def numpy_channels():
    import numpy as np

    block_forward(lambda block, x: x * torch.from_numpy(np.random.rand(x.size(-1)) > 0.1))


@edit
def own_generator():
    own_draws(lambda block: torch.Generator().manual_seed(3))


@edit
def unseeded_generator():
    def seeded(block):
        generator = torch.Generator()
        generator.seed()
        return generator

    own_draws(seeded)


def own_draws(make_generator):
    def change(block, x):
        if not hasattr(block, "generator"):
            block.generator = make_generator(block)
        return x * torch.rand(x.size(-1), generator=block.generator)

    block_forward(change)


@edit
def random_depth():
    import random

    import model as models

    def make(forward):
        def changed(self, x, idx, positions):
            if random.random() < 0.3:
                return x
            return forward(self, x, idx, positions)

        return changed

    around(models.Block, "forward", make)


@edit
def count():
    def change(block, x):
        block.calls = getattr(block, "calls", 0) + 1
        return x * (1 + 0.1 * block.calls)

    block_forward(change)


@edit
def memory_of_a_batch():
    def change(block, x):
        y = x + 0.5 * getattr(block, "memory", 0.0)
        block.memory = x.detach().abs().mean()
        return y

    block_forward(change)


@edit
def count_in_a_dict():
    def change(block, x):
        kept = block.__dict__.setdefault("kept", {"n": 0})
        kept["n"] += 1
        return x * (1 + 0.1 * kept["n"])

    block_forward(change)


@edit
def losses_in_a_list():
    """Which the forward adds up and empties only as it begins."""
    def change(block, x):
        block.sizes = [*getattr(block, "sizes", []), x.square().mean()]
        return 2 * x.tanh()

    def added(model, idx, targets, loss, count):
        sizes = [size for block in model.blocks for size in block.sizes]
        for block in model.blocks:
            block.sizes = []
        return loss + 0.1 * sum(sizes), count

    block_forward(change)
    gpt_forward(added)


@edit
def shared_list():
    """A list that each block is given and changes."""
    import model as models

    def hidden(self, idx, positions=None):
        x = embedded = self.embed(idx, positions)
        seen = []
        for mix, block in self.layers:
            x = block(mix(x, embedded), idx, positions, seen)
        return self.norm(x)

    def make(forward):
        def changed(self, x, idx, positions, seen):
            seen.append(x.mean())
            return forward(self, x, idx, positions) * (1 + 0.1 * len(seen) + 0 * sum(seen))

        return changed

    around(models.Block, "forward", make)
    models.GPT.hidden = hidden


@edit
def parameter_of_another_block():
    import model as models

    def make(forward):
        def changed(self, idx, targets, positions=None, reduction="mean"):
            loss, count, extras = forward(self, idx, targets, positions, reduction)
            return loss + self.blocks[0].mlp.up.weight.square().mean(), count, extras

        return changed

    around(models.GPT, "forward", make)


@edit
def no_mean():
    def change(model, idx, targets, loss, count):
        embedded = model.wte(idx).mean((0, 1))
        return loss + 5 * embedded.square().sum(), count

    gpt_forward(change)


@edit
def targets_ahead():
    def change(model, idx, targets, loss, count):
        import kernels

        ahead = F.pad(targets[:, 1:], (0, 1), value=-100)
        more, _ = model.head(model.wte(idx), ahead, "none")
        return loss + kernels.mean_loss(more, targets, "mean")[0], count

    gpt_forward(change)


@edit
def positions_ignored():
    import model as models

    models.LearnedPositions.forward = lambda self, x, positions: x + self.weight[: x.size(1)]


@edit
def not_causal():
    core_is(lambda q, k, v, *_: F.scaled_dot_product_attention(q, k, v))


@edit
def unused_parameter():
    import model as models

    def make(init):
        def changed(self, cfg):
            init(self, cfg)
            self.spare = models.Linear(cfg.n_embd, cfg.n_embd)

        return changed

    around(models.GPT, "__init__", make)


@edit
def experts():
    import model as models

    def make(init):
        def changed(self, cfg, rope, layer):
            init(self, cfg, rope, layer)
            self.router = models.Linear(cfg.n_embd, 4)
            self.experts = torch.nn.ModuleList(models.make_mlp(cfg) for _ in range(4))

        return changed

    def change(block, x):
        share, best = block.router(x).softmax(-1).max(-1)
        y = torch.zeros_like(x)
        for i, expert in enumerate(block.experts):
            chosen = best == i
            if chosen.any():
                y[chosen] = expert(x[chosen]) * share[chosen].unsqueeze(-1)
        return x + y

    around(models.Block, "__init__", make)
    block_forward(change)


@edit
def experts_by_token():
    """Of which most have no token in a micro-batch."""
    import model as models

    def make(init):
        def changed(self, cfg, rope, layer):
            init(self, cfg, rope, layer)
            self.experts = torch.nn.ModuleList(models.make_mlp(cfg) for _ in range(3))

        return changed

    def make_forward(forward):
        def changed(self, x, idx, positions):
            x = forward(self, x, idx, positions)
            y = torch.zeros_like(x)
            for byte, expert in zip((40, 95, 91), self.experts):
                if (idx == byte).any():
                    y[idx == byte] = expert(x[idx == byte])
            return x + y

        return changed

    around(models.Block, "__init__", make)
    around(models.Block, "forward", make_forward)


def optimizer(make):
    import optim

    optim.build = lambda name, groups, model, cfg: make(groups, model, cfg)


class Momentum(torch.optim.Optimizer):
    """SGD with momentum."""

    def __init__(self, groups, lr):
        super().__init__(groups, dict(lr=lr, weight_decay=0.0))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    if not state:
                        state["mean"] = torch.zeros_like(p)
                    state["mean"].lerp_(p.grad, 0.1)
                    p.add_(self.update(p, state["mean"]), alpha=-group["lr"])

    def update(self, p, mean):
        return mean


@edit
def momentum():
    optimizer(lambda groups, model, cfg: Momentum(groups, cfg.lr))


@edit
def noise_in_the_optimizer():
    class Noisy(Momentum):
        def update(self, p, mean):
            return mean + 0.01 * torch.randn_like(mean)

    optimizer(lambda groups, model, cfg: Noisy(groups, cfg.lr))


@edit
def count_of_the_optimizer():
    """Outside of its state_dict."""

    class Counting(Momentum):
        steps = 0

        def step(self):
            self.steps += 1
            super().step()

        def update(self, p, mean):
            return mean / (1 + self.steps % 10)

    optimizer(lambda groups, model, cfg: Counting(groups, cfg.lr))


@edit
def rows_for_matrices():
    """An update that needs whole matrices, computed of a rank's rows."""
    from scale.shards import local

    class Rows(Momentum):
        def update(self, p, mean):
            rows = local(mean)
            local(mean).copy_(rows / (rows.norm() + 1e-6))
            return mean

    optimizer(lambda groups, model, cfg: Rows(groups, cfg.lr))


@edit
def sums_in_hooks():
    """Which an optimizer reads."""
    import model as models

    def make(init):
        def changed(self, cfg):
            init(self, cfg)
            self.seen = {}
            for block in self.blocks:
                block.mlp.up.register_forward_pre_hook(self.add)

        return changed

    def add(self, layer, inputs):
        self.seen[layer] = self.seen.get(layer, 0.0) + float(inputs[0].detach().square().sum())

    models.GPT.add = add
    around(models.GPT, "__init__", make)

    class Scaled(Momentum):
        def update(self, p, mean):
            return mean / (1 + sum(self.model.seen.values()))

    def made(groups, model, cfg):
        found = Scaled(groups, cfg.lr)
        found.model = model
        return found

    optimizer(made)
