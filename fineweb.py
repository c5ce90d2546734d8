"""Tokens to train on: shards from the Hugging Face hub or from local files, and the loader that reads them.

    python fineweb.py                                          # FineWeb-Edu sample-10BT into data/fineweb-edu, 20 GB
    python fineweb.py --dataset=kjj0/fineweb10B-gpt2 --max_shards=10      # ready-made GPT-2 shards of FineWeb
    python fineweb.py --dataset="books/*.txt,notes.jsonl.zst" --out_dir=data/mine
    python fineweb.py --pack=131072 --min_document_tokens=8192            # for long sequences, see packing.py

As a script it writes llm.c shards (a 1,024-byte header, then uint16 or uint32 tokens, the separator before each
document), manifest.json with checksums, and token_bytes.npy. Validation gets whole documents from the front; none is
in both splits. Training shards are exactly shard_tokens long, save the last; documents run on from one to the next.
Empty documents are left out. A killed run, started again, goes on where it was and ends with the same bytes.
As a module: `TokenLoader`, `read_header` and `verify`.
"""

import bisect
import contextlib
import fcntl
import glob
import hashlib
import io
import itertools
import json
import math
import os
import queue
import re
import shutil
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

import packing
import tokenizer as tokenizers
from configurator import UserError, run

HEADER_BYTES = 1024
FORMATS = {20240520: (1, np.uint16), 20240801: (7, np.uint32)}  # magic: (version, tokens), as llm.c has them
SHORT_NAMES = {"fineweb": "HuggingFaceFW/fineweb", "fineweb-edu": "HuggingFaceFW/fineweb-edu"}
READY_MADE = ("kjj0/fineweb10B-gpt2", "kjj0/fineweb100B-gpt2", "kjj0/finewebedu10B-gpt2")  # GPT-2 shards on the hub
COMPRESSED = (".zst", ".gz", ".xz", ".bz2")
RECORDS = {
    ".jsonl": "json",
    ".json": "json",
    ".parquet": "parquet",
}  # other files are one document each
AS_DOCUMENTS = {"sample_by": "document", "encoding_errors": "replace"}
MAKE_DATA = "make the data with python fineweb.py (--help lists its settings)"


class DataError(UserError):
    exit_code = 3


@dataclass
class Config:
    dataset: str = "fineweb-edu"  # fineweb, fineweb-edu, a hub name, or local files, folders and globs between commas
    subset: str = "sample-10BT"  # of FineWeb and FineWeb-Edu; of another hub dataset where it is not the default here
    split: str = "train"  # the hub's split to read
    text_key: str = "text"  # the field with the text, in jsonl and parquet
    streaming: bool = False  # read as it downloads, keeping no copy; shuffle_seed then mixes within a buffer only
    out_dir: str | None = None  # where the shards go; None: data/<name of the dataset>
    tokenizer: str = "gpt2"  # gpt2, another tiktoken encoding, bytes, or a path to a tokenizer.model or tokenizer.json
    shard_tokens: int = 100_000_000  # tokens in a shard; with pack the whole rows that fit in so many
    val_tokens: int | None = None  # validation tokens, at least; None: shard_tokens, of local files about 1%
    shuffle_seed: int | None = None  # documents in the order of this seed; None: as they come
    max_tokens: int | None = None  # training tokens to stop after; None: all
    pack: int | None = None  # a block_size: documents in an order in which its rows cut few of them; None: as they come
    min_document_tokens: int | None = None  # leave out documents that are shorter; None: only empty ones
    max_shards: int | None = None  # of a ready-made dataset: training shards to fetch; None: all


# ---- writing


def main(cfg):
    check(cfg)
    name = SHORT_NAMES.get(cfg.dataset, cfg.dataset)
    files = None if name in READY_MADE else local_files(name)
    short = "text" if files and len(files) > 1 else re.sub(r"[^\w-].*", "", Path(name).name) or "text"
    out = Path(cfg.out_dir or f"data/{short}")
    tokenizer = tokenizers.load("gpt2" if name in READY_MADE else cfg.tokenizer)
    with claim(out):
        if name in READY_MADE:
            progress = Progress(out, {"dataset": name, "max_shards": cfg.max_shards})
            fill = lambda: fetch_shards(name, cfg.max_shards, progress, tokenizer)
        else:
            progress = Progress(out, settings(cfg, name, files, tokenizer))
            fill = lambda: write_shards(documents(cfg, name, files, progress.document), progress, tokenizer, short)
        if progress.finished:
            print(f"{out} is finished already; nothing was done")
        else:
            began, before = time.perf_counter(), progress.total("tokens")
            fill()
            progress.finish(tokenizer)
            rate = (progress.total("tokens") - before) / (time.perf_counter() - began)
            print(f"{progress.total('documents'):,} documents, {rate / 1e6:.2f}M tokens/s")
    for split in ("train", "val"):
        n = sum(f"_{split}_" in shard["name"] for shard in progress.shards)
        print(f"{split:5}  {n} shards, {progress.total('tokens', split):,} tokens")
    if cfg.pack:
        cut = read_json(out / "manifest.json")["documents_cut"]
        print(f"pack   rows of {cfg.pack:,} tokens cut {cut['packed']:.2%} of documents, not {cut['by_chance']:.2%}")
    print(f"go on with  python train.py --data_dir={out} --vocab_size={tokenizer.vocab_size}")


def check(cfg):
    """Raises one UserError for every setting out of range."""
    least = {"shard_tokens": 1, "val_tokens": 0, "max_tokens": 1, "max_shards": 1, "shuffle_seed": 0}
    least |= {"pack": 2, "min_document_tokens": 1}
    given = {k: getattr(cfg, k) for k in least if getattr(cfg, k) is not None}
    wrong = [f"{k}={v} must be at least {least[k]}" for k, v in given.items() if v < least[k]]
    if cfg.shard_tokens >= 1 << 31:
        wrong.append(f"shard_tokens={cfg.shard_tokens} must be below 2**31, what the header can count")
    if cfg.pack and cfg.pack > cfg.shard_tokens:
        wrong.append(f"shard_tokens={cfg.shard_tokens} must be at least pack={cfg.pack}, since shards hold whole rows")
    if (cfg.pack or cfg.min_document_tokens) and cfg.dataset in READY_MADE:
        wrong.append(f"pack and min_document_tokens are for texts; {cfg.dataset} is tokenized already")
    if cfg.max_shards is not None and cfg.dataset not in READY_MADE:
        wrong.append(f"max_shards={cfg.max_shards} is for {', '.join(READY_MADE)} alone; here it is --max_tokens")
    if wrong:
        raise UserError("; ".join(wrong))


@contextlib.contextmanager
def claim(out):
    """Makes folder `out` and keeps others from writing to it; the lock dies with the process, so none goes stale."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / "probe.tmp").touch()
        lock = os.open(out, os.O_RDONLY)
    except OSError as error:
        raise UserError(f"out_dir={out} can't be written: {error.strerror}") from None
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"out_dir={out}: another fineweb.py is writing there; wait for it, or stop it") from None
        yield
    finally:
        os.close(lock)


def local_files(dataset):
    """The paths that `dataset` names, in order, or None if it names a hub dataset.

    Within a folder: all files by name, save hidden ones, those in __pycache__ and binary ones.
    """
    on_hub = re.fullmatch(r"[\w-]+|[\w-][\w.-]*/[\w-][\w.-]*", dataset) and not os.path.exists(dataset)
    if on_hub and Path(dataset).suffix not in (".txt", *COMPRESSED, *RECORDS):
        return None
    files = []
    for part in dataset.split(","):
        found = [part] if os.path.exists(part) else sorted(glob.glob(part, recursive=True))
        if not found:
            raise UserError(f"dataset={dataset}: no file matches {part!r}")
        for path in map(Path, found):
            files += sorted(p for p in path.rglob("*") if _is_text(p, path)) if path.is_dir() else [path]
    if not files:
        raise UserError(f"dataset={dataset}: no text files in there")
    return list(dict.fromkeys(map(str, files)))


def _is_text(path, root):
    if not path.is_file() or any(part.startswith((".", "__pycache__")) for part in path.relative_to(root).parts):
        return False
    with open(path, "rb") as file:
        return path.suffix in (*COMPRESSED, ".parquet") or b"\0" not in file.read(8192)


def settings(cfg, name, files, tokenizer):
    """What decides the shards' bytes; a folder that was started with other values is refused."""
    chosen = {"dataset": name, "text_key": cfg.text_key, "tokenizer": cfg.tokenizer, "vocab_size": tokenizer.vocab_size}
    chosen |= {k: getattr(cfg, k) for k in ("shard_tokens", "val_tokens", "max_tokens", "shuffle_seed")}
    chosen |= {k: getattr(cfg, k) for k in ("pack", "min_document_tokens") if getattr(cfg, k) is not None}
    if cfg.shuffle_seed is not None:
        chosen["streaming"] = cfg.streaming  # the two shuffle differently
    if files is None:
        chosen |= {"subset": cfg.subset, "split": cfg.split}
        default_val = cfg.shard_tokens
    else:
        sizes = [os.path.getsize(path) for path in files]
        listing = "".join(f"{path}\t{size}\n" for path, size in zip(files, sizes)).encode()
        chosen |= {"files": len(files), "files_sha256": hashlib.sha256(listing).hexdigest()}
        # About 1% of the tokens: a token is a byte, or some four (a compressed file counts as it lies, so gives less).
        one_percent = sum(sizes) // (100 if tokenizer.name == "bytes" else 400)
        default_val = max(1, min(one_percent, cfg.shard_tokens))
    if cfg.val_tokens is None:
        chosen["val_tokens"] = default_val
    return chosen


def documents(cfg, name, files, first):
    """Yields lists of texts, from document number `first` on. Raises DataError, where the hub has failed six times."""
    import datasets  # takes a second, and training does without

    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    try:
        data = load_files(cfg, files) if files else load_hub(cfg, name)
        if data.column_names and cfg.text_key not in data.column_names:
            fields = ", ".join(data.column_names)
            raise DataError(f"dataset={cfg.dataset} has no field text_key={cfg.text_key}; it has {fields}")
        data = data.select_columns([cfg.text_key])
        if cfg.shuffle_seed is not None:
            data = data.shuffle(seed=cfg.shuffle_seed)
        if first:
            data = data.skip(first) if cfg.streaming else data.select(range(min(first, len(data)), len(data)))
        for batch in data.iter(batch_size=256):  # some 200,000 tokens
            yield batch[cfg.text_key]
    except UserError:
        raise
    except Exception as error:  # the hub's, a parser's, the disk's: datasets promises no narrower type
        if isinstance(error, datasets.exceptions.DatasetGenerationError) and error.__cause__:
            error = error.__cause__
        what = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise DataError(
            f"dataset={cfg.dataset} can't be read: {what}; finished shards are kept, the same command goes on from them"
        ) from None


def load_hub(cfg, name):
    import datasets

    wanted = name in SHORT_NAMES.values() or cfg.subset != Config.subset  # the default fits FineWeb alone
    return datasets.load_dataset(name, cfg.subset if wanted else None, split=cfg.split, streaming=cfg.streaming)


def load_files(cfg, files):
    """The documents of `files` in their order: neighbours of one kind are read together, and the parts joined."""
    import datasets

    def kind(path):
        suffixes = [suffix for suffix in Path(path).suffixes if suffix not in COMPRESSED]
        return RECORDS.get(suffixes[-1], "text") if suffixes else "text"

    parts = []
    alone = lambda path: (kind(path), path if kind(path) == "json" else "")  # other fields must not keep two apart
    for (builder, _), paths in itertools.groupby(files, alone):
        options = {"parquet": {"columns": [cfg.text_key]}, "text": AS_DOCUMENTS}.get(builder, {})
        paths = [glob.escape(os.path.abspath(path)) for path in paths]
        part = datasets.load_dataset(
            builder, data_files={"train": paths}, split="train", streaming=cfg.streaming, **options
        )
        if builder == "text" and cfg.text_key != "text":
            part = part.rename_column("text", cfg.text_key)
        parts.append(part.select_columns([cfg.text_key]) if cfg.text_key in (part.column_names or []) else part)
    return parts[0] if len(parts) == 1 else datasets.concatenate_datasets(parts)


def write_shards(texts, progress, tokenizer, short):
    """Writes the shards that are still missing; `texts` yields lists of documents from progress.document on."""
    writer, pack = ShardWriter(progress, tokenizer, short), progress.settings.get("pack")
    begun, least = progress.total("tokens"), progress.settings.get("min_document_tokens", 1)
    bar = tqdm(desc=short, initial=begun, unit=" tokens", unit_scale=True, disable=None)
    with bar, contextlib.closing(Ahead(texts, 4)) as batches:
        rows = tokenized(batches, tokenizer, progress.document, least)
        if writer.val:  # as they come, with pack too
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


def tokenized(batches, tokenizer, number, least):
    """Yields (number, tokens) of the documents of at least `least` tokens, a separator put first."""
    for batch in batches:
        for ids in tokenizer.encode_batch([text or "" for text in batch]):
            if len(ids) >= least:
                row = np.empty(len(ids) + 1, tokenizer.dtype)
                row[0], row[1:] = tokenizer.eot, ids
                yield number, row
            number += 1


class ShardWriter:
    """Gathers tokens into the open shard and closes it when it is full."""

    def __init__(self, progress, tokenizer, short):
        self.progress, self.tokenizer, self.short = progress, tokenizer, short
        self.shard_tokens, self.val_tokens = progress.settings["shard_tokens"], progress.settings["val_tokens"]
        self.shard_tokens -= self.shard_tokens % progress.settings.get("pack", 1)
        self.number = progress.document - 1  # the document last taken
        self.max_tokens = progress.settings["max_tokens"] or math.inf
        self._open()

    def _open(self):
        self.buffer, self.count = bytearray(), 0
        self.val = self.val_tokens > 0 and not self.progress.shards
        left = self.max_tokens - self.progress.total("tokens", "train")
        self.room, self.complete = min(self.shard_tokens, left), left <= 0 and not self.val

    def position(self, number, done):
        """Where to go on, for Progress: document `number` was the last, cut after `done` tokens, or whole (0)."""
        return (number, done, []) if done else (number + 1, 0, [])

    def take_all(self, rows, bar):
        """Takes documents until validation is full, or all is, or there are none left; the first as far as undone."""
        val, done = self.val, self.progress.tokens
        if self.complete:
            return
        for number, row in rows:
            self.number = number
            bar.update(len(row) - done)
            while done < len(row) and not self.complete:
                done = self.take(row, done)
            done = 0
            if self.complete or self.val != val:
                return

    def take(self, row, done):
        """Takes what fits of row[done:]; returns how much of the row is then done."""
        end = len(row) if self.val else min(len(row), done + self.room - self.count)
        self.buffer += row[done:end].tobytes()
        self.count += end - done
        if self.count >= (self.val_tokens if self.val else self.room):
            self.close(end if end < len(row) else 0)
        return end

    def close(self, done):
        """Writes the open shard; `done` tokens of the last document are in it, or all of them (0)."""
        if self.count:
            index = len(self.progress.shards) + (self.val_tokens == 0)  # 0 is validation
            name = f"{self.short}_{'val' if self.val else 'train'}_{index:06d}.bin"
            tokens = np.frombuffer(self.buffer, self.tokenizer.dtype)
            header = np.zeros(HEADER_BYTES // 4, np.int32)
            magic = next(magic for magic, (_, dtype) in FORMATS.items() if dtype == tokens.dtype)
            header[:3] = magic, FORMATS[magic][0], len(tokens)
            write_atomic(self.progress.out / name, header.astype("<i4"), tokens)
            self.progress.add(name, tokens, self.tokenizer, self.position(self.number, done))
        self._open()


class Progress:
    """The record of a run in its folder: progress.json while it lasts, manifest.json once all is done.

    document, tokens: the next shard begins in that document of the source, after so many tokens of it. Of packed data
    `document` is the first that is not all in place, and order: which one is cut, and those that are in place after it.
    """

    def __init__(self, out, settings):
        self.out, self.settings, self.shards, self.document, self.tokens, self.order = out, settings, [], 0, 0, []
        saved = read_json(out / "progress.json") or read_json(out / "manifest.json")
        self.finished = (out / "manifest.json").exists()
        for leftover in [*out.glob("*.tmp"), *([out / "progress.json"] if self.finished else [])]:
            leftover.unlink(missing_ok=True)
        old = saved["settings"] if saved else None
        if not saved or (old != settings and not saved["shards"]):
            if stray := sorted(out.glob("*.bin")):
                raise UserError(
                    f"out_dir={out} holds {stray[0].name} but no record of how it was made; use another one"
                )
            self.save()
            return
        if wrong := [k for k in sorted({**old, **settings}) if old.get(k) != settings.get(k)]:
            wrong = "; ".join(f"{k}={old.get(k)}, not {settings.get(k)}" for k in wrong)
            raise UserError(f"out_dir={out} was begun with {wrong}; use another --out_dir, or remove the folder")
        self.shards, (self.document, self.tokens) = saved["shards"], saved.get("next", (0, 0))
        self.order = saved.get("order", [])
        if gone := [shard["name"] for shard in self.shards if not (out / shard["name"]).is_file()]:
            raise DataError(
                f"{out / gone[0]} was written and is gone; put it back, or remove the folder to start again"
            )

    def add(self, name, tokens, tokenizer, position):
        """Records a shard that is in place, what it holds, and the position (document, tokens, order) after it."""
        sizes = tokenizer.token_bytes()
        parts = np.array_split(tokens, (len(tokens) >> 24) + 1)  # as bincount makes int64 of its argument
        counts = sum(np.bincount(part, minlength=tokenizer.vocab_size) for part in parts)
        path = self.out / name
        shard = {"name": name, "tokens": len(tokens), "documents": int(counts[tokenizer.eot])}  # that begin in it
        shard |= {"text_bytes": int(counts @ sizes), "bytes": path.stat().st_size, "sha256": file_sha256(path)}
        self.shards.append(shard)
        self.document, self.tokens, self.order = position
        self.save()

    def save(self):
        state = {"settings": self.settings, "shards": self.shards, "next": (self.document, self.tokens)}
        state |= {"order": self.order} if "pack" in self.settings else {}
        write_atomic(self.out / "progress.json", json.dumps(state, indent=1).encode())

    def total(self, key, split=""):
        return sum(shard[key] for shard in self.shards if f"_{split}" in shard["name"])

    def discard(self):
        for name in [*(shard["name"] for shard in self.shards), "progress.json"]:
            (self.out / name).unlink()

    def finish(self, tokenizer):
        """Writes token_bytes.npy, then manifest.json, which declares the folder whole."""
        np.save(sizes := io.BytesIO(), tokenizer.token_bytes())
        write_atomic(self.out / "token_bytes.npy", sizes.getvalue())
        manifest = {"tokenizer": tokenizer.name, "vocab_size": tokenizer.vocab_size, "eot": tokenizer.eot}
        manifest |= {"dtype": tokenizer.dtype.name, "source": self.settings["dataset"], "settings": self.settings}
        manifest |= {key: self.total(key) for key in ("documents", "tokens", "text_bytes")} | {"shards": self.shards}
        if pack := self.settings.get("pack"):
            shards = [open_shard(self.out / shard["name"]) for shard in self.shards if "_train_" in shard["name"]]
            manifest["documents_cut"] = packing.shares_cut(begins(shards, tokenizer.eot), sum(map(len, shards)), pack)
        write_atomic(self.out / "manifest.json", (json.dumps(manifest, indent=1) + "\n").encode())
        (self.out / "progress.json").unlink()


def fetch_shards(name, max_shards, progress, tokenizer):
    """Downloads the ready-made shards of hub dataset `name` that are still missing."""
    import huggingface_hub

    try:
        files = [f for f in huggingface_hub.HfApi().list_repo_files(name, repo_type="dataset") if f.endswith(".bin")]
        names = sorted(f for f in files if "_val_" in f) + sorted(f for f in files if "_train_" in f)[:max_shards]
        for file in tqdm(names[len(progress.shards) :], desc=name, unit=" shards", disable=None):
            huggingface_hub.hf_hub_download(name, file, repo_type="dataset", local_dir=progress.out)
            tokens = open_shard(progress.out / file)
            if tokens.max() >= tokenizer.vocab_size:
                raise DataError(
                    f"{progress.out / file} holds token {tokens.max()}, which GPT-2 has not; remove it and rerun"
                )
            progress.add(file, tokens, tokenizer, (0, 0, []))
    except UserError:
        raise
    except Exception as error:  # the hub's own, httpx's, the disk's
        what = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise DataError(f"dataset={name} can't be fetched: {what}; run the same command again to go on") from None


def write_atomic(path, *chunks):
    """Writes `chunks` (bytes or arrays) so that `path` holds all of them or does not change, even if power fails."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "wb") as file:
            for chunk in chunks:
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        folder = os.open(path.parent, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        need, free = sum(memoryview(chunk).nbytes for chunk in chunks), shutil.disk_usage(path.parent).free
        raise DataError(
            f"{path}: {error.strerror}: it needs {need:,} bytes, {free:,} are free; finished shards are kept, "
            "make room and run the same command again"
        ) from None


def read_json(path):
    """The object in `path`, or None where there is no such file. Raises DataError."""
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise DataError(f"{path} is damaged ({error}); remove it and {MAKE_DATA}") from None


def file_sha256(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# ---- reading


class Ahead:
    """Iterates over `items` in a daemon thread, at most `depth` ahead; what the thread raises, next() raises."""

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
        self._thread.join(1)  # no longer: it may wait for the network, and dies with the process


def read_header(path):
    """(tokens, dtype) of shard `path`, whose header and length are checked. Raises DataError."""
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        header = np.frombuffer(file.read(HEADER_BYTES).ljust(12, b"\0")[:12], "<i4")
    magic, version, count = map(int, header)
    if size < HEADER_BYTES:
        raise DataError(f"{path} holds {size} bytes, less than a header of {HEADER_BYTES}; {MAKE_DATA}")
    if magic not in FORMATS:
        raise DataError(
            f"{path} is no shard: it begins with {magic}, not {' or '.join(map(str, FORMATS))}; {MAKE_DATA}, "
            "or if it is a nanoGPT raw file, name it train.bin or val.bin and set --data_format=nanogpt"
        )
    expected, dtype = FORMATS[magic]
    kind = f"{np.dtype(dtype).name} shard ({'Llama 3' if dtype == np.uint32 else 'GPT-2'}, magic {magic})"
    if version != expected:
        raise DataError(f"{path}: version {version} in the header of a {kind}, expected {expected}; {MAKE_DATA}")
    if count <= 0:
        raise DataError(f"{path}: the header counts {count} tokens, expected 1 to 2**31-1; {MAKE_DATA}")
    need = HEADER_BYTES + count * np.dtype(dtype).itemsize
    if size != need:
        raise DataError(f"{path}: expected {need} bytes for {count} tokens of a {kind}, it has {size}; {MAKE_DATA}")
    return count, np.dtype(dtype)


def open_shard(path, data_format="llmc"):
    """The tokens of a shard as a read-only memory map."""
    if data_format == "llmc":
        count, dtype = read_header(path)
        return np.memmap(path, dtype.newbyteorder("<"), "r", HEADER_BYTES, (count,))
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        if int.from_bytes(file.read(4), "little") in FORMATS:
            raise DataError(f"{path} has an llm.c header, so it is no nanoGPT file; leave --data_format=llmc")
    if size == 0 or size % 2:
        raise DataError(f"{path} holds {size} bytes, which is no whole number of uint16 tokens; write it again")
    return np.memmap(path, "<u2", "r")


def find_shards(data_dir, split, data_format="llmc"):
    """Sorted paths of a split's shards. Raises DataError where there are none."""
    pattern = os.path.join(data_dir, f"*_{split}_*.bin" if data_format == "llmc" else f"{split}.bin")
    if paths := sorted(glob.glob(pattern)):
        return paths
    hint = MAKE_DATA
    if os.path.exists(os.path.join(data_dir, f"{split}.bin")):
        hint = "there is a nanoGPT file: --data_format=nanogpt"
    elif split == "val" and glob.glob(os.path.join(data_dir, "*train*.bin")):
        hint = "make one, or do without: --eval_interval=0"
    elif os.path.exists(os.path.join(data_dir, "progress.json")):
        hint = "fineweb.py has begun there and not come so far; run it again"
    raise DataError(f"no {split} split: nothing matches {pattern}; {hint}")


def verify(data_dir):
    """Compares every shard with the manifest's SHA-256. Raises DataError."""
    manifest = read_json(Path(data_dir) / "manifest.json")
    if manifest is None:
        raise DataError(f"{data_dir}/manifest.json is missing, so there are no checksums to verify; {MAKE_DATA}")
    for shard in manifest["shards"]:
        path = Path(data_dir) / shard["name"]
        if not path.is_file():
            raise DataError(f"{path} is in the manifest and not in the folder; {MAKE_DATA}")
        read_header(path)
        if (digest := file_sha256(path)) != shard["sha256"]:
            raise DataError(
                f"{path} is damaged: SHA-256 {digest[:16]}..., expected {shard['sha256'][:16]}...; "
                f"remove {data_dir} and {MAKE_DATA}"
            )


class TokenLoader:
    """Batches for one rank out of a split's shards, which count as one circle of `tokens` tokens.

    Row w is the T+1 tokens from w*T on, and an epoch is ceil(tokens/T) rows, so none is lost at a shard's end; the last
    row runs on into the beginning. Rows have one global order: micro-step k takes world*B rows, from k*world*B on, and
    of them rank r takes B, from r*B on. So a global batch is the same rows for every B and world.

    shuffle_seed: the rows of epoch e in the order of numpy's default_rng((seed, e)).permutation.
    align: a row begins at the last document start within the row before (or at its end, in a document longer than T); a
    document that is cut is thus read again from its start, and no token is left out.
    min_tokens: what the caller needs (a global batch). Raises DataError.
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
        data_format="llmc",
        prefetch=2,
        min_tokens=0,
    ):
        self.B, self.T, self.rank, self.world, self.vocab_size = B, T, rank, world, vocab_size
        self.device, self.shuffle_seed, self.prefetch = torch.device(device), shuffle_seed, prefetch
        self.paths = find_shards(data_dir, split, data_format)
        self.shards = [open_shard(path, data_format) for path in self.paths]
        self.ends = np.cumsum([len(shard) for shard in self.shards]).tolist()
        self.tokens = self.ends[-1]
        manifest = read_json(Path(data_dir) / "manifest.json") or {}
        self._check_shards(manifest, data_dir, split, min_tokens)
        self.tokenizer, self.eot = manifest.get("tokenizer"), manifest.get("eot")
        sizes = Path(data_dir) / "token_bytes.npy"
        self.token_bytes = np.load(sizes) if sizes.exists() else None
        self._starts = self._aligned_starts(manifest, data_dir) if align else None
        self.rows_per_epoch = -(-self.tokens // T) if self._starts is None else len(self._starts)
        self.warnings = self._pack_warnings(manifest.get("settings", {}).get("pack"), data_dir)
        self.rows = 0  # handed out to all ranks together, those prefetched not counted
        listing = "".join(f"{Path(path).name} {len(shard)}\n" for path, shard in zip(self.paths, self.shards))
        self.fingerprint = hashlib.sha256(listing.encode()).hexdigest()[:16]
        self._order, self._order_epoch, self._ahead, self._cuda = None, None, None, None
        if self.device.type == "cuda":
            self._cuda = self.device.index if self.device.index is not None else torch.cuda.current_device()

    def _check_shards(self, manifest, data_dir, split, min_tokens):
        dtype = np.dtype(manifest.get("dtype", self.shards[0].dtype))
        for path, shard in zip(self.paths, self.shards):
            if shard.dtype != dtype:
                raise DataError(
                    f"{path} holds {shard.dtype.name} tokens, the rest of {data_dir} {dtype.name}; remove it"
                )
        if self.vocab_size is not None and manifest.get("vocab_size", 0) > self.vocab_size:
            name, size = manifest["tokenizer"], manifest["vocab_size"]
            raise DataError(f"vocab_size={self.vocab_size} is less than {data_dir}'s ({name}); try --vocab_size={size}")
        if self.tokens < min_tokens:
            raise DataError(
                f"{data_dir}: a global batch needs {min_tokens:,} tokens, the {split} split has {self.tokens:,}; "
                "lower --batch_tokens, or make more data"
            )
        if self.tokens <= self.T:
            raise DataError(
                f"{data_dir}: a row needs block_size+1 = {self.T + 1:,} tokens, the {split} split has {self.tokens:,}; "
                "lower --block_size, or make more data"
            )

    def _pack_warnings(self, pack, data_dir):
        if pack and pack != self.T:
            return [
                f"{data_dir} is packed for block_size={pack}; rows of {self.T} cut more documents than they need to"
            ]
        if pack and self._starts is not None:
            return [f"{data_dir} is packed for rows that lie end to end; align_documents moves them off"]
        return []

    def _aligned_starts(self, manifest, data_dir):
        """Where the rows of an epoch begin, int64."""
        if "eot" not in manifest:
            raise DataError(f"align_documents needs to know the separator, and {data_dir}/manifest.json is not there")
        return aligned_starts(begins(self.shards, manifest["eot"]), self.tokens, self.T)

    def next(self):
        """(x, y), each int64 (B, T) on the device: the tokens and, for each, the one after it."""
        if self._ahead is None:
            self._ahead = Ahead(self._batches(self.rows), self.prefetch)
        batch = next(self._ahead)
        self.rows += self.world * self.B
        return self._to_device(batch)

    @property
    def epoch(self):
        return self.rows // self.rows_per_epoch

    def state_dict(self):
        order = {"block_size": self.T, "shuffle_seed": self.shuffle_seed, "align_documents": self._starts is not None}
        return {"rows": self.rows, "tokens": self.tokens, "fingerprint": self.fingerprint, **order}

    def load_state_dict(self, state, allow_data_change=False):
        """Goes on exactly after the saved row, with whatever B and world. Raises DataError if the data is another."""
        own = self.state_dict()
        wrong = [f"{k} {own[k]}, not {state[k]}" for k in own if k != "rows" and own[k] != state[k]]
        if wrong and not allow_data_change:
            raise DataError(
                f"the data of {Path(self.paths[0]).parent} is not what the checkpoint had: {'; '.join(wrong)}; "
                "to go on with it all the same: --allow_data_change"
            )
        self.close()
        self.rows = state["rows"]

    def close(self):
        """Ends the thread."""
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None

    def eval_batches(self, tokens):
        """Yields this rank's (x, y) of rows 0 to tokens//T - 1, unshuffled: the same rows for every B and world.

        All batches have shape (B, T), and all ranks the same number of them: y is -100 where there is no row left.
        """
        rows = min(tokens, self.tokens - 1) // self.T
        if rows == 0:
            raise DataError(f"eval_tokens={tokens} is less than one row of block_size={self.T}; raise --eval_tokens")
        for first in range(0, rows, self.world * self.B):
            mine = range(first + self.rank * self.B, first + (self.rank + 1) * self.B)
            x, y = self._to_device(self._gather([w * self.T if w < rows else 0 for w in mine]))
            y[max(0, rows - mine.start) :] = -100
            yield x, y

    def _batches(self, row):
        if self._cuda is not None:
            torch.cuda.set_device(self._cuda)  # a thread starts on GPU 0, and pinning would take memory there
        row += self.rank * self.B
        while True:
            yield self._gather([self._start(i) for i in range(row, row + self.B)])
            row += self.world * self.B

    def _start(self, row):
        """The token at which a row begins, rows counted from the start of training."""
        epoch, w = divmod(row, self.rows_per_epoch)
        if self.shuffle_seed is not None:
            if self._order_epoch != epoch:
                self._order = np.random.default_rng((self.shuffle_seed, epoch)).permutation(self.rows_per_epoch)
                self._order_epoch = epoch
            w = int(self._order[w])
        return w * self.T if self._starts is None else int(self._starts[w])

    def _gather(self, starts):
        """int32 (B, T+1), in pinned memory for CUDA: half the bytes of int64 over the bus."""
        batch = torch.empty(len(starts), self.T + 1, dtype=torch.int32, pin_memory=self._cuda is not None)
        rows = batch.numpy().view(np.uint32)
        for row, start in zip(rows, starts):
            self._read(start, row)
        if self.vocab_size is not None and rows.max() >= self.vocab_size:
            b, t = np.argwhere(rows >= self.vocab_size)[0].tolist()
            shard, at = self._locate((starts[b] + t) % self.tokens)
            raise DataError(
                f"{self.paths[shard]}: token {at} is {rows[b, t]}, not below vocab_size={self.vocab_size}; "
                "raise --vocab_size if the tokenizer is another, else make the data again"
            )
        return batch

    def _locate(self, position):
        shard = bisect.bisect_right(self.ends, position)
        return shard, position - self.ends[shard] + len(self.shards[shard])

    def _read(self, position, row):
        """Fills `row` from the circle of tokens."""
        filled = 0
        while filled < len(row):
            shard, at = self._locate((position + filled) % self.tokens)
            part = self.shards[shard][at : at + len(row) - filled]
            row[filled : filled + len(part)] = part
            filled += len(part)

    def _to_device(self, batch):
        batch = batch.to(self.device, non_blocking=True)
        return batch[:, :-1].long(), batch[:, 1:].long()


def begins(shards, eot):
    """Sorted positions in `shards`, laid end to end, at which documents begin, int64."""
    ends = np.cumsum([len(shard) for shard in shards])
    return np.concatenate([np.flatnonzero(shard == eot) + end - len(shard) for shard, end in zip(shards, ends)])


def aligned_starts(documents, n, T):
    """Row starts of one epoch over n tokens, int64: each the last of `documents` in (p, p+T] after start p, else p+T.

    documents: sorted positions at which documents begin. Arrays do the work, since 10B tokens have 10M rows: from a
    document on lie `whole` rows inside it, then one that leads to document `after`; only those hops are a loop.
    """
    edges = np.union1d([0, n], documents).astype(np.int64)
    whole = -(-np.diff(edges) // T) - 1  # steps of T that end before the next document begins
    after = (np.searchsorted(edges, edges[:-1] + (whole + 1) * T, side="right") - 1).tolist()
    hops, at = [], 0
    while at < len(after):
        hops.append(at)
        at = after[at]
    repeats = whole[hops] + 1
    steps = np.arange(repeats.sum()) - np.repeat(np.cumsum(repeats) - repeats, repeats)
    return np.repeat(edges[hops], repeats) + steps * T


if __name__ == "__main__":
    run(main, Config)
