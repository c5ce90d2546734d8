"""setup.sh: what it takes of an existing .venv, and what it types where something is missing."""

import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
from conftest import ROOT


@pytest.fixture
def checkout(tmp_path):
    """A folder with setup.sh, one requirement, and a .venv whose python is this one."""
    folder = tmp_path / "a checkout"
    folder.mkdir()
    shutil.copy(ROOT / "setup.sh", folder)
    (folder / "requirements.txt").write_text(
        f"# what it needs\nnumpy=={np.__version__}  # arrays\n"
    )
    program(folder / ".venv/bin/python", f'exec "{sys.executable}" "$@"')
    return folder


def program(path, line):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)


def setup(folder, *words):
    env = os.environ | {"PATH": f"{folder}/tools:{os.environ['PATH']}"}
    return subprocess.run([folder / "setup.sh", *words], capture_output=True, text=True, env=env)


def test_a_filled_venv_is_taken_as_it_is(checkout):
    done = setup(checkout)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere PyTorch has no build with CUDA")
def test_uv_fills_a_venv_without_pip_and_the_cpu_build_is_asked_for(checkout):
    # -S: no packages, no pip
    program(checkout / ".venv/bin/python", f'exec "{sys.executable}" -S "$@"')
    program(checkout / "tools/uv", 'echo "uv $*"')
    (checkout / "requirements.txt").write_text("torch==2.0  # GPUs\n")
    (checkout / "more.txt").write_text('triton>=3; sys_platform == "linux"\n')
    install = "uv pip install --quiet --python .venv/bin/python -r requirements.txt"
    if shutil.which("nvidia-smi") is None and not os.path.exists("/proc/driver/nvidia"):
        assert "5 GB; for its CPU build: ./setup.sh --cpu\n" in setup(checkout).stdout
    done = setup(checkout, "--cpu", "more.txt")
    assert done.returncode == 0 and "CUDA" not in done.stdout
    assert (
        done.stdout.splitlines()[-1] == f"{install} -r more.txt torch==2.0+cpu --torch-backend cpu"
    )
    assert "has a space" in done.stderr


def test_mistakes_are_one_line(checkout):
    done = setup(checkout, "--gpu")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1) and "no such file" in done.stderr
    program(checkout / ".venv/bin/python", "exit 1")
    done = setup(checkout)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1) and "remove .venv" in done.stderr
