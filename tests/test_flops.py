"""run/flops.py: operations, FLOPs and parameters of the model that runs, edited or not."""

import dataclasses

import pytest
import torch
import torch.nn as nn
from compare import CPU, LLAMA
from torch.utils.flop_counter import FlopCounterMode

import fast
import model as models
from fast import forms
from run import flops
from run.flops import ModelAnalysis
from settings import Config

SMALL = dict(vocab_size=200, n_layer=3, n_head=4, n_embd=64, block_size=32, precision="bf16")
GROUPED = dict(n_kv_head=2, n_hidden=96, **LLAMA)
SHAPES = [
    {},
    GROUPED,
    dict(qk_norm=True, mlp="relu2"),
    dict(tie_embeddings=False, attention_gate=True),
]


@pytest.fixture(autouse=True)
def fast_forms(monkeypatch):
    monkeypatch.setattr(forms, "enabled", {"cpu"})


def analysed(**settings):
    cfg = Config(**{**SMALL, **settings})
    return ModelAnalysis(cfg, CPU), cfg


@pytest.mark.parametrize("shape", SHAPES)
def test_flops_are_those_of_the_formula_and_of_a_real_step(shape):
    """PyTorch's counter sees whole T x T attention, MFU half of it."""
    found, cfg = analysed(vocab_multiple=64, **shape)
    assert found.regular and not found.unused and not found.problem
    model = models.build(dataclasses.replace(cfg, attention="math"), CPU, 0)
    x = torch.randint(0, 200, (2, cfg.block_size))
    with FlopCounterMode(display=False) as counter:
        model(x, x)[0].backward()
    keys = cfg.block_size, (cfg.block_size + 1) / 2
    whole, causal = (12 * cfg.n_layer * cfg.n_embd * count for count in keys)
    assert counter.get_total_flops() / x.numel() == found.flops_per_token + whole - causal


def test_document_masks_leave_attention_out():
    """Else a step of 131,072 tokens in documents of 8,192 has an MFU of 96% (Llama 3 8B, H200)."""
    masked, cfg = analysed(document_mask=True, **GROUPED)
    attention = 6 * cfg.n_layer * cfg.n_embd * (cfg.block_size + 1)
    assert masked.flops_per_token == analysed(**GROUPED)[0].flops_per_token - attention


def test_a_loss_in_chunks_is_counted_as_if_it_were_whole(monkeypatch):
    """Without the logits that its backward computes again."""
    whole = analysed(vocab_multiple=16_384)[0]
    monkeypatch.setattr(fast, "LOGITS_MIB", 1)  # 16 of the 32 tokens at a time
    chunked = analysed(vocab_multiple=16_384)[0]
    assert not chunked.problem and not chunked.unused
    assert (chunked.calls, chunked.flops_per_token) == (whole.calls, whole.flops_per_token)


def test_an_edited_model_is_counted_as_it_is(monkeypatch):
    """An extra layer, another activation, and the last block left out."""
    init, plain = models.Block.__init__, analysed()[0]

    def wider(self, cfg, rope, layer):
        init(self, cfg, rope, layer)
        self.extra = nn.Linear(cfg.n_embd, cfg.n_embd)
        self.mlp.activation = torch.sin

    def forward(self, x, idx, positions):
        x = x + self.attn(self.norm_1(x), idx, positions)
        h = self.norm_2(x)
        return x + self.mlp(h) + self.extra(h)

    def hidden(self, idx, positions=None):
        x = self.embed(idx, positions)
        for _, block in self.layers[:-1]:
            x = block(x, idx, positions)
        return self.norm(x)

    monkeypatch.setattr(models.Block, "__init__", wider)
    monkeypatch.setattr(models.Block, "forward", forward)
    monkeypatch.setattr(models.GPT, "hidden", hidden)
    found, cfg = analysed()
    extra, block = 6 * 64 * 64, 6 * (12 * 64 * 64 + 64 * 33)
    assert found.flops_per_token == plain.flops_per_token + 2 * extra - block
    assert not found.regular
    assert (
        found.calls["mlp", "another activation"] == 2 and found.calls["linear", None] == 2 + 2 * 2
    )
    assert "blocks.2.attn.qkv.weight" in found.unused and len(found.unused) == 14
    kind, unused = found.rows()[-1]
    assert kind == "warning" and "blocks.2.norm_1.weight" in unused and "and 11 more" in unused


def test_an_edit_that_reads_a_value_is_not_counted(monkeypatch):
    embed = lambda self, idx, _: self.wte(idx) * idx.float().mean().item()
    monkeypatch.setattr(models.GPT, "embed", embed)
    found, _ = analysed()
    assert found.flops_per_token is None and "not counted" in found.rows()[0][1]


@pytest.mark.parametrize("name, precision, tflops", [
    ("NVIDIA H200", "bf16", 989),
    ("AMD Instinct MI300X", "fp32", None),
    ("NVIDIA H200 NVL", "fp8", 1670),
    ("NVIDIA GH200 480GB", "bf16", 989),
    ("NVIDIA RTX A1000", "bf16", None),
    ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16", None),
    ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bf16", None),
])  # fmt: skip
def test_peaks(monkeypatch, name, precision, tflops):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert flops.peak_flops(torch.device("cuda", 0), precision) == (tflops and tflops * 1e12)
    assert flops.peak_flops(CPU, precision) is None
