"""prove: before its first step a run shows that model.py holds in its modes, or ends in one line.

A narrow copy of the model, in float32 and with random weights, takes steps on a few of the run's
own rows: plainly, and through train.Training, which builds this run and computes its steps.
Compared are loss and gradients; the optimizer's update by equal gradients; a run that goes on with
one restored from its checkpoint, bitwise; and logits whose other documents, or later tokens,
change. Where a mode differs, the modes are left out in turn to find it. What no proof sees, such as
the rounding of fused kernels and what train.py's loop does itself, docs/experiment.md says.
"""

import contextlib
import dataclasses
import hashlib
import json
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.utils._pytree import tree_map_only

from optim import parts_of
from run import reshard, source
from scale import generators, memory, parallel
from scale.shards import local, rows_of
from system import files
from system.errors import UserError, warn

MICRO_STEPS = 2
PART = 32  # tokens of a row for each rank that shares it, of at least two
GRADIENT = 1e-4  # relative, of each tensor and of the loss; rounding in float32 makes 1e-6
UPDATE = 0.02  # likewise of an update: Muon computes in bf16, and states may have 8 bits
BEFORE, AFTER = 5, 7  # steps around a checkpoint, since some optimizers act in every tenth
PATIENCE_S = 30  # until a rank counts as lost
OWN_WIDTHS = 200_000_000  # parameters, up to which a model that cannot be narrow is tried as it is
# each mode's value without it, and what breaks it most often
OFF = {"remat": "none", "context_parallel": 1, "parallel": "ddp"}
CAUSES = {
    "remat": "a block that runs twice changes what it keeps or is given, or draws other numbers",
    "context_parallel": "tokens mix outside attn.core or in the loss, or a core depends on heads",
    "parallel": "a block reads another one's parameters, or an update needs whole matrices",
}


class Fails(Exception):
    """A trial that raised an error. alike: on all ranks, so that they can go on together."""

    alike = True


@dataclasses.dataclass
class Plain:
    """A step without any mode, up to its update."""

    training: object
    weights: dict  # before the step
    loss: float
    gradients: dict  # {name: gradient}, of those that are not zero
    totals: list  # as of Training.accumulate
    norm: torch.Tensor


def prove(make, cfg, world, loader, eot):
    """Rows of the start-up summary; raises UserError for an edit that a mode would make wrong.

    make: the class train.Training. eot: the id that separates documents, or None. All ranks call
    it. A proof is noted in out_dir, so that a run that goes on there need not repeat it.
    """
    if not cfg.prove:
        return [("prove", "no, as set")]
    note = Path(cfg.out_dir) / "proved.json"
    digest = digest_of(cfg, world)
    if parallel.gather_objects(noted(note) == digest)[0] and not cfg.dry_run:
        return [("prove", "done before, with this code, these settings and as many ranks")]
    began = time.perf_counter()
    with undisturbed(cfg, world, loader):
        proof = Proof(make, cfg, world, cropped(loader, cfg, eot), eot)
        proof.run()
    seconds = f"{time.perf_counter() - began:.1f} s"
    for words in proof.warnings:
        warn(words)
    if proof.reason:
        return [("prove", f"not proved: {proof.reason} ({seconds})")]
    if world.main and not cfg.dry_run:
        with files.writable(note.parent):
            note.parent.mkdir(parents=True, exist_ok=True)
            files.write_json(note, {"digest": digest})
    return [("prove", seconds), *(proof.rows if cfg.dry_run or __import__("os").environ.get("HP") else [])]


def digest_of(cfg, world):
    """SHA-256 of all that a proof depends on."""
    settings = dataclasses.asdict(cfg)
    for name in ("out_dir", "resume", "overwrite", "dry_run"):
        del settings[name]
    facts = [source.BEGAN, settings, world.size, world.device.type, torch.__version__]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def noted(path):
    """The digest in a file; None without one."""
    if not path.exists():
        return None
    return files.read_json(path, form={"digest": files.sha256})["digest"]


@contextlib.contextmanager
def undisturbed(cfg, world, loader):
    """Puts back the position in the data, random numbers, precision and time limits at its end."""
    position = loader.state_dict()
    precision = torch.get_float32_matmul_precision()
    unit = memory.UNIT_MIB
    memory.UNIT_MIB = 0  # FSDP2 gathers each block apart, as where blocks are wide
    limit_collectives(min(PATIENCE_S, cfg.timeout_s))
    with generators.preserved(world.device):
        yield
        loader.load_state_dict(position)
    memory.UNIT_MIB = unit
    torch.set_float32_matmul_precision(precision)
    limit_collectives(cfg.timeout_s)


def limit_collectives(seconds):
    if dist.is_initialized():
        distributed_c10d._set_pg_timeout(parallel.time_limit(seconds), dist.group.WORLD)


def cropped(loader, cfg, eot):
    """[(x, y)] of a step's micro-batches: two short rows each, (B, T), with separators in them."""
    N = cfg.context_parallel
    batches = [loader.next() for _ in range(MICRO_STEPS)]
    B = min(2, *(len(x) for x, _ in batches))
    T = min(PART * max(2, N), *(x.size(1) for x, _ in batches)) // N * N
    found = []
    for x, y in batches:
        has_loss = (y[:B] >= 0).any(0)
        first = min(int(has_loss.int().argmax()), x.size(1) - T)  # answers may begin late
        part = slice(first, first + T)
        x = x[:B, part].clone()
        y = y[:B, part].clone() if has_loss.any() else x.roll(-1, 1)
        if eot is not None:
            for place in separators(T):
                x[:, place] = eot
                y[:, place - 1] = torch.where(y[:, place - 1] >= 0, eot, -100)
        found.append((x, y))
    return found


def separators(T):
    """Where documents begin in a row: at odd places, since an edit may merge two or four tokens."""
    return T // 3 | 1, T * 2 // 3 | 1


class Rows:
    """A loader of the same micro-batches in turn, before each of which a rank draws the same."""

    def __init__(self, batches, seed):
        self.batches = batches
        self.seed = seed
        self.taken = 0

    def next(self):
        self.taken += 1
        generators.seed(self.seed + 1000 * self.taken)
        return self.batches[self.taken % len(self.batches)]

    def state_dict(self):
        return {"taken": self.taken}

    def load_state_dict(self, state):
        self.taken = state["taken"]

    def close(self):
        pass


class Proof:
    """The trials of a run. rows: what they found; reason: why they prove nothing, or None."""

    def __init__(self, make, cfg, world, batches, eot):
        self.make, self.cfg, self.world = make, cfg, world
        self.batches, self.eot = batches, eot
        self.draws = cfg.seed + world.rank  # the run's ranks draw other numbers, too
        self.narrow = True
        self.plain = None
        self.trials = 0
        self.rows, self.warnings, self.reason = [], [], None

    def run(self):
        """Raises UserError if the run differs from plain code, with each of two draws of weights.

        One draw is not enough to refuse: rounding may turn a choice between experts.
        """
        cfg = self.cfg
        try:
            found = self.difference(cfg)
        except Fails as why:
            if not why.alike or memory.total_and_block_parameters(cfg)[0] > OWN_WIDTHS:
                self.reason = f"a narrow copy of the model fails: {why}"
                return
            self.narrow = False  # an edit may need a width, or a depth
            try:
                found = self.difference(cfg)
            except Fails as why:
                self.reason = f"the model fails without any mode: {why}"
                return
        if found:
            cfg = dataclasses.replace(cfg, seed=cfg.seed + 1)
            found = self.difference(cfg)
        if found:
            self.explain(cfg, found)
            return
        parts = [("document_mask=True", self.compare_tokens)]
        if cfg.save_interval or cfg.dry_run:
            parts.insert(0, ("resume", self.compare_resumed))
        for name, part in parts:
            try:
                found = self.on_all_ranks(part)
            except Fails as why:
                found = str(why) if name == "resume" else None
            if found:
                raise UserError(f"{name}: {found} (docs/experiment.md)")

    def explain(self, cfg, words):
        """Raises UserError that names the mode in which a run differs, unless it draws numbers."""
        draws = self.draws
        losses = []
        for self.draws in (draws, draws, draws + 1):
            losses.append(self.on_all_ranks(self.plain_step, cfg).loss)
        if losses[0] != losses[1]:
            self.reason = "the same step twice differs: model.py draws from numbers of its own"
            return
        modes = self.modes(cfg)
        for name in modes:
            if self.difference(dataclasses.replace(cfg, **{name: OFF[name]})):
                continue
            mode = f"{name}={getattr(cfg, name)}"
            if losses[1] != losses[2] and (name == "context_parallel" or cfg.remat_tile):
                self.reason = f"{mode}: model.py draws random numbers, which depend on shapes"
                return
            raise UserError(f"{mode}: {words}: {CAUSES[name]} (docs/experiment.md)")
        raise UserError(f"{self.where(modes)}: {words} (docs/experiment.md)")

    def modes(self, cfg):
        """Names of those that are on."""
        return [name for name, off in OFF.items() if getattr(cfg, name) != off]

    def where(self, modes):
        words = [f"{name}={getattr(self.cfg, name)}" for name in modes]
        words.append(f"{self.world.size} ranks, {MICRO_STEPS} micro-steps")
        return ", ".join(words)

    # -- builds

    def settings(self, cfg, **changes):
        """Those of a trial."""
        B, T = self.batches[0][0].shape
        changes |= dict(batch_size=B, batch_schedule=None, init_from=None, clip=None, dropout=0.0)
        changes |= dict(precision="fp32", weights="fp32", reduce_dtype="fp32", attention="math")
        changes |= dict(compile=False, cuda_graph=False, timeout_s=min(PATIENCE_S, cfg.timeout_s))
        if self.narrow:
            width = 8 * cfg.n_head
            changes |= dict(block_size=T, n_layer=min(32, cfg.n_layer), head_dim=8)
            changes |= dict(n_embd=width, n_hidden=2 * width)
        cfg = dataclasses.replace(cfg, **changes)
        if cfg.remat == "attention" and self.world.device.type != "cpu":
            cfg.remat = "block"  # there its kernels take 16 bits alone
        cfg.batch_tokens = MICRO_STEPS * B * T * (self.world.size // cfg.context_parallel)
        return cfg

    def build(self, cfg, weights=None):
        training = self.make(cfg, self.world, Rows(self.batches, self.draws), weights, self.eot)
        training.state.model.train()
        return training

    def plain_step(self, cfg):
        """A Plain: each rank has all weights and whole rows, and gradients are averaged."""
        training = self.build(self.settings(cfg, **OFF, remat_every=1, remat_tile=None))
        model = training.model = training.state.model  # not in DDP
        weights = with_noise(model, cfg.seed)
        totals = training.accumulate(training.state.loader.next)
        for p in model.parameters():
            if p.requires_grad and p.grad is None:
                p.grad = torch.zeros_like(p)
        average([p.grad for p in model.parameters() if p.requires_grad])
        loss = loss_of(training, totals)
        norm = training.normalize_and_clip(totals)
        gradients = {}
        for name, p in model.named_parameters():
            if p.grad is not None and p.grad.any():
                gradients[name] = p.grad.clone()
        if not loss - loss == 0:
            raise ValueError(f"the loss is {loss}")
        return Plain(training, weights, loss, gradients, totals, norm)

    # -- what is compared; words say what differs

    def difference(self, cfg):
        """How a run differs from plain code, or None. Raises Fails if plain code fails."""
        self.plain = self.on_all_ranks(self.plain_step, cfg)
        self.rows = [("", f"plain loss {self.plain.loss:.6f}")]
        try:
            return self.on_all_ranks(self.compare_step, cfg) or self.on_all_ranks(
                self.compare_update
            )
        except Fails as why:
            if why.alike:
                return f"this model.py fails: {why}"
            raise UserError(f"{self.where(self.modes(cfg))}: this model.py fails: {why}") from None

    def compare_step(self, cfg):
        """Of loss and gradients."""
        plain = self.plain
        built = self.built = self.build(self.settings(cfg), plain.weights)
        totals = built.accumulate(built.state.loader.next)
        loss = loss_of(built, totals)
        built.normalize_and_clip(totals)
        model = built.state.model
        gradients = {n: local(p.grad) for n, p in model.named_parameters() if p.grad is not None}
        error, name = largest_error(model, gradients, plain.gradients)
        self.rows.append(("", f"loss {loss:.6f}, gradients off by up to {error:.0e} ({name})"))
        if not abs(loss - plain.loss) <= GRADIENT * abs(plain.loss):
            return f"the loss of this model.py differs ({loss:.6g} instead of {plain.loss:.6g})"
        if not error <= GRADIENT:
            return f"the gradient of {name} differs by {error:.1e} of its norm"
        return None

    def compare_update(self):
        """Of three steps with the plain gradients, each time in another place of their tensors."""
        plain, model = self.plain, self.built.state.model
        for number in range(3):
            for training in (plain.training, self.built):
                give(training.state.model, plain.gradients, number)
                generators.seed(self.draws)
                training.update(plain.totals, plain.norm)
        expected = {}
        for name, p in plain.training.state.model.named_parameters():
            expected[name] = p.detach() - plain.weights[name]
        moved = {}
        for name, p in model.named_parameters():
            moved[name] = local(p) - own_rows(p, plain.weights[name])
        error, name = largest_error(model, moved, expected)
        self.rows.append(("", f"updates off by up to {error:.0e} ({name})"))
        if not error <= UPDATE:
            return f"the optimizer's update of {name} differs by {error:.1e} of its norm"
        if names := parallel.copies_differ(model):
            return f"the optimizer makes the ranks' copies of {names[0]} drift apart"
        return None

    def compare_resumed(self):
        """Of a run that goes on and one that is restored from what it saves, bit for bit."""
        built = self.built
        steps(built, BEFORE - 3)  # compare_update took three
        saved = packed(built.state)
        expected = steps(built, AFTER)
        found = []
        for _ in range(2):
            restored = self.build(built.cfg)
            unpack(restored.state, saved)
            found.append(steps(restored, AFTER))
            if found[-1] == expected:
                self.rows.append(("", f"resumed: {AFTER} steps the same bit for bit"))
                return None
        if found[0] != found[1]:
            self.warnings.append("prove: a step twice gives other bits, so no resume was compared")
            return None
        return "model or optimizer keep state that their state_dict does not hold"

    @torch.no_grad()
    def compare_tokens(self):
        """Of logits when other tokens change. Warns of what may be meant."""
        model = self.plain.training.state.model
        if self.divides() and not self.is_mean(model):
            what = "its loss is no mean over tokens"
            self.warnings.append(f"model.py: {what}; it depends on ranks and micro-steps")
        T = self.batches[0][0].size(1)
        if self.cfg.document_mask and self.eot is not None:
            last = separators(T)[-1]
            if self.moves(model, slice(0, last), slice(last, T)):
                return "a document's logits depend on the one before: tokens mix outside attn.core"
        if self.moves(model, slice(T // 2, T), slice(0, T // 2)):
            self.warnings.append("model.py lets a token see later ones")
        return None

    def divides(self):
        return self.world.size * self.cfg.micro_steps(self.world.size) > 1

    def is_mean(self, model):
        """Whether a step's loss is that of its micro-batches as one; True if it draws numbers."""
        joined = [torch.cat(parts) for parts in zip(*self.batches)]
        once, again = (self.forward(model, joined, seed) for seed in (0, 1))
        if once != again:
            return True
        parts = [self.forward(model, batch, 0) for batch in self.batches]
        nats = sum(loss * count for loss, count in parts)
        count = sum(count for _, count in parts)
        return abs(nats / count - once[0]) <= GRADIENT * abs(once[0])

    def forward(self, model, batch, seed):
        generators.seed(seed)
        loss, count, _ = model(*batch, None)
        return float(loss), float(count)

    def moves(self, model, changed, seen):
        """Whether other ids at some places change the logits at others."""
        x, _ = self.batches[0]
        other = x.clone()
        other[:, changed] = (x[:, changed] + 1) % self.cfg.vocab_size
        logits = []
        for ids in (x, x, other):
            generators.seed(self.draws)
            logits.append(model.logits(ids)[:, seen])
        was, again, now = logits
        return was.equal(again) and not (now - was).std() <= GRADIENT * was.std()

    # -- ranks

    def on_all_ranks(self, function, *arguments):
        """A function's value on this rank, or the words that it returned on another.

        Raises Fails where it raised an error on any rank, UserError where that is one. They tell
        each other over the store, since a rank may wait in a collective for one that failed.
        """
        self.trials += 1
        value = error = None
        try:
            value = function(*arguments)
        except Exception as found:  # of any type: an edit's
            error = found
        words = None
        if error:
            words = f"{type(error).__name__}: {error}".partition("\n")[0]
        elif isinstance(value, str):
            words = value
        own = [time.time(), error is not None, isinstance(error, UserError), words]
        of_ranks = exchanged(f"prove/{self.trials}", self.world, own)
        told = sorted(one for one in of_ranks if one[3])
        failed = [one for one in told if one[1]]
        if failed:
            why = Fails(failed[0][3])  # the first in time, for which others may have waited
            why.alike = len(failed) == len(of_ranks)
            raise why from error
        return told[0][3] if told else value


def exchanged(key, world, own):
    """[what each rank gives], JSON; for one that does not come in time, that it failed so."""
    if world.size == 1:
        return [own]
    store = distributed_c10d._get_default_store()
    store.set(f"{key}/{world.rank}", json.dumps(own))
    found = []
    for rank in range(world.size):
        try:
            store.wait([f"{key}/{rank}"], timedelta(seconds=2 * PATIENCE_S))
            found.append(json.loads(store.get(f"{key}/{rank}")))
        except RuntimeError:
            found.append([time.time(), True, False, f"rank {rank} does not come"])
    return found


# -- parts of a trial


@torch.no_grad()
def with_noise(model, seed):
    """Moves a model's weights from their first values, which may be zeros; {name: a copy}."""
    generators.seed(seed)
    for p in model.parameters():
        scale = p.size(-1) ** -0.5 if p.dim() > 1 else 0.1
        p.add_(torch.randn_like(p), alpha=scale)
    tensors = dict(model.named_parameters()) | reshard.persistent_buffers(model)
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def average(tensors):
    """Makes tensors their means over the ranks."""
    flat = torch.cat([t.flatten() for t in tensors])
    parallel.sum_over_ranks(flat.div_(parallel.rank_and_size()[1]))
    for t, part in zip(tensors, flat.split([t.numel() for t in tensors])):
        t.copy_(part.view_as(t))


def loss_of(training, totals):
    """A step's mean loss over the targets of all ranks."""
    part, count = parallel.sum_over_ranks(torch.stack([t.float() for t in totals[:2]])).tolist()
    return part * training.rank_step_tokens / count


def own_rows(p, whole):
    """The rows of a whole tensor that this rank holds of a parameter."""
    return whole[slice(*rows_of(p))] if p.shape else whole


def largest_error(model, found, expected):
    """(the largest relative error of a tensor, its name) of this rank's rows of some tensors.

    found: {name: rows}; expected: {name: whole tensor}; one that is absent is zeros. Rounding of
    the largest does not count in the others.
    """
    total = torch.stack([whole.norm() for whole in expected.values()]).norm()
    errors = {}
    for name, p in model.named_parameters():
        own = found.get(name, 0 * local(p))
        whole = expected.get(name, torch.zeros((), device=own.device))
        rows = own_rows(p, whole) if name in expected else whole
        errors[name] = (own.to(rows) - rows).norm() / (whole.norm() + 0.01 * total)
    worst = torch.stack([*errors.values()])
    at = int(worst.nan_to_num(torch.inf).argmax())
    return worst[at].item(), [*errors][at]


@torch.no_grad()
def give(model, gradients, places):
    """Gives parameters their rows of whole gradients, whose elements move by some places."""
    for name, p in model.named_parameters():
        p.grad = None
        if name in gradients:
            whole = gradients[name]
            p.grad = torch.zeros_like(p)
            local(p.grad).copy_(own_rows(p, whole.flatten().roll(places).view_as(whole)))


def steps(training, number):
    """Takes steps; returns their losses and what tells two models' weights apart."""
    found = []
    for _ in range(number):
        totals = training.accumulate(training.state.loader.next)
        norm = training.normalize_and_clip(totals)
        training.update(totals, norm)
        found.append(repr(loss_of(training, totals)))
    return found, parallel.checksums(training.state.model).tolist()


def packed(state):
    """What a checkpoint holds of a train.State, in memory."""
    tensors = dict(state.model.named_parameters()) | reshard.persistent_buffers(state.model)
    found = [tensors, [one.state_dict() for one in parts_of(state.optimizer)], state.own]
    return tree_map_only(torch.Tensor, lambda t: t.detach().clone(), found)


@torch.no_grad()
def unpack(state, saved):
    """Fills a freshly built train.State."""
    tensors, optimizers, own = tree_map_only(torch.Tensor, lambda t: t.clone(), saved)
    for name, t in state.model.named_parameters():
        local(t).copy_(local(tensors[name]))
    for name, t in reshard.persistent_buffers(state.model).items():
        t.copy_(tensors[name])
    for one, its in zip(parts_of(state.optimizer), optimizers):
        one.load_state_dict(its)
    state.own.update(own)
