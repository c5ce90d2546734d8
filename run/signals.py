"""Signals, and ranks that fail, die or hang: a run stops after a step, or all its ranks end with one error.

A thread notes signals, looks for ranks that died or hang, and learns of other ranks' errors through the
process group's store: the first error is printed once, and all end with its exit code. Ctrl-C before the
first step is done, which may have to compile for a minute, ends all at once.
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

from errors import UserError, leave, this_rank
from scale import memory, parallel

SIGNALS = signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1
TWICE = 1  # s within which a second signal is the same one, from torchrun and from the scheduler
POLL = 0.5  # s between two looks at the store
PATIENCE = 1.5  # s in which a rank may fail by itself, once another has failed
HANGS = 5  # s after timeout_s, from which on a rank that has not gone on counts as hanging
STORE_GONE = 5  # s without the store after which the run is over: rank 0 or torchrun holds it


class Watch(contextlib.ExitStack):
    """`with Watch(world, timeout_s) as watch`: an ExitStack that tells other ranks of an error.

    asked: the first signal that this process got, else 0. stopping: the one at which all ranks stop, else 0.
    saves: whether what is watched stops by itself after a signal; else that ends it at once.
    """

    def __init__(self, world, timeout_s, saves=True):
        super().__init__()
        self.saves = saves
        self.world, self.timeout_s, self.store = world, timeout_s, parallel.store_connection()
        self.asked, self.stopping, self._asked_at = 0, 0, 0.0
        self._step, self._begun, self._moved = 0, 0, time.monotonic()
        self._peers, self._failing, self._closing = {}, False, threading.Event()

    def __enter__(self):
        if self.store is not None:  # a descriptor of each rank here is readable once its process has ended
            _, _, place, count = this_rank()
            rank, first = self.world.rank, self.world.rank - place
            self.store.set(f"process/{rank}", str(os.getpid()))
            for peer in {*range(first, first + count)} - {rank}:
                with contextlib.suppress(OSError, AttributeError):  # Linux alone has it
                    self._peers[os.pidfd_open(int(self.store.get(f"process/{peer}")))] = peer
        self._pipe = os.pipe()  # gets the number of each signal, also while the main thread waits in C++
        os.set_blocking(self._pipe[1], False)
        self._before = {number: signal.signal(number, lambda *_: None) for number in SIGNALS}
        self._before_wakeup = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        # Only that thread gets signals now. Processes inherit the mask, so Ctrl-C does not kill a compiler.
        self._before_mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        return self

    def __exit__(self, kind, error, trace):
        try:
            super().__exit__(kind, error, trace)
            if isinstance(error, (Exception, SystemExit)) and self.store is not None:
                self._fail(error)
        finally:
            self._closing.set()
            os.write(self._pipe[1], b"\0")
            self._thread.join()
            self._leave_store(wait=error is not None)
            signal.pthread_sigmask(signal.SIG_SETMASK, self._before_mask)
            signal.set_wakeup_fd(self._before_wakeup)
            for number, handler in self._before.items():
                signal.signal(number, handler)
            for descriptor in (*self._pipe, *self._peers):
                os.close(descriptor)

    def begin(self, step):
        """Notes which step begins, for messages."""
        self._step, self._begun, self._moved = step, self._begun + 1, time.monotonic()

    def agreed(self):
        """Sets `stopping` where any rank got a signal; returns it. All ranks call it: a small all-reduce."""
        if self.world.size == 1:  # which need not wait for the device
            self.stopping = self.asked
        elif not self.stopping:
            self._moved = time.monotonic()
            own = torch.tensor([float(self.asked == number) for number in SIGNALS], device=self.world.device)
            found = parallel.sum_over_ranks(own).tolist()
            self.stopping = next((number for number, ranks in zip(SIGNALS, found) if ranks), 0)
        return self.stopping

    def _where(self):
        return f"rank {self.world.rank}, step {self._step}"

    def _fail(self, error):
        """Makes this rank's error known. Raises it if it is a UserError, else ends the process."""
        gloo = r"\[[^]]*/gloo/[^]]*:\d+\] "  # the place in its source: gloo's errors have no type
        lost = isinstance(error, torch.distributed.DistError) or re.match(gloo, str(error))
        self._wait(["failed"], 2 if lost or not self.world.main else 0)  # if another rank tells the cause
        if lost:
            reason = re.sub(rf"^{gloo}|\n.*|\. This is typically .*", "", str(error), flags=re.S)
            error = UserError(f"step {self._step}: lost another rank ({reason}; timeout_s={self.timeout_s})")
            error.exit_code = 1
        self._failing = True  # from here on; until then the thread may still find which rank was lost
        if isinstance(error, SystemExit):
            error = RuntimeError(f"sys.exit({error.code})").with_traceback(error.__traceback__)
        code, text = getattr(error, "exit_code", 1), str(error) or type(error).__name__
        first = self._first(code, text)
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

    def _first(self, code, text):
        """Makes an error that this rank has, or sees, known to all; whether it is the first one."""
        cause = json.dumps({"rank": self.world.rank, "code": code, "text": text})
        with contextlib.suppress(RuntimeError):  # the store is gone: each rank that is left tells
            return self.store.compare_set("failed", "", cause).decode() == cause
        return True

    def _wait(self, keys, seconds):
        """Until the store has the keys; its own wait would print a warning."""
        deadline = time.monotonic() + seconds
        with contextlib.suppress(RuntimeError):
            while not self.store.check(keys) and time.monotonic() < deadline:
                time.sleep(0.05)

    def _leave_store(self, wait):
        """Rank 0, whose process may hold the store, waits at an error until the others have read it."""
        with contextlib.suppress(RuntimeError):
            if self.store is not None:
                self.store.set(f"ended/{self.world.rank}", "")
            if self.store is not None and wait and self.world.main:
                self._wait([f"ended/{rank}" for rank in range(self.world.size)], PATIENCE + 8)

    def _watch(self):
        store_seen, poll = time.monotonic(), select.poll()
        for descriptor in (self._pipe[0], *self._peers):
            poll.register(descriptor, select.POLLIN)
        while not self._closing.is_set():
            ready = [descriptor for descriptor, _ in poll.poll(1000 * POLL)]
            for number in os.read(self._pipe[0], 64) if self._pipe[0] in ready else b"":
                if number in SIGNALS:  # not the byte of __exit__
                    self._signalled(number)
            ended = [descriptor for descriptor in ready if descriptor in self._peers]
            for descriptor in ended:
                poll.unregister(descriptor)  # it stays readable
            try:
                if self.store is not None and not self._failing:
                    self._look(ended)
                store_seen = time.monotonic()
            except RuntimeError as error:  # torch's errors of a store
                if time.monotonic() - store_seen > STORE_GONE and not self._closing.is_set():
                    why = f"the process that holds the ranks' store is gone ({error})".partition("\n")[0]
                    print(f"{self._where()}: {why}", file=sys.stderr, flush=True)
                    leave(1, why, at_once=True)

    def _signalled(self, number):
        if self.asked and time.monotonic() - self._asked_at > TWICE:
            print(f"{self._where()}: a second signal", file=sys.stderr, flush=True)
            leave(128 + number, "a second signal", at_once=True)  # checkpoints are whole or not there
        early = number == signal.SIGINT and self._begun <= 1
        if (early or not self.saves) and not self._failing:
            text = f"stopped at once by {signal.Signals(number).name}"
            if self.saves:
                text += f" in step {self._step}: no step is done that could be saved"
            if self.store is None or self._first(128 + number, text):
                print(text, flush=True)
            self._quit(128 + number, text)
        if self.world.main and not self.asked and not self._failing:
            words = f"{signal.Signals(number).name} in step {self._step}: this run saves and stops"
            print(f"{words}; a second signal ends it at once", flush=True)
        self.asked, self._asked_at = self.asked or number, self._asked_at or time.monotonic()

    def _look(self, ended):
        """Looks for ranks that have failed or died: NCCL does not tell those who wait for one."""
        lost = [rank for rank in map(self._peers.get, ended) if not self.store.check([f"ended/{rank}"])]
        wrong = [f"lost rank {rank}: its process has ended" for rank in lost]
        seconds = time.monotonic() - self._moved
        waits = self.world.size > 1 and self._begun > 1  # the first step may have to compile
        if waits and seconds > self.timeout_s + HANGS:
            wrong.append(f"has not gone on for {seconds:.0f} s (timeout_s={self.timeout_s})")
        for text in (f"{self._where()}: {words}" for words in wrong):
            if self._first(1, text):
                print(f"error: {text}", file=sys.stderr, flush=True)
        for rank in lost:  # rank 0 need not wait for it
            self.store.set(f"ended/{rank}", "")
        if self.store.check(["failed"]) and not self._closing.wait(PATIENCE) and not self._failing:
            self._follow()

    def _follow(self):
        """Ends this rank after another one has failed."""
        cause, seconds = json.loads(self.store.get("failed")), time.monotonic() - self._moved
        if seconds > self.timeout_s / 2:
            print(f"stacks of {self._where()}, for {seconds:.0f} s:", file=sys.stderr, flush=True)
            faulthandler.dump_traceback()
        self._quit(cause["code"], f"after an error of rank {cause['rank']}: {cause['text']}")

    def _quit(self, code, why):
        self._leave_store(wait=True)
        leave(code, why, at_once=True)


@contextlib.contextmanager
def explained(cfg, world):
    """Turns errors of the machine into a UserError that says what to do."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise UserError(memory.advice(cfg, world.size, torch.cuda.mem_get_info(world.device)[1])) from None
    except RecomputationError as error:
        why = str(error).partition("\n")[0].removeprefix("torch.utils.checkpoint: ")
        hint = "a block must compute the same each time it runs on the same input; try --remat=none"
        raise UserError(f"remat={cfg.remat}: {why} {hint}") from None
    except RuntimeError as error:
        if "Sharding propagation failed" in str(error):
            what = f"parallel={cfg.parallel}: an operation does not run on rows of a tensor (DTensor)"
            why = str(error).strip().partition("\n")[0][:200]
            raise UserError(f"{what}, such as an optimizer's ({why}); try --parallel=ddp") from None
        if "mixed torch.Tensor and DTensor" in str(error):
            what = f"parallel={cfg.parallel}: a parameter is used where FSDP2 has not gathered it"
            raise UserError(f"{what}; call the block or the model (docs/experiment.md)") from None
        if inner := getattr(error, "inner_exception", None):  # of torch._dynamo's BackendCompilerFailed
            text = f"{type(inner).__name__}: {inner}".partition("\n")[0]
            raise UserError(f"torch.compile failed ({text}); try --compile=False") from None
        raise
