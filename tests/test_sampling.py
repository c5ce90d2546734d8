"""run/sampling.py: a KV cache changes no token; models that it does not suit; text in pieces."""

import pytest
import torch
import torch.nn.functional as F
from compare import CPU, DEVICE, LLAMA, error, slow, small

from corpus import tokenizer
from fast import decode, forms
from model import GPT, Block, LearnedPositions, build
from run import sampling
from run.build import compile_model

GPU = pytest.mark.gpu
GROUPED = dict(
    n_kv_head=2, qk_norm=True, tie_embeddings=False, value_embeddings=1, attention_gate=True
)
MODELS = {
    "gpt2": {},
    "gpt2_qk_norm": dict(qk_norm=True, softcap=15.0, attention="math", embedding_mix=1),
    "llama_grouped": LLAMA | GROUPED,
    "llama_one_kv_head": dict(LLAMA, n_kv_head=1, rope_factor=8.0, rope_original=8),
}


def random_model(**changes):
    """Weights so large that greedy continuations are no repetitions of a token."""
    model = build(small(**dict(block_size=40) | changes), CPU, seed=0).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.2 * torch.randn_like(p))
    return model


def prompt(B, T):
    return torch.randint(0, 100, (B, T), generator=torch.Generator().manual_seed(B))


@pytest.mark.parametrize("changes", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("B, T, new", [(3, 5, 45), (2, 39, 3), (1, 45, 4)])
def test_greedy_tokens_are_those_without_a_cache(changes, B, T, new):
    """Across block_size = 40 tokens, at it, and from a prompt beyond it."""
    model, ids = random_model(**changes), prompt(B, T)
    found = sampling.generate(model, ids, new, temperature=0)
    assert found.shape == (B, T + new) and len(found.unique()) > 2
    assert torch.equal(found, sampling.generate(model, ids, new, temperature=0, cached=False))


def test_a_prompt_beyond_block_size_tries_out_no_cache(monkeypatch):
    monkeypatch.setattr(sampling, "make_cache", None)
    assert sampling.generate(random_model(), prompt(1, 45), 2).shape == (1, 47)


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize(
    "changes", [MODELS["gpt2"], MODELS["llama_grouped"]], ids=["gpt2", "llama_grouped"]
)
def test_rows_of_other_lengths_go_on_from_their_own_ends(changes, cached):
    """With one cache, for two such batches and for one of rows of the same length."""
    model, lengths, new = random_model(**changes), [9, 3, 6], 12
    cache = sampling.make_cache(model, prompt(3, 1)[0], rows=3) if cached else False
    for whole in (prompt(3, 9), prompt(3, 9).flip(1)):
        ids = whole.clone()
        for row, length in zip(ids, lengths):
            row[length:] = 99  # what stands there is not read
        options = dict(temperature=0, cached=cache, lengths=torch.tensor(lengths))
        found = torch.stack(list(sampling.steps(model, ids, new, **options)), 1)
        assert found.shape == (3, 9 - 3 + new)
        for row, own, length in zip(whole, found, lengths):
            alone = sampling.generate(model, row[None, :length], new, temperature=0, cached=False)[
                0
            ]
            assert torch.equal(own[: length - 3 + new], alone[3:])
    expected = sampling.generate(model, whole, 4, temperature=0, cached=False)
    assert torch.equal(sampling.generate(model, whole, 4, temperature=0, cached=cache), expected)


@pytest.mark.device
@pytest.mark.parametrize(
    "H, H_kv, D, L, at", [(6, 2, 24, 300, 299), (1, 1, 64, 128, 0), slow(4, 4, 80, 9000, 8320)]
)
@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-6), (torch.bfloat16, 8e-3)])
def test_attention_of_one_query(H, H_kv, D, L, at, dtype, bound):
    """Against PyTorch's in float64; what the cache holds behind `at` takes no part, NaN neither."""
    q, new = torch.randn(2, H, 1, D), torch.randn(2, 2, H_kv, 1, D)
    kept = torch.randn(2, 2, H_kv, L, D)
    kept[..., at:, :] = torch.nan
    q, new, kept = (t.to(DEVICE, dtype) for t in (q, new, kept))
    y = decode.attention(q, *new, kept, torch.tensor([at], device=DEVICE))
    assert torch.equal(kept[..., at, :], new[..., 0, :]) and kept[..., at + 1 :, :].isnan().all()
    keys, values = kept[..., : at + 1, :].double().repeat_interleave(H // H_kv, 2)
    expected = F.scaled_dot_product_attention(q.double(), keys, values)
    assert error(y, expected) < bound


@pytest.mark.parametrize("changes", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize(
    "device, dtype, bound",
    [
        ("cpu", None, 1e-5),
        ("cpu", torch.bfloat16, 0.1),
        pytest.param("cuda", torch.bfloat16, 0.1, marks=GPU),
    ],
)
def test_logits_are_close(changes, device, dtype, bound, monkeypatch):
    """The bound is in standard deviations of the logits.

    In bf16 0.05 is measured: attention rounds anew.
    """
    model, ids, found = random_model(n_embd=128, **changes).to(device), prompt(2, 40).to(device), []
    monkeypatch.setattr(forms, "enabled", {"cuda"})
    monkeypatch.setattr(
        sampling, "waits", lambda *_: "a test"
    )  # no graph, which would call `draw_token` once
    monkeypatch.setattr(
        sampling, "draw_token", lambda logits, *_: found.append(logits) or ids[:, 9 + len(found)]
    )
    with torch.no_grad(), torch.autocast(device, dtype, enabled=dtype is not None):
        expected = model.logits(ids)[:, 9:39]
        list(sampling.make_cache(model, ids[0], rows=2).steps(ids[:, :10], 10, 40, seed=0))
    assert (torch.stack(found, 1) - expected).abs().max() < bound * expected.std()


def test_a_text_that_begins_like_the_one_before_goes_on_from_there():
    """As the samples of one prompt, and as the turns of a conversation, which it grows with."""
    model, ids = random_model(block_size=100), prompt(1, 35)
    cache, computed = sampling.make_cache(model, ids[0], 1.0, 20), []
    forward = cache.forward
    cache.forward = lambda idx, at: computed.append(len(at)) or forward(idx, at)
    for seed, begins, more, prefill in (
        (0, 5, 4, 32),
        (1, 5, 6, None),
        (2, 30, 9, 32),
        (2, 12, 3, None),
    ):
        found = sampling.generate(model, ids[:, :begins], more, 1.0, 20, seed, cache)
        assert torch.equal(found, sampling.generate(model, ids[:, :begins], more, 1.0, 20, seed))
        assert computed == [prefill] * bool(prefill) + [1] * more
        computed.clear()


def shift(forward, part):
    """A block whose input comes in part from the token before."""

    def shifted(self, x, idx, positions):
        return forward(self, x.lerp(F.pad(x, (0, 0, 1, 0))[:, :-1], part), idx, positions)

    return shifted


def computed_positions(self, x, positions):
    return x + 0.1 * (torch.arange(x.size(1)) if positions is None else positions)[:, None]


def block_twice(self, idx, positions=None):
    x = self.embed(idx, positions)
    for _, block in [*self.layers, self.layers[0]]:
        x = block(x, idx, positions)
    return self.norm(x)


@pytest.mark.parametrize("owner, name, edit, words", [
    (Block, "forward", shift(Block.forward, 0.5), "mixes tokens outside of attn.core"),
    # in bf16 unseen
    (Block, "forward", shift(Block.forward, 0.04), "mixes tokens outside of attn.core"),
    (GPT, "hidden", block_twice, ""),  # a cache for each of its calls
    (None, "core", lambda q, k, v, *_: v, "a KV cache goes around attn.core"),
    (LearnedPositions, "forward", computed_positions, ""),
])  # fmt: skip
def test_an_edited_model_samples_without_a_cache_and_says_so(
    owner, name, edit, words, monkeypatch, capsys
):
    sampling.without.cache_clear()
    model, ids = random_model(), prompt(1, 5)
    monkeypatch.setattr(owner or model.blocks[1].attn, name, edit)
    expected = sampling.generate(model, ids, 8, temperature=0, cached=False)
    for _ in range(2):
        assert torch.equal(sampling.generate(model, ids, 8, temperature=0), expected)
    said = capsys.readouterr().err
    assert words in said and said.count("warning: ") == said.count("\n") == bool(words)


@pytest.mark.parametrize("compiler", ["graphs"], indirect=True)
def test_a_compiled_model_keeps_its_graphs(compiler):
    """Sampling within a run neither makes graphs nor lets the run's own be compiled again."""
    from torch._dynamo.utils import counters

    model, ids = random_model(n_layer=1, **LLAMA), prompt(2, 16)
    expected = sampling.generate(model, ids, 8, temperature=0)
    compile_model(model)
    loss, *_ = model(ids, ids)
    before = [list(vars(module)) for module in model.modules()]
    graphs = counters["stats"]["unique_graphs"]
    assert graphs > 0 and torch.equal(sampling.generate(model, ids, 8, temperature=0), expected)
    assert model(ids, ids)[0] == loss and counters["stats"]["unique_graphs"] == graphs
    assert [list(vars(module)) for module in model.modules()] == before


def test_top_k_and_temperature():
    logits = torch.tensor([[0.0, 3.0, 2.0, 1.0]]).repeat(4000, 1)
    generator = torch.Generator().manual_seed(0)
    for temperature, top_k in ((1.0, 2), (0.5, 3), (2.0, None)):
        found = (
            sampling.draw_token(logits, temperature, top_k, generator).bincount(minlength=4) / 4000
        )
        kept = logits[0].where(logits[0] >= logits[0].topk(top_k or 4).values[-1], -torch.inf)
        assert (found - (kept / temperature).softmax(0)).abs().max() < 0.03  # 4 standard errors
    # tiny, and nothing overflows
    assert sampling.draw_token(logits, 1e-30, None, generator).eq(1).all()


def test_text_comes_in_pieces_of_whole_characters():
    tok, text = tokenizer.load("bytes"), "naïve 東京 🙂!"
    ids = list(text.encode())
    assert list(sampling.pieces(tok.decode, ids[:2], ids[2:])) == list(text[2:])
    assert list(sampling.pieces(tok.decode, [65], [0xE6, 0x9D])) == ["\ufffd"]  # shown at the end


@GPU
@pytest.mark.parametrize("changes", MODELS.values(), ids=MODELS)
def test_a_graph_draws_the_same_tokens(changes, capsys):
    """Across a growth of the cache, and without a graph after an edit that waits for the GPU."""
    sampling.without.cache_clear()
    model, ids = random_model(block_size=1100, **changes).cuda(), prompt(2, 1000).cuda()
    greedy, drawn = dict(temperature=0), dict(temperature=1.0, top_k=20)
    expected = sampling.generate(model, ids, 40, cached=False, **greedy)
    found = [sampling.generate(model, ids, 40, **options) for options in (greedy, drawn)]
    assert torch.equal(found[0], expected) and not capsys.readouterr().err
    model.norm.register_forward_hook(lambda _, args, y: print(end="" if y.sum().item() else " "))
    assert torch.equal(sampling.generate(model, ids, 40, **drawn), found[1])
    assert "without a CUDA graph" in capsys.readouterr().err
