"""Shards of tokens as fineweb.py writes them: opened, verified, and read in an order that a run can resume in.

The format is llm.c's: a header of 1,024 bytes, then uint16 or uint32 tokens, a separator before each document.
nanoGPT's headerless train.bin and val.bin (uint16) are read too; name and missing header tell them apart. So are the
.npy shards of build-nanogpt, arrays of uint16 (or uint32).
"""

import bisect
import glob
import hashlib
import itertools
import os
import queue
import re
import threading
from pathlib import Path

import numpy as np
import torch

from configurator import UserError
from corpus import mixture
from run import files
from run.files import digest

HEADER_BYTES = 1024
FORMATS = {20240520: (1, np.uint16), 20240801: (7, np.uint32)}  # magic: (version, token dtype), as in llm.c
MAKE_DATA = "make the data with python fineweb.py (--help lists its settings)"


class DataError(UserError):
    exit_code = 3


def shard_name(value):
    """the name of a shard in this folder"""
    return files.plain_name(value) and split_of(value) is not None


SHARD = {"name": shard_name, "sha256": files.text, "mask_sha256?": files.sha256, "tokens?": files.count}
MANIFEST = {"tokenizer": files.text, "vocab_size": files.id_count, "eot": files.count, "shards?": [SHARD]}
MANIFEST |= {
    "dtype?": ("uint16", "uint32"),
    "settings?": {"pack?": files.count},
    "token_bytes_sha256?": files.sha256,
}


def read_manifest(data_dir, form=MANIFEST):
    """The object in data_dir/manifest.json, {} where there is no such file. Raises DataError."""
    path = Path(data_dir) / "manifest.json"
    if not path.exists():
        return {}
    try:
        return files.read_json(path, DataError, form)
    except DataError as error:
        raise DataError(f"{error}; remove it and {MAKE_DATA}") from None


def read_sizes(data_dir, manifest):
    """UTF-8 bytes of each token id from token_bytes.npy, None where there is no such file. Raises DataError."""
    path, vocab_size = Path(data_dir) / "token_bytes.npy", manifest.get("vocab_size", 0)
    expected = manifest.get("token_bytes_sha256")
    if not path.exists() and expected is None:
        return None
    try:
        if expected and digest(path)[1] != expected:
            raise ValueError("it does not match its SHA-256 in manifest.json")
        sizes = np.array(np.lib.format.open_memmap(path, mode="r"))
    except Exception as error:  # of numpy's parser of the header, too, which documents no type
        what = str(error).partition("\n")[0]
        raise DataError(f"{path} is damaged ({what}); remove it and {MAKE_DATA}") from None
    if sizes.ndim != 1 or len(sizes) < vocab_size or sizes.dtype.kind not in "iu" or sizes.min(initial=0) < 0:
        found = f"{sizes.shape} numbers ({sizes.dtype})"
        raise DataError(f"{path} has {found}, expected {vocab_size} sizes; remove it and {MAKE_DATA}")
    return sizes


def tokenizer_of(data_dir, manifest):
    """The name of the tokenizer: the data's own tokenizer.json, unless the manifest names one that needs no file."""
    name, own = manifest.get("tokenizer"), Path(data_dir) / "tokenizer.json"
    return (
        str(own)
        if own.is_file() and (name is None or not Path(name).exists() and Path(name).suffix)
        else name
    )


class Ahead:
    """Iterates over `items` in a daemon thread, at most `depth` ahead; next() raises the thread's exceptions."""

    def __init__(self, items, depth):
        self._queue, self._stop, self._error = queue.Queue(max(1, depth)), threading.Event(), None
        self._thread = threading.Thread(target=self._fill, args=(items,), daemon=True)
        self._thread.start()

    def _fill(self, items):
        try:
            for item in items:
                if not self._put((item, None)):
                    return
            self._put((None, StopIteration()))
        except BaseException as error:
            self._put((None, error))

    def _put(self, pair):
        while not self._stop.is_set():
            try:
                self._queue.put(pair, timeout=0.1)
                return True
            except queue.Full:
                pass
        return False

    def __iter__(self):
        return self

    def __next__(self):
        if self._error is None:
            item, self._error = self._queue.get()
        if self._error is not None:
            raise self._error
        return item

    def close(self):
        self._stop.set()
        self._thread.join(1)  # not longer: it may wait for the network, and it ends with the process


def read_header(path):
    """(tokens, dtype) of a shard, whose header and length are checked; dtype is little-endian. Raises DataError."""
    if not os.path.isfile(path):
        raise DataError(f"{path} is not a file; remove it, or {MAKE_DATA}")
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        header = np.frombuffer(file.read(HEADER_BYTES).ljust(12, b"\0")[:12], "<i4")
    magic, version, count = map(int, header)
    if size < HEADER_BYTES:
        raise DataError(f"{path} holds {size} bytes, less than a header of {HEADER_BYTES}; {MAKE_DATA}")
    if magic not in FORMATS:
        raise DataError(
            f"{path} is not a shard: it begins with {magic}, not {' or '.join(map(str, FORMATS))}; {MAKE_DATA}, "
            "or if it is a headerless file of nanoGPT, name it train.bin or val.bin"
        )
    expected, dtype = FORMATS[magic]
    kind = f"{np.dtype(dtype).name} shard ({'Llama 3' if dtype == np.uint32 else 'GPT-2'}, magic {magic})"
    if version != expected:
        raise DataError(
            f"{path}: version {version} in the header of a {kind}, expected {expected}; {MAKE_DATA}"
        )
    if count <= 0:
        raise DataError(f"{path}: the header counts {count} tokens, expected 1 to 2**31-1; {MAKE_DATA}")
    need = HEADER_BYTES + count * np.dtype(dtype).itemsize
    if size != need:
        raise DataError(
            f"{path}: expected {need} bytes for {count} tokens of a {kind}, it has {size}; {MAKE_DATA}"
        )
    return count, np.dtype(dtype).newbyteorder("<")


def open_shard(path):
    """The tokens of a shard, or of a headerless train.bin or val.bin of nanoGPT, as a read-only memory map."""
    if str(path).endswith(".npy"):
        return open_array(path)
    if is_headerless(path):
        size = os.path.getsize(path)
        if size == 0 or size % 2:
            raise DataError(
                f"{path} holds {size} bytes and no header, so it would be nanoGPT's format, a whole number of uint16 "
                f"tokens; write it again, or {MAKE_DATA}"
            )
        return np.memmap(path, "<u2", "r")
    count, dtype = read_header(path)
    return np.memmap(path, dtype, "r", HEADER_BYTES, (count,))


def open_array(path):
    """The tokens of an .npy file as a read-only memory map. Raises DataError."""
    try:
        tokens = np.lib.format.open_memmap(path, mode="r")
    except (
        Exception
    ) as error:  # cut short, no .npy, Python objects, which are not unpickled; numpy names no type
        what = str(error).partition("\n")[0]
        raise DataError(f"{path} is not a shard: {what}; fetch it again, or {MAKE_DATA}") from None
    if tokens.ndim != 1 or tokens.dtype not in (np.uint16, np.uint32) or not len(tokens):
        found = f"{tokens.dtype} {tokens.shape}"
        raise DataError(
            f"{path} is not a shard: expected a row of uint16 or uint32 tokens, got {found}; {MAKE_DATA}"
        )
    if (need := tokens.offset + tokens.nbytes) != (size := os.path.getsize(path)):
        raise DataError(
            f"{path}: expected {need} bytes for {len(tokens)} tokens, it has {size}; fetch it again"
        )
    return tokens


def mask_path(path):
    """The file beside a shard that says which tokens carry loss: a bit a token, the lowest of a byte first."""
    return Path(path).with_suffix(".mask")


def open_mask(path, tokens):
    """The bytes of a shard's mask as a read-only memory map. Raises DataError."""
    size = os.path.getsize(path) if os.path.isfile(path) else None
    if size != -(-tokens // 8):
        found = "is missing" if size is None else f"has {size} bytes"
        raise DataError(f"{path} {found}, expected {-(-tokens // 8)} bytes for {tokens} tokens; {MAKE_DATA}")
    return np.memmap(path, np.uint8, "r")


def is_headerless(path):
    """Whether a file is nanoGPT's: its name is train.bin or val.bin, and it does not begin with a shard's magic.

    A file of GPT-2 tokens cannot be mistaken for a shard: both magics contain 16-bit values above 50,256.
    """
    if os.path.basename(path) not in ("train.bin", "val.bin") or not os.path.isfile(path):
        return False
    with open(path, "rb") as file:
        return int.from_bytes(file.read(4), "little") not in FORMATS


def split_of(name):
    """train or val: the last word before the number in a shard's file name; None if it is neither."""
    found = re.search(r"_(train|val)_[^_]*\.(bin|npy)$", name)
    return found and found[1]


def find_shards(data_dir, split):
    """Sorted paths of a split: shards, or else nanoGPT's <split>.bin. Raises DataError for none or for two kinds."""
    folder = glob.escape(str(data_dir))
    pattern, single = f"{data_dir}/*_{split}_*.bin", os.path.join(data_dir, f"{split}.bin")
    paths = sorted(path for path in glob.glob(f"{folder}/*_{split}_*") if split_of(path) == split)
    kinds = [[path for path in paths if path.endswith(end)] for end in (".bin", ".npy")]
    kinds += [[single] * os.path.exists(single)]
    if len(kinds := [kind for kind in kinds if kind]) > 1:
        two = " and ".join(os.path.basename(kind[0]) for kind in kinds[:2])
        raise DataError(f"{data_dir} holds {two}; keep one kind, move the other")
    if kinds:
        return kinds[0]
    hint = MAKE_DATA
    if split == "val" and glob.glob(f"{folder}/*train*"):
        hint = "make one, or do without: --eval_interval=0"
    elif os.path.exists(os.path.join(data_dir, "progress.json")):
        hint = "fineweb.py has begun there and has not written any yet; run it again"
    raise DataError(
        f"no {split} split: nothing matches {pattern}, or .npy, and there is no {split}.bin; {hint}"
    )


def verify(data_dir):
    """Compares every shard and mask of the folders with the manifest's SHA-256. Raises DataError."""
    for folder, _ in mixture.folders(str(data_dir)):
        _verify_folder(folder)


def _verify_folder(data_dir):
    manifest = read_manifest(data_dir, {"shards?": [SHARD]})
    if not manifest.get("shards"):
        return  # somebody else's shards, without checksums
    for shard in manifest["shards"]:
        path = Path(data_dir) / shard["name"]
        if path.is_symlink():
            raise DataError(
                f"{path} is a link, so it is not the file that the manifest names; copy the file there"
            )
        for file, expected in [(path, shard["sha256"]), (mask_path(path), shard.get("mask_sha256"))]:
            if expected is None:
                continue
            if not file.is_file():
                raise DataError(f"{file} is in the manifest and not in the folder; {MAKE_DATA}")
            if file == path:
                open_shard(path)
            found = digest(file)[1]
            if found != expected:
                raise DataError(
                    f"{file} is damaged: SHA-256 {found[:16]}..., expected {expected[:16]}...; "
                    f"remove {data_dir} and {MAKE_DATA}"
                )


class Split:
    """The shards of a folder's split as one circle of `tokens` tokens, and the order of the rows in it.

    Row w is the T+1 tokens from token w*T on. An epoch is ceil(tokens/T) rows, so that no token is lost at the end of a
    shard; the last row wraps around to the first tokens. `masks`: the bits of tokens with loss, None if all have it.
    """

    def __init__(self, data_dir, split, T, vocab_size, shuffle_seed, align):
        self.T, self.shuffle_seed = T, shuffle_seed
        self.paths = find_shards(data_dir, split)
        self.shards = [open_shard(path) for path in self.paths]
        self.ends = np.cumsum([len(shard) for shard in self.shards]).tolist()
        self.tokens = self.ends[-1]
        manifest = read_manifest(data_dir)
        self._check_shards(manifest, data_dir, split, vocab_size)
        pack = manifest.get("settings", {}).get("pack")
        self.masks = self._open_masks(
            {shard["name"] for shard in manifest.get("shards", []) if "targets" in shard}
        )
        self.tokenizer, self.eot = tokenizer_of(data_dir, manifest), manifest.get("eot")
        self.token_bytes = read_sizes(data_dir, manifest)
        self.starts = self._aligned_starts(manifest, data_dir) if align else None
        self.rows_per_epoch = -(-self.tokens // T) if self.starts is None else len(self.starts)
        self.warnings = self._pack_warnings(pack, data_dir)
        if not manifest and os.path.exists(os.path.join(data_dir, "meta.pkl")):
            self.warnings.append(
                f"{data_dir}/meta.pkl is left alone, since a pickle can run any code: samples take --tokenizer, else "
                "GPT-2's; for characters: python fineweb.py --dataset=input.txt --tokenizer=chars"
            )
        self._order, self._order_epoch = None, None

    def _check_shards(self, manifest, data_dir, split, vocab_size):
        dtype = np.dtype(manifest.get("dtype", self.shards[0].dtype))
        for path, shard in zip(self.paths, self.shards):
            if shard.dtype != dtype:
                raise DataError(
                    f"{path} holds {shard.dtype.name} tokens, the rest of {data_dir} holds {dtype.name}; remove it"
                )
        recorded = {shard["name"]: shard.get("tokens") for shard in manifest.get("shards", [])}
        for path, shard in zip(self.paths, self.shards):
            if recorded.get(os.path.basename(path)) not in (None, len(shard)):
                raise DataError(
                    f"{path} has {len(shard)} tokens, which is not what manifest.json says; {MAKE_DATA}"
                )
        if manifest.get("eot", 0) >= manifest.get("vocab_size", 1 << 32):
            raise DataError(f"{data_dir}/manifest.json is damaged: eot is not below vocab_size; {MAKE_DATA}")
        if vocab_size is not None and manifest.get("vocab_size", 0) > vocab_size:
            name, size = manifest["tokenizer"], manifest["vocab_size"]
            raise DataError(
                f"vocab_size={vocab_size} is less than {data_dir}'s ({name}); try --vocab_size={size}"
            )
        if self.tokens <= self.T:
            raise DataError(
                f"{data_dir}: a row needs block_size+1 = {self.T + 1:,} tokens, the {split} split has {self.tokens:,}; "
                "lower --block_size, or make more data"
            )

    def _open_masks(self, recorded):
        """The masks beside the shards, if there are any; `recorded`: names of the shards with one in the manifest."""
        if any(os.path.basename(p) in recorded or mask_path(p).exists() for p in self.paths):
            return [open_mask(mask_path(path), len(shard)) for path, shard in zip(self.paths, self.shards)]

    def _pack_warnings(self, pack, data_dir):
        if pack and pack != self.T:
            return [
                f"{data_dir} is packed for block_size={pack}; rows of {self.T} cut more documents than they need to"
            ]
        if pack and self.starts is not None:
            return [f"{data_dir} is packed for rows that lie end to end; with align_documents they do not"]
        return []

    def _aligned_starts(self, manifest, data_dir):
        """First token of each row of an epoch, int64."""
        if "eot" not in manifest:
            raise DataError(f"align_documents needs the separator, and there is no {data_dir}/manifest.json")
        return aligned_starts(begins(self.shards, manifest["eot"]), self.tokens, self.T)

    def same_tokens(self, other):
        """Whether both have the same tokenizer, perhaps by another path: then each id has as many bytes."""
        known = self.token_bytes is not None and other.token_bytes is not None
        same = (
            np.array_equal(self.token_bytes, other.token_bytes)
            if known
            else self.tokenizer == other.tokenizer
        )
        return same and self.eot == other.eot

    def start(self, row):
        """First token of a row; rows are counted from the start of training."""
        epoch, w = divmod(row, self.rows_per_epoch)
        if self.shuffle_seed is not None:
            if self._order_epoch != epoch:
                self._order = np.random.default_rng((self.shuffle_seed, epoch)).permutation(
                    self.rows_per_epoch
                )
                self._order_epoch = epoch
            w = int(self._order[w])
        return w * self.T if self.starts is None else int(self.starts[w])

    def locate(self, position):
        """(index of the shard, index in it) of a token; positions go around."""
        position %= self.tokens
        shard = bisect.bisect_right(self.ends, position)
        return shard, position - self.ends[shard] + len(self.shards[shard])

    def _pieces(self, position, count):
        """(shard, first token, tokens) of the pieces of shards that follow each other from `position` on."""
        while count:
            shard, at = self.locate(position)
            length = min(count, len(self.shards[shard]) - at)
            yield shard, at, length
            position, count = position + length, count - length

    def read(self, position, row):
        """Fills `row` with tokens from `position` on."""
        filled = 0
        for shard, at, length in self._pieces(position, len(row)):
            row[filled : filled + length] = self.shards[shard][at : at + length]
            filled += length

    def has_loss(self, position, count):
        """Bool (count,): which tokens from `position` on carry loss as targets."""
        if self.masks is None:
            return np.ones(count, bool)
        parts = []
        for shard, at, length in self._pieces(position, count):
            bits = np.unpackbits(self.masks[shard][at // 8 : -(-(at + length) // 8)], bitorder="little")
            parts.append(bits[at % 8 :][:length])
        return np.concatenate(parts).view(bool)


class TokenLoader:
    """Batches for one rank from a split of one folder, or of several in a mixture (corpus/mixture.py).

    All ranks share one order of rows: micro-step k takes world*B rows from row k*world*B on, and rank r of them the B
    rows from r*B on. A global batch therefore holds the same rows for every B and world. Row i of a mixture is the next
    row of the folder that mixture.schedule names. Where a mask leaves out targets, they are -100, and `next` also
    gives the number of those that the optimizer step has on all ranks.

    data_dir: see mixture.folders.
    shuffle_seed: epoch e has its rows in the order of numpy's default_rng((seed, e)).permutation.
    align: a row begins at the last document start inside the row before it, or at that row's end where its document is
    longer than T. A document that was cut is read again from its start, and no token is left out.
    batch_tokens: in an optimizer step; raises DataError if the split has fewer.
    """

    def __init__(
        self,
        data_dir,
        split,
        B,
        T,
        rank=0,
        world=1,
        vocab_size=None,
        device="cpu",
        shuffle_seed=None,
        align=False,
        prefetch=2,
        batch_tokens=0,
    ):
        self.B, self.T, self.rank, self.world, self.vocab_size = B, T, rank, world, vocab_size
        self.data_dir, self.align, self.step_rows = data_dir, align, max(batch_tokens // T, world * B)
        self.device, self.shuffle_seed, self.prefetch = torch.device(device), shuffle_seed, prefetch
        self.folders, self.shares = zip(*mixture.folders(str(data_dir)))
        self.splits = [Split(folder, split, T, vocab_size, shuffle_seed, align) for folder in self.folders]
        self.tokens, self.masked = sum(s.tokens for s in self.splits), any(s.masks for s in self.splits)
        if self.tokens < batch_tokens:
            raise DataError(
                f"{data_dir}: a global batch needs {batch_tokens:,} tokens, the {split} split has {self.tokens:,}; "
                "lower --batch_tokens, or make more data"
            )
        first = self.splits[0]
        self.tokenizer, self.eot, self.token_bytes = first.tokenizer, first.eot, first.token_bytes
        for folder, other in zip(self.folders, self.splits):
            if not other.same_tokens(first):
                raise DataError(
                    f"data_dir={data_dir}: {folder} has the tokenizer {other.tokenizer}, {self.folders[0]} has "
                    f"{self.tokenizer}; make one of them again with the other's, fineweb.py --tokenizer=NAME"
                )
        self.warnings = [words for split in self.splits for words in split.warnings]
        self._turns = mixture.schedule(self.shares)
        self.rows = 0  # rows returned on all ranks together; prefetched rows do not count
        listing = "".join(
            f"{Path(p).name} {len(d)}\n" for s in self.splits for p, d in zip(s.paths, s.shards)
        )
        self.fingerprint = hashlib.sha256(listing.encode()).hexdigest()[:16]
        self._ahead, self._cuda = None, None
        if self.device.type == "cuda":
            self._cuda = self.device.index if self.device.index is not None else torch.cuda.current_device()

    def next(self):
        """(x, y), each int64 (B, T) on the device; y is the token after each token of x. With masks (x, y, targets)."""
        if self._ahead is None:
            self._ahead = Ahead(self._batches(self.rows), self.prefetch)
        batch, *targets = next(self._ahead)
        self.rows += self.world * self.B
        return *self._to_device(batch), *targets

    @property
    def position(self):
        """Number of tokens returned so far, on all ranks together, those before a resume included."""
        return self.rows * self.T

    def shares_of(self, tokens):
        """[(folder, share of the rows, epochs)] of a run over `tokens` tokens."""
        shares = [share / sum(self.shares) for share in self.shares]
        rows = [tokens / self.T * share / split.rows_per_epoch for share, split in zip(shares, self.splits)]
        return list(zip(self.folders, shares, rows))

    def state_dict(self):
        order = {"block_size": self.T, "shuffle_seed": self.shuffle_seed, "align_documents": self.align}
        order |= {"shares": list(self.shares)} if len(self.shares) > 1 else {}
        return {"rows": self.rows, "tokens": self.tokens, "fingerprint": self.fingerprint, **order}

    def load_state_dict(self, state, allow_data_change=False):
        """Continues exactly after the saved row, for any B and world. Raises DataError if the data differs."""
        own = self.state_dict()
        wrong = [f"{k} {own[k]}, not {state.get(k)}" for k in own if k != "rows" and own[k] != state.get(k)]
        if wrong and not allow_data_change:
            raise DataError(
                f"the data of {self.data_dir} is not the data of the checkpoint: {'; '.join(wrong)}; "
                "to continue on it anyway: --allow_data_change"
            )
        self.close()
        self.rows = state["rows"]

    def close(self):
        """Stops the prefetching thread."""
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None

    def eval_batches(self, tokens):
        """Yields this rank's (x, y) of rows 0 to tokens//T - 1, unshuffled: the same rows for every B and world.

        All batches have shape (B, T), and all ranks get equally many; y is -100 in rows that only fill a batch up. For
        one folder, not a mixture.
        """
        (split,) = self.splits
        rows = min(tokens, self.tokens - 1) // self.T
        if rows == 0:
            raise DataError(
                f"eval_tokens={tokens} is less than one row of block_size={self.T}; raise --eval_tokens"
            )
        if not any(split.has_loss(w * self.T + 1, self.T).any() for w in range(rows)):
            raise DataError(
                f"{self.data_dir}: no token of the first eval_tokens={tokens} has loss; raise --eval_tokens"
            )
        for first in range(0, rows, self.world * self.B):
            mine = range(first + self.rank * self.B, first + (self.rank + 1) * self.B)
            x, y = self._to_device(self._gather([(split, w * self.T if w < rows else 0) for w in mine]))
            y[max(0, rows - mine.start) :] = -100
            yield x, y

    def _batches(self, row):
        if self._cuda is not None:
            torch.cuda.set_device(
                self._cuda
            )  # a thread starts on GPU 0; pinning would allocate a context there
        for first in itertools.count(row, self.step_rows):
            step = range(first, first + self.step_rows)
            targets = [self._count(step)] if self.masked else []
            for row in step[:: self.world * self.B]:
                row += self.rank * self.B
                yield self._gather([self._place(i) for i in range(row, row + self.B)]), *targets

    def _count(self, rows):
        """Number of targets with loss in some rows."""
        return sum(int(split.has_loss(start + 1, self.T).sum()) for split, start in map(self._place, rows))

    def _place(self, row):
        """(split, first token) of a row; rows are counted from the start of training."""
        period, at = divmod(row, len(self._turns))
        k, before = self._turns[at]
        return self.splits[k], self.splits[k].start(period * self.shares[k] + before)

    def _gather(self, places):
        """Rows as int32 (B, T+1), in pinned memory for CUDA: half as many bytes as int64 over the bus.

        A token without loss is ~token, which is negative.
        """
        batch = torch.empty(len(places), self.T + 1, dtype=torch.int32, pin_memory=self._cuda is not None)
        rows = batch.numpy().view(np.uint32)
        for row, (split, start) in zip(rows, places):
            split.read(start, row)
        if self.vocab_size is not None and rows.max() >= self.vocab_size:
            b, t = np.argwhere(rows >= self.vocab_size)[0].tolist()
            split, start = places[b]
            shard, at = split.locate(start + t)
            raise DataError(
                f"{split.paths[shard]}: token {at} is {rows[b, t]}, not below vocab_size={self.vocab_size}; "
                "raise --vocab_size if the data has another tokenizer, else make the data again"
            )
        if self.masked:
            for row, (split, start) in zip(rows, places):
                np.invert(row, out=row, where=~split.has_loss(start, self.T + 1))
        return batch

    def _to_device(self, batch):
        batch = batch.to(self.device, non_blocking=True)
        x, y = batch[:, :-1].long(), batch[:, 1:].long()
        return (torch.where(x < 0, ~x, x), torch.where(y < 0, -100, y)) if self.masked else (x, y)


def begins(shards, eot):
    """Sorted int64 positions at which documents begin in the concatenated shards."""
    ends = np.cumsum([len(shard) for shard in shards])
    return np.concatenate(
        [np.flatnonzero(shard == eot) + end - len(shard) for shard, end in zip(shards, ends)]
    )


def aligned_starts(documents, n, T):
    """Row starts of one epoch over n tokens, int64: after start p the last of `documents` in (p, p+T], else p+T.

    documents: sorted positions at which documents begin. 10B tokens have 10M rows, so arrays do the work: a document
    holds `whole` rows, and the row after them ends in document `after`; only that chain of documents is a loop.
    """
    edges = np.union1d([0, n], documents).astype(np.int64)
    whole = -(-np.diff(edges) // T) - 1  # rows of T that end before the next document begins
    after = (np.searchsorted(edges, edges[:-1] + (whole + 1) * T, side="right") - 1).tolist()
    hops, at = [], 0
    while at < len(after):
        hops.append(at)
        at = after[at]
    repeats = whole[hops] + 1
    steps = np.arange(repeats.sum()) - np.repeat(np.cumsum(repeats) - repeats, repeats)
    return np.repeat(edges[hops], repeats) + steps * T
