"""bench.py peers: transformers takes the same steps as ours, and a peer that is missing or fails says so in its row."""

import importlib.util
import itertools
import json
import re
import subprocess
import sys
import types

import pytest
import torch
from conftest import losses, one_line, train_here
from test_bench import here

import optim
import train
from bench import PeersConfig
from configurator import UserError, configure
from measure import ladder, peers
from run import history
from scale import parallel

WORDS = ["--n_layer=2", "--n_head=2", "--n_embd=32", "--block_size=16", "--vocab_size=257", "--batch_size=2"]
WORDS += [
    "--batch_tokens=64",
    "--device=cpu",
    "--compile=False",
    "--precision=fp32",
    "--steps=1",
    "--settle=0",
]
LLAMA = ["--norm=rmsnorm", "--positions=rope", "--mlp=swiglu", "--bias=False", "--tie_embeddings=False"]


@pytest.mark.parametrize("more", [[], LLAMA], ids=["gpt2", "llama"])
def test_both_take_the_same_steps(more):
    """Losses of four updates, two micro-steps each, in float32: equal up to rounding, which AdamW enlarges."""
    same_steps(["--peer=hf", *more], within=1e-3)


def same_steps(words, within):
    """Asserts that four steps of the peer and of this repository have the same losses, the first one to rounding."""
    cfg = configure(PeersConfig, [*WORDS, *words, "--lr=1e-2"])
    world = parallel.start("cpu")
    own, _ = train.choose(cfg, world.device)
    found = []
    for job in (train.Training(own, world), peers.Peer(own, world)):
        next_batch = peers.without_last_targets(peers.random_batches(own, world))
        found.append([job.step(next_batch, cfg.lr)[0].item() for _ in range(4)])
    assert found[0][0] == pytest.approx(found[1][0], abs=1e-5)
    assert found[0] == pytest.approx(found[1], abs=within) and found[0][0] - found[0][3] > 0.1


NANOGPT = """
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F


@dataclass
class GPTConfig:
    block_size: int
    vocab_size: int
    n_layer: int
    n_head: int
    n_embd: int
    dropout: float
    bias: bool


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.heads, wide = c.n_head, 4 * c.n_embd
        self.ln_1, self.ln_2 = nn.LayerNorm(c.n_embd, bias=c.bias), nn.LayerNorm(c.n_embd, bias=c.bias)
        self.attn, self.mlp = nn.Module(), nn.Module()
        self.attn.c_attn = nn.Linear(c.n_embd, 3 * c.n_embd, c.bias)
        self.attn.c_proj = nn.Linear(c.n_embd, c.n_embd, c.bias)
        self.mlp.c_fc, self.mlp.c_proj = nn.Linear(c.n_embd, wide, c.bias), nn.Linear(wide, c.n_embd, c.bias)

    def forward(self, x):
        parts = self.attn.c_attn(self.ln_1(x)).chunk(3, 2)
        q, k, v = (part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attn.c_proj(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp.c_proj(F.gelu(self.mlp.c_fc(self.ln_2(x))))


class GPT(nn.Module):
    def __init__(self, c):
        super().__init__()
        wte, wpe = nn.Embedding(c.vocab_size, c.n_embd), nn.Embedding(c.block_size, c.n_embd)
        blocks, norm = nn.ModuleList(Block(c) for _ in range(c.n_layer)), nn.LayerNorm(c.n_embd, bias=c.bias)
        self.transformer = nn.ModuleDict(dict(wte=wte, wpe=wpe, h=blocks, ln_f=norm))
        self.lm_head = nn.Linear(c.n_embd, c.vocab_size, bias=False)
        wte.weight = self.lm_head.weight

    def forward(self, idx, targets):
        parts = self.transformer
        x = parts.wte(idx) + parts.wpe(torch.arange(idx.size(1), device=idx.device))
        for block in parts.h:
            x = block(x)
        logits = self.lm_head(parts.ln_f(x))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
"""  # a GPT-2 with the names, the arguments and the ignored target of nanoGPT's model.py


@pytest.fixture
def clone(tmp_path):
    (tmp_path / "nanoGPT").mkdir()
    (tmp_path / "nanoGPT/model.py").write_text(NANOGPT)
    return tmp_path / "nanoGPT"


@pytest.mark.parametrize("bias", [True, False])
def test_nanogpt_starts_from_the_same_weights(clone, bias):
    """The vocabulary of 257 ids has no padding here, so that both softmaxes are over the same ids."""
    same_steps(["--peer=nanogpt", f"--clone={clone}", f"--bias={bias}", "--vocab_multiple=1"], within=2e-3)


def test_nanogpt_needs_its_folder_and_gpt2s_shape(clone, capsys):
    for words, reason in [
        (["--peer=nanogpt", "--mlp=relu2"], "its model is GPT-2"),
        (["--peer=nanogpt"], "clone it and give its folder: --clone=FOLDER"),
        (["--peer=nanogpt", f"--clone={clone}", *LLAMA], "its model is GPT-2"),
        (
            ["--peer=nanogpt", f"--clone={clone}/docs"],
            "clone=.*/docs: no model.py there; expected a clone of",
        ),
    ]:
        with pytest.raises(UserError, match=reason):
            here("peers", *WORDS, *words)


def test_curves_on_real_tokens(clone, data_dir, tmp_path, monkeypatch):
    """Each peer's losses, over the tokens of a run of train.py and at its rates, as a log that plot.py reads.

    That run has targets for the last tokens of the rows too, so that its losses are near, not the same.
    """
    set_rate, rates = optim.set_learning_rate, []
    monkeypatch.setattr(
        optim, "set_learning_rate", lambda optimizer, lr: (rates.append(lr), set_rate(optimizer, lr))
    )
    words = [
        "--steps=4",
        "--settle=1",
        "--warmup_steps=2",
        "--max_steps=6",
        "--lr=1e-2",
        "--vocab_multiple=1",
    ]
    words += [f"--curves={tmp_path}/curves"]
    for peer in ("ours", "hf", "nanogpt"):
        here("peers", *WORDS, *words, f"--peer={peer}", f"--clone={clone}", f"--data_dir={data_dir}")
    logs = [history.read(tmp_path / f"curves/{peer}.jsonl") for peer in ("ours", "hf", "nanogpt")]
    ours, theirs, nano = ([log["train"][step]["loss"] for step in range(1, 7)] for log in logs)
    assert ours == pytest.approx(theirs, abs=1e-3) and ours == pytest.approx(nano, abs=2e-3)
    cfg = configure(PeersConfig, [*WORDS, *words])
    assert rates == pytest.approx([optim.learning_rate(step, cfg) for step in range(6)] * 3)
    shape = dict(word.removeprefix("--").split("=") for word in [*WORDS, *words[2:5]] if "settle" not in word)
    del shape["steps"]
    run = losses(train_here(data_dir, tmp_path / "run", **shape))
    assert ours == pytest.approx([run[step] for step in range(1, 7)], abs=0.15)
    assert ours[0] - ours[-1] > 0.05 and history.start_of(logs[0])["step_ms"] > 0


def test_the_last_token_of_a_row_has_no_target():
    pairs = [(torch.zeros(2, 3), torch.full((2, 3), i)) for i in range(3)]
    batches = peers.without_last_targets(itertools.cycle(pairs).__next__)
    for i in [0, 1, 2, 0]:
        assert batches()[1].tolist() == [[i, i, -100]] * 2
    assert pairs[0][1].tolist() == [[0, 0, 0]] * 2  # which a loader may use again


def test_a_peer_alone(tmp_path, capsys):
    here("peers", *WORDS, "--peer=hf", f"--out={tmp_path}/hf.json")
    figures = json.loads((tmp_path / "hf.json").read_text())["figures"]
    assert f"transformers: first loss {figures['loss']:.4f}" in capsys.readouterr().out
    assert figures["tokens_per_s"] == pytest.approx(64 / figures["step_ms"] * 1e3)


@pytest.fixture
def no_liger(monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "liger_kernel" else found(name)
    )


def test_the_table(no_liger, monkeypatch, tmp_path, capsys):
    """A missing package and a failure have a row each; `ours` is how many times as fast this repository is."""
    asked, fails = [], False

    def start(words, _):
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
    assert re.search(
        r"^transformers \+ Liger +not here: not installed: pip install liger-kernel$", said, re.MULTILINE
    )
    rows = json.loads((tmp_path / "peers.json").read_text())["figures"]["peers"]
    assert [row["peer"] for row in rows] == ["ours", "hf", "liger", "nanogpt"] and rows[1][
        "tokens_per_s"
    ] == 200
    assert {"--n_embd=32", "--precision=fp32", "--steps=1"} <= set(asked[0]), (
        "the settings reach each process"
    )
    assert configure(PeersConfig, asked[1][1:-2]) == configure(PeersConfig, WORDS)
    fails = True
    here("peers", *WORDS)
    assert (
        "failed: error" not in (said := capsys.readouterr().out) and said.count("failed: no such model") == 2
    )


def test_a_part_of_a_peer_that_cannot_be_compiled_runs_as_it_is(no_liger, monkeypatch, capsys):
    """Its row has the figures of the other process and says why; a failure of both says the first one's error."""
    again_too = False

    def figures_of(words, _, **variables):
        if "--peer=hf" in words and (variables != {"TORCHDYNAMO_SUPPRESS_ERRORS": "1"} or again_too):
            return {"failed": "InductorError: no"}
        return {"loss": 5.5, "step_ms": 1.0, "tokens_per_s": 100 if "--peer=hf" in words else 300}

    monkeypatch.setattr(ladder, "figures_of", figures_of)
    words = [word for word in WORDS if word != "--compile=False"]
    here("peers", *words)
    said = capsys.readouterr().out
    assert re.search(
        r"transformers +5.5000 .* 3.00x\n +compiled but for .* failed with: InductorError: no\n", said
    )
    again_too = True
    here("peers", *words)
    assert re.search(r"^transformers +failed: InductorError: no$", capsys.readouterr().out, re.MULTILINE)


def test_liger_is_applied_where_it_knows_the_model(monkeypatch):
    """A stand-in for the package: it notes the model, and knows Llama alone."""
    applied = []
    patch = types.SimpleNamespace(MODEL_TYPE_TO_APPLY_LIGER_FN={"llama": None})
    package = types.SimpleNamespace(_apply_liger_kernel_to_instance=lambda model: applied.append(model))
    monkeypatch.setitem(sys.modules, "liger_kernel", types.SimpleNamespace(transformers=package))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", package)
    package.monkey_patch = patch
    cpu = torch.device("cpu")
    model = peers.transformer(configure(PeersConfig, [*WORDS, *LLAMA, "--peer=liger"]), cpu)[0]
    assert applied == [model]
    with pytest.raises(UserError, match="Liger has no kernels for gpt2"):
        peers.transformer(configure(PeersConfig, [*WORDS, "--peer=liger"]), cpu)


@pytest.mark.parametrize(
    "words, message",
    [
        (["--steps=0"], "steps=0 must be at least 1"),
        (["--n_head=3"], "n_embd=32 must be divisible by n_head=3"),
        (
            ["--dropout=0.1", "--optimizer=muon"],
            "without optimizer=muon, dropout=0.1; give --optimizer=adamw --dropout=0.0$",
        ),
        (["--peer=liger"], "not installed: pip install liger-kernel"),
        (["--peer=hf", "--qk_norm=True"], "qk_norm"),
        (["--out=missing/peers.json"], "out=missing/peers.json: there is no folder"),
    ],
)
def test_mistakes_are_one_line(words, message, no_liger):
    with pytest.raises(UserError, match=message) as error:
        here("peers", *WORDS, *words)
    one_line(error)
