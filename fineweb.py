"""Tokens to train on: shards from the Hugging Face hub or from local files.

    python fineweb.py                                # FineWeb-Edu sample-10BT into data/fineweb-edu, 20 GB
    python fineweb.py --dataset=kjj0/fineweb10B-gpt2 --max_shards=10  # ready-made GPT-2 shards of FineWeb
    python fineweb.py --dataset="books/*.txt,notes.jsonl.zst" --out_dir=data/mine
    python fineweb.py --dataset=input.txt --tokenizer=chars --out_dir=data/shakespeare_char
    python fineweb.py --dataset=chats.jsonl --text_key=messages --tokenizer=FOLDER  # see corpus/chat.py

A killed run goes on when it is started again.
"""

import glob
import hashlib
import io
import json
import os
import re
import shlex
import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from configurator import UserError, configure, refuse, run, too_small, without_effect
from corpus import AGAIN, DataError, told
from run.files import patiently
from settings import Config as RunConfig

SHORT_NAMES = {"fineweb": "HuggingFaceFW/fineweb", "fineweb-edu": "HuggingFaceFW/fineweb-edu"}
READY_MADE = ("kjj0/fineweb10B-gpt2", "kjj0/fineweb100B-gpt2", "kjj0/finewebedu10B-gpt2")
COMPRESSED = (".zst", ".gz", ".xz", ".bz2")
RECORDS = (".jsonl", ".json", ".parquet")  # any other file is one document
OURS = ("progress.json", "manifest.json", "tokenizer.json")  # of shards that lie among the texts
FOLDERS = (".txt", *RECORDS)  # what is read of a folder; a glob may name others
EPOCHS = 3  # that the command printed at the end reads at most; docs/modern.md measures as many
DOCUMENT_BYTES = 1 << 30  # of a compressed file that expands without end; a larger plain file is read whole


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
    skip_bad_documents: bool = False  # leave out lines of .jsonl files that give no document, and count them
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
    short = "text" if files and len(files) > 1 else re.sub(r"[^\w-].*", "", Path(name).name) or "text"
    out = Path(cfg.out_dir or f"data/{short}")
    with writer.claim(out):
        tokenizer = cfg.tokenizer
        if tokenizer == "chars":
            tokenizer, begun = out / "tokenizer.json", {*os.listdir(out)} & {"progress.json", "manifest.json"}
            if not (begun and tokenizer.exists()):
                tokenizers.write_characters(documents(cfg, name, files, 0), tokenizer)
        tokenizer = tokenizers.load(str(tokenizer))
        dialogues = Dialogues(tokenizer) if cfg.is_chat else None
        progress = writer.Progress(out, settings(cfg, name, files, tokenizer, dialogues))
        if progress.finished:
            print(f"{out} is finished already; nothing was done")
        else:
            if cfg.ready_made:
                writer.fetch_shards(name, cfg.revision, cfg.max_shards, progress, tokenizer)
            else:
                batches = documents(cfg, name, files, progress.position[0])
                writer.write_shards(batches, (dialogues or tokenizer).rows, progress, tokenizer, short)
            progress.finish(tokenizer)
    for split in ("train", "val"):
        tokens, targets = progress.total("tokens", split), progress.total("targets", split)
        print(f"{split:5}  {tokens:,} tokens" + f", {targets:,} of them with loss" * cfg.is_chat)
    more = [] if progress.total("tokens", "val") else ["--eval_interval=0"]
    tokens, gpu = progress.total("tokens", "train"), shutil.which("nvidia-smi") is not None
    for where, words in go_on(cfg, out, tokenizer.vocab_size, tokens, gpu).items():
        print(f"{where:11} {shlex.join(['python', 'train.py', *words, *more])}")


def go_on(cfg, out, vocab_size, tokens, gpu):
    """{label: words of train.py}: a recipe for so many training tokens on this device, and on a GPU."""
    folders = dict(data_dir=str(out), out_dir=f"out/{out.name}")
    if cfg.is_chat:
        steps = max(1, EPOCHS * tokens // RunConfig.batch_tokens)
        given = folders | dict(max_steps=steps, warmup_steps=steps // 10, lr=2e-5)
        masks = ["--align_documents", "--document_mask"]
        words = [f"--{key}={value}" for key, value in given.items()]
        return {"go on with": ["--init_from=hf:NAME_OR_FOLDER", *words, *masks]}
    small = "shakespeare_char" if cfg.tokenizer == "chars" else "quickstart"
    large = "gpt2_124m" if tokens >= 2e9 else "modern_124m" if tokens >= 10e6 else small
    recipes = {"go on with": large} if gpu or large == small else {"go on with": small, "on a GPU": large}
    found = {}
    for where, name in recipes.items():
        recipe = configure(RunConfig, [f"config/{name}.py"])
        steps = max(1, EPOCHS * tokens // recipe.batch_tokens)
        given = folders | dict(vocab_size=vocab_size, max_steps=min(steps, recipe.max_steps))
        own = [f"--{key}={value}" for key, value in given.items() if getattr(recipe, key) != value]
        found[where] = [f"config/{name}.py", *own]
    return found


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


def suffix(path):
    """The suffix that says what a file holds, in lower case; "" if it has none but of a compression."""
    return ([suffix for suffix in Path(path).suffixes if suffix not in COMPRESSED] or [""])[-1].lower()


def alone(files):
    """Whether there is one document only, since `files`, from `local_files`, are one text."""
    return files is not None and len(files) == 1 and suffix(files[0]) not in RECORDS


def local_files(dataset):
    """The paths that `dataset` names, None for one of the hub; of a folder those of the kinds in FOLDERS."""
    on_hub = re.fullmatch(r"[\w-]+|[\w-][\w.-]*/[\w-][\w.-]*", dataset) and not os.path.exists(dataset)
    if on_hub and Path(dataset).suffix not in (*FOLDERS, *COMPRESSED):
        return None
    files, others = [], Counter()
    for part in dataset.split(","):
        found = []
        matches = [part] if os.path.exists(part) else sorted(glob.glob(part, recursive=True))
        for path in filter(os.path.exists, matches):  # no dangling links
            inside = sorted(filter(os.path.isfile, glob.glob(f"{glob.escape(path)}/**", recursive=True)))
            inside = [file for file in inside if os.path.basename(file) not in OURS]
            found += [file for file in inside if suffix(file) in FOLDERS] if os.path.isdir(path) else [path]
            others.update(suffix(file) for file in inside if suffix(file) not in FOLDERS)
        words = ", ".join(f"{n} {kind or 'without a suffix'}" for kind, n in others.most_common())
        words = words and f"; left out of folders: {words}; a glob reads more, as in 'FOLDER/**/*.py'"
        if not found:
            raise UserError(f"dataset={dataset}: no text file matches {part!r}{words}")
        files += found
    print(words[2:], end="\n" * bool(words))
    return list(dict.fromkeys(files))


def settings(cfg, name, files, tokenizer, dialogues):
    """The settings that decide the shards' bytes; a folder that was begun with other values is refused."""
    if cfg.val_tokens and alone(files):
        raise UserError(f"val_tokens={cfg.val_tokens}: of a single text it is the last tenth; try 0 or None")
    if dialogues and (texts := [path for path in files or () if suffix(path) not in RECORDS]):
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
        # about 1% of the tokens, which have one byte or about four; less of compressed files
        share = 1 if alone(files) else sum(sizes) // (100 if tokenizer.name == "bytes" else 400)
    default_val = max(1, min(share, cfg.shard_tokens, (cfg.max_tokens or 1 << 63) // 10))
    return chosen | {"val_tokens": default_val if cfg.val_tokens is None else cfg.val_tokens}


def documents(cfg, name, files, first):
    """Yields lists of texts, messages or pairs, from document number `first` on."""
    with told(f"dataset={cfg.dataset} cannot be read", DataError, f"; {AGAIN}"):
        if alone(files):
            text = next(local_documents(files, cfg.keys, False))[cfg.text_key]
            cut = len(text) if cfg.val_tokens == 0 else len(text) * 9 // 10
            yield [part for part in (text[cut:], text[:cut]) if part][first:]
            return
        data = open_dataset(cfg, name, files)
        if not cfg.streaming and first == len(data):  # all is in shards; skip fails there
            return
        data = data if cfg.shuffle_seed is None else data.shuffle(seed=cfg.shuffle_seed)
        for batch in (data.skip(first) if first else data).iter(batch_size=256):  # about 200,000 tokens
            found = batch[cfg.keys[0]] if len(cfg.keys) == 1 else list(zip(*map(batch.get, cfg.keys)))
            if cfg.text_key == "messages" and files:
                found = [text and json.loads(text) for text in found]
            if not cfg.is_chat and not all(isinstance(text, str | None) for text in found):
                raise DataError(f"dataset={cfg.dataset}: the field text_key={cfg.text_key} is not text")
            yield found


def open_dataset(cfg, name, files):
    """The documents on the hub or in local files, whose copy in datasets' cache serves until one changes."""
    import datasets  # takes a second to import

    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # what it logs is raised as well
    if not files:  # the default subset is one of FineWeb alone
        subset = cfg.subset if name in SHORT_NAMES.values() or cfg.subset != Config.subset else None
        hub = dict(name=subset, split=cfg.split, revision=cfg.revision, streaming=cfg.streaming)
        return patiently(datasets.load_dataset, name, **hub).select_columns(list(cfg.keys))
    given = dict(paths=tuple(files), keys=cfg.keys, skip_bad=cfg.skip_bad_documents)
    form = datasets.Features(dict.fromkeys(cfg.keys, datasets.Value("large_string")))
    if cfg.streaming:
        return datasets.IterableDataset.from_generator(local_documents, form, gen_kwargs=given)
    stats = [(os.path.abspath(path), os.stat(path).st_size, os.stat(path).st_mtime_ns) for path in files]
    digest = datasets.fingerprint.Hasher.hash((stats, given))
    return datasets.Dataset.from_generator(local_documents, form, gen_kwargs=given, fingerprint=digest)


def local_documents(paths, keys, skip_bad):
    """Yields {field: text, or JSON of messages} of each document; the first bad line raises DataError."""
    row = None
    for path in paths:
        bad = []
        for number, record in enumerate(records(path, keys), 1):
            if isinstance(record, bytes) and not record.strip():
                continue
            try:
                row = fields(record, keys)
                yield row
            except ValueError as error:
                bad.append(f"{path}:{number}: {error}")
                if not skip_bad:
                    advice = "mend it, or leave such lines out with --skip_bad_documents"
                    raise DataError(f"{bad[0]}; {advice}") from None
        if bad:
            print(f"warning: left out {len(bad):,} bad lines, the first is {bad[0]}")
    if row is None:
        raise DataError(f"no document in {len(paths):,} files, the first is {paths[0]}")


def records(path, keys):
    """Yields a file's text, or its lines of JSON as bytes, or its rows as {field: value}."""
    import fsspec
    import pyarrow.parquet

    if suffix(path) == ".parquet":
        file = pyarrow.parquet.ParquetFile(path)
        known = set(keys) <= set(file.schema_arrow.names)
        for batch in file.iter_batches(256, columns=list(keys) if known else None):
            yield from batch.to_pylist()
        return
    most = max(DOCUMENT_BYTES, os.path.getsize(path))
    zstd = Path(path).suffix.lower() == ".zst"  # of which fsspec's reader takes half a file as whole
    with pyarrow.CompressedInputStream(path, "zstd") if zstd else fsspec.open(path, "rb", "infer") as file:
        file, lines = io.BufferedReader(file), suffix(path) in RECORDS
        read = file.readline if lines else file.read
        for number, data in enumerate(iter(lambda: read(most + 1), b""), 1):
            if len(data) > most:
                raise DataError(f"{path}:{number}: a document of over {most >> 20:,} MiB; cut it up")
            if not lines and b"\0" in data[:8192]:
                raise DataError(f"{path} is not text in UTF-8: it has zero bytes; leave it out or convert it")
            text = data if lines else data.decode("utf-8", "replace")
            if not lines and (lost := text.count("\ufffd") - data.count(b"\xef\xbf\xbd")):
                print(f"warning: {path} is not UTF-8 throughout: {lost:,} characters were replaced by U+FFFD")
            yield text


def fields(record, keys):
    """{key: text, or JSON of messages} of a text, a row or a line of JSON; ValueError says what is wrong."""
    if isinstance(record, str):
        return {keys[0]: record}
    try:
        record = json.loads(record.decode("utf-8-sig")) if isinstance(record, bytes) else record
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is not valid JSON in UTF-8 ({error})") from None
    names = record if isinstance(record, dict) else ()
    if not set(keys) <= set(names):
        raise ValueError(f"it has no field {','.join(keys)}; it has {', '.join(names) or 'no fields'}")
    row = {key: record[key] for key in keys}
    for key, value in row.items():
        as_json = keys == ("messages",) and value is not None
        row[key] = text = json.dumps(value, ensure_ascii=False, default=str) if as_json else value
        if not isinstance(text, str):
            raise ValueError(f"its field {key} is {json.dumps(value, default=str)[:40]}, not text")
        if re.search("[\ud800-\udfff]", text):
            raise ValueError("it holds half of a surrogate pair")
    return row


if __name__ == "__main__":
    run(main, Config)
