"""Pre-train a GPT or a Llama.

    python train.py config/quickstart.py                                     # one process: CPU, one GPU, Apple's MPS
    torchrun --standalone --nproc_per_node=8 train.py config/gpt2_124m.py    # one node
    torchrun --nnodes=2 --nproc_per_node=8 --rdzv_backend=c10d --rdzv_endpoint=HOST:29500 train.py config/gpt2_124m.py

Settings: a config file, then --key=value (`--help` lists them). Writes out_dir/log.jsonl, config.json, the code that
ran (model.py, kernels.py, source.json) and checkpoints, step_*/.
Exit codes: 0 done, 2 a setting, 3 data, 4 a checkpoint, 5 a loss that is not finite, 143 saved and stopped by SIGTERM.
"""

from configurator import UserError, parse, run
from run.hf_config import adopt
from settings import Config, check, legal

if __name__ == "__main__":  # torch takes seconds to import: --help and a mistake in a setting answer before
    cfg = parse(Config, check, adopt)

import dataclasses
import signal
import sys
import time

import torch

import optim
from corpus.loader import verify
from run import checkpoint
from run.build import build_model, choose, describe, make_batches, make_loaders
from run.evaluate import Evaluator
from run.logger import Logger, changed
from run.meter import Meter
from run.resume import Start
from scale import documents, memory, parallel


class Training:
    """A run's model, optimizer and step. `raw` is the model; `model` is the one that a step calls, perhaps in DDP.

    cfg: from `choose`. weights: of a checkpoint; None: of cfg.init_from, or new ones. eot: see documents.separator.
    """

    def __init__(self, cfg, world, weights=None, eot=None):
        self.raw, self.model, self.account = build_model(cfg, world, weights, eot)
        self.optimizer = optim.make_optimizer(self.raw, cfg)
        self.scaler = torch.amp.GradScaler(world.device.type, enabled=cfg.precision == "fp16")
        self.autocast = parallel.autocast(cfg.precision, world.device)
        self.accumulation = cfg.batch_tokens // cfg.micro_tokens(world.size)  # micro-steps in a step
        self.clip = cfg.clip

    def step(self, next_batch, lr):
        """One optimizer step over `accumulation` batches -> (loss, gradient norm), tensors on the device."""
        loss = 0.0
        for micro in range(self.accumulation):
            x, y, *weight = next_batch()  # a weight where only some targets count, see make_batches
            parallel.sync_gradients(self.model, micro == self.accumulation - 1)
            with self.autocast:
                micro_loss = self.model(x, y, "sum") * weight[0] if weight else self.model(x, y) / self.accumulation
            self.scaler.scale(micro_loss).backward()
            loss += micro_loss.detach()
        self.scaler.unscale_(self.optimizer)
        norm = parallel.clip_gradients(self.raw, self.clip)
        optim.set_learning_rate(self.optimizer, lr)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        return loss, norm.to(loss)


build = Training  # the name by which bench.py and the tests call it


class StopSignal:
    """`asked` becomes True on SIGTERM; after each step the ranks agree whether one of them was asked (Meter)."""

    def __init__(self):
        self.asked = False
        signal.signal(signal.SIGTERM, self)

    def __call__(self, *_):
        self.asked = True


def main(cfg):
    world = parallel.join(cfg)
    try:
        train(cfg, world)
    except torch.OutOfMemoryError:
        budget = torch.cuda.mem_get_info(world.device)[1]
        raise UserError(memory.advice(cfg, world.size, budget, legal)) from None
    finally:
        parallel.stop()


def train(cfg, world):
    began, settings = time.perf_counter(), changed(cfg)
    check(cfg, world.size)
    cfg, chosen = choose(cfg, world.device)
    check(dataclasses.replace(cfg, attention="auto"), world.size)  # the resolved precision may be in conflict
    start = Start(cfg)
    if cfg.dry_run:
        cfg = dataclasses.replace(cfg, max_steps=start.step + 2)

    # data
    if cfg.verify_data:
        verify(cfg.data_dir)
    loader, val_loaders = make_loaders(cfg, world)
    cfg = dataclasses.replace(cfg, tokenizer=cfg.tokenizer or loader.tokenizer)  # recorded for sample.py
    next_batch = make_batches(cfg, world, loader)

    # model and optimizer, new or as a checkpoint has them
    job = Training(cfg, world, start.weights, documents.separator(cfg, loader.eot))
    evaluate = Evaluator(cfg, world, job, val_loaders)
    torch.manual_seed(cfg.seed + world.rank)  # dropout differs by rank
    start.restore(job, loader, world, cfg.allow_data_change)

    # console and files
    if world.main and not cfg.dry_run:
        start.prepare_out_dir(cfg)
    log = Logger(cfg, world, job.account.flops_per_token, cfg.precision, start.state.get("wandb_id"))
    warnings = [("warning", words) for words in [*loader.warnings, *evaluate.warnings, *start.warnings]]
    log.start(start.step, [*chosen, *describe(cfg, world, job, loader, start), *warnings], settings)
    saver = checkpoint.Saver(cfg, world, log.print, last=start.step if start.folder else None)
    meter = Meter(log, saver, job.scaler, world, StopSignal(), began)

    step = start.step
    job.raw.train()
    while True:
        last = step == cfg.max_steps or meter.stopping
        eval_due = evaluate.due_at(step) and step != saver.last  # a resumed run evaluated before it was saved
        save_due = saver.due(step, last)
        if last or eval_due or save_due or step == start.step + 1:
            meter.catch_up()
        val_loss = evaluate(step, log) if eval_due else None
        meter.refuse(step, "validation loss", val_loss)
        if save_due:
            state = dict(config=dataclasses.asdict(cfg), val_loss=val_loss, wandb_id=log.run_id)
            state |= dict(loader=loader.state_dict(), scaler=job.scaler.state_dict())
            saver.save(step, job.raw, job.optimizer, state)
        if last:
            break
        meter.launching()
        lr = optim.learning_rate(step, cfg)
        loss, norm = job.step(next_batch, lr)
        step += 1
        meter.launched(step, lr, loss, norm)

    saver.wait()
    loader.close()
    log.close(step, saver.last, time.perf_counter() - began)
    if step != cfg.max_steps:
        sys.exit(143)


if __name__ == "__main__":
    run(main, cfg)
