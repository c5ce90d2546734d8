"""sample.py's command line; test_model.py and test_train.py test the generated tokens."""

import pytest
import torch

import sample
from configurator import UserError
from model import build
from run import checkpoint, source
from settings import GPTConfig


@pytest.fixture
def run(tmp_path):
    cfg = GPTConfig(vocab_size=257, n_layer=1, n_head=2, n_embd=16, block_size=32)
    checkpoint.save_model(tmp_path / "run", build(cfg, torch.device("cpu"), seed=0), cfg)
    return str(tmp_path / "run")


def test_as_many_samples_as_asked_for_each_with_its_prompt(run, capsys):
    cfg = sample.Config(checkpoint=run, tokenizer="bytes", prompt="so", n_samples=3, max_new_tokens=8, device="cpu")
    sample.main(cfg)
    texts = capsys.readouterr().out.split("-" * 80)
    assert len(texts) == 4 and all(text.lstrip("\n").startswith("so") for text in texts[:3])


def test_code_that_has_changed_since_the_run_is_announced(run, capsys, monkeypatch):
    monkeypatch.setattr(source, "warning", lambda folder: f"model.py differs from that of {folder}")
    sample.main(sample.Config(checkpoint=run, tokenizer="bytes", n_samples=1, max_new_tokens=1, device="cpu"))
    assert capsys.readouterr().err == f"warning: model.py differs from that of {run}\n"


@pytest.mark.parametrize(
    "settings, message",
    [
        (dict(top_k=0, n_samples=0), "n_samples=0 must be at least 1; top_k=0 must be at least 1"),
        (
            dict(max_new_tokens=-1, temperature=float("nan")),
            "max_new_tokens=-1 must .*temperature=nan must be at least 0",
        ),
        (dict(seed=2**70), "must be below"),
        (dict(tokenizer="gpt2"), "tokenizer=gpt2 has 50,257 ids, the model 257"),
        (dict(device="cuda:99"), "device=cuda:99"),
    ],
)
def test_mistakes_are_one_line(run, settings, message):
    with pytest.raises(UserError, match=message) as error:
        sample.main(sample.Config(**{"checkpoint": run, "tokenizer": "bytes", "device": "cpu", **settings}))
    assert "\n" not in str(error.value)
