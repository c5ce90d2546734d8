"""hopper.py against float64 on fresh random inputs."""

import math
import threading

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton", reason="Triton is installed with PyTorch's CUDA builds only")
import fused
import hopper

GPU = torch.device("cuda", 0)
HOPPER = torch.cuda.is_available() and hopper.available(GPU)
on_hopper = lambda test: pytest.mark.gpu(pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")(test))
# one tile; several rounds of both warpgroups; ragged in each direction; fewer rows than a warp's; K shorter than a step
SHAPES = [
    (256, 192, 64),
    (20_000, 3072, 768),
    (1000, 1000, 200),
    (37, 72, 8),
    (8, 72, 16),
    (5000, 4096, 1024),
    (513, 200, 3072),
]


def randn(*shape, std=1.0):
    return (torch.randn(shape, device=GPU) * std).bfloat16()


def error(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def guarded(M, N):
    """(an (M, N) matrix in the middle of known numbers, what checks that they are still there)"""
    flat = torch.full((M * N + 2048,), 7.0, device=GPU, dtype=torch.bfloat16)
    return flat[1024:-1024].view(M, N), lambda: (flat[:1024] == 7).all() and (flat[-1024:] == 7).all()


@on_hopper
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("down", [True, False])
@pytest.mark.parametrize("M, N, K", SHAPES)
def test_linear(M, N, K, down, bias):
    a, b, bias = randn(M, K), randn(K, N, std=2 / K**0.5), randn(N) if bias else None
    out, whole = guarded(M, N)
    hopper.linear(a, b if down else b.t().contiguous().t(), bias, out)
    assert error(out, a.double() @ b.double() + (0 if bias is None else bias.double())) < 2e-3  # one rounding to bf16
    assert whole()


@on_hopper
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("M, N, K", SHAPES)
def test_gelu(M, N, K, bias):
    a, b, bias = randn(M, K), randn(N, K, std=2 / K**0.5), randn(N) if bias else None
    act, before = hopper.gelu(a, b, bias)
    exact = F.linear(a.double(), b.double(), None if bias is None else bias.double())
    assert error(before, exact) < 2e-3 and error(act, F.gelu(exact, approximate="tanh")) < 2e-3
    for _ in range(5):
        assert all(map(torch.equal, hopper.gelu(a, b, bias), (act, before)))


@on_hopper
@pytest.mark.parametrize("M, N, K", SHAPES)
def test_dgelu(M, N, K):
    a, b, before = randn(M, K), randn(K, N, std=2 / K**0.5), randn(M, N, std=2)
    out, sums = hopper.dgelu(a, b, before)
    x = before.double().requires_grad_()
    (exact,) = torch.autograd.grad(F.gelu(x, approximate="tanh"), x, a.double() @ b.double())
    assert error(out, exact) < 2.5e-3
    assert error(sums, exact.sum(0)) < 5e-4  # of what was not rounded yet; the slope is right to 2^-11
    for _ in range(5):
        assert all(map(torch.equal, hopper.dgelu(a, b, before), (out, sums)))


@on_hopper
@pytest.mark.parametrize("M, N, K", SHAPES)
def test_exponentials(M, N, K):
    a, b, real = randn(M, K), randn(N, K, std=2 / K**0.5), N - N // 9
    shifts = torch.randn(M, device=GPU) * 3
    shifts[M // 2] = float("inf")
    out, whole = guarded(M, N)
    sums = hopper.exponentials(a, b, shifts, real, out)
    exact = torch.exp2(a.double() @ b.double().t() / math.log(2) - shifts.double()[:, None])
    exact[:, real:] = 0
    sums_by_tile = F.pad(exact, (0, -N % hopper.BN)).unflatten(1, (-1, hopper.BN)).sum(-1)
    assert error(out, exact) < 4e-3 and error(sums, sums_by_tile) < 5e-5  # a few decide, each right to 2^-8
    assert not out[:, real:].any() and not out[M // 2].any()
    assert whole() and torch.equal(hopper.exponentials(a, b, shifts, real), sums)


@on_hopper
def test_numbers_that_are_not_finite_stay_where_they_are():
    a, b = randn(300, 64), randn(192, 64)
    a[7] = float("inf")
    act, _ = hopper.gelu(a, b, None)
    assert act.isfinite().all(1).tolist() == [i != 7 for i in range(300)]
    before = torch.full((300, 192), 100.0, device=GPU).bfloat16()  # its slope there is 1
    before[:, 5] = -100.0  # and there 0
    a[7] = 1.0
    out, sums = hopper.dgelu(a, b.t().contiguous(), before)
    exact = a.double() @ b.double().t()
    exact[:, 5] = 0
    assert error(out, exact) < 2e-3 and sums[5] == 0


@on_hopper
@pytest.mark.parametrize(
    "T, widths, Q", [(20_000, [768] * 3, 768), (1000, [512, 256, 256], 200), (40, [256] * 3, 1024)]
)
def test_linear_backward(T, widths, Q):
    parts, x, w = [randn(T, width) for width in widths], randn(T, Q), randn(sum(widths), Q)
    dx, dw, db = hopper.linear_backward(parts, x, w)
    dy = torch.cat(parts, 1).double()
    assert error(dx, dy @ w.double()) < 2e-3
    assert error(dw, dy.t() @ x.double()) < 1e-5 and error(db, dy.sum(0)) < 1e-5  # in float32


def test_steps_at_once():
    """All steps are taken, in pieces that 66 clusters share out evenly."""
    for tiles in (6, 18, 24, 32, 264):
        for steps in (1, 7, 128, 1024):
            each = hopper.steps_at_once(tiles, steps, 66)
            units = tiles * -(-steps // each)
            assert 0 < each <= steps and (steps < 1024 or -(-units // 66) * 66 * each <= 1.12 * tiles * steps)


@on_hopper
@pytest.mark.parametrize("way", [fused.packed_gradients, fused.parts_gradients])
def test_attention_takes_the_faster_way(way, monkeypatch):
    """Both give the gradients of the layer before attention."""
    first = lambda ways, device: next((i for i, w in enumerate(ways) if w.func is way), 0)
    monkeypatch.setattr(fused.cublas, "fastest", first)
    monkeypatch.setattr(fused, "QKV_WAYS", {})
    x, w = randn(2, 100, 256).requires_grad_(), randn(768, 256, std=0.1).requires_grad_()
    bias = randn(768).requires_grad_()
    out = torch.cat(fused.QKV.apply(x, w, bias, (4, 4, 4), 64, True), 1)
    dy = randn(*out.shape)
    exact = [t.detach().double().requires_grad_() for t in (x, w, bias)]
    expected = F.linear(*exact).view(2, 100, 12, 64).transpose(1, 2)
    assert error(out, expected) < 3e-3
    for ours, theirs in zip(
        *(torch.autograd.grad(y, to, dy.to(y.dtype)) for y, to in ((out, (x, w, bias)), (expected, exact)))
    ):
        assert error(ours, theirs) < 5e-3
    assert list(fused.QKV_WAYS.values()) == [way]


@on_hopper
def test_any_thread_may_be_the_first():
    """Autograd's has no context of the driver's at its start."""
    found, (a, b, before) = [], (randn(64, 64) for _ in range(3))
    thread = threading.Thread(target=lambda: found.append(hopper.dgelu(a, b, before)))
    thread.start()
    thread.join()
    assert len(found) == 1
    assert fused.on_hopper(randn(8, 8)) and not fused.on_hopper(torch.zeros(8, 8, device=GPU))
