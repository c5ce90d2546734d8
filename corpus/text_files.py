"""Local texts for fineweb.py: which kinds of files are read, and how (a table in docs/data.md)."""

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
from collections import Counter

from corpus import DataError, as_user_error
from system.errors import UserError
from system.files import digest

RECORDS = (".jsonl", ".ndjson", ".json", ".parquet")  # many documents in a file
FOLDERS = (".txt", *RECORDS)  # what is read of a folder; a glob may name texts of other kinds
SUFFIXES = (
    ".txt .text .md .markdown .rst .org .tex .htm .html .xml .yaml .yml .toml .ini .log .css .sql "
    ".sh .py .pyi .c .h .cc .cpp .cxx .hpp .cu .cuh .cs .java .js .jsx .ts .tsx .go .rs .rb .php "
    ".pl .pm .lua .r .jl .kt .swift .scala .hs .ml .el .f .f90 .m .s .asm .lean .v"
).split()
TEXTS = ("", *SUFFIXES)  # one document in a file
OURS = ("progress.json", "manifest.json", "tokenizer.json")  # of shards that lie among the texts
# how a file begins that Git LFS has not fetched
POINTER = b"version https://git-lfs.github.com/spec/"
BEFORE_JSON = codecs.BOM_UTF8 + b" \t\r\n"  # bytes that may precede a list
# a field beside the text: what its reading changed or left out, or None
WARNING = "warning of fineweb.py"


def kind(path):
    """(suffix that says what a file holds, suffix of its compression), lower case; "" if none."""
    inner, last = os.path.splitext(os.path.basename(path).lower())
    return (os.path.splitext(inner)[1], last) if last in COMPRESSED else (last, "")


def alone(files):
    """Whether there is one document only, since `files`, from `local_files`, are one text."""
    return files is not None and len(files) == 1 and kind(files[0])[0] not in RECORDS


def local_files(dataset):
    """The paths of the files that `dataset` names; None for a dataset of the hub.

    Of a folder they are those of the kinds in FOLDERS. What exists is that path, whatever its
    characters; else commas part paths, and each may be a glob.
    """
    parts = [dataset]
    if not os.path.exists(dataset):
        if named_as_on_hub(dataset):
            return None
        parts = dataset.split(",")
    files = []
    left_out = Counter()
    for part in parts:
        paths = [part] if os.path.exists(part) else sorted(glob.glob(part, recursive=True))
        found = []
        for path in paths:
            if os.path.isdir(path):
                found += files_in(path, left_out)
            elif os.path.exists(path):  # no dangling link
                found.append(readable(path))
        if not found:
            words = f"; {what_is_left_out(left_out)}" if left_out else ""
            raise UserError(f"dataset={dataset}: no text file matches {part!r}{words}")
        files += found
    if left_out:
        print(what_is_left_out(left_out))
    return list(dict.fromkeys(files))


def named_as_on_hub(dataset):
    """Whether it is NAME or OWNER/NAME, without a suffix of the files that folders are read for."""
    named = re.fullmatch(r"[\w-]+|[\w-][\w.-]*/[\w-][\w.-]*", dataset)
    return named and not {*kind(dataset)} & {*FOLDERS, *COMPRESSED}


def what_is_left_out(left_out):
    """A line about the files of folders that are not read. left_out: {suffix: number of them}."""
    words = ", ".join(f"{n} {suffix or 'without a suffix'}" for suffix, n in left_out.most_common())
    for suffix in left_out:
        if suffix in SUFFIXES:
            return f"left out of folders: {words}; a glob reads more, as in 'FOLDER/**/*{suffix}'"
    return f"left out of folders: {words}"


def files_in(folder, left_out):
    """The files of FOLDERS in a folder and below it, sorted, none hidden, each once.

    left_out: counts others by suffix, and links that lead out of the folder.
    """
    paths = []
    # os.walk follows no link to a folder, as there may be a circle
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        names = [name for name in names if not name.startswith(".")]
        paths += [os.path.join(parent, name) for name in (*folders, *names)]
    found = {}
    top = os.path.realpath(folder)
    for path in sorted(paths):
        real = os.path.realpath(path)
        suffix, _ = kind(path)
        if os.path.islink(path) and os.path.commonpath([top, real]) != top:
            left_out["links out of them"] += 1
        elif not os.path.isfile(path) or os.path.basename(path) in OURS or real in found:
            continue
        elif suffix in FOLDERS:
            found[real] = path
        else:
            left_out[suffix] += 1
    return [*found.values()]


def readable(path):
    """`path` of a file that is named by itself or by a glob; UserError if its kind is not read."""
    if not os.path.isfile(path):
        raise UserError(f"dataset: {path} is a pipe or a device; write it to a file first")
    suffix, _ = kind(path)
    if suffix not in (*RECORDS, *TEXTS):
        raise UserError(
            f"dataset: {path}: files of the kind {suffix} are not read; unpack an archive, write a "
            "table as .jsonl, rename another text; known: "
            f"{' '.join([*RECORDS, *SUFFIXES])}, each perhaps with {' '.join(COMPRESSED)}"
        )
    return path


def contents(files):
    """SHA-256 of all files' contents, which tells one edited in place; takes a second for a GB."""
    with as_user_error("dataset cannot be read", DataError):
        return hashlib.sha256("".join(digest(path)[1] for path in files).encode()).hexdigest()


def local_documents(paths, keys, skip_bad):
    """Yields {field: text, or JSON of messages, WARNING: ...} of each document.

    The first bad one raises DataError. With skip_bad a file's bad documents are one row without
    text, so that a cached copy tells of them too.
    """
    empty = dict.fromkeys((*keys, WARNING))
    read = 0
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
                    raise DataError(
                        f"{bad[0]}; mend it, or leave such documents out with --skip_bad_documents"
                    ) from None
        if bad:
            yield empty | {
                WARNING: shown(f"left out {len(bad):,} bad documents, the first is {bad[0]}")
            }
    if not read:
        raise DataError(f"no document in {len(paths):,} files, the first is {paths[0]}")


def shown(words):
    """`words` as text that Arrow keeps, also with the name of a file that is not UTF-8."""
    return words.encode("utf-8", "backslashreplace").decode()


class Zstd(io.RawIOBase):
    """The bytes of a .zst file of one frame or several, of any window of `zstd --long=31`."""

    def __init__(self, file):
        self.chunks = zstd_chunks(file)
        self.chunk = io.BytesIO()  # what is not yet read of one

    def readable(self):
        return True

    def readinto(self, buffer):
        while not (size := self.chunk.readinto(buffer)):
            chunk = next(self.chunks, None)
            if chunk is None:
                return 0
            self.chunk = io.BytesIO(chunk)
        return size


def zstd_chunks(file):
    """Yields decompressed parts of a file; EOFError if it is cut, which zstandard does not tell."""
    import zstandard  # where no such file is read it need not be installed

    frame = None
    while packed := file.read(1 << 14):  # which may become some hundred MB
        while packed:
            if frame is None:
                frame = zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()
            yield frame.decompress(packed)
            packed = frame.unused_data
            if frame.eof:
                frame = None
    if frame:
        raise EOFError("it ends within a frame of zstd")


COMPRESSED = {".zst": Zstd, ".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}


def opened(path):
    """The open file, decompressed. Raises DataError for what Git LFS has put in its place."""
    file = open(path, "rb")
    if file.peek(len(POINTER)).startswith(POINTER):
        raise DataError(f"{path} is a pointer of Git LFS to the file; fetch it with git lfs pull")
    _, compression = kind(path)
    if compression:
        return io.BufferedReader(COMPRESSED[compression](file))
    return file


def records(path, keys):
    """Yields the documents of a file.

    Each is {field: value}, a line of JSON as bytes, or a row of parquet as a batch.
    """
    import pyarrow.parquet

    suffix, _ = kind(path)
    with as_user_error(f"{path} cannot be read", DataError), opened(path) as file:
        if suffix == ".parquet":
            table = pyarrow.parquet.ParquetFile(file)
            known = set(keys) <= set(table.schema_arrow.names)
            for batch in table.iter_batches(256, columns=list(keys) if known else None):
                yield from (batch.slice(i, 1) for i in range(len(batch)))
        elif suffix not in RECORDS:
            yield from plain_text(path, file, keys)
        elif suffix == ".json" and file.peek(99).lstrip(BEFORE_JSON).startswith(b"["):
            yield from json.loads(file.read().decode("utf-8-sig"))
        else:
            yield from iter(file.readline, b"")


def plain_text(path, file, keys):
    """Yields the one document of a text file, and what was replaced in it; none if it is empty."""
    data = file.read()
    if b"\0" in data[:8192] or data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise DataError(
            f"{path} is not text in UTF-8: it has zero bytes; leave it out or convert it"
        )
    text = data.decode("utf-8-sig", "replace")
    lost = text.count("\ufffd") - data.count(b"\xef\xbf\xbd")
    words = None
    if lost:
        words = shown(
            f"{path} is not UTF-8 throughout: {lost:,} characters were replaced by U+FFFD"
        )
    if begins_with_record(data, keys if kind(path)[0] else ()):
        raise DataError(
            f"{path} holds records of JSON, not text; name it *.jsonl, or *.json if it is a list"
        )
    if text:  # else it is empty, or a byte order mark alone
        yield {keys[0]: text, WARNING: words}


def begins_with_record(data, keys):
    """Whether the first line of `data` is a JSON object with fields `keys`, or a list of such."""
    try:
        first = json.loads(data[: data.find(b"\n") + 1 or None])
    except (ValueError, RecursionError):
        return False
    if isinstance(first, list) and first:
        first = first[0]
    return isinstance(first, dict) and set(keys) <= first.keys()


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
        raise ValueError(
            f"it has no field {','.join(keys)}; it has {', '.join(names) or 'no fields'}"
        )
    row = {WARNING: record.get(WARNING)}
    for key in keys:
        text = record[key]
        if keys == ("messages",) and text is not None:
            text = json.dumps(text, ensure_ascii=False, default=str)
        if not isinstance(text, str):
            raise ValueError(f"its field {key} is {json.dumps(text, default=str)[:40]}, not text")
        if re.search("[\ud800-\udfff]", text):
            raise ValueError("it holds half of a surrogate pair")
        row[key] = text
    return row
