"""hellaswag.py: scores of any batch and ranks equal single rows'; damaged files and downloads."""

import json
import random
import types
import urllib.error

import numpy as np
import pytest
import ranks
import torch
from conftest import save_model
from test_fineweb import refused

import hellaswag
from corpus import DataError
from corpus import tokenizer as tokenizers
from model import build
from settings import GPTConfig

WORDS = "the man walks his dog and then she rides a red bike over some hill while they sing".split()


def made_up(count, seed=0):
    """Examples of real words in random order and of varied length."""
    draw = random.Random(seed)
    text = lambda n: " ".join(draw.choices(WORDS, k=n))
    size = lambda: draw.randint(1, 8)
    return [
        dict(ctx=text(2 + 2 * size()), endings=[text(size()) for _ in range(4)], label=i % 4)
        for i in range(count)
    ]


def small(seed=1, vocab_size=257):
    shape = dict(vocab_size=vocab_size, vocab_multiple=1, block_size=128, n_layer=2, n_head=2)
    return build(GPTConfig(**shape, n_embd=32), torch.device("cpu"), seed=seed).eval()


def naive(model, examples, tokenizer):
    """(acc, acc_norm) from the logits, with one ending per forward."""
    hits = torch.zeros(2)
    for example in examples:
        context, sums, means = tokenizer.encode(example["ctx"]), [], []
        for ending in example["endings"]:
            ending = tokenizer.encode(" " + ending)
            row = torch.tensor([context + ending])
            logp = model.logits(row[:, :-1]).double().log_softmax(-1)[0]
            loss = -logp[len(context) - 1 :].gather(1, torch.tensor(ending)[:, None])
            sums.append(loss.sum().item())
            means.append(loss.mean().item())
        right = [losses.index(min(losses)) == example["label"] for losses in (sums, means)]
        hits += torch.tensor(right)
    return (hits / len(examples)).tolist()


def test_equals_one_row_at_a_time(monkeypatch):
    model, tokenizer, examples = small(), tokenizers.load("bytes"), made_up(30)
    prepared = hellaswag.prepare(examples, tokenizer, 128)
    expected = naive(model, examples, tokenizer)
    for batch_tokens in (64, 1024, 100_000):
        monkeypatch.setitem(hellaswag.BATCH_TOKENS, "cpu", batch_tokens)
        score = hellaswag.score(model, prepared)
        assert [score["acc"], score["acc_norm"]] == pytest.approx(expected)
        assert score["n"] == 30


@pytest.fixture(scope="module")
def across():
    """A tokenizer with tokens across spaces, as SentencePiece's may be; it drops what it lacks."""
    theirs = pytest.importorskip("tokenizers")
    inner = theirs.Tokenizer(theirs.models.BPE())
    inner.decoder = theirs.decoders.Fuse()
    options = dict(vocab_size=400, special_tokens=["<|endoftext|>"], show_progress=False)
    texts = [f"{e['ctx']} {end}" for e in made_up(60) for end in e["endings"]]
    inner.train_from_iterator(texts, theirs.trainers.BpeTrainer(**options))
    return tokenizers.HuggingFace("across", inner.to_str())


@pytest.mark.fault(115)
def test_a_token_across_the_join_begins_the_ending(across):
    """Whole endings are scored."""
    examples, spanned = made_up(40), 0
    prepared = hellaswag.prepare(examples, across, 128)
    for i, (row, start) in enumerate(zip(prepared.rows, prepared.starts)):
        context, ending = examples[i // 4]["ctx"], f" {examples[i // 4]['endings'][i % 4]}"
        first = int(row[0] == across.eot)  # where a token spans the whole context
        assert across.decode(row[first:]) == context + ending
        assert across.decode(row[start:]).endswith(ending)
        assert context.startswith(across.decode(row[first:start]))
        spanned += across.decode(row[first:start]) != context
    assert spanned > 100


@pytest.mark.fault(115)
def test_contexts_and_endings_of_no_token(across):
    """A context inside one token is scored after the separator; an ending of nothing is refused."""
    example = dict(ctx="\u4e00", endings=["the man", "a", "she", "a man"], label=0)
    prepared = hellaswag.prepare([example], across, 32)
    for row, start in zip(prepared.rows, prepared.starts):
        assert row[0] == across.eot and start == 1
    empty = lambda texts: [np.arange(3) for _ in texts]
    nothing = types.SimpleNamespace(name="x", encode_batch=empty)
    refused(DataError, "0 tokens", hellaswag.prepare, [example], nothing, 32)


def test_a_long_context_is_cut_on_its_left():
    tokenizer = tokenizers.load("bytes")
    example = {"ctx": "a" * 300 + "b", "endings": ["cc"] * 4, "label": 0}
    prepared = hellaswag.prepare([example], tokenizer, 32)
    assert all(len(row) == 33 for row in prepared.rows)
    assert tokenizer.decode(prepared.rows[0]) == "a" * 29 + "b cc"
    longer = example | dict(endings=["c" * 40] * 4)
    refused(DataError, "0: an ending of 41 tokens", hellaswag.prepare, [longer], tokenizer, 32)


def test_the_raw_file_is_read_its_line_separators_and_text_labels_too(tmp_path):
    raw = {"ind": 24, "activity_label": "x", "ctx_a": "a", "ctx_b": "b", "split": "val"}
    raw |= {"ctx": "[header] a\u2028b\x85c", "endings": ["d", "e", "f", "g"], "label": "3"}
    path = tmp_path / "h.jsonl"
    path.write_text(json.dumps(raw, ensure_ascii=False) + "\r\n", encoding="utf-8", newline="")
    assert hellaswag.load(path) == [{k: raw[k] for k in ("ctx", "endings")} | {"label": 3}]


@pytest.mark.parametrize("content, words", [
    (None, "No such file or directory"),
    (b"", "no examples in it"),
    (b'{"ctx": "a", "endings"', ":1: not an example"),
    (b'{"ctx": "a", "endings": ["b", "c", "d"], "label": 0}', ":1: not an example"),
    (b'{"ctx": "a", "endings": ["b", "c", "d", "e"], "label": 4}', ":1: not an example"),
    (b'{"ctx": "\xff"}', ":1: not an example"),
])  # fmt: skip
def test_a_damaged_file_is_named(tmp_path, content, words):
    if content is not None:
        (tmp_path / "h.jsonl").write_bytes(content)
    error = refused(DataError, words, hellaswag.load, tmp_path / "h.jsonl")
    assert error.exit_code == 3 and "h.jsonl" in str(error)


def test_a_dead_network_is_told(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise urllib.error.URLError("no network")

    monkeypatch.setattr(hellaswag.urllib.request, "urlopen", refuse)
    monkeypatch.setattr(hellaswag, "CACHE", tmp_path / "cache/hellaswag_val.jsonl")
    refused(DataError, "no network.* --hellaswag_interval=0", hellaswag.load)
    assert not (tmp_path / "cache").exists()


def test_the_command_line_over_two_ranks_prints_one_score_the_same(tmp_path, capsys):
    model, path, examples = small(), tmp_path / "h.jsonl", made_up(25)
    path.write_text("".join(json.dumps(example) + "\n" for example in examples))
    prepared = hellaswag.prepare(examples, tokenizers.load("bytes"), 128)
    # a rank without a batch takes part
    assert len(list(hellaswag.batches(prepared.rows, 1024, 128))) % 2 == 1
    save_model(tmp_path / "a", model, model.cfg)
    settings = dict(checkpoint=f"{tmp_path}/a", file=str(path), tokenizer="bytes", device="cpu")
    words = [f"--{name}={value}" for name, value in settings.items()]
    both = ranks.run(2, [*words, "--parallel=fsdp"], "hellaswag.py")
    assert both.returncode == 0 and both.outputs[1] == both.stderr == "", both.stderr
    hellaswag.main(hellaswag.Config(**settings))
    alone = capsys.readouterr().out
    assert both.outputs[0] == alone and alone.endswith("n 25\n")
