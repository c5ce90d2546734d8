"""Where kernels run, cases with marks, and comparisons of results, gradients and runs of train.py."""

import contextlib
import functools
import os
import shutil

import pytest
import torch
from conftest import load_checkpoint, losses, read_log, train_here

from settings import GPTConfig

CPU, GPU = torch.device("cpu"), torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
INTERPRETED = not GPU and os.environ.get("TRITON_INTERPRET") == "1"
runs_kernels = pytest.mark.skipif(not (GPU or INTERPRETED), reason="needs a GPU or TRITON_INTERPRET=1")
LLAMA = dict(mlp="swiglu", norm="rmsnorm", positions="rope", bias=False)

# cases of a parametrized test with marks: slow(*case)
slow = functools.partial(pytest.param, marks=pytest.mark.slow)
gpt2 = functools.partial(pytest.param, marks=pytest.mark.gpt2)
repeated = functools.partial(pytest.param, marks=[pytest.mark.repeated, pytest.mark.slow])


def small(**changes):
    """The settings of a model that costs a test little."""
    return GPTConfig(**dict(vocab_size=100, block_size=16, n_layer=2, n_head=4, n_embd=32) | changes)


def error(a, b):
    """Relative error of a against b in the Frobenius norm."""
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def with_gradients(function, inputs, dy):
    """[function(*inputs), the gradient of each input] for a gradient of the result, which takes its dtype."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    y = function(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy.to(y.dtype))]


def gradients(model, *batch, autocast=None):
    """(loss, {parameter: its gradient}) of a model on one batch."""
    model.zero_grad()
    with autocast or contextlib.nullcontext():
        loss = model(*batch)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


def copied(run, step, to):
    """A run's folder with one checkpoint of another run."""
    shutil.copytree(run / f"step_{step:08d}", to / f"step_{step:08d}")
    return to


def same_run(one, other, atol=2e-5):
    """Asserts that two runs have the same training and validation losses, samples, and weights at the end."""
    texts = [[line["texts"] for line in read_log(run) if line["kind"] == "sample"] for run in (one, other)]
    assert texts[0] == texts[1]
    for kind in ("train", "val"):
        a, b = losses(read_log(one), kind), losses(read_log(other), kind)
        assert a == pytest.approx(b, rel=4e-6) and len(a) > 2
    both = [load_checkpoint(run / f"step_{max(a):08d}")[0]["model"] for run in (one, other)]
    torch.testing.assert_close(*both, rtol=0, atol=atol)


def same_end(folder, whole, steps=(4, 5, 6)):
    """Asserts that a resumed run did these steps, with the losses of the uninterrupted one."""
    expected = losses(read_log(whole))
    assert losses(read_log(folder)) == pytest.approx({step: expected[step] for step in steps}, rel=4e-6)


def resumed_bitwise(data_dir, folder, **settings):
    """Asserts that a run goes on from step 5 as if it had not ended; its last checkpoint's tensors."""
    settings = dict(save_interval=5, keep_last=9, eval_interval=5, **settings)
    whole = train_here(data_dir, folder / "a", **settings)
    again = train_here(data_dir, copied(folder / "a", 5, folder / "b"), resume="auto", **settings)
    for kind, steps in dict(train=range(6, 13), val=(10, 12)).items():
        assert losses(again, kind) == {step: losses(whole, kind)[step] for step in steps}
    a, b = (load_checkpoint(folder / run / "step_00000012")[0] for run in "ab")
    torch.testing.assert_close(a, b, rtol=0, atol=0)
    return a
