"""bench.py peers: transformers takes the same steps as ours, and a peer that is missing or fails says so in its row."""

import importlib.util
import json
import re
import subprocess
import sys
import types

import pytest
import torch
from conftest import one_line
from test_bench import here

import train
from bench import PeersConfig
from configurator import UserError, configure
from measure import ladder, peers, step
from scale import parallel

WORDS = ["--n_layer=2", "--n_head=2", "--n_embd=32", "--block_size=16", "--vocab_size=257", "--batch_size=2"]
WORDS += ["--batch_tokens=64", "--device=cpu", "--compile=False", "--precision=fp32", "--steps=1", "--settle=0"]
LLAMA = ["--norm=rmsnorm", "--positions=rope", "--mlp=swiglu", "--bias=False", "--tie_embeddings=False"]


@pytest.mark.parametrize("more", [[], LLAMA], ids=["gpt2", "llama"])
def test_both_take_the_same_steps(more):
    """Losses of four updates, two micro-steps each, in float32: equal up to rounding, which AdamW enlarges."""
    cfg = configure(PeersConfig, [*WORDS, *more, "--lr=1e-2"])
    world = parallel.start("cpu")
    own, _ = train.choose(cfg, world.device)
    losses = []
    for job in (train.build(own, world), peers.Peer(own, world, liger=False)):
        next_batch = peers.without_last_targets(step.synthetic(own, world, peers.BATCHES))
        losses.append([job.step(next_batch, cfg.lr)[0].item() for _ in range(4)])
    assert losses[0][0] == pytest.approx(losses[1][0], abs=1e-5)
    assert losses[0] == pytest.approx(losses[1], abs=1e-3) and losses[0][0] - losses[0][3] > 0.1


def test_the_last_token_of_a_row_has_no_target():
    pairs = [(torch.zeros(2, 3), torch.full((2, 3), float(i))) for i in range(peers.BATCHES)]
    batches = peers.without_last_targets(iter(pairs).__next__)
    for i in [*range(peers.BATCHES), 0]:
        assert batches()[1].tolist() == [[i, i, -100]] * 2


def test_a_peer_alone(tmp_path, capsys):
    here("peers", *WORDS, "--peer=hf", f"--out={tmp_path}/hf.json")
    figures = json.loads((tmp_path / "hf.json").read_text())["figures"]
    assert f"transformers: first loss {figures['loss']:.4f}" in capsys.readouterr().out
    assert figures["tokens_per_s"] == pytest.approx(64 / figures["step_ms"] * 1e3)


@pytest.fixture
def no_liger(monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "liger_kernel" else found(name))


def test_the_table(no_liger, monkeypatch, tmp_path, capsys):
    """A missing package and a failure have a row each; `ours` is how many times as fast this repository is."""
    asked, fails = [], False

    def start(words):
        asked.append(words)
        if fails:
            return subprocess.CompletedProcess(words, 2, "", "Loading weights\nerror: no such model\n")
        rate = {"--peer=ours": 300, "--peer=hf": 200}[words[-2]]
        figures = {"loss": 5.5, "step_ms": 1e3 / rate, "tokens_per_s": rate, "mfu": 0.25, "peak_gib": None}
        with open(words[-1].removeprefix("--out="), "w") as file:
            json.dump({"figures": figures}, file)
        return subprocess.CompletedProcess(words, 0, "", "")

    monkeypatch.setattr(ladder, "start", start)
    here("peers", *WORDS, f"--out={tmp_path}/peers.json")
    said = capsys.readouterr().out
    assert re.search(r"^transformers +5.5000 +5.0 +200 +25.0% +n/a +1.50x$", said, re.MULTILINE), said
    assert re.search(r"^transformers \+ Liger +not here: not installed: pip install liger-kernel$", said, re.MULTILINE)
    rows = json.loads((tmp_path / "peers.json").read_text())["figures"]["peers"]
    assert [row["peer"] for row in rows] == ["ours", "hf", "liger"] and rows[1]["tokens_per_s"] == 200
    assert {"--n_embd=32", "--precision=fp32", "--steps=1"} <= set(asked[0]), "the settings reach each process"
    assert configure(PeersConfig, asked[1][1:-2]) == configure(PeersConfig, WORDS)
    fails = True
    here("peers", *WORDS)
    assert "failed: error" not in (said := capsys.readouterr().out) and said.count("failed: no such model") == 2


def test_liger_is_applied_where_it_knows_the_model(monkeypatch):
    """A stand-in for the package: it notes the model, and knows Llama alone."""
    applied = []
    patch = types.SimpleNamespace(MODEL_TYPE_TO_APPLY_LIGER_FN={"llama": None})
    package = types.SimpleNamespace(_apply_liger_kernel_to_instance=lambda model: applied.append(model))
    monkeypatch.setitem(sys.modules, "liger_kernel", types.SimpleNamespace(transformers=package))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", package)
    package.monkey_patch = patch
    cpu = torch.device("cpu")
    model = peers.theirs(configure(PeersConfig, [*WORDS, *LLAMA]), cpu, liger=True)
    assert applied == [model]
    with pytest.raises(UserError, match="Liger has no kernels for gpt2"):
        peers.theirs(configure(PeersConfig, WORDS), cpu, liger=True)


@pytest.mark.parametrize(
    "words, message",
    [
        (["--steps=0"], "steps=0 must be at least 1"),
        (["--n_head=3"], "n_embd=32 must be divisible by n_head=3"),
        (["--dropout=0.1", "--optimizer=muon"], "the same step everywhere, without optimizer=muon, dropout=0.1$"),
        (["--peer=liger"], "not installed: pip install liger-kernel"),
        (["--peer=hf", "--qk_norm=True"], "qk_norm"),
        (["--out=missing/peers.json"], "out=missing/peers.json: there is no folder"),
    ],
)
def test_mistakes_are_one_line(words, message, no_liger):
    with pytest.raises(UserError, match=message) as error:
        here("peers", *WORDS, *words)
    one_line(error)
