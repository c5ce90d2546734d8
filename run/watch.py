"""A thread that watches over a run: signals, the other ranks, the run's lock, status.json.

The loop and what it calls say what they do next: `mark("save")`, and at points where a run may stop, which all ranks
pass in the same order, `boundary("data")`. Ranks exchange marks, failures and the wish to stop through the process
group's store, not through collectives, so that a rank is heard while the others wait for it in one.

Failures: the first one is printed once, with its rank, and every rank ends with its exit code. Lost ranks: those who
wait for one that died or hangs say which, and where it was. SIGTERM, SIGINT: the ranks agree on a boundary and stop
there; a second signal ends the process at once.
"""

import contextlib
import datetime
import faulthandler
import json
import os
import re
import select
import signal
import socket
import sys
import threading
import time
import traceback

import torch

from configurator import UserError, leave
from run import files
from run.lock import Lock, machine, started
from run.pulse import Pulse
from scale import memory, parallel

SIGNALS = signal.SIGTERM, signal.SIGINT
POLL = 0.5  # seconds between two looks at the store
PATIENCE = 1.5  # seconds in which a rank may fail by itself, once another has failed
ALIVE = 5  # seconds between two writes of status.json
AGREEMENT = 20  # seconds in which the ranks must agree where to stop; torchrun kills them after 30
STEP = "data", "forward and backward"  # phases of a micro-step
TWICE = 1  # a second signal within so many seconds is the same one, from torchrun and from the scheduler

current = None  # the Watch of this process


def mark(phase, step=None):
    """Says what this process does next: for the other ranks, for status.json, for messages."""
    if current:
        current.mark(phase, step)


def boundary(phase):
    """As `mark`, where a run that was told to stop is left. Raises Stopped; all ranks do at the same boundary."""
    if current:
        current.boundary(phase)


def note(**values):
    """Adds values to status.json."""
    if current:
        current.status.update(values)


def item(label, number, total=None, shown=False):
    """Part `number` of `total` of what `label` names begins: see Pulse.item."""
    if current:
        current.pulse.item(label, number, total, shown)


def spoke(step_s=None):
    """A line was printed, or a step is done: see Pulse.spoke."""
    if current:
        current.pulse.spoke(step_s)


class Stopped(Exception):
    """The run was told to stop."""


class Watch:
    """`with Watch(cfg, world) as watch`: watches until the block is left, and explains the error that leaves it.

    stopping: the signal because of which the ranks have agreed to stop, or None. lock: the Lock on cfg.out_dir.
    """

    def __init__(self, cfg, world):
        self.cfg, self.world, self.store = cfg, world, parallel.store_connection()
        self.lock, self.status = (
            Lock(cfg.out_dir),
            {"state": "running", "step": 0, "max_steps": cfg.max_steps},
        )
        self.writes = world.main and not cfg.dry_run
        self.asked = self.stopping = None  # signals
        self.pulse = Pulse()
        self.step, self.phase, self.marks, self.boundaries = 0, "start", 0, 0
        self._frozen, self._agreed, self._mutex = None, None, threading.Lock()
        self._agreed_boundary = threading.Event()
        self._seen, self._news, self._beats, self._failing, self._closing = {}, 0, 0, False, threading.Event()
        self._told, self._status_at, self._lost_since, self._looked = None, 0, None, 0
        self._neighbours = (
            None  # {other rank of this machine: (process id, its start)}, once all have told theirs
        )
        self._lost = 0  # of them, those whose process ended without a word
        self._parent = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None

    def __enter__(self):
        global current
        current = self
        self._wakeup = (
            socket.socketpair()
        )  # gets the number of each signal, while the main thread waits in C++ too
        for end in self._wakeup:
            end.setblocking(False)
        self._before = {number: signal.signal(number, self._ask) for number in SIGNALS}
        self._before_wakeup = signal.set_wakeup_fd(self._wakeup[1].fileno(), warn_on_full_buffer=False)
        if self.store is not None:
            process = [machine(), os.getpid(), started(os.getpid())]
            self.store.set(f"process/{self.world.rank}", json.dumps(process))
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        # The thread takes the signals from here on. Processes started from here inherit the mask: Ctrl-C, torchrun and
        # systemd tell whole process groups, and a compiler that died of it would look like one that failed.
        self._before_mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            if self.writes and os.path.isdir(self.cfg.out_dir):  # else there is nothing to protect yet
                self.lock.take()
        except UserError as error:
            self.__exit__(UserError, error, None)
        return self

    def __exit__(self, kind, error, _):
        global current
        try:
            if isinstance(error, Exception):
                self.status.update(state="failed")
                self._fail(error)
        finally:
            self._closing.set()
            self._wakeup[1].send(b"\0")
            self._thread.join()
            self._leave_store()
            self._write_status()
            self.lock.release()
            current = None
            signal.pthread_sigmask(signal.SIG_SETMASK, self._before_mask)
            signal.set_wakeup_fd(self._before_wakeup)
            for number, handler in self._before.items():
                signal.signal(number, handler)
            for end in self._wakeup:
                end.close()

    # -- the main thread

    def mark(self, phase, step=None):
        self.phase, self.step = phase, self.step if step is None else step
        self.marks += 1
        if phase not in (self.pulse.label, *STEP):
            self.pulse.clear()

    def boundary(self, phase):
        self.mark(phase)
        if self.stopping:
            return
        with self._mutex:
            stop = self.asked if self.store is None else self._frozen
            self.boundaries += not stop
        if stop and self.store is not None:
            self._agreed_boundary.wait()  # the watching threads agree within seconds, whatever the main threads do
            stop = self.boundaries >= self._agreed
            self.boundaries += not stop
        if stop:
            self.stopping = self.asked
            raise Stopped

    @contextlib.contextmanager
    def stoppable(self, loader=None, tensors=()):
        """Leaves the block at a boundary where the run is to stop. What it changed then stands as before: the data's
        position, the random numbers, and `tensors`, all of one dtype and device.
        """
        device, kept = self.world.device, tensors and torch.cat([t.flatten() for t in tensors])
        rows, random = loader and loader.rows, torch.get_rng_state()
        on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        try:
            yield
        except Stopped:
            torch.set_rng_state(random)
            if on_device is not None:
                torch.cuda.set_rng_state(on_device, device)
            if loader:
                loader.rows = rows
            if tensors:
                for t, before in zip(tensors, kept.split([t.numel() for t in tensors])):
                    t.copy_(before.view_as(t))

    def _leave_store(self):
        """Rank 0, whose process may hold the store, waits until the other ranks need it no more."""
        if self.store is not None:
            with contextlib.suppress(RuntimeError):
                self.store.set(f"ended/{self.world.rank}", "")
                self.store.add("left", 1)
                if self.world.main:
                    self._wait(
                        lambda: self.store.add("left", 0) >= self.world.size - self._lost, PATIENCE + 1
                    )

    def _fail(self, error):
        """Makes this rank's error known. Raises it, as a UserError where it has an explanation, or ends the process."""
        error = explain(error, self.cfg, self.world) or error
        self._failing = True
        self._leave_orphan()
        if self.store is None:
            raise error from None
        if not isinstance(error, UserError) and parallel.lost_connection(error) and not self._cause(wait=2):
            reason = re.sub(
                r"^\[.*?\] |\. This is typically .*", "", first_line(error)
            )  # of a long text of gloo's
            error = UserError(f"{self.where()}: lost {self._silent_ranks() or 'another rank'} ({reason})")
            error.exit_code = 1
        code, text, loud = getattr(error, "exit_code", 1), str(error) or type(error).__name__, True
        with contextlib.suppress(RuntimeError):  # the store is gone: each rank that is left speaks for itself
            stacks = "all" if "imed out" in text else None
            mine = {"rank": self.world.rank, "code": code, "text": text, "stacks": stacks}
            first = json.loads(self.store.compare_set("cause", "", json.dumps(mine)))
            self.store.add("news", 1)
            if (
                parallel.lost_connection(error) and first["rank"] != self.world.rank
            ):  # the consequence of another error
                code, text, loud = first["code"], f"rank {first['rank']} failed: {first['text']}", False
            else:
                loud = self._speaks()
        if not isinstance(error, UserError):
            if loud:
                print(f"error: rank {self.world.rank}, {self.where()}:", file=sys.stderr)
                traceback.print_exception(error)
            self._quit(code, text)
        if loud and not self.world.main:
            error.args = (f"rank {self.world.rank}: {error}",)
        error.loud = loud
        raise error from None

    def _speaks(self):
        """Whether this rank prints its error: the others are silent where rank 0 has one too."""
        if self.world.main:
            self.store.set("failed", "0")
        elif self._wait(lambda: self.store.check(["failed"]), 1):
            return False
        return self.store.compare_set("speaker", "", str(self.world.rank)).decode() == str(self.world.rank)

    def _wait(self, condition, seconds):
        deadline = time.monotonic() + seconds
        while not (found := condition()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return found

    def _cause(self, wait=0):
        """What the first rank to fail has said: its rank, exit code and text; None if none has."""
        with contextlib.suppress(RuntimeError):
            if self._wait(lambda: self.store.check(["cause"]), wait):
                return json.loads(self.store.get("cause"))

    def where(self):
        return f"step {self.step} ({self.phase})"

    # -- the watching thread

    def _ask(self, number, _):
        self.asked = self.asked or number

    def _watch(self):
        while not self._closing.is_set():
            self._leave_orphan()
            if self.store is not None:
                try:
                    self._look()
                    self._lost_since = None
                except RuntimeError as error:  # torch's errors of a store
                    self._lost_since = self._lost_since or time.monotonic()
                    if time.monotonic() - self._lost_since > 5 and not self._closing.is_set():
                        self._end(1, f"the process that holds the ranks' store is gone ({first_line(error)})")
            if self.world.main and (line := self.pulse.line(self.where())):
                print(line, flush=True)
            if time.monotonic() - self._status_at > ALIVE:
                self.lock.renew()
                self._write_status()
            if select.select([self._wakeup[0]], [], [], POLL)[0]:
                for number in self._wakeup[0].recv(64):
                    self._signalled(number)

    def _signalled(self, number):
        """The first signal asks to stop, a second one ends the process: a checkpoint is whole or not there."""
        if number in self._before:
            self.asked = self.asked or number
            if self._told and time.monotonic() - self._told > TWICE:
                self._end(128 + number, "a second signal")
            if not self._told:
                self._told = time.monotonic()
                self._announce()

    def _leave_orphan(self):
        if self._parent and os.getppid() != self._parent:
            self._end(1, "torchrun is gone")

    def _announce(self):
        if self.world.main:
            name = signal.Signals(self.asked).name
            print(
                f"{name} in {self.where()}: this run saves and stops; a second signal ends it at once",
                flush=True,
            )

    def _look(self):
        """Reads from the store what the other ranks have to say, and tells them of this one."""
        store, rank, size = self.store, self.world.rank, self.world.size
        self._beats += 1
        store.set(f"at/{rank}", json.dumps([self.marks, self.where(), self._beats]))
        if self.asked and not self._frozen:
            store.compare_set("stop", "", str(self.asked))
            store.add("news", 1)
        if (news := store.add("news", 0)) != self._news:
            self._news = news
            if store.check(["stop"]) and not self._frozen:
                self._freeze(int(store.get("stop")))
            if not self._failing and (cause := self._cause()):
                self._follow(cause)
        if self._frozen and self._agreed is None:
            keys = [f"stop/{rank}" for rank in range(size)]
            if store.check(keys):
                self._agreed = max(map(int, store.multi_get(keys)))
                self._agreed_boundary.set()
            elif time.monotonic() - self._frozen_at > AGREEMENT:
                self._end(128 + self.asked, "the ranks could not agree where to stop; nothing was saved")
        self._look_for_lost()
        self._look_for_hang()

    def _freeze(self, number):
        with self._mutex:
            self.asked, self._frozen, self._frozen_at = number, number, time.monotonic()
            self.store.set(f"stop/{self.world.rank}", str(self.boundaries))
        if not self._told:
            self._announce()

    def _follow(self, cause):
        """Ends this rank after another one has failed, unless it fails by itself in the meantime."""
        if cause.get("stacks") in (self.world.rank, "all"):
            print(f"stacks of rank {self.world.rank}, in {self.where()}:", file=sys.stderr, flush=True)
            faulthandler.dump_traceback()
        if not self._closing.wait(PATIENCE) and not self._failing:
            self._quit(cause["code"], f"rank {cause['rank']} failed: {cause['text']}")
        while not self._closing.wait(POLL):  # the main thread has the word
            pass

    def _look_for_hang(self):
        """Ranks at different marks wait for each other, which the one that is furthest behind may do for too long.

        As long as all ranks are at the same mark, such as a long compilation, nobody hangs as far as one can tell here;
        then the process group's own timeout counts.
        """
        limit, now, rank = 0.9 * self.cfg.timeout_s, time.monotonic(), self.world.rank
        if self._seen.get(rank, (None,))[0] != self.marks:
            self._seen = {rank: (self.marks, now)}
        elif now - self._seen[rank][1] > limit / 2 and now - self._looked > limit / 20:
            self._looked, others = now, self._others()
            for other, (marks, *_) in others.items():
                if self._seen.get(other, (None,))[0] != marks:
                    self._seen[other] = marks, now
            slowest = min(self._seen, key=lambda other: self._seen[other][0])
            marks, since = self._seen[slowest]
            if (
                slowest != rank
                and marks < self.marks
                and now - since > limit / 2
                and now - self._seen[rank][1] > limit
            ):
                text = f"rank {slowest} hangs in {others[slowest][1]}; rank {rank} has waited for it for "
                text += (
                    f"{now - self._seen[rank][1]:.0f} s in {self.where()} (timeout_s={self.cfg.timeout_s})"
                )
                self._accuse(slowest, text, stacks=slowest)

    def _look_for_lost(self):
        """Finds ranks of this machine whose process ended without a word. NCCL does not tell those who wait for it."""
        if self._neighbours is None:
            keys = [f"process/{rank}" for rank in range(self.world.size)]
            if not self.store.check(keys):
                return
            own, told = machine(), enumerate(map(json.loads, self.store.multi_get(keys)))
            self._neighbours = {
                r: process for r, (where, *process) in told if where == own and r != self.world.rank
            }
        gone = [other for other, (pid, since) in self._neighbours.items() if started(pid) != since]
        if started(os.getpid()) is None:  # /proc cannot be read now, as with too many open files
            return
        for other in gone:
            del self._neighbours[other]
            if not self.store.check([f"ended/{other}"]):
                self._lost += 1
                last = f", last in {known[other][1]}" if other in (known := self._others()) else ""
                self._accuse(other, f"{self.where()}: lost rank {other}{last} (its process has ended)")

    def _accuse(self, other, text, stacks=None):
        """Makes the fault of another rank known, for which that rank does not speak, unless a fault is known."""
        cause = json.dumps({"rank": other, "code": 1, "text": text, "stacks": stacks})
        if json.loads(self.store.compare_set("cause", "", cause))["text"] == text:
            print(f"error: {text}", file=sys.stderr, flush=True)
        self.store.add("news", 1)

    def _others(self):
        """{rank: [marks, where, beats]} as last told."""
        keys = {rank: f"at/{rank}" for rank in range(self.world.size) if rank != self.world.rank}
        known = {rank: key for rank, key in keys.items() if self.store.check([key])}
        return {rank: json.loads(self.store.get(key)) for rank, key in known.items()}

    def _silent_ranks(self):
        """Which ranks have ended without a word, and where they were, in words."""
        with contextlib.suppress(RuntimeError):
            before = self._others()
            time.sleep(3 * POLL)
            after = self._others()
            dead = [f"rank {r}, last in {after[r][1]}" for r in before if before[r][2] == after[r][2]]
            return ", ".join(dead[:3]) + f" and {len(dead) - 3} more" * (len(dead) > 3)

    def _end(self, code, why):
        print(f"rank {self.world.rank}, {self.where()}: {why}", file=sys.stderr, flush=True)
        self.store = None  # nobody is to be waited for
        self._quit(code, why)

    def _quit(self, code, why):
        self.status.update(state="failed")
        self._write_status()
        self.lock.release()
        self._leave_store()
        leave(code, why, at_once=True)

    def _write_status(self):
        """status.json, whole at any time; a disk that is full costs this file only."""
        self._status_at = time.monotonic()
        if self.lock.held:
            now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
            found = dict(
                self.status, phase=self.phase, alive_at=now, host=socket.gethostname(), pid=os.getpid()
            )
            with contextlib.suppress(OSError):
                files.write_json(self.lock.path.with_name("status.json"), files.finite(found))


def explain(error, cfg, world):
    """A UserError that says what to do about an error of the machine, or None."""
    if isinstance(error, torch.OutOfMemoryError):
        budget = torch.cuda.mem_get_info(world.device)[1]
        return UserError(memory.advice(cfg, world.size, budget))
    if "does not have a deterministic implementation" in str(error):
        name = first_line(error).partition(" does not have")[0]
        return UserError(
            f"deterministic=True: {name} has no deterministic form; replace it, or --deterministic=False"
        )
    if isinstance(error, torch._dynamo.exc.BackendCompilerFailed):
        inner = error.inner_exception
        reason = f"{type(inner).__name__}: {first_line(inner)}"
        return UserError(f"torch.compile failed ({reason}); try --compile=False, or mend the compiler")
    return None


def first_line(error):
    return str(error).partition("\n")[0] or type(error).__name__
