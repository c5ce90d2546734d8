"""Pre-train a GPT or a Llama.

    python train.py config/quickstart.py                                     # one process: CPU, one GPU, Apple's MPS
    torchrun --standalone --nproc_per_node=8 train.py config/gpt2_124m.py    # one node
    torchrun --nnodes=2 --nproc_per_node=4 --rdzv_backend=c10d --rdzv_endpoint=HOST:29500 train.py config/gpt2_124m.py

Settings: a config file, then --key=value (`--help` lists them). Writes out_dir/log.jsonl, config.json, the code that
ran (model.py, kernels.py, source.json) and checkpoints, step_*/.
Exit codes: 0 done, 2 a setting, 3 data, 4 a checkpoint, 5 numbers that are not finite, 130 and 143 saved and stopped
by SIGINT and SIGTERM; of every rank the same (docs/operations.md).
"""

from configurator import changed, parse, run
from run.hf import adopt
from settings import Config, check

if __name__ == "__main__":  # torch takes seconds to import: --help and a mistake in a setting answer before
    cfg = parse(Config, check, adopt)

import dataclasses
import time

import torch

import optim
from corpus.loader import verify
from run import checkpoint
from run.build import build_model, choose, describe, make_batches, make_loaders
from run.evaluate import Evaluator
from run.logger import Logger
from run.meter import Meter
from run.resume import Start
from run.watch import Watch
from scale import graphs, parallel
from scale.precision import autocast


class Training:
    """A run's model, optimizer and step. `raw` is the model; `model` is the one that a step calls, perhaps in DDP.

    cfg: from `choose`. weights: of a checkpoint; None: of cfg.init_from, or new ones. eot: the separator of documents.
    """

    def __init__(self, cfg, world, weights=None, eot=None):
        self.raw, self.model, self.account = build_model(cfg, world, weights, eot)
        self.amaxes = checkpoint.magnitudes(self.raw)
        self.optimizer = optim.make_optimizer(self.raw, cfg)
        self.scaler = torch.amp.GradScaler(world.device.type, enabled=cfg.precision == "fp16")
        self.autocast = autocast(cfg.precision, world.device)
        self.accumulation = cfg.micro_steps(world.size)
        self.clip, self.skips = cfg.clip, cfg.max_skipped_steps > 0 and not self.scaler.is_enabled()
        if cfg.cuda_graph:
            self.micro_step = graphs.Replayed(
                self.micro_step, self.model, self.accumulation, cfg.reduce_dtype
            )

    def micro_step(self, x, y, *weight):
        """Adds a micro-batch's gradients to those of the step -> its part of the loss. weight: see make_batches."""
        with self.autocast:
            loss = self.model(x, y, "sum") * weight[0] if weight else self.model(x, y) / self.accumulation
        self.scaler.scale(loss).backward()
        return loss.detach()

    def step(self, next_batch, lr):
        """One optimizer step over `accumulation` batches -> (loss, gradient norm), tensors on the device."""
        loss = 0.0
        for micro in range(self.accumulation):
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
    with Watch(cfg, world) as watch:
        code = train(cfg, world, watch)
    parallel.stop()
    return code


def train(cfg, world, watch):
    began, settings = time.perf_counter(), changed(cfg)
    check(cfg, world.size)
    cfg, chosen = choose(cfg, world.device)
    check(dataclasses.replace(cfg, attention="auto"), world.size)  # the resolved precision may be in conflict
    start = Start(cfg.out_dir, cfg.resume, cfg.overwrite, cfg.dry_run)
    start.check(cfg)
    if cfg.dry_run:
        cfg = dataclasses.replace(cfg, max_steps=start.step + 2 + graphs.EAGER_STEPS * cfg.cuda_graph)

    # data
    if cfg.verify_data:
        verify(cfg.data_dir)
    loader, val_loaders = make_loaders(cfg, world)
    cfg = dataclasses.replace(cfg, tokenizer=cfg.tokenizer or loader.tokenizer)  # recorded for sample.py
    next_batch = make_batches(cfg, world, loader)

    # model and optimizer, new or as a checkpoint has them
    job = Training(cfg, world, start.weights, loader.eot)
    evaluate = Evaluator(cfg, world, job, val_loaders)
    torch.manual_seed(cfg.seed + world.rank)  # dropout differs by rank
    start.restore(job, loader, world, cfg.allow_data_change)

    # console and files
    if watch.writes:
        watch.lock.take()
        start.prepare_out_dir()
    log = Logger(cfg, world, job.account.flops_per_token, cfg.precision, start.state.get("wandb_id"))
    warnings = [("warning", words) for words in [*loader.warnings, *evaluate.warnings, *start.warnings]]
    rows = [*chosen, *describe(cfg, world, job, loader, start), *warnings]
    log.start(start.step, rows, settings, tokens=loader.position)
    every = 0 if cfg.dry_run else cfg.save_interval
    options = dict(background=cfg.async_save, last=start.saved, saved=log.saved)
    saver = checkpoint.Saver(cfg.out_dir, every, cfg.keep_last, world, **options)
    meter = Meter(log, saver, job.scaler, world, cfg.max_skipped_steps, began)

    step, evaluate.done = start.step, start.evaluated
    job.raw.train()
    while True:
        last = step == cfg.max_steps or watch.stopping
        eval_due = evaluate.due_at(step) and not watch.stopping
        if last or eval_due or saver.due(step, last) or step == start.step + 1:
            meter.catch_up()
        if eval_due:
            with watch.stoppable():
                meter.refuse(step, "validation loss", evaluate(step, log))
            last = last or watch.stopping
        if saver.due(step, last):
            state = dict(config=dataclasses.asdict(cfg), wandb_id=log.run_id, **evaluate.state(step))
            state |= dict(loader=loader.state_dict(), scaler=job.scaler.state_dict())
            saver.save(step, job.raw, job.optimizer, state)
        if last:
            break
        meter.launching(step + 1)
        lr = optim.learning_rate(step, cfg)
        with watch.stoppable(
            loader, job.amaxes
        ):  # told to stop in the middle of a step, the run gives that step up
            loss, norm = job.step(next_batch, lr)
            step += 1
            meter.launched(step, lr, loss, norm)

    saver.wait()
    loader.close()
    log.close(step, saver.last, time.perf_counter() - began, watch.stopping)
    return 128 + watch.stopping if watch.stopping else 0


if __name__ == "__main__":
    run(main, cfg)
