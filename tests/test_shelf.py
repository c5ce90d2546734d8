"""The patches of experiments/ say what they are, and are in the table of its README.

What each computes in which mode is compared in test_experiments.py, which applies it.
"""

import re

import pytest

from experiments import shelf

FILES = sorted(shelf.FOLDER.glob("*.patch"))
HEADER = ("Source: ", "Run: ", "Measured: ", "Modes: ")


def sizes(file):
    """(lines added, lines removed)"""
    diff = file.read_text().partition("diff --git")[2]
    return [len(re.findall(rf"^\{sign}(?!\{sign}{{2}})", diff, re.M)) for sign in "+-"]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_patch_says_what_it_is(file):
    header = file.read_text().partition("diff --git")[0]
    assert all(re.search(f"^{words}", header, re.M) for words in HEADER)
    owns = [own for own in shelf.PATCHES if own.file == file]
    words = " ".join(header.split())
    assert all(refusal in words for own in owns for refusal in own.refused.values())
    assert ("without a KV cache" in words) == (not owns[0].cached)
    assert 0 < sizes(file)[0] <= (120 if file.stem == "speedrun" else 60)


def test_the_table_has_each_patch():
    text = (shelf.FOLDER / "README.md").read_text()
    rows = re.findall(r"^\| \[(\w+)\]\(\1\.patch\) .*\| \+(\d+) -(\d+) \|", text, re.M)
    expected = {(file.stem, *map(str, sizes(file))) for file in FILES}
    assert set(rows) == expected and len(rows) == len(FILES)
    assert {own.file for own in shelf.PATCHES} == set(FILES)
