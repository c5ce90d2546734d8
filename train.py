"""Pre-train a GPT or a Llama.

    python train.py config/quickstart.py                          # one process: CPU, one GPU, Apple's MPS
    torchrun --standalone --nproc_per_node=8 train.py config/gpt2_124m.py                         # one node
    torchrun --nnodes=2 --nproc_per_node=8 --rdzv_backend=c10d --rdzv_endpoint=HOST:29500 train.py ...

Settings: a config file, then --key=value (`--help` lists them). Writes out_dir/log.jsonl,
config.json, the code that ran (model.py, kernels.py, source.json) and checkpoints, step_*/.
Exit codes, the same of all ranks: 0 done, 2 a setting, 3 data, 4 a checkpoint, 5 numbers that are not finite,
128 + N saved and stopped by signal N (docs/operations.md).
"""

from configurator import changed, parse, run
from run.hf import adopt
from settings import Config, check

if __name__ == "__main__":  # torch takes seconds to import: --help and a mistake in a setting answer before
    cfg = parse(Config, check, adopt)

import dataclasses

import torch

import optim
from corpus.loader import verify
from run.build import build_model, choose, describe, make_batches, make_loaders
from run.checkpoint import Saver, magnitudes
from run.evaluate import Evaluator, add_evaluations
from run.files import Lock
from run.logger import LONG, Logger, NotFinite, progress
from run.resume import Start
from run.signals import Watch, explained
from scale import parallel
from scale.precision import autocast


class Training:
    """A run's model, optimizer and step. `raw` is the model; `model` is what a step calls, perhaps in DDP."""

    def __init__(self, cfg, world, weights=None, eot=None):
        self.raw, self.account = build_model(cfg, world, weights, eot)
        self.model = self.raw
        self.amaxes = magnitudes(self.raw)
        self.optimizer = optim.make_optimizer(self.raw, cfg)
        self.scaler = torch.amp.GradScaler(world.device.type, enabled=cfg.precision == "fp16")
        self.autocast = autocast(cfg.precision, world.device)
        self.accumulation = cfg.micro_steps(world.size)
        self.clip, self.skips = cfg.clip, cfg.max_skipped_steps > 0 and not self.scaler.is_enabled()
        graph, self.rows = None, []
        if cfg.cuda_graph:
            from scale import graphs

            graph, self.rows = graphs.choose(cfg, world, self.micro_step, self.raw, self.accumulation)
        if graph:
            self.micro_step = graph
        else:
            self.model = parallel.wrap(self.raw, cfg, world, bool(self.account.unused))

    def micro_step(self, x, y, *weight):
        """Adds a micro-batch's gradients to the step's -> its part of the loss. weight: see make_batches."""
        with self.autocast:
            loss = self.model(x, y, "sum") * weight[0] if weight else self.model(x, y) / self.accumulation
        self.scaler.scale(loss).backward()
        return loss.detach()

    def step(self, next_batch, lr):
        """One optimizer step over `accumulation` batches -> (loss, gradient norm), tensors on the device."""
        loss = 0.0
        for micro in progress(range(self.accumulation), "micro-step", bar=False):
            parallel.sync_gradients(self.model, micro == self.accumulation - 1)
            loss += self.micro_step(*next_batch())
        self.scaler.unscale_(self.optimizer)
        norm = optim.clip_gradients(self.raw, self.clip)
        optim.set_learning_rate(self.optimizer, lr)
        if self.skips:  # AdamW then leaves weights and states as they are, which no host needs to know
            self.optimizer.found_inf = parallel.not_finite(loss, norm)
            spoilt = self.optimizer.found_inf.to(loss.device) > 0
            for amax in self.amaxes:  # fp8's
                amax.masked_fill_(spoilt, 0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        return loss, norm.to(loss)


def main(cfg):
    world = parallel.join(cfg)
    with Watch(world, cfg.timeout_s) as watch, explained(cfg, world):
        train(cfg, world, watch)
    parallel.stop()
    return 128 + watch.stopping if watch.stopping else 0


def train(cfg, world, watch):
    settings, writes = changed(cfg), world.main and not cfg.dry_run
    cfg, chosen = choose(cfg, world.device)
    check(dataclasses.replace(cfg, attention="auto"), world.size)  # the resolved precision may be in conflict
    lock = watch.enter_context(Lock(cfg.out_dir)) if writes else None
    start = Start(cfg.out_dir, cfg.resume, cfg.overwrite, cfg.dry_run)
    start.check(cfg)
    if cfg.dry_run:
        from scale.graphs import EAGER_STEPS

        cfg = dataclasses.replace(cfg, max_steps=start.step + 2 + EAGER_STEPS * bool(cfg.cuda_graph))
        if world.main:
            verify(cfg.data_dir)
    skips = None if cfg.precision == "fp16" else cfg.max_skipped_steps
    log = Logger(world, cfg.max_steps, cfg.log_interval, cfg.batch_tokens, skips)

    # data
    loader, val_loaders = make_loaders(cfg, world)
    cfg = dataclasses.replace(cfg, tokenizer=cfg.tokenizer or loader.tokenizer)  # recorded for sample.py
    next_batch = make_batches(cfg, world, loader)

    # model and optimizer, new or as a checkpoint has them
    job = Training(cfg, world, start.weights, loader.eot)
    torch.manual_seed(cfg.seed + world.rank)  # dropout differs by rank
    start.restore(job, loader, world, cfg.allow_data_change)

    # console, files, evaluation
    evaluate = Evaluator(job, log, watch.agreed, cfg.max_steps, start.evaluated)
    warnings = [*loader.warnings, *add_evaluations(evaluate, cfg, world, val_loaders)]
    config, saved = dataclasses.asdict(cfg), start.step if start.saved else None
    if lock:
        lock.take()
        start.prepare_out_dir()
    if not cfg.dry_run:
        log.open(cfg.out_dir, config, cfg.wandb, start.wandb_id, saved)
    every = 0 if cfg.dry_run else cfg.save_interval
    saver = Saver(world, cfg.out_dir, cfg.keep_last, cfg.async_save, start.saved, log.saved)
    watch.push(lambda kind, *_: kind is NotFinite and saver.wait())  # ends a save in the background
    rows = [*chosen, *describe(cfg, world, job, loader, start)]
    rows += [("warning", words) for words in [*warnings, *start.warnings]]
    log.start(start.step, loader.rows * cfg.block_size, rows, settings, job.account)

    step = start.step
    job.raw.train()
    while True:
        last = step == cfg.max_steps or watch.stopping
        if last or evaluate.due(step) or saver.due(step, every, last):
            log.catch_up()
        if evaluate.due(step) and not watch.stopping:
            log.refuse(step, "validation loss", evaluate(step))
            last = last or watch.stopping
        if saver.due(step, every, last):
            state = dict(config=config, wandb_id=log.wandb_id, **evaluate.state(step))
            state |= dict(loader=loader.state_dict(), scaler=job.scaler.state_dict())
            saver.save(step, job.raw, job.optimizer, state)
        if last:
            break
        watch.begin(step + 1)
        began = parallel.Moment(world.device)
        lr = optim.learning_rate(step, cfg)
        loss, norm = job.step(next_batch, lr)
        step += 1
        flags = watch.asked > 0, saver.written()
        asked, written, seconds = log.step(step, lr, loss, norm, began, flags)
        if asked or seconds > LONG:
            watch.agreed()
        if written == 1:  # a save in the background, by every rank
            saver.wait()

    saver.wait()
    loader.close()
    log.close(step, bool(watch.stopping))


if __name__ == "__main__":
    run(main, cfg)
