"""Tokens to train on: shards from the Hugging Face hub or from local files.

    python fineweb.py    # FineWeb-Edu sample-10BT into data/fineweb-edu, 20 GB
    python fineweb.py --dataset="a/*.txt,b.jsonl.zst" --out_dir=data/mine
    python fineweb.py --dataset=input.txt --tokenizer=chars --out_dir=data/chars
    python fineweb.py --dataset=chats.jsonl --text_key=messages \\
        --tokenizer=FOLDER  # dialogues

A killed run goes on when it is started again.
"""

import hashlib
import itertools
import json
import os
import re
import shlex
import tempfile
from dataclasses import dataclass
from pathlib import Path

from configurator import outside, run, too_small, without_effect
from corpus import AGAIN, DataError, as_user_error
from corpus.prefetch import batched
from corpus.text_files import (
    BESIDE,
    CHATS,
    RECORDS,
    Document,
    Tally,
    document,
    kind,
    local_documents,
    local_files,
    text_parts,
)
from system.errors import refuse
from system.files import digest, locked

SHORT_NAMES = {"fineweb": "HuggingFaceFW/fineweb", "fineweb-edu": "HuggingFaceFW/fineweb-edu"}
MOST_HELD_OUT = 1 << 26  # characters of a single text, which are in memory together


@dataclass
class Config:
    dataset: str = "fineweb-edu"  # fineweb, fineweb-edu, a hub name, or local files, folders, globs
    subset: str = "sample-10BT"  # of FineWeb and FineWeb-Edu; of another dataset if not the default
    split: str = "train"  # the hub's split to read
    revision: str | None = None  # the hub's branch, tag or commit; None: main
    text_key: str = "text"  # field of the text; messages or prompt,completion: loss on answers only
    streaming: bool = False  # of the hub: keep no copy; shuffle_seed shuffles within a buffer only
    out_dir: str | None = None  # where the shards go; None: data/<name of the dataset>
    tokenizer: str = "gpt2"  # gpt2, a tiktoken encoding, bytes, chars, a tokenizer.json or folder
    shard_tokens: int = 100_000_000  # tokens in a shard; with pack rounded down to whole rows
    val_tokens: int | None = None  # validation tokens; None: shard_tokens, of files 1%, a text 10%
    shuffle_seed: int | None = None  # seed that shuffles the documents; None: in the source's order
    max_tokens: int | None = None  # training tokens to stop after; None: all
    pack: int | None = None  # reorders documents so that few cross a multiple of this block_size
    min_document_tokens: int | None = None  # leave out shorter documents; None: only empty ones
    skip_bad_documents: bool = False  # leave out, and count, records that give no document

    @property
    def keys(self):
        return tuple(key.strip() for key in self.text_key.split(","))

    @property
    def is_chat(self):
        return self.keys[0] in CHATS or len(self.keys) == 2


def main(cfg):
    check(cfg)
    from corpus import writer
    from corpus.chat import Dialogues

    source = Source(cfg)
    out = Path(cfg.out_dir or f"data/{source.short}")
    with locked(out):
        tokenizer = load_tokenizer(cfg, out)
        encoder = tokenizer
        if cfg.is_chat:
            encoder = Dialogues(tokenizer, source.tally)
        progress = writer.Progress(out, source.short, settings(cfg, source, encoder), tokenizer)
        if progress.record["next"] is None:
            print(f"{out} is finished already; nothing was done")
        else:
            batches = source.batches(out, progress.record["next"]["document"])
            writer.write_shards(batches, encoder.rows, progress, source.tally)
            progress.finish()
    if source.tally.found:
        print(source.tally)
    for split in ("train", "val"):
        words = f"{progress.total('tokens', split):,} tokens"
        if cfg.is_chat:
            words += f", {progress.total('targets', split):,} of them with loss"
        print(f"{split:5}  {words}")
    print(f"next   {go_on(cfg, out, tokenizer.vocab_size, progress.total('tokens', 'train'))}")


def load_tokenizer(cfg, out):
    """The Tokenizer; that of `chars` is first made of all documents, unless `out` has shards."""
    from corpus import tokenizer

    if cfg.tokenizer != "chars":
        return tokenizer.load(cfg.tokenizer)
    path = out / "tokenizer.json"
    if not any(out.glob("*.bin")):
        batches = Source(cfg).batches(out)
        tokenizer.write_characters(([one.value for one in batch] for batch in batches), path)
    return tokenizer.load(str(path))


def go_on(cfg, out, vocab_size, tokens):
    """The command that trains on so many tokens."""
    given = [f"--data_dir={out}", f"--out_dir=out/{out.name}"]
    recipe = "config/quickstart.py" if tokens < 10e6 else "config/modern_124m.py"
    if cfg.is_chat:
        recipe = "--init_from=hf:NAME_OR_FOLDER --lr=2e-5 --document_mask"
    elif cfg.tokenizer == "chars":
        recipe = "config/shakespeare_char.py"
    if not cfg.is_chat:  # whose weights have their own, perhaps padded
        given.append(f"--vocab_size={vocab_size}")
    return f"python train.py {recipe} {shlex.join(given)}"


def check(cfg):
    """Raises one UserError for every setting out of range."""
    least = dict(
        shard_tokens=cfg.pack or 1,
        val_tokens=0,
        shuffle_seed=0,
        max_tokens=1,
        pack=2,
        min_document_tokens=1,
    )
    wrong = too_small(cfg, least)
    wrong += outside(cfg, "below", {"shard_tokens": 1 << 31})  # the largest count in a header
    if len(cfg.keys) > 2:
        wrong.append(f"text_key={cfg.text_key} must be one field, or two for prompt,completion")
    if cfg.tokenizer == "chars" and cfg.is_chat:
        wrong.append("tokenizer=chars is for texts, not for dialogues")
    refuse(wrong)


def check_files(cfg, is_text):
    """Refuses settings that do not suit local files; is_text: they are a single text."""
    of_hub = ["subset", "split", "revision", "streaming"]
    wrong = without_effect(cfg, of_hub, "is for the hub, not for files")
    if is_text:
        wrong += without_effect(cfg, ["pack", "shuffle_seed"], "is for several documents")
        if cfg.val_tokens:
            wrong.append(
                f"val_tokens={cfg.val_tokens}: of a single text it is the last tenth; try 0 or None"
            )
    refuse(wrong)


def settings(cfg, source, encoder):
    """The settings that decide the shards' bytes; a folder begun with other values is refused.

    encoder: the Tokenizer or the Dialogues.
    """
    chosen = vars(cfg) | {
        "dataset": source.name,
        "val_tokens": val_tokens(cfg, source),
        "streaming": cfg.streaming and cfg.shuffle_seed is not None,  # then another order
        "tokenizer_sha256": encoder.digest(),
    }
    if source.files:
        # tells a file that was edited in place; takes a second for a GB
        digests = "".join(digest(path)[1] for path in source.files)
        chosen["contents_sha256"] = hashlib.sha256(digests.encode()).hexdigest()
    del chosen["out_dir"], chosen["skip_bad_documents"]  # up to a bad one the bytes are the same
    return chosen


def val_tokens(cfg, source):
    """How many tokens are held out, also where val_tokens is None (docs/data.md)."""
    if cfg.val_tokens is not None:
        return cfg.val_tokens
    if source.is_text:
        return 1  # its last tenth is a document, which is taken whole
    bounds = [cfg.shard_tokens]
    if source.files:
        # 1% of the tokens, which have one byte or about four; less of compressed files
        percent = 100 if cfg.tokenizer in ("bytes", "chars") else 400
        bounds.append(sum(map(os.path.getsize, source.files)) // percent)
    if cfg.max_tokens is not None:
        bounds.append(cfg.max_tokens // 10)
    return max(1, min(bounds))


class Source:
    """The documents of the hub or of local files."""

    def __init__(self, cfg):
        self.cfg = cfg
        self.tally = Tally(cfg.skip_bad_documents)
        self.name = SHORT_NAMES.get(cfg.dataset, cfg.dataset)
        self.files = local_files(self.name, self.tally)  # None: it is of the hub
        self.is_text = False  # whether it is a single text
        self.short = re.sub(r"[^\w-].*", "", Path(self.name).name) or "text"
        if self.files:
            self.is_text = len(self.files) == 1 and kind(self.files[0])[0] not in RECORDS
            check_files(cfg, self.is_text)
            if len(self.files) > 1:
                self.short = "text"

    def batches(self, out, first=0):
        """Yields lists of Documents, from document number `first` on.

        out: where a copy of local files may be while it is shuffled.
        """
        with as_user_error(f"dataset={self.cfg.dataset} cannot be read", DataError, AGAIN):
            if self.files is None:
                documents = self._hub(first)
            else:
                documents = local_documents(self.files, self.cfg.keys, self.tally)
                if self.is_text:
                    documents = self._parts()
                elif self.cfg.shuffle_seed is not None:
                    documents = shuffled(documents, self.cfg.shuffle_seed, out)
                documents = itertools.islice(documents, first, None)
            yield from batched(documents, lambda one: len(one.value or ""))

    def _parts(self):
        """The end of a single text, for validation, then what precedes it in parts."""
        from corpus.tokenizer import parts

        [path] = self.files
        keys = self.cfg.keys
        end = sum(map(len, text_parts(path, keys)))
        cut = end
        if self.cfg.val_tokens != 0:
            cut = max(end * 9 // 10, end - MOST_HELD_OUT)
            yield Document(path, "".join(text_parts(path, keys, cut)))
        for number, part in enumerate(parts(text_parts(path, keys, 0, cut))):
            yield Document(path, part, continues=number > 0)

    def _hub(self, first):
        """The documents of a dataset of the hub."""
        import datasets  # takes a second to import

        cfg = self.cfg
        datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # what it logs is raised as well
        subset = cfg.subset
        if subset == Config.subset and self.name not in SHORT_NAMES.values():
            subset = None  # the default is one of FineWeb alone
        data = datasets.load_dataset(
            self.name,
            name=subset,
            split=cfg.split,
            revision=cfg.revision,
            streaming=cfg.streaming,
        )
        beside = [name for name in BESIDE if name in (data.column_names or ())]
        data = data.select_columns([*cfg.keys, *beside])
        if cfg.shuffle_seed is not None:
            data = data.shuffle(seed=cfg.shuffle_seed)
        if cfg.streaming or first < len(data):  # skip fails where all is in shards
            for number, record in enumerate(data.skip(first), first + 1):
                yield document(f"document {number}", record, cfg.keys, self.tally)


def shuffled(documents, seed, folder):
    """Yields documents in the order of numpy's permutation, out of a copy in a file there."""
    import numpy as np

    begins = [0]
    with tempfile.TemporaryFile(dir=folder) as file:  # it is gone with the process
        for one in documents:
            file.write(json.dumps(vars(one)).encode())
            begins.append(file.tell())
        for i in np.random.default_rng(seed).permutation(len(begins) - 1):
            file.seek(begins[i])
            yield Document(**json.loads(file.read(begins[i + 1] - begins[i])))


if __name__ == "__main__":
    run(main, Config)
