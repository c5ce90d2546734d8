"""Writes shards of tokens for fineweb.py; a killed run continues where it was and ends with the same bytes.

A folder holds the shards, progress.json while the run lasts, and manifest.json with checksums and
token_bytes.npy once everything is written. Each file is written atomically, and progress.json is updated
after each shard.
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
from corpus import DataError, brief, packing
from corpus.loader import FORMATS, HEADER_BYTES, SHARD, ahead, mask_path, open_shard, split_of
from run import files

WRITTEN = SHARD | dict.fromkeys(("tokens", "documents", "text_bytes", "bytes", "targets?"), files.count)
RECORD = {"settings": {}, "shards": [WRITTEN]}
NEXT = {"next": [files.count], "order?": [(files.count, None)]}
RECORDS = {"progress.json": RECORD | NEXT, "manifest.json": RECORD}


@contextlib.contextmanager
def claim(out):
    """Makes the folder `out` and locks it against other writers; the lock ends with the process."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock = os.open(out, os.O_RDONLY)
    except OSError as error:
        raise UserError(f"out_dir={out} cannot be written: {error.strerror}") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        busy = "another fineweb.py is writing there; wait for it, or stop it"
        raise UserError(f"out_dir={out}: {busy}") from None
    finally:
        os.close(lock)


def write_shards(batches, encode, progress, tokenizer, short):
    """Writes the missing shards, named after `short`.

    batches: yields (documents from progress.document on, share of the source that they end at or None).
    encode: yields a row of tokens for each document of a list: text_rows, or Dialogues.rows with its loss.
    """
    writer, pack = ShardWriter(progress, tokenizer, short), progress.settings.get("pack")
    begun, least = progress.total("tokens"), progress.settings.get("min_document_tokens", 1)
    bar = tqdm(desc=short, initial=begun, unit=" tokens", unit_scale=True, disable=None)

    def expect(tokens, share):  # the bar's total, from the tokens in a share of the source
        total = min(begun + tokens / share if share else math.inf, writer.max_tokens + writer.val_tokens)
        bar.total = int(total) if total < math.inf else None

    position = in_order
    with bar, contextlib.closing(ahead(batches, 4)) as batches:
        rows = tokenized(batches, encode, progress.document, least, expect)
        if writer.val:  # validation documents keep their order, with pack too
            writer.take(rows, bar, position)
        if pack:
            rows = packing.Packer(rows, pack, progress.tokens, progress.order)
            position = rows.position
        writer.take(rows, bar, position)
    writer.close(position(writer.number, 0))
    if not progress.total("tokens", "train"):
        found = f"{progress.total('documents')} documents hold no more than val_tokens={writer.val_tokens}"
        progress.discard()
        more = "lower --val_tokens (0 for none), or give more documents (a text file is one)"
        raise DataError(f"{found}, so nothing is left to train on: {more}")


def in_order(number, done):
    """(document, token, order) to resume from after document `number`, cut after `done` tokens (0: whole)."""
    return (number, done, []) if done else (number + 1, 0, [])


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
        given = progress.settings
        self.val_tokens, self.max_tokens = given["val_tokens"], given["max_tokens"] or math.inf
        self.shard_tokens = given["shard_tokens"] - given["shard_tokens"] % given.get("pack", 1)
        self.number = progress.document - 1  # of the last document that was taken
        self._open()

    def _open(self):
        self.buffer, self.count, self.mask = bytearray(HEADER_BYTES), 0, bytearray()  # mask: a byte a token
        self.val = self.val_tokens > 0 and not self.progress.shards
        left = self.max_tokens - self.progress.total("tokens", "train")
        self.room, self.complete = min(self.shard_tokens, left), left <= 0 and not self.val

    def take(self, rows, bar, position):
        """Takes documents until validation is full or nothing is left to take; a cut one from its rest on."""
        val, done = self.val, self.progress.tokens
        for number, row in () if self.complete else rows:
            self.number = number
            if done > len(row):
                found = f"document {number + 1} has {len(row)} tokens, {done} are written"
                raise DataError(f"{found}: the source changed")
            bar.update(len(row) - done)
            while done < len(row) and not self.complete:
                done = self._add(row, done, position)
            done = 0
            if self.complete or self.val != val:
                return

    def _add(self, row, done, position):
        """Adds as much of row[done:] as fits the shard (validation: all of it) and returns the new `done`."""
        end = len(row) if self.val else min(len(row), done + self.room - self.count)
        part = row[done:end]
        if part.dtype.names:  # (token, loss)
            self.mask += part["loss"].tobytes()
            part = part["token"]
        self.buffer += part.tobytes()
        self.count += end - done
        if self.count >= (self.val_tokens if self.val else self.room):
            self.close(position(self.number, end if end < len(row) else 0))
        return end

    def close(self, position):
        """Writes the buffer, if it holds anything, as a shard after which a run goes on at `position`."""
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
            self.progress.add(name, tokens, self.tokenizer, position)
        self._open()


class Progress:
    """The record of a run in its folder: progress.json while it lasts, then manifest.json.

    document, tokens: the next shard begins in that document of the source, after that many of its tokens.
    With packed data `document` is the first one that is not completely written, and `order` holds the
    document that is cut (None if none is) and those after `document` that are written.
    """

    def __init__(self, out, settings):
        self.out, self.settings, self.shards = out, settings, []
        self.document, self.tokens, self.order = 0, 0, []
        saved = self._saved()
        self.finished = (out / "manifest.json").exists()
        for leftover in [*out.glob("*.tmp"), *([out / "progress.json"] if self.finished else [])]:
            leftover.unlink(missing_ok=True)
        old = saved["settings"] if saved else None
        if not saved or (old != settings and not saved["shards"]):
            if stray := sorted([*out.glob("*.bin"), *out.glob("*.mask")]):
                raise UserError(f"out_dir={out} holds {stray[0].name} and no record of it; use another")
            self._save()
            return
        for key in settings | old:
            was, now = old.get(key) or None, settings.get(key) or None
            if was != now:
                was = f"another {key}" if "sha" in key else f"{key}={was}, not {now}"
                raise UserError(f"out_dir={out} was begun with {was}; use another --out_dir, or remove it")
        self.shards, (self.document, self.tokens) = saved["shards"], saved.get("next", (0, 0))
        self.order = saved.get("order", [])
        for path, size in ((out / shard["name"], shard["bytes"]) for shard in self.shards):
            found = "is a link" if path.is_symlink() else "is missing" if not path.is_file() else None
            found = found or (path.stat().st_size != size and f"has {path.stat().st_size} bytes")
            if found:
                raise DataError(f"{path} {found}, {size} bytes were written; restore it, or remove {out}")

    def _saved(self):
        """The record in the folder, None if it has none. Raises DataError for a damaged one."""
        for path in (self.out / "progress.json", self.out / "manifest.json"):
            if path.exists():
                try:
                    found = files.read_json(path, DataError, RECORDS[path.name])
                    names = [shard["name"] for shard in found["shards"]]
                    if len(set(names)) < len(names) or len(found.get("next", "ab")) != 2:
                        raise DataError(f"{path} is damaged: its shards or its next position")
                except DataError as error:
                    raise DataError(f"{error}; remove the folder {self.out}") from None
                return found
        return None

    def add(self, name, tokens, tokenizer, position):
        """Records a written shard and the position (document, tokens, order) after it."""
        parts = np.array_split(tokens, (len(tokens) >> 24) + 1)  # bincount copies its argument to int64
        counts = sum(np.bincount(part, minlength=tokenizer.vocab_size) for part in parts)
        size, sha256 = files.digest(self.out / name)
        shard = {
            "name": name,
            "tokens": len(tokens),
            "documents": int(counts[tokenizer.eot]),
        }  # that begin in it
        shard |= {"text_bytes": int(counts @ tokenizer.token_bytes()), "bytes": size, "sha256": sha256}
        if (mask := mask_path(self.out / name)).exists():
            bits = np.fromfile(mask, np.uint8)
            shard |= {"targets": int(np.bitwise_count(bits).sum()), "mask_sha256": files.digest(mask)[1]}
        self.shards.append(shard)
        self.document, self.tokens, self.order = position
        self._save()

    def _save(self):
        state = {"settings": self.settings, "shards": self.shards, "next": (self.document, self.tokens)}
        state |= {"order": self.order} if "pack" in self.settings else {}
        write(self.out / "progress.json", json.dumps(state, indent=1).encode())

    def total(self, key, split=None):
        """Sum of a figure over the shards, of one split or of all."""
        return sum(shard[key] for shard in self.shards if split in (None, split_of(shard["name"])))

    def summary(self):
        """Lines for the console: shards and tokens by split."""
        lines = []
        for split in ("train", "val"):
            n = sum(split_of(shard["name"]) == split for shard in self.shards)
            lines.append(f"{split:5}  {n} shards, {self.total('tokens', split):,} tokens")
            if n and "targets" in self.shards[0]:
                lines[-1] += f", {self.total('targets', split):,} of them with loss"
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
        manifest |= {"dtype": tokenizer.dtype.name, "source": self.settings["dataset"]}
        manifest |= {key: self.total(key) for key in ("documents", "tokens", "text_bytes")}
        manifest |= {"settings": self.settings, "shards": self.shards}
        manifest |= {"token_bytes_sha256": files.digest(path)[1]}
        write(self.out / "manifest.json", (json.dumps(manifest, indent=1) + "\n").encode())
        (self.out / "progress.json").unlink()


def write(path, data):
    """files.write_atomic; on a full disk, for example, a DataError that says how much room is needed."""
    try:
        files.write_atomic(path, data)
    except OSError as error:
        room = f"it needs {len(data):,} bytes, {shutil.disk_usage(path.parent).free:,} are free"
        kept = "finished shards are kept, make room and run the same command again"
        raise DataError(f"{path}: {error.strerror}: {room}; {kept}") from None


def fetch_shards(name, revision, max_shards, progress, tokenizer):
    """Downloads the missing shards of `name`, a hub dataset that is tokenized already."""
    import huggingface_hub

    hub = dict(repo_type="dataset", revision=revision)
    try:
        listed = sorted(huggingface_hub.HfApi().list_repo_files(name, **hub))
        val, training = ([f for f in listed if "/" not in f and split_of(f) == s] for s in ("val", "train"))
        if not training:
            none = "holds no *_train_000001.bin or .npy; for a dataset of texts, without --shards"
            raise DataError(f"dataset={name} {none}")
        names = val + training[:max_shards]
        for file in tqdm(names[len(progress.shards) :], desc=name, unit=" shards", disable=None):
            files.patiently(huggingface_hub.hf_hub_download, name, file, local_dir=progress.out, **hub)
            tokens = open_shard(progress.out / file)
            if tokens.dtype != tokenizer.dtype or tokens.max() >= tokenizer.vocab_size:
                found = f"{progress.out / file} holds {tokens.dtype} tokens up to {tokens.max()}"
                ids = f"{tokenizer.name} has {tokenizer.dtype} ids below {tokenizer.vocab_size}"
                raise DataError(f"{found}, {ids}; name their --tokenizer, remove the file and run it again")
            progress.add(file, tokens, tokenizer, (0, 0, []))
    except UserError:
        raise
    except Exception as error:  # the hub's own, httpx's, the disk's
        what = f"cannot be fetched: {brief(error)}"
        raise DataError(f"dataset={name} {what}; run the same command again") from None
