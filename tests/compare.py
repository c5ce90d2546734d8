"""What the tests of computations share: where kernels run, and comparisons of results and gradients."""

import contextlib
import os

import pytest
import torch

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
INTERPRETED = not GPU and os.environ.get("TRITON_INTERPRET") == "1"
runs_kernels = pytest.mark.skipif(not (GPU or INTERPRETED), reason="needs a GPU or TRITON_INTERPRET=1")
LLAMA = dict(mlp="swiglu", norm="rmsnorm", positions="rope", bias=False)


def slow(*case):
    return pytest.param(*case, marks=pytest.mark.slow)


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
