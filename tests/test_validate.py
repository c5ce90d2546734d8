"""validate.py, and the standard error of a loss: the scatter over documents drawn at random."""

import re
import sysconfig

import numpy as np
import pytest
import ranks
from conftest import one_line, train_here

import fineweb
import validate
from corpus.loader import TokenLoader
from run.evaluate import figure
from system.errors import UserError


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """Byte shards of a few dozen source files."""
    folder = tmp_path_factory.mktemp("evaluate")
    files = f"{sysconfig.get_path('stdlib')}/asyncio/*.py"
    settings = dict(
        dataset=files, tokenizer="bytes", out_dir=str(folder / "data"), val_tokens=100_000
    )
    fineweb.main(fineweb.Config(**settings, shuffle_seed=1))
    return folder / "data"


def test_the_standard_error_is_the_scatter_of_means_over_other_documents():
    """Documents of varied length; the rows of one are alike, so that they count as one."""
    draw, means, errors = np.random.default_rng(1), [], []
    for _ in range(400):
        lengths = draw.integers(1, 20, 60)
        documents = np.repeat(np.arange(60), lengths)
        units = draw.integers(500, 1000, len(documents))
        nats = units * (
            3 + draw.normal(0, 0.5, 60)[documents] + draw.normal(0, 0.2, len(documents))
        )
        mean, error = figure("loss", nats, units, documents).values()
        assert mean == pytest.approx(nats.sum() / units.sum())
        means, errors = [*means, mean], [*errors, error]
    assert np.mean(errors) == pytest.approx(np.std(means), rel=0.1)
    assert [*figure("loss", nats, units, documents * 0)] == ["loss"]  # of others it tells nothing


def test_rows_know_their_documents(shards):
    loader = TokenLoader(shards, "val", 2, 16)
    ids = np.concatenate(loader.folders[0].shards.shards)
    rows = (len(ids) - 1) // 16
    assert loader.documents(rows).tolist() == [
        (ids[: r * 16 + 1] == loader.eot).sum() for r in range(rows)
    ]


def test_the_command_line(shards, tmp_path):
    """It finds the loop's losses, also on two ranks; a difference of models has a smaller error."""
    settings = dict(max_steps=2, eval_interval=2, save_interval=2, eval_tokens=20_000)
    settings |= dict(document_mask=True)
    logs = [
        train_here(shards, tmp_path / n, lr=rate, **settings)
        for n, rate in (("a", 1e-3), ("b", 2e-3))
    ]
    a, b = ([line for line in log if line["kind"] == "val"][-1] for log in logs)
    words = [str(shards), f"--checkpoint={tmp_path}/a", f"--against={tmp_path}/b", "--device=cpu"]
    words += ["--tokens=20000", "--precision=fp32", "--batch_size=3"]
    alone, both = (ranks.run(n, words, "validate.py") for n in (0, 2))
    assert alone.returncode == both.returncode == 0, alone.stderr + both.stderr
    assert both.outputs[0] == alone.stdout and both.outputs[1] == ""
    first, second = (
        list(map(float, re.findall(r"-?\d\.\d{4}", line))) for line in alone.stdout.splitlines()
    )
    assert first == pytest.approx(
        [a["loss"], a["loss_stderr"], a["bpb"], a["bpb_stderr"]], abs=1e-4
    )
    assert second[0] == pytest.approx(a["loss"] - b["loss"], abs=1e-4) and second[1] < first[1]


def test_a_damaged_newest_checkpoint_gives_way_with_its_document_mask(shards, tmp_path, capsys):
    """Its state.json cannot be read; the mask is that of the checkpoint which is measured."""
    run = tmp_path / "run"
    train_here(shards, run, max_steps=2, save_interval=1, document_mask=True)
    cfg = validate.Config(checkpoint=str(run / "step_00000001"), tokens=20_000, device="cpu")
    cfg.words = [str(shards)]
    capsys.readouterr()
    validate.main(cfg)
    expected = capsys.readouterr().out
    (run / "step_00000002/state.json").write_text("{")
    cfg.checkpoint = str(run)
    validate.main(cfg)
    assert capsys.readouterr().out == expected


@pytest.mark.gpt2
def test_mistakes(shards, tmp_path):
    train_here(shards, tmp_path / "a", max_steps=1, save_interval=1, vocab_size=50257)
    for settings, words, word in [
        ({}, [], "folders"),
        (dict(checkpoint=f"{tmp_path}/a", against="out/missing"), [str(shards)], "out/missing"),
        (dict(checkpoint=f"{tmp_path}/a", tokenizer="gpt2"), [str(shards)], "the model gpt2"),
    ]:
        cfg = validate.Config(**settings, device="cpu")
        cfg.words = words
        with pytest.raises(UserError, match=word) as error:
            validate.main(cfg)
        one_line(error)
