"""Comparisons of runs find a gradient of the wrong size, and one that ranks do not share."""

import re

import pytest
import ranks
from compare import alike, initial_weights, last_checkpoint
from conftest import flags, train_here, train_in_rank
from test_parallel import SHORT

import optim
from scale import ddp

NAME = "blocks.1.mlp.up.bias"


def scaled(model, limit, factor=None, clip=optim.clip_gradients):
    """clip_gradients that leaves one gradient 1% too large."""
    clip_norm = clip(model, limit, factor)
    model.get_parameter(NAME).grad *= 1.01
    return clip_norm


def test_a_gradient_that_is_one_percent_too_large_is_found(data_dir, tmp_path, monkeypatch):
    """By its moments alone: the weights are those of the right gradient."""
    train_here(data_dir, tmp_path / "one", **SHORT)
    monkeypatch.setattr(optim, "clip_gradients", scaled)
    train_here(data_dir, tmp_path / "other", **SHORT)
    found, expected = (last_checkpoint(tmp_path / name)[0] for name in ("other", "one"))
    start = initial_weights(tmp_path / "one")
    alike(expected, expected, start)
    with pytest.raises(AssertionError, match=re.escape(f"{{'moment of {NAME}': 0.0")) as error:
        alike(found, expected, start)
    assert "," not in str(error.value).partition("{")[2]  # no other tensor


def train_with_one_gradient_apart(words):
    """For ranks.call: DDP leaves each rank its own gradient of one parameter."""
    wrap = ddp.wrap

    def wrap_others(model, *options):
        model._ddp_params_and_buffers_to_ignore = [NAME]
        return wrap(model, *options)

    ddp.wrap = wrap_others  # until this process ends
    return train_in_rank(words)


def test_a_gradient_that_is_not_reduced_is_found(data_dir, tmp_path):
    train_here(data_dir, tmp_path / "one", **SHORT)
    words = flags(data_dir, tmp_path / "other", **SHORT)
    for code, said in ranks.call(2, train_with_one_gradient_apart, words):
        assert code == 4 and "copies differ" in said  # the ranks' copies differ at the first save
