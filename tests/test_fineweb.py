"""fineweb.py: shards against a plain rebuild of them, kills, faults, and the loader against a naive numpy reference."""

import contextlib
import errno
import io
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import fineweb
import tokenizer
from configurator import UserError
from fineweb import Config, DataError, TokenLoader, read_header

ROOT = Path(__file__).parents[1]
STDLIB = Path(sysconfig.get_path("stdlib"))
CORPUS = ROOT.parent / "shared" / "corpus"
FOLDERS = f"{STDLIB}/*.py,{STDLIB}/json,{STDLIB}/asyncio"


@pytest.fixture(autouse=True, scope="module")
def hub_cache(tmp_path_factory):
    """Keeps what `datasets` caches out of the user's home."""
    import datasets

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("hf"))
        patch.setenv("HF_DATASETS_CACHE", str(datasets.config.HF_DATASETS_CACHE))
        yield


def prepare(out, dataset=FOLDERS, **settings):
    """Runs the script's main; returns its printed text."""
    with contextlib.redirect_stdout(io.StringIO()) as text:
        fineweb.main(Config(dataset=str(dataset), out_dir=str(out), **settings))
    return text.getvalue()


def contents(folder):
    return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}


def shard_tokens(folder, split):
    paths = sorted(Path(folder).glob(f"*_{split}_*.bin"))
    return [np.fromfile(path, read_header(path)[1], offset=1024) for path in paths]


def rebuild(texts, tok, val_tokens):
    """(val, train) streams, built the plain way."""
    rows = [np.array([tok.eot, *tok.encode(text)]) for text in texts if text]
    sizes = np.cumsum([len(row) for row in rows])
    split = int(np.searchsorted(sizes, val_tokens)) + 1 if val_tokens else 0
    return (np.concatenate(part) if part else np.array([], int) for part in (rows[:split], rows[split:]))


def write_shard(path, tokens, dtype=np.uint16):
    magic, version = {np.uint16: (20240520, 1), np.uint32: (20240801, 7)}[dtype]
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(tokens)
    path.write_bytes(header.tobytes() + np.asarray(tokens, dtype).tobytes())
    return path


def one_line(error):
    text = str(error.value)
    assert "\n" not in text and text
    return text


# ---- writing


def test_shards_are_the_documents(tmp_path):
    said = prepare(tmp_path / "d", shard_tokens=300_000, val_tokens=50_000)
    tok = tokenizer.load("gpt2")
    texts = [Path(path).read_text("utf-8", "replace") for path in fineweb.local_files(FOLDERS)]
    val, train = rebuild(texts, tok, 50_000)
    assert np.array_equal(np.concatenate(shard_tokens(tmp_path / "d", "val")), val)
    shards = shard_tokens(tmp_path / "d", "train")
    assert np.array_equal(np.concatenate(shards), train)
    assert {len(shard) for shard in shards[:-1]} == {300_000} and 0 < len(shards[-1]) <= 300_000
    assert "train" in said and f"{len(train):,}" in said

    manifest = json.loads((tmp_path / "d/manifest.json").read_text())
    assert [s["name"] for s in manifest["shards"][:2]] == ["text_val_000000.bin", "text_train_000001.bin"]
    assert (manifest["tokenizer"], manifest["vocab_size"], manifest["eot"]) == ("gpt2", 50257, 50256)
    assert manifest["documents"] == sum(bool(text) for text in texts)
    assert manifest["text_bytes"] == sum(len(text.encode()) for text in texts)
    assert manifest["tokens"] == len(val) + len(train) and manifest["dtype"] == "uint16"
    assert np.array_equal(np.load(tmp_path / "d/token_bytes.npy"), tok.token_bytes())
    fineweb.verify(tmp_path / "d")
    assert not list((tmp_path / "d").glob("*.tmp")) and not (tmp_path / "d/progress.json").exists()


def test_a_finished_folder_is_left_alone_and_other_settings_are_refused(tmp_path):
    prepare(tmp_path / "d", STDLIB / "json", tokenizer="bytes")
    before = contents(tmp_path / "d")
    assert "finished already" in prepare(tmp_path / "d", STDLIB / "json", tokenizer="bytes")
    assert contents(tmp_path / "d") == before
    with pytest.raises(UserError) as error:
        prepare(tmp_path / "d", STDLIB / "json", tokenizer="gpt2")
    assert "tokenizer=bytes, not gpt2" in one_line(error) and error.value.exit_code == 2
    assert contents(tmp_path / "d") == before


@pytest.mark.parametrize("streaming", [False, True])
def test_kinds_of_files(tmp_path, streaming):
    import pyarrow
    import pyarrow.parquet
    import zstandard

    line = lambda text, **more: json.dumps({"text": text, **more}) + "\n"
    (tmp_path / "a.txt").write_text("text file")
    (tmp_path / "b.jsonl").write_text(line("jsonl one", id=1) + line("") + line("a <|endoftext|> b", id=3))
    (tmp_path / "c.jsonl.zst").write_bytes(zstandard.compress((line("zst é", other="x") + line(None)).encode()))
    pyarrow.parquet.write_table(pyarrow.table({"n": [1, 2], "text": ["parquet", "last"]}), tmp_path / "d.parquet")
    (tmp_path / "binary.so").write_bytes(b"\x7fELF\0\0")
    (tmp_path / ".hidden").write_text("no")
    (tmp_path / "e.py").write_bytes(b"latin \xe9")
    out = tmp_path.parent / f"{tmp_path.name}-out"
    prepare(out, tmp_path, tokenizer="bytes", val_tokens=5, streaming=streaming)
    texts = ["text file", "jsonl one", "a <|endoftext|> b", "zst é", "parquet", "last", "latin \ufffd"]
    val, train = rebuild(texts, tokenizer.load("bytes"), 5)
    assert np.array_equal(shard_tokens(out, "val")[0], val), "val is the first whole document"
    assert np.array_equal(shard_tokens(out, "train")[0], train), "empty documents have no separator"
    commas = f"{tmp_path}/a.txt,{tmp_path}/*.jsonl,{tmp_path}/c.jsonl.zst,{tmp_path}/d.parquet,{tmp_path}/e.py"
    prepare(tmp_path.parent / f"{tmp_path.name}-again", commas, tokenizer="bytes", val_tokens=5)
    assert (
        contents(tmp_path.parent / f"{tmp_path.name}-again")["text_train_000001.bin"]
        == contents(out)["text_train_000001.bin"]
    )


def test_shuffle_is_numpys_permutation(tmp_path):
    texts = [f"document {i}" for i in range(700)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"body": text}) + "\n" for text in texts))
    settings = dict(tokenizer="bytes", text_key="body", shuffle_seed=5, val_tokens=0)
    prepare(tmp_path / "d", tmp_path / "a.jsonl", **settings)
    order = np.random.default_rng(5).permutation(700)
    _, train = rebuild([texts[i] for i in order], tokenizer.load("bytes"), 0)
    assert np.array_equal(shard_tokens(tmp_path / "d", "train")[0], train)
    assert [p.name for p in (tmp_path / "d").glob("*.bin")] == ["a_train_000001.bin"], "val_tokens=0: no val shard"


def test_max_tokens_and_default_val(tmp_path):
    prepare(tmp_path / "d", STDLIB / "asyncio", tokenizer="bytes", shard_tokens=40_000, max_tokens=100_001)
    assert [len(shard) for shard in shard_tokens(tmp_path / "d", "train")] == [40_000, 40_000, 20_001]
    size = sum(os.path.getsize(path) for path in fineweb.local_files(str(STDLIB / "asyncio")))
    assert json.loads((tmp_path / "d/manifest.json").read_text())["settings"]["val_tokens"] == size // 100


def test_uint32_shards(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {f"w{i}": i for i in range(70_000)} | {"<|endoftext|>": 70_000}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="w0"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    inner.add_special_tokens(["<|endoftext|>"])
    inner.save(str(tmp_path / "tokenizer.json"))
    for i, text in enumerate(("w1 w2", "w69999 w3 w4")):
        (tmp_path / f"{i}.txt").write_text(text)
    prepare(tmp_path / "d", f"{tmp_path}/*.txt", tokenizer=str(tmp_path / "tokenizer.json"), val_tokens=1)
    header = np.fromfile(tmp_path / "d/text_train_000001.bin", "<i4", 3)
    assert header.tolist() == [20240801, 7, 4]
    assert shard_tokens(tmp_path / "d", "train")[0].tolist() == [70_000, 69_999, 3, 4]
    x, y = TokenLoader(tmp_path / "d", "train", 1, 3, vocab_size=70_001).next()
    assert x.tolist() == [[70_000, 69_999, 3]] and y.tolist() == [[69_999, 3, 4]] and x.dtype == y.dtype == torch.int64


@pytest.mark.skipif(not CORPUS.is_dir(), reason="no corpus beside the project")
def test_real_corpus(tmp_path):
    import datasets

    source = CORPUS / "win32_docs.jsonl.zst"
    prepare(tmp_path / "d", source, max_tokens=1_000_000, val_tokens=100_000)
    texts = datasets.load_dataset("json", data_files=str(source), split="train[:5000]")["text"]
    val, train = rebuild(texts, tokenizer.load("gpt2"), 100_000)
    assert len(train) > 1_000_000
    assert np.array_equal(shard_tokens(tmp_path / "d", "val")[0], val)
    assert np.array_equal(shard_tokens(tmp_path / "d", "train")[0], train[:1_000_000])


# ---- kills and other faults of writing

KILLS = dict(shard_tokens=60_000, val_tokens=10_000, shuffle_seed=3)


def child(out, begun, kill_at):
    """prepare in a process of its own; kill_at: the number of the file operation before which it kills itself."""
    calls = iter(range(10**9))

    def counted(operation):
        def call(*args):
            if next(calls) == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            return operation(*args)

        return call

    os.replace, os.fsync = counted(os.replace), counted(os.fsync)
    begun.set()
    prepare(out, **KILLS)


@pytest.fixture(scope="module")
def clean(tmp_path_factory):
    out = tmp_path_factory.mktemp("clean") / "d"
    prepare(out, **KILLS)
    return contents(out)


@pytest.mark.parametrize("how", ["at a random time", "at a random file operation"])
def test_kill_9_leaves_no_trace(tmp_path, clean, how):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "datasets", "fineweb"])
    rng, killed, runs = random.Random(how), 0, 0
    while killed < 10 and runs < 25:
        begun, timed = context.Event(), how == "at a random time"
        process = context.Process(target=child, args=(tmp_path / "d", begun, -1 if timed else rng.randrange(12)))
        process.start()
        if timed:
            begun.wait()
            time.sleep(rng.uniform(0, 0.4))
            process.kill()
        process.join(60)
        assert process.exitcode in (0, -signal.SIGKILL)
        killed, runs = killed + (process.exitcode != 0), runs + 1
        for path in tmp_path.glob("d/*.bin"):
            assert path.read_bytes() == clean[path.name], "a shard in place is whole at all times"
    assert killed
    prepare(tmp_path / "d", **KILLS)
    assert contents(tmp_path / "d") == clean


def test_finished_shards_are_not_made_again(tmp_path, clean, monkeypatch):
    stop = lambda self, *args: (_ for _ in ()).throw(KeyboardInterrupt) if len(self.shards) == 6 else add(self, *args)
    add = fineweb.Progress.add
    monkeypatch.setattr(fineweb.Progress, "add", stop)
    with pytest.raises(KeyboardInterrupt):
        prepare(tmp_path / "d", **KILLS)
    monkeypatch.undo()
    written = []
    write = fineweb.write_atomic
    monkeypatch.setattr(fineweb, "write_atomic", lambda path, *data: (written.append(path.name), write(path, *data)))
    prepare(tmp_path / "d", **KILLS)
    assert contents(tmp_path / "d") == clean
    shards = [name for name in clean if name.endswith(".bin")]
    assert sorted(name for name in written if name.endswith(".bin")) == sorted(shards)[6 - 1 : -1]


PACK = dict(KILLS, shard_tokens=140_000, pack=32_768)


def test_packed_shards_hold_every_document_once(tmp_path, clean):
    """In groups of 32,768 tokens, 4 to a shard; validation and what a document holds are as without it."""
    said = prepare(tmp_path / "d", **PACK)
    plain = np.concatenate([np.frombuffer(clean[name], np.uint16, offset=1024) for name in clean if "_train_" in name])
    shards = shard_tokens(tmp_path / "d", "train")
    assert {len(shard) for shard in shards[:-1]} == {4 * 32_768}
    documents = lambda tokens: sorted(tuple(part) for part in np.split(tokens, np.flatnonzero(tokens == 50256)[1:]))
    packed = np.concatenate(shards)
    assert documents(packed) == documents(plain) and not np.array_equal(packed, plain)
    assert contents(tmp_path / "d")["text_val_000000.bin"] == clean["text_val_000000.bin"]

    def cut(tokens):
        begins = np.append(np.flatnonzero(tokens == 50256), len(tokens))
        return np.mean([a // 32_768 != (b - 1) // 32_768 for a, b in zip(begins, begins[1:])])

    shares = json.loads((tmp_path / "d/manifest.json").read_text())["documents_cut"]
    assert shares["packed"] == pytest.approx(cut(packed)) and cut(packed) < 0.5 * cut(plain)
    assert shares["by_chance"] == pytest.approx(cut(plain), abs=0.02)  # some 300 documents
    assert f"cut {shares['packed']:.2%} of documents, not {shares['by_chance']:.2%}" in said

    loader = TokenLoader(tmp_path / "d", "train", 2, 32_768)
    assert not loader.warnings
    expected = np.stack([packed[w * 32_768 :][:32_769] for w in range(20)])
    assert np.array_equal(read(loader, 10), expected), "rows are groups, the last target the next one's first token"
    loader.close()
    warnings = [TokenLoader(tmp_path / "d", "train", 1, T, align=T > 1024).warnings for T in (1024, 32_768)]
    assert "packed for block_size=32768; rows of 1024" in warnings[0][0] and "align_documents" in warnings[1][0]


@pytest.mark.parametrize("streaming", [False, True])
def test_packing_killed_after_any_shard_goes_on(tmp_path, monkeypatch, streaming):
    monkeypatch.setattr(fineweb.packing, "DOCUMENTS", 40)  # a fifth of them
    settings = dict(PACK, streaming=streaming)
    prepare(tmp_path / "whole", **settings)
    whole = contents(tmp_path / "whole")
    assert sum(name.endswith(".bin") for name in whole) == 19
    add = fineweb.Progress.add
    for count in range(2, 19, 4):
        stop = lambda self, *args, n=count: 1 / 0 if len(self.shards) == n else add(self, *args)
        with pytest.MonkeyPatch.context() as patch, pytest.raises(ZeroDivisionError):
            patch.setattr(fineweb.Progress, "add", stop)
            prepare(tmp_path / "d", **settings)
    prepare(tmp_path / "d", **settings)
    assert contents(tmp_path / "d") == whole


def test_short_documents_are_left_out(tmp_path):
    prepare(tmp_path / "d", STDLIB / "json", tokenizer="bytes", min_document_tokens=9000, val_tokens=0)
    texts = [Path(path).read_text() for path in fineweb.local_files(str(STDLIB / "json"))]
    _, train = rebuild([text for text in texts if len(text) >= 9000], tokenizer.load("bytes"), 0)
    assert np.array_equal(shard_tokens(tmp_path / "d", "train")[0], train) and len(train) < sum(map(len, texts))


def test_two_at_once_are_refused(tmp_path):
    with fineweb.claim(tmp_path / "d"), pytest.raises(UserError, match="another fineweb.py"):
        prepare(tmp_path / "d", STDLIB / "json")
    prepare(tmp_path / "d", STDLIB / "json")


def test_disk_full(tmp_path, clean):
    """FAULTS 25, with the kernel's own error: a limit on the size of a file, below a shard's."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = fineweb.write_atomic

    def write(path, *chunks):
        full = path.name == "text_train_000003.bin"
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]) if full else limits)
        try:
            before(path, *chunks)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fineweb, "write_atomic", write)
        with pytest.raises(DataError) as error:
            prepare(tmp_path / "d", **KILLS)
    assert "text_train_000003.bin" in one_line(error) and "121,024 bytes" in str(error.value)
    names = set(contents(tmp_path / "d"))
    assert names == {"progress.json", "text_val_000000.bin", "text_train_000001.bin", "text_train_000002.bin"}
    prepare(tmp_path / "d", **KILLS)
    assert contents(tmp_path / "d") == clean


def test_no_space_is_named(tmp_path, monkeypatch):
    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DataError, match="No space left on device: it needs 3 bytes"):
        fineweb.write_atomic(tmp_path / "x", b"abc")
    assert contents(tmp_path) == {}


@pytest.mark.parametrize("dataset", ["fineweb-edu", "kjj0/fineweb10B-gpt2"])
def test_hub_unreachable(tmp_path, dataset):
    """FAULTS 35, as a person sees it."""
    command = [sys.executable, str(ROOT / "fineweb.py"), f"--dataset={dataset}", f"--out_dir={tmp_path}/d"]
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    got = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert got.returncode == 3 and "Traceback" not in got.stderr
    assert [line for line in got.stderr.splitlines() if line.startswith("error: ")] == got.stderr.splitlines()[-1:]


def test_network_lost_midway(tmp_path, monkeypatch, clean):
    import datasets

    whole = datasets.Dataset.iter

    def cut(self, batch_size):
        yield from (batch for _, batch in zip(range(1), whole(self, 100)))
        raise ConnectionError("lost")

    monkeypatch.setattr(datasets.Dataset, "iter", cut)
    with pytest.raises(DataError, match="ConnectionError: lost; finished shards are kept"):
        prepare(tmp_path / "d", **KILLS)
    assert (tmp_path / "d/text_train_000001.bin").exists()
    monkeypatch.undo()
    prepare(tmp_path / "d", **KILLS)
    assert contents(tmp_path / "d") == clean


def test_ready_made_shards(tmp_path, monkeypatch):
    import huggingface_hub

    source = tmp_path / "hub"
    source.mkdir()
    names = ["fineweb_val_000000.bin", *(f"fineweb_train_{i:06d}.bin" for i in range(1, 6))]
    for i, name in enumerate(names):
        write_shard(source / name, [50256, 464, 290 + i, 50256, 11])
    fetched = []

    def download(repo, name, repo_type, local_dir):
        fetched.append(name)
        if fetched == names[:3]:
            raise ConnectionError("gone")
        return shutil.copy(source / name, local_dir)

    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", lambda *_, **__: ["README.md", *names[::-1]])
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    settings = dict(dataset="kjj0/fineweb10B-gpt2", max_shards=3)
    with pytest.raises(DataError, match="ConnectionError: gone"):
        prepare(tmp_path / "d", **settings)
    prepare(tmp_path / "d", **settings)
    assert fetched == names[:3] + names[2:4], "what had come is not fetched again"
    fineweb.verify(tmp_path / "d")
    manifest = json.loads((tmp_path / "d/manifest.json").read_text())
    assert [s["name"] for s in manifest["shards"]] == names[:4] and manifest["documents"] == 8
    loader = TokenLoader(tmp_path / "d", "train", 1, 4, vocab_size=50257)
    assert loader.tokenizer == "gpt2" and loader.tokens == 15 and loader.token_bytes[464] == 3


def test_mistakes_in_the_settings(tmp_path):
    (tmp_path / "one.txt").write_text("only one document")
    (tmp_path / "bad.jsonl").write_text('{"text": "fine"}\n{"text": "a \\ud800 b"}\n')
    (tmp_path / "other.jsonl").write_text('{"body": "x"}\n{"body": "y"}\n')
    (tmp_path / "empty").mkdir()
    (tmp_path / "used").mkdir()
    (tmp_path / "used/x_train_000001.bin").touch()
    for settings, code, words in [
        (dict(dataset="no/such/*.txt"), 2, "no file matches 'no/such/*.txt'"),
        (dict(dataset="absent.jsonl"), 2, "no file matches 'absent.jsonl'"),
        (dict(dataset=str(tmp_path / "empty")), 2, "no text files"),
        (dict(dataset=str(tmp_path / "one.txt")), 3, "nothing is left to train on"),
        (dict(dataset=str(tmp_path / "bad.jsonl")), 3, "surrogate pair"),
        (dict(dataset=str(tmp_path / "other.jsonl")), 3, "no field text_key=text; it has body"),
        (dict(out=tmp_path / "used"), 2, "holds x_train_000001.bin"),
        (dict(out="/proc/x"), 2, "can't be written"),
        (dict(shard_tokens=0, val_tokens=-1), 2, "shard_tokens=0 must be at least 1; val_tokens=-1 must"),
        (dict(tokenizer="gpt5"), 2, "tokenizer=gpt5"),
        (dict(pack=1, min_document_tokens=0), 2, "min_document_tokens=0 must be at least 1"),
        (dict(pack=4096, shard_tokens=4000), 2, "shard_tokens=4000 must be at least pack=4096"),
        (dict(dataset="kjj0/fineweb10B-gpt2", pack=4096), 2, "is tokenized already"),
    ]:
        with pytest.raises(UserError) as error:
            prepare(**{"out": tmp_path / "d", **settings})
        assert words in one_line(error) and error.value.exit_code == code
        shutil.rmtree(tmp_path / "d", ignore_errors=True)
    with pytest.raises(DataError):
        prepare(tmp_path / "d", tmp_path / "one.txt")
    prepare(tmp_path / "d", tmp_path / "one.txt", val_tokens=0)  # the advice given, into the same folder
    assert len(shard_tokens(tmp_path / "d", "train")[0]) == 4


# ---- reading: damaged files, FAULTS 1 to 10


@pytest.fixture
def data(tmp_path):
    """A folder of small shards: three of train (odd sizes), one of val, and a manifest."""
    rng = np.random.default_rng(0)
    stream = rng.integers(0, 256, 1000)
    stream[np.unique(rng.integers(0, 1000, 40))] = 256
    stream[0] = 256
    (tmp_path / "d").mkdir()
    paths = []
    for i, part in enumerate(np.split(stream, [333, 640])):
        paths.append(write_shard(tmp_path / f"d/x_train_{i + 1:06d}.bin", part))
    paths.append(write_shard(tmp_path / "d/x_val_000000.bin", stream[:203]))
    shards = [{"name": path.name, "sha256": fineweb.file_sha256(path)} for path in paths]
    manifest = {"tokenizer": "bytes", "vocab_size": 257, "eot": 256, "dtype": "uint16", "shards": shards}
    (tmp_path / "d/manifest.json").write_text(json.dumps(manifest))
    return tmp_path / "d", stream


def patch(path, offset, data):
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(data)


def test_damaged_shards(data):
    folder, _ = data
    path = folder / "x_train_000002.bin"
    good = path.read_bytes()
    int32 = lambda *values: np.array(values, "<i4").tobytes()
    for row, damage, words in [
        (1, good[:-1], "expected 1638 bytes for 307 tokens of a uint16 shard (GPT-2, magic 20240520), it has 1637"),
        (2, good + b"\0", "expected 1638 bytes for 307 tokens of a uint16 shard (GPT-2, magic 20240520), it has 1639"),
        (1, good[:100], "holds 100 bytes, less than a header of 1024"),
        (1, b"", "holds 0 bytes"),
        (3, b"abcd" + good[4:], "is no shard: it begins with 1684234849, not 20240520 or 20240801"),
        (3, b"abcd" + good[4:], "if it is a nanoGPT raw file"),
        (4, int32(20240520, 2) + good[8:], "version 2 in the header of a uint16 shard (GPT-2"),
        (
            4,
            int32(20240801) + good[4:],
            "version 1 in the header of a uint32 shard (Llama 3, magic 20240801), expected 7",
        ),
        (4, int32(20240801, 7) + good[8:], "expected 2252 bytes for 307 tokens of a uint32 shard (Llama 3"),
        (4, int32(20240801, 7, 307) + bytes(1012 + 4 * 307), "holds uint32 tokens"),
        (5, good[:8] + int32(0) + good[12:], "counts 0 tokens"),
        (5, good[:8] + int32(-5) + good[12:], "counts -5 tokens"),
        (5, good[:8] + int32(2**31 - 1) + good[12:], "expected 4294968318 bytes for 2147483647 tokens"),
    ]:
        path.write_bytes(damage)
        with pytest.raises(DataError) as error:
            TokenLoader(folder, "train", 2, 8, vocab_size=257)
        assert words in one_line(error) and str(path) in str(error.value), row
        assert error.value.exit_code == 3


def test_token_beyond_the_vocabulary(data):  # row 6
    folder, _ = data
    patch(folder / "x_train_000002.bin", 1024 + 2 * 100, np.uint16(60000).tobytes())
    loader = TokenLoader(folder, "train", 4, 16, vocab_size=257)
    with pytest.raises(DataError) as error:
        for _ in range(100):
            loader.next()
    assert "x_train_000002.bin: token 100 is 60000, not below vocab_size=257" in one_line(error)
    with pytest.raises(DataError):
        loader.next()  # and does not hang the second time
    loader.close()


def test_vocabulary_smaller_than_the_tokenizers(data):
    with pytest.raises(DataError, match="vocab_size=100 is less .*try --vocab_size=257"):
        TokenLoader(data[0], "train", 4, 16, vocab_size=100)


def test_flipped_bit(data):  # row 7
    folder, _ = data
    fineweb.verify(folder)
    patch(folder / "x_train_000003.bin", 1500, bytes([(folder / "x_train_000003.bin").read_bytes()[1500] ^ 1]))
    TokenLoader(folder, "train", 4, 16, vocab_size=1000)
    with pytest.raises(DataError, match="x_train_000003.bin is damaged: SHA-256"):
        fineweb.verify(folder)
    (folder / "x_train_000003.bin").unlink()
    with pytest.raises(DataError, match="x_train_000003.bin is in the manifest"):
        fineweb.verify(folder)
    (folder / "manifest.json").write_text("{")
    with pytest.raises(DataError, match="manifest.json is damaged"):
        fineweb.verify(folder)
    (folder / "manifest.json").unlink()
    with pytest.raises(DataError, match="no checksums"):
        fineweb.verify(folder)


def test_no_data(data, tmp_path):  # rows 8 to 10
    folder, _ = data
    with pytest.raises(DataError, match=r"nothing matches .*absent/\*_train_\*.bin; .*python fineweb.py"):
        TokenLoader(tmp_path / "absent", "train", 4, 16)
    with pytest.raises(DataError, match="needs 4,096 tokens, the train split has 1,000; lower --batch_tokens"):
        TokenLoader(folder, "train", 4, 16, min_tokens=4096)
    with pytest.raises(DataError, match="block_size.1 = 1,001 tokens, the train split has 1,000; lower --block_size"):
        TokenLoader(folder, "train", 1, 1000)
    (folder / "x_val_000000.bin").unlink()
    with pytest.raises(DataError, match="no val split.*--eval_interval=0"):
        TokenLoader(folder, "val", 4, 16)


def test_nanogpt_files(data, tmp_path):
    folder, stream = data
    stream.astype("<u2").tofile(tmp_path / "train.bin")
    with pytest.raises(DataError, match="--data_format=nanogpt"):
        TokenLoader(tmp_path, "train", 2, 8)
    loader = TokenLoader(tmp_path, "train", 2, 8, data_format="nanogpt")
    assert loader.next()[0].flatten().tolist() == stream[:16].tolist()
    assert loader.tokenizer is None and loader.token_bytes is None
    loader.close()
    patch(tmp_path / "train.bin", 2000, b"x")
    with pytest.raises(DataError, match="2001 bytes"):
        TokenLoader(tmp_path, "train", 2, 8, data_format="nanogpt")
    shutil.copy(folder / "x_train_000001.bin", tmp_path / "train.bin")
    with pytest.raises(DataError, match="llm.c header"):
        TokenLoader(tmp_path, "train", 2, 8, data_format="nanogpt")


# ---- reading: the order


def naive_starts(stream, T, align):
    """Starts of the rows of one epoch, by the definition."""
    n, p, starts = len(stream), 0, []
    while p < n:
        starts.append(p)
        inside = [q for q in range(p + 1, p + T + 1) if q == n or (q < n and stream[q] == 256)]
        p = inside[-1] if align and inside else p + T
    return starts


def naive_rows(stream, T, seed=None, align=False):
    """All rows for ever, each T+1 tokens."""
    starts, epoch = naive_starts(stream, T, align), 0
    while True:
        order = range(len(starts))
        if seed is not None:
            order = np.random.default_rng((seed, epoch)).permutation(len(starts))
        for w in order:
            yield np.take(stream, range(starts[w], starts[w] + T + 1), mode="wrap")
        epoch += 1


def take(rows, n):
    return np.stack([next(rows) for _ in range(n)])


def read(loader, steps):
    """(steps*B, T+1) rows out of a loader's batches."""
    out = []
    for _ in range(steps):
        x, y = loader.next()
        assert x.shape == y.shape == (loader.B, loader.T) and x.dtype == y.dtype == torch.int64
        assert torch.equal(x[:, 1:], y[:, :-1])
        out.append(torch.cat([x, y[:, -1:]], 1).numpy())
    return np.concatenate(out)


@pytest.mark.parametrize("seed", [None, 7])
@pytest.mark.parametrize("align", [False, True])
@pytest.mark.parametrize("T", [7, 16, 50, 999])
def test_order_is_the_naive_one(data, seed, align, T):
    folder, stream = data
    loader = TokenLoader(folder, "train", 3, T, vocab_size=257, shuffle_seed=seed, align=align)
    expected = take(naive_rows(stream, T, seed, align), 300)
    assert np.array_equal(read(loader, 100), expected)
    assert loader.rows_per_epoch == len(naive_starts(stream, T, align)) and loader.tokens == 1000
    assert loader.epoch == 300 // loader.rows_per_epoch
    loader.close()


def test_every_token_is_a_target_once_an_epoch(data):
    folder, stream = data
    loader = TokenLoader(folder, "train", 1, 9)
    targets = read(loader, loader.rows_per_epoch)[:, 1:].ravel()
    assert np.array_equal(targets[:1000], np.roll(stream, -1)) and len(targets) == 112 * 9
    loader.close()


def test_aligned_rows_begin_at_documents(data):
    folder, stream = data
    rng = np.random.default_rng(1)
    for _ in range(200):  # the vectorised starts against the definition, on streams of all kinds
        n, T = rng.integers(2, 120), rng.integers(1, 40)
        stream = np.where(rng.random(n) < rng.choice([0, 0.02, 0.2, 1]), 256, 0)
        starts = fineweb.aligned_starts(np.flatnonzero(stream == 256), n, T)
        assert starts.tolist() == naive_starts(stream, T, True)
        seen = np.unique((starts[:, None] + np.arange(1, T + 1)) % n)
        assert len(seen) == n, "every token is a target at least once"
    (folder / "manifest.json").unlink()
    with pytest.raises(DataError, match="align_documents"):
        TokenLoader(folder, "train", 3, 16, align=True)


@pytest.mark.parametrize("order", [{}, {"shuffle_seed": 3}, {"shuffle_seed": 3, "align": True}])
def test_a_global_batch_does_not_depend_on_ranks_or_batch_size(data, order):
    folder, stream = data
    expected = take(naive_rows(stream, 16, order.get("shuffle_seed"), order.get("align", False)), 24 * 8)
    for world, B in [(1, 24), (1, 4), (2, 12), (2, 3), (3, 2), (8, 1)]:
        loaders = [TokenLoader(folder, "train", B, 16, rank, world, **order) for rank in range(world)]
        micro_steps = 24 * 8 // (B * world)
        rows = np.stack([read(loader, micro_steps).reshape(micro_steps, B, 17) for loader in loaders], 1)
        assert np.array_equal(rows.reshape(-1, 17), expected)
        for loader in loaders:
            assert loader.state_dict()["rows"] == 24 * 8
            loader.close()


@pytest.mark.parametrize("order", [{}, {"shuffle_seed": 3}, {"shuffle_seed": 3, "align": True}])
def test_resume_is_exact_on_other_ranks_too(data, order):
    folder, stream = data
    first = TokenLoader(folder, "train", 6, 16, **order)
    read(first, 11)
    time.sleep(0.05)  # the thread is ahead by now, and the state must not be
    state = json.loads(json.dumps(first.state_dict()))
    expected = read(first, 20)
    first.close()
    for world, B in [(1, 6), (2, 3), (3, 2), (1, 1)]:
        rows = []
        for rank in range(world):
            loader = TokenLoader(folder, "train", B, 16, rank, world, **order)
            read(loader, 2)  # a loader in use can be set back as well
            loader.load_state_dict(state)
            rows.append(read(loader, 120 // (B * world)).reshape(-1, B, 17))
            loader.close()
        assert np.array_equal(np.stack(rows, 1).reshape(-1, 17), expected)


def test_resume_on_other_data(data):  # FAULTS 11
    folder, stream = data
    state = TokenLoader(folder, "train", 6, 16).state_dict()
    with pytest.raises(DataError, match="shuffle_seed 1, not None"):
        TokenLoader(folder, "train", 6, 16, shuffle_seed=1).load_state_dict(state)
    write_shard(folder / "x_train_000004.bin", [256, 1, 2])
    loader = TokenLoader(folder, "train", 6, 16)
    with pytest.raises(DataError) as error:
        loader.load_state_dict({**state, "rows": 12})
    assert "tokens 1003, not 1000" in one_line(error) and "--allow_data_change" in str(error.value)
    loader.load_state_dict({**state, "rows": 12}, allow_data_change=True)
    assert np.array_equal(read(loader, 1)[0], stream[12 * 16 : 13 * 16 + 1])
    loader.close()


@pytest.mark.parametrize("tokens, rows", [(1, 0), (64, 4), (100, 6), (10**9, 12)])
def test_validation_is_the_same_for_any_world_and_batch(data, tokens, rows):
    folder, stream = data
    expected = [stream[w * 16 : w * 16 + 17].tolist() for w in range(rows)]
    for world, B in [(1, 1), (1, 5), (2, 3), (4, 8)]:
        got, batches = [], set()
        for rank in range(world):
            loader = TokenLoader(folder, "val", B, 16, rank, world, vocab_size=257, shuffle_seed=1)
            if not rows:
                with pytest.raises(DataError, match="raise --eval_tokens"):
                    next(loader.eval_batches(tokens))
                continue
            for _ in range(2):  # it can be run again, with the same outcome
                pairs = list(loader.eval_batches(tokens))
            batches.add(len(pairs))
            for x, y in pairs:
                assert x.shape == y.shape == (B, 16)
                real = (y >= 0).all(1)
                assert (y[~real] == -100).all()
                got += torch.cat([x, y[:, -1:]], 1)[real].tolist()
        assert sorted(got) == sorted(expected) and len(batches) == (rows > 0)


def test_the_threads_errors_arrive_and_close_ends_it(data):
    def items():
        yield 1
        raise DataError("from the thread")

    ahead = fineweb.Ahead(items(), 2)
    assert next(ahead) == 1
    for _ in range(2):
        with pytest.raises(DataError, match="from the thread"):
            next(ahead)
    assert list(fineweb.Ahead(range(5), 2)) == list(range(5))
    loader = TokenLoader(data[0], "train", 2, 8)
    loader.next()
    thread = loader._ahead._thread
    loader.close()
    loader.close()
    assert not thread.is_alive()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu(data):
    folder, stream = data
    for device in ("cuda", torch.device("cuda", torch.cuda.device_count() - 1)):
        loader = TokenLoader(folder, "train", 3, 16, vocab_size=257, device=device, shuffle_seed=3)
        batches = [loader.next() for _ in range(40)]
        assert all(x.is_cuda and y.is_cuda for x, y in batches)
        rows = torch.cat([torch.cat([x, y[:, -1:]], 1) for x, y in batches]).cpu().numpy()
        assert np.array_equal(rows, take(naive_rows(stream, 16, 3), 120))
        assert loader._gather([0]).is_pinned()
        loader.close()
