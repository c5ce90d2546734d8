"""kernels.py: the plain form of the loss against PyTorch's own, in float64, and which calls take a fast form."""

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import kernels
import model as models
from run import account
from settings import GPTConfig


@pytest.mark.parametrize("V", [40, 33])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
@pytest.mark.parametrize("cap", [None, 3.0])
def test_linear_cross_entropy(V, smoothing, z_loss, cap):
    """Every option at once and each alone; padding rows take no part, ignored targets neither."""
    x, weight = torch.randn(3, 7, 16, dtype=torch.float64), torch.randn(40, 16, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, V, (3, 7))
    targets[0, :3] = -100
    logits = kernels.cap(x @ weight[:V].t(), cap).flatten(0, 1)
    real = targets.flatten() >= 0
    expected = F.cross_entropy(logits, targets.flatten(), reduction="none", label_smoothing=smoothing)
    expected = expected + z_loss * logits.logsumexp(-1).square() * real
    head = nn.Linear(16, 40, bias=False)
    head.weight = nn.Parameter(weight.detach().float())
    each = kernels.linear_cross_entropy(x.float(), head, targets, "none", V, cap, smoothing, z_loss)
    assert torch.allclose(each.flatten().double(), expected, rtol=1e-5, atol=1e-5)
    for reduction, value in (("sum", expected.sum()), ("mean", expected[real].mean())):
        loss = kernels.linear_cross_entropy(x.float(), head, targets, reduction, V, cap, smoothing, z_loss)
        assert torch.allclose(loss.double(), value, rtol=1e-5)
        (own,), (ref,) = torch.autograd.grad(loss, head.weight), torch.autograd.grad(value, weight, retain_graph=True)
        assert torch.allclose(own.double(), ref, rtol=1e-4, atol=1e-5) and not own[V:].any()


def test_smoothing_and_z_loss_are_for_training_only():
    cfg = GPTConfig(vocab_size=50, n_layer=1, n_head=2, n_embd=16, block_size=8)
    plain = models.build(cfg, torch.device("cpu"), 0)
    cfg.label_smoothing, cfg.z_loss = 0.1, 1e-2
    other = models.build(cfg, torch.device("cpu"), 0)
    idx, targets = torch.randint(0, 50, (2, 2, 8))
    assert other(idx, targets) > plain(idx, targets)
    assert torch.equal(other.eval()(idx, targets), plain.eval()(idx, targets))


def test_what_takes_a_fast_form(monkeypatch):
    """By type of device, dtype, widths and kind of layer; --ops=torch switches all off."""
    monkeypatch.setattr(kernels, "served", {"cpu"})
    wide, narrow, x = kernels.Linear(16, 32), kernels.Linear(16, 30), torch.randn(2, 3, 16)

    class Edited(kernels.Linear):
        pass

    def fast(*layers, dtype=torch.bfloat16, **options):
        with torch.autocast("cpu", dtype):
            return kernels.choose("linear", x, *layers, **options)

    assert fast(wide) and not fast(narrow) and not fast(wide, narrow) and not fast(wide, unless="a reason")
    assert not fast(wide, dtype=torch.float16) and not kernels.choose("linear", x, wide)
    assert kernels.edited(wide, kernels.LayerNorm(16)) is None
    assert kernels.edited(Edited(16, 32)) == "another kind of layer"
    assert "NVIDIA" in kernels.serve(torch.device("cpu")) and not kernels.served and not fast(wide)
    monkeypatch.setattr(kernels, "served", {"cpu"})
    assert kernels.serve(torch.device("cpu"), "torch") == "ops=torch" and not kernels.served


def test_ropes_fast_form_has_rms_norms_alone(monkeypatch):
    monkeypatch.setattr(kernels, "served", {"cuda"})
    x, (cos, sin) = torch.randn(2, 3, 4, 16), torch.randn(2, 4, 16)
    layers = nn.Identity(), nn.RMSNorm(16, 1e-5), kernels.RMSNorm(16, 1e-5)
    others = nn.LayerNorm(16), kernels.LayerNorm(16), kernels.Linear(16, 16), nn.Sequential(nn.RMSNorm(16, 1e-5))
    for layer in layers + others:
        with account.census("cuda", torch.bfloat16) as seen:
            kernels.rope(x, layer, cos, sin)
        assert seen.calls["rope", "another kind of layer" if layer in others else None] == 1
        assert layer in others or seen.calls.total() == 1  # the norm is inside


def test_amd_gpus_take_the_definitions(monkeypatch):
    """To PyTorch a ROCm device is "cuda" too; cuBLASLt and CUDA kernels are not for it."""
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "NVIDIA" in kernels.unable(torch.device("cuda", 0))


def test_gradients_of_attention_have_the_layout_of_its_output():
    y = torch.randn(2, 8, 4, 16).transpose(1, 2).requires_grad_()
    kept = []
    y.register_hook(lambda grad: kept.append(grad.stride()))
    out = kernels.SameLayout.apply(y)
    dy = torch.randn(2, 4, 8, 16)  # contiguous, which y is not
    out.backward(dy)
    assert kept == [y.stride()] and torch.equal(y.grad, dy)
