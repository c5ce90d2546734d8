"""The console and logs of a run: start-up summary, a line a step, log.jsonl, and wandb."""

import collections
import contextlib
import json
import math
import os
import shlex
import statistics
import sys
import textwrap
import threading
import time
from pathlib import Path

import torch
from tqdm import tqdm

import optim
from configurator import UserError, changed, columns, is_rank_0, listed
from run import files, source
from scale import parallel

SILENT = 10  # s until a bar of `progress` that is rarely wanted begins, and between its updates
LONG = 2.0  # s; a step that takes longer is waited for, so that a stop costs no second one
LONG_RUN = 2 * 86_400  # s left; a longer run is warned of
LIFELESS = 10  # steps, after which parameters that are all zero are named
SPIKE, SETTLED = 6.0, 100  # a loss so many sigma above the mean of so many steps is warned of


class NotFinite(UserError):
    exit_code = 5


def device_name(device):
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def describe_device(world):
    return "device", f"{world.size} x {device_name(world.device)}, torch {torch.__version__}"


def show(rows, say=print):
    """Prints rows (name, value), aligned; on a terminal long values go on below themselves."""
    for name, value in rows:
        lines = [str(value)]
        if sys.stdout.isatty():
            width = max(20, columns() - 13)
            lines = textwrap.wrap(lines[0], width, break_long_words=False, break_on_hyphens=False) or [""]
        say(f"{name:<12} {lines[0]}")
        for line in lines[1:]:
            say(f"{'':<12} {line}")


class Logger:
    """Prints and records on rank 0; all ranks make the same calls, since `step` averages over them."""

    def __init__(self, world, cfg, max_skipped):
        """max_skipped: steps in a row that may be skipped; None with fp16, whose scaler skips by itself."""
        self.world, self.cfg, self.log_interval = world, cfg, cfg.log_interval
        self.max_skipped, self.tokens = max_skipped, 0  # tokens: read by all ranks up to the step read last
        self.last = cfg.max_steps  # step of the run; None: the time decides
        self.before, self.begun = 0.0, 0  # seconds and steps that this process found
        self.timed, self.seconds_timed = 0, 0.0  # steps read, without those that compile or capture
        self.untimed = 1  # of the latter that are left
        if cfg.cuda_graph:
            from scale.cuda_graph import EAGER_STEPS

            self.untimed += EAGER_STEPS
        self.began = time.perf_counter()
        self.out_dir = self.file = self.wandb = self.wandb_id = self.saved_at = None
        self.account = self.mark = self.counter = None
        self.warned = False
        self.unread, self.figures = collections.deque(), []
        self.with_step = {}  # {step: what to call when it is read, such as to record more of it}
        self.late = 0  # 1 on CUDA: a step is read when the next one is queued, so that the device has work
        self.seconds, self.average = 0.0, None  # of a step; average: without the first one, which compiles
        self.full, self.skipped, self.in_a_row = False, 0, 0
        self.recent = collections.deque(maxlen=SETTLED)  # losses

    def print(self, *words):
        if self.counter:
            self.counter.stop()
            self.counter = None
        if self.world.main:
            print(*words, flush=True)

    def open(self, out_dir, config, wandb=False, wandb_id=None, saved_at=None):
        """Opens the log in out_dir, and a wandb run. saved_at: the step of the checkpoint resumed there."""
        self.out_dir, self.wandb_id, self.saved_at = Path(out_dir), wandb_id, saved_at
        if self.world.main:
            path = self.out_dir / "log.jsonl"
            with files.writable(out_dir):
                files.write_json(path.with_name("config.json"), config)
                self.file = open(path, "ab", buffering=0, opener=files.no_link)
                # a kill may have cut the last line short: it would spoil the next one
                self.file.truncate(path.read_bytes().rfind(b"\n") + 1)
            self.wandb = self._try_wandb(self._start_wandb, config) if wandb else None
            self.wandb_id = self.wandb.id if self.wandb else wandb_id

    def _start_wandb(self, config):
        import wandb

        names = dict(project="pretrain", name=self.out_dir.resolve().name, dir=self.out_dir)
        names = {key: os.environ.get(f"WANDB_{key.upper()}") or own for key, own in names.items()}
        run = wandb.init(config=config, id=self.wandb_id, resume="allow", **names)
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
            flat = dict(values)
            for key, value in values.items():  # extras, norms
                if isinstance(value, dict):
                    flat |= {f"{key}/{name}": number for name, number in value.items()}
            numbers = {n: x for n, x in flat.items() if isinstance(x, (int, float)) and math.isfinite(x)}
            named = {f"{kind}/{name}": value for name, value in numbers.items()}
            if kind != "start":  # which has no figures of a step
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

    def start(self, state, rows, given, account):
        """The start-up summary, with the command line; log.jsonl has all settings that are no defaults.

        state: a train.State; given: the Config as the user gave it; account: a flops.Account, for the MFU.
        """
        self.account, self.tokens = account, state.tokens
        self.before, self.begun = state.seconds, state.step
        self.last = None if self.cfg.max_seconds else optim.plan(self.cfg, state.step, state.tokens)[0]
        words = " ".join(f"{name}={shlex.quote(str(value))}" for name, value in changed(given).items())
        words = words or "all defaults"
        shown = given.command_line or words
        if self.file:
            shown += " (config.json has all)"
        rows = [describe_device(self.world), *rows]
        show([*rows, ("settings", shown)], self.print)
        rows.append(("settings", words))
        self.record("start", state.step, flops_per_token=account.flops_per_token, rows=rows)

    def saved(self, step, folder):
        """A checkpoint is complete. A later --resume=auto that finds none looks for this line of the log."""
        self.saved_at = step
        self._make_again()
        self.print(f"saved {folder}")
        self.record("saved", step)

    def _make_again(self):
        """Where out_dir was removed or moved under the run: makes it and goes on with another log there."""
        if self.file and not os.path.exists(self.file.name):
            words = f"{self.out_dir} was removed or moved while this run went on; it is made again"
            self.print(f"warning: {words}, without the log, the checkpoints and the lock that it held")
            try:
                self.out_dir.mkdir(parents=True, exist_ok=True)
                self.file = open(self.file.name, "ab", buffering=0, opener=files.no_link)
                source.record(self.out_dir)
            except (OSError, UserError) as error:
                self.print(f"warning: {error}")

    def close(self, step, stopped):
        """The closing summary after `step` steps."""
        self._make_again()
        seconds, words = time.perf_counter() - self.began, "none: nothing was saved"
        length = "max_tokens" if self.cfg.max_tokens else "max_steps"
        length = "max_seconds" if self.cfg.max_seconds else length
        if self.saved_at is not None:
            out_dir, more = shlex.quote(str(self.out_dir)), "" if stopped else f"a larger --{length} and "
            words = f"{out_dir} at step {self.saved_at}; to go on, the same command with {more}--resume=auto"
        done = "stopped" if stopped else "done", f"step {step} after {seconds:,.1f} s"
        rows = [done, ("checkpoint", words)]
        if self.cfg.max_seconds:
            left_out = "compilation, evaluation and saving left out"
            rows.insert(1, ("steps", f"{self.elapsed(step):,.1f} of {self.cfg.max_seconds:g} s, {left_out}"))
        show(rows, self.print)
        if self.wandb:
            self._try_wandb(self.wandb.finish)
            self.wandb = None
        self.record(done[0], step)  # the last line, which a run that was killed lacks

    def elapsed(self, step):
        """Seconds of training steps up to this one, by this rank's clock.

        A step that is not timed, since it compiles or is not read yet, counts as the mean of those that are;
        while there are none, as the mean of those before a resume.
        """
        pace = self.seconds_timed / self.timed if self.timed else self.before / max(1, self.begun)
        return self.before + (step - self.begun) * pace

    def left(self, step):
        """Seconds that the run will take after this step; None: not known yet."""
        if self.last == step:
            return 0
        if self.average is None:
            return None
        if self.last is None:
            return max(0.0, self.cfg.max_seconds - self.elapsed(step))
        return max(0, self.last - step) * self.average

    def step(self, state, lr, means, began):
        """Takes a step that was launched -> the ranks' means of `own` at the step read last, see Figures.

        state: a train.State after the step; means: its figures.Means; began: a parallel.Moment before it.
        """
        if state.step == LIFELESS:
            self._warn_of_zeros(state)
        self.unread.append((state.step, state.tokens, lr, began, means))
        while len(self.unread) > self.late:
            self._read(*self.unread.popleft())
        return self.figures

    def catch_up(self):
        """Reads every step that was launched; the time until the next one begins is then nobody's."""
        while self.unread:
            self._read(*self.unread.popleft())
        self.mark = None

    def _read(self, step, tokens, lr, began, means):
        loss, norm, extras, self.figures = means.get()
        self.late = int(self.world.device.type == "cuda" and self.figures[-1] < LONG)
        first, self.seconds = self.seconds == 0, means.moment.since(self.mark or began)
        self.mark = means.moment
        if self.untimed:
            self.untimed -= 1
        else:
            self.timed += 1
            self.seconds_timed += self.seconds
        if not first:
            self.average = 0.9 * (self.average or self.seconds) + 0.1 * self.seconds
        own, self.tokens = tokens - self.tokens, tokens
        if step in self.with_step:
            self.with_step.pop(step)()
        self._line(step, lr, loss, norm, extras, own)
        self._warn_of_days(step)
        figures = {"loss": loss} if self.max_skipped is None else {"loss": loss, "gradient norm": norm}
        self._skip_or_refuse(step, {name: x for name, x in figures.items() if not math.isfinite(x)})
        if math.isfinite(loss):
            self._look_for_spike(step, loss)

    def _line(self, step, lr, loss, norm, extras, tokens):
        """tokens: of this step."""
        seconds, left, device = self.seconds, self.left(step), self.world.device
        rate = tokens / seconds
        mfu = self.account.mfu(rate, self.world.size)
        gib = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None
        values = dict(loss=loss, lr=lr, norm=norm, dt_ms=seconds * 1e3, tok_per_s=rate, mfu=mfu, gib=gib)
        named = {"extras": extras} if extras else {}
        self.record("train", step, **values, tokens=self.tokens, **named)
        if step % self.log_interval == 0 or left == 0 or self.average is None:  # None: the first step
            eta = "n/a" if left is None else tqdm.format_interval(left)
            last = str(self.last or "")
            parts = {
                "step": f"step {step:>{len(last)}}/{last}" if last else f"step {step:>5}",
                "loss": f"loss {loss:8.4f}",
                "lr": f"lr {lr:.2e}",
                "norm": f"norm {norm:6.3f}",
                "dt_ms": f"{seconds * 1e3:8,.1f} ms",
                "tok_per_s": f"{rate:>9,.0f} tok/s",
                "mfu": "" if mfu is None else f"mfu {mfu:5.1%}",
                "gib": "" if gib is None else f"{gib:5.1f} GiB",
                "eta": f"eta {eta}",
            }
            self.print(fitting(parts, droppable=["lr", "gib", "norm"]))
            if extras:
                self.print("     " + " | ".join(f"{name} {value:.4g}" for name, value in extras.items()))

    def _warn_of_days(self, step):
        """Once, when the second step has shown how long one takes without compilation."""
        left = self.left(step) or 0
        if left > LONG_RUN and not self.warned:
            self.warned = True
            days = f"this run takes about {left / 86_400:.0f} days on this machine"
            self.print(f"warning: {days}; try a smaller --max_steps or recipe, such as config/quickstart.py")

    def _warn_of_zeros(self, state):
        """After some steps: parameters that began at zero and are still there have had no gradient."""
        found = parallel.all_zero(state.model)
        if found:
            why = "they were zero at first and had no gradient; is what they are multiplied with zero too?"
            self.print(f"warning: after {state.step} steps {listed(found)} are all zero: {why}")

    def compiling(self, what):
        """Says that the first step compiles, and on a terminal how long it has taken, until it is read."""
        self.print(f"{'compiling':<12} {what}")
        self.counter = Counter("compiling") if self.world.main and sys.stderr.isatty() else None

    def _skip_or_refuse(self, step, bad):
        """Counts a step that Training.update skipped for figures {name: value} in `bad`; refuses too many."""
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
    """Yields the items until stop(). Rank 0 shows a bar on a terminal; bar=False: after SILENT seconds."""
    rare = {} if bar else dict(delay=SILENT, mininterval=SILENT)
    hidden = not is_rank_0() or not sys.stderr.isatty()
    for item in tqdm(iterable, label, total, leave=False, disable=hidden, **rare):
        if stop():
            break
        yield item


def fitting(parts, droppable):
    """The parts {name: text} in one line; on a narrow terminal without those that are droppable, in turn."""
    shown = {name: text for name, text in parts.items() if text}
    for name in droppable:
        if sys.stdout.isatty() and len(" | ".join(shown.values())) > columns():
            shown.pop(name, None)
    return " | ".join(shown.values())


class Counter:
    """Shows in a line of stderr how many seconds a silent work has taken, until `stop`."""

    def __init__(self, label):
        self.label, self.ended = label, threading.Event()
        self.thread = threading.Thread(target=self.count, daemon=True)
        self.thread.start()

    def count(self):
        began = time.monotonic()
        while not self.ended.wait(1):
            print(f"\r{self.label} ... {time.monotonic() - began:.0f} s", end="", file=sys.stderr, flush=True)
        print("\r" + " " * 40 + "\r", end="", file=sys.stderr, flush=True)

    def stop(self):
        self.ended.set()
        self.thread.join()
