"""run/hf.py: settings taken from Hugging Face weights, and the tokenizer's files of an export."""

import dataclasses
import fnmatch
import itertools
import json
import shutil
import textwrap

import numpy as np
import pytest
import torch
from conftest import ROOT, save_model
from test_convert import edit_config, gpt2, llama, refused, saved
from transformers import AutoModelForCausalLM, AutoTokenizer

import convert
import sample
import train
from configurator import configure
from corpus import tokenizer
from model import build
from run import hf
from settings import Config, GPTConfig
from system.files import digest

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


def settings(*words):
    return configure(Config, list(words), complete=hf.adopt)


@pytest.fixture
def weights(tmp_path):
    """A Llama of 96 tokens' context with the bytes tokenizer, a chat template and two end ids."""
    theirs = llama(vocab_size=257, max_position_embeddings=96, tie_word_embeddings=True)
    folder = saved(theirs, tmp_path / "weights")
    special = dict(eos_token={"__type": "AddedToken", "content": "<|endoftext|>"})
    special["tokenizer_class"] = "PreTrainedTokenizerFast"
    generation = dict(bos_token_id=1, eos_token_id=[10], max_length=70)
    for name, content in {
        "tokenizer.json": tokenizer.load("bytes").to_json(),
        "tokenizer_config.json": json.dumps(special),
        "chat_template.jinja": TEMPLATE,
        "generation_config.json": json.dumps(generation),
    }.items():
        (folder / name).write_text(content)
    return folder


@pytest.fixture
def byte_data(data_dir, tmp_path):
    """The byte shards with the files that tell their tokenizer."""
    folder = shutil.copytree(data_dir, tmp_path / "data")
    name_tokenizer(folder, "bytes", tokenizer.load("bytes").token_bytes())
    return folder


def name_tokenizer(folder, name, sizes):
    np.save(folder / "token_bytes.npy", sizes)
    manifest = dict(tokenizer=name, vocab_size=257, eot=256)
    manifest["token_bytes_sha256"] = digest(folder / "token_bytes.npy")[1]
    (folder / "manifest.json").write_text(json.dumps(manifest))


def test_shape_rope_and_tokenizer_are_the_weights(weights):
    cfg = settings(f"--init_from=hf:{weights}", "--dropout=0.1")
    assert not hf.read_config(weights).differences(cfg)
    shape = (cfg.n_embd, cfg.n_hidden, cfg.kv_heads, cfg.norm, cfg.tie_embeddings, cfg.dropout)
    assert shape == (64, 88, 2, "rmsnorm", True, 0.1)
    assert cfg.block_size == 96 and cfg.tokenizer == str(weights)
    longer = settings(f"--init_from=hf:{weights}", "--block_size=4096")
    assert longer.block_size == 4096  # RoPE has no last position
    edit_config(weights, max_position_embeddings=131_072)
    assert settings(f"--init_from=hf:{weights}").block_size == 1024


@pytest.mark.fault(114)
def test_the_tokenizer_is_noted_and_never_guessed(tmp_path):
    """50,257 ids are not always GPT-2's."""
    saved(gpt2(vocab_size=50257, n_embd=6), tmp_path)
    assert hf.read_config(tmp_path).tokenizer is None
    (tmp_path / "vocab.json").write_text("{}")
    assert hf.read_config(tmp_path).tokenizer == str(tmp_path)
    cfg = sample.Config(pretrained=str(tmp_path), device="cpu")
    refused(lambda: sample.main(cfg), "save_pretrained")
    (tmp_path / "tokenizer.json").write_text(tokenizer.load("bytes").to_json(), "utf-8")
    assert tokenizer.load(hf.read_config(tmp_path).tokenizer).eot == 256


def test_tuned_and_exported(weights, byte_data, tmp_path):
    """From weights to an export: what is in the source folder stays."""
    run, out = tmp_path / "run", tmp_path / "hf"
    words = f"--init_from=hf:{weights} --data_dir={byte_data} --out_dir={run} --block_size=32"
    words += " --batch_tokens=64 --batch_size=2 --max_steps=1 --eval_interval=0 --device=cpu"
    cfg = settings(*words.split(), "--no_compile", "--no_prove")
    train.main(cfg)
    convert.main(convert.Config(checkpoint=str(run), to_hf=str(out)))
    generation = AutoModelForCausalLM.from_pretrained(out).generation_config
    assert (generation.bos_token_id, generation.max_length) == (1, 70)
    assert generation.eos_token_id == [10, 256]
    theirs = AutoTokenizer.from_pretrained(out)
    assert theirs.eos_token_id == 256 and theirs.chat_template == TEMPLATE
    assert theirs("aé")["input_ids"] == [97, 195, 169]
    name_tokenizer(byte_data, "gpt2", np.full(257, 2, np.int32))
    cfg = dataclasses.replace(cfg, overwrite=True)
    refused(lambda: train.main(cfg), "tokenized with gpt2")
    new = dataclasses.replace(cfg, init_from=None)
    refused(lambda: train.main(new), "init_from=None use")


def test_characters_are_the_same_tokenizer_after_an_export(tmp_path):
    """What stands for unknown ones is text: as a special token it would have no bytes."""
    tokenizer.write_characters([["abcé "]], tmp_path / "tokenizer.json")
    ours = tokenizer.load(str(tmp_path / "tokenizer.json"))
    (tmp_path / "hf").mkdir()
    hf.write_tokenizer(tmp_path / "hf", ours)
    again = tokenizer.load(str(tmp_path / "hf"))
    theirs = AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert again.token_bytes().tolist() == ours.token_bytes().tolist()
    assert theirs("aéx")["input_ids"] == ours.encode("aéx")


def test_the_documented_pipeline_writes_what_sample_py_writes(tmp_path, capsys, monkeypatch):
    """The separator stands before the prompt in both."""
    cfg = GPTConfig(vocab_size=257, vocab_multiple=1, n_layer=2, n_embd=32, n_head=2, block_size=32)
    save_model(tmp_path / "run", build(cfg, torch.device("cpu"), 0), cfg)
    weights = dict(checkpoint=str(tmp_path / "run"), tokenizer="bytes")
    text = (ROOT / "docs/checkpoints.md").read_text()
    monkeypatch.chdir(tmp_path)
    convert.main(convert.Config(to_hf=str(tmp_path / "out/hf"), **weights))
    theirs = AutoTokenizer.from_pretrained("out/hf")
    assert theirs.bos_token_id == theirs.eos_token_id == 256
    assert AutoModelForCausalLM.from_pretrained("out/hf").generation_config.eos_token_id == [256]
    ids = tokenizer.load("bytes").encode("def naïve():\n")
    assert theirs("def naïve():\n")["input_ids"] == ids and theirs.decode(ids) == "def naïve():\n"
    capsys.readouterr()
    options = weights | dict(device="cpu", n_samples=1, temperature=0, max_new_tokens=20)
    sample.main(sample.Config(prompt="The moon is", **options))
    expected = capsys.readouterr().out.partition("\n" + "-" * 80)[0]
    lines = text.partition("    import transformers\n")[2].splitlines()
    code = itertools.takewhile(lambda line: not line or line.startswith("    "), lines)
    exec("import transformers\n" + textwrap.dedent("\n".join(code)), {})
    assert capsys.readouterr().out == f"<|endoftext|>{expected}\n" and len(expected) > 15


def test_pickles_of_the_hub_are_never_asked_for(tmp_path, monkeypatch):
    asked = []

    def snapshot_download(name, allow_patterns, ignore_patterns):
        asked.append(allow_patterns)
        assert ignore_patterns == ["*/*"]
        return tmp_path

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert hf.fetch("me/gpt") == tmp_path
    assert not any(fnmatch.fnmatch("pytorch_model.bin", pattern) for pattern in asked[0])
