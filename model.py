"""GPT-2 and Llama from the same blocks.

A variant (norm, positions, MLP, …) is a module chosen in `__init__`; `forward` reads as the papers' figure.
GPT-2: https://cdn.openai.com/better-language-models/language_models_are_unsupervised_multitask_learners.pdf
Llama 3: https://arxiv.org/abs/2407.21783
"""

import math
from dataclasses import dataclass, fields
from typing import Literal

import torch
import torch.nn as nn
import torch.nn.functional as F

import kernels


@dataclass
class GPTConfig:
    vocab_size: int = 50257  # token ids there are; 50257 is GPT-2's
    vocab_multiple: int = 128  # embedding rows are padded up to a multiple of this (50257 -> 50304: faster matmuls)
    block_size: int = 1024  # tokens a sequence (T)
    n_layer: int = 12  # blocks
    n_head: int = 12  # query heads
    n_kv_head: int | None = None  # key/value heads (grouped-query attention); None: n_head
    n_embd: int = 768  # width of the residual stream (C)
    n_hidden: int | None = None  # width inside the MLP; None: 4 * n_embd
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"  # normalisation before each sublayer
    norm_eps: float = 1e-5  # added to the variance
    positions: Literal["learned", "rope"] = "learned"  # learned: GPT-2's table; rope: rotary, as Llama's
    rope_theta: float = 10000.0  # base of the rotary frequencies
    rope_factor: float | None = None  # Llama 3.1's scaling of the low frequencies (8.0 there); None: off
    rope_low_freq: float = 1.0  # wavelengths over rope_original / this are divided by rope_factor
    rope_high_freq: float = 4.0  # wavelengths under rope_original / this are left alone
    rope_original: int = 8192  # context that the model was trained with before scaling
    mlp: Literal["gelu", "relu2", "swiglu"] = "gelu"  # GPT-2's, squared ReLU, Llama's
    bias: bool = True  # biases in linear layers and LayerNorm
    qk_norm: bool = False  # RMSNorm on queries and keys before RoPE
    tie_embeddings: bool = True  # the head shares the token embedding's weight
    softcap: float | None = None  # bounds the logits to +-softcap; None: off
    label_smoothing: float = 0.0  # share of the target's probability spread over the vocabulary, in training only
    z_loss: float = 0.0  # weight of logsumexp(logits)**2 in the loss, in training only; PaLM's is 1e-4
    dropout: float = 0.0  # in attention and after each sublayer
    attention: Literal["auto", "cudnn", "flash", "efficient", "math"] = "auto"  # SDPA backend; auto: by device

    @property
    def head_dim(self):
        return self.n_embd // self.n_head

    @property
    def kv_heads(self):
        return self.n_head if self.n_kv_head is None else self.n_kv_head

    @property
    def hidden(self):
        return 4 * self.n_embd if self.n_hidden is None else self.n_hidden

    @property
    def qkv_width(self):
        return (self.n_head + 2 * self.kv_heads) * self.head_dim

    @property
    def mlp_width(self):
        """Of what the MLP's first matmul gives; SwiGLU's gate and up are one."""
        return 2 * self.hidden if self.mlp == "swiglu" else self.hidden

    @property
    def block_matmuls(self):
        """(width given, width taken) of a block's four: q, k and v; attention's output; the MLP's two."""
        C = self.n_embd
        return [(self.qkv_width, C), (C, C), (self.mlp_width, C), (C, self.hidden)]

    @property
    def padded_vocab(self):
        return math.ceil(self.vocab_size / self.vocab_multiple) * self.vocab_multiple

    def problems(self):
        """What is wrong with the shape, one line each; empty when it can be built."""
        sizes = ["vocab_size", "vocab_multiple", "block_size", "n_layer", "n_head", "n_embd"]
        found = [f"{s}={getattr(self, s)} must be at least 1" for s in sizes if getattr(self, s) < 1]
        found += [
            f"{s}={v} must be at least 1"
            for s in ("n_kv_head", "n_hidden")
            if (v := getattr(self, s)) is not None and v < 1
        ]
        if not found and self.n_embd % self.n_head:
            found.append(f"n_embd={self.n_embd} must be divisible by n_head={self.n_head}")
        if not found and self.n_head % self.kv_heads:
            found.append(f"n_head={self.n_head} must be divisible by n_kv_head={self.n_kv_head}")
        if not found and self.positions == "rope" and self.head_dim % 2:
            found.append(f"n_embd / n_head = {self.head_dim} must be even with positions=rope")
        for name in ("dropout", "label_smoothing"):
            if not 0 <= getattr(self, name) < 1:
                found.append(f"{name}={getattr(self, name)} must be in [0, 1)")
        if self.softcap is not None and not self.softcap > 0:
            found.append(f"softcap={self.softcap} must be over 0, or None for off")
        if self.z_loss < 0:
            found.append(f"z_loss={self.z_loss} must be at least 0")
        return found


class LearnedPositions(nn.Embedding):
    first = 0  # position of the first token given

    def forward(self, x):
        return x + self.weight[self.first : self.first + x.size(1)]


class Rope(nn.Module):
    """Rotary positions for q and k, the tables computed in float32 as Hugging Face's Llama does."""

    first = 0  # position of the first token given

    def __init__(self, cfg):
        super().__init__()
        self.cfg = cfg
        self.register_buffer("cos", torch.empty(cfg.block_size, cfg.head_dim), persistent=False)
        self.register_buffer("sin", torch.empty(cfg.block_size, cfg.head_dim), persistent=False)

    def reset_tables(self):
        angles = torch.outer(torch.arange(self.cos.size(0)).float(), self.frequencies())
        angles = torch.cat((angles, angles), dim=-1)  # (T, D)
        self.cos.copy_(angles.cos())
        self.sin.copy_(angles.sin())

    def frequencies(self):
        """Radians per position of each pair, (D/2,); Llama 3.1 divides the slow ones by rope_factor."""
        cfg, D = self.cfg, self.cfg.head_dim
        freq = 1.0 / cfg.rope_theta ** (torch.arange(0, D, 2).float() / D)
        if cfg.rope_factor is None:
            return freq
        turns = cfg.rope_original * freq / (2 * math.pi)  # full turns within the original context
        keep = ((turns - cfg.rope_low_freq) / (cfg.rope_high_freq - cfg.rope_low_freq)).clamp(0, 1)
        return keep * freq + (1 - keep) * freq / cfg.rope_factor

    def tables(self, T):
        """cos and sin of T tokens, (T, D) each"""
        return [table[self.first : self.first + T] for table in (self.cos, self.sin)]

    def forward(self, q, k):
        cos, sin = self.tables(q.size(2))
        return kernels.apply_rope(q, cos, sin), kernels.apply_rope(k, cos, sin)


class NoRope(nn.Module):
    def forward(self, q, k):
        return q, k


class Attention(nn.Module):
    def __init__(self, cfg, rope):
        super().__init__()
        self.heads = [cfg.n_head, cfg.kv_heads, cfg.kv_heads]
        self.head_dim, self.backend, self.dropout = cfg.head_dim, cfg.attention, cfg.dropout
        self.qkv = nn.Linear(cfg.n_embd, sum(self.heads) * cfg.head_dim, bias=cfg.bias)
        self.proj = nn.Linear(cfg.n_embd, cfg.n_embd, bias=cfg.bias)
        self.q_norm = nn.RMSNorm(cfg.head_dim, cfg.norm_eps) if cfg.qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(cfg.head_dim, cfg.norm_eps) if cfg.qk_norm else nn.Identity()
        self.rope = rope

    def forward(self, x):
        return self.combine(self.attend(*self.project(x)))

    def project(self, x):
        """(B, T, C) -> q, k, v, (B, H, T, D) each"""
        q, k, v = self.qkv(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2).split(self.heads, dim=1)
        return *self.rope(self.q_norm(q), self.k_norm(k)), v

    def combine(self, y):
        return self.proj(y.transpose(1, 2).flatten(2))

    def attend(self, q, k, v):
        return kernels.attention(q, k, v, self.backend, self.dropout * self.training)


class MLP(nn.Module):
    def __init__(self, cfg, activation):
        super().__init__()
        self.up = nn.Linear(cfg.n_embd, cfg.hidden, bias=cfg.bias)
        self.proj = nn.Linear(cfg.hidden, cfg.n_embd, bias=cfg.bias)
        self.activation = activation

    def forward(self, x):
        return self.proj(self.activation(self.up(x)))


class SwiGLU(nn.Module):
    """https://arxiv.org/abs/2002.05202; gate and up are one matrix, so one matmul."""

    def __init__(self, cfg):
        super().__init__()
        self.gate_up = nn.Linear(cfg.n_embd, 2 * cfg.hidden, bias=cfg.bias)
        self.proj = nn.Linear(cfg.hidden, cfg.n_embd, bias=cfg.bias)

    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.proj(F.silu(gate) * up)


def gelu(x):
    return F.gelu(x, approximate="tanh")  # GPT-2's own form


def relu2(x):
    return F.relu(x).square()  # https://arxiv.org/abs/2109.08668


def make_norm(cfg):
    if cfg.norm == "rmsnorm":
        return nn.RMSNorm(cfg.n_embd, cfg.norm_eps)
    return nn.LayerNorm(cfg.n_embd, cfg.norm_eps, bias=cfg.bias)


def make_mlp(cfg):
    return SwiGLU(cfg) if cfg.mlp == "swiglu" else MLP(cfg, {"gelu": gelu, "relu2": relu2}[cfg.mlp])


class Block(nn.Module):
    def __init__(self, cfg, rope):
        super().__init__()
        self.norm_1, self.attn = make_norm(cfg), Attention(cfg, rope)
        self.norm_2, self.mlp = make_norm(cfg), make_mlp(cfg)
        self.dropout = nn.Dropout(cfg.dropout)

    def forward(self, x):
        x = x + self.dropout(self.attn(self.norm_1(x)))
        return x + self.dropout(self.mlp(self.norm_2(x)))


class Head(nn.Linear):
    """Logits of the real vocabulary, or their cross-entropy; the padding rows take part in neither."""

    def __init__(self, cfg):
        super().__init__(cfg.n_embd, cfg.padded_vocab, bias=False)
        self.vocab_size, self.softcap = cfg.vocab_size, cfg.softcap
        self.label_smoothing, self.z_loss = cfg.label_smoothing, cfg.z_loss

    def forward(self, x, targets, reduction):
        return kernels.linear_cross_entropy(x, self.weight, targets, reduction, *self.options())

    def options(self):
        """What the loss takes besides: vocab_size, softcap, label smoothing and z-loss."""
        return self.vocab_size, self.softcap, self.label_smoothing * self.training, self.z_loss * self.training

    def logits(self, x):
        return kernels.cap(F.linear(x, self.weight)[..., : self.vocab_size].float(), self.softcap)


class GPT(nn.Module):
    """A decoder-only transformer; `cfg` is a GPTConfig or anything with its fields."""

    def __init__(self, cfg):
        super().__init__()
        self.cfg = cfg
        rope = Rope(cfg) if cfg.positions == "rope" else NoRope()
        self.wte = nn.Embedding(cfg.padded_vocab, cfg.n_embd)
        self.wpe = LearnedPositions(cfg.block_size, cfg.n_embd) if cfg.positions == "learned" else nn.Identity()
        self.dropout = nn.Dropout(cfg.dropout)
        self.blocks = nn.ModuleList(Block(cfg, rope) for _ in range(cfg.n_layer))
        self.norm = make_norm(cfg)
        self.head = Head(cfg)
        self.tie()

    def forward(self, idx, targets, reduction="mean"):
        """idx, targets: (B, T) int64, T <= block_size, target -100 ignored -> loss in nats, by `reduction`."""
        return self.head(self.hidden(idx), targets, reduction)

    def hidden(self, idx):
        """(B, T) ids -> (B, T, C), the normalised residual stream that the head reads."""
        assert idx.size(1) <= self.cfg.block_size, f"{idx.size(1)} tokens, block_size={self.cfg.block_size}"
        x = self.embed(idx)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def embed(self, idx):
        return self.dropout(self.wpe(self.wte(idx)))

    def logits(self, idx, at=slice(None)):
        """(B, T) ids -> (B, len(at), vocab_size) float32 at the positions `at` (a tensor or a slice)."""
        return self.head.logits(self.hidden(idx)[:, at])

    def tie(self):
        if self.cfg.tie_embeddings:
            self.head.weight = self.wte.weight

    @torch.no_grad()
    def init_weights(self, fill=lambda tensor, function: function(tensor)):
        """GPT-2's initialisation: N(0, 0.02), what adds to the residual stream scaled by 1/sqrt(2 n_layer).

        fill(tensor, function) draws a tensor's numbers; for a sharded one parallel.py keeps this rank's part of them.
        """
        for name, module in self.named_modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                scale = (2 * self.cfg.n_layer) ** -0.5 if name.endswith("proj") else 1.0
                fill(module.weight, lambda weight, scale=scale: nn.init.normal_(weight, std=0.02 * scale))
                if getattr(module, "bias", None) is not None:
                    nn.init.zeros_(module.bias)
            elif hasattr(module, "reset_parameters"):  # norms to one and zero
                module.reset_parameters()
        self.reset_tables()
        return self

    @torch.no_grad()
    def reset_tables(self):
        """Fills what is computed, not learned (RoPE's tables): for a model whose weights come from a file."""
        for module in self.modules():
            if hasattr(module, "reset_tables") and module is not self:
                module.reset_tables()

    def parameter_counts(self):
        """Parameters without vocabulary padding, shared ones once: {"total", "embedding", "matmul"}.

        embedding: the tables that are only looked up; matmul: weights each token is multiplied with, head included.
        """
        cfg = self.cfg
        padding = (cfg.padded_vocab - cfg.vocab_size) * cfg.n_embd
        total = sum(p.numel() for p in self.parameters()) - padding * (1 if cfg.tie_embeddings else 2)
        matmul = sum(m.weight.numel() for m in self.modules() if isinstance(m, nn.Linear)) - padding
        tables = sum(m.weight.numel() for m in self.modules() if isinstance(m, nn.Embedding)) - padding
        return {
            "total": total,
            "embedding": tables - cfg.tie_embeddings * cfg.vocab_size * cfg.n_embd,
            "matmul": matmul,
        }

    def flops_per_token(self, T=None):
        """Forward and backward FLOPs per token at sequence length T: 6 per matmul weight, and causal attention once.

        A query sees (T + 1) / 2 keys on average: QK^T and AV are 2 * 2 * D * (T + 1) / 2 a head, thrice that in all.
        Norms, activations, softmax and the padding rows are not counted, nor is recomputation.
        """
        T = self.cfg.block_size if T is None else T
        attention = 6 * self.cfg.n_layer * self.cfg.n_embd * (T + 1)
        return 6 * self.parameter_counts()["matmul"] + attention


def on_meta(cfg):
    """A GPT of cfg's shape that takes no memory yet."""
    shape = GPTConfig(**{f.name: getattr(cfg, f.name) for f in fields(GPTConfig)})
    with torch.device("meta"):
        return GPT(shape)


def build(cfg, device, seed=None):
    """A GPT allocated on `device` at once, not on the CPU first; weights undefined unless `seed` is given."""
    model = on_meta(cfg)
    for module in model.modules():
        if isinstance(module, Attention) and module.backend == "auto":
            module.backend = kernels.best_attention(device)[0]
    return allocate(model, device, seed)


def allocate(model, device, seed=None, **options):
    """Gives a model on meta its memory on `device`, and initial weights if `seed` is given (see init_weights)."""
    model.to_empty(device=device)
    model.tie()  # to_empty allocates the two apart
    if seed is None:
        model.reset_tables()
        return model
    torch.manual_seed(seed)
    return model.init_weights(**options)
