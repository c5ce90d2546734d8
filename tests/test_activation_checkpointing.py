"""A model that recomputes parts of its forward has the same losses, bit for bit, and gradients."""

import gc

import pytest
import torch
import torch.nn as nn
from compare import LLAMA, error, gradients
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

import model as models
from fast import forms
from run.build import compile_model
from scale import activation_checkpointing, generators
from scale.activation_offload import host_like
from settings import Config, GPTConfig

GROUPED, DROPOUT = dict(n_kv_head=2, n_hidden=176, **LLAMA), dict(dropout=0.1)


def apply(model, kind, every=1, tile=None, offload=False):
    if kind != "none":
        cfg = Config(remat=kind, remat_every=every, remat_tile=tile, remat_offload=offload)
        activation_checkpointing.apply(model, cfg)
    return model


def build(shape=GROUPED, kind="none", device="cpu", **options):
    """A model of three layers; options: of apply, n_layer, n_embd, vocab_size, block_size."""
    sizes = dict(vocab_size=200, n_layer=3, n_head=4, n_embd=64, block_size=32)
    sizes |= {name: options.pop(name) for name in sizes.keys() & options.keys()}
    model = models.build(GPTConfig(**sizes, **shape), torch.device(device), 0)
    return apply(model, kind, **options)


def batch():
    return torch.randint(0, 200, (2, 3, 32), generator=torch.Generator().manual_seed(1))


def trained(model):
    """(loss, gradients) with the same tokens and random numbers each time."""
    torch.manual_seed(1)
    return gradients(model, *batch())


def check(model, shape=GROUPED, rel=0.0, atol=1e-7):
    """Loss and gradients are those of a model that keeps all, but for the order of sums."""
    (loss, grads), (expected, refs) = trained(model), trained(build(shape))
    torch.testing.assert_close(loss, expected, rtol=rel, atol=0)
    torch.testing.assert_close(grads, refs, rtol=1e-4, atol=atol)


@pytest.mark.parametrize("kind, every, shape, offload", [
    ("block", 1, DROPOUT, False),
    ("block", 1, DROPOUT, True),
    ("block", 2, GROUPED, True),
    ("selective", 1, DROPOUT, False),
    ("selective", 2, GROUPED, False),
    ("attention", 1, GROUPED, False),
    ("attention", 2, dict(qk_norm=True), True),
])  # fmt: skip
def test_same_gradients(kind, every, shape, offload):
    check(build(shape, kind, every=every, offload=offload), shape)


@pytest.mark.parametrize("kind, tile", [("block", 5), ("attention", 5), ("block", 100)])
def test_same_gradients_in_tiles(kind, tile):
    """Of 32 tokens. Sums over tokens are in another order."""
    check(build(kind=kind, tile=tile), rel=1e-6, atol=1e-6)


def test_what_is_offloaded_survives_accumulation_and_a_forward_without_backward():
    plain, own = build(), build(kind="attention", offload=True)
    for idx in torch.randint(0, 200, (3, 2, 2, 32)):
        own(*idx)  # its graph is dropped
        for model in (plain, own):
            model(*idx)[0].backward()
        with torch.no_grad():
            assert torch.equal(own(*idx)[0], plain(*idx)[0])
    for p, ref in zip(own.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, ref.grad, rtol=1e-4, atol=1e-7)
    assert not [kept for group in own.layers[0][1].store.leaving for kept in group.members]


@pytest.mark.parametrize("kind", ["block", "selective"])
def test_random_numbers_of_an_edit_are_replayed(kind):
    """An activation that draws random numbers draws the same ones when it is computed again.

    Tiles draw other numbers than the whole, so that tiles are compared with tiles.
    """
    found = []
    for own in (kind, kind if kind == "selective" else "none"):
        model = build({})
        for block in model.blocks:
            block.mlp.activation = lambda x: torch.relu(x) * torch.rand_like(x)
        apply(model, own, tile=16 if own == "selective" else None)
        generators.seed(3)
        loss, *_ = model(*batch())
        torch.rand(1 + len(found))  # a backward that draws by itself would differ
        found.append([loss, *torch.autograd.grad(loss, list(model.parameters()))])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("compiler", ["graphs"], indirect=True)
@pytest.mark.parametrize("kind", ["block", "selective", "attention"])
def test_same_gradients_compiled(kind, compiler):
    """Three blocks share their graphs."""
    counters.clear()
    model = build(kind=kind)
    compile_model(model)
    check(model, rel=1e-6, atol=1e-6)
    # attention, in no graph, divides its own forward and the block's
    blocks = 4 if kind == "attention" else 1
    assert counters["stats"]["unique_graphs"] == 2 + blocks  # embedding, blocks, head


def kept_bytes(kind):
    """Bytes that autograd holds from forward to backward, each storage once, parameters apart."""
    model, found = build(kind=kind, n_layer=4, block_size=64), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: found.append(t) or t, lambda t: t):
        model.hidden(torch.randint(0, 200, (8, 64)))
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in found}
    return sum(size for storage, size in sizes.items() if storage not in own)


def test_what_is_kept():
    """selective keeps neither gate and up nor their product.

    They are 352 and 176 numbers of each of a block's 512 tokens.
    """
    none = kept_bytes("none")
    assert kept_bytes("block") < none / 5
    assert none - kept_bytes("selective") >= 4 * 512 * (352 + 176) * 4


class Calls(TorchDispatchMode):
    """Counts the attention that runs."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function in activation_checkpointing.ATTENTION
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", ["block", "attention"])
def test_attention_is_kept_or_runs_twice(kind):
    model = build(kind=kind)
    with Calls() as calls:
        model(*batch())[0].backward()
    assert calls.count == (6 if kind == "block" else 3)


def test_a_block_without_fused_attention_runs_twice():
    found = []
    for kind in ("none", "attention"):
        model = build({})
        model.blocks[0].attn.core = lambda q, k, v, *_: (q @ k.mT).softmax(-1) @ v
        found.append(trained(apply(model, kind)))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-7)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "kind, backend", [("block", "auto"), ("attention", "cudnn"), ("attention", "flash")]
)
def test_offload_on_a_gpu(kind, backend):
    """Offload's gradients, in tiles and fused, are those of a model that keeps all on the GPU."""
    forms.enable(torch.device("cuda"))
    # qk_norm's norm gives float32 under autocast
    shape = GROUPED | dict(n_hidden=704, qk_norm=True, attention=backend)
    sizes = dict(vocab_size=512, n_layer=5, n_embd=256, block_size=1024, device="cuda")
    plain, own = build(shape, **sizes), build(shape, kind, **sizes, tile=256, offload=True)
    compile_model(own)
    for _ in range(3):
        idx, targets = torch.randint(0, 512, (2, 2, 1024), device="cuda")
        for model in (plain, own):
            with torch.autocast("cuda", torch.bfloat16):
                model(idx, targets)[0].backward()
    for (name, p), ref in zip(own.named_parameters(), plain.parameters(), strict=True):
        assert error(p.grad, ref.grad) < 3e-2, name  # bf16, rounded in other places


@pytest.mark.gpu
def test_large_host_memory_is_pinned_at_its_own_size():
    """Not by PyTorch, which would round 96 MiB up to 128; and it is unpinned with the tensor."""
    for _ in range(3):
        x = torch.randn(24, 2**20, device="cuda")
        before = torch.cuda.host_memory_stats().get("allocated_bytes.current", 0)
        host = host_like(x)
        host.copy_(x, non_blocking=True)
        torch.cuda.synchronize()
        assert host.is_pinned() and torch.equal(host, x.cpu())
        assert torch.cuda.host_memory_stats().get("allocated_bytes.current", 0) == before
        del host  # the next one may have the same address, which cannot be pinned twice


@pytest.mark.parametrize("kind", ["block", "attention"])
def test_a_block_frees_what_it_kept_after_its_backward(kind):
    """With the garbage collector off, no reference cycle and no ctx holds tensors until the end."""
    model, live = build(kind=kind, tile=16, n_layer=8), []
    is_kept = lambda x: type(x) is torch.Tensor and x.shape[:1] == (3,) and x.dim() > 2

    def count(_):
        live.append(sum(map(is_kept, gc.get_objects())))

    for block in model.blocks:
        block.norm_1.weight.register_hook(count)
    gc.collect()
    gc.disable()
    try:
        model(*batch())[0].backward()
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

    found = []
    for kind in ("none", "block", "selective"):
        model = build({})
        for block in model.blocks:
            block.mlp.activation = Scaled()
            block.mlp.up.weight.requires_grad_(False)
            block.mlp.proj.unused = nn.Parameter(torch.ones(8))
        _, grads = trained(apply(model, kind, tile=16))
        found.append({name: grad for name, grad in grads.items() if grad is not None})
    plain, *others = found
    assert "blocks.0.mlp.activation.scale" in plain and "blocks.0.mlp.up.weight" not in plain
    for grads in others:
        torch.testing.assert_close(grads, plain, rtol=1e-4, atol=1e-6)
