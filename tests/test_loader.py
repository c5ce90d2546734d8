"""loader.py: damaged shards, and the order of rows against a naive numpy reference."""

import hashlib
import json
import os
import time

import numpy as np
import pytest
import torch
from conftest import one_line, read_rows, write_manifest, write_shard

from corpus import shards as shard_files
from corpus.loader import DataError, TokenLoader, aligned_starts
from corpus.prefetch import prefetched
from corpus.shards import split_of, verify
from system.files import digest

# ---- damaged files


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


@pytest.mark.fault(1, 2, 3, 4, 5)
def test_damaged_shards(data):
    folder, _ = data
    path = folder / "x_train_000002.bin"
    good = path.read_bytes()
    int32 = lambda *values: np.array(values, "<i4").tobytes()
    for damage, words in [
        (good[:-1], "version 1, 307 tokens and 1637 bytes, expected .* and 1638 bytes"),
        (good + b"\0", "version 1, 307 tokens and 1639 bytes, expected .* and 1638 bytes"),
        (good[:100], "found magic 20240520, .* and 100 bytes"),
        (b"", "found magic 0, .* 0 bytes"),
        (b"abcd" + good[4:], "magic 1684234849, .* llm.c's header.*; name it train.bin or val.bin"),
        (int32(20240520, 2) + good[8:], "version 2, .* expected llm.c's header"),
        (int32(20240801) + good[4:], "magic 20240801, version 1, .* expected llm.c's header"),
        (
            int32(20240801, 7, 307) + bytes(1012 + 4 * 307),
            "found 307 uint32 tokens, expected .* uint16",
        ),
        (good[:8] + int32(-5) + good[12:], "version 1, -5 tokens"),
        (good[:8] + int32(2**31 - 1) + good[12:], "expected .* and 4294968318 bytes"),
    ]:
        path.write_bytes(damage)
        with pytest.raises(DataError, match=f"x_train_000002.bin is damaged: .*{words}") as error:
            TokenLoader(folder, "train", 2, 8, vocab_size=257)
        assert one_line(error) and error.value.exit_code == 3


@pytest.mark.fault(6)
def test_token_beyond_the_vocabulary(data):
    folder, _ = data
    patch(folder / "x_train_000002.bin", 1024 + 2 * 100, np.uint16(60000).tobytes())
    loader = TokenLoader(folder, "train", 4, 16, vocab_size=257)
    with pytest.raises(DataError) as error:
        for _ in range(100):
            loader.next()
    assert "x_train_000002.bin: token 100 is 60000, not below vocab_size=257" in one_line(error)
    with pytest.raises(StopIteration):
        loader.next()  # and does not hang the second time
    loader.close()


@pytest.mark.fault(7, 69)
def test_other_shards_than_the_manifests(data):
    folder, _ = data
    verify(folder)
    path = folder / "x_train_000003.bin"
    patch(path, 1500, bytes([path.read_bytes()[1500] ^ 1]))
    TokenLoader(folder, "train", 4, 16, vocab_size=1000)
    with pytest.raises(DataError, match="x_train_000003.bin is damaged: found SHA-256"):
        verify(folder)
    path.unlink()
    with pytest.raises(DataError, match="x_train_000003.bin is damaged: found no file"):
        verify(folder)
    write_shard(folder / "x_val_000009.bin", range(99))
    for split, words in (
        ("train", "_train_000003.bin is missing"),
        ("val", "_val_000009.bin is not one of"),
    ):
        with pytest.raises(
            DataError, match=f"manifest.json lists the shards, and x{words}"
        ) as error:
            TokenLoader(folder, split, 4, 16)
        one_line(error)
    (folder / "manifest.json").write_text("{")
    with pytest.raises(DataError, match="manifest.json is damaged"):
        verify(folder)


def test_the_last_word_before_the_number_is_the_split():
    assert (
        split_of("my_train_val_000000.bin") == "val"
        and split_of("a_val_train_000001.bin") == "train"
    )
    assert split_of("tiny_shakespeare_train.bin") == "train"  # llm.c's
    assert split_of("train.bin") is split_of("some_training_000001.bin") is None


def test_npy_shards_of_build_nanogpt(data, tmp_path):
    _, stream = data
    np.save(tmp_path / "edufineweb_train_000001.npy", stream[:500].astype(np.uint16))
    np.save(tmp_path / "edufineweb_train_000002.npy", stream[500:].astype(np.uint16))
    np.save(tmp_path / "edufineweb_val_000000.npy", stream[:100].astype(np.uint16))
    loader = TokenLoader(tmp_path, "train", 1, 32)
    assert np.array_equal(read_rows(loader, 25)[:, :-1].ravel(), stream[:800])
    loader.close()  # its thread would go on reading the files that change below
    assert TokenLoader(tmp_path, "val", 1, 32).tokens == 100
    second = tmp_path / "edufineweb_train_000002.npy"
    good = second.read_bytes()
    for content in (
        good[:-2],
        good + b"x",
        b"",
        np.zeros((2, 5), np.uint16),
        stream,
        np.array([object()]),
    ):
        second.write_bytes(content) if isinstance(content, bytes) else np.save(second, content)
        with pytest.raises(DataError, match="edufineweb_train_000002.npy is damaged"):
            TokenLoader(tmp_path, "train", 1, 32)


@pytest.mark.fault(8)
def test_no_data(data, tmp_path):
    folder, _ = data
    nothing = "no such folder: .*absent; make the data with python fineweb.py"
    for folder_, T, vocab_size, batch_tokens, words in [
        (tmp_path / "absent", 16, 257, 0, nothing),
        (__file__, 16, 257, 0, "is a file, not a folder of shards; make one with .* --dataset="),
        (
            folder,
            16,
            257,
            4096,
            "has 1,000 tokens, expected 4,096 for a global batch.* --batch_tokens",
        ),
        (folder, 16, 100, 0, "vocab_size=100 is below the tokenizer's; try --vocab_size=257"),
        (folder, 1000, 257, 0, "has 1,000 tokens, .* each folder 1,001 for a row; .* --block_size"),
    ]:
        with pytest.raises(DataError, match=words):
            TokenLoader(folder_, "train", 4, T, batch_tokens=batch_tokens, vocab_size=vocab_size)


@pytest.mark.fault(10)
def test_nanogpt_files(data, tmp_path):
    _, stream = data
    stream.astype("<u2").tofile(tmp_path / "train.bin")
    loader = TokenLoader(tmp_path, "train", 2, 8)
    assert loader.next()[0].flatten().tolist() == stream[:16].tolist()
    assert loader.tokenizer is None and loader.token_bytes is None
    loader.close()
    with pytest.raises(
        DataError, match=r"holds no val split \(.* or val.bin\); make one, .*: --eval_interval=0"
    ):
        TokenLoader(tmp_path, "val", 2, 8)
    stream[:203].astype("<u2").tofile(tmp_path / "val.bin")
    assert TokenLoader(tmp_path, "val", 2, 8).tokens == 203
    for content in (b"x" * 2001, b""):
        (tmp_path / "train.bin").write_bytes(content)
        with pytest.raises(
            DataError, match="train.bin is damaged: ValueError: .*(empty file|multiple)"
        ):
            TokenLoader(tmp_path, "train", 2, 8)
    write_shard(tmp_path / "x_train_000001.bin", stream[:50])
    with pytest.raises(
        DataError, match="holds train.bin and x_train_000001.bin; keep one kind"
    ) as error:
        TokenLoader(tmp_path, "train", 2, 8)
    assert one_line(error)


# ---- the order


def naive_starts(stream, T, align):
    """First tokens of the rows of one epoch, one by one."""
    n, p, starts = len(stream), 0, []
    while p < n:
        starts.append(p)
        inside = [q for q in range(p + 1, p + T + 1) if q == n or (q < n and stream[q] == 256)]
        p = inside[-1] if align and inside else p + T
    return starts


def naive_rows(stream, T, seed=None, align=False):
    """Yields all rows of T+1 tokens, epoch after epoch; shuffled ones begin elsewhere in each."""
    starts, epoch = naive_starts(stream, T, align), 0
    while True:
        order, shift = range(len(starts)), 0
        if seed is not None:
            order = np.random.default_rng((seed, epoch)).permutation(len(starts))
            shift = 0 if align else epoch * round(0.382 * T) % T
        for first in (starts[w] + shift for w in order):
            yield np.take(stream, range(first, first + T + 1), mode="wrap")
        epoch += 1


def take(rows, n):
    return np.stack([next(rows) for _ in range(n)])


def test_aligned_rows_begin_at_documents(data):
    folder, stream = data
    rng = np.random.default_rng(1)
    for _ in range(200):  # the vectorised starts against naive_starts, on streams of all kinds
        n, T = rng.integers(2, 120), rng.integers(1, 40)
        stream = np.where(rng.random(n) < rng.choice([0, 0.02, 0.2, 1]), 256, 0)
        starts = aligned_starts(np.flatnonzero(stream == 256), n, T)
        assert starts.tolist() == naive_starts(stream, T, True)
        seen = np.unique((starts[:, None] + np.arange(1, T + 1)) % n)
        assert len(seen) == n, "every token is a target at least once"
    (folder / "manifest.json").unlink()
    with pytest.raises(DataError, match="align_documents"):
        TokenLoader(folder, "train", 3, 16, align=True)


ORDERS = [{}, {"align": True}, {"shuffle_seed": 3}, {"shuffle_seed": 3, "align": True}]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("T", [7, 16, 999])
def test_a_global_batch_is_the_naive_one_for_any_ranks_and_batch_size(data, order, T):
    folder, stream = data
    expected = take(
        naive_rows(stream, T, order.get("shuffle_seed"), order.get("align", False)), 24 * 8
    )
    for world, B in [(1, 24), (1, 4), (2, 12), (2, 3), (3, 2), (8, 1)]:
        loaders = [
            TokenLoader(folder, "train", B, T, rank, world, 257, **order) for rank in range(world)
        ]
        steps = 24 * 8 // (B * world)
        rows = np.stack(
            [read_rows(loader, steps).reshape(steps, B, T + 1) for loader in loaders], 1
        )
        assert np.array_equal(rows.reshape(-1, T + 1), expected)
        for loader in loaders:
            assert loader.state_dict()["rows"] == 24 * 8 and loader.tokens == 1000
            loader.close()


@pytest.mark.parametrize("order", ORDERS)
def test_resume_is_exact_on_other_ranks_too(data, order):
    first = TokenLoader(data[0], "train", 6, 16, **order)
    read_rows(first, 11)
    time.sleep(0.05)  # the thread is ahead by now, and the state must not be
    state = json.loads(json.dumps(first.state_dict()))
    expected = read_rows(first, 20)
    first.close()
    for world, B in [(1, 6), (2, 3), (3, 2), (1, 1)]:
        rows = []
        for rank in range(world):
            loader = TokenLoader(data[0], "train", B, 16, rank, world, **order)
            read_rows(loader, 2)  # a loader in use can be set back as well
            loader.load_state_dict(state)
            rows.append(read_rows(loader, 120 // (B * world)).reshape(-1, B, 17))
            loader.close()
        assert np.array_equal(np.stack(rows, 1).reshape(-1, 17), expected)


@pytest.mark.fault(11)
def test_resume_on_other_data(data):
    folder, stream = data
    state = TokenLoader(folder, "train", 6, 16).state_dict()
    with pytest.raises(DataError, match="shuffle_seed 1, not None"):
        TokenLoader(folder, "train", 6, 16, shuffle_seed=1).load_state_dict(state)
    write_shard(folder / "x_train_000004.bin", [256, 1, 2])
    (folder / "manifest.json").unlink()
    loader = TokenLoader(folder, "train", 6, 16)
    with pytest.raises(DataError) as error:
        loader.load_state_dict({**state, "rows": 12})
    assert "tokens 1003, not 1000" in one_line(error) and "--allow_data_change" in str(error.value)
    loader.close()
    loader = TokenLoader(folder, "train", 6, 16, allow_data_change=True)
    loader.load_state_dict({**state, "rows": 12})
    assert np.array_equal(read_rows(loader, 1)[0], stream[12 * 16 : 13 * 16 + 1])
    loader.close()


def resume(folder, state, rows=40, change=False, **order):
    """(warnings, rows read next) of a loader that goes on at a state after so many rows."""
    T = order.pop("T", 16)
    loader = TokenLoader(folder, "train", 5, T, allow_data_change=change, **order)
    try:
        loader.load_state_dict({**state, "rows": rows})
        return loader.warnings, read_rows(loader, 1)
    finally:
        loader.close()


@pytest.mark.fault(102)
@pytest.mark.parametrize("split", ["train", "val"])
def test_a_pipe_is_no_shard(data, split):
    folder, _ = data
    path = sorted(folder.glob(f"*_{split}_*"))[0]
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(DataError, match=f"{path} is a folder, a pipe or a device; expected a file"):
        TokenLoader(folder, split, 5, 16)
    if split == "val":
        TokenLoader(folder, "train", 5, 16).close()


@pytest.mark.fault(89)
@pytest.mark.parametrize("listed", [True, False])
def test_other_tokens_of_the_same_names_and_lengths_are_refused(data, listed):
    """Two shards swapped, a text reordered, another validation shard; a copy is the same data."""
    folder, stream = data
    paths = sorted(folder.glob("*_train_*"))
    if not listed:
        (folder / "manifest.json").unlink()
    write_shard(paths[1], stream[:333])
    write_shard(paths[0], stream[::-1][:333])
    loader = TokenLoader(folder, "train", 5, 16)
    state = loader.state_dict()
    loader.close()
    kept = {path: path.read_bytes() for path in folder.iterdir()}
    resume(folder, state)

    def swap():
        for a, b in ((paths[0], paths[1]), (paths[1], paths[0])):
            a.write_bytes(kept[b])

    changes = {
        "fingerprint": [swap, lambda: write_shard(paths[2], np.roll(stream[640:], 7))],
        "validation": [lambda: write_shard(folder / "x_val_000000.bin", stream[200:403])],
    }
    if listed:  # another digest in the manifest: what it was made of is not what is there now
        manifest = (folder / "manifest.json").read_text()
        other = manifest.replace(digest(folder / "x_val_000000.bin")[1], "0" * 64)
        changes["validation"] = [lambda: (folder / "manifest.json").write_text(other)]
    for name, ways in changes.items():
        for change in ways:
            change()
            with pytest.raises(
                DataError, match=f"is not the data of the checkpoint: {name} 2:.*, not 2:"
            ):
                resume(folder, state)
            assert f"({name} 2:" in resume(folder, state, change=True)[0][0]
            for path, content in kept.items():
                path.write_bytes(content)
    (folder / "x_val_000000.bin").unlink()
    (folder / "manifest.json").unlink(missing_ok=True)
    if not listed:
        resume(folder, state)  # of a run that no longer validates


def test_blocks_of_a_large_file_are_read_and_its_length(tmp_path, monkeypatch):
    monkeypatch.setattr(shard_files, "BLOCK_BYTES", 10)
    path, content = tmp_path / "a", bytes(range(250)) * 8
    path.write_bytes(content)
    before = shard_files.sampled_digest(path)
    reads = [number * 1990 // 15 for number in range(16)]
    assert reads[0] == 0 and reads[-1] + 10 == len(content)
    for at in (*reads, *(first + 9 for first in reads), 11):
        patch(path, at, b"\xff")
        assert (shard_files.sampled_digest(path) == before) == (at == 11)
        patch(path, at, content[at : at + 1])
    path.write_bytes(content + b"\0")
    assert shard_files.sampled_digest(path) != before


@pytest.mark.fault(89)
def test_a_checkpoint_of_an_earlier_version_is_compared_by_names_and_lengths(data):
    """As they were recorded before fingerprints had a version."""
    folder, stream = data
    listing = "x_train_000001.bin 333\nx_train_000002.bin 307\nx_train_000003.bin 360\n"
    state = dict(rows=0, tokens=1000, fingerprint=hashlib.sha256(listing.encode()).hexdigest()[:16])
    state |= dict(block_size=16, shuffle_seed=None, align_documents=False)
    resume(folder, state)
    (folder / "manifest.json").unlink()
    (folder / "x_train_000003.bin").rename(folder / "x_train_000004.bin")
    with pytest.raises(DataError, match="is not the data of the checkpoint: fingerprint"):
        resume(folder, state)


@pytest.mark.fault(108)
def test_a_change_of_the_order_says_what_is_read_again_and_what_is_left_out(data):
    folder, stream = data

    def read(rows, **order):  # the first rows of a run
        one = TokenLoader(folder, "train", 1, 16, **order)
        try:
            return [tuple(row) for row in read_rows(one, rows)]
        finally:
            one.close()

    own = TokenLoader(folder, "train", 5, 16, shuffle_seed=1)
    state = own.state_dict()
    own.close()
    epoch = own.folders[0].per_epoch
    [words], _ = resume(folder, state, change=True, shuffle_seed=2)
    seen, later = set(read(40, shuffle_seed=1)), read(epoch, shuffle_seed=2)[40:]
    again = sum(row in seen for row in later)
    assert 0 < again < len(later) == epoch - 40
    said = (
        f"goes on at row 40 of {epoch}; of the {epoch - 40} left in this epoch "
        f"{again} were read already"
    )
    assert said in words and "shuffle_seed 2, not 1" in words
    plain = {**state, "shuffle_seed": None}
    [words], rows = resume(folder, plain, change=True, T=20)
    assert "160 tokens are left out" in words and np.array_equal(rows[0], stream[800:821])
    [words], rows = resume(folder, plain, change=True, T=10)
    assert "240 tokens are read again" in words and np.array_equal(rows[0], stream[400:411])
    patch(folder / "x_train_000001.bin", 1600, b"ab")
    [words], _ = resume(folder, plain, change=True)
    assert words.endswith("rows before it are left out, and what was read before may come again")


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


def test_errors_of_the_thread_arrive_and_close_ends_it():
    made = []

    def items(last):
        for i in range(last):
            made.append(i)
            yield i
        raise DataError("from the thread")

    found = prefetched(items(1), 2)
    assert next(found) == 0
    with pytest.raises(DataError, match="from the thread"):
        next(found)
    assert list(prefetched(iter(range(5)), 2)) == list(range(5))
    found = prefetched(items(100), 2)
    assert next(found) == 0
    found.close()
    time.sleep(0.2)
    assert len(made) <= 1 + 4, "no more than the items that were under way"


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
        assert loader._batch([loader._read(0)] * 3).is_pinned()
        loader.close()
