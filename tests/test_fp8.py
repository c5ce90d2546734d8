"""fp8.py against float64. Needs an NVIDIA GPU with fp8 matrix units."""

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9):
    pytest.skip("needs an NVIDIA GPU with fp8 matrix units", allow_module_level=True)
import fp8
import fused
import model as models

# e4m3 rounds to 3 bits behind the point, a relative error of 2^-4 at worst and 2.6e-2 in the root mean square; a
# product of two has 1.4 times that. e5m2, for gradients, has twice the error.
FORWARD, BACKWARD = 5e-2, 1e-1


def error(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def randn(*shape, std=1.0, dtype=torch.bfloat16):
    return (torch.randn(*shape, device="cuda") * std).to(dtype)


@pytest.mark.parametrize(
    "M, widths",
    [(16, [16]), (100, [48]), (512, [768]), (65, [300]), (100, [48, 16, 16]), (70, [300, 520, 8]), (33, [8, 264])],
)
@pytest.mark.parametrize("what", [fp8.COPY, fp8.GELU, fp8.DGELU, fp8.SWIGLU, fp8.DSWIGLU])
@pytest.mark.parametrize("e5m2", [False, True])
@pytest.mark.parametrize("std", [1e-7, 1.0, 1e4])
def test_cast(M, widths, what, e5m2, std):
    """Value, transpose, column sums, and the scale: twice the room that the call before needed, a power of two."""
    if what not in (fp8.COPY, fp8.GELU) and len(widths) > 1:
        pytest.skip("of a single tensor")
    std = min(std, 100.0) if what == fp8.SWIGLU else std  # whose result is a square
    top = torch.zeros(2, device="cuda")
    limit = torch.finfo(torch.float8_e5m2 if e5m2 else torch.float8_e4m3fn).max
    seen = None
    for call in range(3):
        parts = [randn(M, N * (1 + (what == fp8.SWIGLU)), std=std * 4**call) for N in widths]
        before = randn(M, widths[0] * (1 + (what == fp8.DSWIGLU)))
        exact = torch.cat(parts, 1).double()
        if what == fp8.GELU:
            exact = F.gelu(exact, approximate="tanh")
        if what == fp8.DGELU:
            b = before.double().requires_grad_()
            exact = torch.autograd.grad(F.gelu(b, approximate="tanh"), b, exact)[0]
        if what == fp8.SWIGLU:
            exact = swiglu(exact)
        if what == fp8.DSWIGLU:
            b = before.double().requires_grad_()
            exact = torch.autograd.grad(swiglu(b), b, exact)[0]
        given = before if what in (fp8.DGELU, fp8.DSWIGLU) else None
        out, out_t, scale, sums = fp8.cast(parts, top, given, what, e5m2, True)
        most = exact.abs().max().item()
        room = limit * scale.item() / (seen or most)
        seen = most
        assert 1.99 <= room <= 4.1 and torch.frexp(scale)[0].item() == 0.5
        assert torch.equal(out.t().view(torch.uint8), out_t.view(torch.uint8))
        clamped = exact.clamp(-limit * scale.item(), limit * scale.item())
        assert error(out.double() * scale, clamped) < (7e-2 if e5m2 else 4e-2)  # the mean of few numbers
        assert torch.allclose(sums.double(), exact.sum(0), rtol=1e-3, atol=1e-3 * most * M**0.5)


def swiglu(x):
    gate, up = x.chunk(2, 1)
    return F.silu(gate) * up


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("B, T, K, N", [(3, 32, 64, 208), (2, 512, 768, 2304)])
def test_linear(B, T, K, N, bias):
    layer = nn.ModuleList([nn.Linear(K, N, bias=bias, device="cuda")])
    exact = nn.Linear(K, N, bias=bias, device="cuda")
    exact.load_state_dict(layer[0].state_dict())
    exact.double()
    fused.swap_modules(layer)
    fp8.swap(layer)
    assert type(layer[0]) is fp8.Linear and list(layer.state_dict()) == ["0.weight"] + ["0.bias"] * bias
    for _ in range(2):
        x, dy = randn(B, T, K).requires_grad_(), randn(B, T, N, std=1e-6)
        xd = x.detach().double().requires_grad_()
        y, expected = layer[0](x), exact(xd)
        layer.zero_grad(), exact.zero_grad()
        y.backward(dy), expected.backward(dy.double())
        assert error(y, expected) < FORWARD and error(x.grad, xd.grad) < BACKWARD
        assert error(layer[0].weight.grad, exact.weight.grad) < BACKWARD
        assert not bias or error(layer[0].bias.grad, exact.bias.grad) < 1e-3  # summed before it is cast


@pytest.mark.parametrize("shape", [{}, {"mlp": "swiglu", "norm": "rmsnorm", "positions": "rope", "bias": False}])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_swapped_model_trains_as_the_plain_one(shape, compiled):
    cfg = models.GPTConfig(vocab_size=1000, n_layer=2, n_head=4, n_embd=256, block_size=128, **shape)
    exact, own = (models.build(cfg, torch.device("cuda"), 0) for _ in range(2))
    names = list(own.state_dict())
    fp8.swap(fused.swap(own))
    assert list(own.state_dict()) == names
    assert type(own.head) is fp8.Head and type(own.blocks[0].attn.proj) is fp8.DeferredBias
    if compiled:
        own.hidden = torch.compile(own.hidden, fullgraph=True)
    for block in exact.blocks:
        block.attn.backend = "math"
    exact.double()
    for _ in range(2):
        idx, targets = torch.randint(0, 1000, (2, 4, 128), device="cuda")
        targets[0, :5] = -100
        own.zero_grad(), exact.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = own(idx, targets)
        loss.backward()
        expected = exact(idx, targets)
        expected.backward()
        assert error(loss, expected) < 2e-3
        for (name, p), ref in zip(own.named_parameters(), exact.parameters(), strict=True):
            assert error(p.grad, ref.grad) < 0.25, name  # several layers' rounding
            assert F.cosine_similarity(p.grad.double().flatten(), ref.grad.flatten(), 0) > 0.97, name


def test_a_sample_of_any_length():
    cfg = models.GPTConfig(vocab_size=1000, n_layer=1, n_head=4, n_embd=256, block_size=128)
    own = fp8.swap(fused.swap(models.build(cfg, torch.device("cuda"), 0)))
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        assert own.logits(torch.zeros(1, 7, dtype=torch.long, device="cuda")).shape == (1, 7, 1000)
