"""Signals, which stop a run after a step, and errors of PyTorch in words that say what to do."""

import contextlib
import os
import signal
import time

import torch

from scale import memory, parallel
from system.errors import UserError, brief

SIGNALS = signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1
TWICE = 1  # s within which a second signal is the same one, from torchrun and from the scheduler


class Stopped(Exception):
    """The run is to stop: what it does between steps is left."""


class Watch:
    """The first signal asks the run to stop, a second one ends the process.

    asked: the first signal that this process got, else 0. stopping: the one at which all ranks
    stop, else 0.
    """

    def __init__(self, world):
        self.world = world
        self.asked = self.stopping = 0
        self.asked_at = 0.0
        for number in SIGNALS:
            signal.signal(number, self.note)

    def note(self, number, _):
        if self.asked and time.monotonic() - self.asked_at > TWICE:
            os._exit(128 + number)  # which is safe: checkpoints are whole or not there
        if self.asked:
            return
        self.asked = number
        self.asked_at = time.monotonic()
        if self.world.main:
            words = "this run saves and stops; a second signal ends it at once"
            with contextlib.suppress(OSError):  # the terminal was closed
                # not by `print`, which the signal may have interrupted
                os.write(2, f"{signal.Signals(number).name}: {words}\n".encode())

    def agreed(self):
        """Sets `stopping` where any rank got a signal; returns it.

        All ranks call it: a small all-reduce.
        """
        if not self.stopping:
            self.stopping = parallel.max_over_ranks(self.asked, self.world.device)
        return self.stopping

    def check(self):
        """Raises Stopped, on all ranks, where any rank got a signal."""
        if self.agreed():
            raise Stopped


class LostRank(UserError):
    """A collective failed, since another rank has ended or hangs."""

    exit_code = 1
    follows = True


@contextlib.contextmanager
def errors_explained(cfg, world):
    """Turns errors of the machine and of PyTorch into a UserError that says what to do."""
    try:
        yield
    except torch.OutOfMemoryError:
        _, total = torch.cuda.mem_get_info(world.device)
        raise UserError(memory.advice(total)) from None
    except RuntimeError as error:
        # gloo's errors have no type
        if isinstance(error, torch.distributed.DistError) or "/gloo/" in str(error):
            why = f"{brief(error)} (timeout_s={cfg.timeout_s})"
            raise LostRank(f"lost another rank: {why}") from None
        if "finished reduction in the prior iteration" in str(error):
            what = "the loss reached other parameters in the step before"
            raise UserError(f"parallel=ddp: {what}; try --parallel=fsdp") from None
        inner = getattr(error, "inner_exception", None)  # of torch._dynamo's BackendCompilerFailed
        if inner:
            raise UserError(f"torch.compile failed ({brief(inner)}); try --compile=False") from None
        raise
