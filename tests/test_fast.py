"""The fused kernels against float64; without an NVIDIA GPU as in test_fp8.py."""

import copy
import dataclasses
import inspect
import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from compare import DEVICE, GPU, LLAMA, error, gradients, runs_kernels, with_gradients

from run.build import choose
from scale.precision import pick_precision
from settings import Config, GPTConfig, check

pytest.importorskip("triton", reason="Triton is installed with PyTorch's CUDA builds only")
import fast
import kernels
import model as models
from fast import chips, forms, hopper, linear, loss, norm, rope, texts
from run.flops import OperationCounter

pytestmark = [pytest.mark.usefixtures("products"), runs_kernels]

# bf16 rounds the logits and their gradient to 8 bits: 2^-9 each at worst, 1.2e-3 in the mean, a few
# of them
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
MANY = 300 if GPU else 20  # rows; the interpreter takes milliseconds for each
LOSSES = [  # rows, width, rows of the table, tokens of the vocabulary, tokens left out
    (37, 8, 136, 136, True),
    (5, 64, 4104, 4100, True),
    (MANY, 24, 2048, 3, False),
    (7, 40, 6200, 4096, False),
]
WIDE = torch.bfloat16 if GPU else torch.float32  # NumPy, the interpreter's arithmetic, has no bf16
GATED = dict(positions="rope", qk_norm=True, attention_gate=True, value_embeddings=2)
SHAPES_OF_MODELS = [
    dict(dropout=1e-9, n_kv_head=2, qk_norm=True),
    dict(n_hidden=100),  # no multiple of 8: the MLP is plain PyTorch
    dict(n_kv_head=2, **LLAMA),
    dict(mlp="relu2", **GATED),
]


plain = inspect.unwrap(kernels.plain_cross_entropy)


def exponentials(a, b, shifts, real, out=None):
    """hopper.exponentials in PyTorch."""
    exponents = a.float() @ b.float().t() / math.log(2) - shifts[:, None]
    exponents[:, real:] = -math.inf
    tiles = F.pad(exponents, (0, -b.size(0) % hopper.BN), value=-math.inf).unflatten(
        1, (-1, hopper.BN)
    )
    raised = torch.where(torch.exp2(tiles).sum(-1) > 2**60, tiles.amax(-1), 0)
    powers = torch.exp2(tiles - raised[..., None])
    if out is not None:
        out.copy_(powers.flatten(1)[:, : b.size(0)])
    return torch.stack([powers.sum(-1), raised], -1)


@pytest.fixture(params=[False, True])
def in_product(request, monkeypatch):
    """The loss with its exponentials taken in the logits' product, as on Hopper, and without."""
    hopper_gpu = GPU and hopper.available(torch.device("cuda", 0))
    if not request.param:
        monkeypatch.setattr(loss, "on_hopper", lambda x: False)
    elif GPU and not hopper_gpu:
        pytest.skip("needs a Hopper GPU")
    elif not GPU:
        monkeypatch.setattr(loss, "on_hopper", lambda x: True)
        monkeypatch.setattr(hopper, "exponentials", exponentials)
    return request.param


@pytest.mark.parametrize("N, C, P, V, ignored", LOSSES)
@pytest.mark.parametrize("dtype", [torch.bfloat16] if GPU else [torch.float32])
def test_linear_cross_entropy(N, C, P, V, ignored, dtype, in_product, monkeypatch):
    # several chunks, the last one ragged
    monkeypatch.setattr(fast, "LOGITS_MIB", 16 * P * 4 / 2**20)
    x, weight = leaf(1, N, C, dtype=dtype), leaf(P, C, dtype=torch.float32, std=2 / C**0.5)
    targets = torch.randint(0, V, (1, 2 * N), device=DEVICE)[:, ::2]  # a view with other strides
    if ignored:
        targets[torch.rand(1, N, device=DEVICE) < 0.3] = -100
        targets[0, 0], targets[0, -1] = 0, -100
    doubles, three = (x.double(), weight.to(dtype).double()), torch.tensor(3.0, device=DEVICE)
    monkeypatch.setattr(forms, "fused", lambda *_, **__: True)
    monkeypatch.setattr(forms, "operand", lambda x: x)  # in the dtype of this case

    def mean(x, weight, **_):
        """Of the sum that the kernels compute."""
        value, count = kernels.linear_cross_entropy(
            x, SimpleNamespace(weight=weight), targets, "mean", V
        )
        assert count == (targets >= 0).sum()
        return value

    for reduction, function in dict(mean=mean, sum=loss.linear_cross_entropy).items():
        options = dict(targets=targets, reduction=reduction, vocab_size=V)
        found = with_gradients(partial(function, **options), (x, weight), three)
        exact = with_gradients(partial(plain, **options), doubles, three)
        assert all(error(*pair) < TOLERANCE[dtype] for pair in zip(found, exact))
        assert not found[2][V:].any() and found[2].dtype == torch.float32
    with torch.no_grad():
        each = loss.linear_cross_entropy(x, weight, targets, "none", V)
        expected = plain(*doubles, targets, "none", V)
    assert each.shape == (1, N) and error(each, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize(
    "base, above, least",
    [(-4, {5: 8, 6: 8}, 300), (0, {5: 0.9, 6: 0.9, 1000: 1.1, 2000: 0.75}, 40)],
)
def test_losses_of_many_nats_and_of_none(base, above, least, in_product):
    """exp is taken against the logit of the target, or of the last block: others are far off."""
    V, C = 3 * loss.CE_BLOCK + 40, 72
    x = (1 + torch.randn(1, 6, C, device=DEVICE) / 8).to(WIDE).requires_grad_()
    weight = torch.randn(V + 16, C, device=DEVICE) / 8 + base
    for token, more in above.items():
        weight[token] += more
    # rounded last: near 4 and near -4 bf16 has other steps
    weight = weight.to(WIDE).float().requires_grad_()
    targets = torch.tensor([[5, 6, V - 1, 0, -100, 9]], device=DEVICE)
    value = loss.linear_cross_entropy(x, weight, targets, "sum", V)
    value.backward()
    xd, wd = (t.detach().double().requires_grad_() for t in (x, weight))
    each = plain(xd, wd, targets, "none", V)
    each.sum().backward()
    assert each[0, :2].max() < 20 and each[0, [2, 3, 5]].min() > least
    rounded = 5e-3 if least > 100 else 1e-2  # logits to bf16, by up to 1 of 576 and 1/4 of 60 nats
    bound = rounded if GPU and not in_product else 1e-5
    assert error(value, each.sum()) < bound
    with torch.no_grad():
        assert error(loss.linear_cross_entropy(x, weight, targets, "none", V), each) < bound
    if bound == 1e-5:  # of tokens 5 and 6 each probability hangs on the difference of such logits
        assert error(x.grad, xd.grad) < 1e-2 and error(weight.grad, wd.grad) < 1e-2
    assert torch.isfinite(x.grad).all() and not x.grad[0, 4].any() and not weight.grad[V:].any()


def test_tokens_that_do_not_count_and_numbers_that_are_none(in_product):
    x = torch.randn(1, 40, 16, device=DEVICE).to(WIDE).requires_grad_()
    weight = torch.randn(136, 16, device=DEVICE).requires_grad_()
    ignored = torch.full((1, 40), -100, device=DEVICE)
    value = loss.linear_cross_entropy(x, weight, ignored, "sum", 130)
    value.backward()
    assert value == 0 and not x.grad.any() and not weight.grad.any()
    with torch.no_grad():
        x[0, 7, 3] = float("nan")
        each = loss.linear_cross_entropy(x, weight, ignored + 101, "none", 130)[0]
    assert each.isnan().nonzero().flatten().tolist() == [7]


@pytest.mark.parametrize(
    "kind, shifted, rows, C",
    [
        ("layernorm", False, 1, 64),
        ("layernorm", True, 37, 96),
        ("rmsnorm", False, MANY, 768),
        ("layernorm", True, 5, 5000),
        ("rmsnorm", False, 5, 5000),
    ],
)
@pytest.mark.parametrize("residual", [torch.float32, torch.bfloat16] if GPU else [torch.float32])
def test_norm(kind, shifted, rows, C, residual):
    """Alone, and with what fusion.py adds: a sum before it, more gradients on both sides."""
    layer = models.make_norm(GPTConfig(n_embd=C, norm=kind, bias=shifted)).to(DEVICE)
    weight, shift, eps = layer.weight, getattr(layer, "bias", None), layer.eps
    centred = kind == "layernorm"
    parameters = [torch.nn.init.normal_(p) for p in layer.parameters()]
    in_float64 = partial(F.layer_norm if centred else F.rms_norm, eps=eps)
    exactly = lambda x, *p: in_float64(x, (C,), *p)
    x, y = leaf(2, rows, C, dtype=residual), leaf(2, rows, C, dtype=WIDE)
    dtotal, dh = torch.randn(2, 2, rows, C, device=DEVICE, dtype=torch.float64)
    first = torch.randn(2, rows, 12, device=DEVICE).to(torch.bfloat16)
    with torch.no_grad():
        total, h, stats = norm.norm_forward(x, y, weight, shift, eps, centred)
        low = [dtotal.to(residual), (dh - F.pad(first, (0, C - 12))).to(torch.bfloat16)]
        dx, sums = norm.norm_backward(*low, total, stats, weight, centred, first)
    exact_total, *doubles = x.double() + y.double(), *(p.double() for p in parameters)
    exact_h, dx_alone, *exact_sums = with_gradients(exactly, [exact_total, *doubles], dh)
    assert error(h, exact_h) < 6e-3
    assert error(total, exact_total) < (1e-6 if residual == torch.float32 else 3e-3)
    # dh is rounded to bf16 on its way in, x + y on its way out
    exact_dx = dx_alone + dtotal
    assert error(dx, exact_dx) < 8e-3 and error(sums[2], exact_dx.sum((0, 1))) < 8e-3
    assert all(error(*pair) < 8e-3 for pair in zip(sums, exact_sums))


def test_gradients_of_logits_in_8_bits_are_right_in_the_mean():
    """Of many rows with much the same logits; the means of the nearest e5m2 values are 3% off."""
    rows, P = 400, 256
    logits = torch.randn(1, P) * 1.5
    # the target's probability: 0.047; nearest to -0.953: -1
    logits[0, 0] = logits[0, 1:].logsumexp(0) - 3
    logits = (logits + torch.randn(rows, P) * 0.02).to(DEVICE, torch.bfloat16)
    exact = torch.softmax(logits.double(), -1)
    exact[:, 0] -= 1
    grads = torch.empty(rows, P, dtype=torch.float8_e5m2, device=DEVICE)
    losses = torch.empty(rows, device=DEVICE)
    targets = torch.zeros(rows, dtype=torch.long, device=DEVICE)
    loss.cross_entropy_rows(logits, targets, losses, grads, P, 2.0**14)
    got = grads.float().double() / 2**14
    assert 0.03 < error(got, exact) < 0.12
    nearest = (exact * 2**14).to(grads.dtype).double() / 2**14
    means, nearest = (x.mean(0) / exact.mean(0) - 1 for x in (got, nearest))
    assert means[0].abs() < 0.01 < 0.04 < nearest[0]
    assert means.square().mean() < 0.01**2 < 0.02**2 < nearest.square().mean()


def leaf(*shape, dtype=torch.bfloat16, std=1.0):
    return (torch.randn(*shape, device=DEVICE) * std).to(dtype).requires_grad_()


OPERATIONS = {  # by the definition whose text is run, with the others that this text calls
    "Linear": "",
    "qkv": "Linear",
    "gelu": "mlp",
    "relu2": "mlp",
    "swiglu": "mlp",
    "LayerNorm": "",
    "RMSNorm": "",
    "rope": "rotated",
    "cross_entropy": "plain_cross_entropy",
}
FORMS = [  # a definition, rows, width, another width, whether with a bias
    *[
        ("Linear", 111, 64, 200, True),
        ("Linear", 256, 768, 2304, False),
        ("Linear", 1, 8, 16, True),
    ],
    ("qkv", 24, 64, 16, True),
    *[(name, 111, 64, 264, True) for name in ("gelu", "relu2", "swiglu")],
    *[(name, 9, 64, 4104, False) for name in ("gelu", "relu2", "swiglu")],
    *[("LayerNorm", 1, 64, None, False), ("LayerNorm", 37, 96, None, True)],
    *[("LayerNorm", 5, 5000, None, True), ("RMSNorm", MANY, 768, None, False)],
    *[("rope", 24, 32, None, False), ("cross_entropy", 24, 64, 96, False)],
]


def call_of(name, rows, width, other, bias):
    """(an operation of kernels.py whose fused form computes the text of this name, arguments)"""
    x = leaf(2, rows, width, dtype=WIDE)
    if name == "Linear":
        return kernels.Linear.forward, [kernels.Linear(width, other, bias), x]
    if name == "qkv":
        return kernels.qkv, [x, kernels.Linear(width, 6 * other, bias), [4, 1, 1], other]
    if name in ("gelu", "relu2", "swiglu"):
        up = kernels.Linear(width, other * (1 + (name == "swiglu")), bias)
        return kernels.mlp, [x, up, getattr(kernels, name), kernels.Linear(other, width, bias)]
    if name == "rope":
        angles = torch.randn(rows, width // 2, device=DEVICE)
        heads = leaf(2, 3, rows, width, dtype=WIDE)
        norm = torch.nn.RMSNorm(width, 1e-5)
        return kernels.rope, [heads, norm, angles.cos(), angles.sin()]
    if name == "cross_entropy":
        targets, head = (
            torch.randint(90, (2, rows), device=DEVICE),
            torch.nn.Linear(width, other, 0),
        )
        return kernels.cross_entropy, [x, head, targets, "sum", 90]
    options = dict(bias=bias) if name == "LayerNorm" else {}
    layer = getattr(kernels, name)(width, 1e-5, **options)
    return getattr(kernels, name).forward, [layer, x]


def in_float64(argument):
    """With the values of bf16."""
    if isinstance(argument, torch.nn.Module):
        return copy.deepcopy(argument).bfloat16().double()
    if torch.is_tensor(argument) and argument.is_floating_point():
        return argument.detach().double().requires_grad_(argument.requires_grad)
    return argument


def results(function, arguments, dy):
    """[result, gradients of the tensors and parameters]; several results side by side."""
    y = function(*arguments)
    if isinstance(y, tuple):
        y = torch.cat(y, 1)
    leaves = []
    for argument in arguments:
        if isinstance(argument, torch.nn.Module):
            leaves += argument.parameters()
        elif torch.is_tensor(argument) and argument.requires_grad:
            leaves.append(argument)
    dy = torch.randn(y.shape, generator=dy).to(y)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


@pytest.mark.parametrize("name, rows, width, other, bias", FORMS)
def test_each_form_computes_the_text_of_its_digest(name, rows, width, other, bias, monkeypatch):
    monkeypatch.setattr(forms, "enabled", {DEVICE})
    operation, arguments = call_of(name, rows, width, other, bias)
    for argument in arguments:
        if isinstance(argument, torch.nn.Module):
            argument.to(DEVICE)
            for p in argument.parameters():
                torch.nn.init.normal_(p, std=2 / p.size(-1) ** 0.5 if p.dim() == 2 else 0.2)
    text = inspect.unwrap(operation)
    same = torch.Generator().manual_seed
    with torch.autocast(DEVICE, torch.bfloat16):
        found = results(partial(operation.form, text), arguments, same(0))
    exact = results(text, [in_float64(argument) for argument in arguments], same(0))
    assert max(error(*pair) for pair in zip(found, exact, strict=True)) < (2e-2 if GPU else 1e-2)


def test_each_text_is_compared():
    """But attention's, which PyTorch computes; test_documents.py has its other forms."""
    assert {name for name, *_ in FORMS} == {*OPERATIONS}
    compared = " ".join([*OPERATIONS, *OPERATIONS.values()]).split()
    assert {*compared, "attention"} == {*texts.COMPUTED}


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize(
    "B, H, T, D", [(2, 3, 37, 24), (1, 2, 5, 128)] + [(4, 6, 1000, 128), (2, 12, 700, 64)] * GPU
)
def test_rope(B, H, T, D, normed):
    """Heads as qkv's views of its GEMM's output; positions from 3 on."""
    packed = leaf(B, T, (H + 2) * D, dtype=WIDE)
    heads = lambda y: y[..., D : D + H * D].unflatten(-1, (H, D)).transpose(1, 2)
    weight = (1 + torch.randn(D, device=DEVICE) / 4).requires_grad_() if normed else None
    rope_module = models.Rope(GPTConfig(n_embd=H * D, n_head=H, block_size=T + 3)).to(DEVICE)
    cos, sin = rope_module.cos[3:], rope_module.sin[3:]
    inputs = [packed, weight][: 1 + normed]
    ours = lambda packed, weight=None: rope.RopeFunction.apply(
        heads(packed), weight, 1e-5, cos, sin
    )

    def theirs(packed, weight=None):
        x = F.rms_norm(heads(packed), (D,), weight, 1e-5) if normed else heads(packed)
        first, second = x.chunk(2, -1)
        turned = first * cos - second * sin, second * cos + first * sin
        return torch.cat(turned, -1)

    dy = torch.randn(B, T, H, D, device=DEVICE).to(WIDE).transpose(1, 2)
    for given in (dy, dy.contiguous()):
        found = with_gradients(ours, inputs, given)
        exact = with_gradients(theirs, [x.double() for x in inputs], given)
        bound = 3e-3 if GPU else 1e-5  # one rounding to bf16
        assert found[0].transpose(1, 2).is_contiguous() and found[0].dtype == WIDE
        assert all(error(a, b) < bound for a, b in zip(found, exact))


def test_rope_of_other_tables_is_plain_pytorch(monkeypatch):
    """The kernel reads tables of (T, D/2); plain PyTorch takes any that can be broadcast."""
    monkeypatch.setattr(forms, "enabled", {DEVICE})
    x, cos = leaf(2, 3, 5, 8), torch.randn(5, 4, device=DEVICE)
    for table in (cos, cos.expand(2, 1, 5, 4), cos[:1], cos.t().contiguous().t()):
        found = kernels.rope(x, torch.nn.Identity(), table, table)
        assert error(found, kernels.rotated(x.double(), table, table)) < 1e-2  # bf16, cut off here


def test_a_norm_keeps_what_an_edit_adds(monkeypatch):
    """An RMSNorm with a bias, which the edit adds by itself."""

    class WithBias(kernels.RMSNorm):
        def forward(self, x):
            return super().forward(x) + self.bias

    layer, x = WithBias(16, 1e-5, device=DEVICE), leaf(40, 16)
    layer.bias = torch.nn.Parameter(torch.full((16,), 3.0, device=DEVICE))
    monkeypatch.setattr(forms, "enabled", {DEVICE})
    with torch.autocast(DEVICE, torch.bfloat16):
        found = layer(x)
    assert error(found, F.rms_norm(x.double(), (16,), eps=1e-5) + 3) < 1e-2


def test_a_second_derivative_is_refused():
    """The kernels of a backward have none, and autograd would leave it out."""
    x, weight = leaf(2, 16, 16), leaf(24, 16)
    y = linear.LinearFunction.apply(x, weight, None, True).square().sum()
    (dx,) = torch.autograd.grad(y, x, create_graph=True)
    with pytest.raises(RuntimeError, match="twice"):
        dx.square().sum().backward()


@pytest.mark.parametrize("compiled", [False, True] if GPU else [False])
@pytest.mark.parametrize("shape", SHAPES_OF_MODELS)
def test_a_model_trains_with_fused_kernels_as_with_plain_pytorch(shape, compiled, monkeypatch):
    """Loss and gradients differ as two computations in bf16 do; only the narrow MLP is plain."""
    sizes = dict(vocab_size=1000, n_layer=2, n_head=4, n_embd=256 if GPU else 64, block_size=128)
    cfg = GPTConfig(**sizes, **shape, attention="cudnn")
    B, T = (4, 128) if GPU else (2, 12)
    exact, own = (models.build(cfg, torch.device(DEVICE), 0) for _ in range(2))
    for block in [*exact.blocks, *own.blocks]:
        # or tokens attend to all alike; more is all rounding
        block.attn.qkv.weight.data *= 3 if GPU else 8
    monkeypatch.setattr(forms, "enabled", {DEVICE})
    if compiled:
        own.hidden = torch.compile(own.hidden, fullgraph=True)
        own.head.compile(fullgraph=True)
    idx, targets = torch.randint(0, 1000, (2, B, T), device=DEVICE)
    value, grads = gradients(own, idx, targets, autocast=torch.autocast(DEVICE, torch.bfloat16))
    if not GPU:
        seen = OperationCounter(DEVICE, torch.bfloat16)
        with monkeypatch.context() as counted:
            counted.setattr(forms, "counting", seen)
            own(idx, targets)
        plain_calls = {name for name, reason in seen.calls if reason}
        assert plain_calls == ({"mlp", "linear"} if "n_hidden" in shape else set())
    for block in exact.blocks:
        block.attn.backend = "math"
    monkeypatch.setattr(forms, "enabled", set())
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        expected, refs = gradients(exact.double(), idx, targets)
    assert error(value, expected) < 1e-3
    for name, ref in refs.items():
        assert error(grads[name], ref) < 3e-2, name


def test_what_each_chip_runs(monkeypatch):
    """ROCm's devices are "cuda" to PyTorch too, and their capabilities look like NVIDIA's."""
    lacks = (chips.no_bf16, chips.no_fp8, chips.no_fused_kernels)
    found = {}
    cuda = torch.device("cuda", 0)
    for version, *number in (("13.0", 7, 5), ("13.0", 8, 0), ("13.0", 8, 9), (None, 9, 0)):
        monkeypatch.setattr(torch.version, "cuda", version)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, n=number: tuple(n))
        found[version, *number] = [lack(cuda) is None for lack in lacks]
    assert [*found.values()] == [
        [False] * 3, [True, False, True], [True] * 3, [True, False, False]
    ]  # fmt: skip
    assert all(lack(torch.device(kind)) for lack in lacks for kind in ("cpu", "mps"))


@pytest.mark.parametrize("capability, best", [((8, 0), "bf16"), ((8, 9), "fp8")])
def test_auto8_is_fp8_where_the_gpu_has_it(capability, best, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    cuda, cpu = torch.device("cuda", 0), torch.device("cpu")
    assert pick_precision("auto8", cuda)[0] == best and pick_precision("auto", cuda)[0] == "bf16"
    assert pick_precision("auto8", cpu) == pick_precision("auto", cpu)
    monkeypatch.setattr(forms, "load", lambda: "the package triton is not installed")
    assert pick_precision("auto8", cuda)[0] == "bf16"


@pytest.mark.parametrize("settings, precision", [
    ({}, "fp16"), (dict(optimizer="muon"), "fp32"), (dict(parallel="fsdp"), "fp32"),
    (dict(precision="bf16"), "bf16"),
])  # fmt: skip
def test_auto_without_bf16_is_fp16_where_its_loss_scaler_serves(settings, precision, monkeypatch):
    """A T4, whose first command may be the quick start's, with Muon."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (15 * 2**30, 16 * 2**30))
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: 1.0)
    cfg, rows = choose(Config(attention="flash", **settings), torch.device("cuda", 0))
    assert cfg.precision == precision and cfg.ops == "torch"
    if "precision" not in settings:
        assert f"{precision} (this GPU has no bf16 matrix units)" in dict(rows)["precision"]
    check(dataclasses.replace(cfg, attention="auto"), 1)
