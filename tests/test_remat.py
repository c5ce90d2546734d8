"""A model that computes parts of its forward again gives the same losses, to the bit, and gradients."""

import gc

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch._dynamo.utils import counters

import kernels
import model as models
from scale import remat
from scale.compile import compile_model
from settings import Config, GPTConfig

LLAMA = dict(mlp="swiglu", norm="rmsnorm", positions="rope", n_kv_head=2, bias=False, n_hidden=176)


def settings(kind, every=1, tile=None, offload=False):
    return Config(remat=kind, remat_every=every, remat_tile=tile, remat_offload=offload)


def gradients(kind, shape, compiled, **options):
    cfg = GPTConfig(vocab_size=200, n_layer=3, n_head=4, n_embd=64, block_size=32, **shape)
    model = models.build(cfg, torch.device("cpu"), 0)
    if kind != "none":
        remat.apply(model, settings(kind, **options))
    if compiled:
        compile_model(model)
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
    cfg = GPTConfig(vocab_size=200, n_layer=3, n_head=4, n_embd=64, block_size=32, **LLAMA)
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
    shelf = own.stack[0].tape.shelf
    assert not [kept for group in shelf.leaving for kept in group.members]


@pytest.mark.parametrize("kind", ["block", "attention", "selective"])
def test_an_mlp_in_tiles_runs_twice(kind):
    """Once in the forward and once in the backward, though its block is computed again as well."""
    cfg = GPTConfig(vocab_size=200, n_layer=1, n_head=4, n_embd=64, block_size=32, **LLAMA)
    model, calls = models.build(cfg, torch.device("cpu"), 0), []

    def counted(x, *rest):
        calls.append(x.size(1))
        return kernels.mlp(x, *rest)

    model.blocks[0].mlp.core = counted
    remat.apply(model, settings(kind, tile=16))
    model(*torch.randint(0, 200, (2, 3, 32))).backward()
    assert calls == [16, 16] * 2


@pytest.mark.parametrize("kind", ["block", "selective"])
def test_random_numbers_of_an_edit_are_replayed(kind):
    """An activation that draws numbers; tiles draw others than the whole, so they are compared with tiles."""
    cfg = GPTConfig(vocab_size=200, n_layer=2, n_head=4, n_embd=64, block_size=32)
    idx, targets = torch.randint(0, 200, (2, 3, 32))
    found = []
    for own in (kind, kind if kind == "selective" else "none"):
        model = models.build(cfg, torch.device("cpu"), 0)
        for block in model.blocks:
            block.mlp.activation = lambda x: torch.relu(x) * torch.rand_like(x)
        if own != "none":
            remat.apply(model, settings(own, tile=16 if own == "selective" else None))
        torch.manual_seed(3)
        loss = model(idx, targets)
        torch.rand(7 * len(found))  # a backward that draws by itself would differ
        found.append([loss, *torch.autograd.grad(loss, list(model.parameters()))])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("kind", ["block", "selective", "attention"])
def test_same_gradients_compiled(kind, compiler):
    """Three blocks share their graphs; fused sums differ in float32's last bits."""
    counters.clear()
    loss, grads = gradients(kind, LLAMA, True)
    blocks = (
        4 if kind == "attention" else 1
    )  # attention, in no graph, divides its own forward and the block's
    assert counters["stats"]["unique_graphs"] == 2 + blocks  # embedding, blocks, head
    expected, refs = gradients("none", LLAMA, False)
    assert loss == pytest.approx(expected.item(), rel=1e-6)
    for name, grad in grads.items():
        torch.testing.assert_close(grad, refs[name], rtol=1e-4, atol=1e-6, msg=name)


def kept_bytes(kind):
    """Bytes that autograd holds between forward and backward, each storage once, parameters apart."""
    cfg = GPTConfig(vocab_size=200, n_layer=4, n_head=4, n_embd=64, block_size=64, **LLAMA)
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


@pytest.mark.parametrize("qk_norm", [False, True])
def test_q_and_k_from_before_rope_are_kept_for_their_norm_alone(qk_norm):
    """v does not hold the projection's output, in which they lie beside it."""
    shape = LLAMA | dict(qk_norm=qk_norm)
    cfg = GPTConfig(vocab_size=200, n_layer=1, n_head=4, n_embd=64, block_size=64, **shape)
    model, found = models.build(cfg, torch.device("cpu"), 0), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: found.append(t) or t, lambda t: t):
        model.hidden(torch.randint(0, 200, (8, 64)))
    kept = [t for t in found if t.dim() == 4 and t.size(1) == cfg.kv_heads]
    assert any(t.untyped_storage().nbytes() > t.nbytes for t in kept) == qk_norm


def test_what_is_kept():
    """selective: of 512 tokens a block, neither gate and up, 352 numbers, nor their product, 176."""
    none = kept_bytes("none")
    assert kept_bytes("block") < none / 5
    assert none - kept_bytes("selective") >= 4 * 512 * (352 + 176) * 4


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["cudnn", "flash"])
@pytest.mark.parametrize("heads, T, D", [((4, 4), 128, 64), ((8, 2), 384, 128)])
def test_kept_attention(backend, heads, T, D):
    """Result and gradients are those of the attention that computes both, also for a dy of another layout."""
    q, k, v = (
        torch.randn(2, T, h, D, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
        for h in (*heads, heads[1])
    )
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    expected = kernels.attention(q, k, v, backend)
    tape = remat.Tape(remat.Shelf(False))
    tape.shelf.begin()
    dys = [torch.randn_like(expected), torch.randn(expected.shape, device="cuda", dtype=torch.bfloat16)]
    for dy in dys:
        exact = torch.autograd.grad(
            F.scaled_dot_product_attention(*(t.float() for t in (q, k, v)), is_causal=True, enable_gqa=True),
            (q, k, v), dy.float(),
        )  # fmt: skip
        results = []
        for recording in (True, False):  # the recomputation reads the results, the backward frees them
            with tape.use(results, recording):
                y = remat.KeptAttention(kernels.attention, tape)(q, k, v, backend)
            assert torch.equal(y, expected)
        for found in (y, kernels.attention(q, k, v, backend)):
            for a, b in zip(torch.autograd.grad(found, (q, k, v), dy), exact, strict=True):
                assert ((a.float() - b.float()).norm() / b.float().norm()).item() < 1e-2  # bf16


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["block", "attention"])
def test_offload_on_a_gpu(kind):
    """Gradients with what is kept on the host, in tiles and fused, are those of a model that keeps all."""
    kernels.serve(torch.device("cuda"))
    shape = LLAMA | {"n_hidden": 704, "qk_norm": True}  # whose norm gives float32 under autocast
    cfg = GPTConfig(vocab_size=512, n_layer=5, n_head=4, n_embd=256, block_size=1024, **shape)
    plain, own = (models.build(cfg, torch.device("cuda"), 0) for _ in range(2))
    remat.apply(own, settings(kind, tile=256, offload=True))
    compile_model(own)
    for _ in range(3):
        idx, targets = torch.randint(0, 512, (2, 2, 1024), device="cuda")
        for model in (plain, own):
            with torch.autocast("cuda", torch.bfloat16):
                model(idx, targets).backward()
    for (name, p), ref in zip(own.named_parameters(), plain.parameters(), strict=True):
        assert ((p.grad - ref.grad).norm() / ref.grad.norm()).item() < 3e-2, (
            name
        )  # bf16, rounded in other places


@pytest.mark.parametrize("kind", ["block", "attention"])
def test_a_block_frees_what_it_kept_after_its_backward(kind):
    """With the garbage collector off: no reference cycle, and no ctx, holds tensors until the end."""
    cfg = GPTConfig(vocab_size=200, n_layer=8, n_head=4, n_embd=64, block_size=32, **LLAMA)
    model, live = models.build(cfg, torch.device("cpu"), 0), []
    remat.apply(model, settings(kind, tile=16))

    def count(_):
        live.append(
            sum(type(x) is torch.Tensor and x.shape[:1] == (3,) and x.dim() > 2 for x in gc.get_objects())
        )

    for block in model.blocks:
        block.norm_1.weight.register_hook(count)
    gc.collect()
    gc.disable()
    try:
        model(*torch.randint(0, 200, (2, 3, 32))).backward()
    finally:
        gc.enable()
    each = 1 if kind == "block" else 3  # the input; attention's output and logsumexp
    assert live[0] - live[-1] >= each * (len(live) - 2), live


def test_tiles_of_an_edited_mlp():
    """An activation with a parameter, a frozen weight, and a parameter that no forward uses."""

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(1.5))

        def forward(self, x):
            return torch.relu(x) * self.scale

    cfg = GPTConfig(vocab_size=200, n_layer=2, n_head=4, n_embd=64, block_size=32)
    found = []
    for kind in ("none", "block", "selective"):
        model = models.build(cfg, torch.device("cpu"), 0)
        for block in model.blocks:
            block.mlp.activation = Scaled()
            block.mlp.up.weight.requires_grad_(False)
            block.mlp.proj.unused = nn.Parameter(torch.ones(8))
        if kind != "none":
            remat.apply(model, settings(kind, tile=16))
        torch.manual_seed(1)
        model(*torch.randint(0, 200, (2, 3, 32))).backward()
        found.append({name: p.grad for name, p in model.named_parameters()})
    plain, *others = found
    assert plain["blocks.0.mlp.activation.scale"] is not None and plain["blocks.0.mlp.up.weight"] is None
    for grads in others:
        for name, grad in grads.items():
            assert (grad is None) == (plain[name] is None), name
            if grad is not None:
                torch.testing.assert_close(grad, plain[name], rtol=1e-4, atol=1e-6, msg=name)
