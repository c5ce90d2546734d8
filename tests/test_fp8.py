"""fp8.py against float64; without an NVIDIA GPU by Triton's interpreter, and PyTorch's products."""

import copy

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from compare import GPU, INTERPRETED, LLAMA, error, gradients, slow, with_gradients
from test_checkpoint import state_of

from settings import GPTConfig

pytest.importorskip("triton", reason="Triton is installed with PyTorch's CUDA builds only")
import kernels
import model as models
from fast import cublas, forms, fp8
from run import pack

RUNS = torch.cuda.get_device_capability() >= (8, 9) if GPU else INTERPRETED
DEVICE = torch.device("cuda" if GPU else "cpu")
pytestmark = [
    pytest.mark.usefixtures("products"),
    pytest.mark.skipif(not RUNS, reason="needs a GPU with fp8 matrix units or TRITON_INTERPRET=1"),
]
# e4m3 rounds to 3 bits behind the point, a relative error of 2^-4 at worst and 2.6e-2 in the root
# mean square; a product of two has 1.4 times that. e5m2, for gradients, has twice the error. The
# interpreter loses a carry, so that a number just below a power of two becomes half of it.
E4M3, E5M2, FORWARD, BACKWARD = (4e-2, 7e-2, 5e-2, 1e-1) if GPU else (0.2, 0.35, 0.2, 0.3)
# of a model's gradients: several layers' rounding
WHOLE, ALIKE = (0.25, 0.97) if GPU else (0.35, 0.95)
# tiles are of 64 x 64; rows: a multiple of 16, as `suits` demands
SHAPES = [(144, [100]), (48, [8, 72]), (32, [48, 16, 16])]
SHAPES += [(16, [16]), (512, [768]), (208, [300, 520, 8]), (48, [8, 264])] * GPU
SEVERAL = ("copy", "gelu", "relu2")  # what is computed of tensors side by side too
BESIDE = ("dgelu", "drelu2", "swiglu", "dswiglu", "gate", "norm", "shifted_norm")
CASTS = [(M, w, k) for M, w in SHAPES for k in SEVERAL + BESIDE * (len(w) == 1)]


@pytest.fixture(autouse=True)
def fused(monkeypatch):
    monkeypatch.setattr(forms, "enabled", {DEVICE.type})
    if not GPU:  # the interpreter takes as long for rows that are not there
        monkeypatch.setattr(fp8, "SUM_STEPS", 2)


def in_fp8(model):
    """The model with fp8 in all its layers, as run/build.py's `prepare` sets it up."""
    for layer in model.modules():
        if isinstance(layer, (models.Linear, models.Head)):
            fp8.train_in_fp8(layer)
    return model


def small(**shape):
    return models.build(
        GPTConfig(vocab_size=200, n_head=4, n_embd=64, block_size=32, **shape), DEVICE, 0
    )


def low(model, *batch):
    return gradients(model, *batch, autocast=torch.autocast(DEVICE.type, torch.bfloat16))


def randn(*shape, std=1.0, dtype=torch.bfloat16):
    return (torch.randn(*shape, device=DEVICE) * std).to(dtype)


@pytest.mark.gpu  # the interpreter converts NaN to a number
@pytest.mark.parametrize("what", ["copy", "gelu", "relu2"])
@pytest.mark.parametrize("e5m2", [False, True])
def test_a_cast_keeps_nan(what, e5m2):
    """Otherwise a loss from weights that are NaN would be a number."""
    x = randn(48, 48)
    x[3, 5] = float("nan")
    top = torch.tensor([1.0, 1.0, 0.0, 0.0], device=DEVICE)
    out, out_t, _, _ = fp8.cast([x], top, [], what, e5m2, True)
    assert [t.float().isnan().nonzero().tolist() for t in (out, out_t)] == [[[3, 5]], [[5, 3]]]


@pytest.mark.parametrize("M, widths, what", CASTS)
@pytest.mark.parametrize("e5m2, std", [(False, 1e4), (True, 1e-7), *[(True, 1.0)] * GPU])
def test_cast(M, widths, what, e5m2, std):
    """Value, transpose, column sums, and the scale: a power of two with the room it should have."""
    std = min(std, 100.0) if what in ("relu2", "swiglu") else std  # whose result is a square
    top = torch.zeros(4, device=DEVICE)
    limit = torch.finfo(torch.float8_e5m2 if e5m2 else torch.float8_e4m3fn).max
    seen = None
    for call in range(3):
        parts = [randn(M, N * (1 + (what == "swiglu")), std=std * 4**call) for N in widths]
        before = randn(M, widths[0] * (1 + (what == "dswiglu")))
        beside, exact = beside_and_exactly(what, torch.cat(parts, 1), before)
        out, out_t, scale, sums = fp8.cast(parts, top, beside, what, e5m2, True)
        most = exact.abs().max().item()
        room = limit * scale.item() / (seen or most)
        seen = most
        least = fp8.GRADIENT_ROOM if e5m2 else fp8.ROOM
        assert 0.99 * least <= room <= 2.05 * least and torch.frexp(scale)[0].item() == 0.5
        assert torch.equal(out.t().view(torch.uint8), out_t.view(torch.uint8))
        clamped = exact.clamp(-limit * scale.item(), limit * scale.item())
        few = 1.5 if exact.numel() < 1000 else 1.0  # numbers, whose errors do not even out
        assert error(out.double() * scale, clamped) < few * (E5M2 if e5m2 else E4M3)
        assert torch.allclose(sums.double(), exact.sum(0), rtol=1e-3, atol=1e-3 * most * M**0.5)


@pytest.mark.parametrize(
    "M, widths", [(16, [16]), (1024, [512, 64, 128])] if GPU else [(96, [48, 16, 16])]
)
def test_a_scale_after_zeros_is_from_the_tensor_itself(M, widths):
    """As in the steps after the first of a model whose projections start at zero."""
    top = torch.zeros(4, device=DEVICE)
    for _ in range(2):
        _, _, scale, _ = fp8.cast([torch.zeros_like(randn(M, N)) for N in widths], top, [])
        assert scale.isfinite() and not top[2:].any()
    for call in range(2):
        parts = [randn(M, N) for N in widths]
        parts[call % len(parts)][-1, -1] = 1000.0
        _, _, scale, _ = fp8.cast(parts, top, [])
        limit = torch.finfo(torch.float8_e4m3fn).max
        assert not top[2:].any()
        assert 0.99 * fp8.ROOM <= limit * scale.item() / 1000 <= 2.05 * fp8.ROOM


def beside_and_exactly(what, x, before):
    """(the tensors beside x, what `cast` computes of them and x before it rounds, in float64)"""
    exact, activation = x.double(), getattr(kernels, what.removeprefix("d"), None)
    if what == "gate":
        gates = before[:, :4].contiguous()
        return [gates], exact * gates.double().repeat_interleave(x.size(1) // 4, 1)
    if what in ("norm", "shifted_norm"):
        stats, (weight, shift) = randn(2, len(x), dtype=torch.float32), randn(2, x.size(1)).float()
        normed = (exact - stats[0, :, None]) * stats[1, :, None] * weight
        shifted = what == "shifted_norm"
        return [stats, weight, shift][: 2 + shifted], normed + shift * shifted
    if not what.startswith("d"):
        return [], activation(exact) if activation else exact
    y = before.double().requires_grad_()
    if what != "drelu2":
        return [before], torch.autograd.grad(activation(y), y, exact)[0]
    act8 = activation(y / 8).to(torch.float8_e4m3fn)  # 8: far below the largest number
    return [act8, torch.tensor(64.0, device=DEVICE)], exact * 2 * 8 * act8.double().sqrt()


@pytest.mark.gpu  # is about its matrix units
@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("terms", [768, 4096, 4112, 65_536])
def test_sums(terms, fast):
    """Fast ones keep some 14 bits of the largest number; none over cublas.FAST_TERMS is fast."""
    a, b = randn(512, terms).to(torch.float8_e4m3fn), randn(256, terms).to(torch.float8_e5m2)
    one, out = torch.ones((), device=DEVICE), torch.full((512, 256), torch.nan, device=DEVICE)
    out = cublas.matmul(a, b.t(), out, scales=(one, one), fast=fast)
    assert error(out, a.double() @ b.double().t()) < (
        3e-3 if fast and terms <= cublas.FAST_TERMS else 3e-4
    )


def test_weight_gradients_are_not_fast(monkeypatch):
    own, real, asked = in_fp8(small(n_layer=1)), cublas.matmul, []

    def matmul(a, b, out, **options):
        asked.append((out.dtype, options.get("fast", False)))
        return real(a, b, out, **options)

    monkeypatch.setattr(cublas, "matmul", matmul)
    idx, targets = torch.randint(0, 200, (2, 4, 32), device=DEVICE)
    low(own, idx, targets)
    # qkv, proj, up, down and the head: results, gradients of inputs, and of weights in float32; the
    # gradient of the head's input is a sum over the vocabulary
    expected = [(torch.bfloat16, False)] + [(torch.bfloat16, True)] * 9
    expected += [(torch.float32, False)] * 5
    assert sorted(asked, key=str) == expected


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("B, T, K, N", [(3, 32, 64, 208)] + [(2, 512, 768, 2304)] * GPU)
def test_linear(B, T, K, N, bias):
    layer = models.Linear(K, N, bias=bias, device=DEVICE)
    fp8.train_in_fp8(layer)
    assert list(layer.state_dict()) == ["weight"] + ["bias"] * bias
    names, parameters = zip(*layer.named_parameters())
    of_layer = lambda x, *p: torch.func.functional_call(layer, dict(zip(names, p)), x)
    for _ in range(2):
        inputs, dy = [randn(B, T, K), *parameters], randn(B, T, N, std=1e-6)
        found = with_gradients(of_layer, inputs, dy)
        exact = with_gradients(F.linear, [x.double() for x in inputs], dy)
        bounds = FORWARD, BACKWARD, BACKWARD, 1e-3  # the bias' gradient is summed before it is cast
        assert all(error(a, b) < bound for a, b, bound in zip(found, exact, bounds))


@pytest.mark.slow
@pytest.mark.parametrize("shape", [{}, LLAMA])
@pytest.mark.parametrize("compiled", [False, True] if GPU else [True])
def test_a_model_trains_in_fp8_as_in_float64(shape, compiled):
    T, V = (128, 1000) if GPU else (32, 200)
    layers = 2 if GPU else 1
    sizes = dict(vocab_size=V, n_layer=layers, n_head=4, n_embd=2 * T, block_size=T)
    cfg = GPTConfig(**sizes, **shape, attention="cudnn")
    exact, own = (models.build(cfg, DEVICE, 0) for _ in range(2))
    names = list(own.state_dict())
    in_fp8(own)
    assert list(own.state_dict()) == names
    assert all(hasattr(layer, "w_amax") for layer in (own.head, own.blocks[0].attn.proj))
    if compiled:
        own.hidden = torch.compile(
            own.hidden, fullgraph=True, backend="inductor" if GPU else "aot_eager"
        )
    for block in exact.blocks:
        block.attn.backend = "math"
    exact.double()
    for _ in range(2):
        idx, targets = torch.randint(0, V, (2, 4 if GPU else 2, T), device=DEVICE)
        targets[0, :5] = -100
        (loss, grads), (expected, refs) = low(own, idx, targets), gradients(exact, idx, targets)
        assert error(loss, expected) < 2e-3
        for name, ref in refs.items():
            assert error(grads[name], ref) < WHOLE and alike(grads[name], ref) > ALIKE, name


def alike(a, b):
    return F.cosine_similarity(a.double().flatten(), b.double().flatten(), 0)


@pytest.mark.parametrize("shape", [{}, slow(LLAMA)])
def test_what_does_not_train_is_as_in_bf16(shape):
    own, bf16 = in_fp8(small(n_layer=2, **shape)).eval(), small(n_layer=2, **shape).eval()
    idx, targets = torch.randint(0, 200, (2, 4, 32), device=DEVICE)
    with torch.no_grad(), torch.autocast(DEVICE.type, torch.bfloat16):
        assert torch.equal(own(idx, targets)[0], bf16(idx, targets)[0])
        assert torch.equal(own.logits(idx), bf16.logits(idx))
        amaxes = [buffer for name, buffer in own.named_buffers() if name.endswith("_amax")]
        assert amaxes and not any(amax.any() for amax in amaxes)  # no scale was touched
        assert not torch.equal(own.train()(idx, targets)[0], bf16(idx, targets)[0])


def test_rows_of_any_length():
    """Where fp8's weight gradients cannot sum over the rows, the layers compute in bf16."""
    cfg = GPTConfig(vocab_size=1000, n_layer=1, n_head=4, n_embd=256, block_size=128)
    own, plain = models.build(cfg, DEVICE, 0), models.build(cfg, DEVICE, 0).double()
    in_fp8(own)
    ids, targets = (torch.randint(0, 1000, (1, 7), device=DEVICE).expand(3, 7) for _ in range(2))
    with torch.no_grad(), torch.autocast(DEVICE.type, torch.bfloat16):
        one, *others = own.logits(ids)
    assert one.shape == (7, 1000) and all(torch.equal(one, other) for other in others)
    assert alike(one, plain.logits(ids[:1])[0]) > ALIKE
    (_, grads), (_, refs) = low(own, ids, targets), gradients(plain, ids, targets)
    for name, ref in refs.items():
        assert alike(grads[name], ref) > ALIKE - 0.03, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("each, K, ranks", [(16, 48, 3)] + [(1024, 4096, 4), (16, 16, 1)] * GPU)
def test_rows_of_ranks_are_gathered_to_one_scale(dtype, each, K, ranks):
    layer = nn.Module()
    layer.w_amax = torch.zeros((), device=DEVICE)
    out = None
    for _ in range(2):  # the second time in place
        w = randn(each * ranks, K, std=0.02, dtype=dtype)
        w[-each:] *= 50
        shards = [part.clone().as_subclass(fp8.ShardIn8Bits) for part in w.split(each)]
        parts = [shard.fsdp_pre_all_gather(*[None] * 3, layer, None) for shard in shards]
        gathered = [torch.cat(tensors) for tensors in zip(*(part[0] for part in parts))]
        result = fp8.ShardIn8Bits.fsdp_post_all_gather(
            None, gathered, parts[0][1], torch.bfloat16, out=out
        )
        assert (result is None) == (out is not None)
        out, rows8 = out if result is None else result[0], gathered[0]
        assert out.shape == w.shape and out.dtype == torch.bfloat16
        assert rows8.untyped_storage().size() == 0
        straight, across = fp8.halves(out)
        assert torch.equal(straight.t().view(torch.uint8), across.view(torch.uint8))
        scale = layer.w_amax.item()
        assert torch.frexp(layer.w_amax)[0].item() == 0.5
        assert 223 < w.abs().max().item() / scale <= 448
        assert error(straight.double() * scale, w) < E4M3


def test_scales_go_on_where_they_were():
    """A resumed model's next loss and gradients are the saved one's, on the CPU to the last bit."""
    one, other = (in_fp8(small(n_layer=1)) for _ in range(2))
    idx, targets = torch.randint(0, 200, (2, 2, 16), device=DEVICE)
    # attention may round differently
    same = (lambda a, b: error(a, b) < 1e-3) if GPU else torch.equal

    def step(model):
        loss, grads = low(model, idx, targets)
        return loss, *grads.values()

    for _ in range(2):
        step(one)
        with torch.no_grad():
            for p in one.parameters():
                p.mul_(1.5)  # other largest numbers than in the call before, and other scales
    other.load_state_dict(one.state_dict())
    tensors, values = copy.deepcopy(pack.pack(state_of(one)))
    anew = step(other)
    pack.unpack(state_of(other), values, tensors)
    resumed, uninterrupted = step(other), step(one)
    assert all(map(same, resumed, uninterrupted)) and not all(map(same, anew, uninterrupted))
