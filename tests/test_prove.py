"""run/prove.py: an edit holds in the modes of a run, or the run ends in one line that names one.

Each edit is made in the process of a rank, which then proves a narrow copy of it.
"""

import contextlib
import io
import itertools
import random
import re
import time
from pathlib import Path

import pytest
import ranks
import torch
import torch.nn.functional as F
from conftest import flags
from torch.distributed.tensor import DTensor

import kernels
import model as models
import optim
import run.prove
import train
from configurator import configure
from corpus.loader import TokenLoader
from run.build import choose, make_loader, separator
from run.signals import errors_explained
from scale import parallel
from scale.shards import local
from settings import Config
from system.errors import UserError


def proved(edit, words):
    """(what prove says, "refused: ..." of a UserError, and what it prints) in a rank."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        if edit:
            EDITS[edit]()
        cfg = configure(Config, list(words))
        world = parallel.join(cfg)
        loader = make_loader(cfg, world)
        before = loader.state_dict()
        eot = separator(cfg, loader)
        Path(cfg.out_dir).mkdir(exist_ok=True)
        try:
            with errors_explained(cfg, world):
                ((_, found),) = run.prove.prove(train.Training, cfg, world, loader, eot)
            assert loader.state_dict() == before
        except UserError as error:
            found = f"refused: {error}"
    return found, said.getvalue()


EDITS = {}


def edit(function):
    EDITS[function.__name__] = function
    return function


def after(owner, name, change):
    """What a method returns becomes change(that, *its arguments)."""
    method = getattr(owner, name)

    def changed(*arguments, **options):
        return change(method(*arguments, **options), *arguments)

    setattr(owner, name, changed)


def block_forward(change):
    """Changes what a block returns: change(block, y, idx)."""
    after(models.Block, "forward", lambda y, block, x, idx, *_: change(block, y, idx))


def loss_is(change):
    """Changes a loss: change(model, idx, targets, loss)."""

    def changed(found, model, idx, targets, *_):
        loss, *others = found
        return change(model, idx, targets, loss), *others

    after(models.GPT, "forward", changed)


@edit
def token_shift():
    block_forward(lambda block, y, idx: y + 0.5 * F.pad(y, (0, 0, 1, 0))[:, :-1])


@edit
def shift_in_the_core():
    """The one of docs/experiment.md."""

    def shifted(q, k, v, backend, dropout):
        before = F.pad(k[..., :-1, :4], (0, 0, 1, 0))
        return kernels.attention(q, torch.cat([before, k[..., 4:]], -1), v, backend, dropout)

    core_is(shifted)


@edit
def far_mix():
    """Over more tokens than the rows of the trial have."""
    block_forward(lambda block, y, idx: y + F.pad(y, (0, 0, 80, 0))[:, : y.size(1)])


@edit
def alibi():
    core_is(lambda q, k, v, *_: with_bias(q, k, v, torch.arange(1, q.size(1) + 1)))


def core_is(core):
    models.Attention.core = staticmethod(core)


def with_bias(q, k, v, rates):
    at = torch.arange(q.size(2))
    bias = 2.0 ** -rates.view(-1, 1, 1) * (at - at.unsqueeze(1))
    bias = bias.masked_fill(at > at.unsqueeze(1), -torch.inf)
    return F.scaled_dot_product_attention(q, k, v, bias)


@edit
def own_generator():
    own_draws(lambda: 3)


@edit
def unseeded_generator():
    own_draws(time.time_ns)


def own_draws(seed):
    def change(block, y, idx):
        if not hasattr(block, "generator"):
            block.generator = torch.Generator().manual_seed(seed())
        return y * torch.rand(y.size(-1), generator=block.generator)

    block_forward(change)


@edit
def random_depth():
    after(models.Block, "forward", lambda y, block, x, *_: x if random.random() < 0.3 else y)


@edit
def rarely():
    """A block that is left out so seldom that a few trials do not show it."""
    after(models.Block, "forward", lambda y, block, x, *_: x if random.random() < 1e-6 else y)


@edit
def random_table():
    def add(_, model, cfg):
        model.table = torch.randn(cfg.n_embd)

    after(models.GPT, "__init__", add)


@edit
def random_number():
    """Of Python, alike on all ranks."""

    def add(_, model, cfg):
        model.number = 1 + 0.1 * random.random()

    after(models.GPT, "__init__", add)
    loss_is(lambda model, idx, targets, loss: loss * model.number)


@edit
def frozen_in_a_list():
    """As nn.GRU keeps its weights: a checkpoint holds it under another name."""

    def add(_, model, cfg):
        model.frozen = torch.nn.Linear(4, 4).requires_grad_(False)
        model.listed = [model.frozen.weight]

    after(models.GPT, "__init__", add)


@edit
def late_counter():
    """With an effect after more steps than the proof takes."""

    def change(block, y, idx):
        block.calls = getattr(block, "calls", 0) + 1
        return y.tanh() if block.calls > 10_000 else y

    block_forward(change)


@edit
def late_queue():
    """A list of past inputs, which has an effect when it is longer than the proof makes it."""

    def change(block, y, idx):
        past = vars(block).setdefault("state", [])
        past.append(y.detach().mean())
        return y + past.pop(0) if len(past) > 100 else y

    block_forward(change)


@edit
def mean_in_training():
    """Of losses, in an attribute of Training."""

    def note(totals, training, *_):
        training.mean = 0.9 * getattr(training, "mean", totals[0]) + 0.1 * totals[0]
        return totals

    after(train.Training, "accumulate", note)


@edit
def late_mean():
    """Of weights, from 0.7 of the run on."""

    def note(_, training, *__):
        state = training.state
        if state.step > 0.7 * training.cfg.max_steps:
            training.mean = [p.detach().clone() for p in state.model.parameters()]

    after(train.Training, "update", note)


@edit
def columns_of_shards():
    """Made shorter in every fifth step, each rank by its own rows."""

    def shorten(_, training, *__):
        for p in training.state.model.parameters() if training.state.step % 5 == 0 else ():
            if p.dim() == 2:
                own = local(p.detach())
                own /= 1 + own.norm(dim=0)

    after(train.Training, "update", shorten)


@edit
def counted_shift():
    """By the token before, the more steps a run has done."""

    def shift(x, model, *_):
        model.steps += model.training
        return x + (model.steps / 10).clamp(max=1) * F.pad(x, (0, 0, 1, 0))[:, :-1]

    steps = torch.zeros((), dtype=torch.long)
    add = lambda _, model, cfg: model.register_buffer("steps", steps.clone())
    after(models.GPT, "__init__", add)
    after(models.GPT, "embed", shift)


@edit
def scaled_by_place():
    """Far in a row, by a token's place in what a rank has, not by its position."""
    scale = lambda y: (torch.arange(y.size(1)) / 128).clamp(min=1).unsqueeze(-1)
    block_forward(lambda block, y, idx: y * scale(y))


@edit
def read_and_changed():
    """A buffer, in one forward: a compiled backward reads what was put there."""

    def change(block, y, idx):
        y = y / (block.size + 0.01)
        if block.training:
            block.size.lerp_(y.detach().abs().mean(), 0.5)
        return y

    add = lambda _, block, *__: block.register_buffer("size", torch.ones(()))
    after(models.Block, "__init__", add)
    block_forward(change)


@edit
def late_targets():
    forward = models.GPT.forward

    def changed(self, idx, targets, *others):
        begins = torch.arange(targets.size(1)) < 64
        return forward(self, idx, targets.masked_fill(begins, -100), *others)

    models.GPT.forward = changed


@edit
def rows_that_grow():
    lengths = itertools.count(16, 4)

    def crop(batch, loader):
        length = next(lengths)
        return [tensor[:, :length] for tensor in batch]

    after(TokenLoader, "next", crop)


@edit
def skipped_blocks():
    """Which block is left out, each rank draws."""

    def hidden(self, idx, positions=None):
        x = embedded = self.embed(idx, positions)
        for mix, block in self.layers:
            if random.random() < 0.7:
                x = block(mix(x, embedded), idx, positions)
        return self.norm(x)

    models.GPT.hidden = hidden


@edit
def parameter_of_another_block():
    loss_is(lambda model, i, t, loss: loss + model.blocks[0].mlp.up.weight.square().mean())


@edit
def no_mean():
    loss_is(lambda model, idx, t, loss: loss + 5 * model.wte(idx).mean((0, 1)).square().sum())


@edit
def not_causal():
    core_is(lambda q, k, v, *_: F.scaled_dot_product_attention(q, k, v))


@edit
def experts_by_token():
    """Of which most have no token in a micro-batch."""

    def add(_, block, cfg, *others):
        block.experts = torch.nn.ModuleList(models.make_mlp(cfg) for _ in range(3))

    def change(block, x, idx):
        y = torch.zeros_like(x)
        for byte, expert in zip((40, 95, 91), block.experts):
            if (idx == byte).any():
                y[idx == byte] = expert(x[idx == byte])
        return x + y

    after(models.Block, "__init__", add)
    block_forward(change)


def optimizer(kind):
    def change():
        optim.build = lambda name, groups, model, cfg: kind(groups, cfg.lr)

    EDITS[kind.__name__] = change
    return kind


@optimizer
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


@optimizer
class NoisyOptimizer(Momentum):
    def update(self, p, mean):
        return mean + 0.01 * torch.randn_like(mean)


@optimizer
class CountingOptimizer(Momentum):
    """Outside of its state_dict."""

    steps = 0

    def step(self):
        self.steps += 1
        super().step()

    def update(self, p, mean):
        return mean / (1 + self.steps % 10)


@optimizer
class RowsForMatrices(Momentum):
    """An update that needs whole matrices, computed of a rank's rows."""

    def update(self, p, mean):
        rows = local(mean)
        local(mean).copy_(rows / (rows.norm() + 1e-6))
        return mean


@edit
def second_call():
    """Of the model in a micro-step, beside a parameter that none uses."""

    def micro_step(self, x, y, positions=None):
        loss, count, extras = self.model(x, y, positions)
        loss = loss + self.model.logits(x).square().mean()
        (loss * (count / self.rank_step_tokens)).backward()
        return self.figures.sums(loss, count, extras)

    def add(_, model, cfg):
        model.spare = models.Linear(cfg.n_embd, cfg.n_embd)

    train.Training.micro_step = micro_step
    after(models.GPT, "__init__", add)


@edit
def a_width():
    """A layer for the run's own 64 channels."""

    def add(_, block, *others):
        block.side = models.Linear(64, 64)

    after(models.Block, "__init__", add)
    block_forward(lambda block, y, idx: y + block.side(y))


@edit
def fails():
    models.GPT.forward = None


@edit
def fails_on_a_rank():
    def change(block, y, idx):
        assert y.is_meta or torch.distributed.get_rank() != 1
        return y

    block_forward(change)


BLOCK, MASKED, CONTEXT = dict(remat="block"), dict(document_mask=True), dict(context_parallel=2)
LONG = dict(block_size=256, batch_size=1, batch_tokens=512)
FSDP, ZERO2 = dict(parallel="fsdp"), dict(parallel="zero2")
PASSES = r"\d+\.\d s"
# edit, ranks, settings, how what prove says begins, a word of a warning
CASES = [
    (None, 0, BLOCK | MASKED, PASSES, None),
    (None, 0, dict(remat="attention", optimizer="muon", remat_every=2), PASSES, None),
    (None, 2, dict(optimizer="muon", remat="selective") | FSDP, PASSES, None),
    (None, 2, dict(optimizer="adamw8bit") | ZERO2, PASSES, None),
    (None, 2, ZERO2 | CONTEXT | MASKED | BLOCK, PASSES, None),
    ("token_shift", 2, CONTEXT | FSDP, "refused: context_parallel=2", None),
    ("token_shift", 0, MASKED, "refused: document_mask", None),
    ("shift_in_the_core", 2, CONTEXT | FSDP | MASKED, PASSES, None),
    ("far_mix", 0, MASKED | LONG, "refused: document_mask", None),
    ("far_mix", 2, CONTEXT | LONG, "refused: context_parallel=2", None),
    ("rarely", 0, BLOCK, "refused: remat=block: a block draws", None),
    ("rarely", 0, dict(remat="selective"), PASSES, None),
    ("random_table", 0, {}, "refused: table: .* at random", None),
    ("random_number", 2, FSDP, "refused: number: .* at random", None),
    ("frozen_in_a_list", 0, {}, PASSES, None),
    ("late_counter", 0, {}, PASSES, "no checkpoint holds it"),
    ("late_queue", 0, {}, PASSES, "state: steps change it, and no checkpoint holds it"),
    ("mean_in_training", 2, FSDP, PASSES, "Training.mean: steps change it"),
    ("late_mean", 0, dict(max_steps=1000), PASSES, "Training.mean: steps change it"),
    ("columns_of_shards", 2, FSDP, "refused: parallel=fsdp", None),
    ("counted_shift", 0, MASKED, "refused: document_mask", "steps: each micro-batch"),
    ("scaled_by_place", 2, CONTEXT | LONG, "refused: context_parallel=2", None),
    ("read_and_changed", 0, dict(compile=True), "refused: compile=True: the gradient", None),
    ("late_targets", 0, LONG, "not proved: no target", None),
    ("rows_that_grow", 2, CONTEXT, PASSES, None),
    ("alibi", 2, CONTEXT, "refused: context_parallel=2", None),
    ("no_mean", 2, {}, PASSES, "micro-steps"),
    ("no_mean", 2, CONTEXT, "refused: context_parallel=2", None),
    ("not_causal", 2, CONTEXT, PASSES, "later"),
    ("own_generator", 0, BLOCK, "refused: remat=block", None),
    ("own_generator", 0, {}, "refused: resume", None),
    ("own_generator", 0, dict(save_interval=0), PASSES, None),
    ("unseeded_generator", 0, BLOCK, "not proved", None),
    ("random_depth", 2, FSDP, PASSES, None),
    ("skipped_blocks", 2, FSDP, "refused: parallel=fsdp", None),
    ("parameter_of_another_block", 2, FSDP, "refused: parallel=fsdp", None),
    ("experts_by_token", 2, {}, PASSES, None),
    ("experts_by_token", 2, FSDP | CONTEXT, PASSES, None),
    ("Momentum", 2, FSDP, PASSES, None),
    ("NoisyOptimizer", 2, {}, "refused: .*drift", None),
    ("CountingOptimizer", 0, {}, "refused: resume", None),
    ("RowsForMatrices", 2, FSDP, "refused: parallel=fsdp", None),
    ("second_call", 2, FSDP, PASSES, None),
    ("second_call", 2, {}, PASSES, None),
    ("a_width", 0, BLOCK, PASSES, None),
    ("fails", 0, BLOCK, "not proved", None),
    ("fails_on_a_rank", 2, {}, "not proved", None),
]


def name_of(value):
    if isinstance(value, dict):
        return ",".join(f"{name}={x}" for name, x in value.items()) or "plain"
    return str(value)


@pytest.mark.parametrize("edit, number, settings, says, warning", CASES, ids=name_of)
def test_an_edit_is_proved_or_refused(edit, number, settings, says, warning, data_dir, tmp_path):
    rows = 1 if "context_parallel" in settings else number or 1
    options = dict(prove=True, batch_size=2, batch_tokens=4 * 32 * rows, save_interval=3)
    words = flags(data_dir, tmp_path / "run", **options | settings)
    found = ranks.call(number, proved, edit, words)
    assert {re.match(says, said) is not None for said, _ in found} == {True}, found
    warned = [line for _, text in found for line in text.splitlines() if "warning: " in line]
    assert bool(warned) == bool(warning) and (warning or "") in "".join(warned), found


def test_a_run_that_goes_on_does_not_prove_again_and_a_dry_one_prints_all(data_dir, tmp_path):
    words = flags(data_dir, tmp_path / "run", prove=True, max_steps=2, save_interval=2)
    other = ["--remat=block", "--overwrite", "--dry_run=True"]
    for more, says in ([], PASSES), (["--resume=auto"], "done"), (other, PASSES):
        done = ranks.run(0, [*words, *more])
        assert re.search(rf"^prove +{says}", done.stdout, re.M), (more, done.stdout, done.stderr)
    assert all(word in done.stdout for word in ("gradient: ", "update: ", "resume"))


def after_an_evaluation(words):
    """(which weights are shards before and after begin_step, gradients) in a rank."""
    cfg = configure(Config, list(words))
    world = parallel.join(cfg)
    cfg, _ = choose(cfg, world.device)
    model = train.Training(cfg, world).state.model
    sharded = []
    ids = torch.arange(32).view(1, 32)
    model(ids, ids)[0].backward()
    with torch.no_grad():
        model.logits(ids)
    sharded.append([isinstance(p, DTensor) for p in model.parameters()])
    parallel.begin_step(model)
    sharded.append([isinstance(p, DTensor) for p in model.parameters()])
    return sharded, [p.grad for p in model.parameters() if p.grad is not None]


def test_a_step_begins_with_shards_and_without_gradients(data_dir, tmp_path):
    words = flags(data_dir, tmp_path / "run", parallel="fsdp")
    found = ranks.call(2, after_an_evaluation, words)
    for (gathered, shards), grads in found:
        assert not all(gathered) and all(shards) and not grads
