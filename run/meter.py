"""The figures of each step: read when the device has computed them, recorded and checked."""

import collections
import math
import time

import torch

from configurator import UserError
from run import watch
from scale import parallel

SPIKE, SETTLED = (
    6.0,
    100,
)  # a loss so many standard deviations above its mean is warned about, after so many steps


class NotFinite(UserError):
    exit_code = 5


class Meter:
    """Records launched steps in their order; on CUDA one step late, so that the device always has the next one.

    The ranks agree here, in one all-reduce per step, on mean figures, and on whether a background save is written on
    all of them.
    """

    def __init__(self, log, saver, scaler, world, max_skipped, began):
        """began: time.perf_counter() of the process's start, for the line after the first step."""
        self.log, self.saver, self.scaler, self.world, self.began = log, saver, scaler, world, began
        self.max_skipped, self.skipped, self.in_a_row = max_skipped, 0, 0
        self.trend = None  # running mean and variance of the loss, and the number of steps in them
        self.warned = 0  # step of the last warning of a spike
        self._ahead = int(world.device.type == "cuda")  # steps that may be launched and unread
        self._launched, self._mark, self._first = collections.deque(), None, True

    def launching(self, step):
        """Call before a step is launched: the time of evaluation and saving is not counted as the step's."""
        watch.mark("data", step)
        if not self._launched:
            self._mark = parallel.Moment(self.world.device)

    def launched(self, step, lr, loss, norm):
        """Takes the loss and gradient norm of a step, tensors on the device, and reads the step before."""
        watch.mark("reduce")
        figures = torch.stack([loss, norm, torch.full_like(loss, self.saver.written())])
        mean = parallel.sum_over_ranks(figures) / self.world.size
        self._launched.append((step, lr, parallel.Later(mean)))
        while len(self._launched) > self._ahead:
            self._record(*self._launched.popleft())

    def catch_up(self):
        """Reads every launched step, so that what follows sees a finished one."""
        while self._launched:
            self._record(*self._launched.popleft())

    def _record(self, step, lr, result):
        loss, norm, written = result.get()
        seconds, self._mark = result.moment.since(self._mark), result.moment
        if self._first:
            self._first, total = False, time.perf_counter() - self.began
            self.log.print(f"first step done after {total:.1f} s, {seconds:.1f} s of them in the step")
        self.log.step(step, loss, lr, norm, seconds)
        if written == 1:  # the save in the background is written on every rank
            self.saver.wait()
        if self.scaler.is_enabled():  # fp16's scaler skips a step by itself
            self.refuse(step, "loss", loss)
        else:
            self._skip_or_refuse(step, {"loss": loss, "gradient norm": norm})
        if math.isfinite(loss):
            self._look_for_spike(step, loss)

    def _skip_or_refuse(self, step, figures):
        """Counts a step that was skipped (Training.step), since a figure is not finite; stops after too many."""
        bad = [name for name, value in figures.items() if not math.isfinite(value)]
        self.in_a_row = self.in_a_row + 1 if bad else 0
        if self.in_a_row > self.max_skipped:
            self.refuse(step, bad[0], figures[bad[0]])
        elif bad:
            self.skipped += 1
            self.log.record("skipped", step, in_a_row=self.in_a_row, in_all=self.skipped)
            counts = f"{self.in_a_row} in a row, {self.skipped} since the start"
            self.log.print(f"warning: step {step} was skipped, the {bad[0]} is {figures[bad[0]]}; {counts}")

    def _look_for_spike(self, step, loss):
        """Warns of a loss far above its running mean, at most once in SETTLED steps."""
        mean, variance, count = self.trend or (loss, 0.0, 0)
        z = (loss - mean) / max(variance**0.5, 1e-6)
        if count >= SETTLED and z > SPIKE and step - self.warned >= SETTLED:
            self.warned = step
            good = (
                "no checkpoint before it"
                if self.saver.last is None
                else f"last checkpoint: step {self.saver.last}"
            )
            self.log.record("spike", step, loss=loss, mean=mean, z=z)
            self.log.print(
                f"warning: step {step}: loss {loss:.4f} is {z:.1f} sigma above its mean {mean:.4f}; {good}"
            )
        rate = max(0.02, 1 / (count + 1))
        self.trend = (
            mean + rate * (loss - mean),
            (1 - rate) * (variance + rate * (loss - mean) ** 2),
            count + 1,
        )

    def refuse(self, step, name, value):
        """Raises NotFinite unless the figure is finite (None passes), once a save under way has ended."""
        if value is not None and not math.isfinite(value):
            self.saver.wait()
            since = "yet" if self.saver.last is None else f"since step {self.saver.last}"
            raise NotFinite(
                f"step {step}: the {name} is {value}; nothing was saved {since}; try a lower --lr"
            )
