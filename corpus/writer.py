"""Writes shards of tokens for fineweb.py; a killed run goes on and ends with the same bytes.

A folder has manifest.json, with checksums, updated after each shard. Its `next` is the position
from which a run goes on, null once all is written.
"""

import contextlib
import hashlib
import io
import json

import numpy as np

from corpus import AGAIN, DataError, as_user_error, packing, read_json
from corpus.prefetch import prefetched
from corpus.shards import HEADER_BYTES, HEADERS, mask_path, split_of
from system import files
from system.errors import UserError


def write_shards(batches, encode, progress, tally):
    """Writes the missing shards.

    batches: of documents from the record's `next` on. encode: of a batch, an array for each.
    """
    given = progress.settings
    least = given["min_document_tokens"] or 1
    with contextlib.closing(prefetched(batches)) as batches:
        rows = tokenized(batches, encode, progress.record["next"]["document"], least, tally)
        if given["val_tokens"] and not progress.record["shards"]:
            write_validation(rows, progress)
        write_training(rows, progress)
    if not progress.total("tokens", "train"):
        raise DataError(
            f"dataset={given['dataset']}: nothing to train on: val_tokens={given['val_tokens']} "
            f"takes {progress.total('tokens', 'val')} tokens in whole documents from the front for "
            f"validation (to lower it remove {progress.out}; 0 for none; a text file is a "
            f"document), other documents are empty or left out {tally}"
        )


def tokenized(batches, encode, number, least, tally):
    """Yields (number, row) of documents of at least `least` tokens besides the separator."""
    for batch in batches:
        for document, row in zip(batch, encode(batch)):
            if "\ufffd" in (document.value or ""):
                tally.add("texts with U+FFFD, as of bytes that are not UTF-8", document.where)
            if document.continues:
                yield number, row[1:]  # without the separator
            elif len(row) > least:
                yield number, row
            number += 1


def write_validation(rows, progress):
    """Writes whole documents, in the source's order with pack too, until they have val_tokens."""
    parts = []
    left = progress.settings["val_tokens"]
    for number, row in rows:
        parts.append(row)
        left -= len(row)
        position = dict(document=number + 1, tokens=0)
        if left <= 0:
            break
    if parts:
        progress.write_shard("val", parts, position)


def write_training(rows, progress):
    """Cuts the documents from the record's `next` on into shards."""
    # done: tokens of the first document, with pack of the first block, that are written
    done = progress.record["next"]["tokens"]
    pack = progress.settings["pack"]
    if pack:
        rows = packing.packed(rows, pack, progress.total("tokens", "train") - done)
    left = progress.room()
    parts = []
    for number, row in rows:
        while left and done < len(row):
            part = row[done : done + left]
            parts.append(part)
            done += len(part)
            left -= len(part)
            if not left:
                progress.write_shard("train", parts, dict(document=number, tokens=done))
                parts = []
                left = progress.room()
        if not left:
            return
        done = 0
    if parts:
        progress.write_shard("train", parts, dict(document=number, tokens=len(row)))


class Progress:
    """The shards of a run so far, recorded in its folder's manifest.json.

    name: with which the shards' names begin. record: the object in manifest.json. Its `next` is a
    document, and how many tokens from there on are written; None once all are.
    """

    def __init__(self, out, name, settings, tokenizer):
        self.out = out
        self.name = name
        self.settings = settings
        self.tokenizer = tokenizer
        self.record = dict(
            tokenizer=tokenizer.name,
            vocab_size=tokenizer.vocab_size,
            eot=tokenizer.eot,
            settings=settings,
            shards=[],
            next=dict(document=0, tokens=0),
        )
        for leftover in out.glob(f".*{files.UNFINISHED}"):  # of a run that was killed
            leftover.unlink()
        self.path = out / "manifest.json"
        if self.path.exists():
            saved = read_json(self.path, DataError)
            with as_user_error(f"{self.path} is damaged", DataError):
                if saved["shards"]:
                    self._resume(saved)
        elif stray := sorted(out.glob("*.bin")):
            raise UserError(f"out_dir={out} holds {stray[0].name} and no record of it; use another")
        if not self.record["shards"]:
            self._save()

    def _resume(self, saved):
        """Goes on from the record of a run that must have had these settings."""
        for key, value in self.settings.items():
            before = saved["settings"].get(key)
            if before != value:
                raise UserError(
                    f"out_dir={self.out} was begun with {key}={before}, not {value}; use another "
                    "--out_dir, or remove it"
                )
        self.record = saved

    def room(self):
        """How many tokens the next training shard may have."""
        pack = self.settings["pack"] or 1
        found = self.settings["shard_tokens"] // pack * pack  # whole rows
        most = self.settings["max_tokens"]
        if most is not None:
            found = min(found, most - self.total("tokens", "train"))
        return found

    def write_shard(self, split, parts, position):
        """Writes parts of documents as a shard after which a run goes on at `position`."""
        index = len(self.record["shards"]) + (self.settings["val_tokens"] == 0)  # 0 is validation
        path = self.out / f"{self.name}_{split}_{index:06d}.bin"
        shard = dict(name=path.name)
        tokens = np.concatenate(parts)
        if tokens.dtype.names:  # (token, loss)
            mask = np.packbits(tokens["loss"], bitorder="little").tobytes()
            shard["targets"] = int(tokens["loss"].sum())
            shard["mask_sha256"] = write(mask_path(path), mask)
            tokens = tokens["token"]
        header = np.zeros(HEADER_BYTES // 4, "<i4")
        header[:3] = *HEADERS[tokens.dtype.str], len(tokens)
        shard["tokens"] = len(tokens)
        shard["sha256"] = write(path, header.tobytes() + tokens.tobytes())
        print(f"{path}: {len(tokens):,} tokens")
        self.record["shards"].append(shard)
        self.record["next"] = position
        self._save()

    def _save(self):
        write(self.path, (json.dumps(self.record, indent=1) + "\n").encode())

    def total(self, key, split):
        """Sum of a figure over the shards of a split."""
        shards = self.record["shards"]
        return sum(one.get(key, 0) for one in shards if split_of(one["name"]) == split)

    def finish(self):
        """Writes token_bytes.npy and then manifest.json, which declares the folder complete."""
        sizes = io.BytesIO()
        np.save(sizes, self.tokenizer.token_bytes())
        sha256 = write(self.out / "token_bytes.npy", sizes.getvalue())
        self.record |= dict(next=None, token_bytes_sha256=sha256)
        self._save()


def write(path, data):
    """files.write_atomic of bytes, whose SHA-256 it returns; DataError, as on a full disk."""
    with as_user_error(f"{path} of {len(data):,} bytes", DataError, f"; make room{AGAIN}"):
        files.write_atomic(path, data)
    return hashlib.sha256(data).hexdigest()
