"""The console and logs of a run: start-up summary, a line a step, log.jsonl, and wandb."""

import collections
import contextlib
import json
import math
import os
import shlex
import shutil
import statistics
import sys
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

import optim
from configurator import changed, columns
from scale import parallel
from system import files
from system.errors import UserError, is_rank_0

SILENT = 10  # s until a bar of `progress` that is rarely wanted begins, and between its updates
LONG = 2.0  # s; a step that takes longer is waited for, so that a stop costs no second one
WIDE = 130  # columns of a terminal that has room for all of a step's figures
SPIKE, SETTLED = 6.0, 100  # a loss so many sigma above the mean of so many steps is warned of


class NotFinite(UserError):
    exit_code = 5


@dataclass
class Launched:
    """A step that was launched. The device may still compute it, so `means.get` waits."""

    step: int
    tokens: int  # read by all ranks up to its end
    lr: float
    began: parallel.Moment  # before it
    means: object  # figures.Means


def device_name(device):
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def describe_device(world):
    return "device", f"{world.size} x {device_name(world.device)}, torch {torch.__version__}"


def show(rows, say=print):
    """Prints rows (name, value), aligned; on a terminal long values go on below themselves."""
    for name, value in rows:
        line = f"{name:<12} {value}"
        if sys.stdout.isatty():
            below = " " * 13
            line = textwrap.fill(line, columns(), subsequent_indent=below, break_on_hyphens=False)
        say(line)


class Logger:
    """Prints and records on rank 0; all ranks make the same calls, as `step` averages over them."""

    def __init__(self, world, cfg, max_skipped):
        """max_skipped: steps in a row that may be skipped; None with fp16, whose scaler skips."""
        self.world, self.cfg, self.max_skipped = world, cfg, max_skipped
        self.began = time.perf_counter()
        self.out_dir = self.file = self.wandb = self.wandb_id = self.saved_at = None
        self.analysis = None  # a flops.ModelAnalysis, for the MFU
        self.lost = False  # whether a full disk has cost lines of the log
        # a step is read late, on CUDA when the next one is queued, so that the device has work
        self.unread = collections.deque()  # of Launched
        self.late = 0  # steps that stay unread
        self.own = {}  # means over the ranks of what they gave to `step`, of the step read last
        self.tokens = 0  # read by all ranks up to that step
        self.mark = None  # the Moment of its end
        # times of steps, in seconds
        self.seconds = 0.0  # of the step read last
        self.steps_before, self.seconds_before = 0, 0.0  # of the run, before this process
        self.steps_timed, self.seconds_timed = 0, 0.0  # without steps that compile or capture
        self.steps_to_compile = 1
        if cfg.cuda_graph:
            from scale.cuda_graph import EAGER_STEPS

            self.steps_to_compile += EAGER_STEPS
        self.last_step = cfg.max_steps  # of the run; None: the time decides
        self.skipped = 0
        self.skipped_in_a_row = 0
        self.recent_losses = collections.deque(maxlen=SETTLED)

    def print(self, *words):
        if self.world.main:
            try:
                print(*words, flush=True)
            except OSError:  # the console is gone, or full: what is only shown ends no run
                sys.stdout = open(os.devnull, "w")

    def warn(self, words):
        self.print(f"warning: {words}")

    def open(self, out_dir, config, wandb=False, wandb_id=None, saved_at=None):
        """Opens the log in out_dir, and a wandb run.

        saved_at: the step of the checkpoint resumed there.
        """
        self.out_dir, self.wandb_id, self.saved_at = Path(out_dir), wandb_id, saved_at
        if not self.world.main:
            return
        path = self.out_dir / "log.jsonl"
        with files.writable(out_dir):
            files.write_json(path.with_name("config.json"), config)
            self.file = open(path, "ab", buffering=0)
            # a kill may have cut the last line short: it would spoil the next one
            self.file.truncate(path.read_bytes().rfind(b"\n") + 1)
        if wandb:
            self._try_wandb(self._start_wandb, config)

    def _start_wandb(self, config):
        import wandb

        self.wandb = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or "pretrain",
            name=os.environ.get("WANDB_NAME") or self.out_dir.resolve().name,
            dir=self.out_dir,
            config=config,
            id=self.wandb_id,
            resume="allow",
        )
        self.wandb_id = self.wandb.id
        # the steps of a run that is resumed go back, which wandb's own may not
        self.wandb.define_metric("*", step_metric="step")

    def _try_wandb(self, call, *arguments):
        """Where wandb fails, for which it has many types of errors, training goes on without it."""
        try:
            call(*arguments)
        except Exception as error:
            self.wandb = None
            reason = str(error).partition("\n")[0] or type(error).__name__
            self.warn(f"wandb is off ({type(error).__name__}: {reason}); log.jsonl goes on")

    def record(self, kind, step, **values):
        """A line of log.jsonl, where inf and NaN are null as in JSON, and in wandb as kind/name."""
        finite = json.loads(json.dumps(values), parse_constant=lambda _: None)
        if self.file:
            self._append(json.dumps({"kind": kind, "step": step, **finite}).encode() + b"\n")
        if self.wandb and kind != "start":  # which has no figures of a step
            figures = {f"{kind}/{name}": value for name, value in finite.items()}
            self._try_wandb(self.wandb.log, {"step": step, **figures})

    def _append(self, line):
        """A whole line or none; a disk that is full costs lines of the log, not the run."""
        end = os.fstat(self.file.fileno()).st_size
        try:
            while line:
                line = line[self.file.write(line) :]
        except OSError as error:
            with contextlib.suppress(OSError):
                self.file.truncate(end)
            if not self.lost:
                words = "training goes on, lines are lost"
                self.warn(f"{self.file.name}: {error.strerror}; {words}")
            self.lost = True

    def start(self, state, rows, given, analysis):
        """Prints and records the start-up summary.

        What is printed has the command line; log.jsonl has all settings that are no defaults.
        state: a train.State; given: the user's Config; analysis: a flops.ModelAnalysis.
        """
        self.analysis, self.tokens = analysis, state.tokens
        self.seconds_before, self.steps_before = state.seconds, state.step
        self.last_step = None
        if not self.cfg.max_seconds:
            self.last_step, _ = optim.length_of_run(self.cfg, state.step, state.tokens)
        pairs = [f"{name}={shlex.quote(str(value))}" for name, value in changed(given).items()]
        settings = " ".join(pairs) or "all defaults"
        shown = given.command_line or settings
        if self.file:
            shown += " (config.json has all)"
        rows = [describe_device(self.world), *rows]
        show([*rows, ("settings", shown)], self.print)
        rows.append(("settings", settings))
        self.record("start", state.step, flops_per_token=analysis.flops_per_token, rows=rows)

    def saved(self, step, folder):
        """A checkpoint is complete.

        A later --resume=auto that finds none looks for this line of the log.
        """
        self.saved_at = step
        self.print(f"saved {folder}")
        self.record("saved", step)

    def close(self, step, stopped):
        """The closing summary after `step` steps."""
        cfg = self.cfg
        kind = "stopped" if stopped else "done"
        rows = [(kind, f"step {step} after {time.perf_counter() - self.began:,.1f} s")]
        if cfg.max_seconds:
            took = f"{self.elapsed(step):,.1f} of {cfg.max_seconds:g} s"
            rows.append(("steps", f"{took}, compilation, evaluation and saving left out"))
        words = "none: nothing was saved"
        if self.saved_at is not None:
            longer = ""
            if not stopped:
                lengths = [name for name in ("max_seconds", "max_tokens") if getattr(cfg, name)]
                longer = f"a larger --{[*lengths, 'max_steps'][0]} and "
            place = f"{shlex.quote(str(self.out_dir))} at step {self.saved_at}"
            words = f"{place}; to go on, the same command with {longer}--resume=auto"
        show([*rows, ("checkpoint", words)], self.print)
        if self.wandb:
            self._try_wandb(self.wandb.finish)
            self.wandb = None
        self.record(kind, step)  # the last line, which a run that was killed lacks

    @property
    def pace(self):
        """Seconds of a step, the mean of those that are timed; None: not known yet.

        While there are none, the mean of those before a resume.
        """
        if self.steps_timed:
            return self.seconds_timed / self.steps_timed
        if self.steps_before:
            return self.seconds_before / self.steps_before
        return None

    def elapsed(self, step):
        """Seconds of training steps up to this one, by this rank's clock.

        A step that is not timed, since it compiles or is not read yet, counts as `pace`.
        """
        return self.seconds_before + (step - self.steps_before) * (self.pace or 0.0)

    def left(self, step):
        """Seconds that the run will take after this step; None: not known yet."""
        if self.last_step == step:
            return 0
        if self.pace is None:
            return None
        if self.last_step is None:
            return max(0.0, self.cfg.max_seconds - self.elapsed(step))
        return max(0, self.last_step - step) * self.pace

    def step(self, state, lr, means, began):
        """Takes a step that was launched, and reads all but the newest `late` of those launched.

        Returns the ranks' means of `own` (see Figures) at the step read last: this one, or on CUDA
        the one before, since the device still computes this one.

        state: a train.State after the step; means: its figures.Means; began: a parallel.Moment
        before it.
        """
        self.unread.append(Launched(state.step, state.tokens, lr, began, means))
        while len(self.unread) > self.late:
            self._read(self.unread.popleft())
        return self.own

    def catch_up(self):
        """Reads every step that was launched.

        The time until the next one begins is then no step's.
        """
        while self.unread:
            self._read(self.unread.popleft())
        self.mark = None

    def _read(self, launched):
        """Waits for a step's end; logs its figures, and only then looks at what is wrong in them.

        So the log has the line of a step that ends the run.
        """
        step = launched.step
        loss, norm, extras, self.own = launched.means.get()
        self.late = 0
        # of a step before; the ranks' mean, so that all do the same
        if self.world.device.type == "cuda" and self.own["seconds a step"] < LONG:
            self.late = 1
        self._time(launched)
        self._log_line(launched, loss, norm, extras)
        if not math.isfinite(loss):
            self._count_skipped_or_refuse(step, "loss", loss)
            return
        self._look_for_spike(step, loss)
        if self.max_skipped is not None and not math.isfinite(norm):
            self._count_skipped_or_refuse(step, "gradient norm", norm)
        else:
            self.skipped_in_a_row = 0

    def _time(self, launched):
        """Takes the time of a step: since the end of the one before, or since its own beginning."""
        end = launched.means.moment
        seconds = end.since(self.mark or launched.began)
        self.mark = end
        self.seconds = seconds
        if launched.step - self.steps_before > self.steps_to_compile:
            self.steps_timed += 1
            self.seconds_timed += seconds

    def _log_line(self, launched, loss, norm, extras):
        """A step's line of log.jsonl, and at an interval of the console."""
        step = launched.step
        seconds = self.seconds
        left = self.left(step)
        device = self.world.device
        rate = (launched.tokens - self.tokens) / seconds
        self.tokens = launched.tokens
        mfu = self.analysis.mfu(rate, self.world.size)
        gib = None
        if device.type == "cuda":
            gib = torch.cuda.max_memory_allocated(device) / 2**30
        values = dict(loss=loss, lr=launched.lr, norm=norm, dt_ms=seconds * 1e3, tok_per_s=rate)
        values |= dict(mfu=mfu, gib=gib)
        if extras:
            values["extras"] = extras
        self.record("train", step, tokens=launched.tokens, **values)
        if step % self.cfg.log_interval and step != self.steps_before + 1 and left != 0:
            return
        wide = not sys.stdout.isatty() or shutil.get_terminal_size().columns >= WIDE
        place = f"{step:>5}"
        if self.last_step:
            place = f"{step:>{len(str(self.last_step))}}/{self.last_step}"
        parts = [f"step {place}", f"loss {loss:8.4f}"]
        if wide:
            parts += [f"lr {launched.lr:.2e}", f"norm {norm:6.3f}"]
        parts += [f"{seconds * 1e3:8,.1f} ms", f"{rate:>9,.0f} tok/s"]
        if mfu is not None:
            parts.append(f"mfu {mfu:5.1%}")
        if gib is not None and wide:
            parts.append(f"{gib:5.1f} GiB")
        parts.append(f"eta {'n/a' if left is None else tqdm.format_interval(left)}")
        self.print(" | ".join(parts))
        if extras:
            words = " | ".join(f"{name} {value:.4g}" for name, value in extras.items())
            self.print(f"     {words}")

    def _count_skipped_or_refuse(self, step, name, value):
        """Counts a step that Training.update skipped because of a figure.

        Too many in a row are refused.
        """
        self.skipped += 1
        self.skipped_in_a_row += 1
        if self.skipped_in_a_row > (self.max_skipped or 0):
            self.refuse(step, name, value)
        self.record("skipped", step, in_a_row=self.skipped_in_a_row, in_all=self.skipped)
        self.warn(
            f"step {step} was skipped, the {name} is {value}; {self.skipped_in_a_row} in a row"
        )

    def refuse(self, step, name, value):
        """Raises NotFinite unless the figure is finite; None passes."""
        if value is not None and not math.isfinite(value):
            last = "yet" if self.saved_at is None else f"since step {self.saved_at}"
            raise NotFinite(
                f"step {step}: the {name} is {value}; nothing was saved {last}; try a lower --lr"
            )

    def _look_for_spike(self, step, loss):
        """Warns of a loss far above the mean of SETTLED steps before it.

        It does so at most once in as many steps.
        """
        if len(self.recent_losses) == SETTLED:
            mean = statistics.fmean(self.recent_losses)
            z = (loss - mean) / max(statistics.pstdev(self.recent_losses, mean), 1e-6)
            if z > SPIKE:
                self.recent_losses.clear()
                self.record("spike", step, loss=loss, mean=mean, z=z)
                saved = "none yet" if self.saved_at is None else f"step {self.saved_at}"
                words = f"{z:.1f} sigma above its mean {mean:.4f}; last checkpoint: {saved}"
                self.warn(f"step {step}: loss {loss:.4f} is {words}")
        self.recent_losses.append(loss)


def progress(iterable, label, total=None, stop=lambda: False, bar=True):
    """Yields the items until stop().

    Rank 0 shows a bar on a terminal; bar=False: only after SILENT seconds.
    """
    rare = {} if bar else dict(delay=SILENT, mininterval=SILENT)
    hidden = not is_rank_0() or not sys.stderr.isatty()
    for item in tqdm(iterable, label, total, leave=False, disable=hidden, **rare):
        if stop():
            break
        yield item
