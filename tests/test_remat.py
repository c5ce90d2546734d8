"""A model that computes parts of its forward again gives the same losses, to the bit on the CPU, and gradients."""

from types import SimpleNamespace

import pytest
import torch
from torch._dynamo.utils import counters

import kernels
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


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("backend", ["cudnn", "flash"])
@pytest.mark.parametrize("heads, T, D", [((4, 4), 128, 64), ((8, 2), 384, 128)])
def test_kept_attention(backend, heads, T, D):
    """Result and gradients are those of the attention that computes both, to the bit."""
    q, k, v = (torch.randn(2, T, h, D, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for h in (*heads, heads[1]))
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    expected = kernels.attention(q, k, v, backend)
    dy = torch.randn_like(expected)
    with torch.no_grad():
        kept = kernels.attention_kept(q, k, v, backend)
    y = kernels.KeptAttention.apply(q, k, v, backend, *kept)
    assert torch.equal(y, expected)
    for a, b in zip(torch.autograd.grad(y, (q, k, v), dy), torch.autograd.grad(expected, (q, k, v), dy), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-3)  # dq is summed by atomic additions


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("kind", ["block", "attention"])
def test_offload_on_a_gpu(kind):
    """Gradients with what is kept on the host, in tiles and fused, are those of the same model that keeps all."""
    fused = pytest.importorskip("fused")
    shape = LLAMA | {"n_hidden": 704, "qk_norm": True}  # whose norm gives float32 under autocast
    cfg = models.GPTConfig(vocab_size=512, n_layer=5, n_head=4, n_embd=256, block_size=1024, **shape)
    plain, own = (fused.swap(models.build(cfg, torch.device("cuda"), 0)) for _ in range(2))
    remat.apply(own, settings(kind, tile=256, offload=True))
    parallel.compile_model(own, by_block=True)
    for _ in range(3):
        idx, targets = torch.randint(0, 512, (2, 2, 1024), device="cuda")
        for model in (plain, own):
            with torch.autocast("cuda", torch.bfloat16):
                model(idx, targets).backward()
    for (name, p), ref in zip(own.named_parameters(), plain.parameters(), strict=True):
        assert ((p.grad - ref.grad).norm() / ref.grad.norm()).item() < 3e-2, name  # bf16, rounded in other places
