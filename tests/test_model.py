"""model.py: sizes as published, padding without effect, every variant trains; first values."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from compare import CPU, LLAMA, small

import model as models
from model import build
from settings import GPTConfig
from system.errors import UserError

LLAMA3 = dict(LLAMA, vocab_size=128_256, block_size=8192, n_kv_head=8)
SIZES = [  # n_layer, n_head, n_embd, other settings; parameters
    (12, 12, 768, {}, 124_439_808),  # as of transformers' GPT2LMHeadModel, a tied head once
    (48, 25, 1600, {}, 1_557_611_200),
    # the model cards'
    (32, 32, 4096, dict(LLAMA3, n_hidden=14_336, tie_embeddings=False), 8_030_261_248),
    (16, 32, 2048, dict(LLAMA3, n_hidden=8_192), 1_235_814_400),
]
VARIANTS = {
    "gpt2": {},
    "llama_grouped": dict(LLAMA, n_kv_head=1, n_hidden=48, tie_embeddings=False),
    "llama_scaled": dict(LLAMA, rope_theta=500_000.0, rope_factor=8.0, rope_original=8),
    "embed_norm": dict(embed_norm=True),
    "embedding_mix": dict(embedding_mix=1),
    "relu2": dict(LLAMA, mlp="relu2"),
    "qk_norm": dict(LLAMA, qk_norm=True),
    "dropout": dict(dropout=0.1),
    "attention_gate": dict(LLAMA, n_kv_head=2, attention_gate=True),
    "value_embeddings_grouped": dict(LLAMA, n_kv_head=2, value_embeddings=2, vocab_multiple=64),
}


def ids(cfg, B=2, T=None, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, cfg.vocab_size, (B, T or cfg.block_size), generator=generator)


def randomized(cfg, seed=1):
    """A model whose every parameter differs from its neutral value, norms and biases too."""
    model = build(cfg, CPU, seed)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return model


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_variants_train_and_see_no_later_position(changes):
    cfg = small(**changes)
    model = build(cfg, CPU, seed=0).train()
    loss, count, extras = model(ids(cfg), ids(cfg, seed=1))
    loss.backward()
    assert count == 2 * 16 and extras == {}
    # nearly uniform at first: weights of 0.02 give logits of about 0.02 * sqrt(32) = 0.1
    assert abs(loss.item() - math.log(cfg.vocab_size)) < 0.1
    for name, p in model.named_parameters():
        assert p.grad is not None and p.grad.isfinite().all(), name
        assert p.grad.any(), name
    model = randomized(cfg).eval()
    x = ids(cfg)
    y = x.clone()
    y[:, 9:] = ids(cfg, seed=5)[:, 9:]
    a, b = model.logits(x), model.logits(y)
    # the same arithmetic on the same numbers
    torch.testing.assert_close(a[:, :9], b[:, :9], rtol=0, atol=0)
    assert (a[:, 9:] - b[:, 9:]).abs().max() > 1e-3


@pytest.mark.parametrize("every, layers", [(2, [0, 2]), (9, [2])])
def test_value_embeddings_add_a_row_of_a_table_to_the_values(every, layers):
    cfg = small(n_layer=3, n_kv_head=2)
    with_tables, without = (
        build(replace(cfg, value_embeddings=n), CPU, seed=0) for n in (every, 0)
    )
    x, tables = ids(cfg), {i: block.attn.values for i, block in enumerate(with_tables.blocks)}
    tables = {i: module.weight for i, module in tables.items() if hasattr(module, "weight")}
    assert [*tables] == layers
    without.load_state_dict(with_tables.state_dict(), strict=False)
    # they start at zero
    torch.testing.assert_close(with_tables.logits(x), without.logits(x), rtol=0, atol=0)
    for i, table in tables.items():
        torch.nn.init.normal_(table)
        h, one, other = torch.randn(2, 16, 32), with_tables.blocks[i].attn, without.blocks[i].attn
        one.core = other.core = lambda q, k, v, *_: v.repeat_interleave(2, dim=1)
        one.proj = other.proj = torch.nn.Identity()
        # (B, T, C)
        rows = table[x].view(2, cfg.block_size, 2, 8).repeat_interleave(2, dim=2).flatten(2)
        torch.testing.assert_close(one(h, x, None), other(h, x, None) + rows)


@pytest.mark.parametrize("every, layers", [(0, []), (1, [1, 2, 3]), (2, [1, 3])])
def test_blocks_read_the_embedded_tokens_again(every, layers):
    """A block's input is a x + b x0; the first block, whose input is x0, has none of it."""
    model = randomized(small(n_layer=4, embedding_mix=every)).double()
    seen = []
    for block in model.blocks:
        block.register_forward_hook(lambda _, args, y: seen.append((args[0], y)))
    x = ids(model.cfg)
    model.hidden(x)
    embedded = model.embed(x, None)
    y = embedded
    for layer, (mixed, after) in enumerate(seen):
        if layer in layers:
            a, b = model.mixes[layer].weight
            y = (1 + a / 4) * y + (0.1 + b / 4) * embedded
        torch.testing.assert_close(mixed, y, rtol=1e-5, atol=1e-6)
        y = after
    own = [name for name, _ in model.named_parameters() if name.startswith("mixes.")]
    assert own == [f"mixes.{layer}.weight" for layer in layers]


@pytest.mark.parametrize("width", [32, 12])
def test_attention_gate_scales_each_head_by_its_number(width):
    cfg = small(n_embd=width, attention_gate=True)
    gated, plain = (build(replace(cfg, attention_gate=on), CPU, seed=0) for on in (True, False))
    x = ids(cfg)
    plain.load_state_dict(gated.state_dict(), strict=False)
    # they start at one
    torch.testing.assert_close(gated.logits(x), plain.logits(x), rtol=0, atol=0)
    one, other = gated.blocks[0].attn, plain.blocks[0].attn
    h = torch.randn(2, cfg.block_size, width)
    one.proj = other.proj = torch.nn.Identity()
    weight = torch.nn.init.normal_(one.gate.weight).view(cfg.n_head, -1)
    scale = 2 / (1 + torch.exp(-(h[:, :, None, :16] * weight).sum(-1)))  # (B, T, H)
    expected = other(h, x, None) * scale.repeat_interleave(cfg.head_size, dim=2)
    torch.testing.assert_close(one(h, x, None), expected)


def test_loss_is_the_cross_entropy_of_the_logits():
    cfg = small(**LLAMA)
    model, x, y = randomized(cfg), ids(cfg, B=3), ids(cfg, B=3, seed=1)
    logits = model.head.weight[: cfg.vocab_size] @ model.hidden(x).unsqueeze(-1)
    torch.testing.assert_close(model.logits(x), logits.squeeze(-1))
    y[0, :5] = -100
    y[2] = -100  # a row without a target
    entropy = partial(torch.nn.functional.cross_entropy, model.logits(x).mT, y)
    # float32 sums of 100 terms in another order: a few times 1e-7 relative
    close = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-5)
    each, real = entropy(reduction="none"), (y >= 0).sum(1)
    close(model.token_losses(x, y), each)
    loss, count, extras = model(x, y)
    close(loss, entropy())
    close(loss * count, entropy(reduction="sum"))
    assert count == 11 + 16 and extras == {}
    losses, counts, extras = model(x, y, reduction="rows")
    close(losses, each.sum(1) / real.clamp(min=1))
    assert torch.equal(counts, real) and losses[2] == 0 and extras == {}
    nothing, count, _ = model(x[2:], y[2:])
    nothing.backward()  # zeros, not NaN
    assert nothing == count == 0 and not any(p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("tied", [True, False])
def test_padding_rows_have_no_effect(tied):
    exact, padded = (small(vocab_multiple=n, tie_embeddings=tied) for n in (1, 64))
    a, b = randomized(exact), randomized(padded)
    with torch.no_grad():
        for p, q in zip(a.parameters(), b.parameters()):
            q[: len(p)] = p
        for table in (b.wte.weight, b.head.weight):
            table[100:] = 50.0  # would win every softmax that it took part in
    x, y = ids(exact), ids(exact, seed=1)
    assert padded.padded_vocab == 128 and b.logits(x).shape == (2, 16, 100)
    losses = [m(x, y)[0] for m in (a, b)]
    for loss in losses:
        loss.backward()
    # sums over 100 and 128 columns are blocked differently: float32 rounding, 1e-7 relative each
    torch.testing.assert_close(*losses, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(a.logits(x), b.logits(x), rtol=1e-5, atol=1e-5)
    for p, q in zip(a.parameters(), b.parameters()):
        torch.testing.assert_close(p.grad, q.grad[: len(p)], rtol=1e-4, atol=1e-6)
        assert (q.grad[len(p) :] == 0).all()


@pytest.mark.parametrize("n_layer, n_head, n_embd, more, expected", SIZES)
def test_sizes_as_published(n_layer, n_head, n_embd, more, expected):
    cfg = GPTConfig(n_layer=n_layer, n_head=n_head, n_embd=n_embd, **more)
    tables = 1 if cfg.tie_embeddings else 2
    padding = (cfg.padded_vocab - cfg.vocab_size) * tables * n_embd
    assert sum(p.numel() for p in models.on_meta(cfg).parameters()) == expected + padding


def test_initial_weights():
    cfg = GPTConfig(
        vocab_size=1000, block_size=128, n_layer=8, n_head=4, n_embd=256, tie_embeddings=False
    )
    model, again, other = (build(cfg, CPU, seed) for seed in (0, 0, 1))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), again.parameters()))
    assert not torch.equal(model.wte.weight, other.wte.weight)
    for name, p in model.named_parameters():
        if p.dim() == 1:
            assert (p == (1.0 if "norm" in name and name.endswith("weight") else 0.0)).all(), name
            continue
        expected = 0.02 / math.sqrt(2 * 8) if name.endswith("proj.weight") else 0.02
        # of n numbers the standard deviation scatters by 1/sqrt(2n): 0.4% for the smallest here, n
        # = 32,768
        assert abs(p.std().item() / expected - 1) < 0.02, name
        assert abs(p.mean().item()) < 5 * expected / math.sqrt(p.numel()), name


def after_init(monkeypatch, edit):
    """GPT.__init__ with edit(model) at its end."""
    init = models.GPT.__init__

    def edited(self, cfg):
        init(self, cfg)
        edit(self)

    monkeypatch.setattr(models.GPT, "__init__", edited)


def build_here(cfg, seed):
    return build(cfg, CPU, seed)


def on_meta_first(cfg, seed):
    return models.allocate(models.on_meta(cfg), CPU, seed)


def nanogpts(model):
    def first(module):
        if isinstance(module, torch.nn.Linear):
            torch.nn.init.normal_(module.weight, std=0.5)

    model.apply(first)


def by_data(model):
    model.blocks[1].mlp.up.bias.data.fill_(1.0)


def bare(model):
    model.alpha = torch.nn.Parameter(torch.full((1,), 3.0))


def weight_norm(model):
    torch.nn.utils.parametrizations.weight_norm(model.blocks[1].mlp.up)


GIVEN = {  # an edit of __init__, the parameter to which it gives values, what holds of them
    nanogpts: ("blocks.1.mlp.up.weight", lambda p: abs(p.std() - 0.5) < 0.05),
    by_data: ("blocks.1.mlp.up.bias", lambda p: (p == 1).all()),
    bare: ("alpha", lambda p: p == 3),
    weight_norm: ("blocks.1.mlp.up.parametrizations.weight.original0", lambda p: p.any()),
}


@pytest.mark.parametrize("edit", GIVEN)
def test_values_given_in_init_hold_or_on_meta_are_named(edit, monkeypatch):
    """The others are those without the edit, in its order of draws."""
    name, holds = GIVEN[edit]
    plain = dict(build(small(), CPU, 0).named_parameters())
    after_init(monkeypatch, edit)
    model = build(small(), CPU, 0)
    assert holds(model.get_parameter(name))
    for other in ("wpe.weight", "blocks.1.mlp.proj.weight", "blocks.0.attn.qkv.bias"):
        changed = edit is nanogpts and "proj" in other
        assert torch.equal(model.get_parameter(other), plain[other]) != changed
    with pytest.raises(UserError, match="has no first value") as error:
        on_meta_first(small(), 0)
    assert edit is nanogpts or f"{name} has" in str(error.value)


@pytest.mark.parametrize("start", [build_here, on_meta_first])
def test_a_parameter_without_a_value_is_named(start, monkeypatch):
    def edit(model):
        model.alpha = torch.nn.Parameter(torch.empty(3))

    after_init(monkeypatch, edit)
    with pytest.raises(UserError, match="alpha has no first value"):
        start(small(), 0)


@pytest.mark.parametrize("name", ["gpt2", "llama_scaled", "value_embeddings_grouped"])
def test_first_values_are_the_same_on_meta_and_in_16_bits(name):
    cfg = small(**VARIANTS[name])
    real, meta, low = build(cfg, CPU, 3), on_meta_first(cfg, 3), build(cfg, CPU, 3, torch.bfloat16)
    low_meta = models.allocate(models.on_meta(cfg).bfloat16(), CPU, 3)
    for name, p in real.named_parameters():
        assert torch.equal(p, meta.get_parameter(name)), name
        assert torch.equal(p.bfloat16(), low.get_parameter(name)), name
        assert torch.equal(p.bfloat16(), low_meta.get_parameter(name)), name
    for name, buffer in real.named_buffers():
        assert torch.equal(buffer, meta.get_buffer(name)) and buffer.dtype == torch.float32


@pytest.mark.parametrize("start", [build_here, on_meta_first])
def test_what_init_makes_shares_or_notes_on_a_parameter_is_there(start, monkeypatch):
    def edit(model):
        model.scales = [torch.full((3,), 0.5)]
        model.register_buffer("mask", torch.ones(4, 4).tril(), persistent=False)
        model.types = torch.nn.Embedding(5, 32, padding_idx=3)
        model.blocks[1].mlp.up.weight = model.blocks[0].mlp.up.weight
        model.blocks[0].mlp.up.weight.note = "mine"
        if start is build_here:
            model.wpe.weight.register_hook(torch.zeros_like)

    after_init(monkeypatch, edit)
    model = start(small(), 0)
    assert model.scales[0].sum() == 1.5 and model.mask.sum() == 10
    assert [bool(row.any()) for row in model.types.weight] == [True, True, True, False, True]
    shared = model.blocks[0].mlp.up.weight
    assert model.blocks[1].mlp.up.weight is shared and shared.note == "mine" and shared.any()
    assert model.head.weight is model.wte.weight
    model(ids(model.cfg), ids(model.cfg))[0].backward()
    assert model.wpe.weight.grad.any() == (start is on_meta_first) and model.wte.weight.grad.any()


def test_dropout_only_in_training():
    model, x = randomized(small(dropout=0.5)), ids(small())
    assert not torch.equal(model(x, x)[0], model(x, x)[0])
    assert torch.equal(model.eval()(x, x)[0], randomized(small())(x, x)[0])


@pytest.mark.parametrize("family", [{}, LLAMA], ids=["gpt2", "llama"])
def test_positions_are_rows_of_the_tables(family):
    """Those of tokens in their sequences, wherever they are in the batch; None: 0 to T - 1."""
    model = randomized(small(**family)).eval()
    x, at = ids(model.cfg, T=7), torch.tensor([2, 3, 5, 8, 13, 14, 15])
    exact = lambda a, b: torch.testing.assert_close(a, b, rtol=0, atol=0)
    exact(model.logits(x, positions=torch.arange(7)), model.logits(x))
    torch.testing.assert_close(model.logits(x, slice(-1, None)), model.logits(x)[:, -1:])
    found, loss = model.logits(x, positions=at), model(x, x, at)[0]
    assert (found - model.logits(x))[:, 1:].abs().max() > 1e-3
    if family:
        rope = model.blocks[0].attn.rope
        tables = [rope.cos, rope.sin]
    else:
        tables = [model.wpe.weight]
    with torch.no_grad():
        for table in tables:
            table[:7] = table[at].clone()
    exact(found, model.logits(x))
    exact(loss, model(x, x)[0])
