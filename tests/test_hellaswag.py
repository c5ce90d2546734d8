"""hellaswag.py, run/multiple_choice.py: scores equal one row at a time, whatever the batch and ranks; damaged files."""

import http.client
import io
import json
import urllib.error

import numpy as np
import pytest
import ranks
import torch
from conftest import ROOT

import hellaswag
from configurator import UserError
from corpus import tokenizer as tokenizers
from model import build
from run import checkpoint, multiple_choice
from scale import parallel
from settings import GPTConfig

REAL = ROOT.parent / "shared" / "hellaswag" / "hellaswag_val.jsonl"
WORDS = "the man walks his dog and then she rides a red bike over some hill while they sing".split()


def made_up(count, seed=0):
    """Examples of real words in random order and of varied length."""
    draw = torch.Generator().manual_seed(seed)
    text = lambda n: " ".join(WORDS[int(i)] for i in torch.randint(len(WORDS), (n,), generator=draw))
    size = lambda: int(torch.randint(1, 9, (1,), generator=draw))
    return [
        {"ind": i, "ctx": text(2 + 2 * size()), "endings": [text(size()) for _ in range(4)], "label": i % 4}
        for i in range(count)
    ]


def small():
    shape = GPTConfig(vocab_size=257, vocab_multiple=1, block_size=128, n_layer=2, n_head=2, n_embd=32)
    return build(shape, torch.device("cpu"), seed=1).eval()


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
        hits += torch.tensor(
            [sums.index(min(sums)) == example["label"], means.index(min(means)) == example["label"]]
        )
    return (hits / len(examples)).tolist()


@pytest.mark.parametrize("few_shapes", [True, False])
@pytest.mark.parametrize("batch_tokens", [64, 1024, 100_000])
def test_equals_one_row_at_a_time(batch_tokens, few_shapes):
    model, tokenizer, examples = small(), tokenizers.load("bytes"), made_up(30)
    prepared = multiple_choice.prepare(examples, tokenizer, 128)
    score = multiple_choice.evaluate(model, prepared, "cpu", batch_tokens, few_shapes=few_shapes)
    acc, acc_norm = naive(model, examples, tokenizer)
    assert (score["acc"], score["acc_norm"]) == (pytest.approx(acc), pytest.approx(acc_norm))
    assert score["n"] == 30 and score["truncated"] == 0


def test_batches_hold_every_row_once_in_few_shapes():
    prepared = multiple_choice.prepare(made_up(200), tokenizers.load("bytes"), 128)
    jobs = list(multiple_choice.batches(prepared, 2048, 128))
    assert sorted(i for numbers, _, _ in jobs for i in numbers) == list(range(800))
    assert len({(B, T) for _, B, T in jobs}) <= 4 and all(B * T <= 2048 and len(n) <= B for n, B, T in jobs)


def test_a_cpu_computes_almost_no_padding():
    prepared = multiple_choice.prepare(made_up(200), tokenizers.load("bytes"), 128)
    jobs = list(multiple_choice.batches(prepared, 1024, 128, few_shapes=False))
    assert sorted(i for numbers, _, _ in jobs for i in numbers) == list(range(800))
    assert all(len(numbers) == B and B * T <= 1024 for numbers, B, T in jobs)
    assert sum(B * T for _, B, T in jobs) < 1.02 * sum(len(row) - 1 for row in prepared.rows)


@pytest.mark.fault(40)
def test_a_long_context_is_cut_on_its_left():
    tokenizer = tokenizers.load("bytes")
    example = {"ctx": "a" * 300 + "b", "endings": ["cc"] * 4, "label": 0}
    prepared = multiple_choice.prepare([example], tokenizer, 32)
    assert prepared.truncated == 4 and all(len(row) == 33 for row in prepared.rows)
    assert tokenizer.decode(prepared.rows[0]) == "a" * 29 + "b cc"
    with pytest.raises(
        multiple_choice.HellaSwagError, match="example 0: an ending of 41 tokens does not fit"
    ):
        multiple_choice.prepare([{**example, "endings": ["c" * 40] * 4}], tokenizer, 32)


SIZE = 512


def scored_in_rank():
    """Scores alone and then, as a rank of two, together -> (alone, together, forwards of this rank)."""
    prepared = multiple_choice.prepare(made_up(30), tokenizers.load("bytes"), 128)
    jobs = list(multiple_choice.batches(prepared, SIZE, 128, few_shapes=False))
    assert len(jobs) % 2 == 1  # else one rank needs no extra forward
    alone = multiple_choice.evaluate(small(), prepared, "cpu", SIZE)
    parallel.start("cpu")
    model, calls = small(), []
    model.register_forward_hook(lambda *_: calls.append(1))
    together = multiple_choice.evaluate(model, prepared, "cpu", SIZE)
    parallel.stop()
    return alone, together, len(calls)


def test_two_ranks_equal_one():
    (alone, first, forwards), (_, second, others) = ranks.call(2, scored_in_rank)
    for key in ("acc", "acc_norm", "n", "truncated"):
        assert alone[key] == first[key] == second[key]
    assert forwards == others > 1  # FSDP2's collectives hang otherwise


@pytest.mark.parametrize(
    "line, message",
    [
        ('{"ctx": "a", "endings"', "not an example"),
        ('{"ctx": "a", "endings": ["b", "c", "d"], "label": 0}', "expected 4 endings .* got 3"),
        ('{"ctx": "a", "endings": ["b", "c", "d", "e"], "label": 4}', "got 4 and 4"),
        ('{"ctx": "a", "endings": ["b", "c", "d", "e"]}', "label"),
        ('{"ctx": 3, "endings": ["b", "c", "d", "e"], "label": 0}', "ctx must be a string, not empty"),
        ('{"ctx": "a", "endings": ["b", "c", "d", "e"], "label": 2.7}', "got 4 and 2.7"),
        ('{"ctx": "a", "endings": ["b", "c", "d", "e"], "label": true}', "got 4 and True"),
        ('{"ctx": "a", "endings": ["b", "c", "d", "e"], "label": Infinity}', "got 4 and inf"),
        ('{"ctx": "", "endings": ["b", "c", "d", "e"], "label": 0}', "ctx must be a string, not empty"),
        ("[1]", "not an example"),
    ],
)
@pytest.mark.fault(40)
def test_a_bad_line_is_named(tmp_path, line, message):
    path = tmp_path / "h.jsonl"
    path.write_text(json.dumps(made_up(1)[0]) + "\n" + line + "\n")
    with pytest.raises(multiple_choice.HellaSwagError, match=f"h.jsonl:2: .*{message}"):
        multiple_choice.load(path)


def test_bytes_that_are_no_utf8_and_an_empty_file(tmp_path):
    path = tmp_path / "h.jsonl"
    path.write_bytes(b'{"ctx": "\xff"}\n')
    with pytest.raises(multiple_choice.HellaSwagError, match="h.jsonl:1: not an example"):
        multiple_choice.load(path)
    path.write_text("\n")
    with pytest.raises(multiple_choice.HellaSwagError, match="h.jsonl: no examples") as caught:
        multiple_choice.load(path)
    assert caught.value.exit_code == 3


def test_the_raw_file_is_read_its_line_separators_and_text_labels_too(tmp_path):
    raw = {
        "ind": 24,
        "activity_label": "x",
        "ctx_a": "a",
        "ctx_b": "b",
        "split": "val",
        "source_id": "wikihow~1",
    }
    raw |= {"ctx": "[header] a\u2028b\x85c", "endings": ["d", "e", "f", "g"], "label": "3"}
    path = tmp_path / "h.jsonl"
    path.write_text(json.dumps(raw, ensure_ascii=False) + "\r\n", encoding="utf-8", newline="")
    assert multiple_choice.load(path) == [{k: raw[k] for k in ("ctx", "endings")} | {"label": 3}]


@pytest.mark.parametrize("page", [None, b"<html>log in</html>", b""])
def test_a_short_read_and_a_foreign_page_are_not_kept(tmp_path, monkeypatch, page):
    class Reply(io.BytesIO):
        def read(self):
            if page is None:
                raise http.client.IncompleteRead(b"half", 4)
            return page

    tries = []
    monkeypatch.setattr(
        multiple_choice.urllib.request, "urlopen", lambda *_, **__: tries.append(1) or Reply()
    )
    monkeypatch.setattr(multiple_choice.time, "sleep", lambda _: None)
    with pytest.raises(multiple_choice.Unavailable, match="cannot be downloaded"):
        multiple_choice.download(tmp_path)
    assert len(tries) == 3 and not list(tmp_path.iterdir())


@pytest.mark.fault(40)
def test_a_missing_file_is_a_mistake_and_a_dead_network_is_not(tmp_path, monkeypatch):
    with pytest.raises(
        multiple_choice.HellaSwagError, match="none.jsonl: No such file or directory; name"
    ) as error:
        multiple_choice.load(tmp_path / "none.jsonl")
    assert not isinstance(error.value, multiple_choice.Unavailable)

    def refuse(*_, **__):
        raise urllib.error.URLError("no network")

    monkeypatch.setattr(multiple_choice.urllib.request, "urlopen", refuse)
    monkeypatch.setattr(multiple_choice.time, "sleep", lambda _: None)
    with pytest.raises(multiple_choice.Unavailable, match="cannot be downloaded .*no network"):
        multiple_choice.download(tmp_path)
    assert not list(tmp_path.iterdir())


def test_download_through_the_network_and_the_cache(tmp_path):
    source = tmp_path / "source.jsonl"
    source.write_text("".join(json.dumps(example) + "\n" for example in made_up(3)))
    path = multiple_choice.download(tmp_path / "cache", url=source.as_uri())
    source.unlink()
    assert multiple_choice.download(tmp_path / "cache", url=source.as_uri()) == path
    assert len(multiple_choice.load(path)) == 3


def test_command_line_scores_a_checkpoint_and_refuses_no_examples(tmp_path, capsys):
    model, path = small(), tmp_path / "h.jsonl"
    path.write_text("".join(json.dumps(example) + "\n" for example in made_up(5)))
    checkpoint.save_model(tmp_path / "run", model, model.cfg)
    cfg = hellaswag.Config(
        checkpoint=str(tmp_path / "run"), file=str(path), tokenizer="bytes", device="cpu", limit=3
    )
    hellaswag.main(cfg)
    acc, acc_norm = naive(model, made_up(5)[:3], tokenizers.load("bytes"))
    error = np.std([1.0] * round(3 * acc) + [0.0] * round(3 - 3 * acc)) / 3**0.5
    assert f" | acc {acc:.4f} ±{error:.4f} | 3 examples" in capsys.readouterr().out
    with pytest.raises(UserError, match="limit=0 must be at least 1"):
        hellaswag.main(hellaswag.Config(limit=0))


@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_the_command_line_over_two_ranks_prints_one_score_the_same(tmp_path, mode):
    model, path = small(), tmp_path / "h.jsonl"
    path.write_text("".join(json.dumps(example) + "\n" for example in made_up(20)))
    prepared = multiple_choice.prepare(made_up(20), tokenizers.load("bytes"), 128)
    assert (
        len(list(multiple_choice.batches(prepared, 256, 128, few_shapes=False))) % 2 == 1
    )  # one rank has fewer
    checkpoint.save_model(tmp_path / "run", model, model.cfg)
    words = [f"--checkpoint={tmp_path}/run", f"--file={path}", "--tokenizer=bytes", "--device=cpu"]
    alone = ranks.run(0, [*words, "--batch_tokens=256"], "hellaswag.py")
    words += [f"--parallel={mode}"]
    both = ranks.run(2, [*words, "--batch_tokens=256"], "hellaswag.py")
    assert alone.returncode == both.returncode == 0, both.stderr
    score, count, _ = both.outputs[0].rsplit(" | ", 2)
    assert [score, count] == alone.stdout.rsplit(" | ", 2)[:2] and count == "20 examples, 0 cut"
    assert both.outputs[1] == both.stderr == ""
    path.write_text("{")
    for more, code in ([], 3), ([f"--checkpoint={tmp_path}/none"], 4):
        broken = ranks.run(2, words + more, "hellaswag.py")
        assert broken.codes == [code, code], broken.stderr
        assert broken.stderr.startswith("error: ") and broken.stderr.count("\n") == 1


@pytest.mark.skipif(not REAL.exists(), reason="needs the validation file beside the project")
def test_the_whole_validation_set_is_read():
    examples = multiple_choice.load(REAL)
    prepared = multiple_choice.prepare(examples, tokenizers.load("gpt2"), 1024)
    assert len(examples) == 10_042 and len(prepared.rows) == 40_168 and prepared.truncated == 0
