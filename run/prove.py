"""prove: before its first step a run shows that model.py holds in its modes, or ends in one line.

A narrow copy of the model, in float32 and with random weights, takes steps on a few of the run's
own rows: plainly, and through train.Training, which builds this run and computes its steps.
Compared are loss and gradients; the optimizer's update by equal gradients; a run that goes on with
one restored from its checkpoint, bitwise; and logits whose other documents, or later tokens,
change. Where a mode differs, the modes are left out in turn to find it. What no proof sees, such as
the rounding of fused kernels and what train.py's loop does itself, docs/experiment.md says.
"""

import gc
import hashlib
import itertools
import json
import time
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import torch
from torch.distributed import distributed_c10d
from torch.distributed.elastic.utils.store import synchronize
from torch.distributed.tensor import DTensor

from run import source
from run.build import separator
from run.pack import pack, persistent_buffers, unpack
from run.signals import first_line
from scale import generators, memory, parallel
from scale.shards import copy_into
from system import files
from system.errors import UserError, warn

MICRO_STEPS = 2
PART = 32  # tokens of a row for each rank that shares it, of at least two
# of what is compared, relative; rounding in float32 makes 1e-6, Muon computes in bf16
LIMITS = {"loss": 1e-4, "gradient": 1e-4, "buffer": 1e-4, "update": 0.02}
AFTER = 9  # steps after a checkpoint, which has three: some optimizers act in every tenth
PATIENCE_S = 60  # until a rank counts as lost
OWN_WIDTHS = 200_000_000  # parameters, up to which a model that cannot be narrow is tried as it is
# each mode's value without it, and what breaks it most often
OFF = {"remat": "none", "context_parallel": 1, "parallel": "ddp"}
CAUSES = {
    "remat": "a block lacks attn.core or mlp.core, changes what it keeps, or draws other numbers",
    "context_parallel": "tokens mix outside attn.core or in the loss, or a core depends on heads",
    "parallel": "a block reads or shares another one's weights, or an update needs whole matrices",
}


class Wrong(Exception):
    """What differs from plain code, or fails, on all ranks alike."""


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
    same = replace(cfg, out_dir="", resume="none", overwrite=False)
    facts = f"{source.tag()} {same} {world.size} {world.device.type} {torch.__version__}"
    digest = hashlib.sha256(facts.encode()).digest()
    if parallel.gather_objects(note.exists() and note.read_bytes() == digest)[0]:
        return [("prove", "done before, of this code with these settings and ranks")]
    if eot is None and cfg.document_mask:
        eot = separator(cfg)
    proof = Proof(make, cfg, world, cropped(loader, cfg, eot), eot)
    unit = memory.UNIT_MIB
    memory.UNIT_MIB = 0  # FSDP2 gathers each block apart, as where blocks are wide
    try:
        found = proof.run()
    except NotProved as why:
        return [("prove", f"not proved: {why}")]
    except Wrong as why:
        raise UserError(f"{why} (docs/experiment.md)") from None
    finally:
        memory.UNIT_MIB = unit
        del proof
        gc.collect()  # models refer to themselves
        torch.cuda.empty_cache()
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
        if not (y >= 0).any():  # a dialogue's long question: none of these targets has loss
            y = x.roll(-1, 1)
        found.append((x, y))
    return found


def separators(T):
    """Where documents begin in a row: at odd places, since an edit may merge two or four tokens."""
    return [T // 3 | 1, T * 2 // 3 | 1]


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
        """What was measured; raises Wrong or UserError if the run differs from plain code.

        It must differ with each of two draws of weights: rounding may turn a choice of experts.
        """
        cfg = self.cfg
        self.draws = cfg.seed + self.world.rank  # the run's ranks draw other numbers, too
        words = self.difference(cfg)
        if words:
            cfg = replace(cfg, seed=cfg.seed + 1)
            words = self.difference(cfg)
        if words:
            self.explain(cfg, words)
        if cfg.save_interval or cfg.cuda_graph or cfg.dry_run:
            self.on_all_ranks(self.compare_resumed)
        self.on_all_ranks(self.compare_tokens)
        return self.found

    def difference(self, cfg):
        """How a step differs from plain code, in words, or None."""
        self.found = []
        try:
            self.plain = self.on_all_ranks(self.trial, cfg)
        except Wrong as why:
            if not self.narrow or memory.total_and_block_parameters(cfg)[0] > OWN_WIDTHS:
                raise NotProved(f"without any mode {why}") from None
            self.narrow = False  # an edit may need a width, or a depth
            return self.difference(cfg)
        try:
            self.on_all_ranks(self.compare_step, cfg)
        except Wrong as why:
            return str(why)

    def explain(self, cfg, words):
        """Raises Wrong that names the mode in which a run differs, unless it draws numbers."""
        loss = self.plain["loss"]
        if self.on_all_ranks(self.trial, cfg)["loss"] != loss:
            raise NotProved("the same step twice differs: model.py draws from numbers of its own")
        self.draws += 1
        draws = self.on_all_ranks(self.trial, cfg)["loss"] != loss
        for name, off in OFF.items():
            value = getattr(cfg, name)
            cfg = replace(cfg, **{name: off})
            if value != off and not self.difference(cfg):
                if draws and (name == "context_parallel" or cfg.remat_tile):
                    raise NotProved(f"{name}={value}: model.py draws numbers, by shapes")
                raise Wrong(f"{name}={value}: {words}: {CAUSES[name]}")
        raise Wrong(f"{self.world.size} ranks, {MICRO_STEPS} micro-steps: {words}")

    # -- a trial

    def build(self, cfg, weights=None):
        """A Training of settings that are changed to those of a trial."""
        B, T = self.batches[0][0].shape
        changes = dict(
            batch_size=B,
            batch_tokens=MICRO_STEPS * B * T * (self.world.size // cfg.context_parallel),
            batch_schedule=None,
            init_from=None,
            clip=None,
            dropout=0.0,
            precision="fp32",
            weights="fp32",
            reduce_dtype="fp32",
            attention="flash",
            compile=False,
            cuda_graph=False,
        )
        if self.narrow:
            cfg = replace(cfg.narrow(), block_size=T)
        loader = SimpleNamespace(state_dict=dict, load_state_dict=lambda _: None)
        training = self.make(replace(cfg, **changes), self.world, loader, weights, self.eot)
        training.state.model.train()
        return training

    def batches_again(self):
        """Yields the micro-batches in turn; before each it seeds what a forward may draw."""
        for number in itertools.count():
            generators.seed(self.draws + 1000 * number)
            yield self.batches[number % MICRO_STEPS]

    def trial(self, cfg, plain=None):
        """A step of a Training, as {one of LIMITS: {name: tensor}} and more.

        plain: the trial without modes, whose weights it begins with and whose gradients make its
        updates; None: this is it. Its ranks have all weights and whole rows, and it averages.
        """
        if plain:
            training = self.build(cfg, plain["weights"])
        else:
            training = self.build(replace(cfg, **OFF, remat_every=1, remat_tile=None))
            training.model = training.state.model  # not in DDP
            fill(training.model, cfg.seed)
        model = training.state.model
        parameters = dict(model.named_parameters())
        weights = whole(parameters | persistent_buffers(model))
        calls = []
        for number, block in enumerate(() if plain else model.blocks):
            block.register_forward_hook(lambda *_, number=number: calls.append(number))
        totals = training.accumulate(self.batches_again().__next__)
        if not plain:
            for p in parameters.values():
                if p.requires_grad:  # a rank may lack some
                    p.grad = torch.zeros_like(p) if p.grad is None else p.grad
                    parallel.sum_over_ranks(p.grad.div_(self.world.size))
        norm = training.normalize_and_clip(totals)
        part, count = parallel.sum_over_ranks(torch.stack([t.float() for t in totals[:2]]))
        loss = part * training.rank_step_tokens / count
        if not loss.isfinite():
            raise ValueError(f"the loss is {loss:.6g}")
        found = {"training": training, "weights": weights, "calls": calls}
        found["loss"] = {"this model.py": loss}
        found["gradient"] = whole({n: p.grad for n, p in parameters.items() if p.grad is not None})
        # under context parallelism a rank's buffers are those of its tokens
        found["buffer"] = whole(persistent_buffers(model)) if self.cfg.context_parallel == 1 else {}
        for places in range(3):
            give(parameters, (plain or found)["gradient"], places)
            generators.seed(self.draws)
            training.update(totals, norm)
        found["update"] = {name: t - weights[name] for name, t in whole(parameters).items()}
        return found

    def steps(self, training):
        """Takes steps; returns what tells two models' weights apart."""
        next_batch = self.batches_again().__next__
        for _ in range(AFTER):
            totals = training.accumulate(next_batch)
            training.update(totals, training.normalize_and_clip(totals))
        return parallel.checksums(training.state.model).tolist()

    # -- what is compared; each raises Wrong

    def compare_step(self, cfg):
        """Loss, gradients, buffers and updates, in the run's modes and plainly."""
        calls = self.plain["calls"]
        if cfg.parallel != "ddp" or cfg.context_parallel > 1:
            if any(others != calls for others in parallel.gather_objects(calls)):
                raise Wrong("the ranks do not call the same blocks, as if each drew which")
        built = self.trial(cfg, self.plain)
        self.built = built["training"]
        drift = parallel.copies_differ(self.built.state.model)
        for what, limit in LIMITS.items():
            error, name = largest_error(built[what], self.plain[what])
            self.found.append(f"{what}: the largest difference is {error:.0e}")
            if error > limit:
                raise Wrong(f"the {what} of {name} differs by {error:.1e} of its norm")
        if drift:
            raise Wrong(f"the optimizer makes the ranks' copies of {drift[0]} drift apart")

    def compare_resumed(self):
        """A run that goes on, and one that is restored from what it saves, bit for bit."""
        tensors, values = pack(self.built.state)
        saved = {group: whole(named) for group, named in tensors.items()}
        expected = self.steps(self.built)
        found = []
        for _ in range(2):
            restored = self.build(self.built.cfg, saved["model"])
            unpack(restored.state, json.loads(json.dumps(values)), saved)
            found.append(self.steps(restored))
        if expected in found:
            self.found.append(f"{AFTER} steps after a resume are the same bit for bit")
        elif found[0] == found[1]:
            raise Wrong("resume: model or optimizer keep what their state_dict does not hold")
        else:
            warn("prove: a step twice gives other bits, so no resume was compared")

    @torch.no_grad()
    def compare_tokens(self):
        """Logits when other tokens change, and a loss in parts. Warns of what may be meant."""
        x, y = self.batches[0]
        T = x.size(1)
        last = separators(T)[-1]
        try:
            loss, logits = self.forward(x, y)
        except Exception:  # of any type: a model may have no logits, or others
            return
        if not logits.equal(self.forward(x, y)[1]):
            return  # something else than tokens changes them

        def changed_by(places):
            other = x.clone()
            other[:, places] = (x[:, places] + 1) % self.cfg.vocab_size
            return self.forward(other, y)[1] - logits  # (B, T, V)

        limit = LIMITS["loss"] * logits.norm()
        if self.cfg.document_mask and changed_by(slice(last))[:, last:].norm() > limit:
            why = "a document's logits depend on the one before: tokens mix outside attn.core"
            raise Wrong(f"document_mask=True: {why}")
        if changed_by(slice(T // 2, T))[:, : T // 2].norm() > limit:
            warn("model.py lets a token see later ones")
        if loss == self.forward(x, y, seed=1)[0]:  # it draws no numbers, and nothing is kept
            parts = loss + self.forward(*self.batches[1])[0]
            together, _ = self.forward(*map(torch.cat, zip(*self.batches)))
            if (parts - together).abs() > LIMITS["loss"] * together.abs():
                why = "is no mean over tokens"
                warn(f"model.py: the loss {why}, so it depends on ranks and micro-steps")

    def forward(self, x, y, seed=0):
        """(the sum of the targets' losses, logits) of the plain model."""
        generators.seed(seed)
        model = self.plain["training"].model
        loss, count, _ = model(x, y, None)  # before the logits, for document masks
        return loss * count, model.logits(x)

    # -- ranks

    def on_all_ranks(self, function, *arguments):
        """A function's value; raises its Wrong or UserError, or another error as Wrong.

        UserError too where it failed on some ranks alone. Ranks tell each other over the store,
        since one may wait in a collective for another that failed.
        """
        value = error = None
        try:
            value = function(*arguments)
        except (Wrong, UserError) as found:
            error = found
        except Exception as found:  # of any type: an edit's
            error = Wrong(f"this model.py fails: {type(found).__name__}: {first_line(found)}")
        words = str(error or "")
        for others in self.told(words):
            if others != words:
                raise UserError(f"on a rank alone {words or others} (docs/experiment.md)")
        if error:
            raise error
        return value

    def told(self, words):
        """What each rank says."""
        if self.world.size == 1:
            return [words]
        self.asked += 1
        place = self.world.rank, self.world.size, f"prove/{self.asked}/", PATIENCE_S
        try:
            told = synchronize(distributed_c10d._get_default_store(), words.encode(), *place)
        except RuntimeError:  # others wait in a collective
            return [words, "a rank does not come"]
        return [found.decode() for found in told]


# -- parts of a trial


@torch.no_grad()
def fill(model, seed):
    """Adds random numbers to parameters, whose first values may be zero."""
    generators.seed(seed)
    for p in model.parameters():
        p.add_(torch.randn_like(p), alpha=p.size(-1) ** -0.5 if p.dim() > 1 else 0.1)


def whole(tensors):
    """Copies of {name: tensor}, whole where ranks hold rows of them."""
    found = {}
    for name, t in tensors.items():
        t = t.detach()
        if isinstance(t, DTensor):
            t = t.full_tensor()  # one rank's shard may be the whole, and then no copy
        found[name] = t.clone()
    return found


def largest_error(found, expected):
    """(the largest relative error, its name) of {name: tensor}; an absent one is zeros.

    What is small beside all of them together may be rounding.
    """
    total = sum(t.float().square().sum() for t in expected.values()) ** 0.5
    errors = [(0.0, "none")]
    for name in found | expected:
        there = expected.get(name, torch.zeros(())).float()
        error = (found.get(name, 0) - there).norm() / (there.norm() + 0.01 * total + 1e-30)
        errors.append((error.nan_to_num(torch.inf).item(), name))
    return max(errors)


@torch.no_grad()
def give(parameters, gradients, places):
    """Gives parameters their rows of whole gradients, whose elements move by some places."""
    for name, p in parameters.items():
        p.grad = None
        if name in gradients and gradients[name].any():
            p.grad = torch.zeros_like(p)
            copy_into(p.grad, gradients[name].flatten().roll(places).view(p.shape))
