"""The figures of each step: read when the device has computed them, recorded and checked."""

import collections
import math
import time

import torch

from configurator import UserError
from scale import parallel


class NotFinite(UserError):
    exit_code = 5


class Meter:
    """Records launched steps in their order; on CUDA one step late, so that the device always has the next one.

    The ranks agree here, in one all-reduce per step, on mean figures, on whether one of them was told to stop
    (`stopping`), and on whether a background save is written on all of them.
    """

    def __init__(self, log, saver, scaler, world, stop, began):
        """stop: a StopSignal; began: time.perf_counter() of the process's start, for the line after the first step."""
        self.log, self.saver, self.scaler, self.world, self.stop, self.began = log, saver, scaler, world, stop, began
        self.stopping = False
        self._ahead = int(world.device.type == "cuda")  # steps that may be launched and unread
        self._launched, self._mark, self._first = collections.deque(), None, True

    def launching(self):
        """Call before a step is launched: the time of evaluation and saving is not counted as the step's."""
        if not self._launched:
            self._mark = parallel.Moment(self.world.device)

    def launched(self, step, lr, loss, norm):
        """Takes the loss and gradient norm of a step, tensors on the device, and reads the step before."""
        flags = (float(self.stop.asked), self.saver.written())
        figures = torch.stack([loss, norm, *(torch.full_like(loss, flag) for flag in flags)])
        mean = parallel.sum_over_ranks(figures) / self.world.size
        self._launched.append((step, lr, parallel.Later(mean)))
        while len(self._launched) > self._ahead:
            self._record(*self._launched.popleft())

    def catch_up(self):
        """Reads every launched step, so that what follows sees a finished one."""
        while self._launched:
            self._record(*self._launched.popleft())

    def _record(self, step, lr, result):
        loss, norm, stopping, written = result.get()
        seconds, self._mark = result.moment.since(self._mark), result.moment
        if self._first:
            self._first, total = False, time.perf_counter() - self.began
            self.log.print(f"first step done after {total:.1f} s, {seconds:.1f} s of them in the step")
        self.log.step(step, loss, lr, norm, seconds)
        if written == 1:  # the save in the background is written on every rank
            self.saver.wait()
        self.refuse(step, "loss", loss)
        if not self.scaler.is_enabled():  # fp16's scaler skips such steps
            self.refuse(step, "gradient norm", norm)
        self.stopping |= stopping > 0

    def refuse(self, step, name, value):
        """Raises NotFinite unless the figure is finite (None passes), once a save under way has ended."""
        if value is not None and not math.isfinite(value):
            self.saver.wait()
            since = "yet" if self.saver.last is None else f"since step {self.saver.last}"
            raise NotFinite(f"step {step}: the {name} is {value}; nothing was saved {since}; try a lower --lr")
