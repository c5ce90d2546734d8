"""The console and logs of a run: start-up summary, a line a step, log.jsonl, and wandb."""

import collections
import contextlib
import json
import math
import os
import shlex
import statistics
import sys
import time
from pathlib import Path

import torch
from tqdm import tqdm

from configurator import UserError, is_rank_0
from run import files
from scale import parallel

SILENT = 10  # s until the bar of `progress` begins outside a terminal, and between its updates there
LONG = 2.0  # s; a step that takes longer is waited for, so that a stop costs no second one
SPIKE, SETTLED = 6.0, 100  # a loss so many sigma above the mean of so many steps is warned of


class NotFinite(UserError):
    exit_code = 5


def device_name(device):
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def describe_device(world):
    return "device", f"{world.size} x {device_name(world.device)}, torch {torch.__version__}"


def show(rows, say=print):
    """Prints rows (name, value), aligned."""
    for name, value in rows:
        say(f"{name:<12} {value}")


class Logger:
    """Prints and records on rank 0; all ranks make the same calls, since `step` averages over them."""

    def __init__(self, world, max_steps, log_interval, batch_tokens, max_skipped):
        """max_skipped: steps in a row that may be skipped; None with fp16, whose scaler skips by itself."""
        self.world, self.max_steps, self.log_interval = world, max_steps, log_interval
        self.batch_tokens, self.max_skipped = batch_tokens, max_skipped
        self.began, self.origin = time.perf_counter(), 0  # tokens read besides step * batch_tokens
        self.out_dir = self.file = self.wandb = self.wandb_id = self.saved_at = None
        self.account = self.mark = None
        self.unread, self.figures = collections.deque(), []
        self.late = 0  # 1 on CUDA: a step is read when the next one is queued, so that the device has work
        self.seconds, self.average = 0.0, None  # of a step; average: without the first one, which compiles
        self.full, self.skipped, self.in_a_row = False, 0, 0
        self.recent = collections.deque(maxlen=SETTLED)  # losses

    def print(self, *words):
        if self.world.main:
            print(*words, flush=True)

    def open(self, out_dir, config, wandb=False, wandb_id=None, saved_at=None):
        """Opens the log in out_dir, and a wandb run. saved_at: the step of the checkpoint resumed there."""
        self.out_dir, self.wandb_id, self.saved_at = Path(out_dir), wandb_id, saved_at
        if self.world.main:
            path = self.out_dir / "log.jsonl"
            with files.writable(out_dir):
                files.write_json(path.with_name("config.json"), config)
                if path.exists():  # a kill may have cut the last line short: it would spoil the next one
                    os.truncate(path, path.read_bytes().rfind(b"\n") + 1)
                self.file = open(path, "ab", buffering=0)
            self.wandb = self._try_wandb(self._start_wandb, config) if wandb else None
            self.wandb_id = self.wandb.id if self.wandb else wandb_id

    def _start_wandb(self, config):
        import wandb

        names = dict(name=self.out_dir.resolve().name, dir=os.environ.get("WANDB_DIR") or self.out_dir)
        run = wandb.init(project="pretrain", config=config, id=self.wandb_id, resume="allow", **names)
        run.define_metric("*", step_metric="step")  # a resumed run steps back; wandb's own step may not
        return run

    def _try_wandb(self, call, *arguments):
        """call(*arguments); where wandb fails, for which it has many types, training goes on without it."""
        try:
            return call(*arguments)
        except Exception as error:
            self.wandb, reason = None, str(error).partition("\n")[0] or type(error).__name__
            self.print(f"warning: wandb is off ({type(error).__name__}: {reason}); log.jsonl goes on")

    def record(self, kind, step, **values):
        """A line of log.jsonl, where inf and NaN are null as in JSON, and in wandb as kind/name."""
        if self.file:
            finite = json.loads(json.dumps(values), parse_constant=lambda _: None)
            self._append(json.dumps({"kind": kind, "step": step, **finite}).encode() + b"\n")
        if self.wandb:
            named = {f"{kind}/{name}": value for name, value in values.items() if value is not None}
            self._try_wandb(self.wandb.log, {"step": step, **named})

    def _append(self, line):
        """A whole line or none; a disk that is full costs lines of the log, not the run."""
        end = os.fstat(self.file.fileno()).st_size
        try:
            while line:
                line = line[self.file.write(line) :]
        except OSError as error:
            with contextlib.suppress(OSError):
                self.file.truncate(end)
            if not self.full:
                self.print(f"warning: {self.file.name}: {error.strerror}; training goes on, lines are lost")
            self.full = True

    def start(self, step, tokens, rows, settings, account):
        """The start-up summary. account: a flops.Account, for the MFU."""
        self.account, self.origin = account, tokens - step * self.batch_tokens
        words = " ".join(f"{name}={shlex.quote(str(value))}" for name, value in settings.items())
        rows = [describe_device(self.world), *rows, ("settings", words or "all defaults")]
        show(rows, self.print)
        self.record("start", step, flops_per_token=account.flops_per_token, rows=rows)

    def saved(self, step, folder):
        """A checkpoint is complete. A later --resume=auto that finds none looks for this line of the log."""
        self.saved_at = step
        self.print(f"saved {folder}")
        self.record("saved", step)

    def close(self, step, stopped):
        """The closing summary after `step` steps."""
        seconds, words = time.perf_counter() - self.began, "none: nothing was saved"
        if self.saved_at is not None:
            out_dir, more = shlex.quote(str(self.out_dir)), "" if stopped else "a larger --max_steps and "
            words = f"{out_dir} at step {self.saved_at}; to go on, the same command with {more}--resume=auto"
        done = "stopped" if stopped else "done", f"step {step} after {seconds:,.1f} s"
        show([done, ("checkpoint", words)], self.print)
        if self.wandb:
            self._try_wandb(self.wandb.finish)
            self.wandb = None
        self.record(done[0], step)  # the last line, which a run that was killed lacks

    def step(self, step, lr, loss, norm, began, flags=()):
        """Takes a step that was launched -> the ranks' means of [*flags, seconds] at the step read last."""
        own = [torch.full_like(loss, flag) for flag in (*flags, self.seconds)]
        figures = parallel.sum_over_ranks(torch.stack([loss, norm, *own])) / self.world.size
        self.unread.append((step, lr, began, parallel.Later(figures)))
        while len(self.unread) > self.late:
            self._read(*self.unread.popleft())
        return self.figures

    def catch_up(self):
        """Reads every step that was launched; the time until the next one begins is then nobody's."""
        while self.unread:
            self._read(*self.unread.popleft())
        self.mark = None

    def _read(self, step, lr, began, result):
        loss, norm, *self.figures = result.get()
        self.late = int(self.world.device.type == "cuda" and self.figures[-1] < LONG)
        first, self.seconds = self.seconds == 0, result.moment.since(self.mark or began)
        self.mark = result.moment
        if not first:
            self.average = 0.9 * (self.average or self.seconds) + 0.1 * self.seconds
        self._line(step, lr, loss, norm)
        figures = {"loss": loss} if self.max_skipped is None else {"loss": loss, "gradient norm": norm}
        self._skip_or_refuse(step, {name: x for name, x in figures.items() if not math.isfinite(x)})
        if math.isfinite(loss):
            self._look_for_spike(step, loss)

    def _line(self, step, lr, loss, norm):
        seconds, left, device = self.seconds, self.max_steps - step, self.world.device
        rate = self.batch_tokens / seconds
        mfu = self.account.mfu(rate, self.world.size)
        gib = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None
        values = dict(loss=loss, lr=lr, norm=norm, dt_ms=seconds * 1e3, tok_per_s=rate, mfu=mfu, gib=gib)
        self.record("train", step, **values, tokens=self.origin + step * self.batch_tokens)
        if step % self.log_interval == 0 or left == 0 or self.average is None:  # None: the first step
            eta = "n/a" if left and self.average is None else tqdm.format_interval(left * (self.average or 0))
            self.print(
                f"step {step:>{len(str(self.max_steps))}}/{self.max_steps} | loss {loss:8.4f} | "
                f"lr {lr:.2e} | norm {norm:7.3f} | {seconds * 1e3:8.1f} ms | {rate:>11,.0f} tok/s | "
                f"mfu {'  n/a' if mfu is None else f'{mfu:5.1%}'} | "
                f"{'' if gib is None else f'{gib:5.1f} GiB | '}eta {eta}"
            )

    def _skip_or_refuse(self, step, bad):
        """Counts a step that Training.step skipped for figures {name: value} in `bad`; refuses too many."""
        self.in_a_row = self.in_a_row + 1 if bad else 0
        for name, value in list(bad.items())[:1]:
            if self.in_a_row > (self.max_skipped or 0):
                self.refuse(step, name, value)
            self.skipped += 1
            self.record("skipped", step, in_a_row=self.in_a_row, in_all=self.skipped)
            self.print(f"warning: step {step} was skipped, the {name} is {value}; {self.in_a_row} in a row")

    def refuse(self, step, name, value):
        """Raises NotFinite unless the figure is finite; None passes."""
        if value is not None and not math.isfinite(value):
            last = "yet" if self.saved_at is None else f"since step {self.saved_at}"
            raise NotFinite(f"step {step}: the {name} is {value}; nothing was saved {last}; try a lower --lr")

    def _look_for_spike(self, step, loss):
        """Warns of a loss far above the mean of SETTLED steps before it, at most once in as many."""
        if len(self.recent) == SETTLED:
            mean = statistics.fmean(self.recent)
            z = (loss - mean) / max(statistics.pstdev(self.recent, mean), 1e-6)
            if z > SPIKE:
                self.recent.clear()
                self.record("spike", step, loss=loss, mean=mean, z=z)
                words = f"{z:.1f} sigma above its mean {mean:.4f}; last checkpoint: step {self.saved_at}"
                self.print(f"warning: step {step}: loss {loss:.4f} is {words}")
        self.recent.append(loss)


def progress(iterable, label, total=None, stop=lambda: False, bar=True):
    """Yields the items until stop(). Rank 0 shows a bar; outside a terminal, or with bar=False, rarely."""
    rare = {} if bar and sys.stderr.isatty() else dict(delay=SILENT, mininterval=SILENT)
    for item in tqdm(iterable, label, total, leave=False, disable=not is_rank_0(), **rare):
        if stop():
            break
        yield item
