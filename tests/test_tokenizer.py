"""tokenizer.py: every kind of tokenizer against its reference, on Python's standard library."""

import json

import numpy as np
import pytest
import tiktoken
from test_fineweb import STDLIB, refused

from corpus import chat, tokenizer
from corpus.text_files import Document
from system.errors import UserError

ODD = ["", "a <|endoftext|> b", "  \n\n\t x\r\n", "naïve 東京 🙂", "I'll DON'T 3,141.59", "\0\x01"]
ODD += ["a" * 3000]


@pytest.fixture(scope="module")
def texts():
    return [path.read_text("utf-8", "replace") for path in sorted(STDLIB.glob("*.py"))[:12]] + ODD


def byte_level(folder, texts, vocab_size=300, special=("<|endoftext|>",)):
    """Saves a byte-level BPE tokenizer trained on the texts, as `tokenizers` writes it."""
    inner = pytest.importorskip("tokenizers").ByteLevelBPETokenizer()
    options = dict(vocab_size=vocab_size, special_tokens=[*special], show_progress=False)
    inner.train_from_iterator(texts, **options)
    inner.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


@pytest.fixture(scope="module")
def small(texts, tmp_path_factory):
    return byte_level(tmp_path_factory.mktemp("small"), texts[:10], vocab_size=600)


def check_bytes(tok, texts):
    """token_bytes adds up to the texts' own sizes, and decoding gives the texts back."""
    sizes = tok.token_bytes()
    assert sizes.dtype == np.int32 and sizes.shape == (tok.vocab_size,) and sizes[tok.eot] == 0
    for text, ids in zip(texts, tok.encode_batch(texts)):
        assert ids.dtype == tok.dtype and sizes[ids].sum() == len(text.encode())
        assert tok.eot not in ids
        assert tok.decode(ids) == text


def check_json(tok, texts, folder):
    """A tokenizer's tokenizer.json gives the same ids, with the same bytes and separators."""
    texts = texts[:8] + ODD
    (folder / "tokenizer.json").write_text(tok.to_json(), "utf-8")
    again = tokenizer.load(str(folder / "tokenizer.json"))
    assert (again.vocab_size, again.eot, again.ends) == (tok.vocab_size, tok.eot, tok.ends)
    assert np.array_equal(again.token_bytes(), tok.token_bytes())
    for a, b in zip(tok.encode_batch(texts), again.encode_batch(texts), strict=True):
        assert np.array_equal(a, b)


@pytest.mark.gpt2
@pytest.mark.parametrize("name", ["gpt2", "cl100k_base"])
def test_encodings_are_tiktokens(name, texts, tmp_path):
    reference, tok = tiktoken.get_encoding(name), tokenizer.load(name)
    assert (tok.name, tok.vocab_size, tok.eot) == (name, reference.n_vocab, reference.eot_token)
    expected = reference.encode_ordinary_batch(texts)
    assert [ids.tolist() for ids in tok.encode_batch(texts)] == expected
    check_bytes(tok, texts)
    if name == "gpt2":
        assert tok.encode("Hello world") == [15496, 995] and tok.dtype == np.uint16
        check_json(tok, texts, tmp_path)


def test_bytes(texts, tmp_path):
    tok = tokenizer.load("bytes")
    assert (tok.vocab_size, tok.eot, tok.dtype) == (257, 256, np.uint16)
    assert tok.encode("aé") == [97, 195, 169]
    check_bytes(tok, texts)
    check_json(tok, texts, tmp_path)
    assert tok.decode([104, 105, 255]) == "hi\ufffd"


@pytest.mark.parametrize("name", [pytest.param("gpt2", marks=pytest.mark.gpt2), "json"])
def test_a_long_text_in_parts_has_the_ids_of_the_whole(name, small, texts, monkeypatch):
    tok = tokenizer.load(str(small) if name == "json" else name)
    text = "".join(texts[:6])
    whole = tok._encode([text])[0]
    together, encode = [], tok._encode
    tok._encode = lambda texts: together.append(sum(map(len, texts))) or encode(texts)
    for size in (9_000, 20_001):
        monkeypatch.setattr(tokenizer, "LONG", size)
        cut = [*tokenizer.parts([text[:5000], text[5000:]])]
        assert "".join(cut) == text and max(map(len, cut)) <= size
        together.clear()
        before, found, after = tok.encode_batch(["a", text, ""])
        assert max(together) <= size, "what is encoded at once is bounded"
        assert found.tolist() == list(whole) and len(after) == 0 and tok.decode(before) == "a"


def test_no_dropout_draws_other_ids(small, tmp_path):
    content = json.loads(small.read_text("utf-8"))
    content["model"]["dropout"] = 0.9
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    text = "def forward(self)" * 9
    assert tokenizer.load(str(tmp_path)).encode(text) == tokenizer.load(str(small)).encode(text)


def test_tokenizer_json(small, texts):
    reference = pytest.importorskip("tokenizers").Tokenizer.from_file(str(small))
    tok = tokenizer.load(str(small))
    assert tok.vocab_size == reference.get_vocab_size()
    assert tok.eot == reference.token_to_id("<|endoftext|>")
    plain = [text for text in texts if "<|endoftext|>" not in text]
    expected = [reference.encode(text).ids for text in plain]
    assert [ids.tolist() for ids in tok.encode_batch(plain)] == expected
    check_bytes(tok, texts)
    assert tokenizer.load(str(small.parent)).encode("def f(x):") == tok.encode("def f(x):")


OTHER = {"400": dict(content="<|im_start|>", special=True)}


@pytest.mark.fault(114)
@pytest.mark.parametrize("files, word", [
    ({}, "no such file"),
    ({"tokenizer.json": "{}"}, "is not a tokenizer.json"),
    ({"tokenizer.json": "PANIC"}, "PanicException"),
    ({"tokenizer.json": "GOOD", "tokenizer_config.json": {"added_tokens_decoder": OTHER}}, "im_st"),
    ({"tokenizer.json": "GOOD", "added_tokens.json": {"<pad>": 300}}, "<pad>"),
    ({"vocab.json": {}, "merges.txt": {}}, "save_pretrained"),
])  # fmt: skip
def test_mistakes_are_one_line(files, word, tmp_path):
    good = json.loads(tokenizer.load("bytes").to_json())
    panics = dict(normalizer=dict(type="Precompiled", precompiled_charsmap="AAAA"))
    texts = {"{}": {}, "GOOD": good, "PANIC": good | panics}
    for name, content in files.items():
        content = texts[content] if isinstance(content, str) else content
        (tmp_path / name).write_text(json.dumps(content))
    name = str(tmp_path) if files else "gpt5"
    error = refused(UserError, word, lambda: tokenizer.load(name).encode("x" * 60))
    assert name in str(error)


@pytest.mark.parametrize("first, adds", [
    ("<mine>", "post_processor"), ("<mine>", "config"), ("<s>", None),
])  # fmt: skip
def test_a_document_begins_as_transformers_begins_a_text(first, adds, tmp_path):
    """As in Llama 1 and 2, where <s> begins a text and </s> ends it."""
    tokenizers, transformers = map(pytest.importorskip, ("tokenizers", "transformers"))
    inner = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0}, []))
    inner.add_special_tokens(["</s>", "<s>", "<mine>"])
    if adds == "post_processor":
        template = tokenizers.processors.TemplateProcessing
        inner.post_processor = template("<mine> $A", None, [("<mine>", 3)])
    inner.save(str(tmp_path / "tokenizer.json"))
    config = dict(tokenizer_class="PreTrainedTokenizerFast", bos_token=first)
    config["add_bos_token"] = adds == "config"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tok = tokenizer.load(str(tmp_path))
    (row,) = tok.rows([Document("", "a</s>")])
    assert tok.decode([tok.eot]) == first and row.tolist() == [tok.eot, 0]
    assert {1, tok.eot} <= tok.ends
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)("a")["input_ids"]
    assert adds != "post_processor" or theirs == row.tolist()


@pytest.fixture
def theirs(tmp_path):
    """write(name of a file beside a small tokenizer.json, its content) -> transformers' tokenizer.

    It reads the folder.
    """
    transformers = pytest.importorskip("transformers")

    def write(name, content):
        byte_level(tmp_path, ["what is it? it is that"])
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
        return transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)

    return write


TALK = "<|im_start|>user what?<|im_end|> <think>it<pad><sep>"
SPECIAL = {"content": "<|im_start|>", "special": True, "normalized": False, "lstrip": False}
LISTED = {"263": dict(SPECIAL, content="<|im_end|>"), "262": SPECIAL}
LISTED["264"] = dict(SPECIAL, content="<think>", special=False)
PAD = {"__type": "AddedToken", "content": "<pad>"}
RSTRIP = dict(content="<|im_end|>", rstrip=True)
FILES = {
    "eos": dict(eos_token="<|im_end|>"),
    "pad": dict(eos_token="<|im_end|>", pad_token=PAD),
    "listed": dict(added_tokens_decoder=LISTED, eos_token="<|im_end|>"),
    "more": dict(additional_special_tokens=["<|im_start|>", "<sep>"], eos_token="<|endoftext|>"),
    "named": dict(extra_special_tokens={"image_token": "<sep>"}),
    "old": dict(eos_token=RSTRIP, additional_special_tokens=["<|im_start|>"]),
}


@pytest.mark.fault(114)
@pytest.mark.parametrize("name", FILES)
def test_tokens_that_stand_beside_a_tokenizer_json_alone_are_refused(name, theirs, tmp_path):
    """As transformers writes it, which the line says, the tokenizer is transformers'."""
    other = theirs("special_tokens_map" if name == "old" else "tokenizer_config", FILES[name])
    refused(UserError, "save_pretrained", tokenizer.load, str(tmp_path))
    other.save_pretrained(tmp_path)
    ours = tokenizer.load(str(tmp_path))
    assert ours.parse(TALK).ids == other(TALK)["input_ids"]
    assert ours.vocab_size == len(other) and ours.eot == 0
    assert ours.decode(ours.encode(TALK)) == TALK, "in a document special tokens are characters"
    if other.eos_token:
        assert chat.stop_ids(tmp_path, ours) == {other.eos_token_id}, "a reply stops"


def test_a_pad_beyond_the_model_is_no_obstacle_and_other_ids_are(theirs, tmp_path):
    theirs("tokenizer_config", dict(pad_token="<pad>")).save_pretrained(tmp_path)
    size = tokenizer.load(str(tmp_path)).vocab_size - 1
    tok = tokenizer.load(str(tmp_path), size)
    assert tok.special["<pad>"] == size and max(tok.encode(TALK)) < size
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    template = chat.Template(tmp_path, tok)
    assert template.ids([dict(role="user", content="it")]) == tok.encode("it")
    for less in (size - 1, 0):
        refused(UserError, "it was trained with", tokenizer.load, str(tmp_path), less or 1)
