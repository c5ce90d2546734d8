"""adamw8bit.py: codes, one compiled kernel against plain PyTorch, AdamW, weights in bf16."""

import pytest
import saved
import torch
from compare import error, resumed_bitwise
from conftest import train_here
from torch._dynamo.utils import counters
from torch._inductor import metrics
from torch.nn import Parameter

from scale import adamw8bit
from scale.adamw8bit import AdamW8bit

# levels, whether small ones go to zero
M, V = (adamw8bit.M_LEVELS, True), (adamw8bit.V_LEVELS, False)
OPTIONS = dict(betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
LOW = dict(optimizer="adamw8bit", weights="bf16")


def round_trip(x, levels, to_zero):
    noise = torch.randint(0, 2**adamw8bit.SHIFT, x.shape, dtype=torch.int32)
    codes, scale = adamw8bit.encoded(x, noise, levels, to_zero)
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


def test_rounding_is_right_in_the_mean():
    """Within six standard errors; the standard deviation of a draw is at most half its step."""
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
    # a decay of 2^-11, beside 2^-8 between neighbours in bfloat16
    w = Parameter(torch.ones(100, 512).bfloat16())
    w.grad = torch.zeros_like(w)
    AdamW8bit([w], lr=2.0**-11, weight_decay=1.0).step()
    assert abs(w.double().mean() - (1 - 2.0**-11)) < 6 * 2.0**-9 / w.numel() ** 0.5


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, rtol", [(torch.bfloat16, 2**-7), (torch.float32, 1e-5)])
def test_compiled_it_is_one_kernel_that_equals_plain_torch(dtype, rtol):
    """Five steps with gradients of very different sizes are equal but for rounding."""
    torch.manual_seed(0)
    shapes = [(4096, 14_336), (300, 1600), (20_000, 4096)]  # the last in two parts
    plain = [Parameter(torch.randn(*shape, device="cuda").to(dtype)) for shape in shapes]
    coded = [Parameter(p.detach().clone()) for p in plain]
    a, b = (AdamW8bit(p, 1e-3, **OPTIONS, compiled=p is coded) for p in (plain, coded))
    counters.clear(), metrics.reset()
    for _ in range(5):
        for p, q in zip(plain, coded):
            g = torch.randn_like(p, dtype=torch.float32)
            p.grad = (g * torch.exp(4 * torch.randn_like(g))).to(dtype)
            q.grad = p.grad.clone()
            q.data.copy_(p)
            for name, tensor in a.state[p].items():
                b.state[q][name].copy_(tensor)
        a.step(), b.step()
        for p, q in zip(plain, coded):
            assert dtype != torch.bfloat16 or (p != q).float().mean() <= 1e-4
            # of a weight that was rounded to its other neighbour
            torch.testing.assert_close(p, q, rtol=rtol, atol=1e-9)
            for name, own in a.state[p].items():
                other = b.state[q][name]
                assert (own != other).float().mean() <= 1e-4
                if own.dtype == torch.uint8:  # next to each other, or next to a zero of any sign
                    near = (own.int() - other.int()).abs() <= 1
                    assert (near | ((own & 127) <= 1) & ((other & 127) <= 1)).all()
    assert counters["stats"]["unique_graphs"] == 1
    assert metrics.generated_kernel_count <= 1  # 0 where the compile cache had it


def test_small_tensors_are_torchs_adamw_and_bf16_ones_keep_their_float32_numbers():
    torch.manual_seed(0)
    start, options = torch.ones(300), dict(lr=1e-4, **OPTIONS)
    dtypes = torch.float32, torch.float32, torch.bfloat16
    plain, full, half = (Parameter(start.clone().to(dtype)) for dtype in dtypes)
    optimizers = [AdamW8bit([p], **options) for p in (full, half)]
    optimizers.insert(0, torch.optim.AdamW([plain], **options))
    for _ in range(50):
        g = torch.randn(300).bfloat16() + 0.3
        for p, optimizer in zip((plain, full, half), optimizers):
            p.grad = g.to(p.dtype)
            optimizer.step()
    assert torch.equal(plain, full)
    # steps below 2^-8
    assert torch.equal(half, plain.bfloat16()) and not torch.equal(half, start.bfloat16())


def test_a_step_is_adamws_but_for_the_codes(monkeypatch):
    """The first step starts from moments of zero, so that only the weight has been rounded."""
    monkeypatch.setattr(adamw8bit, "CHUNK", 100)  # of 160 groups, whose rows are padded
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


def test_resumed_equals_uninterrupted_bitwise(data_dir, tmp_path):
    tensors = resumed_bitwise(data_dir, tmp_path, **LOW)
    for name, dtypes in (("model", {torch.bfloat16}), ("optimizer", {torch.uint8, torch.float32})):
        assert {t.dtype for t in tensors[name].values()} == dtypes
    with pytest.raises(saved.Error, match="adamw8bit"):
        train_here(data_dir, tmp_path / "b", resume="auto", save_interval=5)
    train_here(data_dir, tmp_path / "c", init_from=tmp_path / "b", max_steps=1)  # in float32
