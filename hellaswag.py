"""HellaSwag (https://arxiv.org/abs/1905.07830): which of four endings does the model find most likely?

    python hellaswag.py --checkpoint=out/a [--against=out/b]      # and the difference, a - b
    python hellaswag.py --checkpoint=out/a --show=3               # and what the model chose in 3 examples
    torchrun --standalone --nproc_per_node=8 hellaswag.py --checkpoint=out/llama3_8b [--parallel=fsdp]

acc takes the ending with the lowest summed loss, acc_norm that with the lowest mean loss per token, as other
GPT-2 reproductions do (GPT-2 124M: 0.2859, 0.2955); lm-eval's divides by characters instead. Chance is 0.25.
acc_easy is acc with the wrong endings replaced by right ones of other examples, of the same length, meant
for small models, which are at chance in acc.
"""

import contextlib
import http.client
import itertools
import json
import os
import textwrap
import time
import urllib.request
from collections import namedtuple
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from configurator import columns, run, too_small
from corpus import DataError
from errors import refuse, say
from settings import TrainedConfig
from system.files import misfits, text, write_atomic

URL = "https://raw.githubusercontent.com/rowanz/hellaswag/master/data/hellaswag_val.jsonl"
CACHE = Path.home() / ".cache" / "hellaswag"
BATCH_TOKENS = {"cuda": 65_536, "cpu": 1024}  # CPU: a row takes a third longer with 4,096 (GPT-2 124M)
SCORES = "acc_norm", "acc", "acc_easy"
WORDS = lambda v: text(v) and v.strip() != ""
FOUR = lambda v: isinstance(v, list) and len(v) == 4 and all(map(WORDS, v))
EXAMPLE = {"ctx": WORDS, "endings": FOUR, "label": (*range(4), *"0123")}


@dataclass
class Config(TrainedConfig):
    file: str | None = None  # a local hellaswag_val.jsonl; None: downloaded once into ~/.cache/hellaswag
    limit: int | None = None  # number of examples, from the first on; None: all 10,042
    batch_tokens: int | None = None  # tokens per forward pass; None: 65,536 on a GPU, 1,024 on a CPU
    against: str | None = None  # folder of another run or checkpoint, on the same examples
    show: int = 0  # print so many of the first examples: each ending with its loss, the right and the chosen


class Unavailable(DataError):
    """No file is named, and none can be downloaded: a training run goes on without HellaSwag."""


def main(cfg):
    refuse(too_small(cfg, {"limit": 1, "batch_tokens": 1, "show": 0}))
    from run import trained
    from scale import parallel

    found, examples, lines = [], None, []
    for one in filter(None, (cfg, trained.other(cfg))):
        world, model, tokenizer, autocast = trained.load(one)
        examples = examples or load(cfg.file)[: cfg.limit]
        prepared, began = prepare(examples, tokenizer, model.cfg.block_size), time.perf_counter()
        sums = losses(model, prepared, world.device, cfg.batch_tokens, autocast)
        score, right = scored(prepared, sums)
        found.append((score | dict(seconds=time.perf_counter() - began), right))
        if one is cfg:
            for number, example in enumerate(examples[: cfg.show]):
                lines += [*shown(number, example, prepared, sums), ""]
    lines.append(in_words(found[0][0]))
    for _, others in found[1:]:
        gains = [(name, hits.astype(float) - others[name]) for name, hits in found[0][1].items()]
        each = [f"{name} {d.mean():+.4f} ±{d.std() / len(d) ** 0.5:.4f}" for name, d in gains]
        lines.append(" | ".join([f"less {cfg.against}'s", *each]))
    if world.main:
        say(*lines, sep="\n")
    parallel.stop()


def load(path=None):
    """The examples of a file; None: of the downloaded one. Raises DataError or its Unavailable."""
    path = download() if path is None else Path(path)
    if path.exists() and not path.is_file():
        raise DataError(f"{path}: a folder, a pipe or a device; name a file, or none to download it")
    try:
        return parse(path.read_bytes(), path)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}; name another file, or none to download it") from None


def parse(data, where):
    """[{"ctx", "endings", "label"}] of a file's bytes; only a newline ends a line, U+2028 does not."""
    examples = []
    for number, line in enumerate(data.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            example = json.loads(line)
            for wrong in misfits(example, EXAMPLE):
                raise ValueError(wrong)
        except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
            raise DataError(f"{where}:{number}: not an example of HellaSwag ({error})") from None
        examples.append({k: example[k] for k in ("ctx", "endings")} | {"label": int(example["label"])})
    if not examples:
        raise DataError(f"{where}: no examples in it; expected one JSON object a line")
    return examples


def download(folder=CACHE, url=URL):
    """Downloads the validation file once and returns its path. A reply that does not parse is not kept."""
    path = Path(folder) / "hellaswag_val.jsonl"
    try:
        if not path.exists():
            with urllib.request.urlopen(url, timeout=20) as reply:
                data = reply.read()
            parse(data, url)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, data)  # several ranks may download at the same time
    except (OSError, http.client.HTTPException, DataError) as error:  # urllib's errors are OSErrors
        local = "give a local one, hellaswag.py --file or train.py --hellaswag_file"
        raise Unavailable(f"{url} cannot be downloaded ({error}); {local}") from None
    return path


def easy(examples):
    """The examples with right endings of others for the wrong ones, of the nearest lengths in characters."""
    right = [example["endings"][example["label"]] for example in examples]
    shuffled = np.random.default_rng(0).permutation(len(right)).tolist()  # neighbours in the file are related
    order, found = sorted(shuffled, key=lambda i: len(right[i])), list(examples)
    for place, i in enumerate(order):
        label = examples[i]["label"]
        others = [right[order[(place + k) % len(order)]] for k in (1, 2, 3)]
        found[i] = examples[i] | {"endings": [*others[:label], right[i], *others[label:]]}
    return found


def documents(dataset):
    """The easy form of a datasets.Dataset of examples, for measure/hellaswag_easy.yaml."""
    return dataset.from_list(easy([example | {"label": int(example["label"])} for example in dataset]))


# Of examples, then of their easy form: four rows of ids each; where endings begin; the right ones; rows cut;
# rows with a token that spans the join of context and ending, which begins the ending then.
Prepared = namedtuple("Prepared", "rows starts labels truncated spanned")


def prepare(examples, tokenizer, block_size):
    """The examples as Prepared. A row longer than block_size + 1 loses the left of its context."""
    count, examples = len(examples), [*examples, *easy(examples)]
    contexts = tokenizer.encode_batch([e["ctx"] for e in examples])
    wholes = tokenizer.encode_batch([f"{e['ctx']} {ending}" for e in examples for ending in e["endings"]])
    rows, starts, truncated, spanned = [], [], 0, 0
    for i, row in enumerate(wholes):
        context, where = contexts[i // 4], f"example {i // 4 % count}"
        start = len(os.path.commonprefix([context.tolist(), row.tolist()]))
        spanned += start < len(context)
        if start == len(row):
            raise DataError(f"{where}: an ending has no token in tokenizer={tokenizer.name}")
        if start == 0:  # nothing of the context is left: the separator stands before a text
            row, start = np.insert(row, 0, tokenizer.eot), 1
        cut = max(0, len(row) - (block_size + 1))
        if cut >= start:
            raise DataError(f"{where}: an ending of {len(row) - start} tokens exceeds {block_size=}")
        truncated += cut > 0
        rows.append(row[cut:].astype(np.int64))
        starts.append(start - cut)
    labels = np.array([e["label"] for e in examples])
    return Prepared(rows, np.array(starts), labels, truncated, spanned)


def batches(prepared, batch_tokens, block_size):
    """Yields (row numbers, B, T) of each forward, longest first; T in steps of 32, for few shapes."""
    width = [min(block_size, -(-(len(row) - 1) // 32) * 32) for row in prepared.rows]
    order = sorted(range(len(width)), key=width.__getitem__, reverse=True)
    for T, group in itertools.groupby(order, width.__getitem__):
        same = list(group)
        B = min(len(same), max(1, batch_tokens // T))
        yield from ((same[i : i + B], B, T) for i in range(0, len(same), B))


def evaluate(model, prepared, device, batch_tokens=None, autocast=None, stop=lambda: False):
    """(the score as a dict, {name: which examples are right}), on every rank; stop(): leave the rest?"""
    began = time.perf_counter()
    score, right = scored(prepared, losses(model, prepared, device, batch_tokens, autocast, stop))
    return score | dict(seconds=time.perf_counter() - began), right


def losses(model, prepared, device, batch_tokens=None, autocast=None, stop=lambda: False):
    """Float64 (rows,): the summed loss of each row's ending, in nats, on every rank; see `evaluate`."""
    summed = lambda idx, targets: model.token_losses(idx, targets).float().sum(1, keepdim=True)
    return over_rows(summed, 1, model, prepared, device, batch_tokens, autocast, stop)[:, 0]


def over_rows(measure, n, model, prepared, device, batch_tokens=None, autocast=None, stop=lambda: False):
    """Float64 (rows, n), on every rank, of measure((B, T) ids, targets, -100 before endings) -> (B, n)."""
    import torch

    from run.logger import progress
    from scale import parallel

    rank, world = parallel.rank_and_size()
    batch_tokens = batch_tokens or BATCH_TOKENS.get(torch.device(device).type, 4096)
    jobs = list(batches(prepared, batch_tokens, model.cfg.block_size))
    jobs += [([], *jobs[-1][1:])] * (-len(jobs) % world)  # FSDP2 needs as many on every rank
    found = torch.zeros(len(prepared.rows), n, device=device)
    for numbers, B, T in progress(jobs[rank::world], "rows scored", stop=stop):
        idx, targets = torch.zeros(B, T, dtype=torch.long), torch.full((B, T), -100)  # -100: no loss
        for b, i in enumerate(numbers):
            row, start = torch.from_numpy(prepared.rows[i]), prepared.starts[i]
            idx[b, : len(row) - 1] = row[:-1]
            targets[b, start - 1 : len(row) - 1] = row[start:]
        with torch.no_grad(), autocast or contextlib.nullcontext():
            values = measure(idx.to(device), targets.to(device))
        found[torch.tensor(numbers, dtype=torch.long, device=device)] = values[: len(numbers)].float()
    parallel.sum_over_ranks(found)
    return found.cpu().double().numpy()


def scored(prepared, sums):
    """(the score as a dict without its seconds, {name: which examples are right}); sums: see `losses`."""
    means = sums / ending_tokens(prepared)
    hits = lambda x: (x.reshape(-1, 4).argmin(1) == prepared.labels).reshape(2, -1)
    right = dict(zip(SCORES, (hits(means)[0], *hits(sums))))
    score = {name: float(x.mean()) for name, x in right.items()} | dict(n=len(right["acc"]))
    return score | dict(truncated=prepared.truncated, spanned=prepared.spanned), right


def ending_tokens(prepared):
    """Int (rows,): tokens of each row's ending."""
    return np.array([len(row) for row in prepared.rows]) - prepared.starts


def shown(number, example, prepared, sums):
    """Lines for a person: an example with the loss of each ending, the right one and the chosen ones."""
    rows = slice(4 * number, 4 * number + 4)
    own = sums[rows]
    means = own / ending_tokens(prepared)[rows]
    lines = textwrap.wrap(f"example {number}: {example['ctx']}", columns())
    lines.append(f"  {'right, chosen by':<20} {'loss':>8} {'a token':>8}  ending")
    for i, ending in enumerate(example["endings"]):
        marks = ["right"] if i == example["label"] else []
        marks += ["acc"] if i == own.argmin() else []
        marks += ["acc_norm"] if i == means.argmin() else []
        words = f"  {', '.join(marks):<20} {own[i]:8.2f} {means[i]:8.3f}  {ending}"
        lines += textwrap.wrap(words, columns(), subsequent_indent=" " * 42)
    return lines


def in_words(score):
    """A line for the console; after ±, the standard errors of the proportions."""
    n, shares = score["n"], [(name, score[name]) for name in SCORES]
    parts = [f"{name} {p:.4f} ±{(p * (1 - p) / n) ** 0.5:.4f}" for name, p in shares]
    counts = f"{n:,} examples, rows cut: {score['truncated']}"
    if score["spanned"]:
        counts += f", a token spans the join: {score['spanned']}"
    return " | ".join([*parts, counts, f"{score['seconds']:.1f} s"])


if __name__ == "__main__":
    run(main, Config)
