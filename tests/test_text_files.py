"""corpus/text_files.py, through byte shards: each kind of file is read, or refused in one line."""

import bz2
import gzip
import io
import json
import lzma
import os
import zipfile
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
from conftest import one_line
from test_fineweb import hub_cache, prepare, shard_tokens, stopped_after  # noqa: F401

from corpus import as_user_error, tokenizer
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
        "zst": zstandard.compress,
        "xz": lzma.compress,
        "bz2": bz2.compress,
    }
    data = pack.get(name.lower().rpartition(".")[2], bytes)(line("one") + line("two"))
    (tmp_path / name).write_bytes(data)
    assert read(tmp_path, tmp_path / name)[0] == read(tmp_path, tmp_path)[0] == ["one", "two"]


ODD_KINDS = {
    "x.zip": zipped(a__jsonl=line("a"), b__jsonl=line("b")),
    "x.jsonl.zip": zipped(a__jsonl=line("a")),
    "x.tar.gz": gzip.compress(b"text"),
    "x.csv": b"id,text\n1,a\n",
    "x.jsonl.1": line("a"),
    "x.jsonl.gz.zst": zstandard.compress(gzip.compress(line("a"))),
}


@pytest.mark.parametrize("name", ODD_KINDS)
@pytest.mark.fault(111)
def test_other_kinds_are_refused_with_those_that_are_read(tmp_path, name):
    """Of a zip other programs read the first file alone; a table is no text."""
    (tmp_path / name).write_bytes(ODD_KINDS[name])
    for dataset in (tmp_path / name, f"{tmp_path}/*"):
        with pytest.raises(
            UserError, match=r"are not read; unpack an archive.*known: \.jsonl .*\.txt"
        ) as error:
            read(tmp_path, dataset)
        assert name in one_line(error)
    # no hint that leads here
    with pytest.raises(UserError, match="left out of folders: 1 [.a-z0-9]+$"):
        read(tmp_path, tmp_path)


@pytest.mark.fault(111)
def test_lines_of_json_are_never_one_document(tmp_path):
    """In files without a suffix, as they lie in the hub's cache."""
    named = dict(blob=line("one") + line("two"), blob2=b'[{"body": "one"}]', x__txt=line("one"))
    for path in sorted(written(tmp_path, **named).iterdir()):
        with pytest.raises(
            DataError, match=f"{path.name} holds records of JSON, not text; name it"
        ):
            read(tmp_path, path)
    written(tmp_path, code__py=b'{"a": 1}\nprint()\n', list__txt=b"[1]\n")
    assert read(tmp_path, f"{tmp_path}/*.py,{tmp_path}/list.txt")[0] == [
        '{"a": 1}\nprint()\n',
        "[1]\n",
    ]


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


def test_zstd_with_a_long_window_and_of_several_frames(tmp_path):
    """As zstd --long=31 writes it, and as pzstd does."""
    own = zstandard.ZstdCompressionParameters(window_log=28, enable_ldm=True)
    write = zstandard.ZstdCompressor(compression_params=own).compressobj()
    long = write.compress(line("long")) + write.flush()
    written(tmp_path, x__jsonl__zst=long + zstandard.compress(line("next")))
    assert read(tmp_path, tmp_path / "x.jsonl.zst")[0] == ["long", "next"]


def one_bad_row(path):
    """A parquet file whose second text of three is not UTF-8, which Arrow does not look at."""
    bad = pyarrow.array([b"good", b"b\xe9d", b"last"]).view(pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"text": bad}), path)


@pytest.mark.parametrize(
    "error, passing", [(OSError("reset by peer"), True), (ValueError("bad"), False)]
)
def test_only_what_may_pass_is_advised_to_be_repeated(error, passing):
    with (
        pytest.raises(UserError, match="read: .*") as caught,
        as_user_error("cannot be read", again=True),
    ):
        raise error
    assert ("run the same command again" in one_line(caught)) == passing


def test_one_bad_row_of_parquet_is_named_or_left_out(tmp_path):
    one_bad_row(tmp_path / "x.parquet")
    with pytest.raises(
        DataError, match=r"x.parquet:2: it is not valid UTF-8 .*--skip_bad_documents"
    ) as error:
        read(tmp_path, tmp_path / "x.parquet")
    assert "run the same command" not in one_line(error)
    texts, said = read(tmp_path, tmp_path / "x.parquet", skip_bad_documents=True)
    assert texts == ["good", "last"] and "left out 1 bad documents" in said


@pytest.mark.parametrize("streaming", [False, True])
def test_a_second_run_tells_what_the_first_told(tmp_path, streaming):
    """From the library's cache too."""
    written(tmp_path, a__jsonl=line("good") + b"{\n[]\n" + line("last"), b__txt=b"caf\xe9")
    settings = dict(skip_bad_documents=True, streaming=streaming)
    first, second = (read(tmp_path, tmp_path, **settings) for _ in range(2))
    assert first[0] == second[0] == ["good", "last", "caf\ufffd"]
    for _, said in (first, second):
        assert f"left out 2 bad documents, the first is {tmp_path}/a.jsonl:2: it is" in said
        assert "b.txt is not UTF-8 throughout: 1 characters were replaced" in said


def test_marks_and_pointers_are_no_text(tmp_path):
    written(tmp_path, a__txt=b"\xef\xbb\xbftext", b__txt="\u4e00\u4e8c".encode("utf-16"))
    assert read(tmp_path, tmp_path / "a.txt")[0] == ["text"]
    with pytest.raises(DataError, match="b.txt is not text in UTF-8"):
        read(tmp_path, tmp_path / "b.txt")
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 12345\n"
    for name in ("p.txt", "p.jsonl", "p.parquet", "p.txt.gz"):
        (tmp_path / name).write_bytes(pointer)
        with pytest.raises(
            DataError, match=f"{name} is a pointer of Git LFS to the file; fetch it with git lfs"
        ):
            read(tmp_path, tmp_path / name, skip_bad_documents=True)


@pytest.mark.fault(97)
def test_links_out_of_a_folder_are_left_out_and_circles_end(tmp_path):
    written(tmp_path / "out", secret__txt=b"secret")
    folder = written(tmp_path / "in", a__txt=b"A")
    written(folder / "more", b__txt=b"B")
    for name, target in dict(
        file=tmp_path / "out/secret.txt", all=tmp_path / "out", again=folder
    ).items():
        os.symlink(target, folder / f"{name}.txt")
    os.symlink("a.txt", folder / "once more.txt")
    texts, said = read(tmp_path, folder)
    assert texts == ["A", "B"] and "left out of folders: 2 links out of them" in said
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
    with pytest.raises(
        UserError, match="was begun with another contents_sha256; use another --out_dir"
    ):
        prepare(tmp_path / "d", **settings)
    assert read(tmp_path, source)[0][0] == "replaced 000"


def test_data_of_a_tokenizer_with_a_pad_beyond_the_model(tmp_path):
    """Texts never give the pad; other ids that a model lacks are refused before the first step."""
    (tmp_path / "t").mkdir()
    (tmp_path / "t/tokenizer.json").write_text(tokenizer.load("bytes").to_json())
    (tmp_path / "t/tokenizer_config.json").write_text(json.dumps(dict(pad_token="<pad>")))
    written(tmp_path, a__jsonl=line("text") * 20)
    prepare(tmp_path / "d", tmp_path / "a.jsonl", tokenizer=str(tmp_path / "t"), val_tokens=0)
    assert json.loads((tmp_path / "d/manifest.json").read_text())["vocab_size"] == 258
    TokenLoader(tmp_path / "d", "train", 1, 8, vocab_size=257).close()
    for size in (256, 97):
        with pytest.raises(DataError, match=f"vocab_size={size} is below the tokenizer's; try"):
            TokenLoader(tmp_path / "d", "train", 1, 8, vocab_size=size)


def test_a_json_file_of_one_list(tmp_path):
    """On one line or over many; anything but records in it is refused."""
    rows = [{"text": "one", "id": 1}, {"text": "two\n", "id": 2}]
    for name, indent in {"flat.json": None, "wide.json.gz": 2}.items():
        data = b"\xef\xbb\xbf\n" + json.dumps(rows, indent=indent).encode()
        (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
        assert read(tmp_path, tmp_path / name)[0] == ["one", "two\n"]
    for data, words in [
        (b'["one", "two"]', "x.json:1: it has no field text"),
        (b"[{", "x.json cannot be read"),
    ]:
        (tmp_path / "x.json").write_bytes(data)
        with pytest.raises(DataError, match=words) as error:
            read(tmp_path, tmp_path / "x.json")
        one_line(error)


def test_a_file_name_that_is_not_utf_8_can_be_told(tmp_path):
    for name, data in {b"caf\xe9.jsonl": line("good") + b"{\n", b"caf\xe9.txt": b"caf\xe9"}.items():
        Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name)).write_bytes(data)
    texts, said = read(tmp_path, tmp_path, skip_bad_documents=True)
    assert texts == ["good", "caf\ufffd"]
    assert (
        r"caf\udce9.jsonl:2: it is not valid" in said
        and r"caf\udce9.txt is not UTF-8 throughout" in said
    )


def test_only_the_field_of_the_text_has_a_type(tmp_path):
    """Other fields may change their types from line to line, lines may end as on Windows."""
    rows = [{"text": "a", "ner": [[0, 4, "P"]]}, {"text": "b", "ner": 3}, {"text": "c"}]
    (tmp_path / "x.jsonl").write_bytes(b"\r\n".join(json.dumps(row).encode() for row in rows))
    assert read(tmp_path, tmp_path / "x.jsonl")[0] == ["a", "b", "c"]


def test_texts_of_categories_in_parquet(tmp_path):
    """As pandas writes a column of few values."""
    texts = pyarrow.array(["a", "b", "a"]).dictionary_encode()
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "x.parquet")
    assert read(tmp_path, tmp_path / "x.parquet")[0] == ["a", "b", "a"]


def test_a_pipe_is_refused_at_once(tmp_path):
    """As bash gives one for <(zcat x.gz): it could be read only once."""
    os.mkfifo(tmp_path / "pipe.txt")
    with pytest.raises(UserError, match="pipe.txt is a pipe or a device; write it to a file first"):
        read(tmp_path, tmp_path / "pipe.txt")
