"""prove: before its first step a run shows that model.py holds in its modes, or ends in one line.

A narrow copy of the model, in float32 and with random weights, takes steps on a few of the run's
own rows: plainly, and through train.Training, which builds this run and computes its steps.
Compared are loss and gradients; the optimizer's update by equal gradients; a run near its end with
one restored from its checkpoint, bitwise; and logits whose other documents, or later tokens,
change. Looked for are values that no checkpoint holds, and tokens that mix outside attn.core over
more tokens than these rows have. Where a mode differs, the modes are left out in turn to find it.
An error that one raises ends the run as it would in its first step. What no proof sees, such as the
rounding of fused kernels and what train.py's loop does itself, docs/experiment.md says.
"""

import gc
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

import model as models
from corpus import as_user_error
from optim import parts_of
from run import source
from run.build import compile_model
from run.checkpoint import everywhere
from run.pack import add_noise, pack, persistent_buffers, unpack
from scale import context_parallel, generators, memory, parallel
from scale.shards import copy_into, local
from system import files
from system.errors import UserError, listed, warn

MICRO_STEPS = 2
ROW = 64  # tokens of a row
PART = 256  # of a row that ranks share, for each of them: an edit may act far in a row only
# of what is compared, relative; rounding in float32 makes 1e-6, Muon computes in bf16
LIMITS = {"loss": 1e-4, "gradient": 1e-4, "buffer": 1e-4, "update": 0.02}
AFTER = 9  # steps after a checkpoint, which has three: some optimizers act in every tenth
UPDATES = 5  # of these steps by the same gradients, since a forward and a backward take longer
OWN_WIDTHS = 200_000_000  # parameters, up to which a model that cannot be narrow is tried as it is
# attributes that `unsaved` skips, of modules and of the objects beside them (optimizers and
# train.Training): a checkpoint holds what is in them, or the trials themselves set them
IN_MODULES, BESIDE = ("_parameters", "_buffers"), ("state", "param_groups", "accumulation")
# each mode's value without it
OFF = {"compile": False, "remat": "none", "context_parallel": 1, "parallel": "ddp"}


class NotProved(Exception):
    """Why the trials tell nothing, on all ranks alike."""


def prove(make, cfg, world, loader, eot):
    """Rows of the start-up summary; raises UserError for an edit that a mode would make wrong.

    make: the class train.Training. eot: the id that separates documents, or None. All ranks call
    it. out_dir notes what was proved, so that a run that goes on there need not prove it again.
    """
    if not cfg.prove:
        return [("prove", "no, as set")]
    began = time.perf_counter()
    note = Path(cfg.out_dir) / "proved"
    same = replace(cfg, resume="none", overwrite=False)
    facts = f"{source.tag()} {same} {world.size} {world.device.type} {torch.__version__}"
    if parallel.gather_objects(note.exists() and note.read_text() == facts)[0]:
        return [("prove", "done before, of this code with these settings and ranks")]
    batches = cropped(loader, cfg, eot)
    unit = memory.UNIT_MIB
    memory.UNIT_MIB = 0  # FSDP2 gathers each block apart, as where blocks are wide
    try:
        found = Proof(make, cfg, world, batches, eot).run()
    except NotProved as why:
        return [("prove", f"not proved: {why}")]
    finally:
        memory.UNIT_MIB = unit
        gc.collect()  # models refer to themselves
    rows = [("prove", f"{time.perf_counter() - began:.1f} s")]
    if cfg.dry_run:
        return rows + [("", words) for words in found]
    if world.main:
        with files.writable(cfg.out_dir):
            files.write_atomic(note, facts)
    return rows


def cropped(loader, cfg, eot):
    """[(x, y)] of a step's micro-batches: two short rows each, (B, T), with separators in them."""
    N = cfg.context_parallel
    position = loader.state_dict()
    batches = [loader.next() for _ in range(MICRO_STEPS)]
    shortest = min(x.size(1) for x, _ in batches)
    T = min(ROW if N == 1 else PART * N, shortest) // N * N
    found = []
    for x, y in batches:
        x, y = x[:2, :T].clone(), y[:2, :T]
        if eot is not None:
            x[:, separators(T)] = eot
        if not (y >= 0).any():  # a dialogue's long question: none of these targets has loss
            y = x.roll(-1, 1)
        found.append((x, y))
    loader.load_state_dict(position)
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
    analysis = None  # of the model on meta, which is the same in every mode

    def run(self):
        """What was measured; raises UserError if the run differs from plain code, or NotProved."""
        self.draws = self.cfg.seed + self.world.rank  # the run's ranks draw other numbers, too
        words = self.difference(self.cfg)
        if words:
            self.explain(words)
        what = "each micro-batch of a rank changes it by itself (docs/experiment.md)"
        warn(self.changing and f"{listed(self.changing)}: {what}")
        if self.cfg.save_interval or self.cfg.cuda_graph or self.cfg.dry_run:
            everywhere(self.compare_resumed)
        everywhere(self.compare_tokens)
        return self.found

    def explain(self, words):
        """Raises UserError that names the mode in which a run differs, unless it draws numbers."""
        cfg = self.cfg
        loss = self.plain["loss"]
        self.draws += 1
        draws = self.plain_step(cfg)["loss"] != loss
        for name, off in OFF.items():
            value = getattr(cfg, name)
            cfg = replace(cfg, **{name: off})
            if value != off and not self.difference(cfg):
                if draws and (name == "context_parallel" or cfg.remat_tile):
                    raise NotProved(f"{name}={value}: model.py draws numbers, by shapes")
                raise UserError(f"{name}={value}: {words} (docs/experiment.md)")
        if draws:
            raise NotProved("model.py draws numbers, perhaps of a generator of its own")
        raise UserError(
            f"{self.world.size} ranks, {MICRO_STEPS} micro-steps: {words} (docs/experiment.md)"
        )

    def difference(self, cfg):
        """How a step in the run's modes differs from plain code, in words; None: it does not."""
        self.found = []
        try:
            self.plain = self.plain_step(cfg)
        except UserError as why:
            if not self.narrow or memory.total_and_block_parameters(cfg)[0] > OWN_WIDTHS:
                raise NotProved(f"without any mode, {why}") from None
            self.narrow, self.analysis = False, None  # an edit may need a width, or a depth
            return self.difference(cfg)
        if cfg.remat in ("block", "attention") and any(parallel.gather_objects(self.drawing)):
            return "a block draws numbers of numpy or Python, others when it is computed again"
        if any(calls != self.calls for calls in parallel.gather_objects(self.calls)):
            if cfg.parallel != "ddp" or cfg.context_parallel > 1:  # they would wait for each other
                return "the ranks do not call the same blocks, as if each drew which"
        modes = f"parallel={cfg.parallel}, context_parallel={cfg.context_parallel}"
        why = f"{modes}, remat={cfg.remat}: model.py fails"
        # an error ends this rank, for which the others may wait in a collective: torchrun ends them
        with as_user_error(why, advice=" (docs/experiment.md)"):
            self.built = self.build(cfg, self.weights)
            if cfg.compile and self.changing and cfg.parallel == "ddp":
                # a backward reads buffers as the forward has left them (pytorch#197039)
                compile_model(self.built.state.model, backend="aot_eager")
            totals = self.accumulate(self.built)
            built = self.step(self.built, totals, self.plain["gradient"])
        wrong = []
        for what, limit in LIMITS.items():
            error, name = largest_error(built[what], self.plain[what])
            self.found.append(f"{what}: the largest difference is {error:.0e}")
            if error > limit:
                wrong.append(f"the {what} of {name} differs by {error:.1e} of its norm")
        for name in parallel.copies_differ(self.built.state.model):
            wrong.append(f"the optimizer makes the ranks' copies of {name} drift apart")
        for of_rank in parallel.gather_objects(wrong):
            if of_rank:
                return of_rank[0]

    # -- a trial

    def build(self, cfg, weights=None):
        """A Training of settings that are changed to those of a trial."""
        B, T = self.batches[0][0].shape
        if self.narrow:
            cfg = replace(cfg.narrow(), block_size=T)
        cfg = replace(
            cfg,
            batch_size=B,
            batch_tokens=MICRO_STEPS * B * T * (self.world.size // cfg.context_parallel),
            init_from=None,
            dropout=0.0,
            precision="fp32",
            weights="fp32",
            reduce_dtype="fp32",
            attention="flash",
            compile=False,
            cuda_graph=False,
        )
        loader = SimpleNamespace(state_dict=dict, load_state_dict=lambda _: None)
        generators.seed(self.cfg.seed)  # as the run's analysis does, on all ranks alike
        training = self.make(cfg, self.world, loader, weights, self.eot, self.analysis)
        self.analysis = training.analysis
        training.state.model.train()
        return training

    def accumulate(self, training):
        """The sums of a step's micro-batches; before each it seeds what a forward may draw."""

        def batches():
            for number, batch in enumerate(self.batches):
                generators.seed(self.draws + 1000 * number)
                yield batch

        return training.accumulate(batches().__next__)

    def plain_step(self, cfg):
        """As `step`, of random weights and without modes: ranks have all weights and whole rows."""
        training, totals = everywhere(self.plain_gradients, cfg)
        found = self.step(training, totals)
        if not found["loss"]["this model.py"].isfinite():
            raise NotProved("without any mode, the loss is not finite")
        return found

    def plain_gradients(self, cfg):
        """(Training, totals) of plain code.

        self.calls gets the number of each block that runs, self.drawing of each that draws from
        numpy's or Python's generator.
        """
        training = self.build(replace(cfg, **OFF))
        self.model = training.model = training.state.model  # not in DDP
        self.fresh = unsaved(self.model)
        generators.seed(cfg.seed)
        add_noise(self.model)
        self.weights = whole(dict(self.model.named_parameters()) | persistent_buffers(self.model))
        self.calls, self.drawing = [], []
        buffers = dict(self.model.named_buffers())
        first = whole(buffers)
        before = []

        def enter(*_):
            before.append(generators.others())

        def leave(number, *_):
            self.calls.append(number)
            if before.pop() != generators.others():
                self.drawing.append(number)

        for number, block in enumerate(self.model.blocks):
            block.register_forward_pre_hook(enter)
            block.register_forward_hook(partial(leave, number))
        totals = self.accumulate(training)
        self.changing = [name for name, b in buffers.items() if not b.equal(first[name])]
        return training, totals

    def step(self, training, totals, gradients=None):
        """{one of LIMITS: {name: tensor}} of a step, after its forward and backward.

        gradients: by which it updates; None: by its own, which it averages, as plain code does not.
        """
        model = training.state.model
        parameters = dict(model.named_parameters())
        for p in parameters.values():
            if p.grad is None:  # no loss depends on it
                p.grad = torch.zeros_like(p)
            if not gradients:
                parallel.sum_over_ranks(p.grad.div_(self.world.size))
        norm = training.normalize_and_clip(totals)
        figures = training.figures.over_ranks(totals, norm, {})
        loss, *_ = training.figures.means(figures)
        if loss is None:
            raise NotProved("no target in the first tokens of a row counts")
        found = {"loss": {"this model.py": torch.tensor(loss)}}
        grads = {name: p.grad for name, p in parameters.items()}
        found["gradient"] = whole(grads)
        # under context parallelism a rank's buffers are those of its tokens
        found["buffer"] = whole(persistent_buffers(model)) if self.cfg.context_parallel == 1 else {}
        gradients = gradients or found["gradient"]
        for places in range(5):  # rows of whole gradients, whose elements move by some places
            for name, p in parameters.items():
                p.grad = None
                if gradients[name].any():
                    p.grad = torch.zeros_like(p)
                    copy_into(p.grad, gradients[name].roll(places))
            generators.seed(self.draws)
            training.update(totals, norm)
        found["update"] = {name: t - self.weights[name] for name, t in whole(parameters).items()}
        return found

    def steps(self, training, count=AFTER):
        """Takes steps, UPDATES in a row by the same gradients -> the weights' checksums."""
        model = training.state.model
        training.accumulation = 1
        for number in range(count):
            if number % UPDATES == 0:
                totals = self.accumulate(training)
                norm = training.normalize_and_clip(totals)
                gradients = [p.grad for p in model.parameters()]
            for p, gradient in zip(model.parameters(), gradients):
                p.grad = gradient
            training.update(totals, norm)
        return parallel.checksums(model).tolist()

    # -- what is compared besides

    def compare_resumed(self):
        """A run that goes on, and one that is restored from what it saves, bit for bit."""
        late = self.cfg.max_steps - 2 * AFTER
        self.built.state.step = max(self.built.state.step, late)  # what begins late has begun
        self.steps(self.built, count=2)
        tensors, values = pack(self.built.state)
        saved = {group: whole(named) for group, named in tensors.items()}
        generators.seed(self.cfg.seed + 1)  # numpy's and Python's, too
        other = models.build(self.built.cfg, self.world.device, self.cfg.seed + 1)
        if drawn := differences(self.fresh, unsaved(other)):
            what = "model.py draws it at random, and no checkpoint holds it"
            raise UserError(f"{listed(drawn)}: {what}: make it a buffer (docs/experiment.md)")
        beside = [self.built, *parts_of(self.built.state.optimizer)]
        before = unsaved(self.built.state.model, beside)
        expected = self.steps(self.built)
        changed = differences(before, unsaved(self.built.state.model, beside))

        def resumed():
            restored = self.build(self.built.cfg, saved["model"])
            unpack(restored.state, values, saved)
            return self.steps(restored)

        found = resumed()
        if found == expected:
            self.found.append(f"{AFTER} steps after a resume are the same bit for bit")
            what = "steps change it, and no checkpoint holds it (docs/experiment.md)"
            warn(changed and f"{listed(changed)}: {what}")
        elif found == resumed():
            what = "model or optimizer keep what their state_dict lacks, or states not contiguous"
            raise UserError(f"resume: {what} (docs/experiment.md)")
        else:
            warn("prove: a step twice gives other bits, so no resume was compared")

    @torch.no_grad()
    def compare_tokens(self):
        """Logits when other tokens change; warns where that may be meant."""
        x, y = self.batches[0]
        last = separators(x.size(1))[-1]
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
        masked = self.cfg.document_mask
        N = self.cfg.context_parallel
        if masked and changed_by(slice(last))[:, last:].norm() > limit:
            why = "a document's logits depend on the one before: tokens mix outside attn.core"
            raise UserError(f"document_mask=True: {why} (docs/experiment.md)")
        if masked or N > 1:
            text = torch.cat([x.flatten() for x, _ in self.batches])
            model = self.long_model()
            if any(context_parallel.mixes_elsewhere(model, self.eot, row) for row in (None, text)):
                mode = "document_mask=True" if masked else f"context_parallel={N}"
                raise UserError(f"{mode}: tokens mix outside attn.core (docs/experiment.md)")
        if changed_by(slice(last, None))[:, :last].norm() > limit:
            warn("model.py lets a token see later ones")
        if loss == self.forward(x, y, seed=1)[0]:  # it draws no numbers
            parts = loss + self.forward(*self.batches[1])[0]
            together, _ = self.forward(*map(torch.cat, zip(*self.batches)))
            if (parts - together).abs() > LIMITS["loss"] * together.abs():
                warn("model.py's loss is no mean over tokens: it depends on ranks and micro-steps")

    def long_model(self):
        """A plain model as the trials' for rows as long as `mixes_elsewhere` takes."""
        cfg = self.cfg.narrow() if self.narrow else self.cfg
        length = min(cfg.block_size, context_parallel.MIXED)
        cfg = replace(cfg, block_size=length, dropout=0.0)
        model = models.build(cfg, self.world.device, cfg.seed).eval()
        add_noise(model)
        return model

    def forward(self, x, y, seed=0):
        """(the sum of the targets' losses, logits) of the plain model."""
        generators.seed(seed)
        for name, buffer in persistent_buffers(self.model).items():
            buffer.copy_(self.weights[name])
        loss, count, _ = self.model(x, y, None)  # before the logits, for document masks
        return loss * count, self.model.logits(x)


# -- parts of a trial


def whole(tensors):
    """Copies of {name: tensor}, whole where ranks hold rows of them."""
    found = {}
    for name, t in tensors.items():
        t = t.detach()
        if isinstance(t, DTensor):
            t = t.full_tensor()  # one rank's shard may be the whole, and then no copy
        found[name] = t.clone()
    return found


def unsaved(model, beside=()):
    """{name of an attribute: list of the numbers in it} for what no checkpoint holds.

    Of the model's modules and of the objects `beside` it. An attribute may be a number, a tensor,
    or a list or dict of them.
    """
    saved = set(map(id, model.state_dict(keep_vars=True).values()))
    modules = dict(model.named_modules())
    places = modules | {type(part).__name__: part for part in beside}
    found = {}
    for place, owner in places.items():
        known = IN_MODULES if place in modules else BESIDE
        for name, value in (vars(owner) | getattr(owner, "_buffers", {})).items():
            if name in known:
                continue
            found[f"{place}.{name}".removeprefix(".")] = values = []
            for leaf in tree_leaves(value):
                if id(leaf) in saved:  # perhaps under another name
                    continue
                if torch.is_tensor(leaf) and not leaf.requires_grad:
                    leaf = local(leaf).tolist()
                if isinstance(leaf, (int, float, list)):
                    values.append(leaf)
    return found


def differences(found, expected):
    """Names of the values in `found` that `expected` has otherwise."""
    return [name for name, values in found.items() if expected.get(name, values) != values]


def largest_error(found, expected):
    """(the largest relative error, its name) of {name: tensor}.

    What is small beside all of them together may be rounding.
    """
    total = sum(t.float().square().sum() for t in expected.values()) ** 0.5
    errors = [(0.0, "none")]
    for name, there in expected.items():
        there = there.float()
        error = (found[name] - there).norm() / (there.norm() + 0.01 * total + 1e-30)
        errors.append((error.nan_to_num(torch.inf).item(), name))
    return max(errors)
