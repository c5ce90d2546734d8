"""A model that computes parts of its forward again gives the same losses, to the bit on the CPU, and gradients."""

from types import SimpleNamespace

import pytest
import torch
from torch._dynamo.utils import counters

import model as models
import parallel
import remat

LLAMA = dict(mlp="swiglu", norm="rmsnorm", positions="rope", n_kv_head=2, bias=False, n_hidden=176)


def settings(kind, every=1, tile=None, offload=False):
    return SimpleNamespace(remat=kind, remat_every=every, remat_tile=tile, remat_offload=offload, attention="flash")


def gradients(kind, shape, compiled, **options):
    cfg = models.GPTConfig(vocab_size=200, n_layer=3, n_head=4, n_embd=64, block_size=32, **shape)
    model = models.build(cfg, torch.device("cpu"), 0)
    if kind != "none":
        remat.apply(model, settings(kind, **options))
    if compiled:
        parallel.compile_model(model, by_block=True)
    torch.manual_seed(1)
    idx, targets = torch.randint(0, 200, (2, 3, 32))
    loss = model(idx, targets)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("kind", ["block", "selective", "attention"])
@pytest.mark.parametrize("shape", [dict(dropout=0.1), dict(qk_norm=True), LLAMA])
def test_same_gradients(kind, every, shape, offload):
    if kind == "attention" and "dropout" in shape or kind == "selective" and offload:
        pytest.skip("refused by remat.problems")
    loss, grads = gradients(kind, shape, False, every=every, offload=offload)
    expected, refs = gradients("none", shape, False)
    assert torch.equal(loss, expected)
    for name, grad in grads.items():  # two gradients are added in another order: float32's last bits
        torch.testing.assert_close(grad, refs[name], rtol=1e-4, atol=1e-7, msg=name)


@pytest.mark.parametrize("kind", ["block", "attention"])
@pytest.mark.parametrize("tile", [5, 16, 100])
def test_same_gradients_in_tiles(kind, tile):
    """Of 32 tokens. Sums over tokens are in another order: float32's last bits."""
    loss, grads = gradients(kind, LLAMA, False, tile=tile)
    expected, refs = gradients("none", LLAMA, False)
    assert loss == pytest.approx(expected.item(), rel=1e-6)
    for name, grad in grads.items():
        torch.testing.assert_close(grad, refs[name], rtol=1e-4, atol=1e-6, msg=name)


def test_what_is_offloaded_survives_accumulation_and_a_forward_without_backward():
    cfg = models.GPTConfig(vocab_size=200, n_layer=3, n_head=4, n_embd=64, block_size=32, **LLAMA)
    plain, own = (models.build(cfg, torch.device("cpu"), 0) for _ in range(2))
    remat.apply(own, settings("attention", offload=True))
    for idx in torch.randint(0, 200, (3, 2, 2, 32)):
        own(*idx)  # its graph is dropped
        for model in (plain, own):
            model(*idx).backward()
        with torch.no_grad():
            assert torch.equal(own(*idx), plain(*idx))
    for p, ref in zip(own.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, ref.grad, rtol=1e-4, atol=1e-7)
    shelf = own.blocks[0].shelf
    assert shelf.last() is None and not shelf.leaving


@pytest.mark.parametrize("kind", ["block", "selective", "attention"])
def test_same_gradients_compiled(kind):
    """Three blocks make one graph, or one for each part with and without gradients; fused sums differ in last bits."""
    torch._dynamo.reset()
    counters.clear()
    loss, grads = gradients(kind, LLAMA, True)
    blocks = 1 if kind == "selective" else 4
    assert counters["stats"]["unique_graphs"] == 2 + blocks and not counters["graph_break"]  # embedding, blocks, head
    expected, refs = gradients("none", LLAMA, False)
    assert loss == pytest.approx(expected.item(), rel=1e-6)
    for name, grad in grads.items():
        torch.testing.assert_close(grad, refs[name], rtol=1e-4, atol=1e-6, msg=name)


def kept_bytes(kind):
    """Bytes that autograd holds between forward and backward, each storage once, parameters apart."""
    cfg = models.GPTConfig(vocab_size=200, n_layer=4, n_head=4, n_embd=64, block_size=64, **LLAMA)
    model = models.build(cfg, torch.device("cpu"), 0)
    if kind != "none":
        remat.apply(model, settings(kind))
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
