"""prove: before its first step a run shows that model.py holds in its modes, or ends in one line.

A narrow copy of the model, in float32 and with random weights, takes steps on a few of the run's
own rows: plainly, and through train.Training, which builds this run and computes its steps.
Compared are loss and gradients; the optimizer's update by equal gradients; a run that goes on with
one restored from its checkpoint, bitwise; and logits whose other documents, or later tokens,
change. Where a mode differs, the modes are left out in turn to find it. What no proof sees, such as
the rounding of fused kernels and what train.py's loop does itself, docs/experiment.md says.
"""

import contextlib
import gc
import hashlib
import itertools
import json
import math
import time
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.tensor import DTensor

from run import source
from run.build import separator
from run.pack import pack, persistent_buffers, unpack
from scale import generators, memory, parallel
from scale.shards import copy_into
from system import files
from system.errors import UserError, warn

MICRO_STEPS = 2
PART = 32  # tokens of a row for each rank that shares it, of at least two
LOSS = 1e-4  # relative; rounding in float32 makes 1e-6
# likewise of each tensor; Muon computes in bf16, and states may have 8 bits
LIMITS = {"gradient": LOSS, "buffer": LOSS, "update": 0.02}
UPDATES = 3  # that are compared, and then
BEFORE, AFTER = 2, 7  # steps around a checkpoint, since some optimizers act in every tenth
PATIENCE_S = 30  # until a rank counts as lost
OWN_WIDTHS = 200_000_000  # parameters, up to which a model that cannot be narrow is tried as it is
# each mode's value without it, and what breaks it most often
OFF = {"remat": "none", "context_parallel": 1, "parallel": "ddp"}
CAUSES = {
    "remat": "a block that runs twice changes what it keeps or is given, or draws other numbers",
    "context_parallel": "tokens mix outside attn.core or in the loss, or a core depends on heads",
    "parallel": "a block reads another one's parameters, or an update needs whole matrices",
}
MORE = "(docs/experiment.md)"


@dataclass
class Trial:
    """A step of a Training, and updates by its gradients or those of another trial."""

    training: object
    weights: dict  # {name: tensor} before the step
    loss: float = 0.0
    results: dict = field(default_factory=dict)  # {one of LIMITS: {name: tensor}}
    calls: list = field(default_factory=list)  # numbers of blocks


class Fails(Exception):
    """A trial that raised an error, on all ranks alike."""


class NotProved(Exception):
    """Why the trials tell nothing."""


def prove(make, cfg, world, loader, eot):
    """Rows of the start-up summary; raises UserError for an edit that a mode would make wrong.

    make: the class train.Training. eot: the id that separates documents, or None. All ranks call
    it. out_dir keeps a digest, so that a run that goes on there need not prove it again.
    """
    if not cfg.prove:
        return [("prove", "no, as set")]
    began = time.perf_counter()
    note = Path(cfg.out_dir) / "proved"
    same = asdict(replace(cfg, out_dir="", resume="none", overwrite=False))
    facts = [source.tag(), same, world.size, world.device.type, torch.__version__]
    digest = hashlib.sha256(json.dumps(facts).encode()).digest()
    if parallel.gather_objects(note.exists() and note.read_bytes() == digest)[0]:
        return [("prove", "done before, of this code with these settings and ranks")]
    if eot is None and cfg.document_mask:
        eot = separator(cfg)
    try:
        with undisturbed(cfg, world):
            found = Proof(make, cfg, world, cropped(loader, cfg, eot), eot).run()
    except NotProved as why:
        return [("prove", f"not proved: {why}")]
    rows = [("prove", f"{time.perf_counter() - began:.1f} s")]
    if cfg.dry_run:
        return rows + [("", words) for words in found]
    if world.main:
        note.parent.mkdir(parents=True, exist_ok=True)
        files.write_atomic(note, digest)
    return rows


def cropped(loader, cfg, eot):
    """[(x, y)] of a step's micro-batches: two short rows each, (B, T), with separators in them."""
    position = loader.state_dict()
    batches = [loader.next() for _ in range(MICRO_STEPS)]
    loader.load_state_dict(position)
    N = cfg.context_parallel
    T = min(PART * max(2, N), *(x.size(1) for x, _ in batches)) // N * N
    found = []
    for x, y in batches:
        x, y = x[:2, :T].clone(), y[:2, :T]
        if eot is not None:
            x[:, separators(T)] = eot
        if not (y >= 0).any():  # a long question
            y = x.roll(-1, 1)
        found.append((x, y))
    return found


def separators(T):
    """Where documents begin in a row: at odd places, since an edit may merge two or four tokens."""
    return [T // 3 | 1, T * 2 // 3 | 1]


@contextlib.contextmanager
def undisturbed(cfg, world):
    """Puts back random numbers, precision and time limits at its end."""
    precision = torch.get_float32_matmul_precision()
    unit = memory.UNIT_MIB
    memory.UNIT_MIB = 0  # FSDP2 gathers each block apart, as where blocks are wide
    limit_collectives(min(PATIENCE_S, cfg.timeout_s))
    try:
        with generators.preserved(world.device):
            yield
    finally:
        limit_collectives(cfg.timeout_s)
        memory.UNIT_MIB = unit
        torch.set_float32_matmul_precision(precision)
        gc.collect()  # models refer to themselves
        if world.device.type == "cuda":
            torch.cuda.empty_cache()


def limit_collectives(seconds):
    if dist.is_initialized():
        distributed_c10d._set_pg_timeout(parallel.time_limit(seconds), dist.group.WORLD)


@dataclass
class Proof:
    """The trials of a run; found: what they measured, in words."""

    make: type
    cfg: object
    world: parallel.World
    batches: list
    eot: int | None
    narrow = True
    asked = 0  # times that ranks told each other

    def run(self):
        """What was measured; raises UserError if the run differs from plain code.

        It must differ with each of two draws of weights: rounding may turn a choice of experts.
        """
        cfg = self.cfg
        self.found = []
        self.draws = cfg.seed + self.world.rank  # the run's ranks draw other numbers, too
        try:
            words = self.difference(cfg)
        except NotProved:
            if memory.total_and_block_parameters(cfg)[0] > OWN_WIDTHS:
                raise
            self.narrow = False  # an edit may need a width, or a depth
            words = self.difference(cfg)
        if words:
            cfg = replace(cfg, seed=cfg.seed + 1)
            words = self.difference(cfg)
        if words:
            self.explain(cfg, words)
        if cfg.save_interval or cfg.cuda_graph or cfg.dry_run:
            self.refuse("resume", self.compare_resumed)
        with contextlib.suppress(Fails):  # a model may have no logits
            self.refuse("document_mask=True", self.compare_tokens)
        return self.found

    def difference(self, cfg):
        """How a step differs from plain code, in words, or None."""
        try:
            self.plain = self.on_all_ranks(self.trial, cfg)
        except Fails as why:
            raise NotProved(f"the model fails without any mode: {why}") from None
        try:
            return self.on_all_ranks(self.compare_step, cfg)
        except Fails as why:
            if isinstance(why.__cause__, UserError):
                raise why.__cause__ from None
            return f"this model.py fails: {why}"

    def explain(self, cfg, words):
        """Raises UserError that names the mode in which a run differs, unless it draws numbers."""
        draws = self.draws
        losses = []
        for self.draws in (draws, draws, draws + 1):
            losses.append(self.on_all_ranks(self.trial, cfg).loss)
        if losses[0] != losses[1]:
            raise NotProved("the same step twice differs: model.py draws from numbers of its own")
        for name, off in OFF.items():
            value = getattr(cfg, name)
            if value != off and not self.difference(replace(cfg, **{name: off})):
                if losses[1] != losses[2] and (name == "context_parallel" or cfg.remat_tile):
                    raise NotProved(f"{name}={value}: model.py draws numbers, by shapes")
                raise UserError(f"{name}={value}: {words}: {CAUSES[name]} {MORE}")
        raise UserError(f"{self.modes()}: {words} {MORE}")

    def modes(self):
        """Those of the run, in words."""
        words = [f"{name}={getattr(self.cfg, name)}" for name in OFF]
        return ", ".join([*words, f"{self.world.size} ranks, {MICRO_STEPS} micro-steps"])

    def refuse(self, mode, compare):
        if words := self.on_all_ranks(compare):
            raise UserError(f"{mode}: {words} {MORE}")

    # -- a trial

    def build(self, cfg, weights=None):
        """A Training of settings that are changed to those of a trial."""
        B, T = self.batches[0][0].shape
        changes = dict(batch_size=B, batch_schedule=None, init_from=None, clip=None, dropout=0.0)
        changes |= dict(precision="fp32", weights="fp32", reduce_dtype="fp32", attention="flash")
        changes |= dict(compile=False, cuda_graph=False, timeout_s=min(PATIENCE_S, cfg.timeout_s))
        if self.narrow:
            width = 8 * cfg.n_head
            changes |= dict(block_size=T, n_layer=min(32, cfg.n_layer), head_dim=8)
            changes |= dict(n_embd=width, n_hidden=2 * width)
        cfg = replace(cfg, **changes)
        cfg.batch_tokens = MICRO_STEPS * B * T * (self.world.size // cfg.context_parallel)
        loader = SimpleNamespace(state_dict=dict, load_state_dict=lambda _: None)
        training = self.make(cfg, self.world, loader, weights, self.eot)
        training.state.model.train()
        return training

    def build_plain(self, cfg):
        """A Training without modes, in which each rank has all weights and whole rows."""
        training = self.build(replace(cfg, **OFF, remat_every=1, remat_tile=None))
        model = training.model = training.state.model  # not in DDP
        generators.seed(cfg.seed)
        with torch.no_grad():
            for p in model.parameters():  # their first values may be zero
                p.add_(torch.randn_like(p), alpha=p.size(-1) ** -0.5 if p.dim() > 1 else 0.1)
        return training

    def batches_again(self):
        """Yields the micro-batches in turn; before each it seeds what a forward may draw."""
        for number in itertools.count():
            generators.seed(self.draws + 1000 * number)
            yield self.batches[number % MICRO_STEPS]

    def trial(self, cfg, plain=None):
        """The Trial of a step.

        plain: that without modes, whose weights it begins with and whose gradients make its
        updates; None: this is it, and gradients are averaged over ranks.
        """
        training = self.build(cfg, plain.weights) if plain else self.build_plain(cfg)
        model = training.state.model
        parameters = dict(model.named_parameters())
        trial = Trial(training, whole(parameters | persistent_buffers(model)))
        for number, block in enumerate(model.blocks):
            block.register_forward_hook(lambda *_, number=number: trial.calls.append(number))
        totals = training.accumulate(self.batches_again().__next__)
        for p in parameters.values():
            if plain is None and p.requires_grad:
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
                parallel.sum_over_ranks(p.grad.div_(self.world.size))
        trial.loss = loss_of(training, totals)
        if not math.isfinite(trial.loss):
            raise ValueError(f"the loss is {trial.loss}")
        norm = training.normalize_and_clip(totals)
        gradients = {}
        for name, t in whole(
            {n: p.grad for n, p in parameters.items() if p.grad is not None}
        ).items():
            if t.any():
                gradients[name] = t
        buffers = {}
        if self.cfg.context_parallel == 1:  # else a rank's are those of its tokens
            for name, t in whole(persistent_buffers(model)).items():
                buffers[name] = t.float().nan_to_num(0, 0, 0)  # as of masks
        for places in range(UPDATES):
            give(parameters, plain.results["gradient"] if plain else gradients, places)
            generators.seed(self.draws)
            training.update(totals, norm)
        moved = {name: t - trial.weights[name] for name, t in whole(parameters).items()}
        trial.results = {"gradient": gradients, "buffer": buffers, "update": moved}
        return trial

    def steps(self, training, number):
        """Takes steps; returns their losses, and what tells two models' weights apart."""
        next_batch = self.batches_again().__next__
        losses = []
        for _ in range(number):
            totals = training.accumulate(next_batch)
            training.update(totals, training.normalize_and_clip(totals))
            losses.append(repr(loss_of(training, totals)))
        return losses, parallel.checksums(training.state.model).tolist()

    # -- what is compared; words say what differs

    def compare_step(self, cfg):
        """Of loss, gradients, buffers and updates."""
        plain = self.plain
        if cfg.parallel != "ddp" or cfg.context_parallel > 1:
            if any(calls != plain.calls for calls in parallel.gather_objects(plain.calls)):
                return "the ranks do not call the same blocks, as if each drew which"
        built = self.trial(cfg, plain)
        self.built = built.training
        drift = parallel.copies_differ(self.built.state.model)
        self.found.append(f"loss {plain.loss:.7g} plain, {built.loss:.7g} in the run's modes")
        if not abs(built.loss - plain.loss) <= LOSS * abs(plain.loss):
            return f"the loss of this model.py differs ({built.loss:.6g}, not {plain.loss:.6g})"
        for what, limit in LIMITS.items():
            error, name = largest_error(built.results[what], plain.results[what])
            self.found.append(f"{what}s differ by up to {error:.0e}")
            if error > limit:
                return f"the {what} of {name} differs by {error:.1e} of its norm"
        if drift:
            return f"the optimizer makes the ranks' copies of {drift[0]} drift apart"
        return None

    def compare_resumed(self):
        """Of a run that goes on and one that is restored from what it saves, bit for bit."""
        self.steps(self.built, BEFORE)
        tensors, values = pack(self.built.state)
        saved = {group: whole(named) for group, named in tensors.items()}
        expected = self.steps(self.built, AFTER)
        found = []
        for _ in range(2):
            restored = self.build(self.built.cfg, saved["model"])
            unpack(restored.state, json.loads(json.dumps(values)), saved)
            found.append(self.steps(restored, AFTER))
        if expected in found:
            self.found.append(f"{AFTER} steps after a resume are the same bit for bit")
            return None
        if found[0] == found[1]:
            return "model or optimizer keep what their state_dict does not hold"
        warn("prove: a step twice gives other bits, so no resume was compared")
        return None

    @torch.no_grad()
    def compare_tokens(self):
        """Of logits when other tokens change. Warns of what may be meant."""
        losses = [self.plain_loss(*batch) for batch in self.batches]
        draws = losses[0] != self.plain_loss(*self.batches[0], seed=1)
        if self.world.size * self.cfg.micro_steps(self.world.size) > 1 and not draws:
            together, _ = self.plain_loss(*map(torch.cat, zip(*self.batches)))
            mean = sum(loss * n for loss, n in losses) / sum(n for _, n in losses)
            if not abs(mean - together) <= LOSS * abs(mean):
                why = "is no mean over tokens"
                warn(f"model.py: the loss {why}, so it depends on ranks and micro-steps")
        T = self.batches[0][0].size(1)
        last = separators(T)[-1]
        if self.cfg.document_mask and self.moves(slice(last), slice(last, T)):
            return "a document's logits depend on the one before: tokens mix outside attn.core"
        if self.moves(slice(T // 2, T), slice(T // 2)):
            warn("model.py lets a token see later ones")
        return None

    def plain_loss(self, x, y, seed=0):
        """(loss, count) of the plain model."""
        generators.seed(seed)
        loss, count, _ = self.plain.training.model(x, y, None)
        return float(loss), float(count)

    def moves(self, changed, seen):
        """Whether other ids at some places change the logits at others."""
        x, y = self.batches[0]
        other = x.clone()
        other[:, changed] = (x[:, changed] + 1) % self.cfg.vocab_size
        logits = []
        for ids in (x, x, other):
            self.plain_loss(ids, y)  # for document masks, which look at a forward's ids
            logits.append(self.plain.training.model.logits(ids)[:, seen])
        was, again, now = logits
        return was.equal(again) and not (now - was).std() <= LOSS * was.std()

    # -- ranks

    def on_all_ranks(self, function, *arguments):
        """A function's value on this rank, or the words that it returned on another.

        Raises Fails where it failed on all ranks, UserError where on some.
        """
        value = error = words = None
        try:
            value = function(*arguments)
        except Exception as found:  # of any type: an edit's
            error = found
            words = f"{type(error).__name__}: {error}".partition("\n")[0]
        if isinstance(value, str):
            words = value
        told = self.exchanged([time.time(), error is not None, words])
        failed = sorted(one for one in told if one[1])
        if len(failed) == len(told) and len({words for _, _, words in failed}) == 1:
            raise Fails(words) from error
        if failed:  # the first in time, for which others may have waited
            raise UserError(f"{self.modes()}: this model.py fails on a rank: {failed[0][2]}")
        return next((words for _, _, words in told if words), value)

    def exchanged(self, own):
        """[what each rank gives], as JSON.

        Over the store, since a rank may wait in a collective for one that failed.
        """
        if self.world.size == 1:
            return [own]
        self.asked += 1
        keys = [f"prove/{self.asked}/{rank}" for rank in range(self.world.size)]
        store = distributed_c10d._get_default_store()
        store.set(keys[self.world.rank], json.dumps(own))
        try:
            store.wait(keys, timedelta(seconds=2 * PATIENCE_S))
        except RuntimeError:
            why = own[2] or "a rank does not come"
            raise UserError(f"{self.modes()}: this model.py fails: {why}") from None
        return [json.loads(store.get(key)) for key in keys]


# -- parts of a trial


def loss_of(training, totals):
    """A step's mean loss over the targets of all ranks."""
    part, count = parallel.sum_over_ranks(torch.stack([t.float() for t in totals[:2]])).tolist()
    return part * training.rank_step_tokens / count


def whole(tensors):
    """Copies of {name: tensor}, whole where ranks hold rows of them."""
    found = {}
    for name, t in tensors.items():
        t = t.detach()
        found[name] = t.full_tensor() if isinstance(t, DTensor) else t.clone()
    return found


def largest_error(found, expected):
    """(the largest relative error, its name) of {name: tensor}; an absent one is zeros.

    What is small beside all of them together may be rounding.
    """
    total = sum(t.square().sum() for t in expected.values()) ** 0.5
    largest = 0.0, "none"
    for name in found | expected:
        there = expected.get(name, torch.zeros(()))
        error = (found.get(name, 0) - there).norm() / (there.norm() + 0.01 * total + 1e-30)
        largest = max(largest, (error.nan_to_num(torch.inf).item(), name))
    return largest


@torch.no_grad()
def give(parameters, gradients, places):
    """Gives parameters their rows of whole gradients, whose elements move by some places."""
    for name, p in parameters.items():
        p.grad = None
        if name in gradients:
            p.grad = torch.zeros_like(p)
            copy_into(p.grad, gradients[name].flatten().roll(places).view(p.shape))
