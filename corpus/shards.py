"""Shards of tokens as fineweb.py writes them: found, verified, and read as one circle of tokens.

The format is llm.c's: a header of 1,024 bytes, then uint16 or uint32 tokens, a separator before
each document. Also read are nanoGPT's headerless train.bin and val.bin.
"""

import bisect
import hashlib
import os
import re
from multiprocessing.pool import ThreadPool
from pathlib import Path

import numpy as np

from corpus import DataError, as_user_error, mixture, read_json
from corpus.tokenizer import fits
from system import files

HEADER_BYTES = 1024
HEADERS = {"<u2": (20240520, 1), "<u4": (20240801, 7)}  # of ids: magic and version, as in llm.c
BLOCKS = 16  # of a file, of which its sampled digest is made
BLOCK_BYTES = 1 << 16
MAKE_DATA = "make the data with python fineweb.py (--help lists its settings)"


def read_manifest(folder):
    """The object in a folder's manifest.json, {} without that file, with two keys of our own.

    files: {name: SHA-256} of the shards and masks. pack: fineweb.py's, 0 without. Raises DataError.
    """
    path = Path(folder, "manifest.json")
    if not path.exists():
        return {"files": {}, "pack": 0}
    manifest = read_json(path, DataError)
    if manifest.get("next"):
        raise DataError(
            f"{folder} is half made; wait for fineweb.py, or run the same command again: it goes on"
        )
    with as_user_error(f"{path} is damaged", DataError):
        if manifest["eot"] not in range(manifest["vocab_size"]):
            raise ValueError(f"eot={manifest['eot']} is no id")
        manifest["pack"] = int(manifest.get("settings", {}).get("pack") or 0)
        manifest["files"] = known = {}
        for shard in manifest.get("shards", ()):
            name = Path(shard["name"]).name  # in this folder, whatever path a stranger's file gives
            known[name] = shard["sha256"]
            if "mask_sha256" in shard:
                known[mask_path(name).name] = shard["mask_sha256"]
    return manifest


def read_token_bytes(folder):
    """UTF-8 bytes of each token id from token_bytes.npy, None without a manifest.

    Raises DataError.
    """
    expected = read_manifest(folder).get("token_bytes_sha256")
    if expected is None:
        return None
    path = Path(folder, "token_bytes.npy")
    verify_file(path, expected)
    return np.load(path)


def open_shard(path):
    """The tokens of a shard, or of nanoGPT's train.bin or val.bin, in a read-only memory map."""
    kinds = {header: kind for kind, header in HEADERS.items()}
    with as_user_error(f"{path} is damaged", DataError, f"; bring it back, or {MAKE_DATA}"):
        magic, version, count = np.fromfile(path, "<i4", 3).tolist()
        kind = kinds.get((magic, version))
        if kind:
            size = path.stat().st_size
            need = HEADER_BYTES + count * np.dtype(kind).itemsize
            if size != need:
                raise ValueError(f"it has {size} bytes, for {count} tokens it needs {need}")
            tokens = np.memmap(path, kind, "r", HEADER_BYTES)
        elif path.name in ("train.bin", "val.bin"):
            # GPT-2's ids cannot look like a header: both magics have 16-bit values above 50,256
            tokens = np.memmap(path, "<u2", "r")
            if tokens[1:8192:2].max() < 4 <= tokens[:8192:2].max():
                raise ValueError("its ids have 32 bits, nanoGPT's have 16")
        else:
            raise ValueError(
                f"magic {magic} and version {version} are not llm.c's (nanoGPT's files, without a "
                "header, are named train.bin, val.bin)"
            )
        # a slice of a memmap takes five times as long as one of its view as an array
        return tokens.view(np.ndarray)


def mask_path(path):
    """The file beside a shard that marks tokens with loss: a bit a token, a byte's lowest first."""
    return Path(path).with_suffix(".mask")


def open_mask(path, tokens):
    """The bytes of the mask of so many tokens in a read-only memory map."""
    with as_user_error(f"{path} is damaged", DataError):
        mask = np.memmap(path, np.uint8, "r")
        if len(mask) != -(-tokens // 8):
            raise ValueError(f"it holds {len(mask)} bytes for {tokens} tokens")
        return mask


def split_of(name):
    """train or val: the last word but for the number in a file's name; None if neither."""
    found = re.search(r"(?:^|_)(train|val)(?:_[^_]*)?\.bin$", name)
    return found and found[1]


def find_shards(folder, split, known):
    """Sorted paths of a split's shards; known: the manifest's files, if any. Raises DataError."""
    if not os.path.isdir(folder):
        raise DataError(
            f"data_dir={folder} is no folder that exists; {MAKE_DATA}, or ./quickstart.sh makes one"
        )
    names = {name for name in os.listdir(folder) if split_of(name) == split}
    if len(names) > 1 and f"{split}.bin" in names:
        raise DataError(f"{folder} holds {split}.bin beside other shards; keep one kind of the two")
    wrong = names ^ {name for name in known if split_of(name) == split}
    if known and wrong:
        raise DataError(
            f"{folder}/manifest.json lists the shards: {min(wrong)} is missing, bring it back, "
            "or is not one of them, move it away"
        )
    if not names:
        raise DataError(
            f"{folder} holds no {split} split (*_{split}_*.bin or {split}.bin); {MAKE_DATA}; "
            "without validation: --eval_interval=0"
        )
    return [Path(folder, name) for name in sorted(names)]


def fingerprint(folders, digest_of):
    """A digest of what tells the data of `folders` from other data, of both splits.

    It is made of separators, bytes of ids, and digest_of(path, the manifest's SHA-256 or None) of
    every shard and mask. Raises DataError.
    """
    lines = []
    for folder in folders:
        manifest = read_manifest(folder)
        lines.append(f"{manifest.get('eot')} {manifest.get('token_bytes_sha256')}")
        paths = sorted(path for path in Path(folder).iterdir() if path.suffix in (".bin", ".mask"))
        given = [(path, manifest["files"].get(path.name)) for path in paths]
        with ThreadPool(8) as pool:
            lines += pool.starmap(digest_of, given)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def sampled_digest(path, known=""):
    """SHA-256 of a file's length and BLOCKS blocks spread over it, which overlap in a small one."""
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        found = hashlib.sha256(f"{known} {size} ".encode())
        for number in range(BLOCKS):  # the first and the last bytes too
            file.seek(number * max(0, size - BLOCK_BYTES) // (BLOCKS - 1))
            found.update(file.read(BLOCK_BYTES))
    return found.hexdigest()


def whole_digest(path, known):
    """SHA-256 of all bytes, which takes a second for a GB to be read.

    A file older than the manifest that lists it counts by the SHA-256 there.
    """
    if known and path.stat().st_mtime_ns < path.with_name("manifest.json").stat().st_mtime_ns:
        return known
    return files.digest(path)[1]


def verify(data_dir):
    """Compares every shard and mask of the folders with the manifest's SHA-256.

    Raises DataError.
    """
    for folder, _ in mixture.folders(str(data_dir)):
        # somebody else's shards have no checksums
        for name, sha256 in read_manifest(folder)["files"].items():
            verify_file(Path(folder, name), sha256)


def verify_file(path, sha256):
    """Raises DataError unless a file is there and has this SHA-256."""
    found = files.digest(path)[1] if path.is_file() else "no file"
    if found != sha256:
        raise DataError(
            f"{path} is damaged: found {found}, expected the manifest's SHA-256 {sha256}; bring it "
            f"back, or {MAKE_DATA}"
        )


class Shards:
    """The shards of a folder's split as one circle of `tokens` tokens, and what its manifest says.

    vocab_size: the model's. Raises DataError.
    """

    def __init__(self, folder, split, vocab_size):
        manifest = read_manifest(folder)
        self.folder = folder
        self.limit = vocab_size
        self.eot = manifest.get("eot")
        self.pack = manifest["pack"]
        self.token_bytes = read_token_bytes(folder)
        own = Path(folder, "tokenizer.json")  # also where the manifest's path is of another machine
        self.tokenizer = str(own) if own.is_file() else manifest.get("tokenizer")
        sizes = self.token_bytes
        if sizes is not None and not fits(vocab_size, sizes, self.eot):
            raise DataError(
                f"{folder} has the ids of {self.tokenizer}, more than vocab_size={vocab_size}; "
                f"train a model with --vocab_size={manifest['vocab_size']}, or make the data "
                "with the model's tokenizer"
            )
        known = manifest["files"]
        self.paths = find_shards(folder, split, known)
        self.shards = [open_shard(path) for path in self.paths]
        self.begins = np.cumsum([0, *map(len, self.shards)]).tolist()  # of each shard in the circle
        self.tokens = self.begins[-1]
        masks = [mask_path(path) for path in self.paths]
        self.masks = None
        if any(mask.exists() or mask.name in known for mask in masks):
            self.masks = [open_mask(mask, len(shard)) for mask, shard in zip(masks, self.shards)]

    def read(self, position, count):
        """Arrays (ids, whether each has loss as a target) of `count` tokens from `position` on."""
        ids = []
        has_loss = []
        while count:
            position %= self.tokens
            shard = bisect.bisect_right(self.begins, position) - 1
            first = position - self.begins[shard]
            part = self.shards[shard][first : first + count]
            if part.max() >= self.limit:
                at = np.argmax(part >= self.limit)
                raise DataError(
                    f"{self.paths[shard]}: token {first + at} is {part[at]}, not below "
                    f"vocab_size={self.limit}; raise it, or make the data again"
                )
            ids.append(part)
            if self.masks:
                at = np.arange(first, first + len(part))
                has_loss.append(self.masks[shard][at // 8] >> at % 8 & 1 == 1)
            else:
                has_loss.append(np.ones(len(part), bool))
            position += len(part)
            count -= len(part)
        return np.concatenate(ids), np.concatenate(has_loss)
