"""What the scripts of results/ share: processes that end with their parent, and what they need."""

import ctypes
import importlib.util
import signal
import subprocess
import sys

from system.errors import UserError

PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>: the signal that a process gets when its parent ends


def end_with_parent():
    """Linux sends this process SIGTERM when its parent ends, also if that was killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def start(command, **options):
    """subprocess.Popen of a command that does not outlive this program."""
    return subprocess.Popen(command, preexec_fn=end_with_parent, **options)


def last_line(command):
    """(the last line that a command prints, or of its error if it fails; its exit code)."""
    process = start(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    out, error = process.communicate()
    text = error if process.returncode else out
    lines = text.strip().splitlines() or [f"ended with {process.returncode}"]
    return lines[-1], process.returncode


def need_gpu(device, small):
    """Raises UserError where there is no NVIDIA GPU, unless `device` says that a CPU was asked for.

    small: the settings with which the script is worth trying on a CPU.
    """
    import torch  # seconds, which run_list.py does not need

    if device == "cpu" or torch.cuda.is_available():
        return
    raise UserError(f"needs an NVIDIA GPU, and none was found; to try it: --device=cpu {small}")


def need_packages(*names):
    """Raises UserError where one of these modules is not installed."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        packages = " ".join(missing).replace("_", "-")
        raise UserError(f"needs {' and '.join(missing)}: pip install {packages}")
