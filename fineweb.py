"""Tokens to train on: shards from the Hugging Face hub or from local files.

    python fineweb.py                                # FineWeb-Edu sample-10BT into data/fineweb-edu, 20 GB
    python fineweb.py --dataset=kjj0/fineweb10B-gpt2 --max_shards=10  # ready-made GPT-2 shards of FineWeb
    python fineweb.py --dataset="books/*.txt,notes.jsonl.zst" --out_dir=data/mine
    python fineweb.py --dataset=input.txt --tokenizer=chars --out_dir=data/shakespeare_char
    python fineweb.py --dataset=chats.jsonl --text_key=messages --tokenizer=FOLDER  # see corpus/dialogues.py
    python fineweb.py --pack=131072 --min_document_tokens=8192     # for long sequences, see corpus/packing.py

Writes llm.c shards (a 1,024-byte header, then uint16 or uint32 tokens, a separator before each document),
manifest.json with checksums, and token_bytes.npy. Validation gets whole documents from the front, or of a
single text the last tenth. Every training shard but the last is exactly shard_tokens long; documents continue
from one shard into the next. A killed run continues when it is started again. corpus/loader.py reads shards.
"""

import functools
import glob
import hashlib
import io
import json
import os
import re
import shlex
import sys
import time
from codecs import BOM_UTF8
from dataclasses import dataclass
from pathlib import Path

from configurator import UserError, parse, refuse, run, too_small, without_effect
from corpus import DataError, brief
from run.files import patiently

SHORT_NAMES = {"fineweb": "HuggingFaceFW/fineweb", "fineweb-edu": "HuggingFaceFW/fineweb-edu"}
# hub datasets that are known to need no --shards
READY_MADE = ("kjj0/fineweb10B-gpt2", "kjj0/fineweb100B-gpt2", "kjj0/finewebedu10B-gpt2")
COMPRESSED = (".zst", ".gz", ".xz", ".bz2")
BLANK = BOM_UTF8 + b" \t\r\n"
BAD_LINE = "bad line"  # column of a local dataset: where a line that gives no document is, and why
RECORDS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}  # any other file is one document
TEXTS_ALONE = "subset split text_key streaming shard_tokens val_tokens shuffle_seed max_tokens pack".split()
TEXTS_ALONE += ["min_document_tokens", "skip_bad_documents"]  # settings that say how texts become shards


@dataclass
class Config:
    dataset: str = "fineweb-edu"  # fineweb, fineweb-edu, a hub name, or local files, folders and globs
    subset: str = "sample-10BT"  # of FineWeb and FineWeb-Edu; of another hub dataset if not the default
    split: str = "train"  # the hub's split to read
    revision: str | None = None  # the hub's branch, tag or commit; None: main
    shards: bool = False  # the hub dataset holds shards (.bin or .npy), which are fetched as they are
    text_key: str = "text"  # field of the text; messages or prompt,completion: loss on the answers alone
    streaming: bool = False  # read while downloading, keep no copy; shuffle_seed then shuffles a buffer only
    out_dir: str | None = None  # where the shards go; None: data/<name of the dataset>
    tokenizer: str = "gpt2"  # gpt2, a tiktoken encoding, bytes, chars, a tokenizer.model or tokenizer.json
    shard_tokens: int = 100_000_000  # tokens in a shard; with pack rounded down to whole rows
    val_tokens: int | None = None  # validation tokens; None: shard_tokens, of files 1%, of one text 10%
    shuffle_seed: int | None = None  # seed that shuffles the documents; None: in the source's order
    max_tokens: int | None = None  # training tokens to stop after; None: all
    pack: int | None = None  # reorders documents so that few cross a multiple of this block_size; None: off
    min_document_tokens: int | None = None  # leave out shorter documents; None: only empty ones
    skip_bad_documents: bool = False  # leave out lines of .jsonl files that give no document, and count them
    max_shards: int | None = None  # with shards: training shards to fetch; None: all

    @property
    def ready_made(self):
        return self.shards or self.dataset in READY_MADE

    @property
    def keys(self):
        return tuple(self.text_key.split(","))

    @property
    def is_chat(self):
        """Whether documents are dialogues or pairs, of which the answers alone carry loss."""
        return self.text_key == "messages" or len(self.keys) == 2


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
        dialogues = Dialogues(tokenizer) if cfg.is_chat else None
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
    """What to type next: GPT-2 124M, or without a GPU a model that a CPU trains in minutes."""
    import torch

    words = ["config/shakespeare_char.py"] if cfg.tokenizer == "chars" else []
    if not words and not torch.accelerator.is_available():
        words = ["config/quickstart.py"]
        if tokenizer.vocab_size > 1000:  # the head of a large vocabulary takes most of the time
            words += ["--batch_size=4", "--batch_tokens=1024"]
    words += [f"--data_dir={out}", f"--out_dir=out/{out.name}", f"--vocab_size={tokenizer.vocab_size}"]
    return shlex.join(["python", "train.py", *words])


def characters(cfg, name, files, out):
    """The tokenizer of the characters of all documents; out/tokenizer.json is written if need be."""
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
        wrong.append(f"shard_tokens={cfg.shard_tokens} must be at least one row of pack={cfg.pack}")
    if cfg.ready_made:
        why = "cannot change shards that are written already; try --max_shards"
        wrong += without_effect(cfg, TEXTS_ALONE, why)
    elif cfg.max_shards is not None:
        wrong.append(f"max_shards={cfg.max_shards} is for datasets of shards (--shards); try --max_tokens")
    if len(cfg.keys) > 2:
        wrong.append(f"text_key={cfg.text_key} must be one field, or two for prompt,completion")
    if cfg.tokenizer == "chars" and (cfg.ready_made or cfg.is_chat):
        wrong.append("tokenizer=chars is for texts, not for dialogues or shards")
    refuse(wrong)


def kind_of(path):
    """json, parquet, or text, which is one document."""
    suffixes = [suffix for suffix in Path(path).suffixes if suffix not in COMPRESSED]
    return RECORDS.get(suffixes[-1], "text") if suffixes else "text"


def alone(files):
    """Whether there is one document only, since `files`, from `local_files`, are one text."""
    return files is not None and len(files) == 1 and kind_of(files[0]) == "text"


def local_files(dataset):
    """The paths that `dataset` names, in order, or None if it names a hub dataset.

    A folder gives all its files in the order of their names, except hidden ones and binary ones.
    """
    on_hub = re.fullmatch(r"[\w-]+|[\w-][\w.-]*/[\w-][\w.-]*", dataset) and not os.path.exists(dataset)
    if on_hub and Path(dataset).suffix not in (".txt", *COMPRESSED, *RECORDS):
        return None
    files = []
    for part in dataset.split(","):
        found = [part] if os.path.exists(part) else sorted(glob.glob(part, recursive=True))
        if not found:
            raise UserError(f"dataset={dataset}: no file matches {part!r}")
        for path in found:
            inside = glob.glob(f"{glob.escape(path)}/**", recursive=True) if os.path.isdir(path) else None
            files += [path] if inside is None else sorted(filter(is_text, inside))
    if not files:
        raise UserError(f"dataset={dataset}: it holds no text files")
    return list(dict.fromkeys(files))


def is_text(path):
    if not os.path.isfile(path) or path.endswith((*COMPRESSED, ".parquet")):
        return os.path.isfile(path)
    with open(path, "rb") as file:
        return b"\0" not in file.read(8192)


def settings(cfg, name, files, tokenizer, dialogues):
    """The settings that decide the shards' bytes; a folder that was begun with other values is refused.

    What another setting decides by default stands after it, since the first difference is named.
    """
    if cfg.val_tokens and alone(files):
        raise UserError(f"val_tokens={cfg.val_tokens}: of a single text it is the last tenth; try 0 or None")
    chosen = {"dataset": name, "text_key": cfg.text_key, "tokenizer": cfg.tokenizer}
    chosen |= {"vocab_size": tokenizer.vocab_size, "eot": tokenizer.eot}
    chosen |= {"chat_sha256": dialogues.digest} if dialogues else {}
    if files is None:
        chosen |= {"subset": cfg.subset, "split": cfg.split}
        default_val = cfg.shard_tokens
    else:
        sizes = [os.path.getsize(path) for path in files]
        listing = "".join(f"{path}\t{size}\n" for path, size in zip(files, sizes)).encode()
        chosen |= {"files": len(files), "files_sha256": hashlib.sha256(listing).hexdigest()}
        # about 1% of the tokens, which have one byte or about four; less of compressed files
        one_percent = sum(sizes) // (100 if tokenizer.name == "bytes" else 400)
        default_val = 1 if alone(files) else max(1, min(one_percent, cfg.shard_tokens))
    chosen |= {key: getattr(cfg, key) for key in ("shard_tokens", "max_tokens", "shuffle_seed")}
    chosen["val_tokens"] = default_val if cfg.val_tokens is None else cfg.val_tokens
    rare = {key: getattr(cfg, key) for key in ("pack", "min_document_tokens", "skip_bad_documents")}
    rare["streaming"] = cfg.streaming and cfg.shuffle_seed is not None  # it shuffles otherwise
    return chosen | {key: value for key, value in rare.items() if value}


def documents(cfg, name, files, first):
    """Yields (texts, messages or pairs; share read of those from number `first` on, or None)."""
    import datasets  # takes a second to import

    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # what it logs is raised as well
    try:
        if alone(files):
            text = next(local_documents(files, cfg.keys))[cfg.text_key]
            cut = len(text) if cfg.val_tokens == 0 else len(text) * 9 // 10
            yield [part for part in (text[cut:], text[:cut]) if part][first:], None
            return
        if files:
            data = open_files(cfg, files)
        else:  # the default subset is one of FineWeb alone
            subset = cfg.subset if name in SHORT_NAMES.values() or cfg.subset != Config.subset else None
            hub = dict(name=subset, split=cfg.split, revision=cfg.revision, streaming=cfg.streaming)
            data = patiently(datasets.load_dataset, name, **hub).select_columns(list(cfg.keys))
        total, begun = None if cfg.streaming else len(data), first
        if total is not None and first >= total:  # all is written but the manifest
            if first > total:
                raise DataError(f"dataset={cfg.dataset} has changed: {first} of its {total} are written")
            return
        if cfg.shuffle_seed is not None:
            data = data.shuffle(seed=cfg.shuffle_seed)
        if first:
            data = data.skip(first) if cfg.streaming else data.select(range(first, total))
        for batch in data.iter(batch_size=256):  # about 200,000 tokens
            refuse_bad_lines(batch.get(BAD_LINE, ()), cfg)
            found = batch[cfg.keys[0]] if len(cfg.keys) == 1 else list(zip(*map(batch.get, cfg.keys)))
            if cfg.text_key == "messages" and files:
                found = [text and json.loads(text) for text in found]
            if not cfg.is_chat and not all(isinstance(text, str | None) for text in found):
                raise DataError(f"dataset={cfg.dataset}: the field text_key={cfg.text_key} is not text")
            first += len(found)
            yield found, total and (first - begun) / (total - begun)
    except Exception as error:  # of the hub, a parser or the disk: datasets documents no narrower type
        if isinstance(error, datasets.exceptions.DatasetGenerationError) and error.__cause__:
            error = error.__cause__
        if isinstance(error, UserError):
            raise error from None
        what = brief(error)
        what += "; try --revision=refs/convert/parquet" if "scripts are no longer supported" in what else ""
        kept = "finished shards are kept; run the same command again"
        raise DataError(f"dataset={cfg.dataset} cannot be read: {what}; {kept}") from None


def open_files(cfg, files):
    """A dataset of the documents in local files; the copy in datasets' cache serves until a file changes."""
    import datasets

    form = dict.fromkeys(cfg.keys, datasets.Value("large_string")) | {BAD_LINE: datasets.Value("string")}
    options = {"features": datasets.Features(form), "gen_kwargs": {"paths": tuple(files), "keys": cfg.keys}}
    if cfg.streaming:
        return datasets.IterableDataset.from_generator(local_documents, **options)
    stats = [(os.path.abspath(path), os.stat(path).st_size, os.stat(path).st_mtime_ns) for path in files]
    digest = hashlib.sha256(repr((stats, cfg.keys)).encode()).hexdigest()[:32]
    data = datasets.Dataset.from_generator(local_documents, fingerprint=digest, **options)
    refuse_bad_lines(data.data.column(BAD_LINE).drop_null().to_pylist(), cfg)  # before anything is written
    return data.remove_columns(BAD_LINE)


def local_documents(paths, keys):
    """Yields the documents of local files, {field: text, or JSON of messages}, and bad lines."""
    import fsspec
    import pyarrow.parquet

    as_json = keys == ("messages",)
    for path in paths:
        if kind_of(path) == "parquet":
            file = pyarrow.parquet.ParquetFile(path)
            if not set(keys) <= set(names := file.schema_arrow.names):
                raise DataError(f"{path} has no field {','.join(keys)}; it has {', '.join(names)}")
            for batch in file.iter_batches(256, columns=list(keys)):
                for row in batch.to_pylist():
                    if not as_json and not all(isinstance(value, str | None) for value in row.values()):
                        raise DataError(f"{path}: the field {','.join(keys)} is not text")
                    yield {key: json.dumps(row[key], default=str) for key in keys} if as_json else row
            continue
        with fsspec.open(path, "rb", compression="infer") as file:
            if kind_of(path) == "json":
                for number, line in lines(io.BufferedReader(file)):
                    row, problem = fields(line, keys, as_json)
                    yield row | {BAD_LINE: problem and f"{path}:{number}: {problem}"}
            elif as_json or len(keys) == 2:
                raise DataError(f"{path}: text_key={','.join(keys)} needs .jsonl, .json or .parquet files")
            else:
                yield {keys[0]: file.read().decode("utf-8", "replace")}


def lines(file):
    """(number, line) of JSON objects, which are one a line, or all in one list and numbered."""
    if file.peek(1024).lstrip(BLANK).startswith(b"["):
        records = json.loads(file.read().lstrip(BLANK))
        return enumerate((json.dumps(record).encode() for record in records), 1)
    return ((i, line.removeprefix(BOM_UTF8)) for i, line in enumerate(file, 1) if line.strip(BLANK))


def fields(line, keys, as_json):
    """({key: text, or JSON of messages}, None) of a line of JSON, or ({}, why there is none)."""
    try:
        record = json.loads(line.decode())
        row = {key: record[key] for key in keys}
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return {}, "it holds half of a surrogate pair"
    except (ValueError, RecursionError) as error:
        return {}, f"it is not valid JSON in UTF-8 ({error})"
    except (KeyError, TypeError):
        names = ", ".join(record) if isinstance(record, dict) else "no fields"
        return {}, f"it has no field {','.join(keys)}; it has {names}"
    for key, value in row.items():
        if value is None or not as_json and not isinstance(value, str):
            return {}, f"its field {key} is {json.dumps(value)[:40]}, not text"
        row[key] = json.dumps(value) if as_json else value
    return row, None


def refuse_bad_lines(problems, cfg):
    """Raises DataError for the first line that gives no document; with skip_bad_documents it counts."""
    if problems := [problem for problem in problems if problem]:
        if not cfg.skip_bad_documents:
            raise DataError(f"{problems[0]}; mend it, or leave such lines out with --skip_bad_documents")
        print(f"warning: left out {len(problems):,} bad lines, the first is {problems[0]}")


if __name__ == "__main__":
    run(main, parse(Config, check))
