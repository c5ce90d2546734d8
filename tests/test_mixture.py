"""mixture.py and the loader: folders by weight, in one order for any ranks, resumed exactly."""

import itertools
import json
import random

import numpy as np
import pytest
import ranks
from compare import same_end
from conftest import (
    flags,
    read_rows,
    stdlib_bytes,
    train_here,
    train_in_rank,
    write_manifest,
    write_shard,
)
from test_fineweb import refused
from test_loader import read_over_ranks

from corpus import mixture
from corpus.loader import DataError, TokenLoader
from corpus.shards import verify
from system.errors import UserError


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """Three folders of byte shards, each of 1,500 to 6,000 tokens and 600 for validation.

    Those 600 are two documents in a and one in the others, whatever Python's own source has there.
    """
    root, tokens = tmp_path_factory.mktemp("three"), stdlib_bytes(14_000)
    for i, (name, n) in enumerate([("a", 6000), ("b", 1500), ("c", 3001)]):
        (root / name).mkdir()
        held_out = np.array(tokens[11_000 + 600 * i :][:600])
        held_out[held_out == 256] = 10
        held_out[300] = 256 if name == "a" else 10
        paths = [write_shard(root / name / "x_val_000000.bin", held_out)]
        paths += [write_shard(root / name / "x_train_000001.bin", tokens[3000 * i :][:n])]
        write_manifest(paths)
    return root


def mix(root, **weights):
    return ",".join(f"{root / name}:{weight}" for name, weight in weights.items())


@pytest.mark.parametrize("number", [1, 2, 7, 30])
def test_every_prefix_has_the_shares_to_within_a_row(number):
    rng = random.Random(number)
    text = ",".join(f"x{i}:{rng.random() + 1e-2:.3f}" for i in range(number))
    weights = np.array([weight for _, weight in mixture.folders(text)])
    counts, period = np.zeros(number, int), weights.sum()
    for n, (folder, before) in enumerate(mixture.turns(weights.tolist()), 1):
        assert before == counts[folder]
        counts[folder] += 1
        assert (np.abs(counts * period - n * weights) < period).all()
    assert (counts == weights).all()


def test_names_and_weights(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("wiki", "wiki:2024"):  # what exists as it is written is the folder
        (tmp_path / name).mkdir()
    for text, expected in {
        "data/a:0.7, data/b:0.3": [("data/a", 7), ("data/b", 3)],
        "a:1e-3,b:1": [("a", 1), ("b", 999)],
        "data/a": [("data/a", 1)],
        "data/a:0.2": [("data/a", 1)],
        "c:/data/a": [("c:/data/a", 1)],
        "wiki:2024": [("wiki:2024", 1)],
        "wiki:2024:1,wiki:3": [("wiki:2024", 1), ("wiki", 3)],
        "wiki:5": [("wiki", 1)],
    }.items():
        assert mixture.folders(text) == expected
    for wrong in ("a,b", "a:1,", "a:0,b:1", "a:1,b:-0.5", "a:1e-6,b:1"):
        refused(UserError, "weight", mixture.folders, wrong)


@pytest.mark.parametrize("order", [{}, {"shuffle_seed": 3}])
def test_rows_are_each_folders_own_in_one_order_for_all_ranks(three, order):
    data_dir, T = mix(three, a=0.5, b=0.3, c=0.2), 16
    alone = {name: TokenLoader(three / name, "train", 1, T, **order) for name in "abc"}
    turns = itertools.cycle("abc"[k] for k, _ in mixture.turns([5, 3, 2]))
    # two epochs of b
    expected = np.concatenate([read_rows(alone[next(turns)], 1) for _ in range(720)])
    for loader in alone.values():
        loader.close()
    for world, B in [(1, 6), (3, 1)]:
        numbers = range(world)
        loaders = [TokenLoader(data_dir, "train", B, T, n, world, **order) for n in numbers]
        assert np.array_equal(read_over_ranks(loaders, 240, T), expected[:240])
        state = json.loads(json.dumps(loaders[-1].state_dict()))
    again = TokenLoader(data_dir, "train", 4, T, **order)
    again.load_state_dict(state)
    assert np.array_equal(read_over_ranks([again], 480, T), expected[240:])
    other = TokenLoader(mix(three, a=0.5, b=0.4, c=0.1), "train", 4, T, **order)
    refused(DataError, r"shares \[5, 4, 1\], not \[5, 3, 2\]", other.load_state_dict, state)


def test_folders_that_do_not_go_together(three, tmp_path):
    manifest = json.loads((three / "b/manifest.json").read_text())
    path = write_shard(tmp_path / "x_train_000001.bin", range(100))
    manifest |= {"tokenizer": "gpt2", "eot": 255, "shards": [{"name": path.name, "sha256": "0"}]}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    both, words = f"{three}/a:1,{tmp_path}:1", f"has the tokenizer gpt2, {three}/a has bytes"
    refused(DataError, words, TokenLoader, both, "train", 4, 16)
    refused(DataError, "x_train_000001.bin is damaged", verify, both)


def test_a_run_shows_shares_and_each_validation_loss_and_is_the_same_over_ranks(three, tmp_path):
    data_dir = mix(three, a=3, b=1)
    settings = dict(eval_interval=2, max_steps=4, save_interval=2, shuffle_seed=1)
    log = train_here(data_dir, tmp_path / "one", **settings)
    for line in (line for line in log if line["kind"] == "val"):
        a, b = (part["loss"] for part in line["folders"].values())
        assert line["loss"] == pytest.approx(0.75 * a + 0.25 * b) and a != b
    settings["max_steps"] = 6
    given = settings | {"resume": tmp_path / "one/step_00000002"}
    words = flags(data_dir, tmp_path / "two", **given)
    assert ranks.call(2, train_in_rank, words) == [(0, "")] * 2
    train_here(data_dir, tmp_path / "whole", **settings)
    same_end(tmp_path / "two", tmp_path / "whole", (3, 4, 5, 6))
