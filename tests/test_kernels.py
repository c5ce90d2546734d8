"""The loss's plain form against PyTorch's own, in float64."""

import pytest
import torch
import torch.nn.functional as F

import kernels
import model as models


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
    each = kernels.linear_cross_entropy(x.float(), weight.float(), targets, "none", V, cap, smoothing, z_loss)
    assert torch.allclose(each.flatten().double(), expected, rtol=1e-5, atol=1e-5)
    for reduction, value in (("sum", expected.sum()), ("mean", expected[real].mean())):
        loss = kernels.linear_cross_entropy(x.float(), weight.float(), targets, reduction, V, cap, smoothing, z_loss)
        assert torch.allclose(loss.double(), value, rtol=1e-5)
        own, ref = (torch.autograd.grad(v, weight, retain_graph=True)[0] for v in (loss, value))
        assert torch.allclose(own, ref, rtol=1e-4, atol=1e-5) and not own[V:].any()


def test_smoothing_and_z_loss_are_for_training_only():
    cfg = models.GPTConfig(vocab_size=50, n_layer=1, n_head=2, n_embd=16, block_size=8)
    plain = models.build(cfg, torch.device("cpu"), 0)
    cfg.label_smoothing, cfg.z_loss = 0.1, 1e-2
    other = models.build(cfg, torch.device("cpu"), 0)
    idx, targets = torch.randint(0, 50, (2, 2, 8))
    assert other(idx, targets) > plain(idx, targets)
    assert torch.equal(other.eval()(idx, targets), plain.eval()(idx, targets))
