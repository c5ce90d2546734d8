"""Shards of tokens as fineweb.py writes them: opened, verified, and read as batches in a fixed order.

The format is llm.c's: a header of 1,024 bytes, then uint16 or uint32 tokens, a separator before each
document. nanoGPT's headerless train.bin and val.bin and build-nanogpt's .npy shards are read too.
"""

import array
import bisect
import collections
import concurrent.futures
import contextlib
import functools
import glob
import hashlib
import itertools
import os
import re
from pathlib import Path

import numpy as np
import torch

from corpus import DataError, mixture, told
from corpus.tokenizer import built_in, fits
from system import files

HEADER_BYTES = 1024
FORMATS = {20240520: (1, np.uint16), 20240801: (7, np.uint32)}  # magic: (version, token dtype), as in llm.c
BLOCKS = 16  # of a file, of which its fingerprint is made
BLOCK_BYTES = 1 << 16
MAKE_DATA = "make the data with python fineweb.py (--help lists its settings)"

shard_name = lambda v: files.plain_name(v) and split_of(v) is not None
SHARD = {"name": shard_name, "sha256": files.text, "mask_sha256?": files.sha256}
MANIFEST = {"tokenizer": files.text, "vocab_size": files.id_count, "eot": files.count, "shards?": [SHARD]}
MANIFEST |= {"dtype?": ("uint16", "uint32"), "settings?": {"pack?": (files.count, None)}}
MANIFEST |= {"token_bytes_sha256?": files.sha256}


def unfit(path, found, expected, advice=f"bring it back, or {MAKE_DATA}"):
    """A DataError for a file of the data that is not as it should be."""
    return DataError(f"{path} is damaged: found {found}, expected {expected}; {advice}")


def read_manifest(data_dir):
    """The object in data_dir/manifest.json, {} where there is no such file. Raises DataError."""
    path = Path(data_dir) / "manifest.json"
    if not path.exists() and path.with_name("progress.json").exists():
        half = f"{data_dir} is half made, with progress.json and no manifest.json"
        raise DataError(f"{half}; wait for fineweb.py, or run the same command again: it goes on")
    advised = lambda words: DataError(f"{words}; remove it and {MAKE_DATA}")
    return files.read_json(path, advised, MANIFEST) if os.path.exists(path) else {}


def read_sizes(data_dir, manifest):
    """UTF-8 bytes of each token id from token_bytes.npy, None without a manifest. Raises DataError."""
    path, expected = Path(data_dir) / "token_bytes.npy", manifest.get("token_bytes_sha256")
    if expected is None:
        return None
    if not path.is_file() or files.digest(path)[1] != expected:
        raise unfit(path, "no file, or another SHA-256", "the one in manifest.json")
    return np.load(path)


def ahead(items, depth):
    """Yields `items`, which a thread makes at most `depth` ahead; its exceptions are raised here."""
    items, end, pool = iter(items), object(), concurrent.futures.ThreadPoolExecutor(1)
    try:
        made = collections.deque(pool.submit(next, items, end) for _ in range(depth))
        while (item := made.popleft().result()) is not end:
            made.append(pool.submit(next, items, end))
            yield item
    finally:
        pool.shutdown(cancel_futures=True)  # and wait for the item under way, which may read files


def read_header(path):
    """(tokens, their dtype, bytes before them) of a .bin file; None tokens: all, since it has no header."""
    size = os.path.getsize(path)
    magic, version, count = [*np.fromfile(path, "<i4", 3).tolist(), 0, 0, 0][:3]
    # GPT-2's tokens cannot look like a header: both magics contain 16-bit values above 50,256
    if magic not in FORMATS and os.path.basename(path) in ("train.bin", "val.bin"):
        return None, np.dtype("<u2"), 0
    right, dtype = FORMATS.get(magic, (None, np.uint16))
    need = HEADER_BYTES + count * np.dtype(dtype).itemsize
    if version != right or count <= 0 or size != need:
        found = f"magic {magic}, version {version}, {count} tokens and {size} bytes"
        advice = f"name it train.bin or val.bin if nanoGPT wrote it, else {MAKE_DATA}"
        raise unfit(path, found, f"llm.c's header and {need} bytes", advice)
    return count, np.dtype(dtype).newbyteorder("<"), HEADER_BYTES


def open_shard(path):
    """The tokens of a shard, or of nanoGPT's headerless train.bin or val.bin, as a read-only memory map."""
    with told(f"{path} is damaged", DataError, f"; if it can be read at all, remove it and {MAKE_DATA}"):
        if not str(path).endswith(".npy"):
            count, dtype, offset = read_header(path)
            return np.memmap(path, dtype, "r", offset, count)
        tokens = np.load(path, "r")  # build-nanogpt's; objects are not unpickled
        extra = os.path.getsize(path) - tokens.offset - tokens.nbytes
    if tokens.ndim != 1 or tokens.dtype not in (np.uint16, np.uint32) or not len(tokens) or extra:
        raise unfit(path, f"{tokens.dtype} {tokens.shape} and {extra} bytes more", "uint16 or uint32 tokens")
    return tokens


def mask_path(path):
    """The file beside a shard that marks tokens with loss: a bit a token, the lowest of a byte first."""
    return Path(path).with_suffix(".mask")


def split_of(name):
    """train or val: the last word, but for the number, in a shard's file name; None if it is neither."""
    found = re.search(r"_(train|val)(?:_[^_]*)?\.(?:bin|npy)$", name)
    return found and found[1]


def find_shards(data_dir, split, listed=None):
    """Sorted paths of a split: the shards `listed` in a manifest, or any, or nanoGPT's; or a DataError."""
    names = sorted(glob.glob(f"*{split}*", root_dir=data_dir))
    found = [name for name in names if split_of(name) == split or name == f"{split}.bin"]
    if len({(name == f"{split}.bin", name[-4:]) for name in found}) > 1:
        raise DataError(f"{data_dir} holds {found[0]} and {found[-1]}; keep one kind, move the other")
    if listed is not None:
        listed = {shard["name"] for shard in listed if split_of(shard["name"]) == split}
        for name in sorted(listed ^ set(found)):
            wrong = "is missing; bring it back" if name in listed else "is not one of them; move it away"
            raise DataError(f"{data_dir}/manifest.json lists the shards, and {name} {wrong}")
    if found:
        paths = [os.path.join(data_dir, name) for name in found]
        for path in paths:
            if not os.path.isfile(path):
                raise DataError(f"{path} is a folder, a pipe or a device; expected a file; move it away")
        return paths
    hint = "make one, or train without: --eval_interval=0" if split == "val" else MAKE_DATA
    if not os.path.isdir(data_dir):
        here = "; ./quickstart.sh makes this one" if os.path.basename(data_dir) == "quickstart" else ""
        raise DataError(f"no such folder: {data_dir}; {MAKE_DATA}{here}")
    names = f"*_{split}_*.bin, .npy or {split}.bin"
    raise DataError(f"{data_dir} holds no {split} split ({names}); {hint}")


def fingerprint(folders, split):
    """A digest of the content of a split of folders, behind the number of its version. Raises DataError.

    It is made of the manifests' SHA-256 and of blocks of every file; dry runs read all, see `verify`.
    """
    lines = []
    for folder in folders:
        listed = read_manifest(folder).get("shards")
        paths = [Path(path) for path in find_shards(folder, split, listed)]
        own = [shard for shard in listed or () if split_of(shard["name"]) == split]
        for shard in sorted(own, key=lambda shard: shard["name"]):
            lines += [shard["sha256"], shard.get("mask_sha256", "")]
        masks = [mask for mask in map(mask_path, paths) if mask.is_file()]
        with told(f"{folder} cannot be read", DataError), concurrent.futures.ThreadPoolExecutor(8) as pool:
            lines += pool.map(sampled, [*paths, *masks])
    return "2:" + hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def sampled(path):
    """SHA-256 of a file's length and of BLOCKS blocks spread over it; of a small file of all its bytes."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        found = hashlib.sha256(f"{size} ".encode())
        if size <= BLOCKS * BLOCK_BYTES:
            found.update(file.read())
        else:
            for number in range(BLOCKS):  # the first and the last bytes too
                file.seek(number * (size - BLOCK_BYTES) // (BLOCKS - 1))
                found.update(file.read(BLOCK_BYTES))
    return found.hexdigest()


def verify(data_dir):
    """Compares every shard and mask of the folders with the manifest's SHA-256. Raises DataError."""
    for folder, _ in mixture.folders(str(data_dir)):
        for shard in read_manifest(folder).get("shards", ()):  # somebody else's shards have no checksums
            path = Path(folder) / shard["name"]
            for file, sha256 in [(path, shard["sha256"]), (mask_path(path), shard.get("mask_sha256"))]:
                whole = file.is_file() and f"SHA-256 {files.digest(file)[1]}"
                found = "a link" if file.is_symlink() else whole or "no file"
                if sha256 is not None and found != f"SHA-256 {sha256}":
                    raise unfit(file, found, f"the manifest's file, SHA-256 {sha256}")


class Split:
    """The shards of a folder's split as one circle of `tokens` tokens, and the order of the rows in it.

    Row w is the T+1 tokens from token w*T on, or from aligned_starts[w] on; the last one wraps around. Rows
    that are shuffled, and neither aligned nor packed, begin `shift` tokens later in each epoch.
    """

    def __init__(self, data_dir, split, T, vocab_size, shuffle_seed=None, align=False):
        self.T, self.shuffle_seed, self.align = T, shuffle_seed, align
        manifest = read_manifest(data_dir)
        self.paths = find_shards(data_dir, split, manifest.get("shards"))
        self.shards = [open_shard(path) for path in self.paths]
        self.ends = np.cumsum([len(shard) for shard in self.shards]).tolist()
        self.tokens, self.ids = self.ends[-1], manifest.get("vocab_size")
        self.eot, self.token_bytes = manifest.get("eot"), read_sizes(data_dir, manifest)
        self._check(manifest, vocab_size)
        masks = [mask_path(path) for path in self.paths]
        masked, self.masks = any("mask_sha256" in shard for shard in manifest.get("shards", ())), None
        if masked or any(mask.exists() for mask in masks):
            for mask, shard in zip(masks, self.shards):
                size, need = mask.stat().st_size if mask.is_file() else 0, -(-len(shard) // 8)
                if size != need:
                    raise unfit(mask, f"{size} bytes", f"{need} for {len(shard)} tokens")
            self.masks = [np.memmap(mask, np.uint8, "r") for mask in masks]
        self.tokenizer, own = manifest.get("tokenizer"), Path(data_dir, "tokenizer.json")
        gone = self.tokenizer is None or not (built_in(self.tokenizer) or Path(self.tokenizer).exists())
        if gone and own.is_file():
            self.tokenizer = str(own)
        if align and self.eot is None:
            raise DataError(f"align_documents needs the separator, and there is no {data_dir}/manifest.json")
        self.starts = range(0, self.tokens, T)
        if align:
            found = zip(self.shards, self.ends)
            begins = [np.flatnonzero(shard == self.eot) + end - len(shard) for shard, end in found]
            self.starts = aligned_starts(np.concatenate(begins), self.tokens, T)
        self.rows_per_epoch = len(self.starts)
        pack = manifest.get("settings", {}).get("pack")
        self.shift = 0 if pack or align else round(0.382 * T)  # each epoch cuts other rows (docs/modern.md)
        why = f"is packed for block_size={pack} without align_documents; others cut more documents"
        self.warning = f"{data_dir} {why}" if pack and (pack != T or align) else None
        self._order = functools.lru_cache(1)(self.order)

    def _check(self, manifest, vocab_size):
        """Raises DataError for shards that do not go together, with the manifest or with the model."""
        dtype = np.dtype(manifest.get("dtype", self.shards[0].dtype))
        for path, shard in zip(self.paths, self.shards):
            if shard.dtype != dtype:
                raise unfit(path, f"{len(shard)} {shard.dtype.name} tokens", f"tokens of {dtype.name}")
        spare = self.token_bytes is not None and fits(vocab_size or 0, self.token_bytes, self.eot)
        if vocab_size is not None and (self.ids or 0) > vocab_size and not spare:
            raise DataError(f"vocab_size={vocab_size} is below the tokenizer's; try --vocab_size={self.ids}")

    def order(self, epoch, seed):
        """The numbers of the rows in the order of an epoch; seed: shuffle_seed."""
        rows = np.arange(self.rows_per_epoch)
        return rows if seed is None else np.random.default_rng((seed, epoch)).permutation(rows)

    def start(self, row):
        """First token of a row; rows are counted from the start of training."""
        epoch, w = divmod(row, self.rows_per_epoch)
        if self.shuffle_seed is None:
            return int(self.starts[w])
        return (
            int(self.starts[self._order(epoch, self.shuffle_seed)[w]] + epoch * self.shift % self.T)
            % self.tokens
        )

    def pieces(self, position, count):
        """Yields (number of a shard, first token there, ids) for `count` tokens from `position` on."""
        while count:
            position %= self.tokens
            shard = bisect.bisect_right(self.ends, position)
            at = position - self.ends[shard] + len(self.shards[shard])
            ids = self.shards[shard][at : at + count]
            yield shard, at, ids
            position, count = position + len(ids), count - len(ids)

    def has_loss(self, position, count):
        """Bool (count,): which tokens from `position` on carry loss as targets."""
        if self.masks is None:
            return np.ones(count, bool)
        parts = []
        for shard, at, ids in self.pieces(position, count):
            bits = np.unpackbits(self.masks[shard][at // 8 : -(-(at + len(ids)) // 8)], bitorder="little")
            parts.append(bits[at % 8 :][: len(ids)])
        return np.concatenate(parts).view(bool)


class TokenLoader:
    """Batches for one rank from a split of one folder, or of several in a mixture (corpus/mixture.py).

    All ranks share one order of rows: micro-step k takes world*B rows from row k*world*B on, and rank r of
    them the B rows from r*B on, so that a global batch holds the same rows for every B and world.
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
        batch_tokens=0,
        allow_data_change=False,
        **order,
    ):
        self.B, self.T, self.rank, self.world, self.vocab_size = B, T, rank, world, vocab_size
        self.data_dir, self.allow_data_change = data_dir, allow_data_change
        self.device = torch.empty(0, device=device).device  # with its index
        self.folders, self.shares = zip(*mixture.folders(str(data_dir)))
        self.splits = [Split(folder, split, T, vocab_size, **order) for folder in self.folders]
        self.tokens, self.masked = sum(s.tokens for s in self.splits), any(s.masks for s in self.splits)
        if self.tokens < batch_tokens or min(s.tokens for s in self.splits) <= T:
            found = f"the {split} split has {self.tokens:,} tokens"
            need = f"{max(batch_tokens, T + 1):,} for a global batch, of each folder {T + 1:,} for a row"
            raise DataError(f"{data_dir}: {found}, expected {need}; lower --batch_tokens or --block_size")
        first = self.splits[0]
        self.tokenizer, self.eot, self.token_bytes = first.tokenizer, first.eot, first.token_bytes
        self.ids = first.ids  # of the tokenizer, None without a manifest
        for folder, other in zip(self.folders, self.splits):
            known = other.token_bytes is not None and first.token_bytes is not None  # bytes of each id
            alike = np.array_equal(*(s.token_bytes if known else s.tokenizer for s in (other, first)))
            if other.eot != first.eot or not alike:
                two = f"{folder} has the tokenizer {other.tokenizer}, {self.folders[0]} has {self.tokenizer}"
                raise DataError(f"data_dir={data_dir}: {two}; make one again with fineweb.py --tokenizer")
        self.warnings = [split.warning for split in self.splits if split.warning]
        self._turns = mixture.schedule(self.shares)
        self.fingerprint, self.validation = fingerprint(self.folders, split), None
        if split == "train":  # the same command is to validate on the same data
            with contextlib.suppress(DataError):  # a folder may have none
                self.validation = fingerprint(self.folders, "val")
        self.rows = 0  # returned on all ranks together; prefetched ones do not count
        self._ahead = ahead(self._batches(0), 2)

    def next(self):
        """(x, y), each int64 (B, T) on the device, y one token later than x; -100 in y has no loss."""
        batch = next(self._ahead)
        self.rows += self.world * self.B
        return self._to_device(batch)

    def describe(self, tokens):
        """Rows of the start-up summary of a run over `tokens` tokens; None: they are not known."""
        epochs = f"{tokens / self.tokens:.2g} epochs, " if tokens else ""
        words = f"{self.data_dir}: {self.tokens:,} training tokens, {epochs}"
        words += f"tokenizer {self.tokenizer or 'n/a'}"
        rows = [("data", words)]
        for name, share, split in zip(self.folders, self.shares, self.splits):
            if len(self.folders) > 1:
                part = share / sum(self.shares)
                epochs = f", {tokens / self.T * part / split.rows_per_epoch:.2f} epochs" if tokens else ""
                rows.append(("", f"{name}: {part:.1%} of the rows{epochs}"))
        return rows + [("warning", words) for words in self.warnings]

    def state_dict(self):
        first, shares = self.splits[0], {"shares": list(self.shares)} if len(self.shares) > 1 else {}
        state = dict(rows=self.rows, tokens=self.tokens, fingerprint=self.fingerprint, block_size=self.T)
        if self.validation:
            state["validation"] = self.validation
        return state | dict(shuffle_seed=first.shuffle_seed, align_documents=first.align) | shares

    def load_state_dict(self, state):
        """Continues exactly after the saved row, for any B and world. Raises DataError for other data."""
        own = self.state_dict()
        if "validation" not in state:  # of an earlier version, or there was none
            own.pop("validation", None)
        if ":" not in str(state.get("fingerprint")):  # of an earlier version
            own["fingerprint"] = self._listing()
        if not files.count(state.get("rows")):
            found = f"rows={state.get('rows')!r}"
            raise DataError(f"the checkpoint has no position in shards of tokens: {found}")
        wrong = [f"{k} {own[k]}, not {state.get(k)}" for k in own if k != "rows" and own[k] != state.get(k)]
        if wrong and not self.allow_data_change:
            differ = f"is not the data of the checkpoint: {'; '.join(wrong)}"
            raise DataError(f"{self.data_dir} {differ}; to go on with it anyway: --allow_data_change")
        if wrong:
            changed = {key for key in own if own[key] != state.get(key)} - {"rows", "validation"}
            self.warnings.append(
                f"other data than before ({'; '.join(wrong)})" + self._changed(state, changed)
            )
        self.close()
        self.rows = state["rows"]
        self._ahead = ahead(self._batches(self.rows), 2)

    def _listing(self):
        """The fingerprint of earlier versions, of names and lengths."""
        shards = (shard for split in self.splits for shard in zip(split.paths, split.shards))
        listing = "".join(f"{os.path.basename(path)} {len(tokens)}\n" for path, tokens in shards)
        return hashlib.sha256(listing.encode()).hexdigest()[:16]

    def _changed(self, state, changed):
        """Says what is read again and what is left out where a run goes on at state["rows"] of other data.

        changed: names in `state` whose values are now others.
        """
        if not changed:
            return ""
        split, rows, before = self.splits[0], state["rows"], state.get("block_size")
        epoch, row = divmod(rows, split.rows_per_epoch)
        where, left = f": goes on at row {row:,} of {split.rows_per_epoch:,}", split.rows_per_epoch - row
        plain = len(self.splits) == 1 and not split.align
        seeds = state.get("shuffle_seed"), split.shuffle_seed
        same_rows = epoch == 0 or None not in seeds  # which are shifted in later epochs
        if plain and changed == {"shuffle_seed"} and same_rows:
            old, new = (split.order(epoch, seed) for seed in seeds)
            again = np.intersect1d(old[:row], new[row:]).size
            those = f"{again:,} were read already, and as many that were not are left out"
            return f"{where}; of the {left:,} left in this epoch {those}"
        if plain and changed == {"block_size"} and split.shuffle_seed is None and files.count(before):
            tokens = rows * (self.T - before)
            return f"{where}; {abs(tokens):,} tokens are {'left out' if tokens > 0 else 'read again'}"
        if len(self.splits) > 1:
            where = f": goes on at row {rows:,} of the mixture"
        return f"{where}; the rows before it are left out, and what was read before may come again"

    def close(self):
        """Stops the prefetching thread."""
        self._ahead.close()

    def eval_rows(self, tokens):
        """How many rows eval_batches(tokens) has, on all ranks together."""
        return min(tokens, self.tokens - 1) // self.T

    def eval_batches(self, tokens):
        """Yields this rank's (x, y) of rows 0 to tokens//T - 1; y is -100 in rows that fill a batch up."""
        (split,), rows = self.splits, self.eval_rows(tokens)
        if not any(split.has_loss(w * self.T + 1, self.T).any() for w in range(rows)):
            what = f"eval_tokens={tokens} holds no row of block_size={self.T} with loss; raise --eval_tokens"
            raise DataError(f"{self.data_dir}: {what}")
        for first in range(0, rows, self.world * self.B):
            mine = range(first + self.rank * self.B, first + (self.rank + 1) * self.B)
            x, y = self._to_device(self._gather([(split, w * self.T if w < rows else 0) for w in mine]))
            y[max(0, rows - mine.start) :] = -100
            yield x, y

    def documents(self, rows):
        """(rows,): the number of the document in which each row begins; if eot is unknown, of the row."""
        if self.eot is None:
            return np.arange(rows)
        ids = np.concatenate([ids for *_, ids in self.splits[0].pieces(0, rows * self.T)])
        return np.searchsorted(np.flatnonzero(ids == self.eot), np.arange(rows) * self.T, "right")

    def _batches(self, row):
        if self.device.type == "cuda":  # a thread starts on GPU 0; pinning would allocate a context there
            torch.cuda.set_device(self.device)
        for first in itertools.count(row + self.rank * self.B, self.world * self.B):
            yield self._gather([self._place(i) for i in range(first, first + self.B)])

    def _place(self, row):
        """(split, first token) of a row; rows are counted from the start of training."""
        period, at = divmod(row, len(self._turns))
        k, before = self._turns[at]
        return self.splits[k], self.splits[k].start(period * self.shares[k] + before)

    def _gather(self, places):
        """Rows as int32 (B, T+1), half of int64's bytes, pinned for CUDA; a token without loss is ~token."""
        batch = torch.empty(len(places), self.T + 1, dtype=torch.int32, pin_memory=self.device.type == "cuda")
        rows = batch.numpy().view(np.uint32)
        for row, (split, start) in zip(rows, places):
            np.concatenate([ids for *_, ids in split.pieces(start, self.T + 1)], out=row, casting="same_kind")
        if self.vocab_size is not None and rows.max() >= self.vocab_size:
            b, t = np.argwhere(rows >= self.vocab_size)[0].tolist()
            split, start = places[b]
            shard, at, _ = next(split.pieces(start + t, 1))
            found = f"token {at} is {rows[b, t]}, not below vocab_size={self.vocab_size}"
            raise DataError(f"{split.paths[shard]}: {found}; raise it, or make the data again")
        if self.masked:
            for row, (split, start) in zip(rows, places):
                np.invert(row, out=row, where=~split.has_loss(start, self.T + 1))
        return batch

    def _to_device(self, batch):
        batch = batch.to(self.device, non_blocking=True)
        x, y = batch[:, :-1].long(), batch[:, 1:].long()
        return (torch.where(x < 0, ~x, x), torch.where(y < 0, -100, y)) if self.masked else (x, y)


class Repeated:
    """Another loader's first batches, as many as `number`, again and again (--overfit)."""

    def __init__(self, loader, number):
        self.loader = loader
        self.batches = itertools.cycle([loader.next() for _ in range(number)])

    def next(self):
        return next(self.batches)

    def __getattr__(self, name):  # all else
        return getattr(self.loader, name)


def aligned_starts(documents, n, T):
    """Row starts of an epoch: after p the last of `documents`, sorted positions, in (p, p+T], else p+T."""
    edges, starts, p = [0, *documents.tolist(), n], array.array("q"), 0
    while p < n:  # about 5 s for the 10M rows of 10B tokens
        starts.append(p)
        last = edges[bisect.bisect_right(edges, p + T) - 1]
        p = last if last > p else p + T
    return np.array(starts)
