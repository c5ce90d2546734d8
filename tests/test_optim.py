"""optim.py: decay groups, AdamW against a naive loop, and the schedules at their corners."""

import math
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT

import optim
from model import build
from settings import GPTConfig

CPU = torch.device("cpu")


def settings(**changes):
    defaults = dict(lr=1e-3, min_lr_ratio=0.1, schedule="cosine", warmup_steps=10, warmup_tokens=None, max_steps=100)
    defaults |= dict(batch_tokens=1000, cooldown_fraction=0.2, weight_decay=0.1, beta1=0.9, beta2=0.95, adam_eps=1e-8)
    defaults |= dict(optimizer="adamw", seed=1337)
    return SimpleNamespace(**{**defaults, **changes})


def test_importing_optim_loads_no_model_or_tokenizer():
    code = "import sys, optim; sys.exit(bool({'corpus', 'model', 'run', 'scale.parallel'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_groups_hold_every_parameter_once_and_decay_matrices_alone():
    model = build(GPTConfig(vocab_size=100, n_layer=2, n_head=2, n_embd=16, block_size=8), CPU, seed=0)
    decayed, others = optim.param_groups(model, 0.1)
    assert decayed["weight_decay"] == 0.1 and others["weight_decay"] == 0
    assert all(p.dim() == 2 for p in decayed["params"]) and all(p.dim() == 1 for p in others["params"])
    ids = [id(p) for p in decayed["params"] + others["params"]]
    assert sorted(ids) == sorted(id(p) for p in model.parameters())


def test_adamw_is_the_papers():
    torch.manual_seed(0)
    weight = torch.nn.Linear(5, 3, bias=False)
    w = weight.weight.detach().double().clone()
    cfg = settings()
    optimizer = optim.make_optimizer(weight, cfg)
    m = v = torch.zeros_like(w)
    for t in range(1, 6):
        grad = torch.randn(3, 5)
        weight.weight.grad = grad.clone()
        optim.set_learning_rate(optimizer, cfg.lr * t)
        optimizer.step()
        m = cfg.beta1 * m + (1 - cfg.beta1) * grad.double()
        v = cfg.beta2 * v + (1 - cfg.beta2) * grad.double() ** 2
        update = (m / (1 - cfg.beta1**t)) / ((v / (1 - cfg.beta2**t)).sqrt() + cfg.adam_eps)
        w = w - cfg.lr * t * (update + cfg.weight_decay * w)
    torch.testing.assert_close(weight.weight.double(), w, rtol=1e-5, atol=1e-6)  # float32 rounding of five updates


def test_warmup_then_cosine():
    cfg = settings()
    assert optim.learning_rate(0, cfg) == pytest.approx(1e-4)
    assert optim.learning_rate(9, cfg) == pytest.approx(1e-3)
    assert optim.learning_rate(10, cfg) == pytest.approx(1e-3)
    assert optim.learning_rate(55, cfg) == pytest.approx(1e-4 + 9e-4 * 0.5 * (1 + math.cos(math.pi / 2)))
    assert optim.learning_rate(100, cfg) == pytest.approx(1e-4)
    rates = [optim.learning_rate(s, cfg) for s in range(10, 101)]
    assert rates == sorted(rates, reverse=True)


def test_wsd_and_constant():
    cfg = settings(schedule="wsd")
    assert optim.learning_rate(79, cfg) == optim.learning_rate(10, cfg) == 1e-3
    assert optim.learning_rate(90, cfg) == pytest.approx(1e-4 + 9e-4 * 0.5)
    assert optim.learning_rate(100, cfg) == pytest.approx(1e-4)
    assert optim.learning_rate(99, settings(schedule="constant")) == 1e-3


def test_warmup_in_tokens_and_none():
    cfg = settings(warmup_tokens=4500)
    assert optim.warmup_steps(cfg) == 5
    assert optim.learning_rate(4, cfg) == pytest.approx(1e-3)
    assert optim.learning_rate(0, settings(warmup_steps=0)) == 1e-3
