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

    batches: of documents from progress.position on. encode: of a batch, an array for each.
    """
    given = progress.settings
    least = given["min_document_tokens"] or 1
    with contextlib.closing(prefetched(batches)) as batches:
        rows = tokenized(batches, encode, progress.position["document"], least)
        if given["val_tokens"] and not progress.shards:
            write_validation(rows, progress)
        write_training(rows, progress)
    if not progress.total("tokens", "train"):
        raise DataError(
            f"dataset={given['dataset']}: nothing to train on: val_tokens={given['val_tokens']} "
            f"takes {progress.total('tokens')} tokens for validation, in whole documents from the "
            f"front (to lower it remove {progress.out}; 0 for none; a text file is a document), "
            f"other documents are empty or left out {tally}"
        )


def tokenized(batches, encode, number, least):
    """Yields (number, row) of documents of at least `least` tokens besides the separator."""
    for batch in batches:
        for document, row in zip(batch, encode(batch)):
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
    """Cuts the documents from progress.position on into shards."""
    # done: tokens of the first document, with pack of the first block, that are written
    done = progress.position["tokens"]
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

    name: with which the shards' names begin. position: a document, and how many tokens from there
    on are written; None once all are.
    """

    def __init__(self, out, name, settings, tokenizer):
        self.out = out
        self.name = name
        self.settings = settings
        self.tokenizer = tokenizer
        self.shards = []
        self.position = dict(document=0, tokens=0)
        self.manifest = out / "manifest.json"
        for leftover in out.glob(f".*{files.UNFINISHED}"):  # of a run that was killed
            leftover.unlink()
        if self.manifest.exists():
            self._resume(read_json(self.manifest, DataError))
        elif stray := sorted(out.glob("*.bin")):
            raise UserError(f"out_dir={out} holds {stray[0].name} and no record of it; use another")
        if not self.shards:
            self._save()

    def _resume(self, saved):
        """Goes on from the content of manifest.json; afresh if that lists no shard yet."""
        with as_user_error(f"{self.manifest} is damaged", DataError):
            for key, value in self.settings.items():
                before = saved["settings"].get(key)
                if saved["shards"] and before != value:
                    raise UserError(
                        f"out_dir={self.out} was begun with {key}={before}, not {value}; use "
                        "another --out_dir, or remove it"
                    )
            self.shards = saved["shards"]
            if self.shards:
                self.position = saved["next"]

    def room(self):
        """How many tokens the next training shard may have."""
        pack = self.settings["pack"] or 1
        whole_rows = self.settings["shard_tokens"] // pack * pack
        if self.settings["max_tokens"] is None:
            return whole_rows
        return min(whole_rows, self.settings["max_tokens"] - self.total("tokens", "train"))

    def write_shard(self, split, parts, position):
        """Writes parts of documents as a shard after which a run goes on at `position`."""
        index = len(self.shards) + (self.settings["val_tokens"] == 0)  # 0 is validation
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
        data = header.tobytes() + tokens.tobytes()
        shard["tokens"] = len(tokens)
        shard["documents"] = int((tokens == self.tokenizer.eot).sum())
        shard["bytes"] = len(data)
        shard["sha256"] = write(path, data)
        self.shards.append(shard)
        print(f"{path}: {len(tokens):,} tokens")
        self.position = position
        self._save()

    def _save(self, **more):
        manifest = dict(
            tokenizer=self.tokenizer.name,
            vocab_size=self.tokenizer.vocab_size,
            eot=self.tokenizer.eot,
            dtype=self.tokenizer.dtype.name,
            documents=self.total("documents"),
            tokens=self.total("tokens"),
            settings=self.settings,
            shards=self.shards,
            next=self.position,
        )
        write(self.manifest, (json.dumps(manifest | more, indent=1) + "\n").encode())

    def total(self, key, split=None):
        """Sum of a figure over the shards, of one split or of all."""
        return sum(s.get(key, 0) for s in self.shards if split in (None, split_of(s["name"])))

    def finish(self):
        """Writes token_bytes.npy and then manifest.json, which declares the folder complete."""
        sizes = io.BytesIO()
        np.save(sizes, self.tokenizer.token_bytes())
        sha256 = write(self.out / "token_bytes.npy", sizes.getvalue())
        self.position = None
        self._save(token_bytes_sha256=sha256)


def write(path, data):
    """files.write_atomic of bytes, whose SHA-256 it returns; DataError, as on a full disk."""
    with as_user_error(f"{path} of {len(data):,} bytes", DataError, f"; make room{AGAIN}"):
        files.write_atomic(path, data)
    return hashlib.sha256(data).hexdigest()
