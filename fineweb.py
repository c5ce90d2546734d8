"""Tokens to train on: shards from the Hugging Face hub or from local files.

    python fineweb.py                                          # FineWeb-Edu sample-10BT into data/fineweb-edu, 20 GB
    python fineweb.py --dataset=kjj0/fineweb10B-gpt2 --max_shards=10      # ready-made GPT-2 shards of FineWeb
    python fineweb.py --dataset="books/*.txt,notes.jsonl.zst" --out_dir=data/mine
    python fineweb.py --dataset=input.txt --tokenizer=chars --out_dir=data/shakespeare_char
    python fineweb.py --dataset=chats.jsonl --text_key=messages --tokenizer=FOLDER  # see corpus/dialogues.py
    python fineweb.py --pack=131072 --min_document_tokens=8192            # for long sequences, see corpus/packing.py

Writes llm.c shards (a 1,024-byte header, then uint16 or uint32 tokens, a separator before each document), manifest.json
with checksums, and token_bytes.npy. Validation gets whole documents from the front; no document is in both splits. Of a
single text it gets the last tenth.
Every training shard but the last is exactly shard_tokens long, and documents continue from one shard into the next.
A killed run continues when it is started again (corpus/writer.py). corpus/loader.py reads the shards.
"""

import atexit
import codecs
import functools
import glob
import hashlib
import io
import itertools
import json
import os
import re
import shlex
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from configurator import UserError, parse, refuse, run, too_small, without_effect

SHORT_NAMES = {"fineweb": "HuggingFaceFW/fineweb", "fineweb-edu": "HuggingFaceFW/fineweb-edu"}
READY_MADE = (
    "kjj0/fineweb10B-gpt2",
    "kjj0/fineweb100B-gpt2",
    "kjj0/finewebedu10B-gpt2",
)  # known to need no --shards
COMPRESSED = (".zst", ".gz", ".xz", ".bz2")
TEXTS_ALONE = (
    "subset",
    "split",
    "text_key",
    "streaming",
    "shard_tokens",
    "val_tokens",
    "shuffle_seed",
    "max_tokens",
)
TEXTS_ALONE += (
    "pack",
    "min_document_tokens",
    "skip_bad_documents",
)  # settings that say how texts become shards
RECORDS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}  # any other file is one document


@dataclass
class Config:
    dataset: str = (
        "fineweb-edu"  # fineweb, fineweb-edu, a hub name, or local files, folders and globs between commas
    )
    subset: str = (
        "sample-10BT"  # subset of FineWeb and FineWeb-Edu; of another hub dataset if not the default
    )
    split: str = "train"  # the hub's split to read
    revision: str | None = None  # the hub's branch, tag or commit; None: main
    shards: bool = False  # the hub dataset holds shards (.bin or .npy), which are fetched as they are
    text_key: str = "text"  # field of the text; messages or prompt,completion: loss on the answers alone
    streaming: bool = False  # read while downloading, keep no copy; shuffle_seed then shuffles a buffer only
    out_dir: str | None = None  # where the shards go; None: data/<name of the dataset>
    tokenizer: str = (
        "gpt2"  # gpt2, another tiktoken encoding, bytes, chars, a tokenizer.model or tokenizer.json
    )
    shard_tokens: int = 100_000_000  # tokens in a shard; with pack rounded down to whole rows
    val_tokens: int | None = (
        None  # validation tokens at least; None: shard_tokens, of files 1%, of one text 10%
    )
    shuffle_seed: int | None = None  # seed that shuffles the documents; None: in the source's order
    max_tokens: int | None = None  # training tokens to stop after; None: all
    pack: int | None = None  # reorders documents so that few cross a multiple of this block_size; None: off
    min_document_tokens: int | None = None  # leave out shorter documents; None: only empty ones
    skip_bad_documents: bool = (
        False  # leave out lines of .jsonl files without a text in text_key, and count them
    )
    max_shards: int | None = None  # with shards: training shards to fetch; None: all

    @property
    def ready_made(self):
        return self.shards or self.dataset in READY_MADE


def main(cfg):
    check(cfg)
    from corpus import tokenizer as tokenizers
    from corpus import writer
    from corpus.dialogues import Dialogues

    name = SHORT_NAMES.get(cfg.dataset, cfg.dataset)
    files = None if cfg.ready_made else local_files(name)
    short = "text" if files and len(files) > 1 else re.sub(r"[^\w-].*", "", Path(name).name) or "text"
    out = Path(cfg.out_dir or f"data/{short}")
    tokenizer = None if cfg.tokenizer == "chars" else tokenizers.load(cfg.tokenizer)
    with writer.claim(out):
        tokenizer = tokenizer or characters(cfg, name, files, out)
        dialogues = Dialogues(tokenizer) if is_chat(cfg) else None
        encode = dialogues.rows if dialogues else functools.partial(writer.text_rows, tokenizer)
        fetched = {"dataset": name, "max_shards": cfg.max_shards}
        decisive = fetched if cfg.ready_made else settings(cfg, name, files, tokenizer, dialogues)
        progress = writer.Progress(out, decisive | ({"revision": cfg.revision} if cfg.revision else {}))
        if progress.finished:
            print(f"{out} is finished already; nothing was done")
        else:
            began, before = time.perf_counter(), progress.total("tokens")
            if cfg.ready_made:
                writer.fetch_shards(name, cfg.revision, cfg.max_shards, progress, tokenizer)
            else:
                batches = documents(cfg, name, files, progress.document)
                writer.write_shards(batches, encode, progress, tokenizer, short)
            progress.finish(tokenizer)
            rate = (progress.total("tokens") - before) / (time.perf_counter() - began)
            print(f"{progress.total('documents'):,} documents, {rate / 1e6:.2f}M tokens/s")
    warnings = [f"warning: {words}" for words in dialogues.warnings] if dialogues else []
    print("\n".join([*progress.summary(), *warnings]))
    print(f"go on with  {train_command(cfg, out, tokenizer)}")


def train_command(cfg, out, tokenizer):
    """What to type next: GPT-2 124M, or on a machine without a GPU a model that its CPU trains in minutes."""
    import torch

    words = []
    if cfg.tokenizer == "chars":
        words = ["config/shakespeare_char.py"]
    elif not torch.accelerator.is_available():
        words = ["config/quickstart.py"]
        if tokenizer.vocab_size > 1000:  # the head of a large vocabulary takes most of the time
            words += ["--batch_size=4", "--batch_tokens=1024"]
    words += [f"--data_dir={out}", f"--out_dir=out/{out.name}", f"--vocab_size={tokenizer.vocab_size}"]
    return shlex.join(["python", "train.py", *words])


def characters(cfg, name, files, out):
    """The tokenizer of the characters of all documents, from out/tokenizer.json, which is written if need be."""
    from corpus import tokenizer as tokenizers

    path = out / "tokenizer.json"
    if not path.exists() or not ((out / "progress.json").exists() or (out / "manifest.json").exists()):
        tokenizers.write_characters((texts for texts, _ in documents(cfg, name, files, 0)), path)
    return tokenizers.load(str(path))


def check(cfg):
    """Raises one UserError for every setting out of range."""
    least = {"shard_tokens": 1, "val_tokens": 0, "max_tokens": 1, "max_shards": 1, "shuffle_seed": 0}
    wrong = too_small(cfg, least | {"pack": 2, "min_document_tokens": 1})
    if cfg.shard_tokens >= 1 << 31:
        wrong.append(f"shard_tokens={cfg.shard_tokens} must be below 2**31, the largest count in a header")
    if cfg.pack and cfg.pack > cfg.shard_tokens:
        wrong.append(
            f"shard_tokens={cfg.shard_tokens} must be at least pack={cfg.pack}, since shards hold whole rows"
        )
    if cfg.ready_made:
        why = "cannot change shards that are written already; try --max_shards"
        wrong += without_effect(cfg, TEXTS_ALONE, why)
    if cfg.text_key.count(",") > 1:
        wrong.append(f"text_key={cfg.text_key} must be one field, or two for prompt,completion")
    if cfg.tokenizer == "chars" and (cfg.ready_made or is_chat(cfg)):
        wrong.append("tokenizer=chars is for texts, not for dialogues or shards")
    if cfg.max_shards is not None and not cfg.ready_made:
        wrong.append(
            f"max_shards={cfg.max_shards} needs --shards, for a hub dataset of shards; else use --max_tokens"
        )
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
    if not path.is_file() or any(
        part.startswith((".", "__pycache__")) for part in path.relative_to(root).parts
    ):
        return False
    with open(path, "rb") as file:
        return path.suffix in (*COMPRESSED, ".parquet") or b"\0" not in file.read(8192)


def is_chat(cfg):
    """Whether the documents are dialogues, or prompts with their completions, of which the answers alone carry loss."""
    return cfg.text_key == "messages" or "," in cfg.text_key


def settings(cfg, name, files, tokenizer, dialogues):
    """The settings that decide the shards' bytes; a folder that was started with other values is refused."""
    if cfg.val_tokens and alone(files):
        raise UserError(
            f"val_tokens={cfg.val_tokens}: of a single text the last tenth is validation; try 0 or None"
        )
    chosen = {"dataset": name, "text_key": cfg.text_key}
    chosen |= {"tokenizer": cfg.tokenizer, "vocab_size": tokenizer.vocab_size, "eot": tokenizer.eot}
    chosen |= {k: getattr(cfg, k) for k in ("shard_tokens", "val_tokens", "max_tokens", "shuffle_seed")}
    chosen |= {k: getattr(cfg, k) for k in ("pack", "min_document_tokens") if getattr(cfg, k) is not None}
    chosen |= {"skip_bad_documents": True} if cfg.skip_bad_documents else {}
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
        default_val = 1 if alone(files) else max(1, min(one_percent, cfg.shard_tokens))
    if cfg.val_tokens is None:
        chosen["val_tokens"] = default_val
    return chosen


def documents(cfg, name, files, first):
    """Yields (texts, messages or pairs; share of all bytes read so far, or None) from document number `first` on.

    Raises DataError after the hub's own retries failed.
    """
    import datasets  # takes a second to import
    import pyarrow.compute as arrow

    from corpus.loader import DataError
    from run.files import patiently

    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # what it logs is raised as well
    try:
        # the default subset is one of FineWeb alone
        subset = cfg.subset if name in SHORT_NAMES.values() or cfg.subset != Config.subset else None
        hub = dict(name=subset, split=cfg.split, revision=cfg.revision, streaming=cfg.streaming)
        data = load_files(cfg, files) if files else patiently(datasets.load_dataset, name, **hub)
        keys = cfg.text_key.split(",")
        if data.column_names and not set(keys) <= set(data.column_names):
            fields = ", ".join(data.column_names)
            raise DataError(f"dataset={cfg.dataset} has no field text_key={cfg.text_key}; it has {fields}")
        data = data.select_columns(keys)
        if alone(files):
            text = next(iter(data), {cfg.text_key: ""})[cfg.text_key]
            cut = len(text) if cfg.val_tokens == 0 else len(text) * 9 // 10
            yield [part for part in (text[cut:], text[:cut]) if part][first:], None
            return
        if cfg.shuffle_seed is not None:
            data = data.shuffle(seed=cfg.shuffle_seed)
        if first and not cfg.streaming and first >= len(data):  # all is written but the manifest
            if first > len(data):
                raise DataError(
                    f"dataset={cfg.dataset} has {len(data)} documents, {first} are written: it has changed"
                )
            return
        if first:
            data = data.skip(first) if cfg.streaming else data.select(range(first, len(data)))
        size, read = None, 0
        if not cfg.streaming and len(data) and not is_chat(cfg):
            column = data.data.column(cfg.text_key)  # of all documents, even where `data` holds some of them
            size = (arrow.sum(arrow.binary_length(column)).as_py() or 0) * len(data) / len(column)
        for batch in data.iter(batch_size=256):  # about 200,000 tokens
            found = batch[keys[0]] if len(keys) == 1 else list(zip(*(batch[key] for key in keys)))
            if not is_chat(cfg) and not all(isinstance(text, str) for text in found):
                refuse_bad_lines(cfg, files)
                if other := [text for text in found if not isinstance(text, str | None)]:
                    kind = type(other[0]).__name__
                    raise DataError(
                        f"dataset={cfg.dataset}: text_key={cfg.text_key} holds a {kind}, expected text"
                    )
            read += sum(len((text or "").encode()) for text in found) if size else 0
            yield found, read / size if size else None
    except UserError:
        raise
    except Exception as error:  # of the hub, a parser or the disk: datasets documents no narrower type
        if isinstance(error, datasets.exceptions.DatasetGenerationError) and error.__cause__:
            error = error.__cause__
        refuse_bad_lines(cfg, files)
        what = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        what += "; try --revision=refs/convert/parquet" if "scripts are no longer supported" in what else ""
        raise DataError(
            f"dataset={cfg.dataset} cannot be read: {what}; finished shards are kept; run the same command again"
        ) from None


def builder_of(path):
    """The kind of a file: json, parquet, or text, which is one document."""
    suffixes = [suffix for suffix in Path(path).suffixes if suffix not in COMPRESSED]
    return RECORDS.get(suffixes[-1], "text") if suffixes else "text"


def lines(path, cfg):
    """Yields (number, line, what is wrong with it or None) of a file of JSON objects, one a line or all in a list.

    number: of the line; in a list, of the object.
    """
    import fsspec

    with fsspec.open(path, "rb", compression="infer") as file:
        head = file.read(1024)
    bom = len(codecs.BOM_UTF8) if head.startswith(codecs.BOM_UTF8) else 0
    with fsspec.open(path, "rb", compression="infer") as file:
        file.read(bom)
        if not head[bom:].lstrip().startswith(b"["):
            yield from (
                (i, line, bad_record(line, cfg))
                for i, line in enumerate(io.BufferedReader(file), 1)
                if line.strip()
            )
            return
        try:
            records = json.load(file)
        except ValueError as error:
            yield getattr(error, "lineno", 1), b"", f"it is not valid JSON ({error})"
            return
    for i, line in enumerate((json.dumps(record).encode() + b"\n" for record in records), 1):
        yield i, line, bad_record(line, cfg)


def bad_record(line, cfg):
    """Why a line of JSON gives no document, in words, or None."""
    try:
        record = json.loads(line.decode())
    except UnicodeDecodeError:
        return "it is not UTF-8"
    except (ValueError, RecursionError) as error:
        return f"it is not valid JSON ({getattr(error, 'msg', error)})"
    for key in cfg.text_key.split(","):
        value = record.get(key) if isinstance(record, dict) else None
        if value is None or not is_chat(cfg) and not isinstance(value, str):
            kinds = {list: "a list", dict: "an object", bool: "true or false", type(None): "null or missing"}
            return f"its field {key} is {kinds.get(type(value), 'a number')}, not text"
    try:
        json.dumps(record, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return "it holds half of a surrogate pair"


def refuse_bad_lines(cfg, files):
    """Raises DataError for the first line of local files that gives no document."""
    from corpus.loader import DataError

    for path in (path for path in files or () if builder_of(path) == "json"):
        try:
            number, _, wrong = next((found for found in lines(path, cfg) if found[2]), (0, 0, None))
        except Exception:  # of the disk or of a decompressor: the caller tells what it met
            continue
        if wrong:
            raise DataError(
                f"{path}:{number}: {wrong}; finished shards are kept; mend the line, or leave such lines out "
                "with --skip_bad_documents"
            )


def without_bad_lines(path, cfg):
    """The path of a copy of a file without its bad lines, or the same path if it has none; says how many there are."""
    wrong = [(number, what) for number, _, what in lines(path, cfg) if what]
    if not wrong:
        return path
    print(
        f"warning: {path}: left out {len(wrong):,} bad lines, the first is line {wrong[0][0]}: {wrong[0][1]}"
    )
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    copy = os.path.join(folder, "good.jsonl")
    with open(copy, "wb") as file:
        file.writelines(line.rstrip(b"\n") + b"\n" for _, line, what in lines(path, cfg) if not what)
    return copy


def alone(files):
    """Whether there is one document only, since `files`, from `local_files`, are one text."""
    return files is not None and len(files) == 1 and builder_of(files[0]) == "text"


def load_files(cfg, files):
    """A dataset of the documents in `files`, in order: consecutive files of one kind are one part, parts are joined."""
    import datasets

    def part_of(
        path,
    ):  # equal neighbours are one part; a jsonl file is one alone, since its fields may differ
        return builder_of(path), path if builder_of(path) == "json" else ""

    if cfg.skip_bad_documents:
        files = [without_bad_lines(path, cfg) if builder_of(path) == "json" else path for path in files]
        if not (files := [path for path in files if os.path.getsize(path)]):
            raise UserError(f"dataset={cfg.dataset}: no line is a document")
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
