"""run/norms.py: RMS of weights, gradients and updates against a plain computation; what is logged.

tests/test_parallel.py compares them over ranks, in every mode, with those of one process.
"""

import math
import sys
from types import SimpleNamespace

import pytest
import torch
from compare import GPU, LLAMA, copied, same_norms
from conftest import load_checkpoint, losses, read_log, train_here

import optim
from run import norms
from settings import Config, check
from system.errors import UserError

SPLIT = dict(n_layer=2, n_head=4, n_kv_head=2, n_embd=32, n_hidden=48)
RUNS = {
    "adamw": LLAMA,
    "muon": LLAMA | dict(optimizer="muon", tie_embeddings=False),
    "8 bits": LLAMA | dict(optimizer="adamw8bit", weights="bf16", precision="bf16", n_embd=64),
}


def rms(tensor):
    return math.sqrt(tensor.double().square().mean())


@pytest.mark.parametrize("settings", RUNS.values(), ids=RUNS)
def test_each_matrix_has_its_own(data_dir, tmp_path, monkeypatch, settings):
    """Against checkpoints around the step, and the gradients that the optimizer took."""
    clip, taken = optim.clip_gradients, []

    def clip_and_keep(model, *arguments):
        norm = clip(model, *arguments)
        taken.append({name: p.grad.clone() for name, p in model.named_parameters()})
        return norm

    monkeypatch.setattr(optim, "clip_gradients", clip_and_keep)
    run = dict(max_steps=5, save_interval=1, keep_last=9, norms_interval=3, clip=0.1, lr=0.01)
    log = train_here(data_dir, tmp_path, **SPLIT | settings | run)
    [line] = [line for line in log if line["kind"] == "norms"]
    assert line["step"] == 3
    before, after = (load_checkpoint(tmp_path / f"step_0000000{n}")[0]["model"] for n in (2, 3))
    # in shares of the rows
    sizes = {"qkv": ["q", 2, "k", 1, "v", 1], "gate_up": ["gate", 1, "up", 1]}
    expected = {kind: {} for kind in ("weight", "gradient", "update")}
    for name, weight in before.items():
        if weight.dim() < 2:
            continue
        three = weight, taken[2][name], after[name].double() - weight.double()
        name = name.removesuffix(".weight")
        prefix, _, leaf = name.rpartition(".")
        names, shares = sizes.get(leaf, [None, 1])[::2], sizes.get(leaf, [None, 1])[1::2]
        rows = [share * weight.size(0) // sum(shares) for share in shares]
        for kind, tensor in zip(expected, three):
            for part, own in zip(names, tensor.split(rows)):
                expected[kind][f"{prefix}.{part}" if part else name] = rms(own)
    for kind, values in expected.items():
        assert line[kind] == pytest.approx(values, rel=1e-3 if "weights" not in settings else 5e-3)
        assert len(values) > 14


def test_losses_stay_and_a_resumed_run_measures_the_same_steps(data_dir, tmp_path):
    settings = dict(norms_interval=2, save_interval=3, keep_last=9, max_steps=6)
    whole = train_here(data_dir, tmp_path / "a", **settings)
    assert losses(whole) == losses(train_here(data_dir, tmp_path / "off", max_steps=6))
    log = train_here(data_dir, copied(tmp_path / "a", 3, tmp_path / "b"), resume="auto", **settings)
    assert [line["step"] for line in log if line["kind"] == "norms"] == [4, 6]
    same_norms(tmp_path / "b", tmp_path / "a")


def test_off_it_copies_nothing_and_a_stack_is_one_matrix():
    model = torch.nn.Module()
    model.stack = torch.nn.Parameter(torch.ones(3, 4, 5))
    model.frozen = torch.nn.Parameter(torch.ones(4, 4), requires_grad=False)
    model.vector = torch.nn.Parameter(torch.ones(4))
    assert norms.Norms(model, Config(), None).matrices == {}
    log = SimpleNamespace(
        with_step={}, record=lambda *where, **lines: recorded.append((where, lines))
    )
    found, recorded = norms.Norms(model, Config(norms_interval=2), log), []
    for step in (1, 2):
        with found.around_update(step):  # without a gradient, as of an expert without tokens
            model.stack.data[0] += 1
    assert [*log.with_step] == [2]
    log.with_step[2]()
    [(where, lines)] = recorded
    assert where == ("norms", 2)
    expected = dict(weight=math.sqrt(2), gradient=0.0, update=math.sqrt(1 / 3))
    assert {kind: values["stack"] for kind, values in lines.items()} == pytest.approx(
        expected, rel=1e-3
    )
    assert all(len(values) == 1 for values in lines.values())


def test_a_model_without_trained_matrices_has_none():
    with norms.Norms(torch.nn.LayerNorm(4), Config(norms_interval=1), None).around_update(1):
        pass


def test_a_step_whose_loss_is_not_finite_is_measured(data_dir, tmp_path):
    with pytest.raises(UserError, match="is (nan|inf)"):
        train_here(data_dir, tmp_path, norms_interval=1, lr=1e30, clip=None)
    log = read_log(tmp_path)
    steps = {
        kind: [line["step"] for line in log if line["kind"] == kind] for kind in ("train", "norms")
    }
    assert steps["norms"] == steps["train"] and None in log[-2]["gradient"].values()


def test_in_wandb_by_kind_and_matrix(data_dir, tmp_path, monkeypatch):
    sent = []
    run = SimpleNamespace(
        id="1", log=sent.append, define_metric=lambda *a, **k: None, finish=lambda: None
    )
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **settings: run))
    train_here(data_dir, tmp_path, norms_interval=2, max_steps=2, wandb=True)
    [line] = [line for line in sent if "norms/gradient/wte" in line]
    assert line["step"] == 2 and line["norms/update/blocks.0.attn.q"] > 0


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
def test_in_a_cuda_graph(data_dir, tmp_path):
    settings = dict(device="cuda", precision="fp32", norms_interval=3, max_steps=9)
    for name, graph in (("a", False), ("b", True)):
        train_here(data_dir, tmp_path / name, cuda_graph=graph, **settings)
    same_norms(tmp_path / "a", tmp_path / "b")


def test_an_interval_is_at_least_one():
    with pytest.raises(UserError, match="norms_interval=0 must be at least 1"):
        check(Config(norms_interval=0))
