"""adamw8bit.py: codes, the kernel against plain PyTorch, runs against AdamW, weights in bf16."""

import pytest
import saved
import torch
from compare import DEVICE, GPU, error, resumed_bitwise, runs_kernels
from conftest import losses, train_here
from torch.nn import Parameter

import model as models
from scale import adamw8bit, parallel
from scale.adamw8bit import AdamW8bit, Factors
from settings import Config

# levels, whether small ones go to zero
M, V = (adamw8bit.M_LEVELS, True), (adamw8bit.V_LEVELS, False)
OPTIONS = dict(betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
LOW = dict(optimizer="adamw8bit", weights="bf16")


def bits(shape, count=adamw8bit.SHIFT):
    return torch.randint(0, 2**count, shape, dtype=torch.int32)


def round_trip(x, levels, to_zero):
    codes, scale = adamw8bit.encoded(x, bits(x.shape), levels, to_zero)
    assert codes.min() >= 0 and codes.max() <= levels
    return adamw8bit.decoded(codes, scale, levels)


@pytest.mark.parametrize("levels, to_zero", [M, V])
def test_a_code_is_a_neighbour_on_the_grid(levels, to_zero):
    torch.manual_seed(0)
    # 15 octaves in a group
    x = torch.exp2(torch.randint(-60, 60, (50, 1)) - 15 * torch.rand(50, 256))
    y = round_trip(x, levels, to_zero)
    assert ((y - x).abs() / x).max() < 1 / 8  # three bits of mantissa
    # on the grid it stays, whatever the noise
    assert torch.equal(round_trip(y, levels, to_zero), y)
    y = round_trip(torch.exp2(-8 * torch.rand(50, 256)), levels, to_zero)
    y[:, 0] = 64.0  # and whatever the scale
    assert torch.equal(round_trip(y, levels, to_zero), y)
    assert not round_trip(torch.zeros(3, 256), levels, to_zero).any()


def test_the_smallest_go_to_zero_in_the_first_moment_alone():
    x = torch.full((1, 256), 2.0**-40)
    x[0, 0], x[0, 1] = 1.0, 0.0
    assert round_trip(x, *M)[0, 1:].max() <= 2.0**-15
    second = round_trip(x, *V)[0]
    assert second[1] == 0 and torch.all(second[2:] == second[2]) and 2.0**-32 < second[2] < 2.0**-31


def test_rounding_is_right_in_the_mean():
    """The mean of 20,000 draws is right within six standard errors.

    The standard deviation of a draw is at most half the width of its step.
    """
    torch.manual_seed(0)
    draws = 20_000
    x = torch.exp2(-20 * torch.rand(256))
    x[0] = 1.0
    y = round_trip(x.expand(draws, 256), *M).double().mean(0)
    step = torch.where(x < 2.0**-15.8, 2.0**-15.7, x / 8)
    assert ((y - x).abs() < 6 * step / 2 / draws**0.5).all()
    above = x > 2.0**-15
    y = round_trip(x.expand(draws, 256), *V).double().mean(0)
    assert ((y - x).abs() < 6 * step / 2 / draws**0.5)[above].all()
    w = torch.randn(256)
    y = adamw8bit.rounded(w.expand(draws, 256), bits((draws, 256), 16), torch.bfloat16)
    assert ((y.double().mean(0) - w).abs() < 6 * w.abs() * 2**-7 / 2 / draws**0.5).all()
    assert torch.equal(adamw8bit.rounded(w, bits((256,), 16), torch.float32), w)


def test_random_numbers_are_even_and_differ():
    """Means, variances and correlations of 65,536 numbers, within five standard errors."""
    some = [
        adamw8bit.noises(0, 64, 1024, adamw8bit.random_key(1, step, 0), "cpu") for step in (1, 2)
    ]
    flat = [n.flatten().double() / 2**b for noises in some for n, b in zip(noises, (20, 20, 16))]
    for n in flat:
        assert 0 <= n.min() and n.max() < 1
        assert abs(n.mean() - 0.5) < 5 * 12**-0.5 / 256
        assert abs(n.var() - 1 / 12) < 5 * 180**-0.5 / 256
    centred = torch.stack([*flat, flat[0].roll(1), flat[0].roll(1024)])
    correlations = torch.corrcoef(centred) - torch.eye(8)
    assert correlations.abs().max() < 5 / 256


def tensors(rows, cols, dtype, device="cpu"):
    """w, m, m_scale, v, v_scale"""
    codes = torch.zeros(rows, cols, dtype=torch.uint8, device=device)
    scales = torch.zeros(rows, -(-cols // adamw8bit.GROUP), device=device)
    w = torch.randn(rows, cols, device=device).to(dtype)
    return [w, codes, scales, codes.clone(), scales.clone()]


def numbers(step, lr=1e-3, beta1=0.9, beta2=0.95, decay=0.1, eps=1e-8):
    key = adamw8bit.random_key(0, step)
    rate, root = lr / (1 - beta1**step), (1 - beta2**step) ** -0.5
    rests = 1 - beta1, 1 - beta2
    return key, Factors(1 - lr * decay, rate, beta1, rests[0], beta2, rests[1], root, eps)


@runs_kernels
@pytest.mark.device
@pytest.mark.parametrize("rows, cols", [(4096, 14_336)] if GPU else [(7, 300), (9, 256), (20, 72)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_kernel_equals_plain_torch(rows, cols, dtype):
    """Five steps with gradients of very different sizes are equal but for rounding.

    A GPU approximates roots, and NumPy rounds otherwise.
    """
    pytest.importorskip("triton")
    torch.manual_seed(0)
    own, differing = tensors(rows, cols, dtype, DEVICE), 1e-4 if GPU else 0
    for step in range(1, 6):
        other = [t.clone() for t in own]
        g = torch.randn(rows, cols, device=DEVICE)
        g = (g * torch.exp(4 * torch.randn(rows, cols, device=DEVICE))).to(dtype)
        adamw8bit.update_torch(own[0], g, *own[1:], 3, *numbers(step))
        adamw8bit.update_triton(other[0], g, *other[1:], 3, *numbers(step))
        for a, b in zip(own[1:], other[1:]):
            assert (a != b).float().mean() <= differing
            # next to each other, or next to zero, whose sign is anyone's
            if a.dtype == torch.uint8:
                near, zero = (a.int() - b.int()).abs() <= 1, ((a & 127) <= 1) & ((b & 127) <= 1)
                assert (near | zero).all()
            else:
                torch.testing.assert_close(a, b, rtol=1 / 8, atol=0)
        tolerance = (
            dict(rtol=2**-7, atol=1e-9) if dtype == torch.bfloat16 else dict(rtol=1e-5, atol=1e-9)
        )
        torch.testing.assert_close(own[0], other[0], **tolerance)
        assert (own[0] != other[0]).float().mean() <= (differing if dtype == torch.bfloat16 else 1)


def test_rows_apart_are_as_together():
    """A rank computes for its rows what one process computes for them."""
    torch.manual_seed(0)
    whole = tensors(10, 300, torch.bfloat16)
    slices = slice(0, 4), slice(4, 10)
    parts = [[t[rows].clone() for t in whole] for rows in slices]
    for step in (1, 2):
        g = torch.randn(10, 300).bfloat16()
        adamw8bit.update_torch(whole[0], g, *whole[1:], 0, *numbers(step))
        for rows, part in zip(slices, parts):
            adamw8bit.update_torch(part[0], g[rows], *part[1:], rows.start, *numbers(step))
    torch.testing.assert_close(whole, [torch.cat(pair) for pair in zip(*parts)], rtol=0, atol=0)


def test_small_tensors_are_torchs_adamw_and_bf16_ones_keep_their_float32_numbers():
    torch.manual_seed(0)
    start, options = torch.ones(300), dict(lr=1e-4, **OPTIONS)
    dtypes = torch.float32, torch.float32, torch.bfloat16
    plain, full, half = (Parameter(start.clone().to(dtype)) for dtype in dtypes)
    optimizers = [
        torch.optim.AdamW([plain], **options),
        *(AdamW8bit([p], **options) for p in (full, half)),
    ]
    for _ in range(50):
        g = torch.randn(300).bfloat16() + 0.3
        for p, optimizer in zip((plain, full, half), optimizers):
            p.grad = g.to(p.dtype)
            optimizer.step()
    assert torch.equal(plain, full)
    # steps below 2^-8
    assert torch.equal(half, plain.bfloat16()) and not torch.equal(half, start.bfloat16())


def test_a_step_is_adamws_but_for_the_codes():
    """The first step starts from moments of zero, so that only the weight has been rounded."""
    torch.manual_seed(0)
    start, options = torch.randn(80, 300), dict(lr=1e-2, **OPTIONS)
    plain, coded = Parameter(start.clone()), Parameter(start.clone())
    a, b = torch.optim.AdamW([plain], **options), AdamW8bit([coded], **options)
    for step in range(20):
        plain.grad = torch.randn(80, 300) + 0.5
        coded.grad = plain.grad.clone()
        a.step(), b.step()
        if step == 0:  # a weight's rounding, 2^-25 of it, beside a step of 1/100
            assert error(coded - start, plain - start) < 1e-5
    moved, found = plain - start, coded - start
    assert error(found, moved) < 0.05 and abs(found.mean() / moved.mean() - 1) < 0.005


@pytest.mark.slow
def test_runs_follow_adamws(data_dir, tmp_path):
    """100 steps on real text. Over eight seeds the mean losses were 2.921, 2.913, 2.919, +-0.03."""
    common = dict(max_steps=100, batch_tokens=128, lr=2e-3, save_interval=0, log_interval=100)
    runs = {"plain": {}, "8bit": dict(optimizer="adamw8bit"), "low": LOW}
    logs = {
        name: losses(train_here(data_dir, tmp_path / name, **common, **s))
        for name, s in runs.items()
    }
    last = {name: sum(loss[step] for step in range(81, 101)) / 20 for name, loss in logs.items()}
    assert last["plain"] < 3.5
    assert all(loss == pytest.approx(last["plain"], abs=0.08) for loss in last.values())


def test_resumed_equals_uninterrupted_bitwise(data_dir, tmp_path):
    tensors = resumed_bitwise(data_dir, tmp_path, **LOW)
    for name, dtypes in (("model", {torch.bfloat16}), ("optimizer", {torch.uint8, torch.float32})):
        assert {t.dtype for t in tensors[name].values()} == dtypes
    with pytest.raises(
        saved.Error, match="optimizer: checkpoint adamw8bit, now adamw; .* --init_from"
    ):
        train_here(data_dir, tmp_path / "b", resume="auto", save_interval=5)
    train_here(data_dir, tmp_path / "c", init_from=tmp_path / "b", max_steps=1)  # in float32


def test_bf16_weights_begin_as_the_float32_ones():
    built = []
    for dtype in (torch.float32, torch.bfloat16):
        model = models.on_meta(
            Config(vocab_size=100, n_layer=2, n_head=2, n_embd=16, block_size=8)
        ).to(dtype)
        built.append(models.allocate(model, "cpu", seed=1, whole=parallel.whole).parameters())
    assert all(q.dtype == torch.bfloat16 and torch.equal(p.bfloat16(), q) for p, q in zip(*built))
