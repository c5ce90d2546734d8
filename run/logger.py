"""The console and logs of a run: the start block, one aligned line per step, log.jsonl, and wandb when asked for."""

import contextlib
import errno
import json
import os
import shlex
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from configurator import is_rank_0
from run import files, watch
from run.flops import peak_flops
from run.pulse import duration


def device_name(device):
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def describe_device(world):
    """A row of the start block."""
    return "device", f"{world.size} x {device_name(world.device)}, torch {torch.__version__}"


def show(rows, say=print):
    """Prints the rows (name, value) of a start block."""
    for name, value in rows:
        say(f"{name:<12} {value}")


def human(n):
    """12,345,678 -> 12.3M."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if n >= size:
            return f"{n / size:.4g}{unit}"
    return f"{n:.4g}"


class Logger:
    """Prints and records on rank 0 only; every method may be called on every rank."""

    def __init__(self, cfg, world, flops_per_token, precision, saved_id=None):
        self.cfg, self.on, self.device, self.world = cfg, world.main, world.device, world
        self.flops_per_token = flops_per_token
        peak = peak_flops(world.device, precision)
        known = peak is not None and flops_per_token is not None
        self.mfu_per_rate = flops_per_token / (peak * world.size) if known else None
        self.file = self.wandb = None
        self.first, self.average = (
            True,
            None,
        )  # running seconds per step, without the first: that one compiles
        self.origin = 0, 0  # a step, and the tokens that were trained on before it
        if self.on and not cfg.dry_run:
            path = Path(cfg.out_dir) / "log.jsonl"
            with files.writable(cfg.out_dir):
                path.parent.mkdir(parents=True, exist_ok=True)
                files.write_json(path.with_name("config.json"), asdict(cfg))
                if path.exists():  # a kill may have cut the last line short: it would spoil the next one
                    os.truncate(path, path.read_bytes().rfind(b"\n") + 1)
                self.file, self.full = open(path, "ab", buffering=0), False  # noqa: SIM115
            self.wandb = self._start_wandb(saved_id) if cfg.wandb else None
        self.run_id = self.wandb.id if self.wandb else saved_id

    def _start_wandb(self, saved_id):
        """A wandb run, the saved one on a resume; where wandb fails, training goes on without it."""
        try:
            import wandb

            folder = os.environ.get("WANDB_DIR") or self.cfg.out_dir
            settings = {"project": "pretrain", "name": self.cfg.run_name, "dir": folder}
            run = wandb.init(
                id=saved_id, resume="allow" if saved_id else None, config=vars(self.cfg), **settings
            )
            run.define_metric("*", step_metric="step")  # a resumed run steps back; wandb's own step may not
            return run
        except Exception as error:  # not installed, no key, no network: wandb has a type for each
            self.print(
                f"warning: wandb is off ({type(error).__name__}: {watch.first_line(error)}); log.jsonl goes on"
            )
            return None

    def print(self, *words):
        if self.on:
            print(*words, flush=True)
            watch.spoke()

    def record(self, kind, step, **values):
        """One line in log.jsonl, where inf and NaN are null since JSON has neither, and in wandb as kind/name."""
        if self.file:
            self._append(json.dumps({"kind": kind, "step": step, **files.finite(values)}) + "\n")
        if self.wandb:
            try:
                self.wandb.log(
                    {"step": step, **{f"{kind}/{k}": v for k, v in values.items() if v is not None}}
                )
            except Exception as error:
                self.print(f"warning: wandb stopped ({type(error).__name__}); log.jsonl goes on")
                self.wandb = None

    def _append(self, line):
        """A whole line or none; a disk that is full costs lines of the log, not the run."""
        end = os.fstat(self.file.fileno()).st_size
        try:
            if self.file.write(data := line.encode()) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            with contextlib.suppress(OSError):
                self.file.truncate(end)
            if not self.full:
                self.full = True
                self.print(
                    f"warning: {self.file.name}: {error.strerror}; training goes on, lines of the log are lost"
                )

    def start(self, step, rows, settings, tokens=0):
        """The start block: aligned names and values; last, the settings that the user changed, {name: value}.

        tokens: how many were trained on before `step`, with whatever batch_tokens.
        """
        self.origin = step, tokens
        words = [f"{k}={v}" for k, v in settings.items()]
        rows = [describe_device(self.world), *rows, ("settings", " ".join(words) or "all defaults")]
        show(rows, self.print)
        self.record("start", step, flops_per_token=self.flops_per_token, rows=rows)

    def saved(self, step, folder):
        """A checkpoint is complete. A later --resume=auto that finds none looks for this line."""
        self.print(f"saved {folder}")
        self.record("saved", step)
        watch.note(last_checkpoint=str(folder))

    def step(self, step, loss, lr, norm, seconds):
        """The line of a finished training step (steps counted from 1), its time in seconds."""
        cfg, rate = self.cfg, self.cfg.batch_tokens / seconds
        if not self.first:
            self.average = seconds if self.average is None else 0.9 * self.average + 0.1 * seconds
        self.first = False
        mfu = None if self.mfu_per_rate is None else rate * self.mfu_per_rate
        gib = torch.cuda.max_memory_allocated(self.device) / 2**30 if self.device.type == "cuda" else None
        values = {
            "loss": loss,
            "lr": lr,
            "norm": norm,
            "dt_ms": seconds * 1e3,
            "tok_per_s": rate,
            "mfu": mfu,
            "gib": gib,
        }
        tokens = self.origin[1] + (step - self.origin[0]) * cfg.batch_tokens
        self.record("train", step, **values, tokens=tokens)
        watch.note(step=step, loss=loss, eta_s=self.average and round(self.average * (cfg.max_steps - step)))
        watch.spoke(seconds)
        if step % cfg.log_interval == 0 or step == cfg.max_steps:
            width, eta = len(str(cfg.max_steps)), self.eta(cfg.max_steps - step)
            self.print(
                f"step {step:>{width}}/{cfg.max_steps} | loss {loss:8.4f} | lr {lr:.2e} | norm {norm:7.3f} | "
                f"{seconds * 1e3:8.1f} ms | {rate:>11,.0f} tok/s | mfu {'  n/a' if mfu is None else f'{mfu:5.1%}'} | "
                f"{'' if gib is None else f'{gib:5.1f} GiB | '}eta {eta}"
            )

    def eta(self, steps):
        """The time that so many more steps will take, in words; n/a while only the first step has been timed."""
        return "n/a" if steps and self.average is None else duration(steps * (self.average or 0))

    def close(self, step, saved, seconds, stopped=None):
        """The closing summary after `step` steps; saved: the step of the last checkpoint, None without one."""
        out_dir = shlex.quote(self.cfg.out_dir)
        watch.note(state="stopped" if stopped else "done", step=step)
        self.print(
            f"{'done' if step == self.cfg.max_steps else 'stopped':<12} step {step} after {duration(seconds)}"
        )
        if saved is not None:
            if saved != step:
                self.print(f"{'not saved':<12} steps {saved + 1} to {step}")
            more = "a larger --max_steps and " if step == self.cfg.max_steps else ""
            words = f"{out_dir} at step {saved}; to go on, the same command with {more}--resume=auto"
            self.print(f"{'checkpoint':<12} {words}")
            self.print(f"{'next':<12} python sample.py --checkpoint={out_dir}; python plot.py {out_dir}")
        elif stopped:
            self.print(
                f"{'checkpoint':<12} none: nothing was saved{' (save_interval=0)' * (not self.cfg.save_interval)}"
            )
        if self.file:
            self.file.close()
        if self.wandb:
            try:
                self.wandb.finish()
            except Exception as error:
                self.print(
                    f"warning: wandb did not finish ({type(error).__name__}: {watch.first_line(error)})"
                )


def progress(iterable, label, total=None):
    """Yields the items; a tqdm bar shows them on rank 0 in a terminal, else a line now and then (run/pulse.py).

    A run may stop at each (watch.boundary).
    """
    from tqdm import tqdm

    quiet = not is_rank_0() or not sys.stderr.isatty()
    total = len(iterable) if total is None and hasattr(iterable, "__len__") else total
    for number, item in enumerate(tqdm(iterable, desc=label, total=total, leave=False, disable=quiet), 1):
        watch.boundary(label)
        watch.item(label, number, total, shown=not quiet)
        yield item
