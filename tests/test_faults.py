"""Damaged and foreign files: what a run reads is what it expects, or is refused in one line."""

import contextlib
import copy
import json
import math
import os
import random
import shutil
import signal
import threading
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import ranks
import saved
import test_fineweb
import test_signals
import torch
from compare import CPU, repeated
from conftest import flags, load_checkpoint, losses, one_line, read_log, save_model, write_shard

import optim
import sample
import train
from configurator import configure
from corpus import chat, tokenizer, writer
from corpus.loader import DataError, TokenLoader
from corpus.shards import read_header, verify
from model import build
from scale import parallel
from settings import Config
from system import files
from system.errors import UserError

SMALL = dict(vocab_size=257, vocab_multiple=1, n_layer=1, n_head=2, n_embd=16, block_size=8)
MANY = [40, repeated(1400)]
JUNK = [None, True, -1, 1.5, "", "../x", "7", [], {}, [[1]], {"a": 1}]
JUNK += [1 << 70, -(1 << 70), math.inf, math.nan]
BAD_LINES = {"number": b'{"text": 5}', "null": b'{"text": null}', "list": b'{"text": ["a"]}'}
BAD_LINES |= {"missing": b'{"body": "a"}', "broken": b'{"text": "tw'}
BAD_LINES |= {"surrogate": b'{"text": "a \\ud800 b"}', "bytes": b'{"text": "a \xff b"}'}


def shards(folder, **settings):
    """Shards of 400 short documents in jsonl, as fineweb.py makes them; returns what it prints."""
    source = folder.parent / "documents.jsonl"
    if not source.exists():
        lines = [json.dumps({"text": f"document {i} " * (i % 9 + 1)}) for i in range(400)]
        source.write_text("\n".join(lines))
    settings = dict(tokenizer="bytes", shard_tokens=6_000, val_tokens=500) | settings
    return test_fineweb.prepare(folder, source, **settings)


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


def mutated(value, rng):
    """(a copy of `value` with another type, a missing, renamed or doubled value, where)."""
    value, at = [copy.deepcopy(value)], (0, *rng.choice(list(places(value))))
    *way, key = at
    inside = value
    for step in way:
        inside = inside[step]
    how = rng.choice(["junk", "junk", "drop", "rename", "double"]) if way else "junk"
    if how == "rename" and isinstance(inside, dict):
        inside[f"{key}x"] = inside.pop(key)
    elif how == "double" and isinstance(inside, list):
        inside.append(inside[key])
    elif how == "drop":
        del inside[key]
    else:
        inside[key] = rng.choice(
            [v for v in JUNK if type(v) is not type(inside[key]) or v in (-1, 1 << 70)]
        )
    return value[0], at[1:]


def survey(value, write, read, count, seed, legal=lambda at, value: False):
    """Writes and reads `count` mutations; returns how many were refused.

    read() returns all that a reader takes from the file. A mutation that is accepted must leave
    that, unless legal(path, mutated value) says that the file is another right one.
    """
    rng, refused = random.Random(seed), 0
    write(value)
    expected = repr(read())
    signal.signal(signal.SIGALRM, lambda *_: pytest.fail("a reader hangs"))
    for _ in range(count):
        other, at = mutated(value, rng)
        signal.alarm(20)
        write(other)
        try:
            found = repr(read())
            assert found == expected or legal(at, other), (at, other, found, expected)
        except UserError as error:
            one_line(error)
            refused += 1
        finally:
            signal.alarm(0)
    return refused


@pytest.fixture(scope="module")
def resumable(tmp_path_factory):
    """A checkpoint that can be resumed, its model, its optimizer."""
    out = tmp_path_factory.mktemp("saved")
    cfg = Config(**SMALL, tokenizer="bytes")
    model = build(cfg, CPU, seed=1)
    optimizer = optim.make_optimizer(model, cfg)
    model(*torch.zeros(2, 1, 8, dtype=torch.long))[0].backward()
    optimizer.step()
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    position = {"rows": 12, "tokens": 100, "fingerprint": "f", "block_size": 8}
    loader = SimpleNamespace(state_dict=lambda: position)
    own = {"counts": [1, 2.0, None, (torch.ones(3), True)]}
    state = train.State(model, optimizer, scaler, loader, 7, 96, own=own)
    saved.saver(parallel.World(0, 1, CPU), out, 2).save(state, config=asdict(cfg))
    return saved.find(out), model, cfg


def resumed(folder, model, cfg):
    """All that a run takes from a checkpoint."""
    optimizer, scaler = optim.make_optimizer(model, cfg), torch.amp.GradScaler("cpu", enabled=False)
    position = []
    loader = SimpleNamespace(
        state_dict=dict, load_state_dict=lambda state: position.append(state.get("rows"))
    )
    state = train.State(model, optimizer, scaler, loader, own={"counts": []})
    warnings, best = saved.resume(folder, state, cfg)
    names = {p: name for name, p in model.named_parameters()}
    found = dict(model.named_parameters())
    for p, states in optimizer.state.items():
        found |= {f"{names[p]}.{kind}": t for kind, t in states.items()}
    sums = {
        name: t.double().sum().item() for name, t in sorted(found.items()) if torch.is_tensor(t)
    }
    whole = state.evaluated == state.step
    return sums, position, warnings, whole, best, repr(state.own)


@pytest.mark.fault(54)
@pytest.mark.parametrize("count", MANY)
def test_mutations_of_a_checkpoints_manifest(resumable, tmp_path, count):
    kept, model, cfg = resumable
    folder = shutil.copytree(kept, tmp_path / kept.name)
    path = folder / "manifest.json"

    def write(other):
        path.write_text(json.dumps(other))

    value = json.loads(path.read_text())
    assert survey(value, write, lambda: resumed(folder, model, cfg), count, 1) > 0.1 * count


@pytest.mark.fault(54)
@pytest.mark.parametrize("count", MANY)
def test_mutations_of_a_data_folders_manifest_and_progress(tmp_path, count):
    shards(tmp_path / "d")
    folder, path = tmp_path / "d", tmp_path / "d/manifest.json"
    manifest = json.loads(path.read_text())

    def read():
        loader = TokenLoader(folder, "train", 1, 16, vocab_size=257)
        verify(folder)
        digests = [shard["sha256"] for shard in json.loads(path.read_text()).get("shards", ())]
        return loader.tokenizer, loader.eot, loader.tokens, loader.warnings, len(set(digests))

    write = lambda other: path.write_text(json.dumps(other))
    absent = lambda at, value: (
        at[-1] in value.get("shards", ()) or at[:1] in (("shards",), ("tokenizer",))
    )
    assert survey(manifest, write, read, count, 3, absent) > 0.25 * count

    settings = manifest["settings"]
    progress = manifest | {"next": dict(document=400, tokens=0)}

    def read_progress():
        found = writer.Progress(folder, settings, None)
        names = [s["name"] for s in found.shards]
        return found.position, found.total("tokens"), names

    # shards, which are written again
    fewer = lambda at, value: at[:1] == ("shards",) and len(at) < 3
    assert survey(progress, write, read_progress, count, 4, fewer) > 0.25 * count


@pytest.mark.fault(1, 54)
@pytest.mark.parametrize("count", MANY)
def test_mutations_of_a_shards_header(tmp_path, count):
    rng, path = random.Random(5), write_shard(tmp_path / "a_train_000001.bin", range(50))
    good = path.read_bytes()
    for _ in range(count):
        data = bytearray(good)
        data[rng.randrange(12)] ^= rng.randrange(1, 256)
        path.write_bytes(data[: rng.randrange(len(data))] if rng.random() < 0.3 else data)
        with pytest.raises(DataError) as error:
            read_header(path)
        one_line(error)


@pytest.mark.fault(55)
def test_flips_in_token_bytes(tmp_path):
    shards(tmp_path / "d")
    path, rng = tmp_path / "d/token_bytes.npy", random.Random(1)
    good = path.read_bytes()
    for _ in range(100):
        data = bytearray(good)
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(data[: rng.randrange(len(data))] if rng.random() < 0.2 else data)
        with pytest.raises(DataError, match="token_bytes.npy") as error:
            TokenLoader(tmp_path / "d", "train", 1, 16)
        one_line(error)


@pytest.mark.fault(53)
@pytest.mark.parametrize("name", ["../x_train_000001.bin", "/{outside}", "link_train_000001.bin"])
def test_nothing_outside_a_folder_is_touched(tmp_path, name):
    """A link to a shard of the right digest is read, as in a hub's cache; it is not written to."""
    outside = write_shard(tmp_path / "x_train_000001.bin", range(50))
    before, folder = outside.read_bytes(), tmp_path / "d"
    shards(folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    name = name.format(outside=str(outside).lstrip("/"))
    (folder / "link_train_000001.bin").symlink_to(outside)
    manifest["shards"][1] |= {"name": name, "tokens": 50, "bytes": len(before)}
    manifest["shards"][1]["sha256"] = files.digest(outside)[1]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    refused = pytest.raises(DataError, match="is damaged")
    with contextlib.nullcontext() if name.startswith("link") else refused:
        verify(folder)
    settings = manifest["settings"] | {"val_tokens": 10**9}
    progress = manifest | {"settings": settings, "next": dict(document=9, tokens=0)}
    (folder / "manifest.json").write_text(json.dumps(progress))
    with contextlib.nullcontext() if name.startswith("link") else refused:
        shards(folder, val_tokens=10**9)  # too few documents
    assert outside.read_bytes() == before


@pytest.mark.parametrize("bad", BAD_LINES)
def test_bad_lines_are_named_or_left_out_and_counted(tmp_path, bad, capsys):
    good = [json.dumps({"text": f"line {i}"}).encode() for i in range(20)]
    text = b"\n".join([*good[:9], b"", *good[9:15], BAD_LINES[bad], *good[15:], b""])
    name = "a.jsonl"
    if bad == "list":
        zstandard = pytest.importorskip("zstandard")
        text, name = zstandard.compress(text), "a.jsonl.zst"
    (tmp_path / name).write_bytes(text)
    (tmp_path / "good.jsonl").write_bytes(b"\n".join(good))
    said = dict(tokenizer="bytes", val_tokens=20)
    with pytest.raises(DataError, match=r"a\.jsonl(\.zst)?:17: .*--skip_bad_documents") as error:
        test_fineweb.prepare(tmp_path / "d", tmp_path / name, **said)
    one_line(error)
    left = test_fineweb.prepare(tmp_path / "e", tmp_path / name, skip_bad_documents=True, **said)
    assert f"1 bad documents left out, the first: {tmp_path / name}:17" in left
    test_fineweb.prepare(tmp_path / "good", tmp_path / "good.jsonl", **said)
    tokens = lambda name: [t.tolist() for t in test_fineweb.shard_tokens(tmp_path / name, "train")]
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
    sample.main(
        configure(sample.Config, [f"--checkpoint={moved}", "--max_new_tokens=2", "--prompt=ab"])
    )
    assert capsys.readouterr().out.startswith("ab")


@pytest.mark.fault(97)
def test_what_a_strangers_links_and_manifest_name_is_not_copied_out(tmp_path, capsys):
    """But a hub's cache consists of links, into its own blobs/."""
    text = ["".join(map(chr, range(32, 127)))]
    folder, cache = tmp_path / "folder", tmp_path / "models--a/snapshots/1"
    secret, blob = tmp_path / "secret.json", tmp_path / "models--a/blobs/2"
    for path in (folder, cache, blob.parent):
        path.mkdir(parents=True)
    secret.write_text('{"key": "of another"}')
    blob.write_text('{"eos_token": "a"}')
    names = ("chat_template.jinja", "special_tokens_map.json", "tokenizer_config.json")
    for place, to in ((folder, secret), (cache, blob)):
        tokenizer.write_characters([text], place / "tokenizer.json")
        for name in names:
            (place / name).symlink_to(to)
    cfg = Config(**SMALL, tokenizer=str(folder))
    model = build(cfg, CPU, seed=1)
    saved = save_model(tmp_path / "run", model, cfg, 1)
    assert {*names} & {path.name for path in saved.iterdir()} == set()
    assert (saved / "tokenizer.json").exists()
    assert capsys.readouterr().err.count("is a link out of its folder") == 3
    assert tokenizer.load(str(folder)).special.keys() == {"<|endoftext|>"}
    assert chat.template_of(folder) is None
    saved = save_model(tmp_path / "other", model, Config(**SMALL, tokenizer=str(cache)), 1)
    assert all((saved / name).read_text() == blob.read_text() for name in names)


def train_until_killed(words, seconds):
    """For ranks.attempt: train.py's main; this process is killed after so long."""
    threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
    train.main(configure(Config, words))


@pytest.mark.fault(21)
@pytest.mark.parametrize("number, kills", [(0, 60), (2, 50)])
@pytest.mark.repeated
@pytest.mark.slow
def test_random_kills_of_training(data_dir, tmp_path, number, kills):
    """A run resumes after each kill; its losses equal, bit for bit, those of a run never killed."""
    rng = random.Random(number)
    settings = dict(
        max_steps=100_000, save_interval=2, keep_last=2, async_save=True, schedule="constant"
    )
    words = flags(data_dir, tmp_path / "cut", resume="auto", **settings)
    for _ in range(kills):
        done, _ = ranks.attempt(
            number, train_until_killed, words, rng.uniform(0.05, 1.0), timeout=60
        )
        assert all(code in (-signal.SIGKILL, 1) for code in done.codes), done.stderr
        if saved.folders(tmp_path / "cut"):
            saved.find(tmp_path / "cut")
    last, whole = max(losses(read_log(tmp_path / "cut"))), tmp_path / "whole"
    saved_at = load_checkpoint(saved.find(tmp_path / "cut"))[1]["step"]
    assert last > kills / 4 and last - saved_at <= 4
    assert not [folder for folder in (tmp_path / "cut").glob("step_*") if saved.problem(folder)]
    done = ranks.run(number, flags(data_dir, whole, **settings | {"max_steps": saved_at}))
    assert done.returncode == 0, done.stderr
    a, b = (losses(read_log(folder)) for folder in (tmp_path / "cut", whole))
    assert all(a[step] == b[step] for step in range(1, saved_at + 1))


def prepare_until_killed(out, seconds):
    threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
    shards(out)


@pytest.mark.fault(36)
@pytest.mark.repeated
@pytest.mark.slow
def test_random_kills_of_fineweb(tmp_path):
    shards(tmp_path / "whole")
    rng, whole, killed = random.Random(2), test_fineweb.contents(tmp_path / "whole"), 0
    for _ in range(40):
        done, _ = ranks.attempt(
            0, prepare_until_killed, tmp_path / "d", rng.uniform(0.05, 0.8), timeout=60
        )
        killed += done.codes == [-signal.SIGKILL]
        for path in (tmp_path / "d").glob("*.bin"):
            assert path.read_bytes() == whole[path.name]
        manifest = tmp_path / "d/manifest.json"
        if manifest.exists() and json.loads(manifest.read_text())["next"] is None:
            assert test_fineweb.contents(tmp_path / "d") == whole
            shutil.rmtree(tmp_path / "d")
    assert killed > 10
    shards(tmp_path / "d")
    assert test_fineweb.contents(tmp_path / "d") == whole


@pytest.mark.fault(47)
@pytest.mark.parametrize("time", [0, *map(repeated, range(1, 20))])
def test_an_error_after_ddp_ends_every_rank(data_dir, tmp_path, time):
    settings = dict(lr=1e30, warmup_steps=0, max_skipped_steps=0, save_interval=0)
    # then they are killed
    done = ranks.run(2, flags(data_dir, tmp_path / "run", **settings), grace=5)
    found = done.codes, done.stderr
    assert done.codes == [5, 5] and len(test_signals.error_lines(done)) == 1, found
