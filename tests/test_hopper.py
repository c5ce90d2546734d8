"""hopper.py against float64 on fresh random inputs."""

import pytest
import torch
import torch.nn.functional as F

import fused
import hopper

GPU = torch.device("cuda", 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or not hopper.available(GPU), reason="needs a Hopper GPU"),
]
# one tile; several rounds of both warpgroups; ragged in each direction; fewer rows than a warp's; K shorter than a step
SHAPES = [(256, 192, 64), (20_000, 3072, 768), (1000, 1000, 200), (37, 72, 8), (5000, 4096, 1024), (513, 200, 3072)]


def randn(*shape, std=1.0):
    return (torch.randn(shape, device=GPU) * std).bfloat16()


def guarded(monkeypatch):
    """Lets hopper.py allocate its results in the middle of known numbers; returns what checks that they are whole."""
    made, empty = [], torch.Tensor.new_empty

    def new_empty(self, *shape, **kwargs):
        flat = empty(self, shape[0] * shape[1] + 2048, **kwargs).fill_(7)
        made.append(flat)
        return flat[1024:-1024].view(shape)

    monkeypatch.setattr(torch.Tensor, "new_empty", new_empty)
    return lambda: all((flat[:1024] == 7).all() and (flat[-1024:] == 7).all() for flat in made) and len(made)


def error(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("M, N, K", SHAPES)
def test_gelu(M, N, K, bias, monkeypatch):
    a, b, bias = randn(M, K), randn(N, K, std=2 / K**0.5), randn(N) if bias else None
    whole = guarded(monkeypatch)
    act, before = hopper.gelu(a, b, bias)
    assert whole() == 2
    exact = F.linear(a.double(), b.double(), None if bias is None else bias.double())
    assert error(before, exact) < 2e-3  # one rounding to bf16
    assert error(act, F.gelu(before.double(), approximate="tanh")) < 2e-3
    for _ in range(5):
        assert all(map(torch.equal, hopper.gelu(a, b, bias), (act, before)))


@pytest.mark.parametrize("M, N, K", SHAPES)
def test_dgelu(M, N, K):
    a, b, before = randn(M, K), randn(K, N, std=2 / K**0.5), randn(M, N, std=2)
    out, sums = hopper.dgelu(a, b, before)
    x = before.double().requires_grad_()
    (exact,) = torch.autograd.grad(F.gelu(x, approximate="tanh"), x, a.double() @ b.double())
    assert error(out, exact) < 2.5e-3
    assert error(sums, exact.sum(0)) < 1e-4  # of what was not rounded yet
    for _ in range(5):
        assert all(map(torch.equal, hopper.dgelu(a, b, before), (out, sums)))


def test_numbers_that_overflow_stay_where_they_are():
    """An inf or a nan reaches its own row and, in the sums, its own column; large numbers are their own GELU."""
    a, b = randn(300, 64), randn(192, 64)
    a[7] = float("inf")
    act, _ = hopper.gelu(a, b, None)
    assert act.isfinite().all(1).tolist() == [i != 7 for i in range(300)]
    before = torch.full((300, 192), 100.0, device=GPU).bfloat16()
    before[:, 5] = -100.0
    a[7] = 1.0
    out, sums = hopper.dgelu(a, b.t().contiguous(), before)
    exact = a.double() @ b.double().t()
    exact[:, 5] = 0
    assert error(out, exact) < 2e-3 and sums[5] == 0


def test_the_mlp_takes_it():
    assert fused.on_hopper(randn(8, 8)) and not fused.on_hopper(torch.zeros(8, 8, device=GPU))
