"""Tokens to train on: shards from the Hugging Face hub or from local files.

    python fineweb.py                                          # FineWeb-Edu sample-10BT into data/fineweb-edu, 20 GB
    python fineweb.py --dataset=kjj0/fineweb10B-gpt2 --max_shards=10      # ready-made GPT-2 shards of FineWeb
    python fineweb.py --dataset="books/*.txt,notes.jsonl.zst" --out_dir=data/mine
    python fineweb.py --dataset=chats.jsonl --text_key=messages --tokenizer=FOLDER  # see corpus/dialogues.py
    python fineweb.py --pack=131072 --min_document_tokens=8192            # for long sequences, see corpus/packing.py

Writes llm.c shards (a 1,024-byte header, then uint16 or uint32 tokens, a separator before each document), manifest.json
with checksums, and token_bytes.npy. Validation gets whole documents from the front; no document is in both splits.
Every training shard but the last is exactly shard_tokens long, and documents continue from one shard into the next.
A killed run continues when it is started again (corpus/writer.py). corpus/loader.py reads the shards.
"""

import functools
import glob
import hashlib
import itertools
import os
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from configurator import UserError, parse, refuse, run, too_small

SHORT_NAMES = {"fineweb": "HuggingFaceFW/fineweb", "fineweb-edu": "HuggingFaceFW/fineweb-edu"}
READY_MADE = ("kjj0/fineweb10B-gpt2", "kjj0/fineweb100B-gpt2", "kjj0/finewebedu10B-gpt2")  # GPT-2 shards on the hub
COMPRESSED = (".zst", ".gz", ".xz", ".bz2")
RECORDS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}  # any other file is one document


@dataclass
class Config:
    dataset: str = "fineweb-edu"  # fineweb, fineweb-edu, a hub name, or local files, folders and globs between commas
    subset: str = "sample-10BT"  # subset of FineWeb and FineWeb-Edu; of another hub dataset if not the default
    split: str = "train"  # the hub's split to read
    text_key: str = "text"  # field of the text; messages or prompt,completion: loss on the answers alone
    streaming: bool = False  # read while downloading, keep no copy; shuffle_seed then shuffles a buffer only
    out_dir: str | None = None  # where the shards go; None: data/<name of the dataset>
    tokenizer: str = "gpt2"  # gpt2, another tiktoken encoding, bytes, a tokenizer.model or tokenizer.json
    shard_tokens: int = 100_000_000  # tokens in a shard; with pack rounded down to whole rows
    val_tokens: int | None = None  # validation tokens at least; None: shard_tokens, of local files about 1%
    shuffle_seed: int | None = None  # seed that shuffles the documents; None: in the source's order
    max_tokens: int | None = None  # training tokens to stop after; None: all
    pack: int | None = None  # reorders documents so that few cross a multiple of this block_size; None: off
    min_document_tokens: int | None = None  # leave out shorter documents; None: only empty ones
    max_shards: int | None = None  # training shards to fetch of a ready-made dataset; None: all


def main(cfg):
    check(cfg)
    from corpus import tokenizer as tokenizers
    from corpus import writer
    from corpus.dialogues import Dialogues

    name = SHORT_NAMES.get(cfg.dataset, cfg.dataset)
    files = None if name in READY_MADE else local_files(name)
    short = "text" if files and len(files) > 1 else re.sub(r"[^\w-].*", "", Path(name).name) or "text"
    out = Path(cfg.out_dir or f"data/{short}")
    tokenizer = tokenizers.load("gpt2" if name in READY_MADE else cfg.tokenizer)
    dialogues = Dialogues(tokenizer) if is_chat(cfg) else None
    encode = dialogues.rows if dialogues else functools.partial(writer.text_rows, tokenizer)
    with writer.claim(out):
        decisive = {"dataset": name, "max_shards": cfg.max_shards}
        progress = writer.Progress(
            out, decisive if name in READY_MADE else settings(cfg, name, files, tokenizer, dialogues)
        )
        if progress.finished:
            print(f"{out} is finished already; nothing was done")
        else:
            began, before = time.perf_counter(), progress.total("tokens")
            if name in READY_MADE:
                writer.fetch_shards(name, cfg.max_shards, progress, tokenizer)
            else:
                batches = documents(cfg, name, files, progress.document)
                writer.write_shards(batches, encode, progress, tokenizer, short)
            progress.finish(tokenizer)
            rate = (progress.total("tokens") - before) / (time.perf_counter() - began)
            print(f"{progress.total('documents'):,} documents, {rate / 1e6:.2f}M tokens/s")
    warnings = [f"warning: {words}" for words in dialogues.warnings] if dialogues else []
    print("\n".join([*progress.summary(), *warnings]))
    print(f"go on with  python train.py --data_dir={out} --vocab_size={tokenizer.vocab_size}")


def check(cfg):
    """Raises one UserError for every setting out of range."""
    least = {"shard_tokens": 1, "val_tokens": 0, "max_tokens": 1, "max_shards": 1, "shuffle_seed": 0}
    wrong = too_small(cfg, least | {"pack": 2, "min_document_tokens": 1})
    if cfg.shard_tokens >= 1 << 31:
        wrong.append(f"shard_tokens={cfg.shard_tokens} must be below 2**31, the largest count in a header")
    if cfg.pack and cfg.pack > cfg.shard_tokens:
        wrong.append(f"shard_tokens={cfg.shard_tokens} must be at least pack={cfg.pack}, since shards hold whole rows")
    if (cfg.pack or cfg.min_document_tokens) and cfg.dataset in READY_MADE:
        wrong.append(f"pack and min_document_tokens are for texts; {cfg.dataset} is tokenized already")
    if cfg.text_key.count(",") > 1:
        wrong.append(f"text_key={cfg.text_key} must be one field, or two for prompt,completion")
    if cfg.max_shards is not None and cfg.dataset not in READY_MADE:
        wrong.append(f"max_shards={cfg.max_shards} is for {', '.join(READY_MADE)}; for other data use --max_tokens")
    refuse(wrong)


def local_files(dataset):
    """The paths that `dataset` names, in order, or None if it names a hub dataset.

    A folder gives all its files in the order of their names, except hidden ones, binary ones and __pycache__.
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
        raise UserError(f"dataset={dataset}: it holds no text files")
    return list(dict.fromkeys(map(str, files)))


def _is_text(path, root):
    """Whether a file found in folder `root` is one to read."""
    if not path.is_file() or any(part.startswith((".", "__pycache__")) for part in path.relative_to(root).parts):
        return False
    with open(path, "rb") as file:
        return path.suffix in (*COMPRESSED, ".parquet") or b"\0" not in file.read(8192)


def is_chat(cfg):
    """Whether the documents are dialogues, or prompts with their completions, of which the answers alone carry loss."""
    return cfg.text_key == "messages" or "," in cfg.text_key


def settings(cfg, name, files, tokenizer, dialogues):
    """The settings that decide the shards' bytes; a folder that was started with other values is refused."""
    chosen = {"dataset": name, "text_key": cfg.text_key}
    chosen |= {"tokenizer": cfg.tokenizer, "vocab_size": tokenizer.vocab_size, "eot": tokenizer.eot}
    chosen |= {k: getattr(cfg, k) for k in ("shard_tokens", "val_tokens", "max_tokens", "shuffle_seed")}
    chosen |= {k: getattr(cfg, k) for k in ("pack", "min_document_tokens") if getattr(cfg, k) is not None}
    if dialogues:
        chosen["chat_sha256"] = dialogues.digest
    if cfg.shuffle_seed is not None:
        chosen["streaming"] = cfg.streaming  # the two shuffle differently
    if files is None:
        chosen |= {"subset": cfg.subset, "split": cfg.split}
        default_val = cfg.shard_tokens
    else:
        sizes = [os.path.getsize(path) for path in files]
        listing = "".join(f"{path}\t{size}\n" for path, size in zip(files, sizes)).encode()
        chosen |= {"files": len(files), "files_sha256": hashlib.sha256(listing).hexdigest()}
        # about 1% of the tokens: a token is one byte, or about four; of a compressed file, whose size counts, less
        one_percent = sum(sizes) // (100 if tokenizer.name == "bytes" else 400)
        default_val = max(1, min(one_percent, cfg.shard_tokens))
    if cfg.val_tokens is None:
        chosen["val_tokens"] = default_val
    return chosen


def documents(cfg, name, files, first):
    """Yields lists of texts, messages or pairs from document number `first` on.

    Raises DataError after the hub's own retries failed.
    """
    import datasets  # takes a second to import

    from corpus.loader import DataError

    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    try:
        subset = cfg.subset if name in SHORT_NAMES.values() or cfg.subset != Config.subset else None
        hub = dict(name=subset, split=cfg.split, streaming=cfg.streaming)  # the default subset is one of FineWeb alone
        data = load_files(cfg, files) if files else datasets.load_dataset(name, **hub)
        keys = cfg.text_key.split(",")
        if data.column_names and not set(keys) <= set(data.column_names):
            fields = ", ".join(data.column_names)
            raise DataError(f"dataset={cfg.dataset} has no field text_key={cfg.text_key}; it has {fields}")
        data = data.select_columns(keys)
        if cfg.shuffle_seed is not None:
            data = data.shuffle(seed=cfg.shuffle_seed)
        if first:
            data = data.skip(first) if cfg.streaming else data.select(range(min(first, len(data)), len(data)))
        for batch in data.iter(batch_size=256):  # about 200,000 tokens
            yield batch[keys[0]] if len(keys) == 1 else list(zip(*(batch[key] for key in keys)))
    except UserError:
        raise
    except Exception as error:  # of the hub, a parser or the disk: datasets documents no narrower type
        if isinstance(error, datasets.exceptions.DatasetGenerationError) and error.__cause__:
            error = error.__cause__
        what = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise DataError(
            f"dataset={cfg.dataset} cannot be read: {what}; finished shards are kept; run the same command again"
        ) from None


def load_files(cfg, files):
    """A dataset of the documents in `files`, in order: consecutive files of one kind are one part, parts are joined."""
    import datasets

    def part_of(path):  # equal neighbours are one part; a jsonl file is one alone, since its fields may differ
        suffixes = [suffix for suffix in Path(path).suffixes if suffix not in COMPRESSED]
        builder = RECORDS.get(suffixes[-1], "text") if suffixes else "text"
        return builder, path if builder == "json" else ""

    keys = cfg.text_key.split(",")
    parts, whole = [], {"sample_by": "document", "encoding_errors": "replace"}
    for (builder, _), paths in itertools.groupby(files, part_of):
        options = {"parquet": {"columns": keys}, "text": whole}.get(builder, {})
        paths = [glob.escape(os.path.abspath(path)) for path in paths]
        part = datasets.load_dataset(
            builder, data_files={"train": paths}, split="train", streaming=cfg.streaming, **options
        )
        if builder == "text" and cfg.text_key != "text" and not is_chat(cfg):
            part = part.rename_column("text", cfg.text_key)
        parts.append(part.select_columns(keys) if set(keys) <= set(part.column_names or []) else part)
    return parts[0] if len(parts) == 1 else datasets.concatenate_datasets(parts)


if __name__ == "__main__":
    run(main, parse(Config, check))
