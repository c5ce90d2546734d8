"""Writes shards of tokens for fineweb.py; a killed run continues where it was and ends with the same bytes.

A folder has progress.json, updated after each shard, and once all is written manifest.json with checksums.
"""

import contextlib
import fcntl
import io
import json
import os
import shutil
from pathlib import Path

import huggingface_hub
import numpy as np
from tqdm import tqdm

from configurator import UserError
from corpus import DataError, packing, told
from corpus.loader import prefetched
from corpus.shards import FORMATS, HEADER_BYTES, SHARD, mask_path, open_shard, split_of
from run import files

WRITTEN = SHARD | dict.fromkeys(("tokens", "documents", "bytes", "targets?"), files.count)
RECORD = {"settings": {}, "shards": [WRITTEN]}
PAIR = lambda v: type(v) is list and list(map(files.count, v)) == [True] * 2
POSITION = {"next": PAIR, "order?": lambda v: v == []}  # another one: packed by an earlier version


def written_here(name):
    """Whether fineweb.py writes a file of this name."""
    own = ("progress.json", "manifest.json", "tokenizer.json", "token_bytes.npy")
    return name in own or split_of(str(Path(name).with_suffix(".bin"))) is not None


@contextlib.contextmanager
def claim(out):
    """Makes the folder `out` and locks it against other writers; the lock ends with the process."""
    with told(f"out_dir={out} cannot be written, or another fineweb.py writes there"):
        out.mkdir(parents=True, exist_ok=True)
        lock = os.open(out, os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    try:
        yield
    finally:
        os.close(lock)


def write_shards(batches, encode, progress, tokenizer, short):
    """Writes the missing shards, named after `short`. batches: of documents from progress.position on."""
    given, parts, count, (first, done) = progress.settings, [], 0, progress.position
    val_tokens, pack, most = given["val_tokens"], given["pack"] or 1, given["max_tokens"] or float("inf")
    save = lambda *shard: write_shard(progress, tokenizer, short, *shard)
    room = lambda: min(given["shard_tokens"] // pack * pack, most - progress.total("tokens", "train"))
    sizes = dict(initial=progress.total("tokens"), total=most + val_tokens)  # tqdm takes inf for no total
    bar = tqdm(desc=short, **sizes, unit=" tokens", unit_scale=True, disable=None)
    with bar, contextlib.closing(prefetched(batches, 4)) as batches:
        rows = tokenized(batches, encode, first, given["min_document_tokens"] or 1)
        if val_tokens and not progress.shards:  # whole documents in the source's order, with pack too
            for number, row in rows:
                parts.append(row)
                count, place = count + len(row), (number + 1, 0)
                if count >= val_tokens:
                    break
            bar.update(count)
            parts = parts and save(parts, "val", place)
        if pack > 1:
            rows = packing.packed(rows, pack, progress.total("tokens", "train") - done)
        left = room()
        for number, row in rows if left else ():
            bar.update(len(row) - done)
            while done < len(row) and left:
                parts.append(row[done : done + left])
                done, left = done + len(parts[-1]), left - len(parts[-1])
                if not left:
                    parts, left = save(parts, "train", (number, done)), room()
            done = 0
            if not left:
                break
    if parts:
        save(parts, "train", (number, len(row)))
    val, train = (progress.total("tokens", split) for split in ("val", "train"))
    if not train or (left and val - val_tokens > train):  # the source's end, after a long first document
        found = f"{val:,} of {val + train:,} tokens are for validation, by val_tokens={val_tokens}"
        more = "lower it (0 for none), or give another --shuffle_seed or more documents (a text file is one)"
        raise DataError(f"{found} in whole documents from the front: remove {progress.out} and {more}")


def tokenized(batches, encode, number, least):
    """Yields (number, row) of the documents of at least `least` tokens, besides the separator before each."""
    for batch in batches:
        try:
            for row in encode(batch):
                if len(row) > least:
                    yield number, row
                number += 1
        except UserError as error:
            raise DataError(f"document {number + 1}: {error}") from None


def write_shard(progress, tokenizer, short, parts, split, position):
    """Writes parts of documents as a shard after which a run goes on at `position`; returns []."""
    index = len(progress.shards) + (progress.settings["val_tokens"] == 0)  # 0 is validation
    path = progress.out / f"{short}_{split}_{index:06d}.bin"
    tokens, header = np.concatenate(parts), np.zeros(HEADER_BYTES // 4, "<i4")
    if tokens.dtype.names:  # (token, loss)
        write(mask_path(path), np.packbits(tokens["loss"], bitorder="little"))
        tokens = tokens["token"]
    magic = next(magic for magic, (_, known) in FORMATS.items() if known == tokens.dtype)
    header[:3] = magic, FORMATS[magic][0], len(tokens)
    write(path, header.tobytes() + tokens.tobytes())
    progress.add(path.name, tokens, tokenizer, position)
    return []


class Progress:
    """The record of a run in its folder: progress.json while it lasts, then manifest.json."""

    def __init__(self, out, settings):
        self.out, self.settings, self.shards = out, settings, []
        self.position = 0, 0  # a document, and how many tokens from there on are written
        self.finished, record = (out / "manifest.json").exists(), out / "progress.json"
        path, form = (out / "manifest.json", RECORD) if self.finished else (record, RECORD | POSITION)
        advised = lambda words: DataError(f"{words}; remove the folder {out}")
        saved = files.read_json(path, advised, form) if path.exists() else None
        for leftover in [*files.leftovers(out, written_here), *[record] * self.finished]:
            leftover.unlink(missing_ok=True)
        old = saved["settings"] if saved else None
        if not saved or (old != settings and not saved["shards"]):
            if stray := sorted([*out.glob("*.bin"), *out.glob("*.mask")]):
                raise UserError(f"out_dir={out} holds {stray[0].name} and no record of it; use another")
            self._save()
            return
        for key in settings | old:
            was, now = (None if of.get(key) is False else of.get(key) for of in (old, settings))
            if was != now and (key in old or "sha256" not in key):  # older folders do not have all of them
                was = f"another {key}" if "sha" in key else f"{key}={was}, not {now}"
                raise UserError(f"out_dir={out} was begun with {was}; use another --out_dir, or remove it")
        self.shards, self.position = saved["shards"], saved.get("next", (0, 0))
        for path, size in ((out / shard["name"], shard["bytes"]) for shard in self.shards):
            if path.is_symlink() or not path.is_file() or path.stat().st_size != size:
                raise DataError(f"{path} is missing, a link, or not {size} bytes; restore it or remove {out}")

    def add(self, name, tokens, tokenizer, position):
        """Records a written shard and the position after it."""
        shard = {"name": name, "tokens": len(tokens), "documents": int((tokens == tokenizer.eot).sum())}
        shard["bytes"], shard["sha256"] = files.digest(self.out / name)
        if (mask := mask_path(self.out / name)).exists():
            bits = np.fromfile(mask, np.uint8)
            shard |= {"targets": int(np.bitwise_count(bits).sum()), "mask_sha256": files.digest(mask)[1]}
        self.shards.append(shard)
        self.position = position
        self._save()

    def _save(self):
        state = {"settings": self.settings, "shards": self.shards, "next": self.position}
        write(self.out / "progress.json", json.dumps(state, indent=1).encode())

    def total(self, key, split=None):
        """Sum of a figure over the shards, of one split or of all."""
        return sum(s.get(key, 0) for s in self.shards if split in (None, split_of(s["name"])))

    def finish(self, tokenizer):
        """Writes token_bytes.npy and then manifest.json, which declares the folder complete."""
        np.save(sizes := io.BytesIO(), tokenizer.token_bytes())
        write(path := self.out / "token_bytes.npy", sizes.getvalue())
        manifest = {"tokenizer": tokenizer.name, "vocab_size": tokenizer.vocab_size, "eot": tokenizer.eot}
        manifest |= {"dtype": tokenizer.dtype.name, "token_bytes_sha256": files.digest(path)[1]}
        manifest |= {key: self.total(key) for key in ("documents", "tokens")}
        manifest |= {"settings": self.settings, "shards": self.shards}
        write(self.out / "manifest.json", (json.dumps(manifest, indent=1) + "\n").encode())
        (self.out / "progress.json").unlink()


def write(path, data):
    """files.write_atomic; on a full disk, for example, a DataError that says how much room is needed."""
    room = f"{memoryview(data).nbytes:,} bytes to write, {shutil.disk_usage(path.parent).free:,} free"
    with told(f"{path}: {room}", DataError, "; make room", again=True):
        files.write_atomic(path, data)


def fetch_shards(name, revision, max_shards, progress, tokenizer):
    """Downloads the missing shards of `name`, a hub dataset that is tokenized already."""
    hub = dict(repo_type="dataset", revision=revision)
    with told(f"dataset={name} cannot be read", DataError, again=True):
        listed = sorted(huggingface_hub.HfApi().list_repo_files(name, **hub))
        val, training = ([f for f in listed if "/" not in f and split_of(f) == s] for s in ("val", "train"))
        if not training:
            raise DataError(f"dataset={name} holds no *_train_000001.bin; for texts, without --shards")
        names = (val + training[:max_shards])[len(progress.shards) :]
        for file in tqdm(names, desc=name, unit=" shards", disable=None):
            files.patiently(huggingface_hub.hf_hub_download, name, file, local_dir=progress.out, **hub)
            tokens = open_shard(path := progress.out / file)
            if tokens.dtype != tokenizer.dtype or tokens.max() >= tokenizer.vocab_size:
                raise DataError(f"{path} holds other ids than {tokenizer.name}'s; name their --tokenizer")
            progress.add(file, tokens, tokenizer, (0, 0))
