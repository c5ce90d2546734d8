"""HellaSwag (https://arxiv.org/abs/1905.07830): which of four endings does the model find likeliest?

    python hellaswag.py --checkpoint=out/gpt2_124m
    python hellaswag.py --pretrained=gpt2 --file=hellaswag_val.jsonl

acc takes the ending with the lowest summed loss, acc_norm the one with the lowest mean loss a token, as the GPT-2
reproductions count it (GPT-2 124M: 0.2859 and 0.2955); lm-eval's acc_norm divides by bytes instead. Chance is 0.25.
"""

import contextlib
import http.client
import json
import os
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist

from configurator import UserError, refuse, run, too_small
from logger import progress

URL = "https://raw.githubusercontent.com/rowanz/hellaswag/master/data/hellaswag_val.jsonl"
CACHE = Path.home() / ".cache" / "hellaswag"


@dataclass
class Config:
    checkpoint: str | None = None  # a run's or a checkpoint's folder
    pretrained: str | None = None  # instead: Hugging Face weights, a folder or a hub name
    tokenizer: str | None = None  # None: the one that the checkpoint was trained with (gpt2 for pretrained)
    file: str | None = None  # a local hellaswag_val.jsonl; None: downloaded once and kept
    limit: int | None = None  # only the first so many examples; None: all 10,042
    batch_tokens: int | None = None  # tokens a forward; None: 65,536 on a GPU, 4,096 elsewhere
    device: str = "auto"  # auto, cpu, cuda, mps
    precision: Literal["auto", "fp32", "tf32", "bf16", "fp16"] = "auto"  # auto: bf16 where the GPU has it


class HellaSwagError(UserError):
    exit_code = 3


class Unavailable(HellaSwagError):
    """The file is not there and can't be fetched: a training run goes on without it."""


def load(path=None):
    """The examples of a validation file (raw or cleaned), dicts with ctx, endings and label; None: the downloaded one.

    Raises Unavailable, or HellaSwagError naming the line that is wrong.
    """
    path = download() if path is None else Path(path)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise Unavailable(f"{path}: {error.strerror}; give a local file, or none to download it") from None
    return parse_all(data, path)


def parse_all(data, where):
    """The examples in the bytes of a file. A newline alone ends a line: splitlines would cut at U+2028 too."""
    lines = enumerate(data.split(b"\n"), 1)
    examples = [parse(line, f"{where}:{number}") for number, line in lines if line.strip()]
    if not examples:
        raise HellaSwagError(f"{where}: no examples in it; expected one JSON object a line")
    return examples


def parse(line, where):
    try:
        example = json.loads(line)
        ctx, endings, label = example["ctx"], example["endings"], example["label"]
        label = int(label) if isinstance(label, str) else label
    except (ValueError, KeyError, TypeError) as error:  # ValueError: UnicodeDecodeError too
        raise HellaSwagError(f"{where}: not an example with ctx, endings and label ({error!r})") from None
    if not isinstance(ctx, str) or not isinstance(endings, list) or not all(isinstance(e, str) for e in endings):
        raise HellaSwagError(f"{where}: ctx must be a text and endings a list of texts")
    if not ctx:
        raise HellaSwagError(f"{where}: ctx is empty, so nothing precedes an ending's first token")
    if len(endings) != 4 or type(label) is not int or not 0 <= label < 4:
        raise HellaSwagError(f"{where}: expected 4 endings and a label from 0 to 3, got {len(endings)} and {label!r}")
    return {"ctx": ctx, "endings": endings, "label": label}


def download(folder=CACHE, url=URL, tries=3):
    """Fetches the raw validation file once; returns its path. What is no such file (a proxy's page) is not kept."""
    path = Path(folder) / "hellaswag_val.jsonl"
    for attempt in range(tries):
        if path.exists():
            return path
        try:
            with urllib.request.urlopen(url, timeout=20) as reply:
                data = reply.read()
            parse_all(data, url)
            path.parent.mkdir(parents=True, exist_ok=True)
            aside = path.with_name(f"{path.name}.{os.getpid()}")
            aside.write_bytes(data)
            os.replace(aside, path)  # ranks may fetch at the same time: each leaves a whole file
        except (OSError, http.client.HTTPException, HellaSwagError) as error:  # urllib's own are OSErrors
            failure = error
            time.sleep(attempt)
    if path.exists():
        return path
    raise Unavailable(f"{url} can't be fetched ({failure}); give a local copy of the file")


@dataclass
class Prepared:
    """Rows of all examples' endings, four after another: context and ending as ids, and where the ending begins."""

    rows: list
    starts: list
    labels: np.ndarray
    truncated: int


def prepare(examples, tokenizer, block_size):
    """Tokenizes once. A row longer than block_size + 1 loses the left of its context; how many is counted."""
    contexts = tokenizer.encode_batch([e["ctx"] for e in examples])
    endings = tokenizer.encode_batch([" " + ending for e in examples for ending in e["endings"]])
    rows, starts, truncated = [], [], 0
    for i, ending in enumerate(endings):
        context = contexts[i // 4]
        cut = max(0, len(context) + len(ending) - (block_size + 1))
        if cut >= len(context):
            raise HellaSwagError(f"example {i // 4}: an ending of {len(ending)} tokens does not fit {block_size=}")
        truncated += cut > 0
        rows.append(np.concatenate([context[cut:], ending]).astype(np.int64))
        starts.append(len(context) - cut)
    labels = np.array([e["label"] for e in examples])
    return Prepared(rows, starts, labels, truncated)


def batches(prepared, batch_tokens, block_size):
    """(row numbers, T) of each forward: rows by length, T a multiple of 32, so that there are few shapes."""
    width = {i: min(block_size, -(-(len(row) - 1) // 32) * 32) for i, row in enumerate(prepared.rows)}
    order = sorted(width, key=width.get)
    while order:
        T = width[order[-1]]  # longest first: what does not fit in memory fails at once
        B = max(1, batch_tokens // T)
        fitting = [i for i in order[-B:] if width[i] == T]
        yield fitting, B, T
        order = order[: len(order) - len(fitting)]


@torch.no_grad()
def evaluate(model, prepared, device, batch_tokens=None, autocast=None):
    """{"acc", "acc_norm", "n", "truncated", "seconds"} over all examples, the batches shared among the ranks.

    model(idx, targets, "none") gives the loss a token, (B, T), 0 where the target is -100. All ranks run equally many
    forwards. Every rank returns the same figures.
    """
    began = time.perf_counter()
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    batch_tokens = batch_tokens or (65_536 if torch.device(device).type == "cuda" else 4096)
    jobs = list(batches(prepared, batch_tokens, model.cfg.block_size))
    jobs += [([], *jobs[-1][1:])] * (-len(jobs) % world)
    losses = torch.zeros(len(prepared.rows), dtype=torch.float32, device=device)
    for numbers, B, T in progress(jobs[rank::world], "HellaSwag"):
        idx, targets = pad(prepared, numbers, B, T)
        with autocast or contextlib.nullcontext():
            loss = model(idx.to(device, non_blocking=True), targets.to(device, non_blocking=True), "none")
        losses[torch.tensor(numbers, dtype=torch.long, device=device)] = loss.float().sum(1)[: len(numbers)]
    if world > 1:
        dist.all_reduce(losses)
    lengths = np.array([len(row) - start for row, start in zip(prepared.rows, prepared.starts)]).reshape(-1, 4)
    sums = losses.cpu().double().numpy().reshape(-1, 4)
    return {
        "acc": float((sums.argmin(1) == prepared.labels).mean()),
        "acc_norm": float(((sums / lengths).argmin(1) == prepared.labels).mean()),
        "n": len(prepared.labels),
        "truncated": prepared.truncated,
        "seconds": time.perf_counter() - began,
    }


def pad(prepared, numbers, B, T):
    """(idx, targets), int64 (B, T): rows padded on the right, unseen by a causal model; -100 but for endings."""
    idx, targets = np.zeros((B, T), np.int64), np.full((B, T), -100, np.int64)
    for b, i in enumerate(numbers):
        row, start = prepared.rows[i], prepared.starts[i]
        idx[b, : len(row) - 1] = row[:-1]
        targets[b, start - 1 : len(row) - 1] = row[start:]
    return torch.from_numpy(idx), torch.from_numpy(targets)


def main(cfg):
    import parallel
    import sample

    refuse(too_small(cfg, {"limit": 1, "batch_tokens": 1}))
    device = parallel.pick_device(cfg.device)
    precision, _ = parallel.pick_precision(cfg.precision, device)
    autocast = parallel.autocast(precision, device)
    model, saved = sample.load(cfg, device)
    tokenizer = sample.load_tokenizer(cfg, model, saved)
    prepared = prepare(load(cfg.file)[: cfg.limit], tokenizer, model.cfg.block_size)
    score = evaluate(model.eval(), prepared, device, cfg.batch_tokens, autocast)
    print("acc_norm {acc_norm:.4f} | acc {acc:.4f} | {n:,} examples, {truncated} cut | {seconds:.1f} s".format(**score))


if __name__ == "__main__":
    run(main, Config)
