"""The console and logs of a run: start-up summary, a line a step, log.jsonl, and wandb."""

import collections
import contextlib
import copy
import json
import math
import os
import secrets
import shlex
import shutil
import statistics
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch
from tqdm import tqdm

import optim
from configurator import changed
from corpus import as_user_error
from scale.cuda_graph import EAGER_STEPS
from system import files
from system.errors import UserError, is_rank_0

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
    """Prints and records on rank 0; all ranks make the same calls, as `step` averages over them."""

    def __init__(self, world, cfg):
        self.world, self.cfg = world, cfg
        self.began = time.perf_counter()
        self.file = self.wandb = self.saved_at = None
        # a step is read late, on CUDA when the next one is queued, so that the device has work
        self.unread = None  # what `step` was given of one that the device may still compute
        self.late = 0  # steps that stay unread: 0 or 1
        self.own = {}  # means over the ranks of what they gave to `step`, of the step read last
        self.tokens = 0  # read by all ranks up to that step
        self.seconds = 0.0  # that it took
        self.mark = None  # the Moment of its end
        self.steps_before, self.seconds_before = 0, 0.0  # of the run, before this process
        self.steps_timed = 0  # without those that compile or capture
        self.mean_seconds = 0.0  # of these steps; before them of those before a resume
        self.steps_to_compile = EAGER_STEPS + 1 if cfg.cuda_graph else 1
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

    def open(self, saved_at):
        """Opens the log in out_dir, and a wandb run.

        saved_at: the step of the checkpoint resumed there.
        """
        self.saved_at = saved_at
        if not self.world.main:
            return
        out_dir = Path(self.cfg.out_dir)
        files.write_json(out_dir / "config.json", asdict(self.cfg))
        path = out_dir / "log.jsonl"
        self.file = open(path, "a", buffering=1)  # writes line by line
        # a kill may have cut the last line short: it would spoil the next one
        self.file.truncate(path.read_bytes().rfind(b"\n") + 1)
        if self.cfg.wandb:
            import wandb

            name = os.environ.get("WANDB_NAME", out_dir.resolve().name)
            with as_user_error("wandb=True"):
                kept = out_dir / "wandb_id"  # with which a resumed run goes on
                if self.saved_at is None or not kept.exists():
                    kept.write_text(secrets.token_hex(4))
                same = dict(id=kept.read_text(), resume="allow")
                self.wandb = wandb.init(name=name, dir=out_dir, config=asdict(self.cfg), **same)
            # the steps of a run that is resumed go back, which wandb's own may not
            self.wandb.define_metric("*", step_metric="step")

    def record(self, kind, step, **values):
        """A line of log.jsonl, where inf and NaN are null as in JSON, and in wandb as kind/name."""
        finite = json.loads(json.dumps(values, default=float), parse_constant=lambda _: None)
        if self.file:
            with files.writable(self.cfg.out_dir):
                self.file.write(json.dumps({"kind": kind, "step": step, **finite}) + "\n")
        if self.wandb and kind != "start":  # which has no figures of a step
            figures = {f"{kind}/{name}": value for name, value in finite.items()}
            try:
                self.wandb.log({"step": step, **figures})
            except Exception as error:  # of one of many types; training goes on
                self.wandb = None
                self.warn(f"wandb is off ({error!r}); log.jsonl goes on")

    def start(self, training, rows, given):
        """Prints and records the start-up summary, with the settings that are no defaults.

        training: a train.Training; given: the user's Config.
        """
        state = training.state
        self.training, self.tokens = training, state.tokens
        self.seconds_before, self.steps_before = state.seconds, state.step
        self.mean_seconds = state.seconds / max(1, state.step)
        pairs = [f"{name}={shlex.quote(str(value))}" for name, value in changed(given).items()]
        settings = " ".join(pairs) or "all defaults"
        rows = [describe_device(self.world), *rows, ("settings", settings)]
        show(rows, self.print)
        flops = training.analysis.flops_per_token
        self.record("start", state.step, flops_per_token=flops, rows=rows)

    def saved(self, step, folder):
        """A checkpoint is complete.

        A later --resume=auto that finds none looks for this line of the log.
        """
        self.saved_at = step
        self.print(f"saved {folder}")
        self.record("saved", step)

    def close(self, step, stopped):
        """The closing summary after `step` steps."""
        kind = "stopped" if stopped else "done"
        kept = "none: nothing was saved"
        more = "" if stopped else " and raise the limit of steps, tokens or seconds"
        if self.saved_at is not None:
            kept = f"{self.cfg.out_dir} at step {self.saved_at}; to go on, add --resume=auto{more}"
        took = f"step {step} after {time.perf_counter() - self.began:,.1f} s"
        show([(kind, took), ("checkpoint", kept)], self.print)
        self.record(kind, step)  # the last line, which a run that was killed lacks
        if self.wandb:
            with contextlib.suppress(Exception):
                self.wandb.finish()

    def elapsed(self, step):
        """Seconds of training steps up to this one, by this rank's clock.

        A step that is not timed, since it compiles or is not read yet, counts as the mean.
        """
        return self.seconds_before + (step - self.steps_before) * self.mean_seconds

    def step(self, state, lr, later, began):
        """Takes a step that was launched, and reads all but the newest `late` of those launched.

        Returns the ranks' means of `own` (see Figures) at the step read last: this one, or on CUDA
        the one before, since the device still computes this one.

        state: a train.State after the step; later: from Figures.over_ranks; began: a
        parallel.Moment before it.
        """
        self._read()
        self.unread = copy.copy(state), lr, later, began
        if not self.late:
            self._read()
        return self.own

    def catch_up(self):
        """Reads the last step, if it is not read; the time until the next one is then no step's."""
        self._read()
        self.mark = None

    def _read(self):
        """Waits for the end of a step that is unread, takes its time, logs it, and then judges it.

        So the log has the line of a step that ends the run.
        """
        if self.unread is None:
            return
        state, lr, later, began = self.unread
        self.unread = None
        loss, norm, extras, self.own = self.training.figures.means(later)
        self.late = 0
        # of a step before; the ranks' mean, so that all do the same
        if self.world.device.type == "cuda" and self.own["seconds a step"] < LONG:
            self.late = 1
        # since the end of the one before, or since its own beginning
        self.seconds = later.moment.since(self.mark or began)
        self.mark = later.moment
        if state.step - self.steps_before > self.steps_to_compile:
            self.steps_timed += 1
            self.mean_seconds += (self.seconds - self.mean_seconds) / self.steps_timed
        state.seconds = self.elapsed(state.step)
        self._log_line(state, lr, loss, norm, extras)
        self._judge(state.step, loss, norm)

    def _log_line(self, state, lr, loss, norm, extras):
        """A step's line of log.jsonl, and at an interval of the console."""
        step = state.step
        rate = (state.tokens - self.tokens) / self.seconds
        self.tokens = state.tokens
        ms = self.seconds * 1e3
        mfu = self.training.analysis.mfu(rate, self.world.size)
        gib = torch.cuda.max_memory_allocated() / 2**30  # 0 on a CPU
        values = dict(loss=loss, lr=lr, norm=norm, dt_ms=ms, tok_per_s=rate, mfu=mfu, gib=gib)
        self.record("train", step, tokens=self.tokens, **values, extras=extras)
        share = optim.share_done(state, self.cfg)  # of the run
        if step % self.cfg.log_interval and step != self.steps_before + 1 and share < 1:
            return
        eta = "n/a"
        if state.seconds:
            eta = tqdm.format_interval(state.seconds / share - state.seconds)
        shown = "     n/a" if loss is None else f"{loss:8.4f}"
        line = f"step {step:>6} {share:4.0%} | loss {shown} | {ms:8,.1f} ms"
        line += f" | {rate:>9,.0f} tok/s"
        if mfu is not None:
            line += f" | mfu {mfu:5.1%}"
        line += f" | eta {eta} | lr {lr:.2e} | norm {norm:6.3f}"
        if gib:
            line += f" | {gib:5.1f} GiB"
        for name, value in extras.items():
            line += f" | {name} {value:.4g}"
        while sys.stdout.isatty() and len(line) > shutil.get_terminal_size().columns:
            line, _, _ = line.rpartition(" | ")
        self.print(line)

    def _judge(self, step, loss, norm):
        """Warns of a step that was skipped, or of a spike; ends the run where that is too much."""
        if loss is None:
            what = "no token of its rows is a target, the weights move by momentum and decay alone"
            self.warn(f"step {step}: {what}")
            return
        fp16 = self.cfg.precision == "fp16"  # whose scaler skips steps by their norm
        if math.isfinite(loss) and (fp16 or math.isfinite(norm)):
            self.skipped_in_a_row = 0
            self._look_for_spike(step, loss)
            return
        figures = f"loss {loss}, gradient norm {norm}"
        self.skipped_in_a_row += 1
        if fp16 or self.skipped_in_a_row > self.cfg.max_skipped_steps:
            self.refuse(step, figures)
        self.record("skipped", step, in_a_row=self.skipped_in_a_row)
        self.warn(f"step {step} was skipped: {figures}; {self.skipped_in_a_row} in a row")

    def refuse(self, step, figures):
        """Raises NotFinite, which says what may be known of the cause."""
        advice = "try a lower --lr, or --attention=flash; experiments/norms.patch shows norms"
        what = f"{figures}; last saved step: {self.saved_at}"
        raise NotFinite(f"step {step}: {what}; {advice} before it")

    def _look_for_spike(self, step, loss):
        """Warns of a loss far above the mean of SETTLED steps before it.

        It does so at most once in as many steps.
        """
        recent = self.recent_losses
        if len(recent) == SETTLED:
            mean = statistics.fmean(recent)
            z = (loss - mean) / max(statistics.pstdev(recent, mean), 1e-6)
            if z > SPIKE:
                recent.clear()
                self.record("spike", step, loss=loss, mean=mean, z=z)
                saved = f"last saved step: {self.saved_at}"
                self.warn(f"step {step}: loss {loss:.4f} is {z:.1f} sigma above its mean; {saved}")
        recent.append(loss)


def progress(iterable, label, total=None):
    """The items, which rank 0 counts in a bar on a terminal."""
    hidden = None if is_rank_0() else True  # None: where stderr is no terminal
    return tqdm(iterable, label, total, leave=False, disable=hidden)
