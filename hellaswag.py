"""HellaSwag (https://arxiv.org/abs/1905.07830): the likeliest of four endings.

    python hellaswag.py --checkpoint=out/a
    python hellaswag.py --checkpoint=out/a --against=out/b  # and a - b
    python hellaswag.py --checkpoint=out/a --show=3         # what it chose in 3
    torchrun --standalone --nproc_per_node=8 hellaswag.py --checkpoint=out/a

acc takes the ending with the lowest summed loss, acc_norm that with the lowest
mean loss per token, as other GPT-2 reproductions do (GPT-2 124M: 0.2859,
0.2955); lm-eval's divides by characters instead. Chance is 0.25.
"""

import http.client
import json
import os
import textwrap
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from configurator import columns, run, too_small
from corpus import DataError
from settings import TrainedConfig
from system.errors import is_rank_0, refuse, say
from system.files import misfits, text, write_atomic

URL = "https://raw.githubusercontent.com/rowanz/hellaswag/master/data/hellaswag_val.jsonl"
CACHE = Path.home() / ".cache" / "hellaswag"
# on a CPU a row takes a third longer with 4,096 (GPT-2 124M)
BATCH_TOKENS = {"cuda": 65_536, "cpu": 1024}


def is_text(value):
    return text(value) and value.strip() != ""


def are_four(value):
    return isinstance(value, list) and len(value) == 4 and all(map(is_text, value))


EXAMPLE = {"ctx": is_text, "endings": are_four, "label": (*range(4), *"0123")}


@dataclass
class Config(TrainedConfig):
    file: str | None = None  # a local hellaswag_val.jsonl; None: downloads it to ~/.cache/hellaswag
    limit: int | None = None  # number of examples, from the first on; None: all 10,042
    batch_tokens: int | None = None  # tokens per forward pass; None: 65,536 on a GPU, 1,024 on CPUs
    against: str | None = None  # folder of another run or checkpoint, on the same examples
    show: int = 0  # print so many of the first examples, each ending with its loss


class Unavailable(DataError):
    """No file is named, and none can be downloaded: a training run goes on without HellaSwag."""


def main(cfg):
    refuse(too_small(cfg, {"limit": 1, "batch_tokens": 1, "show": 0}))
    from run import trained
    from scale import parallel

    other = trained.other(cfg)  # a mistake in it is told before the first model is measured
    examples, prepared, sums, seconds = measure(cfg)
    score, right = scored(prepared, sums)
    lines = []
    for number, example in enumerate(examples[: cfg.show]):
        lines += [*shown(number, example, prepared, sums), ""]
    lines.append(in_words(score | dict(seconds=seconds)))
    if other:
        _, prepared, sums, _ = measure(other)
        _, others = scored(prepared, sums)
        words = [f"less {cfg.against}'s"]
        for name, hits in right.items():
            gain = hits.astype(float) - others[name]
            words.append(f"{name} {gain.mean():+.4f} ±{gain.std() / len(gain) ** 0.5:.4f}")
        lines.append(" | ".join(words))
    if is_rank_0():
        say(*lines, sep="\n")
    parallel.stop()


def measure(cfg):
    """(examples, the same as Prepared, losses of its rows, seconds) of a model."""
    from run import trained

    _, model, tokenizer, autocast = trained.load(cfg)
    examples = load(cfg.file)[: cfg.limit]
    prepared = prepare(examples, tokenizer, model.cfg.block_size)
    began = time.perf_counter()
    with autocast:
        sums = losses(model, prepared, cfg.batch_tokens)
    return examples, prepared, sums, time.perf_counter() - began


def load(path=None):
    """The examples of a file; None: of the downloaded one. Raises DataError or its Unavailable."""
    path = download() if path is None else Path(path)
    try:
        return parse(path.read_bytes(), path)
    except OSError as error:
        raise DataError(
            f"{path}: {error.strerror}; name another file, or none to download it"
        ) from None


def parse(data, where):
    """[{"ctx", "endings", "label"}] of a file's bytes; only a newline ends a line, not U+2028."""
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
        examples.append(
            {k: example[k] for k in ("ctx", "endings")} | {"label": int(example["label"])}
        )
    if not examples:
        raise DataError(f"{where}: no examples in it; expected one JSON object a line")
    return examples


def download(folder=CACHE, url=URL):
    """Downloads the validation file once and returns its path.

    A reply that does not parse is not kept.
    """
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


class Prepared(NamedTuple):
    """Examples as four rows of ids each."""

    rows: list
    starts: np.ndarray  # where the ending of each row begins
    labels: np.ndarray = None  # (examples,): the right one of each one's four rows
    truncated: int = 0  # rows that lost the left of their context
    # spanned: rows with a token across the join of context and ending, which then begins the ending
    spanned: int = 0


def prepare(examples, tokenizer, block_size):
    """The examples as Prepared. A row longer than block_size + 1 loses the left of its context."""
    contexts = tokenizer.encode_batch([e["ctx"] for e in examples])
    wholes = tokenizer.encode_batch(
        [f"{e['ctx']} {ending}" for e in examples for ending in e["endings"]]
    )
    rows, starts = [], []
    truncated = spanned = 0
    for i, row in enumerate(wholes):
        context, where = contexts[i // 4], f"example {i // 4}"
        start = len(os.path.commonprefix([context.tolist(), row.tolist()]))
        spanned += start < len(context)
        if start == len(row):
            raise DataError(f"{where}: an ending has no token in tokenizer={tokenizer.name}")
        if start == 0:  # nothing of the context is left: the separator stands before a text
            row = np.insert(row, 0, tokenizer.eot)
            start = 1
        cut = max(0, len(row) - (block_size + 1))
        if cut >= start:
            raise DataError(
                f"{where}: an ending of {len(row) - start} tokens exceeds {block_size=}"
            )
        truncated += cut > 0
        rows.append(row[cut:].astype(np.int64))
        starts.append(start - cut)
    labels = np.array([e["label"] for e in examples])
    return Prepared(rows, np.array(starts), labels, truncated, spanned)


def batches(prepared, batch_tokens, block_size):
    """Yields (row numbers, B, T) of forwards, longest first; T in steps of 32, for few shapes."""
    by_width = {}
    for number, row in enumerate(prepared.rows):
        T = min(block_size, -(-(len(row) - 1) // 32) * 32)
        by_width.setdefault(T, []).append(number)
    for T, numbers in sorted(by_width.items(), reverse=True):
        B = min(len(numbers), max(1, batch_tokens // T))
        for first in range(0, len(numbers), B):
            yield numbers[first : first + B], B, T


def losses(model, prepared, batch_tokens=None, stop=lambda: False):
    """Float64 (rows,), on every rank: the summed loss of each row's ending, in nats.

    stop(): whether to leave the rest.
    """

    def summed(idx, targets):
        return model.token_losses(idx, targets).float().sum(1, keepdim=True)

    return over_rows(summed, 1, model, prepared, batch_tokens, stop)[:, 0]


def over_rows(measure, n, model, prepared, batch_tokens=None, stop=lambda: False):
    """Float64 (rows, n), on every rank, of measure(ids, targets) -> (B, n).

    ids and targets are (B, T); targets are -100 before endings.
    """
    import torch

    from run.logger import progress
    from scale import parallel

    rank, world = parallel.rank_and_size()
    device = parallel.device_of(model)
    batch_tokens = batch_tokens or BATCH_TOKENS.get(device.type, 4096)
    jobs = list(batches(prepared, batch_tokens, model.cfg.block_size))
    _, B, T = jobs[-1]
    missing = -len(jobs) % world  # FSDP2 needs as many forwards on every rank
    jobs += [([], B, T)] * missing
    found = torch.zeros(len(prepared.rows), n, device=device)
    for numbers, B, T in progress(jobs[rank::world], "rows scored", stop=stop):
        idx = torch.zeros(B, T, dtype=torch.long)
        targets = torch.full((B, T), -100)  # no loss
        for b, number in enumerate(numbers):
            row, start = torch.from_numpy(prepared.rows[number]), prepared.starts[number]
            idx[b, : len(row) - 1] = row[:-1]
            targets[b, start - 1 : len(row) - 1] = row[start:]
        with torch.no_grad():
            values = measure(idx.to(device), targets.to(device))
        found[numbers] = values[: len(numbers)].float()
    return parallel.sum_over_ranks(found).cpu().double().numpy()


def scored(prepared, sums):
    """(the score as a dict, {name: which examples are right}); sums: see `losses`."""
    means = sums / ending_tokens(prepared)
    right = {
        "acc_norm": means.reshape(-1, 4).argmin(1) == prepared.labels,
        "acc": sums.reshape(-1, 4).argmin(1) == prepared.labels,
    }
    score = {name: float(hits.mean()) for name, hits in right.items()}
    score |= dict(n=len(prepared.labels), truncated=prepared.truncated, spanned=prepared.spanned)
    return score, right


def ending_tokens(prepared):
    """Int (rows,): tokens of each row's ending."""
    return np.array([len(row) for row in prepared.rows]) - prepared.starts


def shown(number, example, prepared, sums):
    """Lines for a person: an example, its endings' losses, which is right and which are chosen."""
    rows = slice(4 * number, 4 * number + 4)
    own = sums[rows]
    means = own / ending_tokens(prepared)[rows]
    chosen = {"right": example["label"], "acc": own.argmin(), "acc_norm": means.argmin()}
    lines = textwrap.wrap(f"example {number}: {example['ctx']}", columns())
    lines.append(f"  {'right, chosen by':<20} {'loss':>8} {'a token':>8}  ending")
    for i, ending in enumerate(example["endings"]):
        marks = ", ".join(mark for mark, place in chosen.items() if place == i)
        words = f"  {marks:<20} {own[i]:8.2f} {means[i]:8.3f}  {ending}"
        lines += textwrap.wrap(words, columns(), subsequent_indent=" " * 42)
    return lines


def in_words(score):
    """A line for the console; after ±, the standard errors of the proportions."""
    n = score["n"]
    parts = []
    for name in ("acc_norm", "acc"):
        p = score[name]
        parts.append(f"{name} {p:.4f} ±{(p * (1 - p) / n) ** 0.5:.4f}")
    counts = f"{n:,} examples, rows cut: {score['truncated']}"
    if score["spanned"]:
        counts += f", a token spans the join: {score['spanned']}"
    return " | ".join([*parts, counts, f"{score['seconds']:.1f} s"])


if __name__ == "__main__":
    run(main, Config)
