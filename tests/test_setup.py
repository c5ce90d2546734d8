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


def test_mistakes_are_one_line(checkout):
    done = setup(checkout, "--gpu")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1) and "no such file" in done.stderr
    program(checkout / ".venv/bin/python", "exit 1")
    done = setup(checkout)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1) and "remove .venv" in done.stderr
