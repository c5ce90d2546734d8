"""The patches of experiments/ apply, say what they are, and are in the table of its README.

What each computes in which mode is compared in test_experiments.py, from
tests/experiments/shelf.py.
"""

import re
import shutil
import subprocess

import pytest
from conftest import ROOT

from experiments import patch, shelf

FILES = sorted(shelf.FOLDER.glob("*.patch"))
HEADER = ("Source: ", "Run: ", "Measured: ", "Modes: ")
named = pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)


def touched(file):
    """The names of the files that a patch changes."""
    return re.findall(r"^\+\+\+ b/(.*)$", file.read_text(), re.M)


def sizes(file):
    """(lines added, lines removed)"""
    lines = file.read_text().partition("diff --git")[2].splitlines()
    return tuple(
        sum(line.startswith(sign) and line[:3] != 3 * sign for line in lines) for sign in "+-"
    )


@pytest.mark.skipif(not shutil.which("git"), reason="needs git")
@named
def test_a_patch_applies(file, tmp_path):
    """To the sources, or, where somebody is editing them, to those of the last commit."""
    now, last = tmp_path / "now", tmp_path / "last"
    for name in touched(file):
        (now / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, now / name)
    try:
        patch.apply_file(file, now)
        return
    except patch.MissingAnchor as error:
        why = str(error)
    for name in touched(file):
        show = subprocess.run(
            ["git", "show", f"HEAD:./{name}"], cwd=ROOT, capture_output=True, text=True
        )
        assert show.returncode == 0, why
        (last / name).parent.mkdir(parents=True, exist_ok=True)
        (last / name).write_text(show.stdout)
    try:
        patch.apply_file(file, last)
    except patch.MissingAnchor:
        pytest.fail(f"{why}; see experiments/README.md, 'When the sources change'")


@named
def test_a_patch_says_what_it_is(file):
    header = file.read_text().partition("diff --git")[0]
    assert all(re.search(f"^{words}", header, re.M) for words in HEADER)
    assert header[0].isupper() and max(map(len, header.splitlines())) <= 110
    owns = [own for own in shelf.PATCHES if own.file == file]
    words = " ".join(header.split())
    for refusal in {refusal for own in owns for refusal in own.refused.values()}:
        assert refusal in words, f"the header does not have the refusal {refusal!r}"
    assert ("without a KV cache" in words) == (not owns[0].cached)
    added, _ = sizes(file)
    assert 0 < added <= 60


def test_the_table_has_each_patch():
    rows = re.findall(
        r"^\| \[(\w+)\]\((\w+)\.patch\) .*\| \+(\d+) -(\d+) \|",
        (shelf.FOLDER / "README.md").read_text(),
        re.M,
    )
    expected = {(file.stem, file.stem, *map(str, sizes(file))) for file in FILES}
    assert set(rows) == expected and len(rows) == len(FILES)
    assert {own.file for own in shelf.PATCHES} == set(FILES)
