"""HellaSwag (https://arxiv.org/abs/1905.07830): the validation file, its rows of tokens, and a model's score.

An example has a context and four endings, one of them right. Each of the four rows is the context and an ending; the
model's choice is the ending with the lowest loss, summed over its tokens (acc) or their mean (acc_norm).
"""

import contextlib
import http.client
import json
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from configurator import UserError
from run import files
from run.logger import progress
from scale import parallel

URL = "https://raw.githubusercontent.com/rowanz/hellaswag/master/data/hellaswag_val.jsonl"
CACHE = Path.home() / ".cache" / "hellaswag"
# CPU: GPT-2 124M takes 0.17 s a row on one core, 0.23 s with 4,096 tokens, 0.50 s with those and few shapes, and 0.20 s
# where each row is a forward
BATCH_TOKENS = {"cuda": 65_536, "cpu": 1024}


class HellaSwagError(UserError):
    exit_code = 3


class Unavailable(HellaSwagError):
    """No file is named and none can be downloaded: a training run continues without HellaSwag."""


def load(path=None):
    """The examples of a validation file, dicts with ctx, endings and label; path=None: of the downloaded file.

    Raises Unavailable, or HellaSwagError for a named file that is missing or with the number of a damaged line.
    """
    path = download() if path is None else Path(path)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise HellaSwagError(f"{path}: {error.strerror}; name another file, or none to download it") from None
    return parse_all(data, path)


def parse_all(data, where):
    """The examples in the bytes of a file. Only a newline ends a line: str.splitlines would cut at U+2028 too."""
    lines = enumerate(data.split(b"\n"), 1)
    examples = [parse(line, f"{where}:{number}") for number, line in lines if line.strip()]
    if not examples:
        raise HellaSwagError(f"{where}: no examples in it; expected one JSON object a line")
    return examples


def parse(line, where):
    """The example in a line of JSON. Raises HellaSwagError."""
    try:
        example = json.loads(line)
        ctx, endings, label = example["ctx"], example["endings"], example["label"]
        label = int(label) if isinstance(label, str) else label
    except (ValueError, KeyError, TypeError) as error:  # UnicodeDecodeError is a ValueError
        raise HellaSwagError(f"{where}: not an example with ctx, endings and label ({error!r})") from None
    strings = isinstance(endings, list) and all(isinstance(text, str) for text in [ctx, *endings])
    if not strings or not ctx:  # without a context nothing predicts an ending's first token
        raise HellaSwagError(f"{where}: ctx must be a string, not empty, and endings a list of strings")
    if len(endings) != 4 or type(label) is not int or not 0 <= label < 4:
        raise HellaSwagError(
            f"{where}: expected 4 endings and a label from 0 to 3, got {len(endings)} and {label!r}"
        )
    return {"ctx": ctx, "endings": endings, "label": label}


def download(folder=CACHE, url=URL, tries=3):
    """Downloads the validation file once and returns its path. A reply that does not parse is not kept."""
    path = Path(folder) / "hellaswag_val.jsonl"
    for attempt in range(0 if path.exists() else tries):
        try:
            with urllib.request.urlopen(url, timeout=20) as reply:
                data = reply.read()
            parse_all(data, url)
            path.parent.mkdir(parents=True, exist_ok=True)
            files.write_atomic(path, data)  # several ranks may download at the same time
            break
        except (OSError, http.client.HTTPException, HellaSwagError) as error:  # urllib's errors are OSErrors
            failure, wait = error, str((getattr(error, "headers", None) or {}).get("Retry-After"))
            time.sleep(min(int(wait), 30) if wait.isdigit() else attempt)
    if path.exists():
        return path
    raise Unavailable(
        f"{url} cannot be downloaded ({failure}); give a local one, hellaswag.py --file or train.py --hellaswag_file"
    )


@dataclass
class Prepared:
    """Tokenized examples, four rows each."""

    rows: list  # ids of context and ending, int64 arrays
    starts: list  # index in each row at which the ending begins
    labels: np.ndarray  # index of the right ending of each example
    truncated: int  # rows that lost the left of their context


def prepare(examples, tokenizer, block_size):
    """The examples as Prepared. A row longer than block_size + 1 loses the left of its context."""
    contexts = tokenizer.encode_batch([e["ctx"] for e in examples])
    endings = tokenizer.encode_batch([" " + ending for e in examples for ending in e["endings"]])
    rows, starts, truncated = [], [], 0
    for i, ending in enumerate(endings):
        context = contexts[i // 4]
        cut = max(0, len(context) + len(ending) - (block_size + 1))
        if cut >= len(context):
            raise HellaSwagError(
                f"example {i // 4}: an ending of {len(ending)} tokens does not fit {block_size=}"
            )
        truncated += cut > 0
        rows.append(np.concatenate([context[cut:], ending]).astype(np.int64))
        starts.append(len(context) - cut)
    return Prepared(rows, starts, np.array([e["label"] for e in examples]), truncated)


def batches(prepared, batch_tokens, block_size, few_shapes=True):
    """Yields (row numbers, B, T) for each forward, of rows in order of length.

    few_shapes: T is a multiple of 32, for all rows of about that length and at most one batch that is not full; else
    a batch is as long as its longest row.
    """
    width = {i: len(row) - 1 for i, row in enumerate(prepared.rows)}
    if few_shapes:
        width = {i: min(block_size, -(-T // 32) * 32) for i, T in width.items()}
    order = sorted(width, key=width.get)
    while order:
        T = width[order[-1]]  # longest first: if memory is short, the first forward fails
        B = max(1, batch_tokens // T)
        fitting = [i for i in order[-B:] if width[i] == T or not few_shapes]
        yield fitting, B if few_shapes else len(fitting), T
        order = order[: len(order) - len(fitting)]


def evaluate(model, prepared, device, batch_tokens=None, autocast=None, few_shapes=None, stop=lambda: False):
    """{"acc", "acc_norm", "n", "truncated", "seconds"} over all examples, the same on every rank.

    model(idx, targets, "none") returns the loss of each token, (B, T), 0 where the target is -100. The batches are
    divided among the ranks, and all ranks run equally many forwards, since FSDP2's collectives need all of them.
    few_shapes: see `batches`; None: on all devices but the CPU, for which padding costs more than new shapes. stop():
    whether to end before all batches; the score is then worth nothing.
    """
    began = time.perf_counter()
    rank, world = parallel.rank_and_size()
    kind = torch.device(device).type
    batch_tokens = batch_tokens or BATCH_TOKENS.get(kind, 4096)
    few_shapes = kind != "cpu" if few_shapes is None else few_shapes
    jobs = list(batches(prepared, batch_tokens, model.cfg.block_size, few_shapes))
    jobs += [([], *jobs[-1][1:])] * (-len(jobs) % world)
    losses = torch.zeros(len(prepared.rows), dtype=torch.float32, device=device)
    for numbers, B, T in progress(jobs[rank::world], "HellaSwag", stop=stop):
        idx, targets = pad(prepared, numbers, B, T)
        with torch.no_grad(), autocast or contextlib.nullcontext():
            loss = model(idx.to(device, non_blocking=True), targets.to(device, non_blocking=True), "none")
        losses[torch.tensor(numbers, dtype=torch.long, device=device)] = loss.float().sum(1)[: len(numbers)]
    parallel.sum_over_ranks(losses)
    lengths = np.array([len(row) - start for row, start in zip(prepared.rows, prepared.starts)]).reshape(
        -1, 4
    )
    sums = losses.cpu().double().numpy().reshape(-1, 4)
    return {
        "acc": float((sums.argmin(1) == prepared.labels).mean()),
        "acc_norm": float(((sums / lengths).argmin(1) == prepared.labels).mean()),
        "n": len(prepared.labels),
        "truncated": prepared.truncated,
        "seconds": time.perf_counter() - began,
    }


def in_words(score):
    """A line for the console; after ±, the standard errors of the two proportions."""
    acc_norm, acc = (
        f"{k} {(p := score[k]):.4f} ±{(p * (1 - p) / score['n']) ** 0.5:.4f}" for k in ("acc_norm", "acc")
    )
    return (
        f"{acc_norm} | {acc} | {score['n']:,} examples, {score['truncated']} cut | {score['seconds']:.1f} s"
    )


def pad(prepared, numbers, B, T):
    """(idx, targets), int64 (B, T). Rows are padded on the right; targets are -100 except for the endings' tokens."""
    idx, targets = np.zeros((B, T), np.int64), np.full((B, T), -100, np.int64)
    for b, i in enumerate(numbers):
        row, start = prepared.rows[i], prepared.starts[i]
        idx[b, : len(row) - 1] = row[:-1]
        targets[b, start - 1 : len(row) - 1] = row[start:]
    return torch.from_numpy(idx), torch.from_numpy(targets)
