"""HellaSwag (https://arxiv.org/abs/1905.07830): the likeliest of four endings.

    python hellaswag.py --checkpoint=out/a
    torchrun --standalone --nproc_per_node=8 hellaswag.py --checkpoint=out/a

acc takes the ending with the lowest summed loss, acc_norm that with the lowest
mean loss per token, as other GPT-2 reproductions do (GPT-2 124M: 0.2859,
0.2955); lm-eval's divides by characters instead. Chance is 0.25.
"""

import json
import os
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from configurator import run
from corpus import DataError, as_user_error
from settings import TrainedConfig
from system.errors import say
from system.files import write_atomic

URL = "https://raw.githubusercontent.com/rowanz/hellaswag/master/data/hellaswag_val.jsonl"
CACHE = Path.home() / ".cache/hellaswag/hellaswag_val.jsonl"
# tokens in a forward; on a CPU a row takes a third longer with 4,096 (GPT-2 124M)
BATCH_TOKENS = {"cuda": 65_536, "mps": 4096, "cpu": 1024}


@dataclass
class Config(TrainedConfig):
    file: str | None = None  # a local hellaswag_val.jsonl; None: downloads it to ~/.cache/hellaswag

    others_names = {"hellaswag_file": "file"}


def main(cfg):
    from run import evaluate, trained
    from scale import parallel

    _, model, tokenizer, autocast = trained.load(cfg)
    prepared = prepare(load(cfg.file), tokenizer, model.cfg.block_size)
    with autocast:
        found = score(model, prepared)
    say(evaluate.in_words(found))
    parallel.stop()


def load(path=None):
    """The examples of a file; None: of the downloaded one. Raises DataError."""
    files = "hellaswag.py --file, train.py --hellaswag_file"
    hint = f"; give a copy of {URL} ({files}), or train with --hellaswag_interval=0"
    with as_user_error("no examples of HellaSwag", DataError, hint):
        if path is None and not CACHE.exists():
            with urllib.request.urlopen(URL, timeout=20) as reply:
                data = reply.read()
            parse(data, URL)  # what does not parse is not kept
            CACHE.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(CACHE, data)  # several ranks may download at the same time
        path = Path(path or CACHE)
        return parse(path.read_bytes(), path)


def parse(data, where):
    """[{"ctx", "endings", "label"}] of a file's bytes; only a newline ends a line, not U+2028."""
    examples = []
    for number, line in enumerate(data.splitlines(), 1):
        with as_user_error(f"{where}:{number}: not an example of HellaSwag", DataError):
            example = json.loads(line)
            label = int(example["label"])
            if label not in range(4) or len(example["endings"]) != 4:
                raise ValueError("expected four endings, and a label from 0 to 3")
            examples.append({"ctx": example["ctx"], "endings": example["endings"], "label": label})
    if not examples:
        raise DataError(f"{where}: no examples in it; expected an object of JSON a line")
    return examples


class Prepared(NamedTuple):
    """Examples as four rows of ids each."""

    rows: list
    starts: np.ndarray  # where the ending of each row begins
    labels: np.ndarray  # (examples,): the right one of each one's four rows


def prepare(examples, tokenizer, block_size):
    """The examples as Prepared. A row longer than block_size + 1 loses the left of its context.

    A token across the join of context and ending begins the ending.
    """
    contexts = tokenizer.encode_batch([e["ctx"] for e in examples])
    wholes = tokenizer.encode_batch(
        [f"{e['ctx']} {ending}" for e in examples for ending in e["endings"]]
    )
    rows, starts = [], []
    for i, row in enumerate(wholes):
        start = len(os.path.commonprefix([contexts[i // 4].tolist(), row.tolist()]))
        if start == 0:  # nothing of the context is left: the separator stands before a text
            row = np.insert(row, 0, tokenizer.eot)
            start = 1
        cut = max(0, len(row) - (block_size + 1))
        if not cut < start < len(row):
            count = f"{len(row) - start} tokens of tokenizer={tokenizer.name}"
            raise DataError(f"example {i // 4}: an ending of {count}; expected 1 to {block_size=}")
        rows.append(row[cut:].astype(np.int64))
        starts.append(start - cut)
    labels = np.array([e["label"] for e in examples])
    return Prepared(rows, np.array(starts), labels)


def batches(rows, batch_tokens, block_size):
    """Yields (row numbers, B, T) of forwards, longest first; T in steps of 32, for few shapes."""
    left = sorted(range(len(rows)), key=lambda number: -len(rows[number]))
    while left:
        T = min(block_size, -(-(len(rows[left[0]]) - 1) // 32) * 32)
        B = min(len(left), max(1, batch_tokens // T))
        yield left[:B], B, T
        left = left[B:]


def score(model, prepared, check=lambda: None):
    """{"acc_norm", "acc": each with its standard error, "n"}, on every rank.

    check: see `over_rows`.
    """
    from run.evaluate import figure

    def summed(idx, targets):
        return model.token_losses(idx, targets).float().sum(1, keepdim=True)

    rows, starts, labels = prepared
    sums = over_rows(summed, 1, model, rows, starts, check=check).squeeze(1)
    tokens = np.array([len(row) for row in rows]) - starts
    n = len(labels)
    found = {}
    for name, of_endings in {"acc_norm": sums / tokens, "acc": sums}.items():
        right = of_endings.reshape(-1, 4).argmin(1) == labels
        found |= figure(name, right, np.ones(n), np.arange(n))
    return found | {"n": n}


def over_rows(measure, n, model, rows, starts, batch_tokens=None, check=lambda: None):
    """Float64 (rows, n), on every rank, of measure(ids, targets) -> (B, n).

    ids and targets are (B, T); targets are -100 before the row's start. check: called before each
    batch, which may end it.
    """
    import torch

    from run.logger import progress
    from scale import parallel

    rank, world = parallel.rank_and_size()
    device = parallel.device_of(model)
    batch_tokens = batch_tokens or BATCH_TOKENS[device.type]
    jobs = list(batches(rows, batch_tokens, model.cfg.block_size))
    _, B, T = jobs[-1]
    jobs += [([], B, T)] * (-len(jobs) % world)  # FSDP2 needs as many forwards on every rank
    found = torch.zeros(len(rows), n, device=device)
    for numbers, B, T in progress(jobs[rank::world], "rows scored"):
        check()
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


if __name__ == "__main__":
    run(main, Config)
