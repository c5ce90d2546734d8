"""validate.py, and the standard error of a loss: the scatter over documents drawn at random."""

import re
import shutil

import numpy as np
import pytest
import ranks
import torch
from conftest import kept, save_model, train_here
from test_fineweb import ASYNCIO, refused

import fineweb
import validate
from corpus.loader import DataError, TokenLoader
from model import build
from run.evaluate import figure, in_words
from settings import GPTConfig
from system.errors import UserError


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """Byte shards of a few dozen source files."""
    folder = tmp_path_factory.mktemp("evaluate") / "data"
    settings = dict(tokenizer="bytes", out_dir=str(folder), val_tokens=100_000, shuffle_seed=1)
    fineweb.main(fineweb.Config(dataset=ASYNCIO, **settings))
    return folder


SETTINGS = dict(max_steps=2, eval_interval=2, save_interval=1, eval_tokens=20_000)


@pytest.fixture(scope="module")
def runs(shards, tmp_path_factory):
    """The folder of two runs with a document mask, a and b, and their last figures."""
    folder, last = tmp_path_factory.mktemp("runs"), []
    for name, rate in (("a", 1e-3), ("b", 2e-3)):
        with kept():
            log = train_here(shards, folder / name, lr=rate, document_mask=True, **SETTINGS)
        last += [[line for line in log if line["kind"] == "val"][-1]]
    return folder, *last


def test_the_standard_error_is_the_scatter_of_means_over_other_documents():
    """Documents of varied length; the rows of one are alike, so that they count as one."""
    draw, means, errors = np.random.default_rng(1), [], []
    for _ in range(400):
        documents = np.repeat(np.arange(60), draw.integers(1, 20, 60))
        n = len(documents)
        units = draw.integers(500, 1000, n)
        nats = units * (3 + draw.normal(0, 0.5, 60)[documents] + draw.normal(0, 0.2, n))
        mean, error = figure("loss", nats, units, documents).values()
        assert mean == pytest.approx(nats.sum() / units.sum())
        means, errors = [*means, mean], [*errors, error]
    assert np.mean(errors) == pytest.approx(np.std(means), rel=0.1)
    assert [*figure("loss", nats, units, documents * 0)] == ["loss"]  # of others it tells nothing
    assert in_words({"loss": 1.0, "loss_stderr": np.nan}) == "loss 1.0000"  # nor of a mixture


def test_rows_know_their_documents(shards):
    loader = TokenLoader(shards, "val", 2, 16)
    ids = np.concatenate(loader.folders[0].shards.shards)
    ends = range(1, len(ids), 16)
    expected = [(ids[:end] == loader.eot).sum() for end in ends]
    assert loader.documents(len(ends)).tolist() == expected


def measured(capsys, shards, **settings):
    """What validate.py prints."""
    cfg = validate.Config(**dict(tokens=20_000, device="cpu", precision="fp32") | settings)
    cfg.words = [str(shards)]
    capsys.readouterr()
    validate.main(cfg)
    return capsys.readouterr().out


def test_the_command_line(shards, runs, capsys):
    """It finds the loop's losses, also on two ranks; a difference of models has a smaller error."""
    folder, a, b = runs
    settings = dict(checkpoint=f"{folder}/a", against=f"{folder}/b", batch_size=3)
    alone = measured(capsys, shards, **settings)
    words = [shards, "--device=cpu", "--tokens=20000", "--precision=fp32"]
    words += [f"--{name}={value}" for name, value in settings.items()]
    both = ranks.run(2, words, "validate.py")
    assert both.returncode == 0 and both.outputs == [alone, ""], both.stderr
    figures = [list(map(float, re.findall(r"-?\d\.\d{4}", line))) for line in alone.splitlines()]
    first, second = figures
    expected = [a[name] for name in ("loss", "loss_stderr", "bpb", "bpb_stderr")]
    assert first == pytest.approx(expected, abs=1e-4)
    assert second[0] == pytest.approx(a["loss"] - b["loss"], abs=1e-4) and second[1] < first[1]


def test_a_damaged_newest_checkpoint_gives_way_with_its_document_mask(
    shards, runs, tmp_path, capsys
):
    """Its state.json cannot be read; the mask is that of the checkpoint which is measured."""
    run = shutil.copytree(runs[0] / "a", tmp_path / "run")
    expected = measured(capsys, shards, checkpoint=str(run / "step_00000001"))
    (run / "step_00000002/state.json").write_text("{")
    assert measured(capsys, shards, checkpoint=str(run)) == expected


@pytest.mark.gpt2
def test_shards_of_another_tokenizer_are_refused(shards, tmp_path):
    cfg = GPTConfig(vocab_size=50257, n_layer=1, n_head=1, n_embd=8, block_size=16)
    run = save_model(tmp_path / "run", build(cfg, torch.device("cpu"), 0), cfg)
    cfg = validate.Config(checkpoint=str(run), tokenizer="gpt2", device="cpu")
    refused(UserError, "folders", validate.main, cfg)
    cfg.words = [str(shards)]
    refused(DataError, "the model gpt2", validate.main, cfg)
