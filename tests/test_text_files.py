"""corpus/text_files.py, through byte shards: each kind of file is read, or refused in one line."""

import bz2
import gzip
import io
import json
import lzma
import os
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest
from conftest import one_line
from test_fineweb import contents, prepare, shard_tokens, stopped_after

from corpus import text_files, tokenizer
from corpus.loader import DataError, TokenLoader
from system.errors import UserError

zstandard = pytest.importorskip("zstandard")


def line(text):
    return json.dumps({"text": text}).encode() + b"\n"


def texts_of(out):
    """The training documents of byte shards."""
    ids = np.concatenate(shard_tokens(out, "train"))
    return [
        bytes(row[1:].tolist()).decode() for row in np.split(ids, np.flatnonzero(ids == 256)[1:])
    ]


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
    return texts_of(out), said


def zipped(**members):
    with zipfile.ZipFile(data := io.BytesIO(), "w") as archive:
        for name, text in members.items():
            archive.writestr(name.replace("__", "."), text)
    return data.getvalue()


@pytest.mark.parametrize(
    "name", "x.JSONL.GZ x.jsonl.ZST x.ndjson x.NDJSON.xz x.Json.Bz2 x.JSON x.y.jsonl".split()
)
@pytest.mark.fault(111)
def test_a_kind_is_told_by_the_suffixes_in_any_case(tmp_path, name):
    pack = {
        "gz": gzip.compress,
        # of several frames, as pzstd writes it
        "zst": lambda data: zstandard.compress(data[:9]) + zstandard.compress(data[9:]),
        "xz": lzma.compress,
        "bz2": bz2.compress,
    }
    data = pack.get(name.lower().rpartition(".")[2], bytes)(line("one") + line("two"))
    (tmp_path / name).write_bytes(data)
    assert read(tmp_path, tmp_path / name)[0] == read(tmp_path, tmp_path)[0] == ["one", "two"]


def long_window(data):
    """As zstd --long=28 writes it."""
    own = zstandard.ZstdCompressionParameters(window_log=28, enable_ldm=True)
    write = zstandard.ZstdCompressor(compression_params=own).compressobj()
    return write.compress(data) + write.flush()


PNG = b"\x89PNG\r\n\x1a\n\0\0"
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 12345\n"
BOM = b"\xef\xbb\xbf"
UTF16 = "\u4e00\u4e8c".encode("utf-16")
INDENTED = json.dumps({"text": "a"}, indent=2).encode()
SHAREGPT = b'{"conversations": [{"from": "human", "value": "a"}]}\n'
DATA = b'{"data": [{"text": "a"}]}\n'
# name: (what it holds, further settings, exit code, a word of the line)
REFUSED = {
    "x.zip": (zipped(a__jsonl=line("a"), b__jsonl=line("b")), {}, 2, "known"),
    "x.jsonl.zip": (zipped(a__jsonl=line("a")), {}, 2, "known"),
    "x.tar.gz": (gzip.compress(b"text"), {}, 2, "known"),
    "x.csv": (b"id,text\n1,a\n", {}, 2, "table"),
    "x.jsonl.1": (line("a"), {}, 2, "known"),
    "x.jsonl.gz.zst": (zstandard.compress(gzip.compress(line("a"))), {}, 2, "known"),
    "blob": (line("one") + line("two"), {}, 3, "jsonl"),
    "blob2": (b'[{"text": "one"}]', {}, 3, "jsonl"),
    "x.txt": (line("one"), {}, 3, "jsonl"),
    "y.txt": (UTF16, {}, 3, "UTF-16"),
    "z.txt": (PNG, {}, 3, "zero"),
    "a.jsonl": (UTF16, {}, 3, "UTF-16"),
    "b.jsonl": (gzip.compress(line("a")), {}, 3, "gzip"),
    "c.jsonl": (zstandard.compress(line("a")), {}, 3, "zstd"),
    "d.txt": (zipped(a=b"a"), {}, 3, "zip"),
    "f.jsonl": (INDENTED, {}, 3, "JSON"),
    "g.json": (json.dumps({"data": [{"text": "a"}]}, indent=1).encode(), {}, 3, "JSON"),
    "h.json": (DATA, {}, 3, "data"),
    "i.json": (b'["one", "two"]', {}, 3, "field"),
    "j.json": (b"[{", {}, 3, "JSON"),
    "k.jsonl": (SHAREGPT, dict(text_key="messages", tokenizer="chat"), 3, "conversations"),
    "l.jsonl": (b"\n\n", {}, 3, "empty"),
    "m.txt": (b"", {}, 3, "empty"),
    "n.txt": (BOM, {}, 3, "empty"),
    "o.jsonl": (line("") * 3, {}, 3, "empty"),
    "p.txt.zst": (zstandard.compress(os.urandom(9000).hex().encode())[:5000], {}, 3, "Truncated"),
    "p.jsonl.zst": (long_window(line("a")), {}, 3, "memory"),
    "q.txt.gz": (gzip.compress(os.urandom(900).hex().encode())[:500], {}, 3, "EOFError"),
    "r.txt": (LFS, {}, 3, "LFS"),
    "s.jsonl": (LFS, {}, 3, "LFS"),
    "t.parquet": (LFS, {}, 3, "LFS"),
    "u.txt.gz": (LFS, {}, 3, "LFS"),
    "v.jsonl": (b'{"text": 1}\n', {}, 3, "is 1"),
    "w.parquet": (b"PAR1 and no more", {}, 3, "Arrow"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.fault(111)
def test_what_is_not_read_is_refused_in_one_line(tmp_path, name):
    """With --skip_bad_documents too, which must not hide why nothing is left."""
    data, settings, code, word = REFUSED[name]
    path = tmp_path / name
    path.write_bytes(data)
    if settings.get("tokenizer") == "chat":
        settings = settings | dict(tokenizer=str(with_template(tmp_path / "chat")))
    for skip in (False, True):
        with pytest.raises(UserError, match=word) as error:
            read(tmp_path, path, skip_bad_documents=skip, **settings)
        assert name in one_line(error) and error.value.exit_code == code
    if code == 2:  # no hint that leads here
        with pytest.raises(UserError, match="1 files and links in folders left out"):
            read(tmp_path, tmp_path)
        with pytest.raises(UserError, match=word):
            read(tmp_path, f"{tmp_path}/*")


def with_template(folder):
    """A folder of the bytes' tokenizer.json with a chat template."""
    folder.mkdir()
    (folder / "tokenizer.json").write_text(tokenizer.load("bytes").to_json())
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


def test_texts_that_look_like_records_are_texts(tmp_path):
    written(tmp_path, code__py=b'{"a": 1}\nprint()\n', list__txt=b"[1]\n")
    found, _ = read(tmp_path, f"{tmp_path}/*.py,{tmp_path}/list.txt")
    assert found == ['{"a": 1}\nprint()\n', "[1]\n"]


@pytest.mark.fault(92)
def test_a_path_that_exists_is_no_pattern_no_list_and_no_address(tmp_path):
    names = [
        "a.txt::b.txt",
        "Perl::Module.txt",
        "[ab].txt",
        "a*.txt",
        "a,b.txt",
        "file%20name.txt",
        "zip::x.txt",
    ]
    written(tmp_path, **{"a.txt": b"A", "b.txt": b"B"})
    for name in names:
        (tmp_path / name).write_text(name)
        assert read(tmp_path, tmp_path / name)[0] == [name]
    assert sorted(read(tmp_path, tmp_path)[0]) == sorted([*names, "A", "B"])
    assert read(tmp_path, f"{tmp_path}/a.txt,{tmp_path}/b.txt")[0] == ["A", "B"]


@pytest.mark.parametrize("shuffle_seed", [None, 1])
def test_a_second_run_tells_what_the_first_told(tmp_path, shuffle_seed):
    written(tmp_path, a__jsonl=line("good") + b"{\n[]\n" + line("last"), b__txt=b"caf\xe9")
    settings = dict(skip_bad_documents=True, shuffle_seed=shuffle_seed)
    first, second = (read(tmp_path, tmp_path, **settings) for _ in range(2))
    assert first[0] == second[0] and sorted(first[0]) == ["caf\ufffd", "good", "last"]
    for _, told in (first, second):
        assert f"2 bad documents left out, the first: {tmp_path}/a.jsonl:2" in told
        assert "1 files with U+FFFD" in told and "b.txt" in told


@pytest.mark.fault(97)
def test_links_in_a_folder_are_left_out_and_circles_end(tmp_path):
    written(tmp_path / "out", secret__txt=b"secret")
    folder = written(tmp_path / "in", a__txt=b"A")
    written(folder / "more", b__txt=b"B")
    for name, target in dict(
        file=tmp_path / "out/secret.txt", all=tmp_path / "out", again=folder
    ).items():
        os.symlink(target, folder / f"{name}.txt")
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
    with pytest.raises(UserError, match="contents_sha256"):
        prepare(tmp_path / "d", **settings)
    assert read(tmp_path, source)[0][0] == "replaced 000"


def test_data_of_a_tokenizer_with_a_pad_beyond_the_model(tmp_path):
    """Texts never give the pad; other ids that a model lacks are refused before the first step."""
    parts = json.loads(tokenizer.load("bytes").to_json())
    parts["added_tokens"].append(parts["added_tokens"][0] | dict(id=257, content="<pad>"))
    (tmp_path / "t").mkdir()
    (tmp_path / "t/tokenizer.json").write_text(json.dumps(parts))
    written(tmp_path, a__jsonl=line("text") * 20)
    prepare(tmp_path / "d", tmp_path / "a.jsonl", tokenizer=str(tmp_path / "t"), val_tokens=0)
    assert json.loads((tmp_path / "d/manifest.json").read_text())["vocab_size"] == 258
    TokenLoader(tmp_path / "d", "train", 1, 8, vocab_size=257).close()
    for size in (256, 97):
        with pytest.raises(DataError, match=f"vocab_size={size}"):
            TokenLoader(tmp_path / "d", "train", 1, 8, vocab_size=size)


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


def test_a_file_name_that_is_not_utf_8_is_read(tmp_path):
    for name, data in {b"caf\xe9.jsonl": line("good") + b"{\n", b"caf\xe9.txt": b"caf\xe9"}.items():
        Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name)).write_bytes(data)
    texts, _ = read(tmp_path, tmp_path, skip_bad_documents=True, shuffle_seed=1)
    assert sorted(texts) == ["caf\ufffd", "good"]


def test_a_pipe_is_refused_at_once(tmp_path):
    """As bash gives one for <(zcat x.gz): it could be read only once."""
    os.mkfifo(tmp_path / "pipe.txt")
    with pytest.raises(UserError, match="pipe"):
        read(tmp_path, tmp_path / "pipe.txt")


def test_a_text_in_parts_is_the_text(tmp_path, monkeypatch):
    """In parts, after a stop too, a long text has the tokens that it has in one."""
    text = "".join(f"line {i} \u00e9\n" for i in range(3000))
    (tmp_path / "a.txt").write_text(text)
    written(tmp_path / "d", b__txt=b"short", a__txt=text.encode())
    for settings in (dict(tokenizer="bytes"), dict(tokenizer="bytes", val_tokens=0)):
        prepare(tmp_path / "whole", tmp_path / "a.txt", shard_tokens=9000, **settings)
        with monkeypatch.context() as patch:
            patch.setattr(tokenizer, "LONG", 4000)
            patch.setattr(text_files, "LONG", 700)
            with stopped_after(3):
                prepare(tmp_path / "parts", tmp_path / "a.txt", shard_tokens=9000, **settings)
            prepare(tmp_path / "parts", tmp_path / "a.txt", shard_tokens=9000, **settings)
            folder, _ = read(tmp_path, tmp_path / "d")
        assert contents(tmp_path / "parts") == contents(tmp_path / "whole")
        assert folder == [text, "short"]
        for name in ("parts", "whole"):
            shutil.rmtree(tmp_path / name)
