"""run/sampling.py: a KV cache changes no token; models that it does not suit; text in pieces."""

import math

import pytest
import torch
import torch.nn.functional as F
from compare import CPU, LLAMA, small
from test_fineweb import refused

from fast import forms
from model import GPT, Attention, Block, LearnedPositions, build
from run import sampling
from run.build import compile_model
from system.errors import UserError

GPU = pytest.mark.gpu
GROUPED = dict(LLAMA, n_kv_head=2, qk_norm=True, tie_embeddings=False)
GROUPED |= dict(value_embeddings=1, attention_gate=True)
MODELS = {
    "gpt2": {},
    "gpt2_qk_norm": dict(qk_norm=True, attention="math", embedding_mix=1),
    "llama_grouped": GROUPED,
    "llama_one_kv_head": dict(LLAMA, n_kv_head=1, rope_factor=8.0, rope_original=8),
}
models = pytest.mark.parametrize("changes", MODELS.values(), ids=MODELS)
GREEDY = dict(temperature=0)
DRAWN = dict(temperature=1.0, top_k=20)


def random_model(**changes):
    """Weights so large that greedy continuations are no repetitions of a token."""
    model = build(small(**dict(block_size=40) | changes), CPU, seed=0).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.2 * torch.randn_like(p))
    return model


def generate(model, ids, n, **options):
    return torch.cat((ids.cpu(), torch.tensor([*sampling.steps(model, ids, n, **options)]).T), 1)


def cached(model, ids, n, **options):
    return generate(model, ids, n, cache=sampling.make_cache(model, 0), **options)


def prompt(B, T):
    return torch.randint(0, 100, (B, T), generator=torch.Generator().manual_seed(B))


@models
@pytest.mark.parametrize("B, T, new", [(3, 5, 45), (1, 45, 4), (2, 1, 8)])
def test_tokens_are_those_without_a_cache(changes, B, T, new):
    """Across block_size = 40 tokens, and from a prompt beyond it; greedy and drawn."""
    model, ids = random_model(**changes), prompt(B, T)
    for options in (GREEDY, DRAWN):
        found = cached(model, ids, new, **options)
        assert found.shape == (B, T + new) and len(found.unique()) > 2
        assert torch.equal(found, generate(model, ids, new, **options))


@models
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
def test_logits_are_close(changes, device, monkeypatch):
    """The bound is in standard deviations of the logits; 0.05 is measured."""
    model, ids, found = random_model(n_embd=128, **changes).to(device), prompt(2, 40).to(device), []
    monkeypatch.setattr(forms, "enabled", {"cuda"})
    with torch.no_grad(), torch.autocast(device, torch.bfloat16):
        expected = model.logits(ids)[:, 9:39]
        cache = sampling.make_cache(model, 0)
        cache.prefill(ids[:, :9], room=40)
        for at in range(9, 39):
            found.append(cache.step(ids[:, at], at).clone())
    assert (torch.stack(found, 1) - expected).abs().max() < 0.1 * expected.std()


def test_one_cache_serves_texts_one_after_another():
    """Shorter and longer ones, and what a text before has left there is not seen."""
    model, ids = random_model(block_size=100), prompt(1, 35)
    cache = sampling.make_cache(model, 0)
    assert cache is not None
    for seed, begins, more in ((0, 5, 4), (1, 30, 9), (2, 12, 3), (2, 3, 40)):
        options = dict(DRAWN, seed=seed)
        found = generate(model, ids[:, :begins], more, **options, cache=cache)
        expected = generate(model, ids[:, :begins], more, **options)
        assert torch.equal(found, expected)


def shifted(self, x, idx, positions):
    """A block whose input comes in part from the token before."""
    return forward(self, x.lerp(F.pad(x, (0, 0, 1, 0))[:, :-1], 0.01), idx, positions)


def computed_positions(self, x, positions):
    return x + 0.1 * (torch.arange(x.size(1)) if positions is None else positions)[:, None]


def block_twice(self, idx, positions=None):
    x = self.embed(idx, positions)
    for _, block in [*self.layers, self.layers[0]]:
        x = block(x, idx, positions)
    return self.norm(x)


def fails(self, idx, positions=None):
    assert positions is None
    return hidden(self, idx)


def with_a_table(self, cfg):
    """Of the token before, in a saved buffer of zeros, which training would fill, and use later."""
    init(self, cfg)
    self.register_buffer("table", torch.zeros(cfg.padded_vocab, cfg.n_embd))
    self.register_buffer("steps", torch.tensor(0))
    rows = lambda: self.table * (self.steps > 1000)
    before = lambda idx: F.embedding(F.pad(idx, (1, 0))[:, :-1], rows())
    self.embed = lambda idx, positions: GPT.embed(self, idx, positions) + before(idx)


init, hidden, forward = GPT.__init__, GPT.hidden, Block.forward


@pytest.mark.parametrize("owner, name, edit, words", [
    (Block, "forward", shifted, "mixes tokens outside of attn.core"),
    (GPT, "__init__", with_a_table, "mixes tokens outside of attn.core"),
    (GPT, "hidden", block_twice, ""),  # a cache for each of its calls
    (GPT, "hidden", fails, "AssertionError"),
    (Attention, "core", staticmethod(lambda q, k, v, *_: v), "a KV cache goes around attn.core"),
    (LearnedPositions, "forward", computed_positions, ""),
])  # fmt: skip
def test_an_edited_model_samples_without_a_cache_and_says_so(
    owner, name, edit, words, monkeypatch, capsys
):
    sampling.without.cache_clear()
    monkeypatch.setattr(owner, name, edit)
    model, ids = random_model(), prompt(1, 5)
    expected = generate(model, ids, 8, temperature=0)
    for _ in range(2):
        assert torch.equal(cached(model, ids, 8, temperature=0), expected)
    said = capsys.readouterr().err
    assert words in said and said.count("warning: ") == said.count("\n") == bool(words)


@pytest.mark.parametrize("compiler", ["graphs"], indirect=True)
def test_a_compiled_model_keeps_its_graphs(compiler):
    """Sampling within a run neither makes graphs nor lets the run's own be compiled again."""
    from torch._dynamo.utils import counters

    model, ids = random_model(n_layer=1, **LLAMA), prompt(2, 16)
    expected = cached(model, ids, 8, temperature=0)
    compile_model(model)
    loss, *_ = model(ids, ids)
    before = [list(vars(module)) for module in model.modules()]
    graphs = counters["stats"]["unique_graphs"]
    assert graphs > 0 and torch.equal(cached(model, ids, 8, temperature=0), expected)
    assert model(ids, ids)[0] == loss and counters["stats"]["unique_graphs"] == graphs
    assert [list(vars(module)) for module in model.modules()] == before


def test_weights_that_are_nan_give_no_text():
    model = random_model()
    model.wte.weight.data.fill_(math.nan)
    refused(UserError, "NaN", next, sampling.steps(model, prompt(1, 3), 2))


def test_top_k_and_temperature():
    logits = torch.tensor([[0.0, 3.0, 2.0, 1.0]]).repeat(4000, 1)
    generator = torch.Generator().manual_seed(0)
    for temperature, top_k in ((1.0, 2), (0.5, 3), (2.0, None)):
        found = sampling.draw_token(logits, temperature, top_k, generator)
        shares = found.bincount(minlength=4) / 4000
        kept = logits[0].where(logits[0] >= logits[0].topk(top_k or 4).values[-1], -torch.inf)
        assert (shares - (kept / temperature).softmax(0)).abs().max() < 0.03  # 4 standard errors
    # tiny, and nothing overflows
    assert sampling.draw_token(logits, 1e-30, None, generator).eq(1).all()


@GPU
@models
def test_a_graph_draws_the_same_tokens(changes, capsys):
    """Across a growth of the cache, and without a graph after an edit that waits for the GPU."""
    sampling.without.cache_clear()
    model, ids = random_model(block_size=1100, **changes).cuda(), prompt(2, 1000).cuda()
    cache = sampling.make_cache(model, 0)
    for begin, more in ((10, 20), (1000, 40), (1000, 40)):
        for options in (GREEDY, DRAWN):
            expected = generate(model, ids[:, :begin], more, **options)
            found = generate(model, ids[:, :begin], more, **options, cache=cache)
            assert torch.equal(found, expected) and cache.graph is not None
    assert not capsys.readouterr().err
    model.norm.register_forward_hook(lambda _, args, y: print(end="" if y.sum().item() else " "))
    assert torch.equal(cached(model, ids, 40, **DRAWN), found)
    assert "without a CUDA graph" in capsys.readouterr().err
    torch.randn(8, device="cuda")  # the default generator still draws
