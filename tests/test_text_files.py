"""corpus/text_files.py, through byte shards: each kind of file is read, or refused in one line."""

import bz2
import gzip
import json
import lzma
import os
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
from test_fineweb import contents, prepare, refused, shard_tokens, stopped_after

from corpus import DataError, text_files, tokenizer
from system.errors import UserError

zstandard = pytest.importorskip("zstandard")


def line(text):
    return json.dumps({"text": text}).encode() + b"\n"


def written(folder, **contents):
    """Writes files; a double underscore in a name is a dot."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in contents.items():
        (folder / name.replace("__", ".")).write_bytes(data)
    return folder


def read(tmp_path, dataset, **settings):
    """(documents, printed text) of byte shards in a new folder."""
    out = tmp_path.parent / f"{tmp_path.name}-{len(list(tmp_path.parent.iterdir()))}"
    said = prepare(out, dataset, **dict(tokenizer="bytes", val_tokens=0) | settings)
    ids = np.concatenate(shard_tokens(out, "train"))
    rows = np.split(ids, np.flatnonzero(ids == 256)[1:])
    return [bytes(row[1:].tolist()).decode() for row in rows], said


@pytest.mark.fault(111)
def test_a_kind_is_told_by_the_suffixes_in_any_case(tmp_path):
    pack = {
        "gz": gzip.compress,
        # of several frames, as pzstd writes it
        "zst": lambda data: zstandard.compress(data[:9]) + zstandard.compress(data[9:]),
        "xz": lzma.compress,
        "bz2": bz2.compress,
    }
    names = "x.JSONL.GZ x.jsonl.ZST x.ndjson x.NDJSON.xz x.Json.Bz2 x.JSON x.y.jsonl".split()
    for name in names:
        data = pack.get(name.lower().rpartition(".")[2], bytes)(line("one") + line(name))
        (tmp_path / name).write_bytes(data)
    for dataset in (tmp_path, ",".join(str(tmp_path / name) for name in names)):
        assert sorted(read(tmp_path, dataset)[0]) == sorted([*["one"] * len(names), *names])


PNG = b"\x89PNG\r\n\x1a\n\0\0"
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 12345\n"
BOM = b"\xef\xbb\xbf"
UTF16 = "\u4e00\u4e8c".encode("utf-16")
# name: (what it holds, exit code, a word of the line)
REFUSED = {
    "x.zip": (b"PK\x03\x04", 2, "known"),
    "x.tar.gz": (gzip.compress(b"text"), 2, "known"),
    "x.csv": (b"id,text\n1,a\n", 2, "table"),
    "x.jsonl.gz.zst": (zstandard.compress(gzip.compress(line("a"))), 2, "known"),
    "blob": (line("one") + line("two"), 3, "jsonl"),
    "blob2": (b'[{"text": "one"}]', 3, "jsonl"),
    "y.txt": (UTF16, 3, "UTF-16"),
    "z.txt": (PNG, 3, "zero"),
    "b.jsonl": (gzip.compress(line("a")), 3, "gzip"),
    "f.jsonl": (json.dumps({"text": "a"}, indent=2).encode(), 3, "JSON"),
    "h.json": (b'{"data": [{"text": "a"}]}\n', 3, "data"),
    "i.json": (b'["one", "two"]', 3, "field"),
    "j.json": (b"[{", 3, "JSON"),
    "l.jsonl": (b"\n\n", 3, "empty"),
    "n.txt": (BOM, 3, "empty"),
    "p.txt.zst": (zstandard.compress(os.urandom(9000).hex().encode())[:5000], 3, "Truncated"),
    "q.txt.gz": (gzip.compress(os.urandom(900).hex().encode())[:500], 3, "EOFError"),
    "t.parquet": (LFS, 3, "LFS"),
    "u.txt.gz": (LFS, 3, "LFS"),
    "v.jsonl": (b'{"text": 1}\n', 3, "is 1"),
    "w.parquet": (b"PAR1 and no more", 3, "Arrow"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.fault(111)
def test_what_is_not_read_is_refused_in_one_line(tmp_path, name):
    """With --skip_bad_documents too, which must not hide why nothing is left."""
    data, code, word = REFUSED[name]
    path = tmp_path / name
    path.write_bytes(data)
    for skip in (False, True):
        error = refused(UserError, word, read, tmp_path, path, skip_bad_documents=skip)
        assert name in str(error) and error.exit_code == code
    if code == 2:  # no hint that leads here
        refused(UserError, "1 files and links in folders left out", read, tmp_path, tmp_path)
        refused(UserError, word, read, tmp_path, f"{tmp_path}/*")


def test_a_folder_of_many_kinds(tmp_path):
    """A BOM or blanks in front cost no document; pandas 3 writes text as large_string."""
    for name, kind in {"d.parquet": pyarrow.string(), "e.parquet": pyarrow.large_string()}.items():
        table = pyarrow.table({"n": [1, 2], "text": pyarrow.array([name, "last"], kind)})
        pyarrow.parquet.write_table(table, tmp_path / name)
    lines = BOM + line("jsonl one") + line("") + line("a <|endoftext|> b")
    written(tmp_path, a__txt=b"text", b__json=b"\n \n" + line("one"), b__jsonl=lines)
    written(tmp_path, binary__png=PNG, __hidden__txt=b"mine", f__csv=PNG, README__md=PNG)
    texts, told = read(tmp_path, tmp_path)
    parquet = ["d.parquet", "last", "e.parquet", "last"]
    assert texts == ["text", "one", "jsonl one", "a <|endoftext|> b", *parquet]
    assert "left out" in told
    assert read(tmp_path, tmp_path, val_tokens=2)[0] == texts[1:], "val is the first whole document"
    for key in ("n", "x"):  # a number, and no field at all
        words, path = "d.parquet.* field", tmp_path / "d.parquet"
        refused(DataError, words, read, tmp_path, path, text_key=key)


def test_texts_that_look_like_records_are_texts(tmp_path):
    texts = {"a.py": '{"a": 1}\nprint()\n', "list.txt": "[1]\n"}
    written(tmp_path, **{name: text.encode() for name, text in texts.items()})
    assert read(tmp_path, f"{tmp_path}/*.py,{tmp_path}/list.txt")[0] == [*texts.values()]


@pytest.mark.fault(92)
def test_a_path_that_exists_is_no_pattern_and_no_list(tmp_path):
    names = ["[ab].txt", "a*.txt", "a,b.txt"]
    written(tmp_path, **{"a.txt": b"A", "b.txt": b"B"})
    for name in names:
        (tmp_path / name).write_text(name)
        assert read(tmp_path, tmp_path / name)[0] == [name]
    assert sorted(read(tmp_path, tmp_path)[0]) == sorted([*names, "A", "B"])
    assert read(tmp_path, f"{tmp_path}/a.txt,{tmp_path}/b.txt")[0] == ["A", "B"]


@pytest.mark.fault(97)
def test_links_in_a_folder_are_left_out_and_circles_end(tmp_path):
    written(tmp_path / "out", secret__txt=b"secret")
    folder = written(tmp_path / "in", a__txt=b"A")
    written(folder / "more", b__txt=b"B")
    for name, target in dict(file="out/secret.txt", all="out", again="in").items():
        os.symlink(tmp_path / target, folder / f"{name}.txt")
    texts, told = read(tmp_path, folder)
    assert texts == ["A", "B"] and "3 files and links in" in told
    assert read(tmp_path, folder / "file.txt")[0] == ["secret"], "by its name it is read"


@pytest.mark.fault(104)
def test_a_source_that_was_edited_in_place_is_told(tmp_path):
    """Also by an edit that keeps size and time, after which the library's cache must not answer."""
    rows = [f"document {i:03d}" for i in range(400)]
    source = written(tmp_path, a__jsonl=b"".join(map(line, rows))) / "a.jsonl"
    settings = dict(dataset=source, tokenizer="bytes", val_tokens=0, shard_tokens=2000)
    with stopped_after(2):
        prepare(tmp_path / "d", **settings)
    before = source.stat()
    source.write_bytes(source.read_bytes().replace(b"document", b"replaced"))
    os.utime(source, ns=(before.st_atime_ns, before.st_mtime_ns))
    refused(UserError, "contents_sha256", prepare, tmp_path / "d", **settings)
    assert read(tmp_path, source)[0][0] == "replaced 000"


def test_a_json_file_of_one_list(tmp_path):
    """On one line or over many; other fields may change their types from record to record."""
    rows = [{"text": "one", "ner": [[0, 4, "P"]]}, {"text": "two\n", "ner": 3}]
    for name, indent in {"flat.json": None, "wide.json.gz": 2, "list.jsonl": 2}.items():
        data = BOM + b"\n" + json.dumps(rows, indent=indent).encode()
        (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
        assert read(tmp_path, tmp_path / name)[0] == ["one", "two\n"]
    lines = b"\r\n".join(json.dumps(row).encode() for row in rows)  # as on Windows
    (tmp_path / "lines.jsonl").write_bytes(lines)
    assert read(tmp_path, tmp_path / "lines.jsonl")[0] == ["one", "two\n"]


@pytest.mark.parametrize("shuffle_seed", [None, 1])
def test_what_is_left_out_or_replaced_is_told(tmp_path, shuffle_seed):
    """In files whose names are not UTF-8."""
    for name, data in {b"\xe9.jsonl": line("good") + b"{\n[]\n", b"\xe9.txt": b"caf\xe9"}.items():
        Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name)).write_bytes(data)
    texts, told = read(tmp_path, tmp_path, skip_bad_documents=True, shuffle_seed=shuffle_seed)
    assert sorted(texts) == ["caf\ufffd", "good"] and "1 texts with U+FFFD" in told
    assert "2 bad documents left out, the first: " in told and ".jsonl:2" in told


def test_a_text_in_parts_is_the_text(tmp_path, monkeypatch):
    """In parts, after a stop too, a long text has the tokens that it has in one."""
    text = "".join(f"line {i} \u00e9\n" for i in range(3000))
    (tmp_path / "a.txt").write_text(text)
    written(tmp_path / "d", b__txt=b"short", a__txt=text.encode())
    settings = dict(dataset=tmp_path / "a.txt", shard_tokens=9000, tokenizer="bytes")
    prepare(tmp_path / "whole", **settings)
    monkeypatch.setattr(tokenizer, "LONG", 4000)
    monkeypatch.setattr(text_files, "LONG", 700)
    with stopped_after(3):
        prepare(tmp_path / "parts", **settings)
    prepare(tmp_path / "parts", **settings)
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")
    assert read(tmp_path, tmp_path / "d")[0] == [text, "short"]
