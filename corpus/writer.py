"""Writes shards of tokens for fineweb.py; a killed run continues where it was and ends with the same bytes.

A folder holds the shards, progress.json while the run lasts, and manifest.json with checksums and token_bytes.npy once
everything is written. Each file is written atomically, and progress.json is updated after each shard.
"""

import contextlib
import fcntl
import io
import json
import math
import os
import shutil

import numpy as np
from tqdm import tqdm

from configurator import UserError
from corpus import packing
from corpus.loader import (
    FORMATS,
    HEADER_BYTES,
    SHARD,
    Ahead,
    DataError,
    begins,
    mask_path,
    open_shard,
    read_manifest,
    split_of,
)
from run import files

WRITTEN = SHARD | {
    "tokens": files.count,
    "documents": files.count,
    "text_bytes": files.count,
    "bytes": files.count,
}
WRITTEN |= {"targets?": files.count}
# What a record has besides the settings, in words; and what follows from a setting, or from its files.
DERIVED = dict.fromkeys(("files", "files_sha256"), "other files")
DERIVED |= dict.fromkeys(("vocab_size", "eot"), "another vocabulary")
DERIVED |= {"chat_sha256": "another chat template or special tokens"}
FOLLOW = {"tokenizer": ("vocab_size", "eot", "chat_sha256", "val_tokens"), "text_key": ("chat_sha256",)}
FOLLOW |= {"shuffle_seed": ("streaming",)} | dict.fromkeys(("shard_tokens", "files_sha256"), ("val_tokens",))
RECORD = {"settings": {}, "shards": [WRITTEN]}
RECORDS = {
    "manifest.json": RECORD,
    "progress.json": RECORD | {"next": [files.count], "order?": [(files.count, None)]},
}


@contextlib.contextmanager
def claim(out):
    """Makes the folder `out` and locks it against other writers; the lock ends with the process, so none is stale."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        probe = out / "probe.tmp"
        probe.touch()
        probe.unlink()
        lock = os.open(out, os.O_RDONLY)
    except OSError as error:
        raise UserError(f"out_dir={out} cannot be written: {error.strerror}") from None
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"out_dir={out}: another fineweb.py is writing there; wait for it, or stop it"
            ) from None
        yield
    finally:
        os.close(lock)


def write_shards(batches, encode, progress, tokenizer, short):
    """Writes the missing shards, named after `short`.

    batches: yields (documents from progress.document on, share of the source's bytes that they end at or None).
    encode: yields a row of tokens for each document of a list: text_rows, or Dialogues.rows, which says what has loss.
    """
    writer, pack = ShardWriter(progress, tokenizer, short), progress.settings.get("pack")
    begun, least = progress.total("tokens"), progress.settings.get("min_document_tokens", 1)
    bar = tqdm(desc=short, initial=begun, unit=" tokens", unit_scale=True, disable=None)

    def expect(tokens, share):  # the bar's total, from the tokens in a share of the source
        total = min(begun + tokens / share if share else math.inf, writer.max_tokens + writer.val_tokens)
        bar.total = int(total) if total < math.inf else None

    with bar, contextlib.closing(Ahead(batches, 4)) as batches:
        rows = tokenized(batches, encode, progress.document, least, expect)
        if writer.val:  # validation documents keep their order, with pack too
            writer.take_all(rows, bar)
        if pack:
            rows = packing.Packer(rows, pack, progress.tokens, progress.order)
            writer.position = rows.position
        writer.take_all(rows, bar)
    writer.close(0)
    if not progress.total("tokens", "train"):
        found = progress.total("documents")
        progress.discard()
        raise DataError(
            f"{found} documents hold no more than val_tokens={writer.val_tokens}, so nothing is left to train on: "
            "lower --val_tokens (0 for none), or give more documents (a text file is one; `split -C 100k FILE` cuts it)"
        )


def tokenized(batches, encode, number, least, expect):
    """Yields (number, row) of the documents of at least `least` tokens, besides the separator before each.

    Calls expect(tokens so far, share of the source that they are) after each batch.
    """
    seen = 0
    for batch, share in batches:
        rows = encode(batch)
        for _ in batch:
            try:
                row = next(rows)
            except UserError as error:
                raise DataError(f"document {number + 1}: {error}") from None
            if len(row) > least:
                seen += len(row)
                yield number, row
            number += 1
        expect(seen, share)


def text_rows(tokenizer, texts):
    """Yields the tokens of each text after a separator."""
    for ids in tokenizer.encode_batch([text or "" for text in texts]):
        row = np.empty(len(ids) + 1, tokenizer.dtype)
        row[0], row[1:] = tokenizer.eot, ids
        yield row


class ShardWriter:
    """Collects tokens in a buffer and writes it as a shard when it is full. The first shard is validation."""

    def __init__(self, progress, tokenizer, short):
        self.progress, self.tokenizer, self.short = progress, tokenizer, short
        self.shard_tokens, self.val_tokens = (
            progress.settings["shard_tokens"],
            progress.settings["val_tokens"],
        )
        self.shard_tokens -= self.shard_tokens % progress.settings.get("pack", 1)
        self.number = progress.document - 1  # of the last document that was taken
        self.max_tokens = progress.settings["max_tokens"] or math.inf
        self._open()

    def _open(self):
        self.buffer, self.count, self.mask = bytearray(HEADER_BYTES), 0, bytearray()  # mask: a byte a token
        self.val = self.val_tokens > 0 and not self.progress.shards
        left = self.max_tokens - self.progress.total("tokens", "train")
        self.room, self.complete = min(self.shard_tokens, left), left <= 0 and not self.val

    def position(self, number, done):
        """Where a resumed run goes on after document `number`, cut after `done` tokens or whole (0); see Progress."""
        return (number, done, []) if done else (number + 1, 0, [])

    def take_all(self, rows, bar):
        """Takes documents until validation is full or there is nothing left to take; a cut one from its rest on."""
        val, done = self.val, self.progress.tokens
        if self.complete:
            return
        for number, row in rows:
            self.number = number
            if done > len(row):
                raise DataError(
                    f"document {number + 1} has {len(row)} tokens, {done} are written: the source changed"
                )
            bar.update(len(row) - done)
            while done < len(row) and not self.complete:
                done = self.take(row, done)
            done = 0
            if self.complete or self.val != val:
                return

    def take(self, row, done):
        """Takes as much of row[done:] as fits the shard (validation: all of it) and returns the new `done`."""
        end = len(row) if self.val else min(len(row), done + self.room - self.count)
        part = row[done:end]
        if part.dtype.names:  # (token, loss)
            self.mask += part["loss"].tobytes()
            part = part["token"]
        self.buffer += part.tobytes()
        self.count += end - done
        if self.count >= (self.val_tokens if self.val else self.room):
            self.close(end if end < len(row) else 0)
        return end

    def close(self, done):
        """Writes the buffer as a shard; `done`: tokens of the last document up to here, 0 if it is whole."""
        if self.count:
            index = len(self.progress.shards) + (self.val_tokens == 0)  # 0 is validation
            name = f"{self.short}_{'val' if self.val else 'train'}_{index:06d}.bin"
            magic = next(magic for magic, (_, dtype) in FORMATS.items() if dtype == self.tokenizer.dtype)
            header = np.array([magic, FORMATS[magic][0], self.count], "<i4").tobytes()
            self.buffer[: len(header)] = header
            if self.mask:
                bits = np.packbits(np.frombuffer(self.mask, bool), bitorder="little")
                write(mask_path(self.progress.out / name), bits.tobytes())
            write(self.progress.out / name, self.buffer)
            tokens = np.frombuffer(self.buffer, self.tokenizer.dtype, offset=HEADER_BYTES)
            self.progress.add(name, tokens, self.tokenizer, self.position(self.number, done))
        self._open()


def differences(old, new):
    """How two records of settings differ, in words, without what follows from other differences."""
    # both are recorded only where they are True, shards as the absence of the settings for texts
    old, new = ({"skip_bad_documents": False, "shards": "text_key" not in each} | each for each in (old, new))
    wrong = [k for k in old | new if old.get(k) != new.get(k)]
    wrong = next(
        ([k] for k in ("dataset", "shards") if k in wrong), wrong
    )  # all others may follow from these
    follow = [each for k in wrong for each in FOLLOW.get(k, ())]
    words = [DERIVED.get(k) or f"{k}={old.get(k)}, not {new.get(k)}" for k in wrong if k not in follow]
    return "; ".join(dict.fromkeys(words))


class Progress:
    """The record of a run in its folder: progress.json while it lasts, manifest.json once everything is written.

    document, tokens: the next shard begins in that document of the source, after that many of its tokens. With packed
    data `document` is the first one that is not completely written, and `order` holds the document that is cut (None if
    none is) and those after `document` that are written.
    """

    def __init__(self, out, settings):
        self.out, self.settings, self.shards, self.document, self.tokens, self.order = (
            out,
            settings,
            [],
            0,
            0,
            [],
        )
        saved = self.saved()
        self.finished = (out / "manifest.json").exists()
        for leftover in [*out.glob("*.tmp"), *([out / "progress.json"] if self.finished else [])]:
            leftover.unlink(missing_ok=True)
        old = saved["settings"] if saved else None
        if not saved or (old != settings and not saved["shards"]):
            if stray := sorted([*out.glob("*.bin"), *out.glob("*.mask")]):
                raise UserError(
                    f"out_dir={out} holds {stray[0].name} but no record of how it was made; use another one"
                )
            self.save()
            return
        if wrong := differences(old, settings):
            raise UserError(
                f"out_dir={out} was begun with {wrong}; use another --out_dir, or remove the folder"
            )
        self.shards, (self.document, self.tokens) = saved["shards"], saved.get("next", (0, 0))
        self.order = saved.get("order", [])
        for path, size in ((out / shard["name"], shard["bytes"]) for shard in self.shards):
            if not path.is_file() or path.is_symlink():
                what = (
                    "is a link and not what was written"
                    if path.is_symlink()
                    else "was written and is missing"
                )
                raise DataError(f"{path} {what}; restore it, or remove the folder")
            if path.stat().st_size != size:
                found = path.stat().st_size
                raise DataError(
                    f"{path} has {found} bytes, {size} were written; restore it, or remove the folder"
                )

    def saved(self):
        """The record in the folder, None if it has none. Raises DataError for a damaged one."""
        for path in (self.out / "progress.json", self.out / "manifest.json"):
            if path.exists():
                try:
                    found = files.read_json(path, DataError, RECORDS[path.name])
                except DataError as error:
                    raise DataError(f"{error}; remove the folder {self.out}") from None
                names = [shard["name"] for shard in found["shards"]]
                if len(set(names)) < len(names) or len(found.get("next", "ab")) != 2:
                    raise DataError(
                        f"{path} is damaged: shards or its next position; remove the folder {self.out}"
                    )
                return found
        return None

    def add(self, name, tokens, tokenizer, position):
        """Records a written shard and the position (document, tokens, order) after it."""
        sizes = tokenizer.token_bytes()
        parts = np.array_split(tokens, (len(tokens) >> 24) + 1)  # bincount copies its argument to int64
        counts = sum(np.bincount(part, minlength=tokenizer.vocab_size) for part in parts)
        size, sha256 = files.digest(self.out / name)
        shard = {
            "name": name,
            "tokens": len(tokens),
            "documents": int(counts[tokenizer.eot]),
        }  # that begin in it
        shard |= {"text_bytes": int(counts @ sizes), "bytes": size, "sha256": sha256}
        if (mask := mask_path(self.out / name)).exists():
            bits = np.fromfile(mask, np.uint8)
            shard |= {"targets": int(np.bitwise_count(bits).sum()), "mask_sha256": files.digest(mask)[1]}
        self.shards.append(shard)
        self.document, self.tokens, self.order = position
        self.save()

    def save(self):
        state = {"settings": self.settings, "shards": self.shards, "next": (self.document, self.tokens)}
        state |= {"order": self.order} if "pack" in self.settings else {}
        write(self.out / "progress.json", json.dumps(state, indent=1).encode())

    def total(self, key, split=None):
        """Sum of a figure over the shards, of one split or of all."""
        return sum(shard[key] for shard in self.shards if split in (None, split_of(shard["name"])))

    def summary(self):
        """Lines for the console: shards and tokens by split, and how many documents rows cut, with and without pack."""
        lines = []
        for split in ("train", "val"):
            n = sum(split_of(shard["name"]) == split for shard in self.shards)
            lines.append(f"{split:5}  {n} shards, {self.total('tokens', split):,} tokens")
            if n and "targets" in self.shards[0]:
                lines[-1] += f", {self.total('targets', split):,} of them with loss"
        if pack := self.settings.get("pack"):
            form = {"documents_cut": {"packed": files.number, "by_chance": files.number}}
            cut = read_manifest(self.out, form)["documents_cut"]
            shares = f"{cut['packed']:.2%} of documents; in the order of the source {cut['by_chance']:.2%}"
            lines.append(f"pack   rows of {pack:,} tokens cut {shares}")
        return lines

    def discard(self):
        """Removes the shards and the record."""
        for name in [*(shard["name"] for shard in self.shards), "progress.json"]:
            (self.out / name).unlink()
            mask_path(self.out / name).unlink(missing_ok=True)

    def finish(self, tokenizer):
        """Writes token_bytes.npy and then manifest.json, which declares the folder complete."""
        np.save(sizes := io.BytesIO(), tokenizer.token_bytes())
        write(path := self.out / "token_bytes.npy", sizes.getvalue())
        manifest = {"tokenizer": tokenizer.name, "vocab_size": tokenizer.vocab_size, "eot": tokenizer.eot}
        manifest |= {
            "dtype": tokenizer.dtype.name,
            "source": self.settings["dataset"],
            "settings": self.settings,
        }
        manifest |= {key: self.total(key) for key in ("documents", "tokens", "text_bytes")} | {
            "shards": self.shards
        }
        manifest["token_bytes_sha256"] = files.digest(path)[1]
        if pack := self.settings.get("pack"):
            shards = [
                open_shard(self.out / shard["name"])
                for shard in self.shards
                if split_of(shard["name"]) == "train"
            ]
            manifest["documents_cut"] = packing.shares_cut(
                begins(shards, tokenizer.eot), sum(map(len, shards)), pack
            )
        write(self.out / "manifest.json", (json.dumps(manifest, indent=1) + "\n").encode())
        (self.out / "progress.json").unlink()


def write(path, data):
    """files.write_atomic; on a full disk, for example, a DataError that says how much room is needed."""
    try:
        files.write_atomic(path, data)
    except OSError as error:
        free = shutil.disk_usage(path.parent).free
        raise DataError(
            f"{path}: {error.strerror}: it needs {len(data):,} bytes, {free:,} are free; finished shards are kept, "
            "make room and run the same command again"
        ) from None


def fetch_shards(name, revision, max_shards, progress, tokenizer):
    """Downloads the missing shards of `name`, a hub dataset that is tokenized already."""
    import huggingface_hub

    hub = dict(repo_type="dataset", revision=revision)
    try:
        listed = [file for file in huggingface_hub.HfApi().list_repo_files(name, **hub) if "/" not in file]
        val, training = (
            sorted(file for file in listed if split_of(file) == split) for split in ("val", "train")
        )
        if not training:
            raise DataError(
                f"dataset={name} holds no *_train_000001.bin or .npy; for a dataset of texts, without --shards"
            )
        names = val + training[:max_shards]
        for file in tqdm(names[len(progress.shards) :], desc=name, unit=" shards", disable=None):
            files.patiently(huggingface_hub.hf_hub_download, name, file, local_dir=progress.out, **hub)
            tokens = open_shard(progress.out / file)
            if tokens.dtype != tokenizer.dtype or tokens.max() >= tokenizer.vocab_size:
                raise DataError(
                    f"{progress.out / file} holds {tokens.dtype} tokens up to {tokens.max()}, {tokenizer.name} has "
                    f"{tokenizer.dtype} ids below {tokenizer.vocab_size}; name their --tokenizer, or remove the file "
                    "and run the same command again"
                )
            progress.add(file, tokens, tokenizer, (0, 0, []))
    except UserError:
        raise
    except Exception as error:  # the hub's own, httpx's, the disk's
        what = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise DataError(
            f"dataset={name} cannot be fetched: {what}; run the same command again to continue"
        ) from None
