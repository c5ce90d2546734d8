"""Tokens to train on: shards from the Hugging Face hub or from local files.

    python fineweb.py    # FineWeb-Edu sample-10BT into data/fineweb-edu, 20 GB
    python fineweb.py --dataset=kjj0/fineweb10B-gpt2 --max_shards=10 # tokenized
    python fineweb.py --dataset="a/*.txt,b.jsonl.zst" --out_dir=data/mine
    python fineweb.py --dataset=input.txt --tokenizer=chars --out_dir=data/chars
    python fineweb.py --dataset=chats.jsonl --text_key=messages \\
        --tokenizer=FOLDER  # dialogues

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

from configurator import configure, run, too_small, without_effect
from corpus import DataError, as_user_error
from corpus.text_files import RECORDS, WARNING, alone, contents, kind, local_documents, local_files
from settings import Config as RunConfig
from system.errors import refuse
from system.files import Lock, patiently

SHORT_NAMES = {"fineweb": "HuggingFaceFW/fineweb", "fineweb-edu": "HuggingFaceFW/fineweb-edu"}
READY_MADE = ("kjj0/fineweb10B-gpt2", "kjj0/fineweb100B-gpt2", "kjj0/finewebedu10B-gpt2")
EPOCHS = 3  # that the command printed at the end reads at most; docs/modern.md measures as many
FEW_STEPS = 100  # on dialogues: fewer steps take a smaller batch,
SMALL_BATCH = 8192  # down to so many tokens
LARGE_VOCABULARY = 8192  # whose head takes most of the time of a small model
CPU_EVAL_TOKENS = 32_768  # about half a minute on a CPU with 50,257 ids


@dataclass
class Config:
    dataset: str = "fineweb-edu"  # fineweb, fineweb-edu, a hub name, or local files, folders, globs
    subset: str = "sample-10BT"  # of FineWeb and FineWeb-Edu; of another dataset if not the default
    split: str = "train"  # the hub's split to read
    revision: str | None = None  # the hub's branch, tag or commit; None: main
    shards: bool = False  # the hub dataset holds shards (.bin or .npy), fetched as they are
    text_key: str = "text"  # field of the text; messages or prompt,completion: loss on answers only
    streaming: bool = False  # read while downloading, keep no copy; shuffle_seed shuffles a buffer
    out_dir: str | None = None  # where the shards go; None: data/<name of the dataset>
    tokenizer: str = "gpt2"  # gpt2, a tiktoken encoding, bytes, chars, tokenizer.model or .json
    shard_tokens: int = 100_000_000  # tokens in a shard; with pack rounded down to whole rows
    val_tokens: int | None = None  # validation tokens; None: shard_tokens, of files 1%, a text 10%
    shuffle_seed: int | None = None  # seed that shuffles the documents; None: in the source's order
    max_tokens: int | None = None  # training tokens to stop after; None: all
    pack: int | None = None  # reorders documents so that few cross a multiple of this block_size
    min_document_tokens: int | None = None  # leave out shorter documents; None: only empty ones
    skip_bad_documents: bool = False  # of local files: leave out records that give no document
    max_shards: int | None = None  # with shards: training shards to fetch; None: all

    @property
    def ready_made(self):
        return self.shards or self.dataset in READY_MADE

    @property
    def keys(self):
        return tuple(key.strip() for key in self.text_key.split(","))

    @property
    def is_chat(self):
        return self.keys == ("messages",) or len(self.keys) == 2


def main(cfg):
    check(cfg)
    from corpus import writer
    from corpus.chat import Dialogues

    source = Source(cfg)
    out = Path(cfg.out_dir or f"data/{source.short}")
    with Lock(out) as lock:
        lock.take()
        tokenizer = load_tokenizer(cfg, source, out)
        dialogues = Dialogues(tokenizer) if cfg.is_chat else None
        progress = writer.Progress(out, settings(cfg, source, tokenizer, dialogues), tokenizer)
        if progress.finished:
            print(f"{out} is finished already; nothing was done")
        else:
            if cfg.ready_made:
                writer.fetch_shards(source.name, cfg.revision, cfg.max_shards, progress)
            else:
                first, _ = progress.position
                encode = (dialogues or tokenizer).rows
                writer.write_shards(source.documents(first), encode, progress, source.short)
            progress.finish()
        # it names this machine, and the folder may be uploaded
        (out / "run.lock").unlink(missing_ok=True)
    for split in ("train", "val"):
        words = f"{progress.total('tokens', split):,} tokens"
        if cfg.is_chat:
            words += f", {progress.total('targets', split):,} of them with loss"
        print(f"{split:5}  {words}")
    commands = go_on(
        cfg,
        out,
        vocab_size=tokenizer.vocab_size,
        tokens=progress.total("tokens", "train"),
        held_out=progress.total("targets" if cfg.is_chat else "tokens", "val"),
        gpu=shutil.which("nvidia-smi") is not None,
    )
    for where, words in commands.items():
        print(f"{where:11} {shlex.join(['python', 'train.py', *words])}")


def load_tokenizer(cfg, source, out):
    """The Tokenizer; that of `chars` is first made of all documents, unless `out` was begun."""
    from corpus import tokenizer

    if cfg.tokenizer != "chars":
        return tokenizer.load(cfg.tokenizer)
    path = out / "tokenizer.json"
    begun = (out / "progress.json").exists() or (out / "manifest.json").exists()
    if not (begun and path.exists()):
        documents = source.documents(tell=lambda warning: None)  # told when they are written
        tokenizer.write_characters(documents, path)
    return tokenizer.load(str(path))


def go_on(cfg, out, *, vocab_size, tokens, held_out, gpu):
    """{label: words of train.py}: a recipe for so many tokens on this device, and on a GPU.

    tokens: of training. held_out: of validation, of dialogues those with loss.
    """
    folders = dict(data_dir=str(out), out_dir=f"out/{out.name}")
    if cfg.is_chat:
        return {"go on with": fine_tuning(folders, tokens, held_out, cfg.pack)}
    small = "shakespeare_char" if cfg.tokenizer == "chars" else "quickstart"
    large = small
    if tokens >= 10e6:
        large = "gpt2_124m" if tokens >= 2e9 else "modern_124m"
    recipes = {"go on with": large}
    if large != small and not gpu:
        recipes = {"go on with": small, "on a GPU": large}
    found = {}
    for where, name in recipes.items():
        recipe = configure(RunConfig, [f"config/{name}.py"])
        given = folders | dict(vocab_size=vocab_size)
        given |= fitted(recipe, tokens, held_out, cfg.pack)
        on_cpu = name == small and not gpu
        if on_cpu and vocab_size > LARGE_VOCABULARY and held_out > CPU_EVAL_TOKENS:
            given["eval_tokens"] = min(recipe.eval_tokens, CPU_EVAL_TOKENS)
        found[where] = [f"config/{name}.py", *changes(recipe, given)]
    return found


def fine_tuning(folders, tokens, held_out, pack):
    """Words of train.py that go on from Hugging Face weights on so many tokens of dialogues."""
    batch_tokens = RunConfig.batch_tokens
    while EPOCHS * tokens < FEW_STEPS * batch_tokens and batch_tokens > SMALL_BATCH:
        batch_tokens //= 2
    usual = RunConfig(batch_tokens=batch_tokens, warmup_steps=RunConfig.max_steps)
    given = folders | fitted(usual, tokens, held_out, pack) | dict(lr=2e-5, document_mask=True)
    if not pack:  # else rows would no longer be those of pack
        given["align_documents"] = True
    return ["--init_from=hf:NAME_OR_FOLDER", *changes(RunConfig(), given)]


def fitted(recipe, tokens, held_out, pack):
    """{setting: value} with which so many tokens suffice for rows, batches, steps, evaluations.

    pack: the length of rows that the documents are ordered for; None: the recipe's will do.
    """
    block_size = pack or recipe.block_size
    while block_size >= tokens and block_size > 1:  # a row is one token longer
        block_size //= 2
    rows = max(1, min(recipe.batch_tokens, tokens) // block_size)
    most = max(1, recipe.batch_size * recipe.block_size // block_size)  # as much memory
    batch_size = min(most, rows)
    batch_tokens = rows // batch_size * batch_size * block_size
    max_steps = min(recipe.max_steps, max(1, EPOCHS * tokens // batch_tokens))
    return dict(
        block_size=block_size,
        batch_size=batch_size,
        batch_tokens=batch_tokens,
        max_steps=max_steps,
        warmup_steps=min(recipe.warmup_steps, max_steps // 10),
        eval_interval=recipe.eval_interval if held_out > block_size else 0,
    )


def changes(recipe, given):
    """["--name=value"] of the `given` settings that differ from the recipe's."""
    return [f"--{name}={value}" for name, value in given.items() if getattr(recipe, name) != value]


def check(cfg):
    """Raises one UserError for every setting out of range."""
    least = {
        "shard_tokens": 1,
        "val_tokens": 0,
        "max_tokens": 1,
        "max_shards": 1,
        "shuffle_seed": 0,
    }
    wrong = too_small(cfg, least | {"pack": 2, "min_document_tokens": 1})
    if cfg.shard_tokens >= 1 << 31:
        wrong.append(
            f"shard_tokens={cfg.shard_tokens} must be below 2**31, the largest count in a header"
        )
    if cfg.pack and cfg.pack > cfg.shard_tokens:
        wrong.append(f"shard_tokens={cfg.shard_tokens} must be at least one row of pack={cfg.pack}")
    if cfg.max_shards is not None and not cfg.ready_made:
        wrong.append(
            f"max_shards={cfg.max_shards} is for datasets of shards (--shards); try --max_tokens"
        )
    if cfg.ready_made:
        of_shards = {"dataset", "revision", "shards", "out_dir", "tokenizer", "max_shards"}
        of_texts = vars(cfg).keys() - of_shards
        wrong += without_effect(cfg, of_texts, "is for texts, shards are fetched as they are")
    if len(cfg.keys) > 2:
        wrong.append(f"text_key={cfg.text_key} must be one field, or two for prompt,completion")
    if cfg.tokenizer == "chars" and (cfg.ready_made or cfg.is_chat):
        wrong.append("tokenizer=chars is for texts, not for dialogues or shards")
    refuse(wrong)


def check_files(cfg, files):
    """Refuses settings that do not suit local `files`, or the hub where files is None."""
    if files is None:
        refuse(without_effect(cfg, ["skip_bad_documents"], "is for local files"))
        return
    wrong = without_effect(cfg, ["subset", "split", "revision"], "is for the hub, not for files")
    if cfg.val_tokens and alone(files):
        wrong.append(
            f"val_tokens={cfg.val_tokens}: of a single text it is the last tenth; try 0 or None"
        )
    texts = [path for path in files if kind(path)[0] not in RECORDS]
    if cfg.is_chat and texts:
        wrong.append(f"text_key={cfg.text_key} needs files of {', '.join(RECORDS)}, not {texts[0]}")
    refuse(wrong)


def settings(cfg, source, tokenizer, dialogues):
    """The settings that decide the shards' bytes; a folder begun with other values is refused."""
    if cfg.ready_made:
        return {"dataset": source.name, "revision": cfg.revision, "max_shards": cfg.max_shards}
    apart = {"subset", "split", "shards", "out_dir", "max_shards"}
    chosen = {key: value for key, value in vars(cfg).items() if key not in apart}
    chosen |= {
        "dataset": source.name,
        "vocab_size": tokenizer.vocab_size,
        "eot": tokenizer.eot,
        "tokenizer_sha256": hashlib.sha256(tokenizer.token_bytes()).hexdigest(),
        "streaming": cfg.streaming and cfg.shuffle_seed is not None,  # then another order
    }
    if dialogues:
        chosen["chat_sha256"] = dialogues.digest
    if source.files is None:
        chosen |= {"subset": cfg.subset, "split": cfg.split}
    else:
        listing = "".join(f"{path}\t{os.path.getsize(path)}\n" for path in source.files)
        chosen |= {
            "files": len(source.files),
            "files_sha256": hashlib.sha256(os.fsencode(listing)).hexdigest(),
            "contents_sha256": source.sha256,
        }
    if cfg.val_tokens is None:
        chosen["val_tokens"] = usual_val_tokens(cfg, source.files)
    return chosen


def usual_val_tokens(cfg, files):
    """How many tokens are held out where val_tokens is None (docs/data.md).

    files: local ones; None: the hub's.
    """
    if alone(files):
        return 1  # its last tenth is a document, which is taken whole
    found = cfg.shard_tokens
    if files is not None:
        # 1% of the tokens, which have one byte or about four; less of compressed files
        percent = 100 if cfg.tokenizer in ("bytes", "chars") else 400
        found = min(found, sum(map(os.path.getsize, files)) // percent)
    if cfg.max_tokens is not None:
        found = min(found, cfg.max_tokens // 10)
    return max(1, found)


class Source:
    """The documents of the hub or of local files. sha256: of the contents of these."""

    def __init__(self, cfg):
        self.cfg = cfg
        self.name = SHORT_NAMES.get(cfg.dataset, cfg.dataset)
        self.files = None if cfg.ready_made else local_files(self.name)
        check_files(cfg, self.files)
        self.sha256 = contents(self.files) if self.files else None
        self.short = re.sub(r"[^\w-].*", "", Path(self.name).name) or "text"
        if self.files and len(self.files) > 1:
            self.short = "text"

    def documents(self, first=0, tell=print):
        """Yields lists of texts, messages or pairs, from document number `first` on.

        Bad documents that are left out are None. tell() gets warnings.
        """
        cfg = self.cfg
        with as_user_error(
            f"dataset={cfg.dataset} cannot be read", DataError, again=self.files is None
        ):
            if alone(self.files):
                yield self._parts(tell)[first:]
                return
            data = self._open()
            if not cfg.streaming and first == len(data):  # all is in shards; skip fails there
                return
            if cfg.shuffle_seed is not None:
                data = data.shuffle(seed=cfg.shuffle_seed)
            if first:
                data = data.skip(first)
            for batch in data.iter(batch_size=256):  # about 200,000 tokens
                for words in filter(None, batch.get(WARNING, ())):
                    tell(f"warning: {words}")
                yield self._of_columns(batch)

    def _of_columns(self, batch):
        """The documents of a batch, {field: the values of all of them}."""
        columns = [batch[key] for key in self.cfg.keys]
        if len(columns) == 2:
            return list(zip(*columns))
        (values,) = columns
        if not self.cfg.is_chat and not all(isinstance(value, str | None) for value in values):
            raise DataError(
                f"dataset={self.cfg.dataset}: the field text_key={self.cfg.text_key} is not text"
            )
        if self.cfg.is_chat and self.files:  # local_documents gives JSON
            return [value and json.loads(value) for value in values]
        return values

    def _parts(self, tell):
        """The last tenth of a single text, for validation, and what precedes it, or all of it."""
        row = next(local_documents(self.files, self.cfg.keys, False))
        if row[WARNING]:
            tell(f"warning: {row[WARNING]}")
        text = row[self.cfg.keys[0]]
        cut = len(text) if self.cfg.val_tokens == 0 else len(text) * 9 // 10
        return [part for part in (text[cut:], text[:cut]) if part]

    def _open(self):
        """A dataset; the copy of local files in datasets' cache serves until one is changed."""
        import datasets  # takes a second to import

        cfg = self.cfg
        datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # what it logs is raised as well
        if not sys.stderr.isatty():
            datasets.disable_progress_bars()
        if self.files is None:
            subset = cfg.subset
            if subset == Config.subset and self.name not in SHORT_NAMES.values():
                subset = None  # the default is one of FineWeb alone
            hub = dict(name=subset, split=cfg.split, revision=cfg.revision, streaming=cfg.streaming)
            return patiently(datasets.load_dataset, self.name, **hub).select_columns(list(cfg.keys))
        given = dict(paths=tuple(self.files), keys=cfg.keys, skip_bad=cfg.skip_bad_documents)
        columns = dict.fromkeys((*cfg.keys, WARNING), datasets.Value("large_string"))
        options = dict(gen_kwargs=given, features=datasets.Features(columns))
        if cfg.streaming:
            return datasets.IterableDataset.from_generator(local_documents, **options)
        options["fingerprint"] = datasets.fingerprint.Hasher.hash((self.sha256, given))
        return datasets.Dataset.from_generator(local_documents, **options)


if __name__ == "__main__":
    run(main, Config)
