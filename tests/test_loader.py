"""loader.py: damaged shards, and the order of rows against a naive numpy reference."""

import json
import shutil
import time

import numpy as np
import pytest
import torch
from conftest import read_rows, write_manifest, write_shard
from test_fineweb import refused

from corpus import shards as shard_files
from corpus.loader import DataError, TokenLoader
from corpus.shards import verify
from system.files import digest


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
    write_manifest(paths)
    return tmp_path / "d", stream


def patch(path, offset, data):
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(data)


@pytest.mark.fault(1)
def test_damaged_shards(data):
    folder, _ = data
    path = folder / "x_train_000002.bin"
    good = path.read_bytes()
    int32 = lambda *values: np.array(values, "<i4").tobytes()
    for damage, words in [
        (good[:-1], "1637 bytes.* 1638"),
        (good + b"\0", "1639"),
        (good[:100], "100 bytes"),
        (b"abcd" + good[4:], "nanoGPT"),
        (int32(20240520, 2) + good[8:], "version 2"),
        (good[:8] + int32(-5) + good[12:], "-5"),
    ]:
        path.write_bytes(damage)
        words = f"x_train_000002.bin is damaged: .*{words}"
        assert refused(DataError, words, TokenLoader, folder, "train", 2, 8).exit_code == 3


@pytest.mark.fault(6)
def test_token_beyond_the_vocabulary(data):
    folder, _ = data
    patch(folder / "x_train_000002.bin", 1024 + 2 * 100, np.uint16(60000).tobytes())
    loader = TokenLoader(folder, "train", 4, 16, vocab_size=257)
    words = "x_train_000002.bin: token 100 is 60000, not below vocab_size=257"
    refused(DataError, words, read_rows, loader, 100)
    with pytest.raises(StopIteration):
        loader.next()  # and does not hang the second time
    loader.close()


@pytest.mark.fault(7)
def test_other_shards_than_the_manifests(data):
    folder, _ = data
    verify(folder)
    path = folder / "x_train_000003.bin"
    patch(path, 1500, bytes([path.read_bytes()[1500] ^ 1]))
    TokenLoader(folder, "train", 4, 16, vocab_size=1000)
    refused(DataError, "x_train_000003.bin is damaged", verify, folder)
    path.unlink()
    refused(DataError, "no file", verify, folder)
    write_shard(folder / "x_val_000009.bin", range(99))
    for split, word in (("train", "_train_000003.bin"), ("val", "_val_000009.bin")):
        refused(DataError, word, TokenLoader, folder, split, 4, 16)


def test_no_data(data, tmp_path):
    folder, _ = data
    for place, changes, words in [
        (tmp_path / "absent", {}, "no folder"),
        (__file__, {}, "no folder"),
        (folder, dict(batch_tokens=4096), "--batch_tokens"),
        (folder, dict(T=1000), "--block_size"),
    ]:
        options = dict(B=4, T=16, vocab_size=257) | changes
        refused(DataError, words, TokenLoader, place, "train", **options)


def test_nanogpt_files(data, tmp_path):
    _, stream = data
    stream.astype("<u2").tofile(tmp_path / "train.bin")
    loader = TokenLoader(tmp_path, "train", 2, 8)
    assert loader.next()[0].flatten().tolist() == stream[:16].tolist()
    assert loader.tokenizer is None and loader.token_bytes is None
    loader.close()
    refused(DataError, "--eval_interval=0", TokenLoader, tmp_path, "val", 2, 8)
    stream[:203].astype("<u2").tofile(tmp_path / "val.bin")
    assert TokenLoader(tmp_path, "val", 2, 8).tokens == 203
    for content in (b"x" * 2001, b"", stream.astype("<u4").tobytes()):
        (tmp_path / "train.bin").write_bytes(content)
        refused(DataError, "train.bin is damaged", TokenLoader, tmp_path, "train", 2, 8)
    write_shard(tmp_path / "x_train_000001.bin", stream[:50])
    refused(DataError, "keep one kind", TokenLoader, tmp_path, "train", 2, 8)


def naive_rows(stream, T, seed=None):
    """Yields all rows of T+1 tokens, epoch after epoch; shuffled ones begin elsewhere in each."""
    starts, epoch = range(0, len(stream), T), 0
    while True:
        order, shift = range(len(starts)), 0
        if seed is not None:
            order = np.random.default_rng((seed, epoch)).permutation(len(starts))
            shift = epoch * round(0.382 * T) % T
        for first in (starts[w] + shift for w in order):
            yield np.take(stream, range(first, first + T + 1), mode="wrap")
        epoch += 1


def take(rows, n):
    return np.stack([next(rows) for _ in range(n)])


orders = pytest.mark.parametrize("order", [{}, {"shuffle_seed": 3}])


def read_over_ranks(loaders, n, T):
    """The next n rows of a global batch's loaders, which are closed."""
    B = loaders[0].B
    steps = n // (B * len(loaders))
    parts = [read_rows(loader, steps).reshape(steps, B, T + 1) for loader in loaders]
    for loader in loaders:
        loader.close()
    return np.stack(parts, 1).reshape(-1, T + 1)


@orders
@pytest.mark.parametrize("T", [7, 16, 999])
def test_a_global_batch_is_the_naive_one_for_any_ranks_and_batch_size(data, order, T):
    folder, stream = data
    expected = take(naive_rows(stream, T, order.get("shuffle_seed")), 24 * 8)
    for world, B in [(1, 24), (2, 3), (3, 2), (8, 1)]:
        numbers = range(world)
        loaders = [TokenLoader(folder, "train", B, T, n, world, 257, **order) for n in numbers]
        assert np.array_equal(read_over_ranks(loaders, 24 * 8, T), expected)
        assert all(loader.state_dict()["rows"] == 24 * 8 for loader in loaders)


@orders
def test_resume_is_exact_on_other_ranks_too(data, order):
    first = TokenLoader(data[0], "train", 6, 16, **order)
    read_rows(first, 11)
    time.sleep(0.05)  # the thread is ahead by now, and the state must not be
    state = json.loads(json.dumps(first.state_dict()))
    expected = read_rows(first, 20)
    first.close()
    for world, B in [(2, 3), (1, 1)]:
        loaders = [TokenLoader(data[0], "train", B, 16, n, world, **order) for n in range(world)]
        for loader in loaders:
            read_rows(loader, 2)  # a loader in use can be set back as well
            loader.load_state_dict(state)
        assert np.array_equal(read_over_ranks(loaders, 120, 16), expected)


def resume(folder, state, change=False):
    """(warnings, rows read next) of a loader that goes on at a state."""
    loader = TokenLoader(folder, "train", 5, 16, allow_data_change=change)
    try:
        loader.load_state_dict(state)
        return loader.warnings, read_rows(loader, 1)
    finally:
        loader.close()


def state_after(folder):
    """The state of a loader that has read 12 rows."""
    loader = TokenLoader(folder, "train", 6, 16)
    read_rows(loader, 2)
    loader.close()
    return json.loads(json.dumps(loader.state_dict()))


def other_data(folder, state):
    """Asserts that a resume on a folder is refused, and with --allow_data_change is not."""
    refused(DataError, "not the data of the checkpoint.*--allow_data_change", resume, folder, state)
    warnings, rows = resume(folder, state, change=True)
    assert "is not the data of the checkpoint" in warnings[0]
    return rows


@pytest.mark.fault(11, 89)
@pytest.mark.parametrize("listed", [True, False])
def test_resume_on_other_data(data, tmp_path, listed):
    """Shards swapped or added, or another validation; a copy is the same data."""
    folder, stream = data
    a, b = stream[:333], stream[::-1][:333]
    write_shard(folder / "x_train_000002.bin", b)
    write_manifest(sorted(folder.glob("*.bin")))
    state = state_after(folder)
    swapped = {"x_train_000001": b, "x_train_000002": a}
    for shards in (swapped, {"x_train_000004": a}, {"x_val_000000": range(203)}):
        copy = shutil.copytree(folder, tmp_path / [*shards][0])
        resume(copy, state)
        for name, tokens in shards.items():
            write_shard(copy / f"{name}.bin", tokens)
        write_manifest(sorted(copy.glob("*.bin")))
        if not listed:
            (copy / "manifest.json").unlink()
        rows = other_data(copy, state)
        first = b if shards == swapped else a
        assert np.array_equal(rows[0], first[12 * 16 : 13 * 16 + 1])
    shuffled = TokenLoader(folder, "train", 5, 16, shuffle_seed=1)
    refused(DataError, "shuffle_seed", shuffled.load_state_dict, state)


@pytest.mark.fault(89)
def test_resume_on_another_separator_or_bytes_of_the_ids(data):
    folder, _ = data
    state, path = state_after(folder), folder / "manifest.json"
    manifest = json.loads(path.read_text())
    np.save(folder / "token_bytes.npy", np.full(257, 2, np.int32))
    sizes = dict(token_bytes_sha256=digest(folder / "token_bytes.npy")[1])
    for values in (dict(eot=255), sizes):
        path.write_text(json.dumps(manifest | values))
        other_data(folder, state)


@pytest.mark.parametrize("listed", [True, False])
def test_a_change_between_the_sampled_blocks_is_refused(data, listed, monkeypatch):
    monkeypatch.setattr(shard_files, "BLOCK_BYTES", 2)
    monkeypatch.setattr(shard_files, "BLOCKS", 4)
    folder, _ = data
    if not listed:
        (folder / "manifest.json").unlink()
    state = state_after(folder)
    sampled = lambda: shard_files.fingerprint([folder], shard_files.sampled_digest)
    before = sampled()
    patch(folder / "x_train_000002.bin", 1024 + 2 * 150, b"\x01\x00")
    assert sampled() == before
    refused(DataError, "whole_data", resume, folder, state)


@pytest.mark.parametrize("tokens, rows", [(1, 0), (64, 4), (100, 6), (10**9, 12)])
def test_validation_is_the_same_for_any_world_and_batch(data, tokens, rows):
    folder, stream = data
    expected = [stream[w * 16 : w * 16 + 17].tolist() for w in range(rows)]
    for world, B in [(1, 5), (2, 3), (4, 8)]:
        got, batches = [], set()
        for rank in range(world):
            loader = TokenLoader(folder, "val", B, 16, rank, world, vocab_size=257, shuffle_seed=1)
            if not rows:
                refused(DataError, "raise --eval_tokens", next, loader.eval_batches(tokens))
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


@pytest.mark.gpu
def test_on_a_gpu(data):
    folder, stream = data
    for device in ("cuda", torch.device("cuda", torch.cuda.device_count() - 1)):
        loader = TokenLoader(folder, "train", 3, 16, vocab_size=257, device=device, shuffle_seed=3)
        batches = [loader.next() for _ in range(40)]
        assert all(x.is_cuda and y.is_cuda for x, y in batches)
        rows = torch.cat([torch.cat([x, y[:, -1:]], 1) for x, y in batches]).cpu().numpy()
        assert np.array_equal(rows, take(naive_rows(stream, 16, 3), 120))
        assert loader._batch([loader._read(0)] * 3).is_pinned()
        loader.close()
