"""Tokens to train on: shards from the Hugging Face hub or from local files.

    python fineweb.py                                          # FineWeb-Edu sample-10BT into data/fineweb-edu, 20 GB
    python fineweb.py --dataset=kjj0/fineweb10B-gpt2 --max_shards=10      # ready-made GPT-2 shards of FineWeb
    python fineweb.py --dataset="books/*.txt,notes.jsonl.zst" --out_dir=data/mine
    python fineweb.py --pack=131072 --min_document_tokens=8192            # for long sequences, see packing.py

As a script it writes llm.c shards (a 1,024-byte header, then uint16 or uint32 tokens, the separator before each
document), manifest.json with checksums, and token_bytes.npy. Validation gets whole documents from the front; none is
in both splits. Training shards are exactly shard_tokens long, save the last; documents run on from one to the next.
Empty documents are left out. A killed run, started again, goes on where it was and ends with the same bytes.
loader.py reads them.
"""

import contextlib
import fcntl
import glob
import hashlib
import io
import itertools
import json
import math
import os
import re
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

import packing
import tokenizer as tokenizers
from configurator import UserError, run
from loader import FORMATS, HEADER_BYTES, Ahead, DataError, begins, file_sha256, open_shard, read_json, split_of

SHORT_NAMES = {"fineweb": "HuggingFaceFW/fineweb", "fineweb-edu": "HuggingFaceFW/fineweb-edu"}
READY_MADE = ("kjj0/fineweb10B-gpt2", "kjj0/fineweb100B-gpt2", "kjj0/finewebedu10B-gpt2")  # GPT-2 shards on the hub
COMPRESSED = (".zst", ".gz", ".xz", ".bz2")
RECORDS = {
    ".jsonl": "json",
    ".json": "json",
    ".parquet": "parquet",
}  # other files are one document each
AS_DOCUMENTS = {"sample_by": "document", "encoding_errors": "replace"}


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
        n = sum(split_of(shard["name"]) == split for shard in progress.shards)
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
    chosen = {"dataset": name, "text_key": cfg.text_key}
    chosen |= {"tokenizer": cfg.tokenizer, "vocab_size": tokenizer.vocab_size, "eot": tokenizer.eot}
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

    def total(self, key, split=None):
        return sum(shard[key] for shard in self.shards if split in (None, split_of(shard["name"])))

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
            shards = [
                open_shard(self.out / shard["name"]) for shard in self.shards if split_of(shard["name"]) == "train"
            ]
            manifest["documents_cut"] = packing.shares_cut(begins(shards, tokenizer.eot), sum(map(len, shards)), pack)
        write_atomic(self.out / "manifest.json", (json.dumps(manifest, indent=1) + "\n").encode())
        (self.out / "progress.json").unlink()


def fetch_shards(name, max_shards, progress, tokenizer):
    """Downloads the ready-made shards of hub dataset `name` that are still missing."""
    import huggingface_hub

    try:
        files = [f for f in huggingface_hub.HfApi().list_repo_files(name, repo_type="dataset") if f.endswith(".bin")]
        val, training = (sorted(f for f in files if split_of(f) == split) for split in ("val", "train"))
        names = val + training[:max_shards]
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


if __name__ == "__main__":
    run(main, Config)
