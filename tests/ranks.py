"""Runs scripts and functions over ranks on this machine, without importing torch for each.

    done = ranks.run(2, ["config/test.py", "--max_steps=3"])  # `python train.py WORDS` in two ranks
    done = ranks.run(0, words, script="convert.py")           # one process, no process group
    values = ranks.call(2, function, *arguments)              # [its result in rank 0, in rank 1]

torchrun starts a Python for every rank, which imports torch for 5 to 10 s of CPU time. Here one
server per pytest process imports it once, starts no thread and touches no device; for each run it
forks a child per rank, which leads its own session and ends without Python's shutdown. Tests of
these use `torchrun` below.
"""

import atexit
import contextlib
import faulthandler
import functools
import gc
import importlib
import json
import os
import pickle
import random
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

ROOT, PORTS = Path(__file__).parent.parent, []


@dataclass
class Ran:
    """The end of a run, like subprocess.CompletedProcess, with each rank's code and texts."""

    returncode: int  # 0, or the code of the rank that failed first; negative: killed by that signal
    codes: list  # of each rank
    outputs: list  # each rank's stdout
    errors: list  # each rank's stderr

    @property
    def stdout(self):
        return "".join(self.outputs)

    @property
    def stderr(self):
        return "".join(self.errors)


def run(ranks, words, script="train.py", **limits):
    """`python script words` from the root in each rank (0: one process, no rank) -> Ran.

    limits: as `ask`.
    """
    with tempfile.TemporaryDirectory() as folder:
        return _pool().ask(folder, ranks, script=str(script), words=list(map(str, words)), **limits)


def call(ranks, function, *arguments, **limits):
    """[value of function(*arguments) in each rank], where none may fail.

    The function stands at the top level of a module in tests/ and joins the process group itself.
    """
    done, values = attempt(ranks, function, *arguments, **limits)
    assert done.returncode == 0, f"exit codes {done.codes}\n{done.stdout}\n{done.stderr}"
    return values


def attempt(ranks, function, *arguments, **limits):
    """As `call`, for ranks that may fail -> (Ran, values, None from a rank that did)."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "arguments").write_bytes(pickle.dumps(arguments))
        done = _pool().ask(
            folder, ranks, function=[function.__module__, function.__qualname__], **limits
        )
        files = [Path(folder) / f"value_{rank}" for rank in range(max(ranks, 1))]
        return done, [pickle.loads(file.read_bytes()) if file.exists() else None for file in files]


def torchrun(ranks, words, script="train.py", timeout=300):
    """subprocess.CompletedProcess of a script under torchrun; 0 ranks: as a plain new process."""
    launcher = f"-m torch.distributed.run --nproc_per_node={ranks} --master_port={free_port()}"
    command = [sys.executable, *(launcher.split() if ranks else []), str(script), *words]
    kept = dict(capture_output=True, text=True, timeout=timeout)
    return subprocess.run(command, cwd=ROOT, env=environment(), **kept)


def environment():
    """Variables of a run: one thread a rank, since ranks share the cores; no hub.

    A rank killed by a signal of its own, such as SIGSEGV, prints its stacks.
    """
    own = dict(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TORCHINDUCTOR_COMPILE_THREADS="1")
    return os.environ | own | dict(PYTHONFAULTHANDLER="1")


def free_port():
    """A free port, reserved for this process, at which a rendezvous store can still listen.

    It lies below the range from which the system gives ports to outgoing connections.
    """
    while True:
        port = random.SystemRandom().randrange(10_000, 32_000)
        PORTS.append(kept := socket.socket())
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # beside it a store may listen
        with contextlib.suppress(OSError):
            with socket.socket() as other:
                other.bind(("127.0.0.1", port))  # which fails where another process keeps it
            kept.bind(("127.0.0.1", port))
            return port


# -- the client's end


class _Pool:
    """The server process. One that died or hangs is replaced by the next run."""

    def __init__(self):
        # NVML, since torch.cuda.is_available() would initialise CUDA, which does not survive a fork
        env = environment() | {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.server = subprocess.Popen([sys.executable, __file__], cwd=ROOT, env=env, **pipes)

    def alive(self):
        return self.server.poll() is None

    def ask(self, folder, ranks, timeout=120, grace=20, **what):
        """Sends a request to the server; waits at most `timeout` s for all ranks.

        grace: s that the others have to end after a failure, before they are killed. imports:
        modules that the server is to have imported, as far as they exist.
        """
        request = dict(folder=folder, ranks=ranks, port=free_port(), timeout=timeout, grace=grace)
        request["env"] = environment()
        reply = ""
        with contextlib.suppress(BrokenPipeError):
            self.server.stdin.write(json.dumps(request | what) + "\n")
            self.server.stdin.flush()
            # the first run waits for the server's imports too
            ready = select.select([self.server.stdout], [], [], timeout + grace + 100)[0]
            reply = self.server.stdout.readline() if ready else ""
        if not reply:
            self.close()
            raise RuntimeError(f"the server of ranks died or hung in {what}")
        found = json.loads(reply)
        read = lambda name, rank: (Path(folder) / f"{name}_{rank}").read_text(errors="replace")
        numbers = range(max(ranks, 1))
        texts = [[read(name, rank) for rank in numbers] for name in ("stdout", "stderr")]
        return Ran(found["first"], found["codes"], *texts)

    def close(self):
        self.server.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.server.wait(5)
        self.server.kill()
        self.server.wait()


_running = None


def _pool():
    global _running
    if _running is None or not _running.alive():
        _running = _Pool()
        atexit.register(_running.close)
    return _running


# -- the server's end


def serve():
    """Answers each line of stdin, a request, with a line of stdout: the exit codes of its ranks."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # nothing else may come between the replies
    sys.stdout.reconfigure(line_buffering=True)  # what a killed rank has printed is kept
    sys.path[:0] = [str(ROOT)]  # beside tests/, where this script lies
    names = "torch._dynamo torch._inductor.compile_fx torch.distributed.fsdp train pytest"
    # what a run imports as it is built, and tests do, and what starts no thread
    names += " scale.activation_checkpointing scale.ddp scale.documents scale.fsdp compare"
    for module in names.split():
        importlib.import_module(module)
    sys.modules["run.source"].check()
    sys.modules["run.source"].check = lambda: None  # an edit after this concerns no rank
    # a rank's collections would go through what is imported here, and so copy its memory
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        request = json.loads(line)
        for module in request.get("imports", ()):
            with contextlib.suppress(ImportError):
                importlib.import_module(module)
        begin = forked if alone() else spawned  # with CUDA an import starts a thread
        pids = [begin(rank, request) for rank in range(max(request["ranks"], 1))]
        codes, first = wait_for(pids, request["timeout"], request["grace"])
        replies.write(json.dumps({"codes": codes, "first": first}) + "\n")
        replies.flush()


def alone():
    """Whether this process has one thread, without which no fork is safe."""
    threads = Path("/proc/self/task")
    return not threads.is_dir() or len(list(threads.iterdir())) == 1


def forked(rank, request):
    """The process id of a rank."""
    pid = os.fork()
    if pid == 0:
        be_process(rank, request)
    return pid


def spawned(rank, request):
    """As `forked`, but the rank imports torch again."""
    return os.posix_spawn(
        sys.executable, [sys.executable, __file__, json.dumps([rank, request])], os.environ
    )


def be_process(rank, request):
    code = 1
    try:
        code = be_rank(rank, request)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def wait_for(pids, timeout, grace):
    """(exit codes, the first that is not 0).

    As from torchrun, ranks get SIGTERM once one has failed. Those over the time, or that outlive a
    failed one by `grace` seconds, are killed.
    """
    codes, first, deadline, told_at = {}, 0, time.monotonic() + timeout, None
    while len(codes) < len(pids):
        for pid in (pid for pid in pids if pid not in codes):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                codes[pid] = os.waitstatus_to_exitcode(status)
                kill(pid)  # what it has started and left
                if codes[pid] and not first:
                    first, deadline = codes[pid], min(deadline, time.monotonic() + grace)
                    told_at = time.monotonic() + 1  # torchrun needs 0.1 s
        if told_at and time.monotonic() > told_at:
            told_at = None
            for pid in (pid for pid in pids if pid not in codes):
                os.kill(pid, signal.SIGTERM)
        if time.monotonic() > deadline:
            for pid in (pid for pid in pids if pid not in codes):
                kill(pid)
        time.sleep(0.005)
    return [codes[pid] for pid in pids], first


def kill(pid):
    with contextlib.suppress(ProcessLookupError):  # none of its session is left
        os.killpg(pid, signal.SIGKILL)


def be_rank(rank, request):
    """In the child: runs what is asked and returns the exit code."""
    os.setsid()
    folder = Path(request["folder"])
    for name, number in (("stdout", 1), ("stderr", 2)):
        os.dup2(os.open(folder / f"{name}_{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    faulthandler.dump_traceback_later(request["timeout"] - 1)  # where it hangs, before it is killed
    os.environ.clear()
    os.environ.update(request["env"])
    if request["ranks"]:
        size = str(request["ranks"])
        os.environ |= dict(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=size)
        os.environ |= dict(LOCAL_WORLD_SIZE=size, MASTER_ADDR="127.0.0.1")
        os.environ["MASTER_PORT"] = str(request["port"])
    try:
        try:
            perform(request, folder, rank)
        except Exception:
            sys.modules["system.errors"].explain(*sys.exc_info())
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def perform(request, folder, rank):
    if "function" in request:
        call_asked(request["function"], folder, rank)
    else:
        sys.argv = [request["script"], *request["words"]]
        sys.path.insert(0, str(Path(request["script"]).resolve().parent))
        runpy.run_path(request["script"], run_name="__main__")


def call_asked(name, folder, rank):
    module, path = name
    function = functools.reduce(getattr, path.split("."), importlib.import_module(module))
    value = function(*pickle.loads((folder / "arguments").read_bytes()))
    (folder / f"value_{rank}").write_bytes(pickle.dumps(value))


if __name__ == "__main__":
    if sys.argv[1:]:
        sys.path[:0] = [str(ROOT)]
        be_process(*json.loads(sys.argv[1]))
    serve()
