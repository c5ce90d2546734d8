"""Comparisons of runs find a gradient of the wrong size, and one that ranks do not share."""

import re

import pytest
import ranks
import torch
from compare import alike, initial_weights, last_checkpoint
from conftest import flags, train_here, train_in_rank
from test_parallel import MUON, ROUGHER, SHORT

import optim
from scale import ddp

NAME = "blocks.1.mlp.up.bias"


def scaled(model, limit, factor=None, clip=optim.clip_gradients):
    """clip_gradients that leaves one gradient 1% too large."""
    clip_norm = clip(model, limit, factor)
    model.get_parameter(NAME).grad *= 1.01
    return clip_norm


@pytest.mark.parametrize("shape, bounds", [({}, {}), (MUON, ROUGHER)], ids=["adamw", "muon"])
def test_a_gradient_that_is_one_percent_too_large_is_found(
    data_dir, tmp_path, monkeypatch, shape, bounds
):
    """By its moments alone: the weights are those of the right gradient."""
    train_here(data_dir, tmp_path / "one", **SHORT, **shape)
    monkeypatch.setattr(optim, "clip_gradients", scaled)
    train_here(data_dir, tmp_path / "other", **SHORT, **shape)
    found, expected = (last_checkpoint(tmp_path / name)[0] for name in ("other", "one"))
    start = initial_weights(tmp_path / "one")
    alike(expected, expected, start)
    with pytest.raises(AssertionError, match=re.escape(f"{{'moment of {NAME}': 0.0")) as error:
        alike(found, expected, start, **bounds)
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


def checkpoints(**changes):
    """(found, expected, start): checkpoints of three weights that move, stay or follow rounding."""
    start = {"w": torch.ones(9), "frozen": torch.ones(9), "noise": torch.ones(9)}
    moments = {
        "w": torch.full((9,), 1e-3),
        "frozen": torch.zeros(9),
        "noise": torch.full((9,), 3e-12),
    }
    moments = {f"0/states/{name}/exp_avg": moment for name, moment in moments.items()}
    expected = {
        "model": start | {"w": start["w"] - 0.01, "noise": start["noise"] - 0.01},
        "optimizer": moments,
    }
    found = {
        group: {name: t + changes.get(name, 0) for name, t in expected[group].items()}
        for group in expected
    }
    return found, expected, start


def test_weights_whose_moments_are_rounding_are_not_compared():
    alike(*checkpoints(**{"noise": 0.02, "0/states/noise/exp_avg": -5e-12}))
