"""Tokens to train on: shards from the Hugging Face hub or from local files.

    python fineweb.py                                # FineWeb-Edu sample-10BT into data/fineweb-edu, 20 GB
    python fineweb.py --dataset=kjj0/fineweb10B-gpt2 --max_shards=10  # ready-made GPT-2 shards of FineWeb
    python fineweb.py --dataset="books/*.txt,notes.jsonl.zst" --out_dir=data/mine
    python fineweb.py --dataset=input.txt --tokenizer=chars --out_dir=data/shakespeare_char
    python fineweb.py --dataset=chats.jsonl --text_key=messages --tokenizer=FOLDER  # see corpus/chat.py

A killed run goes on when it is started again.
"""

import bz2
import codecs
import glob
import gzip
import hashlib
import io
import json
import lzma
import os
import re
import shlex
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import zstandard

from configurator import UserError, refuse, run, too_small, without_effect
from corpus import DataError, told
from run import files as on_disk

SHORT_NAMES = {"fineweb": "HuggingFaceFW/fineweb", "fineweb-edu": "HuggingFaceFW/fineweb-edu"}
READY_MADE = ("kjj0/fineweb10B-gpt2", "kjj0/fineweb100B-gpt2", "kjj0/finewebedu10B-gpt2")
RECORDS = (".jsonl", ".ndjson", ".json", ".parquet")  # many documents in a file
FOLDERS = (".txt", *RECORDS)  # what is read of a folder; a glob may name texts of other kinds
TEXTS = ".txt .text .md .markdown .rst .org .tex .htm .html .xml .yaml .yml .toml .ini .log .css .sql .sh"
TEXTS += " .py .pyi .c .h .cc .cpp .cxx .hpp .cu .cuh .cs .java .js .jsx .ts .tsx .go .rs .rb .php .pl .pm"
TEXTS += " .lua .r .jl .kt .swift .scala .hs .ml .el .f .f90 .m .s .asm .lean .v"
TEXTS = ("", *TEXTS.split())  # one document in a file
OURS = ("progress.json", "manifest.json", "tokenizer.json")  # of shards that lie among the texts
POINTER = b"version https://git-lfs.github.com/spec/"  # how a file begins that Git LFS has not fetched
WARNING = "warning of fineweb.py"  # a field beside the text: what its reading changed or left out, or None
DOCUMENT_BYTES = 1 << 30  # of a compressed file that expands without end; a larger plain file is read whole


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
        return self.text_key == "messages" or len(self.keys) == 2


def main(cfg):
    check(cfg)
    from corpus import tokenizer as tokenizers
    from corpus import writer
    from corpus.chat import Dialogues

    name = SHORT_NAMES.get(cfg.dataset, cfg.dataset)
    files = None if cfg.ready_made else local_files(name)
    sha256 = files and contents(files)
    short = "text" if files and len(files) > 1 else re.sub(r"[^\w-].*", "", Path(name).name) or "text"
    out = Path(cfg.out_dir or f"data/{short}")
    with writer.claim(out):
        tokenizer = cfg.tokenizer
        if tokenizer == "chars":
            tokenizer, begun = out / "tokenizer.json", {*os.listdir(out)} & {"progress.json", "manifest.json"}
            if not (begun and tokenizer.exists()):
                texts = documents(cfg, name, files, sha256, tell=lambda *_: None)  # they are told below
                tokenizers.write_characters(texts, tokenizer)
        tokenizer = tokenizers.load(str(tokenizer))
        dialogues = Dialogues(tokenizer) if cfg.is_chat else None
        progress = writer.Progress(out, settings(cfg, name, files, sha256, tokenizer, dialogues))
        if progress.finished:
            print(f"{out} is finished already; nothing was done")
        else:
            if cfg.ready_made:
                writer.fetch_shards(name, cfg.revision, cfg.max_shards, progress, tokenizer)
            else:
                batches = documents(cfg, name, files, sha256, progress.position[0])
                writer.write_shards(batches, (dialogues or tokenizer).rows, progress, tokenizer, short)
            progress.finish(tokenizer)
    words = ["config/shakespeare_char.py"] if cfg.tokenizer == "chars" else []
    words += [f"--data_dir={out}", f"--out_dir=out/{out.name}", f"--vocab_size={tokenizer.vocab_size}"]
    for split in ("train", "val"):
        tokens, targets = progress.total("tokens", split), progress.total("targets", split)
        print(f"{split:5}  {tokens:,} tokens" + f", {targets:,} of them with loss" * cfg.is_chat)
    print(f"go on with  {shlex.join(['python', 'train.py', *words])}")


def check(cfg):
    """Raises one UserError for every setting out of range."""
    least = {"shard_tokens": 1, "val_tokens": 0, "max_tokens": 1, "max_shards": 1, "shuffle_seed": 0}
    wrong = too_small(cfg, least | {"pack": 2, "min_document_tokens": 1})
    if cfg.shard_tokens >= 1 << 31:
        wrong.append(f"shard_tokens={cfg.shard_tokens} must be below 2**31, the largest count in a header")
    if cfg.pack and cfg.pack > cfg.shard_tokens:
        wrong.append(f"shard_tokens={cfg.shard_tokens} must be at least one row of pack={cfg.pack}")
    if cfg.max_shards is not None and not cfg.ready_made:
        wrong.append(f"max_shards={cfg.max_shards} is for datasets of shards (--shards); try --max_tokens")
    if cfg.ready_made:
        texts = vars(cfg).keys() - {"dataset", "revision", "shards", "out_dir", "tokenizer", "max_shards"}
        wrong += without_effect(cfg, texts, "is for texts, shards are fetched as they are")
    if len(cfg.keys) > 2:
        wrong.append(f"text_key={cfg.text_key} must be one field, or two for prompt,completion")
    if cfg.tokenizer == "chars" and (cfg.ready_made or cfg.is_chat):
        wrong.append("tokenizer=chars is for texts, not for dialogues or shards")
    refuse(wrong)


def kind(path):
    """(suffix that says what a file holds, suffix of its compression), lower case; "" where there is none."""
    inner, last = os.path.splitext(os.path.basename(path).lower())
    return (os.path.splitext(inner)[1], last) if last in COMPRESSED else (last, "")


def alone(files):
    """Whether there is one document only, since `files`, from `local_files`, are one text."""
    return files is not None and len(files) == 1 and kind(files[0])[0] not in RECORDS


def local_files(dataset):
    """The paths that `dataset` names, None for one of the hub; of a folder those of the kinds in FOLDERS.

    What exists is that path, whatever its characters; else commas part paths, and each may be a glob.
    """
    on_hub = re.fullmatch(r"[\w-]+|[\w-][\w.-]*/[\w-][\w.-]*", dataset) and not os.path.exists(dataset)
    if on_hub and not {*kind(dataset)} & {*FOLDERS, *COMPRESSED}:
        return None
    files, others = [], Counter()
    for part in [dataset] if os.path.exists(dataset) else dataset.split(","):
        found = []
        matches = [part] if os.path.exists(part) else sorted(glob.glob(part, recursive=True))
        for path in filter(os.path.exists, matches):  # no dangling links
            if os.path.isdir(path):
                inside = files_in(path, others)
                found += [file for file in inside if kind(file)[0] in FOLDERS]
                others.update(kind(file)[0] for file in inside if kind(file)[0] not in FOLDERS)
            else:
                found.append(readable(path))
        words = ", ".join(f"{n} {suffix or 'without a suffix'}" for suffix, n in others.most_common())
        words = words and f"; left out of folders: {words}"
        if texts := [suffix for suffix in others if suffix in TEXTS[1:]]:
            words += f"; a glob reads more, as in 'FOLDER/**/*{texts[0]}'"
        if not found:
            raise UserError(f"dataset={dataset}: no text file matches {part!r}{words}")
        files += found
    if words:
        print(words[2:])
    return list(dict.fromkeys(files))


def files_in(folder, left_out):
    """The sorted files of a folder and its folders, without hidden ones; counts links that lead out of it."""
    found, top = [], os.path.realpath(folder)
    for parent, folders, names in os.walk(folder):  # which follows no link to a folder: there may be a circle
        folders[:] = [name for name in folders if not name.startswith(".")]
        for path in (os.path.join(parent, name) for name in (*folders, *names) if not name.startswith(".")):
            if os.path.islink(path) and os.path.commonpath([top, os.path.realpath(path)]) != top:
                left_out["links out of them"] += 1
            elif os.path.isfile(path) and os.path.basename(path) not in OURS:
                found.append(path)
    return sorted(found)


def readable(path):
    """`path` of a file that is named by itself or by a glob; UserError if its kind is not read."""
    if not os.path.isfile(path):
        raise UserError(f"dataset: {path} is a pipe or a device; write it to a file first")
    if (suffix := kind(path)[0]) not in (*RECORDS, *TEXTS):
        advice = "unpack an archive, write a table as .jsonl, rename another text"
        known = f"{' '.join(RECORDS + TEXTS[1:])}, each perhaps with {' '.join(COMPRESSED)}"
        raise UserError(f"dataset: {path}: files of the kind {suffix} are not read; {advice}; known: {known}")
    return path


def contents(files):
    """SHA-256 of the contents of all files: it tells a file that was edited in place; a second for a GB."""
    with told("dataset cannot be read", DataError):
        return hashlib.sha256("".join(on_disk.digest(path)[1] for path in files).encode()).hexdigest()


def settings(cfg, name, files, sha256, tokenizer, dialogues):
    """The settings that decide the shards' bytes; a folder that was begun with other values is refused."""
    if cfg.val_tokens and alone(files):
        raise UserError(f"val_tokens={cfg.val_tokens}: of a single text it is the last tenth; try 0 or None")
    if dialogues and (texts := [path for path in files or () if kind(path)[0] not in RECORDS]):
        raise UserError(f"text_key={cfg.text_key} needs files of {', '.join(RECORDS)}, not {texts[0]}")
    chosen = {"dataset": name, "revision": cfg.revision}
    if cfg.ready_made:
        return chosen | {"max_shards": cfg.max_shards}
    apart = {"dataset", "subset", "split", "shards", "streaming", "out_dir", "val_tokens", "max_shards"}
    chosen |= {key: value for key, value in vars(cfg).items() if key not in apart}
    chosen |= {"vocab_size": tokenizer.vocab_size, "eot": tokenizer.eot}
    chosen |= {"tokenizer_sha256": hashlib.sha256(tokenizer.token_bytes()).hexdigest()}
    chosen |= {"streaming": cfg.streaming and cfg.shuffle_seed is not None}  # then another order
    chosen |= {"chat_sha256": dialogues.digest} if dialogues else {}
    if files is None:
        chosen |= {"subset": cfg.subset, "split": cfg.split}
        share = cfg.shard_tokens
    else:
        sizes = [os.path.getsize(path) for path in files]
        listing = os.fsencode("".join(f"{path}\t{size}\n" for path, size in zip(files, sizes)))
        chosen |= {"files": len(files), "files_sha256": hashlib.sha256(listing).hexdigest()}
        chosen |= {"contents_sha256": sha256}
        # about 1% of the tokens, which have one byte or about four; less of compressed files
        share = 1 if alone(files) else sum(sizes) // (100 if tokenizer.name == "bytes" else 400)
    default_val = max(1, min(share, cfg.shard_tokens, (cfg.max_tokens or 1 << 63) // 10))
    return chosen | {"val_tokens": default_val if cfg.val_tokens is None else cfg.val_tokens}


def documents(cfg, name, files, sha256, first=0, tell=print):
    """Yields lists of texts, messages or pairs, from document number `first` on; tell() gets warnings.

    sha256: of the contents of local files. Bad documents that are left out are None.
    """
    with told(f"dataset={cfg.dataset} cannot be read", DataError, again=files is None):
        if alone(files):
            row = next(local_documents(files, cfg.keys, False))
            if row[WARNING]:
                tell(f"warning: {row[WARNING]}")
            text = row[cfg.text_key]
            cut = len(text) if cfg.val_tokens == 0 else len(text) * 9 // 10
            yield [part for part in (text[cut:], text[:cut]) if part][first:]
            return
        data = open_dataset(cfg, name, files, sha256)
        if not cfg.streaming and first == len(data):  # all is in shards; skip fails there
            return
        data = data if cfg.shuffle_seed is None else data.shuffle(seed=cfg.shuffle_seed)
        for batch in (data.skip(first) if first else data).iter(batch_size=256):  # about 200,000 tokens
            for words in filter(None, batch.get(WARNING, ())):
                tell(f"warning: {words}")
            found = batch[cfg.keys[0]] if len(cfg.keys) == 1 else list(zip(*map(batch.get, cfg.keys)))
            if cfg.text_key == "messages" and files:
                found = [text and json.loads(text) for text in found]
            if not cfg.is_chat and not all(isinstance(text, str | None) for text in found):
                raise DataError(f"dataset={cfg.dataset}: the field text_key={cfg.text_key} is not text")
            yield found


def open_dataset(cfg, name, files, sha256):
    """The documents on the hub or in local files, whose copy in datasets' cache serves until one changes."""
    import datasets  # takes a second to import

    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # what it logs is raised as well
    if not files:  # the default subset is one of FineWeb alone
        subset = cfg.subset if name in SHORT_NAMES.values() or cfg.subset != Config.subset else None
        hub = dict(name=subset, split=cfg.split, revision=cfg.revision, streaming=cfg.streaming)
        return on_disk.patiently(datasets.load_dataset, name, **hub).select_columns(list(cfg.keys))
    given = dict(paths=tuple(files), keys=cfg.keys, skip_bad=cfg.skip_bad_documents)
    form = datasets.Features(dict.fromkeys((*cfg.keys, WARNING), datasets.Value("large_string")))
    if cfg.streaming:
        return datasets.IterableDataset.from_generator(local_documents, form, gen_kwargs=given)
    digest = datasets.fingerprint.Hasher.hash((sha256, given))
    return datasets.Dataset.from_generator(local_documents, form, gen_kwargs=given, fingerprint=digest)


def local_documents(paths, keys, skip_bad):
    """Yields {field: text, or JSON of messages} and a WARNING; the first bad document raises DataError.

    With skip_bad a file's bad documents are one row without text, so that a cached copy tells of them too.
    """
    empty, read = dict.fromkeys((*keys, WARNING)), 0
    for path in paths:
        bad = []
        for number, record in enumerate(records(path, keys), 1):
            if isinstance(record, bytes) and not record.strip():
                continue
            try:
                yield empty | fields(record, keys)
                read += 1
            except ValueError as error:
                bad.append(f"{path}:{number}: {error}")
                if not skip_bad:
                    advice = "mend it, or leave such documents out with --skip_bad_documents"
                    raise DataError(f"{bad[0]}; {advice}") from None
        if bad:
            words = f"left out {len(bad):,} bad documents, the first is {bad[0]}"
            yield empty | {WARNING: shown(words)}
    if not read:
        raise DataError(f"no document in {len(paths):,} files, the first is {paths[0]}")


def shown(words):
    """`words` as text that Arrow keeps, also with the name of a file that is not UTF-8."""
    return words.encode("utf-8", "backslashreplace").decode()


class Zstd(io.RawIOBase):
    """The bytes of a .zst file, of one frame or several, and of any window that `zstd --long=31` makes."""

    def __init__(self, file):
        self.file, self.frame, self.packed, self.ready = file, None, b"", memoryview(b"")

    def readable(self):
        return True

    def readinto(self, buffer):
        while not self.ready:
            self.packed = self.packed or self.file.read(1 << 14)  # which may become some hundred MB
            if not self.packed and self.frame:
                raise EOFError("it ends within a frame of zstd")  # which zstandard's own reader does not tell
            if not self.packed:
                return 0
            self.frame = self.frame or zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()
            self.ready = memoryview(self.frame.decompress(self.packed))
            self.packed = self.frame.unused_data
            self.frame = None if self.frame.eof else self.frame
        size = min(len(buffer), len(self.ready))
        buffer[:size], self.ready = self.ready[:size], self.ready[size:]
        return size


COMPRESSED = {".zst": Zstd, ".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}


def opened(path):
    """The open file, decompressed. Raises DataError for what Git LFS has put in its place."""
    file = open(path, "rb")
    if file.peek(len(POINTER)).startswith(POINTER):
        raise DataError(f"{path} is a pointer of Git LFS to the file; fetch it with git lfs pull")
    return io.BufferedReader(COMPRESSED[kind(path)[1]](file)) if kind(path)[1] else file


def records(path, keys):
    """Yields a file's documents: {field: value}, a line of JSON as bytes, or a row of parquet as a batch."""
    import pyarrow.parquet

    suffix = kind(path)[0]
    with told(f"{path} cannot be read", DataError), opened(path) as file:
        if suffix == ".parquet":
            table = pyarrow.parquet.ParquetFile(file)
            known = set(keys) <= set(table.schema_arrow.names)
            for batch in table.iter_batches(256, columns=list(keys) if known else None):
                yield from (batch.slice(i, 1) for i in range(len(batch)))
        elif suffix not in RECORDS:
            yield from plain_text(path, file, keys)
        elif suffix == ".json" and file.peek(99).lstrip(codecs.BOM_UTF8 + b" \t\r\n").startswith(b"["):
            yield from json.loads(file.read().decode("utf-8-sig"))
        else:
            yield from pieces(path, file, file.readline)


def pieces(path, file, read):
    """Yields what read(most bytes) gives, a document each, until it is empty."""
    most = max(DOCUMENT_BYTES, os.path.getsize(path))
    for number, data in enumerate(iter(lambda: read(most + 1), b""), 1):
        if len(data) > most:
            raise DataError(f"{path}:{number}: a document of over {most >> 20:,} MiB; cut it up")
        yield data


def plain_text(path, file, keys):
    """Yields the one document of a text file, and what was replaced in it; none if it is empty."""
    for data in pieces(path, file, file.read):
        if b"\0" in data[:8192] or data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            raise DataError(f"{path} is not text in UTF-8: it has zero bytes; leave it out or convert it")
        text = data.decode("utf-8-sig", "replace")
        lost, words = text.count("\ufffd") - data.count(b"\xef\xbf\xbd"), None
        if lost:
            words = shown(f"{path} is not UTF-8 throughout: {lost:,} characters were replaced by U+FFFD")
        try:
            first = json.loads(data[: data.find(b"\n") + 1 or None])
        except (ValueError, RecursionError):
            first = None
        if isinstance(first, dict) and set(keys) <= first.keys():
            raise DataError(f"{path} holds lines of JSON, not text; name it *.jsonl")
        if text:  # else it was a byte order mark alone
            yield {keys[0]: text, WARNING: words}


def fields(record, keys):
    """{key: text, or JSON of messages} of an item of `records`; ValueError says what is wrong."""
    form = "valid JSON in UTF-8" if isinstance(record, bytes) else "valid UTF-8"
    try:
        if isinstance(record, bytes):
            record = json.loads(record.decode("utf-8-sig"))
        elif hasattr(record, "to_pylist"):  # one row, as one that cannot be decoded costs no other
            (record,) = record.to_pylist()
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is not {form} ({error})") from None
    names = record if isinstance(record, dict) else ()
    if not set(keys) <= set(names):
        raise ValueError(f"it has no field {','.join(keys)}; it has {', '.join(names) or 'no fields'}")
    row = {key: record[key] for key in keys}
    for key, value in row.items():
        as_json = keys == ("messages",) and value is not None
        row[key] = text = json.dumps(value, ensure_ascii=False, default=str) if as_json else value
        if not isinstance(text, str):
            raise ValueError(f"its field {key} is {json.dumps(value, default=str)[:40]}, not text")
        if re.search("[\ud800-\udfff]", text):
            raise ValueError("it holds half of a surrogate pair")
    return row | {WARNING: record.get(WARNING)}


if __name__ == "__main__":
    run(main, Config)
