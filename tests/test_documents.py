"""Document masks against an explicit one in float64 and documents alone; compiled; over ranks."""

import functools

import numpy as np
import pytest
import ranks
import torch
import torch.nn.functional as F
from compare import CPU, LLAMA, error, gradients, same_run, slow, small, with_gradients
from conftest import flags, losses, stdlib_bytes, train_here, train_in_rank, write_shard
from test_fineweb import refused
from test_parallel import SHORT
from torch._dynamo.utils import counters

import kernels
from model import build
from run.build import compile_model
from scale import activation_checkpointing, context_parallel, documents
from settings import Config
from system.errors import UserError

EOT = 7
T = torch.Tensor
GROUPED = dict(block_size=48, n_layer=3, n_kv_head=2, **LLAMA)
KINDS = [("apart", "none"), ("varlen", "selective"), slow("varlen", "block")]
COMPILED = dict(parallel="fsdp", n_kv_head=1, remat="block", compile=True)


def rows(B=2, T=48, seed=0, share=0.1):
    """Ids of which about `share` begin a document; the first row begins inside one."""
    generator = torch.Generator().manual_seed(seed)
    idx = torch.randint(8, 100, (B, T), generator=generator)
    idx[torch.rand(B, T, generator=generator) < share] = EOT
    idx[0, 0] = 8
    return idx


def documents_of(row):
    """[the slice of each document of a row]"""
    starts = sorted({0, *(row == EOT).nonzero().flatten().tolist()})
    return [slice(a, b) for a, b in zip(starts, [*starts[1:], len(row)])]


def naive(q, k, v, idx):
    """Causal attention of each document by itself."""
    causal = functools.partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=True)
    out = []
    for row, *qkv in zip(idx, q, k, v):
        out.append(torch.cat([causal(*(x[:, part] for x in qkv)) for part in documents_of(row)], 1))
    return torch.stack(out)


def weights(q, k, bounds):
    """Attention weights of tokens laid end to end, (H, N, N), from (N, H, D) and (N, H_kv, D)."""
    ids = torch.searchsorted(bounds, torch.arange(len(q), dtype=bounds.dtype), right=True)
    k = k.repeat_interleave(q.size(1) // k.size(1), dim=1)
    scores = torch.einsum("qhd,khd->hqk", q, k) / q.size(-1) ** 0.5
    return scores.masked_fill(~(ids[:, None] == ids).tril(), -torch.inf).softmax(-1)


@torch.library.custom_op("tests::varlen", mutates_args=())
def varlen(q: T, k: T, v: T, bounds: T, longest: int) -> T:
    """Stands in on the CPU for torch's varlen_attn, which is a custom operator as well."""
    assert bounds[0] == 0 and bounds[-1] == len(q) and bounds.diff().max() <= longest
    v = v.repeat_interleave(q.size(1) // v.size(1), dim=1)
    return torch.einsum("hqk,khd->qhd", weights(q, k, bounds), v).contiguous()


def varlen_backward(ctx, dy):
    q, k, v, bounds = ctx.saved_tensors
    p, groups = weights(q, k, bounds), q.size(1) // k.size(1)
    wide_k, wide_v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
    dp = torch.einsum("qhd,khd->hqk", dy, wide_v)
    ds = p * (dp - (p * dp).sum(-1, keepdim=True)) / q.size(-1) ** 0.5
    products = (torch.einsum("hqk,qhd->khd", *pair) for pair in ((ds, q), (p, dy)))
    dk, dv = (x.unflatten(1, (-1, groups)).sum(2) for x in products)
    return torch.einsum("hqk,khd->qhd", ds, wide_k), dk, dv, None, None


varlen.register_fake(lambda q, *_: torch.empty_like(q))
varlen.register_autograd(
    varlen_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs[:4])
)


def stand_in(q, k, v, bounds, bounds_k, longest, longest_k, *, window_size, enable_gqa=False):
    assert bounds is bounds_k and window_size == (-1, 0) and (enable_gqa or q.size(1) == k.size(1))
    return varlen(q, k, v, bounds, longest)


@pytest.fixture(params=["apart", "varlen"])
def way(request, monkeypatch):
    """Both ways to compute it, the one for GPUs through a stand-in of its kernel."""
    if request.param == "varlen":
        monkeypatch.setattr(documents, "takes_varlen", lambda v: True)
        monkeypatch.setattr(documents, "varlen_attn", stand_in)
    return request.param


def found(idx):
    there = documents.Documents(EOT)
    there.find_bounds(idx)
    return there


def apart(there, q, k, v):
    return documents.by_documents(kernels.attention, there, q, k, v, "math")


def attend(way, q, k, v, there):
    if way == "varlen":
        return documents.varlen_attention(q, k, v, there.bounds, there.longest.size(0))
    return apart(there, q, k, v)


@pytest.mark.parametrize("kv_heads, grouped", [(4, True), (2, True), (2, False), (1, True)])
def test_attention_equals_float64(way, kv_heads, grouped, monkeypatch):
    if not grouped:
        monkeypatch.setattr(documents, "GROUPED", False)  # as before torch 2.12
    idx = rows(3, 29, seed=kv_heads)
    torch.manual_seed(0)
    shapes = [(3, H, 29, 8) for H in (4, kv_heads, kv_heads)]
    *qkv, dy = (torch.randn(s, dtype=torch.float64) for s in (*shapes, shapes[0]))
    got = with_gradients(lambda *qkv: attend(way, *qkv, found(idx)), qkv, dy)
    expected = with_gradients(lambda *qkv: naive(*qkv, idx), qkv, dy)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)


def test_a_packed_row_is_its_documents_alone(way):
    cfg = small(**GROUPED, qk_norm=True, rope_factor=8.0, rope_original=16)
    plain, model = build(cfg, CPU, seed=3), build(cfg, CPU, seed=3)
    documents.apply(model, EOT)
    idx, targets = rows(1, seed=5, share=0.2), rows(1, seed=6)
    parts = documents_of(idx[0])
    assert len(parts) > 3
    means = [plain(idx[:, part], targets[:, part]) for part in parts]
    total = sum(loss * count for loss, count, _ in means) / 48
    total.backward()
    loss, grads = gradients(model, idx, targets)
    # float32: rotations by other angles of the same difference, and other orders of sums
    torch.testing.assert_close(loss, total.detach(), rtol=2e-6, atol=0)
    refs = {name: p.grad for name, p in plain.named_parameters()}
    torch.testing.assert_close(grads, refs, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("compiler", ["graphs"], indirect=True)
@pytest.mark.parametrize("way, kind", KINDS, indirect=["way"])
def test_compiled_equals_eager_and_is_compiled_once(way, compiler, kind):
    """For batches of one to as many documents as tokens, with and without gradients."""
    eager, model = (build(small(**GROUPED), CPU, seed=3) for _ in range(2))
    for m in (eager, model):
        documents.apply(m, EOT)
    if kind != "none":
        activation_checkpointing.apply(
            model, Config(remat=kind, remat_tile=24 if kind == "block" else None)
        )
    compile_model(model)
    counters.clear()
    for seed, share in enumerate([0.1, 0.3, 0.0, 1.0, 0.2]):
        idx, targets = rows(seed=seed, share=share), rows(seed=9 + seed)
        expected, refs = gradients(eager, idx, targets)
        loss, grads = gradients(model, idx, targets)
        torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
        torch.testing.assert_close(grads, refs, rtol=1e-4, atol=1e-6)
        if seed == 0:
            # one document after the other, or an MLP in tiles, is not compiled
            assert way == "apart" or kind == "block" or not counters["graph_break"]
            counters.clear()
        assert counters["stats"]["unique_graphs"] == 0, share
        assert way == "apart" or not counters["graph_break"], share


def test_off_is_the_plain_model(way):
    """HellaSwag's rows, padded with zeros, and prompts that begin with a separator go unmasked."""
    plain, model = (build(small(**GROUPED), CPU, seed=3).eval() for _ in range(2))
    documents.apply(model, EOT)
    idx, targets = rows(), rows(seed=1)
    assert not torch.equal(model(idx, targets)[0], plain(idx, targets)[0])
    with context_parallel.whole_rows(model):
        shorter = idx[:, :9], targets[:, :9]
        assert torch.equal(model(*shorter)[0], plain(*shorter)[0])
        assert torch.equal(model.logits(idx), plain.logits(idx))
    assert not torch.equal(model(idx, targets)[0], plain(idx, targets)[0])
    no_separator = idx.clamp(min=8)
    torch.testing.assert_close(model(no_separator, targets)[0], plain(no_separator, targets)[0])


def test_a_separator_is_needed(data_dir, tmp_path):
    own, words = dict(document_mask=True, tokenizer="None"), "the separator.*set --tokenizer"
    refused(UserError, words, train_here, data_dir, tmp_path / "run", **own)


@pytest.fixture
def short_documents(tmp_path):
    """Byte shards whose documents are 3 to 40 tokens long."""
    tokens = np.array(stdlib_bytes(12_000))
    tokens[np.random.default_rng(0).integers(3, 40, 600).cumsum() % 12_000] = 256
    (tmp_path / "data").mkdir()
    write_shard(tmp_path / "data/py_val_000000.bin", tokens[:3_000])
    write_shard(tmp_path / "data/py_train_000001.bin", tokens[3_000:])
    return tmp_path / "data"


def test_training_with_the_mask(short_documents, tmp_path):
    common = dict(positions="rope", eval_interval=12, block_size=128, batch_size=2)
    masked = train_here(short_documents, tmp_path / "a", document_mask=True, **common)
    common |= dict(init_from=tmp_path / "a", max_steps=1)
    same = train_here(short_documents, tmp_path / "b", document_mask=True, **common)
    whole = train_here(short_documents, tmp_path / "c", **common)
    assert losses(masked, "val")[12] < losses(masked, "val")[0] - 0.1
    assert losses(same, "val")[0] == losses(masked, "val")[12] != losses(whole, "val")[0]


@pytest.mark.parametrize("settings", [{}, slow(COMPILED)])
def test_context_parallel_equals_one_process(short_documents, tmp_path, settings):
    shape = dict(LLAMA, n_kv_head=settings.get("n_kv_head", 2))
    common = SHORT | dict(document_mask=True, **shape)
    train_here(short_documents, tmp_path / "one", **common)
    common["context_parallel"] = 2
    words = flags(short_documents, tmp_path / "many", **common | settings)
    assert ranks.call(2, train_in_rank, words, "graphs") == [(0, "")] * 2
    same_run(tmp_path / "one", tmp_path / "many")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, bound", [(torch.bfloat16, 1e-2), (torch.float16, 2e-3)])
@pytest.mark.parametrize("kv_heads, D, B, T", [(8, 64, 2, 1000), (1, 128, 1, 8192)])
@pytest.mark.parametrize("compiled", [False, True])
def test_varlen_on_a_gpu(dtype, bound, kv_heads, D, B, T, compiled):
    """torch's kernel, forward and backward, against documents alone, its numbers in float32."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    shapes = [(B, H, T, D) for H in (8, kv_heads, kv_heads)]
    *qkv, dy = (torch.randn(s, device="cuda").to(dtype) for s in (*shapes, shapes[0]))
    assert documents.takes_varlen(dy) and not documents.takes_varlen(dy.float())
    compute = torch.compile(documents.varlen_attention) if compiled else documents.varlen_attention
    there = documents.Documents(EOT)
    varlen = lambda *qkv: compute(*qkv, there.bounds, there.longest.size(0))
    masked = lambda *qkv: apart(there, *qkv)
    for share in (0.01, 0.05):
        there.find_bounds(rows(B, T, share=share).cuda())
        low = with_gradients(varlen, qkv, dy)
        exact = with_gradients(masked, [x.float() for x in qkv], dy)
        for got, expected in zip(low, exact):
            # rounded to 8 or 11 bits inside: errors are a few units in the last place of the
            # largest summands
            assert got.dtype == dtype and error(got, expected) < bound
