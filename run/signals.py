"""Signals, and ranks that fail, die or hang: a run stops after a step, or ends with one error.

A thread notes signals, looks for ranks that died or hang, and learns of other ranks' errors through
the process group's store: the first error is printed once, and all end with its exit code. Ctrl-C
before the first step is done, which may have to compile for a minute, ends all at once.
"""

import contextlib
import faulthandler
import json
import os
import re
import select
import signal
import sys
import threading
import time
import traceback

import torch
from torch.utils.checkpoint import CheckpointError as RecomputationError

from scale import memory, parallel
from system.errors import UserError, leave, this_rank

SIGNALS = signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1
TWICE = 1  # s within which a second signal is the same one, from torchrun and from the scheduler
POLL = 0.5  # s between two looks at the store
PATIENCE = 1.5  # s in which a rank may fail by itself, once another has failed
HANGS = 5  # s after timeout_s, from which on a rank that has not gone on counts as hanging
STORE_GONE = 5  # s without the store after which the run is over: rank 0 or torchrun holds it


class Watch(contextlib.ExitStack):
    """`with Watch(world, timeout_s) as watch`: an ExitStack that tells other ranks of an error.

    asked: the first signal that this process got, else 0. stopping: the one at which all ranks
    stop, else 0. saves: whether what is watched stops by itself after a signal; else that ends it
    at once.
    """

    def __init__(self, world, timeout_s, saves=True):
        super().__init__()
        self.world, self.timeout_s, self.saves = world, timeout_s, saves
        self.asked = self.stopping = 0
        self._asked_at = 0.0
        self._step = 0
        self._steps_begun = 0  # by this process
        self._moved_at = time.monotonic()
        self._store = parallel.store_connection()
        self._has_ranks = self._store is not None
        if not self._has_ranks:
            self._store = torch.distributed.HashStore()
        self._peers = {}  # {descriptor of a process on this machine: its rank}
        self._failing = False
        self._closing = threading.Event()
        self._undo = contextlib.ExitStack()

    def __enter__(self):
        # a descriptor of each rank here is readable once its process has ended
        _, _, place, count = this_rank()
        rank, first = self.world.rank, self.world.rank - place
        self._store.set(f"process/{rank}", str(os.getpid()))
        for peer in {*range(first, first + count)} - {rank}:
            with contextlib.suppress(OSError, AttributeError):  # Linux alone has it
                descriptor = os.pidfd_open(int(self._store.get(f"process/{peer}")))
                self._peers[descriptor] = peer
                self._undo.callback(os.close, descriptor)
        # signals' numbers arrive in it, also while the main thread is in C++
        self._pipe, self._pipe_end = os.pipe()
        os.set_blocking(self._pipe_end, False)
        self._undo.callback(os.close, self._pipe)
        self._undo.callback(os.close, self._pipe_end)
        for number in SIGNALS:
            self._undo.callback(signal.signal, number, signal.signal(number, lambda *_: None))
        wakeup = signal.set_wakeup_fd(self._pipe_end, warn_on_full_buffer=False)
        self._undo.callback(signal.set_wakeup_fd, wakeup)
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        # Only that thread gets signals now. Processes inherit the mask: Ctrl-C kills no compiler.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        self._undo.callback(signal.pthread_sigmask, signal.SIG_SETMASK, mask)
        return self

    def __exit__(self, kind, error, trace):
        try:
            super().__exit__(kind, error, trace)
            if self._has_ranks and isinstance(error, (Exception, SystemExit)):
                self._fail(error)
        finally:
            self._closing.set()
            os.write(self._pipe_end, b"\0")
            self._thread.join()
            self._leave_store(wait=error is not None)
            self._undo.close()

    def begin(self, step):
        """Notes which step begins, for messages."""
        self._step = step
        self._steps_begun += 1
        self._moved_at = time.monotonic()

    def agreed(self):
        """Sets `stopping` where any rank got a signal; returns it.

        All ranks call it: a small all-reduce.
        """
        if self.world.size == 1:  # which need not wait for the device
            self.stopping = self.asked
        elif not self.stopping:
            self._moved_at = time.monotonic()
            own = torch.tensor(
                [float(self.asked == number) for number in SIGNALS], device=self.world.device
            )
            for number, ranks in zip(SIGNALS, parallel.sum_over_ranks(own).tolist()):
                if ranks and not self.stopping:
                    self.stopping = number
        return self.stopping

    def _where(self):
        return f"rank {self.world.rank}, step {self._step}"

    def _fail(self, error):
        """Makes this rank's error known. Raises it if it is a UserError, else ends the process."""
        lost = how_lost(error)
        if lost or not self.world.main:
            self._wait(["failed"], 2)  # if another rank tells the cause
        if lost:
            error = UserError(
                f"step {self._step}: lost another rank ({lost}; timeout_s={self.timeout_s})"
            )
            error.exit_code = 1
        # only from here on: until now the thread may still have found which rank was lost
        self._failing = True
        if isinstance(error, SystemExit):
            error = RuntimeError(f"sys.exit({error.code})").with_traceback(error.__traceback__)
        code = getattr(error, "exit_code", 1)
        text = str(error) or type(error).__name__
        first = self._announce(code, text)
        if not first and (lost or not isinstance(error, UserError)):
            self._follow()
        if not isinstance(error, UserError):
            print(f"error: {self._where()}:", file=sys.stderr)
            traceback.print_exception(error)
            self._quit(code, text)
        if first and not self.world.main:
            error.args = (f"rank {self.world.rank}: {error}",)
        error.loud = first
        raise error from None

    def _announce(self, code, text):
        """Makes an error that this rank has, or sees, known to all; whether it is the first one."""
        cause = json.dumps({"rank": self.world.rank, "code": code, "text": text})
        with contextlib.suppress(RuntimeError):  # the store is gone: each rank that is left tells
            return self._store.compare_set("failed", "", cause).decode() == cause
        return True

    def _wait(self, keys, seconds):
        """Until the store has the keys; its own wait would print a warning."""
        deadline = time.monotonic() + seconds
        with contextlib.suppress(RuntimeError):
            while not self._store.check(keys) and time.monotonic() < deadline:
                time.sleep(0.05)

    def _leave_store(self, wait):
        """At an error, rank 0 waits until the other ranks have read it.

        Its process may hold the store.
        """
        with contextlib.suppress(RuntimeError):
            self._store.set(f"ended/{self.world.rank}", "")
            if wait and self.world.main:
                self._wait([f"ended/{rank}" for rank in range(self.world.size)], PATIENCE + 8)

    def _watch(self):
        """The thread: signals and ranks that end wake it, and it looks at the store at times."""
        poll = select.poll()
        for descriptor in (self._pipe, *self._peers):
            poll.register(descriptor, select.POLLIN)
        store_seen_at = time.monotonic()
        while not self._closing.is_set():
            ended = []
            for descriptor, _ in poll.poll(1000 * POLL):
                if descriptor in self._peers:
                    poll.unregister(descriptor)  # it stays readable
                    ended.append(self._peers[descriptor])
                    continue
                for number in os.read(self._pipe, 64):
                    if number in SIGNALS:  # not the byte of __exit__
                        self._on_signal(number)
            try:
                if not self._failing:
                    self._look_for_lost_or_hung(ended)
                store_seen_at = time.monotonic()
            except RuntimeError as error:  # torch's errors of a store
                if time.monotonic() - store_seen_at > STORE_GONE and not self._closing.is_set():
                    reason = str(error).partition("\n")[0]
                    why = f"the process that holds the ranks' store is gone ({reason})"
                    tell(f"{self._where()}: {why}")
                    leave(1, why, at_once=True)

    def _on_signal(self, number):
        if self.asked and time.monotonic() - self._asked_at > TWICE:
            tell(f"{self._where()}: a second signal")
            # at once, which is safe: checkpoints are whole or not there
            leave(128 + number, "a second signal", at_once=True)
        name = signal.Signals(number).name
        nothing_done = number == signal.SIGINT and self._steps_begun <= 1
        if (nothing_done or not self.saves) and not self._failing:
            text = f"stopped at once by {name}"
            if self.saves:
                text += f" in step {self._step}: no step is done that could be saved"
            if self._announce(128 + number, text):
                print(text, flush=True)
            self._quit(128 + number, text)
        if not self.asked:
            self.asked = number
            self._asked_at = time.monotonic()
            if self.world.main and not self._failing:
                words = f"{name} in step {self._step}: this run saves and stops"
                print(f"{words}; a second signal ends it at once", flush=True)

    def _look_for_lost_or_hung(self, ended):
        """Looks for ranks that have failed or died: NCCL does not tell those who wait for one.

        ended: ranks on this machine whose processes have ended.
        """
        lost = [rank for rank in ended if not self._store.check([f"ended/{rank}"])]
        wrong = [f"lost rank {rank}: its process has ended" for rank in lost]
        seconds = time.monotonic() - self._moved_at
        waits = self.world.size > 1 and self._steps_begun > 1  # the first step may have to compile
        if waits and seconds > self.timeout_s + HANGS:
            wrong.append(f"has not gone on for {seconds:.0f} s (timeout_s={self.timeout_s})")
        for words in wrong:
            text = f"{self._where()}: {words}"
            if self._announce(1, text):
                tell(f"error: {text}")
        for rank in lost:  # rank 0 need not wait for it
            self._store.set(f"ended/{rank}", "")
        if self._store.check(["failed"]) and not self._closing.wait(PATIENCE) and not self._failing:
            self._follow()

    def _follow(self):
        """Ends this rank after another one has failed."""
        cause = json.loads(self._store.get("failed"))
        seconds = time.monotonic() - self._moved_at
        if seconds > self.timeout_s / 2:
            tell(f"stacks of {self._where()}, for {seconds:.0f} s:")
            faulthandler.dump_traceback()
        self._quit(cause["code"], f"after an error of rank {cause['rank']}: {cause['text']}")

    def _quit(self, code, why):
        self._leave_store(wait=True)
        leave(code, why, at_once=True)


def tell(words):
    print(words, file=sys.stderr, flush=True)


def how_lost(error):
    """How a collective lost another rank, in words, if that is what the error says; else None."""
    gloo = r"\[[^]]*/gloo/[^]]*:\d+\] "  # the place in its source: gloo's errors have no type
    if isinstance(error, torch.distributed.DistError) or re.match(gloo, str(error)):
        why = re.sub(rf"^{gloo}|\n.*|\. This is typically .*", "", str(error), flags=re.S)
        return why or "no reason"
    return None


@contextlib.contextmanager
def errors_explained(cfg, world):
    """Turns errors of the machine into a UserError that says what to do."""
    try:
        yield
    except torch.OutOfMemoryError:
        _, total = torch.cuda.mem_get_info(world.device)
        raise UserError(memory.advice(cfg, world.size, total)) from None
    except RecomputationError as error:
        why = str(error).partition("\n")[0].removeprefix("torch.utils.checkpoint: ")
        hint = "a block must compute the same each time it runs on the same input; try --remat=none"
        raise UserError(f"remat={cfg.remat}: {why} {hint}") from None
    except RuntimeError as error:
        words = str(error)
        if "Sharding propagation failed" in words:
            what = "an operation does not run on rows of a tensor (DTensor), such as an optimizer's"
            why = words.strip().partition("\n")[0][:200]
            advice = "try --parallel=ddp"
            raise UserError(f"parallel={cfg.parallel}: {what} ({why}); {advice}") from None
        if "mixed torch.Tensor and DTensor" in words:
            what = "a parameter is used where FSDP2 has not gathered it"
            advice = "call the block or the model (docs/experiment.md)"
            raise UserError(f"parallel={cfg.parallel}: {what}; {advice}") from None
        inner = getattr(error, "inner_exception", None)  # of torch._dynamo's BackendCompilerFailed
        if inner:
            text = f"{type(inner).__name__}: {inner}".partition("\n")[0]
            raise UserError(f"torch.compile failed ({text}); try --compile=False") from None
        raise
