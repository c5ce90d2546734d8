"""Pre-train a GPT or a Llama.

    python train.py config/quickstart.py    # one process: CPU, one GPU, MPS
    torchrun --standalone --nproc_per_node=8 train.py config/gpt2_124m.py
    torchrun --nnodes=2 --nproc_per_node=8 --rdzv_backend=c10d \\
        --rdzv_endpoint=HOST:29500 train.py ...  # two nodes

Settings: a config file, then --key=value (`--help` lists them). Writes
out_dir/log.jsonl, config.json, the code that ran (model.py, kernels.py,
source.json) and checkpoints, step_*/. Exit codes: 0 done, 1 an error in the
code or a lost rank, 2 a setting, 3 data, 4 a checkpoint, 5 numbers that are not
finite, 128 + N saved and stopped by signal N (docs/operations.md).
"""

from configurator import parse, run
from run import source
from run.hf import adopt
from settings import Config, check

if __name__ == "__main__":  # before torch, whose import takes seconds: --help and mistakes
    cfg = parse(Config, check, adopt)

import contextlib
import dataclasses
import itertools

import torch

import optim
from run import agreement, resume
from run.build import (
    build_model,
    choose,
    describe,
    make_loader,
    separator,
    try_out,
    validation_loaders,
    wrap,
)
from run.checkpoint import Saver, everywhere
from run.evaluate import Evaluations, add_evaluations
from run.figures import Figures
from run.logger import LONG, Logger
from run.pack import magnitudes, pack
from run.prove import prove
from run.signals import Watch, errors_explained
from scale import context_parallel, generators, parallel
from scale.cuda_graph import GraphedMicroStep
from scale.precision import autocast
from system.files import locked


@dataclasses.dataclass
class State:
    """What a run has come to: a checkpoint holds this, and a resumed run goes on from it.

    Saved along with it are each rank's random-number generators, buffers where they differ, and in
    fp8 the amaxes of the last step.
    """

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler  # fp16's loss scale; in any other precision it does nothing
    loader: object = None  # the position in the data: next, state_dict, load_state_dict, close
    step: int = 0  # optimizer steps done
    tokens: int = 0  # tokens read by all ranks
    seconds: float = 0.0  # of training steps, as the ranks agree on them (Logger.elapsed)
    evaluated: int | None = None  # the step after which all evaluations that were due have run
    # yours: tensors, numbers, objects with a state_dict
    own: dict = dataclasses.field(default_factory=dict)


class Training:
    """A run's state and how a step is computed: precision, ranks, a CUDA graph or not."""

    def __init__(self, cfg, world, loader=None, weights=None, eot=None, analysis=None):
        """weights: a checkpoint's, or None. eot: separates documents, for document masks.

        analysis: a ModelAnalysis of this model, if there is one.
        """
        self.cfg, self.world = cfg, world
        model, self.analysis = build_model(cfg, world, weights, eot, analysis)
        scaler = torch.amp.GradScaler(world.device.type, enabled=cfg.precision == "fp16")
        self.state = State(model, optim.make_optimizer(model, cfg), scaler, loader)
        self.autocast = autocast(cfg.precision, world.device)
        self.accumulation = cfg.micro_steps(world.size)  # in the next step; the loop sets it
        self.rank_step_tokens = cfg.batch_tokens / world.size  # in a step of the largest batch
        self.figures = Figures(cfg.batch_tokens, world.size)
        self.model = model  # as a micro-step calls it
        self.rows = []  # of the start-up summary
        self.graph = None
        if cfg.cuda_graph:
            self.graph = GraphedMicroStep(self.micro_step, model, cfg.reduce_dtype)
        else:
            self.model, self.rows = wrap(model, cfg, world, self.analysis)  # in DDP

    def micro_step(self, x, y, positions=None):
        """Adds a micro-batch's gradients to the step's -> its sums (see run/figures.py)."""
        with self.autocast:
            loss, count, extras = self.model(x, y, positions)
        # A step's targets are counted after its last micro-step. Until then the sum is divided by a
        # constant, which a captured graph can hold; `normalize_and_clip` puts in their number.
        part = loss * (count / self.rank_step_tokens)
        self.state.scaler.scale(part).backward()
        return self.figures.sums(part, count, extras)

    def accumulate(self, next_batch):
        """Forward and backward of a step's micro-batches, whose gradients add up -> their sums."""
        totals = None
        for micro in range(self.accumulation):
            x, y = next_batch()
            self.state.tokens += x.numel() * self.world.size // self.cfg.context_parallel
            batch = context_parallel.own_tokens(self.cfg, self.world, x, y)
            last = micro == self.accumulation - 1
            if self.graph:
                sums = self.graph(*batch, average=last)
            else:
                parallel.sync_gradients(self.model, last)
                sums = self.micro_step(*batch)
            totals = sums if totals is None else torch._foreach_add(totals, sums)
        optim.fill_gradients(self.state.model, self.analysis.unused)
        return totals

    def normalize_and_clip(self, totals):
        """Makes the gradients those of the mean over targets, clips them; returns their norm."""
        self.state.scaler.unscale_(self.state.optimizer)
        targets = parallel.sum_over_ranks(totals[1].clone())
        factor = self.cfg.batch_tokens / targets.clamp(min=1)
        return optim.clip_gradients(self.state.model, self.cfg.clip, factor)

    def update(self, totals, norm):
        """A step of the optimizer; with max_skipped_steps none if loss or norm is not finite."""
        state = self.state
        # fp16's scaler leaves such a step out by itself; here the host waits for the device
        may_skip = self.cfg.max_skipped_steps and self.cfg.precision != "fp16"
        if may_skip and not parallel.all_finite([totals[0], norm], self.world.device):
            for amax in magnitudes(state.model):  # fp8's
                amax.zero_()
        else:
            state.scaler.step(state.optimizer)
            state.scaler.update()
        state.optimizer.zero_grad()
        state.step += 1


def main(cfg):
    world = parallel.join(cfg)
    watch = Watch(world)
    with errors_explained(cfg, world), contextlib.ExitStack() as stack:
        train(cfg, world, watch, stack)
    parallel.stop()
    return 128 + watch.stopping if watch.stopping else 0


def train(cfg, world, watch, stack):
    """Runs until the last step or a signal; what is open to the end goes onto the ExitStack."""
    # the settings, resolved for this device, and the run's folder
    given = cfg
    writes = world.main and not cfg.dry_run
    cfg, chosen = choose(cfg, world.device)
    # the resolved precision may be in conflict
    check(dataclasses.replace(cfg, attention="auto"), world.size)
    agreement.settings(cfg)
    if writes:
        stack.enter_context(locked(cfg.out_dir))
    start = resume.find(cfg)
    if cfg.dry_run:
        cfg = try_out(cfg, world, start.state["step"])

    # the data
    generators.seed(cfg.seed + world.rank)  # a loader of one's own may draw
    loader = make_loader(cfg, world)
    tokenizer = cfg.tokenizer or getattr(loader, "tokenizer", None)
    cfg = dataclasses.replace(cfg, tokenizer=tokenizer)  # recorded for sample.py
    val_loaders = validation_loaders(cfg, world) if cfg.eval_interval else []
    agreement.data(loader, val_loaders)
    eot = separator(cfg, loader)
    proved = prove(Training, cfg, world, loader, eot)  # that model.py holds in these modes
    next_batch = loader.next
    if cfg.overfit:  # the first batch again and again
        micro_batches = [loader.next() for _ in range(cfg.micro_steps(world.size))]
        next_batch = itertools.cycle(micro_batches).__next__

    # the model, the optimizer and how a step is computed
    training = Training(cfg, world, loader, start.tensors.get("model"), eot)
    state = training.state

    # console and log, evaluations
    log = Logger(world, cfg)
    evaluations = Evaluations(training, log, watch)
    add_evaluations(evaluations, cfg, world, val_loaders)

    # the state as the checkpoint has it, random numbers included; else as it is
    generators.seed(cfg.seed + world.rank)  # dropout differs by rank
    start.restore(state)
    if cfg.save_interval:
        everywhere(pack, state)  # state.own that no checkpoint can hold ends a run here
    source.check()  # that no source was edited while this process imported it
    if writes:
        resume.prepare_out_dir(cfg)
    if not cfg.dry_run:
        log.open(start.saved_at)
    saver = Saver(world, cfg.out_dir, cfg.keep_last, cfg.async_save, start.saved_at, log.saved)
    rows = [*chosen, *describe(cfg, training, start), *proved]
    log.start(training, rows, given)

    state.model.train()
    while True:
        # save
        share = optim.share_done(state, cfg)  # of the run
        done = share == 1 or watch.stopping
        if saver.due(state.step, cfg.save_interval, done):
            log.catch_up()
            saver.save(state, config=dataclasses.asdict(cfg))

        # evaluate, before the first step too
        if evaluations.due() and not watch.stopping:
            log.catch_up()
            score = evaluations.run()
            if not evaluations.due():  # no signal has ended them
                saver.evaluated(state.step, score)
            continue  # to save, if a signal came meanwhile

        if done:
            break
        parallel.begin_step(state.model)  # whose parameters() are this rank's shards from here on

        # rate and batch, micro-steps, clip, step
        began = parallel.Moment(world.device)
        lr = optim.learning_rate(state.step, share, cfg)
        optim.set_learning_rate(state.optimizer, lr)
        tokens = optim.batch_tokens(share, cfg)
        training.accumulation = cfg.micro_steps(world.size, tokens)
        totals = training.accumulate(next_batch)
        norm = training.normalize_and_clip(totals)
        training.update(totals, norm)

        # log; the ranks agree here on signals, on saves in the background, and on the time
        own = {
            "asked to stop": watch.asked,
            "save unwritten": float(not saver.written()),
            "seconds": log.elapsed(state.step + log.late),
            "seconds a step": log.seconds,
        }
        figures = training.figures.over_ranks(totals, norm, own)
        of_ranks = log.step(state, lr, figures, began)
        state.seconds = of_ranks["seconds"]
        if of_ranks["asked to stop"] > 0 or of_ranks["seconds a step"] > LONG:
            watch.agreed()
        if of_ranks["save unwritten"] == 0:  # on any rank, in the background
            saver.wait()

    log.catch_up()
    saver.wait()
    loader.close()
    log.close(state.step, bool(watch.stopping))


if __name__ == "__main__":
    run(main, cfg)
