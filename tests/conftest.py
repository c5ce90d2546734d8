"""Shared by the tests: small shards of real text, and runs of train.py in this process or under torchrun."""

import json
import os
import socket
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton reads it when it is first imported

ROOT = Path(__file__).parent.parent


def write_shard(path, tokens, dtype=np.uint16):
    """An llm.c shard: 256 int32 of header, then the tokens."""
    magic, version = {np.uint16: (20240520, 1), np.uint32: (20240801, 7)}[dtype]
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(tokens)
    path.write_bytes(header.tobytes() + np.asarray(tokens, dtype).tobytes())
    return path


def read_rows(loader, steps):
    """(steps*B, T+1) rows out of a loader's batches."""
    out = []
    for _ in range(steps):
        x, y = loader.next()
        assert x.shape == y.shape == (loader.B, loader.T) and x.dtype == y.dtype == torch.int64
        assert torch.equal(x[:, 1:], y[:, :-1])
        out.append(torch.cat([x, y[:, -1:]], 1).numpy())
    return np.concatenate(out)


def one_line(error):
    """The text of a pytest.raises, which is to be one line."""
    text = str(error.value)
    assert "\n" not in text and text
    return text


def stdlib_bytes(count):
    """The first `count` byte tokens of Python's own source, a separator (256) before each file."""
    tokens = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        tokens += [256, *path.read_bytes()]
        if len(tokens) >= count:
            return tokens[:count]
    raise AssertionError("the standard library is smaller than this test expects")


@pytest.fixture
def products(monkeypatch):
    """Without a GPU the products of cublas.py are PyTorch's, in float32."""
    if not torch.cuda.is_available():
        stand_in_for_cublas(monkeypatch.setattr)


def stand_in_for_cublas(put=setattr):
    import cublas
    import model

    def matmul(a, b, out, bias=None, gelu=None, dgelu=None, accumulate=False, scales=None, fast=False, tune=True):
        product = a.float() @ b.float()
        if scales is not None:
            product *= scales[0] * scales[1]
        if bias is not None:
            product += bias
        if gelu is not None:
            product = model.gelu(gelu.copy_(product).float())
        if dgelu is not None:
            product *= torch.ops.aten.gelu_backward(torch.ones_like(product), dgelu.float(), approximate="tanh")
        return out.add_(product) if accumulate else out.copy_(product)

    put(cublas, "matmul", matmul)


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory):
    """Two training shards and a validation shard of a few thousand byte tokens."""
    folder = tmp_path_factory.mktemp("shards")
    tokens = stdlib_bytes(15_000)
    write_shard(folder / "py_val_000000.bin", tokens[:3_001])
    write_shard(folder / "py_train_000001.bin", tokens[3_001:9_000])
    write_shard(folder / "py_train_000002.bin", tokens[9_000:])
    return folder


def flags(data_dir, out_dir, **settings):
    """Words of the test recipe on byte shards."""
    base = dict(data_dir=data_dir, out_dir=out_dir, vocab_size=257, device="cpu", eval_interval=0, tokenizer="bytes")
    return ["config/test.py", *(f"--{k}={v}" for k, v in {**base, **settings}.items())]


def train_here(data_dir, out_dir, **settings):
    """Runs train.main in this process; returns the lines of its log.jsonl."""
    import train
    from configurator import configure

    before = os.getcwd()
    os.chdir(ROOT)
    try:
        train.main(configure(train.Config, flags(data_dir, out_dir, **settings)))
    finally:
        os.chdir(before)
    return read_log(out_dir)


def train_ranks(ranks, words, script="train.py", **options):
    """Runs a script under torchrun on gloo (`ranks` processes), or plainly for 0; returns the CompletedProcess."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    torchrun = ["-m", "torch.distributed.run", f"--nproc_per_node={ranks}", f"--master_port={port}"] if ranks else []
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, *torchrun, script, *words]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300, **options)


def read_log(out_dir):
    return [json.loads(line) for line in (Path(out_dir) / "log.jsonl").read_text().splitlines()]


def losses(log, kind="train"):
    """{step: loss}; of a step logged twice, the later."""
    return {line["step"]: line["loss"] for line in log if line["kind"] == kind}
