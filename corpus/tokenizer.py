"""Text to token ids and back: tiktoken's encodings, a tokenizer.json, or bytes.

"<|endoftext|>" in a document is plain text: `parse` alone reads special tokens.
"""

import hashlib
import re
from pathlib import Path

import numpy as np
import tiktoken
from tokenizers import ByteLevelBPETokenizer, Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Inner

from corpus import LONG, as_user_error, read_json
from system.errors import UserError, listed, warn
from system.files import write_atomic

BESIDE = (
    "tokenizer_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
    "generation_config.json",
)
# The first of these that a tokenizer has precedes each document, as begin_of_text does in Llama 3's
# training, unless its files have another one begin a text, as <s> does in Llama 2.
SEPARATORS = "<|begin_of_text|> <|end_of_text|> <|endoftext|> <s> </s> <bos> <eos> [EOS]".split()
HIDDEN = [b for b in range(256) if not chr(b).isprintable() or b == 32]
# GPT-2's files write a printable byte as its own character, others as characters from U+0100 on.
CHARACTERS = [chr(256 + HIDDEN.index(b)) if b in HIDDEN else chr(b) for b in range(256)]
UNKNOWN = "\U0010fffd"  # a character of private use, which no vocabulary has
BLANKS = re.compile(r"(?<=[^\W_])\s|(?<=\S) ")  # before which all encodings split a text
PROBE = (
    "I'll re-tokenize  3,141.59 12345 naïve  \n\n\tcafés <|endoftext|> 東京 "
    "🙂\u00a0DON'T\r\n x = f(y)  \n"
)


class Tokenizer:
    """An interface of all tokenizers.

    eot: the id that precedes each document. ends: the ids that end one. lengths: {id: bytes of
    text} of the ids that are not special.
    """

    def __init__(self, name, vocab_size, separators, lengths):
        self.name = name
        self.vocab_size = vocab_size
        self.eot = separators[0]
        self.ends = set(separators)
        self.lengths = lengths
        self.folder = None  # of the file that it was loaded from
        self.dtype = np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)

    def encode_batch(self, texts):
        """An array of ids (self.dtype) for each text; long ones are encoded in parts."""
        if sum(map(len, texts)) <= LONG:
            return [np.asarray(row, self.dtype) for row in self._encode([*texts])]
        found = []
        for text in texts:
            rows = [self.encode_batch([part])[0] for part in parts([text])]
            found.append(np.concatenate(rows))
        return found

    def rows(self, documents):
        """Yields the ids of each Document's text after a separator."""
        for ids in self.encode_batch([one.value or "" for one in documents]):
            yield np.insert(ids, 0, self.eot)

    def encode(self, text):
        return self.encode_batch([text])[0].tolist()

    def decode(self, ids):
        """The text of `ids`; invalid UTF-8 becomes U+FFFD."""
        return self._decode([int(i) for i in ids])

    def digest(self):
        """SHA-256 of what tells it from others: the separator and the bytes of each id."""
        return hashlib.sha256(self.token_bytes().tobytes() + b"%d" % self.eot).hexdigest()

    def token_bytes(self):
        """np.int32 (vocab_size,): UTF-8 bytes of each id, 0 if it is special; for bits per byte."""
        sizes = np.zeros(self.vocab_size, np.int32)
        sizes[[*self.lengths]] = [*self.lengths.values()]
        return sizes


def parts(chunks):
    """Yields a text, given in chunks, in parts of at most LONG characters.

    They end at one of BLANKS, in the absence of that anywhere.
    """
    text = ""
    for chunk in chunks:
        text += chunk
        begin = 0
        while len(text) - begin > LONG:
            end = begin + LONG
            for found in BLANKS.finditer(text, end - LONG // 16, end):
                end = found.start()
            yield text[begin:end]
            begin = end
        text = text[begin:]
    yield text


class Tiktoken(Tokenizer):
    """An encoding of tiktoken."""

    def __init__(self, name, encoding):
        self.encoding = encoding
        self.special = encoding._special_tokens
        separators = [self.special[s] for s in SEPARATORS if s in self.special]
        lengths = {i: len(token) for token, i in encoding._mergeable_ranks.items()}
        super().__init__(name, encoding.n_vocab, separators, lengths)
        self.known = {*lengths, *self.special.values()}

    def _encode(self, texts):
        return self.encoding.encode_ordinary_batch(texts)

    def _decode(self, ids):
        # a model with a padded vocabulary may sample ids that the encoding lacks
        return self.encoding.decode([i for i in ids if i in self.known])

    def to_json(self):
        """The text of a tokenizer.json, Hugging Face's format: BPE of bytes."""
        ranks = self.encoding._mergeable_ranks
        words = {"".join(CHARACTERS[b] for b in token): i for token, i in ranks.items()}
        merges = []  # every two tokens that make a third one
        for word in sorted(words, key=words.get):
            for i in range(1, len(word)):
                if word[:i] in words and word[i:] in words:
                    merges.append((word[:i], word[i:]))
        inner = ByteLevelBPETokenizer(words | self.special, merges)
        inner.model.ignore_merges = True  # what is a token as it stands is not merged from parts
        # {1,3}+ takes no second three in tiktoken, and any number of them in tokenizers
        pattern = self.encoding._pat_str.replace("}+", "}")
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
        characters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        inner.pre_tokenizer = pre_tokenizers.Sequence([split, characters])
        inner.add_special_tokens(sorted(self.special, key=self.special.get))
        text = inner.to_str()
        if HuggingFace(self.name, text).encode(PROBE) != self.encode(PROBE):
            raise UserError(
                f"tokenizer={self.name} fits no tokenizer.json; give one, --tokenizer=FILE"
            )
        return text


class HuggingFace(Tokenizer):
    """A tokenizer.json, given as text, through the package tokenizers, with its folder's files."""

    def __init__(self, name, text, folder=None):
        self.inner = Inner.from_str(text)
        self.inner.no_truncation()
        self.inner.no_padding()
        if hasattr(self.inner.model, "dropout"):
            self.inner.model.dropout = None  # which would give random ids
        if others := other_tokens(self.inner, folder):
            raise UserError(
                f"tokenizer={name}: files beside it give {listed(others)}, which tokenizer.json "
                f"lacks; transformers.AutoTokenizer.from_pretrained({str(folder)!r})"
                f".save_pretrained({str(folder)!r}) writes them into it"
            )
        if not self._encode([UNKNOWN])[0]:
            warn(
                f"tokenizer={name} drops characters that it lacks; one of bytes, or with "
                "unk_token, does not"
            )
        added = self.inner.get_added_tokens_decoder()
        self.special = {token.content: i for i, token in added.items() if token.special}
        separators = self._separators(folder)
        if not separators:
            raise UserError(f"tokenizer={name} has none of the separators {', '.join(SEPARATORS)}")
        self.text = text
        self.byte_level = '"ByteLevel"' in text  # a character is a byte
        vocabulary = self.inner.get_vocab()
        lengths = {i: self._length(token) for token, i in vocabulary.items()}
        for i, token in added.items():
            lengths[i] = 0 if token.special else len(token.content.encode())
        super().__init__(name, max(vocabulary.values()) + 1, separators, lengths)
        self.folder = folder

    def _separators(self, folder):
        """Ids that may precede a document, the best one first."""
        first = self.inner.encode("a").ids[:1]  # which the tokenizer itself may put before a text
        names = [name for name, i in self.special.items() if [i] == first]
        bos = special_tokens(folder).get("bos_token")
        if token_files(folder).get("add_bos_token"):
            names.append(bos)
        names += [*SEPARATORS, bos]
        return list(dict.fromkeys(self.special[name] for name in names if name in self.special))

    def _length(self, token):
        """The bytes of the text of a token as it stands in the vocabulary."""
        if self.byte_level:
            return len(token)
        return len(re.sub("^<0x[0-9A-F]{2}>$", ".", token).replace("\u2581", " ").encode())

    def _encode(self, texts):
        self.inner.encode_special_tokens = True  # as ordinary characters
        return [row.ids for row in self.inner.encode_batch_fast(texts, add_special_tokens=False)]

    def parse(self, text):
        """The `ids` and `offsets` of a text whose special tokens are parsed."""
        self.inner.encode_special_tokens = False
        return self.inner.encode(text, add_special_tokens=False)

    def _decode(self, ids):
        return self.inner.decode(ids, skip_special_tokens=False)

    def to_json(self):
        return self.text


def load(name, vocab_size=None):
    """The Tokenizer called `name`, or in the file `name`, for a model of vocab_size ids.

    Raises UserError.
    """
    path = file_of(name)
    if name == "bytes":
        encoding = tiktoken.Encoding(
            name,
            pat_str=r"[\s\S]",
            mergeable_ranks={bytes([i]): i for i in range(256)},
            special_tokens={"<|endoftext|>": 256},
        )
        tokenizer = Tiktoken(name, encoding)
    elif built_in(name):
        with as_user_error(
            f"tokenizer={name}: not fetched; go online once, set TIKTOKEN_CACHE_DIR to a filled "
            "cache, or give a tokenizer.json"
        ):
            tokenizer = Tiktoken(name, tiktoken.get_encoding(name))
    elif path.is_file():
        with as_user_error(f"tokenizer={name} is not a tokenizer.json"):
            tokenizer = HuggingFace(name, path.read_text("utf-8"), path.parent)
    else:
        raise UserError(
            f"tokenizer={name}: no such file or encoding; expected bytes, "
            f"{', '.join(tiktoken.list_encoding_names())}, or a tokenizer.json or its folder; of "
            f"other files transformers.AutoTokenizer.from_pretrained({name!r})"
            f".save_pretrained({name!r}) makes one"
        )
    if vocab_size and not fits(vocab_size, tokenizer.token_bytes(), tokenizer.eot):
        raise UserError(
            f"tokenizer={name} has {tokenizer.vocab_size:,} ids, the model {vocab_size:,}; "
            "give the tokenizer that it was trained with"
        )
    return tokenizer


def fits(vocab_size, token_bytes, eot):
    """Whether a model of vocab_size ids has all that texts give; others are special, like a pad."""
    return eot < vocab_size and not token_bytes[vocab_size:].any()


def built_in(name):
    """Whether a tokenizer has a name of its own, so that no file belongs to it."""
    return name in ("bytes", *tiktoken.list_encoding_names())


def file_of(name):
    """The path that a tokenizer's name means, perhaps of no file; None for one without a file."""
    if built_in(name):
        return None
    path = Path(name)
    return path / "tokenizer.json" if path.is_dir() else path


def beside(folder):
    """Paths of the files that go with a folder's tokenizer and may be copied."""
    paths = [Path(folder, name) for name in BESIDE] if folder else []
    return [path for path in paths if path.is_file() and not leads_out(path)]


def leads_out(path):
    """Whether a file is a link out of its folder: a stranger's may name any file of this machine.

    But a hub's cache consists of links, into its own blobs/.
    """
    to = path.resolve().parent
    return to != path.parent.resolve() and to.name != "blobs"


def read_beside(folder, name):
    """The object in a JSON file beside a tokenizer or weights, {} if there is no such file."""
    if folder and Path(folder, name).is_file():
        return read_json(Path(folder, name))
    return {}


def token_files(folder):
    """What special_tokens_map.json and tokenizer_config.json of a folder say."""
    older = read_beside(folder, "special_tokens_map.json")
    return older | read_beside(folder, "tokenizer_config.json")


def content(token):
    """The text of a token, which files write as a string or as an object with its `content`."""
    return token.get("content") if isinstance(token, dict) else token


def special_tokens(folder):
    """{"bos_token": "<s>", ...} of the files beside a tokenizer."""
    named = {key: content(token) for key, token in token_files(folder).items()}
    return {k: v for k, v in named.items() if k.endswith("_token") and isinstance(v, str)}


def other_tokens(inner, folder):
    """Tokens of the files beside a tokenizer.json that it lacks."""
    files = token_files(folder)
    named = [*special_tokens(folder).values(), *read_beside(folder, "added_tokens.json")]
    for key in ("additional_special_tokens", "extra_special_tokens", "added_tokens_decoder"):
        more = files.get(key) or []
        named += more.values() if isinstance(more, dict) else more
    known = {token.content for token in inner.get_added_tokens_decoder().values()}
    return sorted({content(token) for token in named} - known)


def write_characters(batches, path):
    """Writes a tokenizer.json: characters of batches of texts, U+FFFD for others, a separator."""
    found = {character for texts in batches for text in texts for character in text or ""}
    tokens = [*sorted(found - {"\ufffd"}), "\ufffd", "<|endoftext|>"]
    ids = {token: i for i, token in enumerate(tokens)}
    inner = Inner(models.BPE(ids, [], unk_token="\ufffd"))
    inner.decoder = decoders.Fuse()
    inner.add_special_tokens(["<|endoftext|>"])
    write_atomic(path, inner.to_str(pretty=True).encode())
