"""run/prove.py: an edit holds in the modes of a run, or the run ends in one line that names one.

Each edit is made in the process of a rank, which then proves a narrow copy of it.
"""

import contextlib
import io
import re
import time

import pytest
import ranks
import torch
import torch.nn.functional as F
from conftest import flags
from torch.distributed.tensor import DTensor

from configurator import configure
from settings import Config
from system.errors import UserError


def proved(edit, words):
    """(what prove says, "refused: ..." of a UserError, and what it prints) in a rank."""
    import run.prove
    import train
    from run.build import make_loader
    from scale import parallel

    run.prove.PATIENCE_S = 10
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        if edit:
            EDITS[edit]()
        cfg = configure(Config, list(words))
        world = parallel.join(cfg)
        loader = make_loader(cfg, world)
        before = loader.state_dict()
        try:
            ((_, found),) = run.prove.prove(train.Training, cfg, world, loader, None)
            assert loader.state_dict() == before
        except UserError as error:
            found = f"refused: {error}"
        time.sleep(0.5 * world.main)  # it holds the store, from which others learn the same
    return found, said.getvalue()


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
def skipped_blocks():
    """Which block is left out, each rank draws."""
    import random

    import model as models

    def hidden(self, idx, positions=None):
        x = embedded = self.embed(idx, positions)
        for mix, block in self.layers:
            if random.random() < 0.7:
                x = block(mix(x, embedded), idx, positions)
        return self.norm(x)

    models.GPT.hidden = hidden


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


def micro_step(change):
    """Adds change(training, x) to the loss of a micro-step."""
    import train

    def changed(self, x, y, positions=None):
        loss, count, extras = self.model(x, y, positions)
        part = (loss + change(self, x)) * (count / self.rank_step_tokens)
        part.backward()
        return self.figures.sums(part, count, extras)

    train.Training.micro_step = changed


@edit
def second_call():
    micro_step(lambda training, x: training.model.logits(x).square().mean())


@edit
def second_call_and_an_unused_parameter():
    EDITS["unused_parameter"]()
    EDITS["second_call"]()


@edit
def call_around_ddp():
    micro_step(lambda training, x: training.state.model.logits(x).square().mean())


@edit
def a_width():
    """A layer for the run's own 64 channels."""
    import model as models

    def make(init):
        def changed(self, cfg, rope, layer):
            init(self, cfg, rope, layer)
            self.side = models.Linear(64, 64)

        return changed

    around(models.Block, "__init__", make)
    block_forward(lambda block, x: x + block.side(x))


@edit
def fails():
    def change(model, idx, targets, loss, count):
        raise ValueError("no")

    gpt_forward(change)


@edit
def fails_on_a_rank():
    def change(block, x):
        if torch.distributed.get_rank() == 1 and not x.is_meta:
            raise ValueError("no")
        return x

    block_forward(change)


BLOCK, SELECTIVE = dict(remat="block"), dict(remat="selective")
FSDP, ZERO2 = dict(parallel="fsdp"), dict(parallel="zero2")
CONTEXT = dict(context_parallel=2)
MASKED = dict(document_mask=True)
PASSES = r"\d+\.\d s"
NOT_PROVED = "not proved"
# edit, ranks, settings, how what prove says begins, a word of a warning
CASES = [
    (None, 0, BLOCK | MASKED, PASSES, None),
    (None, 0, dict(remat="attention", optimizer="muon", remat_every=2), PASSES, None),
    (None, 2, dict(optimizer="muon") | FSDP | SELECTIVE, PASSES, None),
    (None, 2, dict(optimizer="adamw8bit") | ZERO2, PASSES, None),
    (None, 2, ZERO2 | CONTEXT | MASKED | BLOCK, PASSES, None),
    ("token_shift", 2, CONTEXT | FSDP, "refused: context_parallel=2", None),
    ("token_shift", 0, MASKED, "refused: document_mask", None),
    ("alibi", 2, CONTEXT, "refused: context_parallel=2", None),
    ("alibi", 0, MASKED, PASSES, None),
    ("alibi_told", 2, CONTEXT, PASSES, None),
    ("bypass", 2, CONTEXT, "refused: context_parallel=2", None),
    ("bypass", 0, MASKED, "refused: document_mask", None),
    ("positions_ignored", 2, CONTEXT, "refused: context_parallel=2", None),
    ("targets_ahead", 2, CONTEXT, "refused: context_parallel=2", None),
    ("no_mean", 2, CONTEXT, "refused: context_parallel=2", None),
    ("no_mean", 2, {}, PASSES, "micro-steps"),
    ("not_causal", 0, {}, PASSES, "later"),
    ("numpy_channels", 0, BLOCK, PASSES, None),
    ("own_generator", 0, BLOCK, "refused: remat=block", None),
    ("own_generator", 0, {}, "refused: resume", None),
    ("own_generator", 0, dict(save_interval=0), PASSES, None),
    ("unseeded_generator", 0, BLOCK, NOT_PROVED, None),
    ("random_depth", 0, BLOCK, PASSES, None),
    ("random_depth", 2, {}, PASSES, None),
    ("random_depth", 2, FSDP, PASSES, None),
    ("skipped_blocks", 2, FSDP, "refused: parallel=fsdp", None),
    ("count_in_a_dict", 0, {}, "refused: resume", None),
    ("losses_in_a_list", 0, {}, PASSES, None),
    ("losses_in_a_list", 0, BLOCK, "refused: remat=block", None),
    ("shared_list", 0, BLOCK, "refused: remat=block", None),
    ("parameter_of_another_block", 2, FSDP, "refused: parallel=fsdp", None),
    ("unused_parameter", 2, {}, PASSES, None),
    ("unused_parameter", 2, FSDP, PASSES, None),
    ("experts", 2, CONTEXT, PASSES, None),
    ("experts_by_token", 2, {}, PASSES, None),
    ("experts_by_token", 2, FSDP, PASSES, None),
    ("momentum", 2, FSDP, PASSES, None),
    ("noise_in_the_optimizer", 2, {}, "refused: .*drift", None),
    ("count_of_the_optimizer", 0, {}, "refused: resume", None),
    ("rows_for_matrices", 2, FSDP, "refused: parallel=fsdp", None),
    ("sums_in_hooks", 0, BLOCK, "refused: remat=block", None),
    ("second_call", 2, FSDP, PASSES, None),
    ("second_call_and_an_unused_parameter", 2, {}, PASSES, None),
    ("call_around_ddp", 2, {}, PASSES, None),
    ("a_width", 0, BLOCK, PASSES, None),
    ("fails", 0, BLOCK, NOT_PROVED, None),
    ("fails_on_a_rank", 2, {}, "refused: .*on a rank", None),
]


def name_of(value):
    if isinstance(value, dict):
        return ",".join(f"{name}={x}" for name, x in value.items()) or "plain"
    return str(value)


@pytest.mark.parametrize("edit, number, settings, says, warning", CASES, ids=name_of)
def test_an_edit_is_proved_or_refused(edit, number, settings, says, warning, data_dir, tmp_path):
    rows = number or 1
    if "context_parallel" in settings:
        rows = 1
    options = dict(prove=True, batch_size=2, batch_tokens=4 * 32 * rows, save_interval=3)
    words = flags(data_dir, tmp_path / "run", **options | settings)
    found = ranks.call(number, proved, edit, words)
    assert {re.match(says, said) is not None for said, _ in found} == {True}, found
    warned = [line for _, text in found for line in text.splitlines() if "warning: " in line]
    assert bool(warned) == bool(warning) and (warning or "") in "".join(warned), found


def test_a_run_that_goes_on_does_not_prove_again(data_dir, tmp_path):
    words = flags(data_dir, tmp_path / "run", prove=True, max_steps=2, save_interval=2)
    for more, says in ([], PASSES), (["--resume=auto"], "done"), (["--remat=block"], PASSES):
        done = ranks.run(0, [*words, *more, *(["--overwrite"] * ("--remat=block" in more))])
        assert re.search(rf"^prove +{says}", done.stdout, re.M), (more, done.stdout, done.stderr)


def test_a_dry_run_prints_what_was_compared(data_dir, tmp_path):
    done = ranks.run(0, flags(data_dir, tmp_path / "run", prove=True, dry_run=True))
    assert all(word in done.stdout for word in ("gradient: ", "update: ", "resume"))


def after_an_evaluation(words):
    """(which weights are shards before and after begin_step, gradients, words) in a rank."""
    import train
    from run.build import choose
    from scale import parallel

    said = io.StringIO()
    cfg = configure(Config, list(words))
    world = parallel.join(cfg)
    cfg, _ = choose(cfg, world.device)
    model = train.Training(cfg, world).state.model
    sharded = []
    ids = torch.arange(32).view(1, 32)
    with contextlib.redirect_stderr(said):
        model(ids, ids)[0].backward()
        with torch.no_grad():
            model.logits(ids)
        sharded.append([isinstance(p, DTensor) for p in model.parameters()])
        parallel.begin_step(model)
        sharded.append([isinstance(p, DTensor) for p in model.parameters()])
    return sharded, [p.grad for p in model.parameters() if p.grad is not None], said.getvalue()


@pytest.mark.parametrize("parallel", ["fsdp", "zero2"])
def test_a_step_begins_with_shards_and_without_gradients(parallel, data_dir, tmp_path):
    words = flags(data_dir, tmp_path / "run", parallel=parallel)
    found = ranks.call(2, after_an_evaluation, words)
    for (gathered, shards), grads, _ in found:
        assert not all(gathered) and all(shards) and not grads
    assert "cleared" in found[0][2]


def copies(edit):
    """Names of the weights whose copies differ, after an edit of rank 1's."""
    import model as models
    from scale import parallel

    world = parallel.start("cpu")
    model = models.build(Config(n_layer=1, n_head=2, n_embd=16, vocab_size=64), world.device, 0)
    with torch.no_grad():
        model.wpe.weight[3, 2] += edit * world.rank * 1e-6
    return parallel.copies_differ(model)


def test_copies_that_drift_apart_are_named():
    assert ranks.call(2, copies, 1) == [["wpe.weight"]] * 2
    assert ranks.call(2, copies, 0) == [[]] * 2
