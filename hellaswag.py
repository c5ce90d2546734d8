"""HellaSwag (https://arxiv.org/abs/1905.07830): the likeliest of four endings.

    python hellaswag.py --checkpoint=out/a
    python hellaswag.py --checkpoint=out/a --against=out/b  # and a - b
    torchrun --standalone --nproc_per_node=8 hellaswag.py --checkpoint=out/a

acc takes the ending with the lowest summed loss, acc_norm that with the lowest
mean loss per token, as other GPT-2 reproductions do (GPT-2 124M: 0.2859,
0.2955); lm-eval's divides by characters instead. Chance is 0.25.
"""

import http.client
import json
import os
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from configurator import run, too_small
from corpus import DataError
from settings import TrainedConfig
from system.errors import is_rank_0, refuse, say
from system.files import write_atomic

URL = "https://raw.githubusercontent.com/rowanz/hellaswag/master/data/hellaswag_val.jsonl"
CACHE = Path.home() / ".cache/hellaswag/hellaswag_val.jsonl"
# on a CPU a row takes a third longer with 4,096 (GPT-2 124M)
BATCH_TOKENS = {"cuda": 65_536, "cpu": 1024}


@dataclass
class Config(TrainedConfig):
    file: str | None = None  # a local hellaswag_val.jsonl; None: downloads it to ~/.cache/hellaswag
    limit: int | None = None  # number of examples, from the first on; None: all 10,042
    batch_tokens: int | None = None  # tokens per forward pass; None: 65,536 on a GPU, 1,024 on CPUs
    against: str | None = None  # folder of another run or checkpoint, on the same examples


class Unavailable(DataError):
    """No file is named, and none can be downloaded: a training run goes on without HellaSwag."""


def main(cfg):
    refuse(too_small(cfg, {"limit": 1, "batch_tokens": 1}))
    from run import evaluate, trained
    from scale import parallel

    other = trained.other(cfg)  # a mistake in it is told before the first model is measured
    score, right = measure(cfg)
    lines = [evaluate.in_words(score)]
    if other:
        _, others = measure(other)
        gain = {}
        for name, hits in right.items():
            gain |= over_examples(name, hits.astype(float) - others[name])
        lines.append(f"less {cfg.against}'s | {evaluate.in_words(gain)}")
    if is_rank_0():
        say(*lines, sep="\n")
    parallel.stop()


def measure(cfg):
    """What `scored` returns of a model, by the settings of this script."""
    from run import trained

    _, model, tokenizer, autocast = trained.load(cfg)
    prepared = prepare(load(cfg.file)[: cfg.limit], tokenizer, model.cfg.block_size)
    with autocast:
        return scored(prepared, losses(model, prepared, cfg.batch_tokens))


def load(path=None):
    """The examples of a file; None: of the downloaded one. Raises DataError or its Unavailable."""
    if path is None and not CACHE.exists():
        download()
    path = Path(path or CACHE)
    try:
        return parse(path.read_bytes(), path)
    except OSError as error:
        what = f"{path}: {error.strerror}"
        raise DataError(f"{what}; name another file, or none to download it") from None


def download():
    """Writes the validation file to CACHE; a reply that does not parse is not kept."""
    try:
        with urllib.request.urlopen(URL, timeout=20) as reply:
            data = reply.read()
        parse(data, URL)
        CACHE.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(CACHE, data)  # several ranks may download at the same time
    except (OSError, http.client.HTTPException, DataError) as error:  # urllib's errors are OSErrors
        local = "give a local one, hellaswag.py --file or train.py --hellaswag_file"
        raise Unavailable(f"{URL} cannot be downloaded ({error}); {local}") from None


def parse(data, where):
    """[{"ctx", "endings", "label"}] of a file's bytes; only a newline ends a line, not U+2028."""
    examples = []
    for number, line in enumerate(data.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            example = json.loads(line)
            endings = example["endings"]
            if len(endings) != 4:
                raise ValueError("its endings are not four")
            label = range(4).index(int(example["label"]))
            examples.append({"ctx": example["ctx"], "endings": endings, "label": label})
        except (ValueError, LookupError, TypeError) as error:  # as of bytes that are no UTF-8
            raise DataError(f"{where}:{number}: not an example of HellaSwag ({error})") from None
    if not examples:
        raise DataError(f"{where}: no examples in it; expected one JSON object a line")
    return examples


class Prepared(NamedTuple):
    """Examples as four rows of ids each."""

    rows: list
    starts: np.ndarray  # where the ending of each row begins
    labels: np.ndarray  # (examples,): the right one of each one's four rows
    truncated: int  # rows that lost the left of their context
    # rows with a token across the join of context and ending, which then begins the ending
    spanned: int


def prepare(examples, tokenizer, block_size):
    """The examples as Prepared. A row longer than block_size + 1 loses the left of its context."""
    contexts = tokenizer.encode_batch([e["ctx"] for e in examples])
    wholes = tokenizer.encode_batch(
        [f"{e['ctx']} {ending}" for e in examples for ending in e["endings"]]
    )
    rows, starts = [], []
    truncated = spanned = 0
    for i, row in enumerate(wholes):
        context = contexts[i // 4].tolist()
        start = len(os.path.commonprefix([context, row.tolist()]))
        spanned += start < len(context)
        if start == 0:  # nothing of the context is left: the separator stands before a text
            row = np.insert(row, 0, tokenizer.eot)
            start = 1
        cut = max(0, len(row) - (block_size + 1))
        if not cut < start < len(row):
            count = f"{len(row) - start} tokens of tokenizer={tokenizer.name}"
            raise DataError(f"example {i // 4}: an ending of {count}; expected 1 to {block_size=}")
        truncated += cut > 0
        rows.append(row[cut:].astype(np.int64))
        starts.append(start - cut)
    labels = np.array([e["label"] for e in examples])
    return Prepared(rows, np.array(starts), labels, truncated, spanned)


def batches(rows, batch_tokens, block_size):
    """Yields (row numbers, B, T) of forwards, longest first; T in steps of 32, for few shapes."""
    left = sorted(range(len(rows)), key=lambda number: -len(rows[number]))
    while left:
        T = min(block_size, -(-(len(rows[left[0]]) - 1) // 32) * 32)
        B = min(len(left), max(1, batch_tokens // T))
        yield left[:B], B, T
        left = left[B:]


def losses(model, prepared, batch_tokens=None, **options):
    """Float64 (rows,), on every rank: the summed loss of each row's ending, in nats."""

    def summed(idx, targets):
        return model.token_losses(idx, targets).float().sum(1, keepdim=True)

    rows, starts = prepared.rows, prepared.starts
    return over_rows(summed, 1, model, rows, starts, batch_tokens, **options).squeeze(1)


def over_rows(measure, n, model, rows, starts, batch_tokens=None, stop=lambda: False):
    """Float64 (rows, n), on every rank, of measure(ids, targets) -> (B, n).

    ids and targets are (B, T); targets are -100 before the row's start. stop(): whether to leave
    the rest.
    """
    import torch

    from run.logger import progress
    from scale import parallel

    rank, world = parallel.rank_and_size()
    device = parallel.device_of(model)
    batch_tokens = batch_tokens or BATCH_TOKENS.get(device.type, 4096)
    jobs = list(batches(rows, batch_tokens, model.cfg.block_size))
    _, B, T = jobs[-1]
    jobs += [([], B, T)] * (-len(jobs) % world)  # FSDP2 needs as many forwards on every rank
    found = torch.zeros(len(rows), n, device=device)
    for numbers, B, T in progress(jobs[rank::world], "rows scored", stop=stop):
        idx = torch.zeros(B, T, dtype=torch.long)
        targets = torch.full((B, T), -100)  # no loss
        for b, number in enumerate(numbers):
            row, start = torch.from_numpy(rows[number]), starts[number]
            idx[b, : len(row) - 1] = row[:-1]
            targets[b, start - 1 : len(row) - 1] = row[start:]
        with torch.no_grad():
            values = measure(idx.to(device), targets.to(device))
        found[numbers] = values[: len(numbers)].float()
    return parallel.sum_over_ranks(found).cpu().double().numpy()


def scored(prepared, sums):
    """(the score as a dict, {name: which examples are right}); sums: see `losses`."""
    tokens = np.array([len(row) for row in prepared.rows]) - prepared.starts
    right = {}
    score = {}
    for name, of_endings in {"acc_norm": sums / tokens, "acc": sums}.items():
        right[name] = of_endings.reshape(-1, 4).argmin(1) == prepared.labels
        score |= over_examples(name, right[name])
    counts = dict(n=len(prepared.labels), truncated=prepared.truncated, spanned=prepared.spanned)
    return score | counts, right


def over_examples(name, values):
    """{name: mean of an array over the examples, NAME_stderr: its standard error}."""
    from run.evaluate import figure

    return figure(name, values, np.ones(len(values)), np.arange(len(values)))


if __name__ == "__main__":
    run(main, Config)
