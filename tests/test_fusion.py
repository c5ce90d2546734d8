"""fast/fusion.py: the pass changes where sums are computed, and not what they are."""

import pytest
import torch
from torch._dynamo.utils import counters

pytest.importorskip("triton", reason="Triton is installed with PyTorch's CUDA builds only")
import kernels
import model as models
from fast import fusion
from scale.compile import compile_model
from settings import GPTConfig

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def gradients(compiled):
    cfg = GPTConfig(vocab_size=200, n_layer=2, n_head=4, n_embd=64, block_size=32)
    model = models.build(cfg, torch.device(DEVICE), 0)
    if compiled:
        compile_model(model)
    torch.manual_seed(1)
    idx, targets = torch.randint(0, 200, (2, 2, 16), device=DEVICE)
    with torch.autocast(DEVICE, torch.bfloat16):
        loss = model(idx, targets)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.slow
def test_a_block_takes_both_sums_from_the_norms_backward(products, monkeypatch):
    """Once in the graph that all blocks share: the residual path's gradient, and the bias of attention's projection."""
    monkeypatch.setattr(kernels, "served", {DEVICE})
    torch._dynamo.reset()
    counters.clear()
    # Not monkeypatch: what it undoes on this module is hidden from every later compilation in the process.
    # A graph from the cache would leave no counters.
    with torch._inductor.config.patch(post_grad_custom_pre_pass=None, force_disable_caches=True):
        fusion.register()
        loss, grads = gradients(True)
    assert (
        counters["inductor"]["residual_gradient_in_norm"]
        == counters["inductor"]["column_sums_from_norm"]
        == 1
    )
    expected, refs = gradients(False)
    assert abs(loss - expected) < 1e-3 * expected
    for name, grad in grads.items():  # bf16: the pass adds in float32 what is otherwise rounded once more
        assert ((grad - refs[name]).norm() / refs[name].norm()).item() < 2e-2, name
