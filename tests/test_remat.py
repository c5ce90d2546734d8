"""A model that computes parts of its forward again gives the same losses and gradients, to the bit on the CPU."""

import pytest
import torch
from torch._dynamo.utils import counters

import model as models
import parallel
import remat

LLAMA = dict(mlp="swiglu", norm="rmsnorm", positions="rope", n_kv_head=2, bias=False, n_hidden=176)


def gradients(kind, every, shape, compiled):
    cfg = models.GPTConfig(vocab_size=200, n_layer=3, n_head=4, n_embd=64, block_size=32, **shape)
    model = models.build(cfg, torch.device("cpu"), 0)
    if kind != "none":
        remat.apply(model, kind, every)
    if compiled:
        parallel.compile_model(model, by_block=True)
    torch.manual_seed(1)
    idx, targets = torch.randint(0, 200, (2, 3, 32))
    loss = model(idx, targets)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("kind, every", [("block", 1), ("block", 2), ("selective", 1), ("selective", 2)])
@pytest.mark.parametrize("shape", [dict(dropout=0.1), LLAMA])
def test_same_gradients(kind, every, shape):
    loss, grads = gradients(kind, every, shape, False)
    expected, refs = gradients("none", 1, shape, False)
    assert torch.equal(loss, expected)
    for name, grad in grads.items():
        assert torch.equal(grad, refs[name]), name


@pytest.mark.parametrize("kind", ["block", "selective"])
def test_same_gradients_compiled(kind):
    """Three blocks make one graph, and its fused sums differ in the last bits only."""
    torch._dynamo.reset()
    counters.clear()
    loss, grads = gradients(kind, 1, LLAMA, True)
    assert counters["stats"]["unique_graphs"] == 3 and not counters["graph_break"]  # embedding, blocks, head
    expected, refs = gradients("none", 1, LLAMA, False)
    assert loss == pytest.approx(expected.item(), rel=1e-6)
    for name, grad in grads.items():
        torch.testing.assert_close(grad, refs[name], rtol=1e-4, atol=1e-6, msg=name)


def kept_bytes(kind):
    """Bytes that autograd holds between forward and backward, each storage once, parameters apart."""
    cfg = models.GPTConfig(vocab_size=200, n_layer=4, n_head=4, n_embd=64, block_size=64, **LLAMA)
    model = models.build(cfg, torch.device("cpu"), 0)
    if kind != "none":
        remat.apply(model, kind)
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    seen = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    x = torch.randint(0, 200, (8, 64))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        hidden = model.hidden(x)
    assert hidden.requires_grad
    return sum(seen.values())


def test_block_keeps_a_fraction():
    assert kept_bytes("block") < kept_bytes("none") / 5


def test_what_selective_keeps():
    """Attention, and matmuls that are narrow for what they cost; not the MLP's wide ones, nor elementwise results."""
    a, narrow, wide = torch.empty(8, 64), torch.empty(64, 128), torch.empty(64, 129)
    save, again = remat.CheckpointPolicy.MUST_SAVE, remat.CheckpointPolicy.PREFER_RECOMPUTE
    aten = torch.ops.aten
    assert remat.keep(None, aten.mm.default, a, narrow) == save and remat.keep(None, aten.mm.default, a, wide) == again
    assert remat.keep(None, aten.addmm.default, torch.empty(128), a, narrow) == save
    assert remat.keep(None, aten._scaled_dot_product_flash_attention_for_cpu.default, a, a, a) == save
    assert remat.keep(None, aten._scaled_dot_product_cudnn_attention.default, a, a, a) == save
    assert remat.keep(None, aten.gelu.default, a) == again
