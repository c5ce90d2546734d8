"""Damaged and foreign files: what a run reads is what it expects, or is refused in one line."""

import copy
import functools
import json
import math
import operator
import random
import shutil

import pytest
import ranks
import test_signals
from compare import CPU, repeated
from conftest import flags, load_checkpoint, one_line, save_model, write_shard
from test_fineweb import prepare, refused, shard_tokens

import sample
from configurator import configure
from corpus import tokenizer
from corpus.loader import DataError, TokenLoader
from corpus.shards import verify
from model import build
from settings import Config
from system import files
from system.errors import UserError

SMALL = dict(vocab_size=257, vocab_multiple=1, n_layer=1, n_head=2, n_embd=16, block_size=8)
JUNK = [None, -1, "../x", [], {"a": 1}, 1 << 70, math.nan]
BAD_LINES = {"number": b'{"text": 5}', "missing": b'{"body": "a"}', "broken": b'{"text": "tw'}
BAD_LINES |= {"surrogate": b'{"text": "a \\ud800 b"}', "bytes": b'{"text": "a \xff b"}'}


def shards(folder, **settings):
    """Shards of 400 short documents in jsonl, as fineweb.py makes them; returns what it prints."""
    source = folder.parent / "documents.jsonl"
    if not source.exists():
        lines = [json.dumps({"text": f"document {i} " * (i % 9 + 1)}) for i in range(400)]
        source.write_text("\n".join(lines))
    settings = dict(tokenizer="bytes", shard_tokens=6_000, val_tokens=500) | settings
    return prepare(folder, source, **settings)


def places(value, at=()):
    """The path of every value inside `value`."""
    yield at
    inner = ()
    if isinstance(value, dict):
        inner = value.items()
    elif isinstance(value, list):
        inner = enumerate(value)
    for key, part in inner:
        yield from places(part, (*at, key))


def survey(value, write, read, legal=lambda at: False):
    """Reads a file in which each part in turn is of another type, or absent.

    Returns the share that was refused. read() returns all that a reader takes from the file. What
    is accepted must leave that, unless legal(path of the part) says that the file is a right one.
    """
    write(value)
    expected, errors = repr(read()), []
    for number, (*way, key) in enumerate([*places(value)][1:]):
        for absent in (False, True):
            other = copy.deepcopy(value)
            inside = functools.reduce(operator.getitem, way, other)
            inside[key] = JUNK[number % len(JUNK)]
            if absent:
                del inside[key]
            write(other)
            try:
                found = repr(read())
                assert found == expected or legal((*way, key)), (way, key, absent)
                errors.append(False)
            except UserError as error:
                one_line(error)
                errors.append(True)
    return sum(errors) / len(errors)


@pytest.mark.fault(54)
def test_mutations_of_a_checkpoints_manifest(tmp_path):
    cfg = Config(**SMALL, tokenizer="bytes")
    folder = save_model(tmp_path, build(cfg, CPU, seed=1), cfg)
    path = folder / "manifest.json"
    write = lambda other: path.write_text(json.dumps(other))
    read = lambda: load_checkpoint(folder)
    assert survey(json.loads(path.read_text()), write, read) > 0.5


@pytest.mark.fault(54)
def test_mutations_of_a_data_folders_manifest(tmp_path):
    shards(tmp_path / "d")
    folder, path = tmp_path / "d", tmp_path / "d/manifest.json"
    manifest = json.loads(path.read_text())
    write = lambda other: path.write_text(json.dumps(other))

    def read():
        loader = TokenLoader(folder, "train", 1, 16, vocab_size=257)
        verify(folder)
        digests = [shard["sha256"] for shard in json.loads(path.read_text()).get("shards", ())]
        return loader.tokenizer, loader.eot, loader.tokens, loader.warnings, len(set(digests))

    assert survey(manifest, write, read, lambda at: {*at} & {"shards", "tokenizer", "pack"}) > 0.25


@pytest.mark.fault(1, 54, 55)
@pytest.mark.parametrize("name, size", [("*_train_000001.bin", 12), ("token_bytes.npy", 10**9)])
def test_flips_cuts_and_more_of_headers_and_token_bytes(tmp_path, name, size):
    """size: bytes of the file of which each counts."""
    shards(tmp_path / "d")
    [path], rng = (tmp_path / "d").glob(name), random.Random(5)
    if size == 12:  # a file that the manifest tells nothing of
        (tmp_path / "d/manifest.json").unlink()
    good = path.read_bytes()
    for _ in range(40):
        data = bytearray(good)
        data[rng.randrange(min(size, len(data)))] ^= 1 << rng.randrange(8)
        cut, longer = data[: rng.randrange(len(data))], good + bytes(2)
        path.write_bytes(rng.choice([data, data, cut, longer]))
        error = refused(DataError, path.name, TokenLoader, tmp_path / "d", "train", 1, 16)
        assert error.exit_code == 3


@pytest.mark.fault(53, 88)
@pytest.mark.parametrize("name", ["../x_train_000001.bin", "link_train_000001.bin"])
def test_nothing_outside_a_half_made_folder_is_touched(tmp_path, name):
    """A link to a shard of the right digest is read, as in a hub's cache; it is not written to."""
    outside = write_shard(tmp_path / "x_train_000001.bin", range(50))
    before, folder = outside.read_bytes(), tmp_path / "d"
    shards(folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "link_train_000001.bin").symlink_to(outside)
    manifest["shards"][1] |= {"name": name, "tokens": 50, "bytes": len(before)}
    manifest["shards"][1]["sha256"] = files.digest(outside)[1]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    if name.startswith("link"):
        verify(folder)
    else:
        refused(DataError, "is damaged", verify, folder)
    settings = manifest["settings"] | {"val_tokens": 10**9}
    progress = manifest | {"settings": settings, "next": dict(document=9, tokens=0)}
    (folder / "manifest.json").write_text(json.dumps(progress))
    refused(DataError, "half made", TokenLoader, folder, "train", 1, 16)
    shards(folder, val_tokens=10**9)  # too few documents
    assert outside.read_bytes() == before


@pytest.mark.parametrize("bad", BAD_LINES)
def test_bad_lines_are_named_or_left_out_and_counted(tmp_path, bad, capsys):
    good = [json.dumps({"text": f"line {i}"}).encode() for i in range(20)]
    text = b"\n".join([*good[:9], b"", *good[9:15], BAD_LINES[bad], *good[15:], b""])
    name = "a.jsonl"
    if bad == "missing":
        zstandard = pytest.importorskip("zstandard")
        text, name = zstandard.compress(text), "a.jsonl.zst"
    (tmp_path / name).write_bytes(text)
    (tmp_path / "good.jsonl").write_bytes(b"\n".join(good))
    said = dict(tokenizer="bytes", val_tokens=20)
    words = r"a\.jsonl(\.zst)?:17: .*--skip_bad_documents"
    refused(DataError, words, prepare, tmp_path / "d", tmp_path / name, **said)
    left = prepare(tmp_path / "e", tmp_path / name, skip_bad_documents=True, **said)
    assert f"1 bad documents left out, the first: {tmp_path / name}:17" in left
    prepare(tmp_path / "good", tmp_path / "good.jsonl", **said)
    tokens = lambda name: [t.tolist() for t in shard_tokens(tmp_path / name, "train")]
    assert tokens("e") == tokens("good")


@pytest.mark.fault(62)
def test_a_checkpoint_carries_its_tokenizer(tmp_path, capsys):
    here, out = tmp_path / "here", tmp_path / "run"
    here.mkdir()
    tokenizer.write_characters([["".join(map(chr, range(32, 127)))]], here / "tokenizer.json")
    size = tokenizer.load(str(here / "tokenizer.json")).vocab_size
    (here / "chat_template.jinja").write_text("{{ messages }}")
    cfg = Config(**SMALL | {"vocab_size": size}, tokenizer=str(here))
    model = build(cfg, CPU, seed=1)
    moved = save_model(out, model, cfg, 2).rename(tmp_path / "step_00000002")
    shutil.rmtree(here)
    shutil.rmtree(out)
    manifest = json.loads((moved / "manifest.json").read_text())
    assert {"tokenizer.json", "chat_template.jinja"} <= manifest.keys()
    words = [f"--checkpoint={moved}", "--max_new_tokens=2", "--prompt=ab"]
    sample.main(configure(sample.Config, words))
    assert capsys.readouterr().out.startswith("ab")
    save_model(out, model, cfg, 3)
    assert "without a tokenizer" in capsys.readouterr().err


@pytest.mark.fault(97)
def test_what_a_strangers_links_name_is_not_copied_out(tmp_path):
    """But a hub's cache consists of links, into its own blobs/."""
    folder, cache = tmp_path / "folder", tmp_path / "models--a/snapshots/1"
    secret, blob = tmp_path / "secret.json", tmp_path / "models--a/blobs/2"
    for path in (folder, cache, blob.parent):
        path.mkdir(parents=True)
    secret.write_text('{"key": "of another"}')
    blob.write_text('{"eos_token": "a"}')
    for place, to, copied in ((folder, secret, False), (cache, blob, True)):
        tokenizer.write_characters([["abc"]], place / "tokenizer.json")
        (place / "tokenizer_config.json").symlink_to(to)
        cfg = Config(**SMALL, tokenizer=str(place))
        saved = save_model(tmp_path / f"run_{copied}", build(cfg, CPU, seed=1), cfg, 1)
        assert (saved / "tokenizer.json").exists()
        assert (saved / "tokenizer_config.json").exists() == copied


@pytest.mark.fault(47)
@pytest.mark.parametrize("time", [0, *map(repeated, range(1, 20))])
def test_an_error_after_ddp_ends_every_rank(data_dir, tmp_path, time):
    settings = dict(lr=1e30, warmup_steps=0, save_interval=0)
    # then they are killed
    done = ranks.run(2, flags(data_dir, tmp_path / "run", **settings), grace=5)
    found = done.codes, done.stderr
    assert done.codes == [5, 5] and len(test_signals.error_lines(done)) == 1, found
