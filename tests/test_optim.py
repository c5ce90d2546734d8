"""optim.py: decay groups, Muon against a naive loop, and the schedules at their corners."""

import math
from dataclasses import asdict, replace

import pytest
import torch
from compare import CPU, LLAMA, error, small

import optim
from model import build
from settings import Config
from system.errors import UserError


def settings(**changes):
    defaults = dict(lr=1e-3, warmup_steps=10, max_steps=100, batch_tokens=1000, compile=False)
    return Config(**asdict(small()) | defaults | changes)


def test_groups_hold_every_parameter_once_each_with_its_rate():
    model = build(small(tie_embeddings=False), CPU, seed=0)
    groups = optim.param_groups(model, settings(lr_embedding=0.1, lr_head=None))
    of_groups = sorted(id(p) for group in groups for p in group["params"])
    assert of_groups == sorted(map(id, model.parameters()))
    embedding, head, matrix, vector = groups
    gate_up = optim.matrices_of("blocks.0.mlp.gate_up.weight", torch.empty(96, 16), settings())
    assert gate_up == [48, 48]
    assert embedding["params"] == [model.wte.weight, model.wpe.weight]
    assert head["params"] == [model.head.weight]
    assert {p.dim() for p in matrix["params"]} == {2} and {p.dim() for p in vector["params"]} == {1}
    assert [g["weight_decay"] for g in groups] == [0, 0.1, 0.1, 0]
    assert [g["lr"] for g in groups] == pytest.approx([0.1, 1e-3, 1e-3, 1e-3])
    muon = optim.param_groups(model, settings(optimizer="muon"))
    assert [g["weight_decay"] for g in muon] == [0, 0, 0.1, 0]
    by_length = optim.param_groups(model, settings(lr=0.02, max_steps=250, weight_decay=None))
    assert [g["weight_decay"] for g in by_length] == pytest.approx([0.4, 0.4, 0.4, 0])


def naive_orthogonal(x):
    """One matrix in float64, transposed if it is tall."""
    x = x.T if x.size(0) > x.size(1) else x
    x = x / (x.norm() * 1.02 + 1e-6)
    for a, b, c in optim.POLAR_EXPRESS:
        x = a * x + b * (x @ x.T) @ x + c * (x @ x.T) @ (x @ x.T) @ x
    return x


def test_muon_is_a_naive_one_in_float64():
    """Five steps of every matrix of a Llama with grouped queries, and AdamW for the rest."""
    cfg = settings(
        n_kv_head=2, n_hidden=48, optimizer="muon", momentum_warmup=3, weight_decay=0.5, **LLAMA
    )
    cfg = replace(cfg, lr=0.02, lr_embedding=1e-3)
    model, other = (build(cfg, CPU, seed=0) for _ in range(2))
    optimizer = optim.make_optimizer(model, cfg)
    adamw = optim.make_optimizer(other, settings(lr=0.02, lr_embedding=1e-3, weight_decay=0.0))
    rows = {"attn.qkv.weight": [32, 16, 16], "mlp.gate_up.weight": [48, 48]}
    of_blocks = (
        (n, p) for n, p in model.named_parameters() if n.startswith("blocks") and p.dim() == 2
    )
    matrices = {name: p.detach().double() for name, p in of_blocks}
    momentum = {n: torch.zeros_like(w) for n, w in matrices.items()}
    generator = torch.Generator().manual_seed(3)
    for step in range(1, 6):
        for p, q in zip(model.parameters(), other.parameters()):
            p.grad = torch.randn(p.shape, generator=generator)
            q.grad = p.grad.clone()
        mu = 0.95 - 0.10 * max(0, 1 - step / 3)
        for name, w in matrices.items():
            g = model.get_parameter(name).grad.double()
            momentum[name] = mu * momentum[name] + (1 - mu) * g
            u = mu * momentum[name] + (1 - mu) * g
            for part_w, part_u in zip(*(t.split(rows.get(name[9:], [len(w)])) for t in (w, u))):
                x = naive_orthogonal(part_u)
                x = (x.T if x.shape != part_u.shape else x) * max(
                    1, len(part_u) / part_u.size(1)
                ) ** 0.5
                part_w -= 0.02 * x + 0.01 * part_w * (x * part_w > 0)
        optimizer.step()
        adamw.step()
    for name, p in model.named_parameters():
        expected = matrices.get(name, other.get_parameter(name).detach().double())
        off = (p.detach().double() - expected).abs() > 1e-5  # lr is 0.02
        # an element whose update is zero but for rounding decays in one of the two
        assert off.sum() <= 1, name


@pytest.mark.gpu
def test_a_compiled_muon_moves_the_weights_as_one_that_is_not():
    device, moved = torch.device("cuda"), []
    for compiled in (False, True):
        model = build(small(n_layer=6), device, seed=0)
        first = [p.detach().clone() for p in model.parameters()]
        cfg = settings(n_layer=6, optimizer="muon", lr=0.02, compile=compiled)
        optimizer = optim.make_optimizer(model, cfg)
        torch.manual_seed(0)
        for _ in range(3):
            for p in model.parameters():
                p.grad = torch.randn_like(p)
            optimizer.step()
        moved.append([p.detach() - f for p, f in zip(model.parameters(), first)])
    assert all(error(a, b) < 1e-2 for a, b in zip(*moved))  # updates are in bf16


def test_orthogonalized_singular_values_are_near_one():
    torch.manual_seed(1)
    x = torch.randn(3, 96, 384)
    u, s, v = torch.linalg.svd(x, full_matrices=False)
    found = u.mT @ optim.orthogonalize(x) @ v.mT  # diagonal in the singular vectors of x
    values = found.diagonal(dim1=1, dim2=2)
    assert values[s > 0.02 * s.norm(dim=1, keepdim=True)].sub(1).abs().max() < 0.15
    assert (found - values.diag_embed()).abs().max() < 1e-3


def rate(step, **changes):
    """Of a run of 100 steps."""
    return optim.learning_rate(step, step / 100, settings(**changes))


def test_schedules():
    half = 1e-4 + 9e-4 * 0.5 * (1 + math.cos(math.pi / 2))
    at = {0: 1e-4, 9: 1e-3, 10: 1e-3, 55: half, 100: 1e-4}
    assert [rate(step) for step in at] == pytest.approx([*at.values()])
    rates = [rate(step) for step in range(10, 101)]
    assert rates == sorted(rates, reverse=True)
    assert rate(79, schedule="wsd") == rate(10, schedule="wsd") == 1e-3
    assert rate(90, schedule="wsd") == pytest.approx(1e-4 + 9e-4 * 0.5)
    assert rate(100, schedule="wsd") == pytest.approx(1e-4)
    assert rate(99, schedule="wsd", cooldown_fraction=0.0) == 1e-3
    assert rate(99, schedule="constant") == 1e-3
    assert rate(0, warmup_steps=0) == 1e-3


def test_a_stack_is_its_matrices_and_each_group_has_its_own_rate():
    torch.manual_seed(0)
    stack = torch.nn.Parameter(torch.randn(3, 8, 16))
    parts = [torch.nn.Parameter(stack[i].detach().clone()) for i in range(3)]
    wide = torch.nn.Parameter(torch.randn(16, 8))
    again = torch.nn.Parameter(wide.detach().clone())
    weights = (stack, wide, again, *parts)
    counts = {p: optim.matrices_of("experts.weight", p, settings()) for p in weights}
    of = lambda params, **options: dict(params=params, **options)
    slow, fast = dict(lr=0.02, weight_decay=0.1), dict(lr=0.5)
    optimizers = [
        optim.Muon([of([stack], **slow), of([wide], **fast, weight_decay=0.0)], counts, lr=1.0),
        optim.Muon([of(parts, **slow)], counts, lr=1.0),
        optim.Muon([of([again], **fast)], counts, lr=1.0),
    ]
    grads, other = torch.randn(3, 8, 16), torch.randn(16, 8)
    for _ in range(2):
        stack.grad, wide.grad, again.grad = grads.clone(), other.clone(), other.clone()
        for i, part in enumerate(parts):
            part.grad = grads[i].clone()
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(stack.detach(), torch.stack([part.detach() for part in parts]))
    torch.testing.assert_close(wide, again)


class Edited(torch.nn.Module):
    """Edits may add a weight of one row, a convolution, a number, a stack, a second head, …"""

    def __init__(self):
        super().__init__()
        self.row = torch.nn.Linear(8, 1, bias=False)
        self.mix = torch.nn.Conv1d(8, 8, 4)
        self.number = torch.nn.Parameter(torch.tensor(1.0))
        self.stack = torch.nn.Parameter(torch.randn(3, 8, 8))
        self.head_2 = torch.nn.Linear(8, 32, bias=False)
        self.frozen = torch.nn.Linear(8, 8).requires_grad_(False)


def test_what_muon_cannot_take_goes_to_adamw():
    model, cfg = Edited(), settings(optimizer="muon", lr=0.02, lr_head=0.003)
    optimizer = optim.make_optimizer(model, cfg)
    adamw, muon = optimizer.optimizers
    assert muon.param_groups[0]["params"] == [model.stack]
    head, vectors = adamw.param_groups
    assert head["params"] == [model.head_2.weight] and head["lr"] == 0.003
    assert len(vectors["params"]) == 4 and vectors["lr"] == 0.02 and vectors["weight_decay"] == 0
    optim.set_learning_rate(optimizer, 0.01)
    assert [g["lr"] for g in optimizer.param_groups] == pytest.approx([0.0015, 0.01, 0.01])
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for p in model.parameters():
        p.grad = torch.ones_like(p) if p.requires_grad else None
    optimizer.step()
    stays = [name for name, p in model.named_parameters() if torch.equal(p, before[name])]
    assert stays == ["frozen.weight", "frozen.bias"]


def test_an_optimizer_that_lacks_something_is_refused(monkeypatch):
    model = build(small(), CPU, seed=0)
    with pytest.raises(UserError, match="lion"):
        optim.build("lion", [], model, settings())
    sgd = lambda name, groups, model, cfg: torch.optim.SGD(groups, lr=cfg.lr)
    monkeypatch.setattr(optim, "build", sgd)
    assert type(optim.make_optimizer(model, settings())) is torch.optim.SGD
    fewer = lambda name, groups, model, cfg: torch.optim.SGD(groups[1:], lr=cfg.lr)
    monkeypatch.setattr(optim, "build", fewer)
    with pytest.raises(UserError, match="wte.weight is in 0 groups"):
        optim.make_optimizer(model, settings())
