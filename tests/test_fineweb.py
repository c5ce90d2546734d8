"""fineweb.py and corpus/writer.py: shards against a plain rebuild, kills and other faults."""

import contextlib
import functools
import io
import json
import os
import resource
import shutil
import signal
import sysconfig
from pathlib import Path

import numpy as np
import pytest
import ranks
import torch
from conftest import ROOT, one_line

import fineweb
import settings as settings_of_a_run
from configurator import configure
from corpus import text_files, tokenizer, writer
from corpus.loader import DataError, TokenLoader
from corpus.shards import open_shard, verify
from fineweb import Config
from system.errors import UserError

STDLIB = Path(sysconfig.get_path("stdlib"))
JSON, ASYNCIO = (f"{STDLIB}/{name}/*.py" for name in ("json", "asyncio"))
SOURCES = f"{STDLIB}/[a-d]*.py,{JSON},{ASYNCIO}"


def refused(kind, words, function, *args, **options):
    """The error of a call, of a kind, which is one line that matches `words`."""
    with pytest.raises(kind, match=words) as error:
        function(*args, **options)
    assert one_line(error)
    return error.value


def prepare(out, dataset=SOURCES, **settings):
    """Runs the script's main; returns its printed text."""
    with contextlib.redirect_stdout(io.StringIO()) as text:
        fineweb.main(Config(dataset=str(dataset), out_dir=str(out), **settings))
    return text.getvalue()


@contextlib.contextmanager
def stopped_after(count):
    """Ends `prepare` inside when it has recorded so many shards."""
    save = writer.Progress._save
    stop = lambda self: 1 / 0 if len(self.record["shards"]) > count else save(self)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(writer.Progress, "_save", stop)
        yield


def contents(folder):
    """{name: bytes} of a folder's files, but for the lock, which names the last process."""
    paths = sorted(Path(folder).iterdir())
    return {path.name: path.read_bytes() for path in paths if path.name != "run.lock"}


def shard_tokens(folder, split):
    paths = sorted(Path(folder).glob(f"*_{split}_*.bin"))
    return [open_shard(path) for path in paths]


def rebuild(texts, tok, val_tokens):
    """(val, train) streams of tokens, without shards."""
    rows = [np.array([tok.eot, *tok.encode(text)]) for text in texts if text]
    sizes = np.cumsum([len(row) for row in rows])
    split = int(np.searchsorted(sizes, val_tokens)) + 1 if val_tokens else 0
    return (
        np.concatenate(part) if part else np.array([], int) for part in (rows[:split], rows[split:])
    )


@pytest.mark.gpt2
def test_shards_are_the_documents(tmp_path):
    prepare(tmp_path / "d", shard_tokens=100_000, val_tokens=50_000)
    tok = tokenizer.load("gpt2")
    paths = text_files.local_files(SOURCES, text_files.Tally())
    texts = [Path(path).read_text("utf-8", "replace") for path in paths]
    val, train = rebuild(texts, tok, 50_000)
    assert np.array_equal(np.concatenate(shard_tokens(tmp_path / "d", "val")), val)
    shards = shard_tokens(tmp_path / "d", "train")
    assert np.array_equal(np.concatenate(shards), train)
    assert {len(shard) for shard in shards[:-1]} == {100_000} and 0 < len(shards[-1]) <= 100_000
    manifest = json.loads((tmp_path / "d/manifest.json").read_text())
    names = [shard["name"] for shard in manifest["shards"]]
    assert names[:2] == ["text_val_000000.bin", "text_train_000001.bin"]
    whole = dict(tokenizer="gpt2", vocab_size=50257, eot=50256)
    assert whole.items() <= manifest.items()
    assert np.array_equal(np.load(tmp_path / "d/token_bytes.npy"), tok.token_bytes())
    verify(tmp_path / "d")
    files = {path.name for path in (tmp_path / "d").iterdir()}
    assert files == {"manifest.json", "token_bytes.npy", "run.lock", *names}


def test_a_finished_folder_is_left_alone_and_other_settings_are_refused(tmp_path):
    settings = dict(dataset=JSON, tokenizer="bytes", max_tokens=1_000)
    prepare(tmp_path / "d", **settings)
    before = contents(tmp_path / "d")
    prepare(tmp_path / "d", **settings)
    for changes in (dict(tokenizer="chars"), dict(shuffle_seed=0), dict(dataset=ASYNCIO)):
        other = settings | changes
        error = refused(UserError, f"{[*changes][0]}=", prepare, tmp_path / "d", **other)
        assert error.exit_code == 2
        (tmp_path / "d/tokenizer.json").unlink(missing_ok=True)
    assert contents(tmp_path / "d") == before


def test_shuffle_is_numpys_permutation(tmp_path):
    texts = [f"document {i}" for i in range(300)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"body": text}) + "\n" for text in texts))
    settings = dict(tokenizer="bytes", text_key="body", shuffle_seed=5, val_tokens=0)
    prepare(tmp_path / "d", tmp_path / "a.jsonl", **settings)
    order = np.random.default_rng(5).permutation(300)
    _, train = rebuild([texts[i] for i in order], tokenizer.load("bytes"), 0)
    assert np.array_equal(shard_tokens(tmp_path / "d", "train")[0], train)
    names = [path.name for path in (tmp_path / "d").glob("*.bin")]
    assert names == ["a_train_000001.bin"], "no val shard"


def test_max_tokens_and_short_documents(tmp_path):
    prepare(tmp_path / "d", ASYNCIO, tokenizer="bytes", shard_tokens=40_000, max_tokens=100_001)
    sizes = [len(shard) for shard in shard_tokens(tmp_path / "d", "train")]
    assert sizes == [40_000, 40_000, 20_001]
    prepare(tmp_path / "long", ASYNCIO, tokenizer="bytes", min_document_tokens=9000, val_tokens=0)
    files = text_files.local_files(ASYNCIO, text_files.Tally())
    texts = [text for path in files if len(text := Path(path).read_text()) >= 9000]
    _, train = rebuild(texts, tokenizer.load("bytes"), 0)
    assert 0 < len(texts) < len(files)
    assert np.array_equal(shard_tokens(tmp_path / "long", "train")[0], train)


def test_characters_of_one_text_with_its_last_tenth_for_validation(tmp_path, monkeypatch):
    """A killed run goes on, and fineweb.py ends with a line of settings that train.py takes."""
    text = (STDLIB / "argparse.py").read_text() + "\U0001f642"
    (tmp_path / "input.txt").write_text(text)
    settings = dict(dataset=tmp_path / "input.txt", tokenizer="chars", shard_tokens=40_000)
    for count in (0, 2):
        with stopped_after(count):
            prepare(tmp_path / "d", **settings)
    said = prepare(tmp_path / "d", **settings)
    manifest = json.loads((tmp_path / "d/manifest.json").read_text())
    tok, size = tokenizer.load(manifest["tokenizer"]), len(set(text)) + 2  # U+FFFD, the separator
    assert tok.vocab_size == size
    val, train = (np.concatenate(shard_tokens(tmp_path / "d", split)) for split in ("val", "train"))
    cut = len(text) * 9 // 10
    assert (tok.decode(val[1:]), tok.decode(train[1:])) == (text[cut:], text[:cut])
    assert val[0] == train[0] == tok.eot
    assert tok.decode(tok.encode("a\u00e9b<|endoftext|>")) == "a\ufffdb" + "<|endoftext|>"
    words = said.splitlines()[-1].split("train.py ")[1].split()
    monkeypatch.chdir(ROOT)
    cfg = configure(settings_of_a_run.Config, words)
    assert (cfg.vocab_size, cfg.n_embd, cfg.data_dir) == (size, 128, str(tmp_path / "d"))


def test_uint32_shards(tmp_path):
    path, last = tmp_path / "tokenizer.json", chr(0x11FFF)
    tokenizer.write_characters([map(chr, [*range(32, 0xD800), *range(0xE000, 0x12000)])], path)
    for i, text in enumerate(("ab", f"{last}cd")):
        (tmp_path / f"{i}.txt").write_text(text)
    prepare(tmp_path / "d", f"{tmp_path}/*.txt", tokenizer=str(path), val_tokens=1)
    tok = tokenizer.load(str(path))
    row = [tok.eot, *tok.encode(f"{last}cd")]
    assert np.fromfile(tmp_path / "d/text_train_000001.bin", "<i4", 3).tolist() == [20240801, 7, 4]
    assert shard_tokens(tmp_path / "d", "train")[0].tolist() == row and row[1] > 1 << 16
    x, y = TokenLoader(tmp_path / "d", "train", 1, 3, vocab_size=tok.vocab_size).next()
    assert (x.tolist(), y.tolist()) == ([row[:3]], [row[1:]]) and x.dtype == y.dtype == torch.int64


KILLS = dict(tokenizer="bytes", shard_tokens=250_000, val_tokens=30_000, shuffle_seed=3)


def killed_before(out, kill_at):
    """For ranks.attempt: runs `prepare`, killed before file operation number kill_at."""
    calls = iter(range(10**9))

    def counted(operation, *args):
        if next(calls) == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return operation(*args)

    os.replace, os.fsync = (functools.partial(counted, one) for one in (os.replace, os.fsync))
    prepare(out, **KILLS)


@pytest.fixture(scope="module")
def clean(tmp_path_factory):
    out = tmp_path_factory.mktemp("clean") / "d"
    prepare(out, **KILLS)
    return contents(out)


@pytest.mark.slow
@pytest.mark.fault(36)
def test_kill_9_leaves_no_trace(tmp_path, clean):
    killed = 0
    for kill_at in (2, 9, 5):
        done, _ = ranks.attempt(0, killed_before, tmp_path / "d", kill_at)
        killed += done.codes == [-signal.SIGKILL]
        for path in tmp_path.glob("d/*.bin"):
            assert path.read_bytes() == clean[path.name], "a shard in place is whole at all times"
    assert killed == 3
    prepare(tmp_path / "d", **KILLS)
    assert contents(tmp_path / "d") == clean


@pytest.mark.fault(25)
def test_disk_full(tmp_path):
    """The kernel's error, from a limit on the size of a file that is below a shard's."""
    settings, limits = KILLS | dict(shuffle_seed=None), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, limits[1]))
    try:
        refused(DataError, "text_train_000001.bin", prepare, tmp_path / "d", **settings)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert contents(tmp_path / "d").keys() == {"text_val_000000.bin", "manifest.json"}
    for name in ("d", "whole"):
        prepare(tmp_path / name, **settings)
    assert contents(tmp_path / "d") == contents(tmp_path / "whole")


@pytest.mark.fault(91)
def test_a_users_files_in_the_folder_are_kept(tmp_path):
    """Their names are like those of a write that was killed, which alone is removed."""
    (tmp_path / "a.txt").write_text("hello " * 400)
    (tmp_path / "d/dir.tmp").mkdir(parents=True)
    users = {".vim.tmp", "notes.tmp", ".a_train_000002.bin.3.tmp"}
    for name in (*users, ".a_train_000002.bin.3.unfinished"):
        (tmp_path / "d" / name).write_text("mine")
    prepare(tmp_path / "d", tmp_path / "a.txt", tokenizer="bytes")
    assert {path.name for path in (tmp_path / "d").glob("*.tmp")} == {*users, "dir.tmp"}
    assert not [*tmp_path.glob("d/.*.unfinished")]


def test_mistakes_in_the_settings_and_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, data in {
        "one.txt": b"only one document",
        "one.jsonl": b'{"text": "only one document"}',
        "folder/a.csv": b"1,2",
        "used/x_train_000001.bin": b"",
    }.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_bytes(data)
    one = dict(dataset="one.jsonl")
    for settings, code, word in [
        (dict(dataset="no/such/*.txt"), 2, "no text file"),
        (dict(dataset="./folder"), 2, ".csv"),
        (one, 3, "validation"),
        (dict(dataset="one.txt", val_tokens=9), 2, "last tenth"),
        (one | dict(out="used"), 2, "x_train_000001.bin"),
        (one | dict(out="/proc/x"), 2, "out_dir"),
        (dict(shard_tokens=0, val_tokens=-1), 2, "shard_tokens=0.*val_tokens=-1"),
        (one | dict(streaming=True), 2, "streaming=True"),
        (dict(pack=4096, shard_tokens=4000), 2, "at least 4096"),
        (one | dict(text_key="messages"), 2, "template"),
    ]:
        given = {"out": "d", "tokenizer": "bytes", **settings}
        assert refused(UserError, word, prepare, **given).exit_code == code
        shutil.rmtree("d", ignore_errors=True)
