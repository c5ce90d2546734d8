"""kernels.py: the plain loss, whole and in chunks, against float64; the choice of a kernel."""

import functools

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from conftest import peak_bytes
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import fast
import kernels
import model as models
from fast import cublas, forms, gradients
from fast.chips import best_attention
from run import build, flops
from settings import GPTConfig


@pytest.fixture
def in_chunks(monkeypatch):
    """in_chunks(rows, V): logits of `rows` tokens fit, of a power of two of which chunks are."""
    return lambda rows, V: monkeypatch.setattr(fast, "LOGITS_MIB", 4 * V * rows / 2**20)


@pytest.mark.parametrize("rows, V", [(21, 33), (5, 33), (1, 40)])
def test_linear_cross_entropy(rows, V, in_chunks):
    """Of 21 tokens at once and in chunks; padding and ignored targets take no part."""
    in_chunks(rows, 40)
    x, weight = (torch.randn(*shape, 16).double().requires_grad_() for shape in ((3, 7), (40,)))
    targets, factors = torch.randint(0, V, (3, 7)), torch.rand(3, 7)
    targets[0, :6] = -100  # a chunk of them alone
    logits = (x @ weight[:V].t()).flatten(0, 1)
    expected = F.cross_entropy(logits, targets.flatten(), reduction="none").view_as(targets)
    own, head = x.detach().float().requires_grad_(), nn.Linear(16, 40, bias=False)
    head.weight = nn.Parameter(weight.detach().float())
    real = targets >= 0
    rows_of = expected.sum(1) / real.sum(1)
    sums = {"none": (expected * factors).sum(), "rows": (rows_of * factors[:, 0]).sum()}
    sums |= {"mean": expected.sum() / real.sum(), "sum": expected.sum()}
    counts = {"none": real, "rows": real.sum(1), "mean": real.sum()}
    for reduction, value in sums.items():
        if reduction == "sum":  # what the fused kernels serve
            loss = kernels.cross_entropy(own, head, targets, "sum", V)
            mean = kernels.cross_entropy(own, head, targets, "mean", V)
            torch.testing.assert_close(mean.double(), sums["mean"], rtol=1e-5, atol=1e-5)
        else:
            loss, count = kernels.linear_cross_entropy(own, head, targets, reduction, V)
            assert torch.equal(count, counts[reduction])
        weights = {"none": factors, "rows": factors[:, 0]}.get(reduction)
        loss = loss if weights is None else (loss * weights).sum()
        torch.testing.assert_close(loss.double(), value, rtol=1e-5, atol=1e-5)
        dx, dw = torch.autograd.grad(loss, [own, head.weight])
        refs = torch.autograd.grad(value, [x, weight], retain_graph=True)
        torch.testing.assert_close((dx.double(), dw.double()), refs, rtol=1e-4, atol=1e-5)
        assert not dw[V:].any()
    with torch.no_grad():
        each, _ = kernels.linear_cross_entropy(own, head, targets, "none", V)
    torch.testing.assert_close(each.double(), expected, rtol=1e-5, atol=1e-5)


def test_chunks_of_logits_take_little_memory_and_come_again_for_a_backward_alone(
    in_chunks, monkeypatch
):
    """16 MiB of logits at once, or in 16 chunks, of which one at a time is held."""
    seen, plain = [], F.cross_entropy
    monkeypatch.setattr(F, "cross_entropy", lambda *a, **b: seen.append(0) or plain(*a, **b))
    x, targets = torch.randn(2, 512, 16), torch.randint(0, 4096, (2, 512))
    head = nn.Linear(16, 4096, bias=False)

    def measured(rows, trains):
        """(bytes at the peak, how often logits were computed)"""
        in_chunks(rows, 4096)
        seen.clear()
        loss = lambda: kernels.linear_cross_entropy(x, head, targets, "mean", 4096)[0]
        with torch.set_grad_enabled(trains):
            peak = peak_bytes(lambda: loss().backward() if trains else loss())
        return peak, len(seen)

    for trains in (True, False):
        (whole, once), (few, often) = measured(1024, trains), measured(64, trains)
        assert few < whole / 8 and (once, often) == (1, 32 if trains else 16)


def test_chunks_in_16_bits_add_up_in_float32(in_chunks):
    """Under autocast the weight's gradient is as exact of 512 chunks as of all tokens at once."""
    x, head = torch.randn(2, 256, 16), nn.Linear(16, 40, bias=False)
    targets = torch.randint(0, 40, (2, 256))

    def gradient(rows, low):
        in_chunks(rows, 40)
        with torch.autocast("cpu", torch.bfloat16, enabled=low):
            loss = kernels.cross_entropy(x, head, targets, "sum", 40)
        return torch.autograd.grad(loss, head.weight)[0]

    exact = gradient(512, False)
    error = {rows: (gradient(rows, True) - exact).norm() / exact.norm() for rows in (1, 512)}
    assert error[1] < 1.2 * error[512] < 0.02


def test_chunks_compiled_share_a_graph(in_chunks, compiler):
    """The compiled head has one graph for all chunks, two or eight, and the same results."""
    cfg, captured = GPTConfig(vocab_size=200, n_embd=32), []
    head = models.Head(cfg)
    x, targets = torch.randn(4, 32, 32, requires_grad=True), torch.randint(0, 200, (4, 32))
    loss, _ = head(x, targets, "mean")
    refs = torch.autograd.grad(loss, [x, head.weight])
    head.compile()
    for rows in (64, 16):
        torch._dynamo.reset()
        counters.clear()
        in_chunks(rows, cfg.padded_vocab)
        for _ in range(2):
            own, _ = head(x, targets, "mean")
            torch.testing.assert_close(own, loss, rtol=1e-6, atol=0)
            torch.testing.assert_close(
                torch.autograd.grad(own, [x, head.weight]), refs, rtol=1e-4, atol=1e-6
            )
        assert counters["stats"]["unique_graphs"] == 3  # of the count, of every chunk, of the mean
        captured.append(counters["stats"]["calls_captured"])
    assert captured[0] == captured[1] > 0
    with torch.no_grad():
        for reduction in ("none", "rows"):  # of as many targets in each row
            torch.testing.assert_close(
                head(x, targets, reduction)[0].mean(), loss, rtol=1e-6, atol=0
            )


@pytest.mark.parametrize("reduction", ["mean", "rows", "none"])
def test_a_mean_of_no_targets_is_zero_and_so_are_its_gradients(reduction):
    """Also where a loss of somebody's own is NaN for a token that does not count."""
    targets = torch.full((2, 3), -100)
    targets[1, 0] = 5
    losses = torch.randn(2, 3, requires_grad=True)
    odd = torch.where(targets >= 0, losses, torch.nan)
    found, count = kernels.mean_loss(odd, targets, reduction)
    expected = {"mean": losses[1, 0], "rows": torch.stack([losses[0, 0] * 0, losses[1, 0]])}
    expected["none"] = torch.where(targets >= 0, losses, 0)
    assert torch.equal(found, expected[reduction]) and count.sum() == 1
    found.sum().backward()
    assert torch.equal(losses.grad, (targets >= 0).float())
    nothing, count = kernels.mean_loss(odd, torch.full((2, 3), -100), reduction)
    assert not nothing.any() and not count.any()


def test_which_calls_take_the_fused_kernel(monkeypatch):
    """By type of device, dtype, widths and kind of layer; --ops=torch switches all off."""
    monkeypatch.setattr(forms, "enabled", {"cpu"})
    wide, narrow, x = kernels.Linear(16, 32), kernels.Linear(16, 30), torch.randn(2, 3, 16)

    class Edited(kernels.Linear):
        def forward(self, x):
            return super().forward(x)

    def fused(*layers, dtype=torch.bfloat16, **options):
        with torch.autocast("cpu", dtype):
            return forms.fused("linear", x, *layers, **options)

    assert fused(wide) and not fused(narrow) and not fused(wide, narrow)
    assert fused(wide, unless={"a reason": False}) and not fused(wide, unless={"a reason": True})
    assert not fused(wide, dtype=torch.float16) and not forms.fused("linear", x, wide)
    has_more = forms.has_hooks_or_own_forward
    assert not has_more(wide, kernels.LayerNorm(16)) and has_more(wide, Edited(16, 32))
    assert has_more(nn.Linear(16, 32))
    assert "NVIDIA" in forms.enable(torch.device("cpu")) and not forms.enabled and not fused(wide)
    monkeypatch.setattr(forms, "enabled", {"cpu"})
    assert forms.enable(torch.device("cpu"), "torch") == "ops=torch" and not forms.enabled
    for kind in ("forward", "forward_pre", "full_backward", "full_backward_pre"):
        layer = kernels.Linear(8, 8)
        getattr(layer, f"register_{kind}_hook")(lambda *_: None)
        assert not has_more(wide) and has_more(layer)  # a layer with a hook is called
    layer = kernels.Linear(8, 8)
    layer.forward = torch.sin
    assert has_more(layer)


def test_ropes_fused_kernel_has_rms_norms_alone_and_no_gradients_of_tables(monkeypatch):
    monkeypatch.setattr(forms, "enabled", {"cuda"})
    x, (cos, sin) = torch.randn(2, 3, 4, 16), torch.randn(2, 4, 8)
    norms = nn.Identity(), nn.RMSNorm(16, 1e-5), kernels.RMSNorm(16, 1e-5)
    others = kernels.LayerNorm(16), kernels.Linear(16, 16), nn.Sequential(nn.RMSNorm(16, 1e-5))
    for layer in norms + others:
        seen = flops.OperationCounter("cuda", torch.bfloat16)
        monkeypatch.setattr(forms, "counting", seen)
        kernels.rope(x, layer, cos, sin)
        assert seen.calls["rope", forms.OTHER_LAYER if layer in others else None] == 1
        assert layer in others or seen.calls.total() == 1  # the norm is inside
    kernels.rope(x, norms[0], *torch.randn(2, 4, 8, requires_grad=True))
    assert seen.calls["rope", forms.UNUSUAL_TABLES] == 1


def attention_inputs(kv_heads, device):
    shapes = (2, 8, 333, 64), *[(2, kv_heads, 333, 64)] * 2
    return [torch.randn(shape, device=device).bfloat16().requires_grad_() for shape in shapes]


@pytest.mark.gpu
@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8])
def test_attention_of_few_key_heads(kv_heads, device="cuda"):
    """By a run's backend, against float64; cuDNN's was wrong on B200s (pytorch#193893)."""
    own = attention_inputs(kv_heads, device)
    exact = [x.detach().double().requires_grad_() for x in own]
    y = kernels.attention(*own, best_attention(torch.device(device))[0])
    expected = kernels.attention(*exact, "math")
    dy = torch.randn_like(y)
    y.backward(dy)
    expected.backward(dy.double())
    found = [y, *(x.grad for x in own)]
    for a, b in zip(found, [expected, *(x.grad for x in exact)], strict=True):
        assert (a - b).norm() < 0.01 * b.norm()


@pytest.mark.gpu
def test_compiled_attention_drops_in_its_backward_what_its_forward_dropped(device="cuda"):
    """The output is linear in v, so that <y, y> is <v, gradient> (pytorch#198333)."""
    q, k, v = attention_inputs(2, device)
    backend, _ = best_attention(torch.device(device))
    compiled = torch.compile(lambda *tensors: kernels.attention(*tensors, backend, 0.5))
    y = compiled(q, k, v)
    y.backward(y.detach())
    square = y.detach().float().square().sum()
    product = (v.grad.float() * v.detach().float()).sum()
    assert product.item() == pytest.approx(square.item(), rel=0.01)
    assert square > 1.5 * kernels.attention(q, k, v, backend).float().square().sum()


@pytest.mark.gpu
def test_compiled_dropout_is_recomputed_as_it_was(device="cuda"):
    """Of a transposed tensor; neighbours are dropped independently (pytorch#198333)."""
    model = models.build(
        GPTConfig(n_layer=1, n_head=2, n_embd=32, vocab_size=64), torch.device(device), 0
    )
    build.compile_model(model)

    @torch.compile
    def dropped(x):
        return checkpoint(lambda x: F.dropout(x.mT, 0.5).contiguous(), x, use_reentrant=False)

    x = torch.randn(8, 64, 4096, device=device).requires_grad_()
    y = dropped(x)
    y.backward(y.detach())
    square = y.detach().square().sum().item()
    assert (x.grad * x.detach()).sum().item() == pytest.approx(square, rel=1e-4)
    kept = (y != 0).float()
    for neighbour in (kept.roll(1, 1), kept.roll(1, 2)):
        assert (kept == neighbour).float().mean().item() == pytest.approx(0.5, abs=0.01)


def test_gradients_of_attention_have_the_layout_of_its_output():
    y = torch.randn(2, 8, 4, 16).transpose(1, 2).requires_grad_()
    kept = []
    y.register_hook(lambda grad: kept.append(grad.stride()))
    dy = torch.randn(2, 4, 8, 16)  # contiguous, which y is not
    gradients.SameLayout.apply(y).backward(dy)
    assert kept == [y.stride()] and torch.equal(y.grad, dy)


def test_a_function_that_does_not_run_is_left_out_but_out_of_memory_is_not():
    """cuBLASLt's algorithms are tried so."""

    def raises(error):
        raise error

    fails = functools.partial(raises, RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED"))
    full = functools.partial(raises, torch.OutOfMemoryError("CUDA out of memory"))
    assert cublas.runs(list) and not cublas.runs(fails)
    with pytest.raises(torch.OutOfMemoryError):
        cublas.runs(full)


def test_a_product_of_other_widths_is_refused():
    """cuBLASLt would read other numbers."""
    with pytest.raises(AssertionError, match=r"\(8, 16\), b: \(24, 32\)"):
        cublas.matmul(torch.zeros(8, 16), torch.zeros(24, 32), torch.zeros(8, 32))


def test_calls_of_a_vector_or_of_no_tokens_run_in_plain_pytorch(monkeypatch):
    """As for an expert that no token chose."""
    monkeypatch.setattr(forms, "enabled", {"cpu"})
    up, down, norm = kernels.Linear(16, 64), kernels.Linear(64, 16), kernels.LayerNorm(16)
    head, none = kernels.Linear(16, 64, bias=False), torch.zeros(0, dtype=torch.long)
    x = torch.randn(0, 16, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = kernels.mlp(norm(x), up, kernels.gelu, down)
        loss, _ = kernels.linear_cross_entropy(y, head, none, "mean", 64)
        assert kernels.mlp(torch.randn(16), up, kernels.gelu, down).shape == (16,)
    loss.backward()
    assert y.shape == x.grad.shape == (0, 16) and not loss.any() and not up.weight.grad.any()
