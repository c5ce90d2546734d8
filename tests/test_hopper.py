"""hopper.py against float64 on a Hopper GPU; elsewhere its operands' checks."""

import math

import pytest
import torch
import torch.nn.functional as F
from compare import error, with_gradients

from fast import cublas, hopper

GPU = torch.device("cuda", 0)
HOPPER = torch.cuda.is_available() and hopper.available(GPU)
on_hopper = lambda test: pytest.mark.gpu(
    pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")(test)
)
# One tile; several tiles for every warpgroup; partial tiles in each direction; fewer rows than a
# warp's 32; K shorter than a k-tile.
SHAPES = [(256, 192, 64), (20_000, 3072, 768), (1000, 1000, 200), (37, 72, 8)]
SHAPES += [(8, 72, 16), (5000, 4096, 1024), (513, 200, 3072)]


def randn(*shape, std=1.0):
    return (torch.randn(shape, device=GPU) * std).bfloat16()


def guarded(M, N):
    """(an (M, N) matrix between two blocks of sevens, a function: whether these are intact)"""
    flat = torch.full((M * N + 2048,), 7.0, device=GPU, dtype=torch.bfloat16)

    def intact():
        return (flat[:1024] == 7).all() and (flat[-1024:] == 7).all()

    return flat[1024:-1024].view(M, N), intact


@on_hopper
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("n_major", [True, False])
@pytest.mark.parametrize("M, N, K", SHAPES)
def test_linear(M, N, K, n_major, bias):
    a, b, bias = randn(M, K), randn(K, N, std=2 / K**0.5), randn(N) if bias else None
    out, intact = guarded(M, N)
    hopper.linear(a, b if n_major else b.t().contiguous().t(), bias, out)
    exact = a.double() @ b.double() + (0 if bias is None else bias.double())
    assert error(out, exact) < 2e-3 and intact()  # one rounding to bf16


def activations(a, b, bias):
    """(GELU, its pre-activation, ReLU^2)"""
    from fast import mlp

    squares, _ = mlp.product_activation(a, b.t(), bias, "relu2", False)
    return *mlp.product_activation(a, b.t(), bias, "gelu", False), squares


@on_hopper
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("M, N, K", SHAPES)
def test_activations(M, N, K, bias):
    a, b, bias = randn(M, K), randn(N, K, std=2 / K**0.5), randn(N) if bias else None
    act, preact, squares = activations(a, b, bias)
    exact = F.linear(a.double(), b.double(), None if bias is None else bias.double())
    assert error(preact, exact) < 2e-3 and error(act, F.gelu(exact, approximate="tanh")) < 2e-3
    assert error(squares, exact.relu().square().bfloat16()) < 5e-4  # rounded once
    for _ in range(5):
        assert all(map(torch.equal, activations(a, b, bias), (act, preact, squares)))


@on_hopper
@pytest.mark.parametrize("M, N, K", SHAPES)
@pytest.mark.parametrize("kind", ["gelu", "relu2"])
def test_derivatives(kind, M, N, K):
    a, b, x = randn(M, K), randn(K, N, std=2 / K**0.5), randn(M, N, std=2).double().requires_grad_()
    y = F.gelu(x, approximate="tanh") if kind == "gelu" else x.relu().square().bfloat16().double()
    saved = (
        (x if kind == "gelu" else y).detach().bfloat16()
    )  # the pre-activation, or ReLU^2's output
    slope = torch.autograd.grad(y.sum(), x)[0] if kind == "gelu" else 2 * y.sqrt()
    out, sums = hopper.derivative("d" + kind, a, b, saved)
    exact = (a.double() @ b.double()) * slope
    assert error(out, exact) < 2.5e-3
    # summed before rounding to bf16; tanh is right to 2^-11
    assert error(sums, exact.sum(0)) < 5e-4
    for _ in range(5):
        assert all(map(torch.equal, hopper.derivative("d" + kind, a, b, saved), (out, sums)))


@on_hopper
@pytest.mark.parametrize("M, N, K", SHAPES)
def test_exponentials(M, N, K):
    a, b, vocab_size = randn(M, K), randn(N, K, std=2 / K**0.5), N - N // 9
    shifts = torch.randn(M, device=GPU) * 3
    shifts[M // 2] = float("inf")
    # in other places of a lane, warp and block
    low = [m for m in (1, 3, 9, 17, 27, 40, 130, M - 1) if m < M]
    all_raised, some_raised = low[::2], low[1::2]
    # so low that the sums of all tiles are above 2^60, or of about half of them
    shifts[all_raised], shifts[some_raised] = -300, -49.7
    out, intact = guarded(M, N)
    sums = hopper.exponentials(a, b, shifts, vocab_size, out)
    found, raised = sums.unbind(-1)
    exponents = a.double() @ b.double().t() / math.log(2) - shifts.double()[:, None]
    exponents[:, vocab_size:] = -math.inf
    in_tiles = lambda x, value: F.pad(x, (0, -N % hopper.BN), value=value).unflatten(
        1, (-1, hopper.BN)
    )
    tiles = in_tiles(exponents, -math.inf)
    assert torch.equal(raised > 0, torch.exp2(tiles).sum(-1) > 2**60)
    assert not raised.any() or (raised - tiles.amax(-1))[raised > 0].abs().max() < 1e-3
    whole = raised[:, : vocab_size // hopper.BN] > 0
    assert whole[all_raised].all() or not whole.numel()
    if whole.size(1) > 3 and len(low) > 7:
        assert 0 < whole[some_raised].double().mean() < 1
    exact = torch.exp2(tiles - raised.double()[..., None])
    assert ((found - exact.sum(-1)).abs() <= 1e-4 * exact.sum(-1)).all()
    off = (in_tiles(out.double(), 0.0) - exact).norm(dim=-1)
    assert (off <= 4e-3 * exact.norm(dim=-1)).all()  # rounded to 2^-8
    assert not out[:, vocab_size:].any() and not out[M // 2].any() and intact()
    first = out.clone()
    for _ in range(5):
        assert torch.equal(hopper.exponentials(a, b, shifts, vocab_size, out), sums)
        assert torch.equal(out, first)
    assert torch.equal(hopper.exponentials(a, b, shifts, vocab_size), sums)


@on_hopper
def test_exponentials_of_absurd_logits_end():
    """Of infinite logits, and of ones so large that their shift's rounding alone is above 2^60."""
    a, b = randn(300, 64), randn(400, 64, std=0.25)
    a[:, 0], b[:, 0] = 0, 0
    a[7], b[1, 0] = 0, 754974720.0
    a[7, 0], a[9, 1] = 1, float("inf")
    sums = hopper.exponentials(a, b, torch.zeros(300, device=GPU), 400)
    largest = 754974720 / math.log(2)
    assert abs(sums[7, 0, 1].item() - largest) < 1e-6 * largest and sums[7, 1:, 1].eq(0).all()
    assert not sums[9].sum(0)[0].isfinite()
    rest = [m for m in range(300) if m not in (7, 9)]
    exact = torch.exp(a[rest].double() @ b.double().t()).sum(1)
    assert not sums[rest][..., 1].any() and error(sums[rest][..., 0].sum(1), exact) < 5e-5


@on_hopper
def test_infinities_stay_in_their_row_or_column():
    a, b = randn(300, 64), randn(192, 64)
    a[7] = float("inf")
    act, _, _ = activations(a, b, None)
    assert act.isfinite().all(1).tolist() == [i != 7 for i in range(300)]
    preact = torch.full((300, 192), 100.0, device=GPU).bfloat16()  # GELU's derivative is 1 there
    preact[:, 5] = -100.0  # and 0 here
    a[7] = 1.0
    out, sums = hopper.derivative("dgelu", a, b.t().contiguous(), preact)
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


@on_hopper
@pytest.mark.parametrize("way", ["packed_gradients", "parts_gradients"])
def test_qkv_backward_takes_the_faster_way(way, monkeypatch):
    """Both ways give the gradients of the layer before attention."""
    from fast import linear

    way = getattr(linear, way)
    first = lambda ways, device: next((i for i, w in enumerate(ways) if w.func is way), 0)
    monkeypatch.setattr(cublas, "fastest", first)
    monkeypatch.setattr(linear, "QKV_WAYS", {})
    inputs, dy = (randn(2, 100, 256), randn(768, 256, std=0.1), randn(768)), randn(2, 12, 100, 64)
    found = with_gradients(
        lambda *i: torch.cat(linear.QKV.apply(*i, (4, 4, 4), 64, True), 1), inputs, dy
    )
    in_float64 = lambda *i: F.linear(*i).view(2, 100, 12, 64).transpose(1, 2)
    exact = with_gradients(in_float64, [x.double() for x in inputs], dy)
    assert all(error(*pair) < bound for *pair, bound in zip(found, exact, (3e-3, 5e-3, 5e-3, 5e-3)))
    assert list(linear.QKV_WAYS.values()) == [way]


def zeros(*shape, dtype=torch.bfloat16):
    return torch.zeros(shape, dtype=dtype)


def test_takes(recwarn):
    wide = zeros(16, 32)
    assert hopper.takes(wide, zeros(1, 8), wide[:, 8:16], wide[3:5], zeros(24), None)
    refused = {
        "float32": zeros(16, 32, dtype=torch.float32),
        "float16": zeros(16, 32, dtype=torch.float16),
        "width": zeros(16, 12),
        "row stride": zeros(16, 12)[:, :8],
        "columns, not rows, are contiguous": zeros(32, 16).t(),
        "repeated row": zeros(1, 8).expand(16, 8),
        "address": zeros(1000)[4:132].view(16, 8),
        "bias' address": zeros(24)[4:20],
        "three dimensions": zeros(2, 16, 8),
        "empty": zeros(0, 8),
    }
    assert [why for why, operand in refused.items() if hopper.takes(operand)] == []
    assert not hopper.takes(wide, refused["width"])
