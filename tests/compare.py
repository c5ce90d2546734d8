"""Where kernels run, cases with marks, comparisons of results, gradients and runs of train.py."""

import contextlib
import functools
import math
import os
import shutil

import pytest
import torch
from conftest import load_checkpoint, losses, read_log, train_here
from saved import moments_of

import optim
from run.build import build_model
from scale.parallel import World
from settings import Config, GPTConfig

CPU, GPU = torch.device("cpu"), torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
INTERPRETED = not GPU and os.environ.get("TRITON_INTERPRET") == "1"
runs_kernels = pytest.mark.skipif(
    not (GPU or INTERPRETED), reason="needs a GPU or TRITON_INTERPRET=1"
)
LLAMA = dict(mlp="swiglu", norm="rmsnorm", positions="rope", bias=False)

# cases of a parametrized test with marks: slow(*case)
slow = functools.partial(pytest.param, marks=pytest.mark.slow)
gpt2 = functools.partial(pytest.param, marks=pytest.mark.gpt2)
repeated = functools.partial(pytest.param, marks=[pytest.mark.repeated, pytest.mark.slow])
# cases of which others say much the same, and a CPU takes long for each
costly = slow if GPU else repeated


def small(**changes):
    """The settings of a model that costs a test little."""
    own = dict(vocab_size=100, block_size=16, n_layer=2, n_head=4, n_embd=32)
    return GPTConfig(**own | changes)


def error(a, b):
    """Relative error of a against b in the Frobenius norm."""
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def with_gradients(function, inputs, dy):
    """[function(*inputs), each input's gradient]; dy: the result's gradient, cast to its dtype."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    y = function(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy.to(y.dtype))]


def gradients(model, *batch, autocast=None):
    """(loss, {parameter: its gradient}) of a model on one batch."""
    model.zero_grad()
    with autocast or contextlib.nullcontext():
        loss, _, _ = model(*batch)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


def take_step(job, next_batch, lr):
    """A step of train.Training without the loop's figures.

    Returns (this rank's mean loss over its targets, the norm of the gradients over all ranks).
    """
    optim.set_learning_rate(job.state.optimizer, lr)
    totals = job.accumulate(next_batch)
    norm = job.normalize_and_clip(totals)
    loss = totals[0] * job.rank_step_tokens / totals[1].clamp(min=1)
    job.update(totals, norm)
    return loss, norm


def copied(run, step, to):
    """A run's folder with one checkpoint of another run."""
    shutil.copytree(run / f"step_{step:08d}", to / f"step_{step:08d}")
    return to


def same_run(one, other, **bounds):
    """Asserts that two runs, `one` of one process, log the same losses, samples and end `alike`."""
    texts = lambda run: [line.get("texts") for line in read_log(run) if line["kind"] == "sample"]
    assert texts(one) == texts(other)
    for kind in ("train", "val"):
        a, b = losses(read_log(one), kind), losses(read_log(other), kind)
        assert a == pytest.approx(b, rel=4e-6) and len(a) > 2
    found, expected = (last_checkpoint(run)[0] for run in (other, one))
    alike(found, expected, initial_weights(one), **bounds)


def last_checkpoint(run):
    """(tensors, state) after the last step of a run."""
    return load_checkpoint(run / f"step_{max(losses(read_log(run))):08d}")


def initial_weights(run):
    """{name: weight} with which a run of one process began, drawn or loaded again."""
    cfg = Config(**last_checkpoint(run)[1]["config"])
    return dict(build_model(cfg, World(rank=0, size=1, device=CPU))[0].named_parameters())


def alike(found, expected, start, moments=1e-4, weights=5e-3):
    """Asserts that two runs' checkpoints differ in each tensor by rounding alone.

    start: the weights from which both began.

    First moments are sums of gradients. Their difference, relative in the norm, may be `moments`: a
    gradient that is 1% too large shows there. It does not in the weights, since AdamW and Muon
    ignore its scale. AdamW8bit's codes are not compared, since rounding may choose the next one,
    1/8 away.

    Weights are compared relative to how far they moved; one that did not move is to be equal. AdamW
    divides a gradient by its size: where one is all but cancelled, its rounding moves a weight as
    far as others move in a step. With AVX-512, AVX2 and plain code the largest ratios were 7e-6
    and 3e-4.

    Errors of moments below NOISE of the norm of all moments are none; where a tensor has no larger
    ones, its weights follow rounding alone, as of k's bias, which without RoPE moves no loss, and
    are not compared.
    """
    a, b = (moments_of(tensors) for tensors in (found, expected))
    assert a.keys() == b.keys()
    assert found["model"].keys() == expected["model"].keys() == start.keys()
    noise = NOISE * sum(norm(moment) ** 2 for moment in b.values()) ** 0.5
    wrong = {}
    for name, moment in b.items():
        off = norm(a[name] - moment)
        if not off <= moments * norm(moment) + noise:  # nor NaN
            wrong[f"moment of {name}"] = ratio(off, norm(moment))
    for name, weight in expected["model"].items():
        off, moved = norm(found["model"][name] - weight), norm(weight - start[name])
        follows_rounding = name in b and 0 < max(norm(a[name]), norm(b[name])) <= noise
        if not (off <= weights * moved or follows_rounding):
            wrong[name] = ratio(off, moved)
    assert not wrong, f"differ by more than rounding, relative: {wrong}"


NOISE = 1e-8  # a sixth of float32's rounding


def norm(tensor):
    return tensor.detach().double().norm().item()


def ratio(a, b):
    return a / b if b else math.inf


def same_end(folder, whole, steps=(4, 5, 6)):
    """Asserts that a resumed run did these steps, with the losses of the uninterrupted one."""
    uninterrupted = losses(read_log(whole))
    expected = {step: uninterrupted[step] for step in steps}
    assert losses(read_log(folder)) == pytest.approx(expected, rel=4e-6)


def resumed_bitwise(data_dir, folder, **settings):
    """Asserts that a run goes on from step 5 as if it had not ended.

    Returns the tensors of its last checkpoint.
    """
    settings = dict(save_interval=5, keep_last=9, eval_interval=5, **settings)
    whole = train_here(data_dir, folder / "a", **settings)
    again = train_here(data_dir, copied(folder / "a", 5, folder / "b"), resume="auto", **settings)
    for kind, steps in dict(train=range(6, 13), val=(5, 10, 12)).items():
        assert losses(again, kind) == {step: losses(whole, kind)[step] for step in steps}
    a, b = (load_checkpoint(folder / run / "step_00000012")[0] for run in "ab")
    torch.testing.assert_close(a, b, rtol=0, atol=0)
    return a
