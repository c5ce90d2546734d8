"""Tokens to train on: shards from the Hugging Face hub or from local files.

    python fineweb.py                                # FineWeb-Edu sample-10BT into data/fineweb-edu, 20 GB
    python fineweb.py --dataset=kjj0/fineweb10B-gpt2 --max_shards=10  # ready-made GPT-2 shards of FineWeb
    python fineweb.py --dataset="books/*.txt,notes.jsonl.zst" --out_dir=data/mine
    python fineweb.py --dataset=input.txt --tokenizer=chars --out_dir=data/shakespeare_char
    python fineweb.py --dataset=chats.jsonl --text_key=messages --tokenizer=FOLDER  # see corpus/chat.py

A killed run goes on when it is started again.
"""

import hashlib
import json
import os
import re
import shlex
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from configurator import UserError, configure, refuse, run, too_small, without_effect
from corpus import DataError, told
from corpus.text_files import RECORDS, WARNING, alone, contents, kind, local_documents, local_files
from run.files import patiently
from settings import Config as RunConfig

SHORT_NAMES = {"fineweb": "HuggingFaceFW/fineweb", "fineweb-edu": "HuggingFaceFW/fineweb-edu"}
READY_MADE = ("kjj0/fineweb10B-gpt2", "kjj0/fineweb100B-gpt2", "kjj0/finewebedu10B-gpt2")
EPOCHS = 3  # that the command printed at the end reads at most; docs/modern.md measures as many
FEW_STEPS, SMALL_BATCH = 100, 8192  # on dialogues: fewer steps take a smaller batch, down to so many tokens


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
    skip_bad_documents: bool = False  # of local files: leave out and count records that give no document
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
        progress = writer.Progress(out, settings(cfg, name, files, sha256, tokenizer, dialogues), tokenizer)
        if progress.finished:
            print(f"{out} is finished already; nothing was done")
        else:
            if cfg.ready_made:
                writer.fetch_shards(name, cfg.revision, cfg.max_shards, progress)
            else:
                batches = documents(cfg, name, files, sha256, progress.position[0])
                writer.write_shards(batches, (dialogues or tokenizer).rows, progress, short)
            progress.finish()
    for split in ("train", "val"):
        tokens, targets = progress.total("tokens", split), progress.total("targets", split)
        print(f"{split:5}  {tokens:,} tokens" + f", {targets:,} of them with loss" * cfg.is_chat)
    tokens, gpu = progress.total("tokens", "train"), shutil.which("nvidia-smi") is not None
    held_out = progress.total("targets" if cfg.is_chat else "tokens", "val")
    for where, words in go_on(cfg, out, tokenizer.vocab_size, tokens, held_out, gpu).items():
        print(f"{where:11} {shlex.join(['python', 'train.py', *words])}")


def go_on(cfg, out, vocab_size, tokens, held_out, gpu):
    """{label: words of train.py}: a recipe for so many training tokens on this device, and on a GPU.

    held_out: tokens of validation, of dialogues those with loss.
    """
    folders = dict(data_dir=str(out), out_dir=f"out/{out.name}")
    if cfg.is_chat:
        batch = RunConfig.batch_tokens
        while EPOCHS * tokens < FEW_STEPS * batch and batch > SMALL_BATCH:
            batch //= 2
        usual = RunConfig(batch_tokens=batch, warmup_steps=RunConfig.max_steps)
        given = folders | fitted(usual, tokens, held_out) | dict(lr=2e-5)
        masks = ["--align_documents", "--document_mask"]
        return {"go on with": ["--init_from=hf:NAME_OR_FOLDER", *changes(RunConfig(), given), *masks]}
    small = "shakespeare_char" if cfg.tokenizer == "chars" else "quickstart"
    large = "gpt2_124m" if tokens >= 2e9 else "modern_124m" if tokens >= 10e6 else small
    recipes = {"go on with": large} if gpu or large == small else {"go on with": small, "on a GPU": large}
    found = {}
    for where, name in recipes.items():
        recipe = configure(RunConfig, [f"config/{name}.py"])
        given = folders | dict(vocab_size=vocab_size) | fitted(recipe, tokens, held_out)
        found[where] = [f"config/{name}.py", *changes(recipe, given)]
    return found


def fitted(recipe, tokens, held_out):
    """{setting: value} with which so many tokens suffice for the rows, batches, steps and evaluations."""
    T = recipe.block_size
    while T >= tokens and T > 1:  # a row is T + 1 tokens
        T //= 2
    rows = min(recipe.batch_tokens, tokens) // T
    batch_size = min(recipe.batch_size, rows)
    batch_tokens = rows // batch_size * batch_size * T
    steps = min(recipe.max_steps, max(1, EPOCHS * tokens // batch_tokens))
    found = dict(block_size=T, batch_size=batch_size, batch_tokens=batch_tokens, max_steps=steps)
    found["warmup_steps"] = min(recipe.warmup_steps, steps // 10)
    found["eval_interval"] = recipe.eval_interval if held_out > T else 0
    return found


def changes(recipe, given):
    """["--name=value"] of the `given` settings that differ from the recipe's."""
    return [f"--{name}={value}" for name, value in given.items() if getattr(recipe, name) != value]


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
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    if not files:  # the default subset is one of FineWeb alone
        subset = cfg.subset if name in SHORT_NAMES.values() or cfg.subset != Config.subset else None
        hub = dict(name=subset, split=cfg.split, revision=cfg.revision, streaming=cfg.streaming)
        return patiently(datasets.load_dataset, name, **hub).select_columns(list(cfg.keys))
    given = dict(paths=tuple(files), keys=cfg.keys, skip_bad=cfg.skip_bad_documents)
    form = datasets.Features(dict.fromkeys((*cfg.keys, WARNING), datasets.Value("large_string")))
    if cfg.streaming:
        return datasets.IterableDataset.from_generator(local_documents, form, gen_kwargs=given)
    digest = datasets.fingerprint.Hasher.hash((sha256, given))
    return datasets.Dataset.from_generator(local_documents, form, gen_kwargs=given, fingerprint=digest)


if __name__ == "__main__":
    run(main, Config)
