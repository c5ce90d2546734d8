"""Local texts for fineweb.py: which kinds of files are read, and how (a table in docs/data.md).

The package datasets is not used for them: it takes one type for a field of all records, reads the
first of several frames of zstd, and names no line.
"""

import bz2
import codecs
import functools
import glob
import gzip
import io
import json
import lzma
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet

from corpus import LONG, DataError, as_user_error
from system.errors import UserError

RECORDS = (".jsonl", ".ndjson", ".json", ".parquet")  # many documents in a file
FOLDERS = (".txt", *RECORDS)  # what is read of a folder; a glob may name texts of other kinds
SUFFIXES = (
    ".txt .text .md .markdown .rst .org .tex .htm .html .xml .yaml .yml .toml .ini .log .css .sql "
    ".sh .py .pyi .c .h .cc .cpp .cxx .hpp .cu .cuh .cs .java .js .jsx .ts .tsx .go .rs .rb .php "
    ".pl .pm .lua .r .jl .kt .swift .scala .hs .ml .el .f .f90 .m .s .asm .lean .v"
).split()
OURS = ("manifest.json", "tokenizer.json")  # of shards that lie among the texts
CHATS = ("messages", "conversations")  # fields of dialogues
# How files begin that hold something else than their name says
BEGINNINGS = {
    b"version https://git-lfs.github.com/spec/": "a pointer of Git LFS; run git lfs pull",
    b"\x1f\x8b": "gzip; name it *.gz",
    b"\x28\xb5\x2f\xfd": "zstd; name it *.zst",
    b"\xfd7zXZ": "xz; name it *.xz",
    b"BZh91AY&SY": "bzip2; name it *.bz2",
    b"PK\x03\x04": "a zip archive; unpack it",
    codecs.BOM_UTF16_LE: "UTF-16; convert it to UTF-8",
    codecs.BOM_UTF16_BE: "UTF-16; convert it to UTF-8",
}
BESIDE = ("tools", "system")  # fields of a record beside its dialogue


@dataclass
class Document:
    """where: its file and line, or its number. value: a text, messages, or (prompt, completion).

    continues: whether it is a later part of the text of the document before it.
    """

    where: str
    value: str | list | tuple | None  # None: it is left out
    tools: list | None = None  # of a dialogue
    continues: bool = False


class Tally:
    """What is left out or replaced: {what: [how many, the first of them]}."""

    def __init__(self, skip_bad=False):
        self.skip_bad = skip_bad
        self.found = {}

    def add(self, what, first):
        """Counts one."""
        count, one = self.found.get(what, (0, first))
        self.found[what] = (count + 1, one)

    def bad(self, where, why):
        """Counts a document that cannot be read; DataError unless such ones are to be left out."""
        if not self.skip_bad:
            raise DataError(
                f"{where}: {why}; mend it, or leave such documents out with --skip_bad_documents"
            )
        self.add("bad documents left out", f"{where}: {why}")

    def __str__(self):
        return "; ".join(f"{n:,} {what}, the first: {one}" for what, (n, one) in self.found.items())


def kind(path):
    """(suffix that says what a file holds, suffix of its compression), lower case; "" if none."""
    inner, last = os.path.splitext(os.path.basename(path).lower())
    return (os.path.splitext(inner)[1], last) if last in COMPRESSED else (last, "")


def local_files(dataset, tally):
    """The paths of the files that `dataset` names; None for a dataset of the hub.

    Of a folder they are those of the kinds in FOLDERS. What exists is that path, whatever its
    characters; else commas part paths, and each may be a glob. tally: counts what is left out.
    """
    parts = [dataset]
    if not os.path.exists(dataset):
        named = re.fullmatch(r"[\w-]+|[\w-][\w.-]*/[\w-][\w.-]*", dataset)
        if named and not {*kind(dataset)} & {*FOLDERS, *COMPRESSED}:
            return None
        parts = dataset.split(",")
    files = {}  # in their order, each once
    for part in parts:
        paths = [part] if os.path.exists(part) else sorted(glob.glob(part, recursive=True))
        found = []
        for path in paths:
            if os.path.isdir(path):
                found += files_in(path, tally)
            elif os.path.isfile(path) and kind(path)[0] in ("", *RECORDS, *SUFFIXES):
                found.append(path)
            else:
                raise UserError(
                    f"dataset: {path} is no file, or of a kind that is not read; unpack an "
                    "archive, write a table as .jsonl, rename another text; known: "
                    f"{' '.join([*RECORDS, *SUFFIXES])}, each perhaps with {' '.join(COMPRESSED)}"
                )
        if not found:
            raise UserError(f"dataset={dataset}: no text file matches {part!r} {tally}")
        files |= dict.fromkeys(found)
    return [*files]


def files_in(folder, tally):
    """The files of FOLDERS in a folder and below it, sorted, none hidden.

    tally: counts others, and links, which may lead out of the folder or in a circle.
    """
    found = []
    for path in Path(folder).rglob("*"):
        link = path.is_symlink()
        hidden = any(name.startswith(".") for name in path.relative_to(folder).parts)
        if hidden or path.name in OURS or (path.is_dir() and not link):
            continue
        if path.is_file() and kind(path)[0] in FOLDERS and not link:
            found.append(str(path))
        else:
            tally.add("files and links in folders left out (a glob names them)", path)
    return sorted(found)


def local_documents(paths, keys, tally):
    """Yields the Document of each record with the fields `keys`; raises DataError."""
    for path in paths:
        for number, record in enumerate(records(path, keys), 1):
            if not isinstance(record, bytes) or record.strip():
                yield document(f"{path}:{number}", record, keys, tally)


def document(where, record, keys, tally):
    """The Document of a record, a line of JSON or {field: value}."""
    try:
        if isinstance(record, bytes):
            record = json.loads(record)
        else:
            record = without_none(record)
        values = tuple(field(record, key) for key in keys)
    except ValueError as error:
        tally.bad(where, f"no record (of JSON) with text in its field {','.join(keys)}: {error}")
        return Document(where, None)
    value = values if len(values) > 1 else values[0]
    if isinstance(value, list) and record.get("system"):
        value = [{"role": "system", "content": record["system"]}, *value]
    return Document(where, value, record.get("tools"))


def without_none(value):
    """The record without each None that stands for a field that others have.

    Parquet and the package datasets give all records all fields.
    """
    if isinstance(value, dict):
        return {name: without_none(one) for name, one in value.items() if one is not None}
    return [without_none(one) for one in value] if isinstance(value, list) else value


def field(record, key):
    """The text in a record's field, or a dialogue in one of CHATS; ValueError for others."""
    names = record if isinstance(record, dict) else ()
    if key not in names:
        raise ValueError(f"it has {', '.join(names) or 'no fields'}; try another --text_key")
    value = record[key]
    if isinstance(value, str):
        value.encode()  # a ValueError for half of a surrogate pair
    elif key not in CHATS or not isinstance(value, list):
        raise ValueError(f"{key} is {json.dumps(value, default=str)[:40]}")
    return value


# pyarrow's reads several frames, and tells of one that is cut; a window has at most 128 MB
ZSTD = functools.partial(pyarrow.CompressedInputStream, compression="zstd")
COMPRESSED = {".zst": ZSTD, ".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}


def opened(path, keys):
    """(the open file, decompressed, its first bytes that are no blanks).

    Raises DataError if it holds something else than its name says.
    """
    suffix, compression = kind(path)
    file = open(path, "rb")
    if compression and not file.peek(7).startswith(b"version"):  # of Git LFS
        file = io.BufferedReader(COMPRESSED[compression](file))
    head = file.peek(8192)[:8192]
    found = [words for beginning, words in BEGINNINGS.items() if head.startswith(beginning)]
    start = head.lstrip(codecs.BOM_UTF8 + b" \t\r\n")
    record = rb'\[?\s*\{.*"' + re.escape(keys[0].encode()) + rb'"\s*:'
    if suffix != ".parquet" and b"\0" in head:
        found.append("no text in UTF-8, as it has zero bytes; convert it or leave it out")
    elif suffix not in RECORDS and re.match(record, start):
        found.append("records of JSON; name it *.jsonl")
    if found:
        raise DataError(f"{path} holds {found[0]}")
    return file, start


def records(path, keys):
    """Yields the records of a file: {field: value}, or a line of JSON."""
    suffix, _ = kind(path)
    if suffix not in RECORDS:
        yield {keys[0]: "".join(text_parts(path, keys))}
        return
    with as_user_error(f"{path} cannot be read", DataError):
        file, start = opened(path, keys)
        if suffix == ".parquet":
            table = pyarrow.parquet.ParquetFile(file)
            columns = [*keys, *BESIDE]  # those that are there are read
            if not {*keys} <= {*table.schema_arrow.names}:
                columns = None  # all of them, whose names are told
            for batch in table.iter_batches(32, columns=columns):
                yield from batch.to_pylist()
        elif start.startswith(b"["):
            yield from json.load(file)
        else:
            yield from file


def text_parts(path, keys, begin=0, end=sys.maxsize):
    """Yields a text file's characters from `begin` up to `end` in parts, some of which are empty.

    They have no byte order mark, and U+FFFD where the file is not UTF-8.
    """
    at = 0
    with as_user_error(f"{path} cannot be read", DataError):
        file, _ = opened(path, keys)
        text = io.TextIOWrapper(file, "utf-8-sig", "replace", newline="")
        while part := text.read(LONG):
            yield part[max(0, begin - at) : max(0, end - at)]
            at += len(part)
