"""GPT-2 and Llama from the same blocks: the only place that says what the model computes.

A variant (norm, positions, MLP, …) is a module chosen in `__init__`; `forward` reads as the papers'
figure. Operations are kernels.py's, which has fused kernels for them. Edit anything: what you read
is what runs. The loss is decided in `GPT.forward` too: which targets count, further losses, and
figures to be logged. scale/ and the KV cache wrap `core`, the operation of attention or an MLP, and
the blocks in `GPT.layers`.

GPT-2: https://cdn.openai.com/better-language-models/language_models_are_unsupervised_multitask_learners.pdf
Llama 3: https://arxiv.org/abs/2407.21783
"""

import math
import warnings
from dataclasses import fields, replace

import torch
import torch.nn as nn
import torch.nn.functional as F

import kernels
from fast.chips import best_attention
from kernels import LayerNorm, Linear, RMSNorm
from scale import first_values
from settings import GPTConfig

INIT_STD = 0.02  # GPT-2's, of the weights of linear layers and embeddings


def residual_std(cfg):
    """Of projections into the residual stream: GPT-2's 0.02 / sqrt(2 n_layer), or zero."""
    return 0.0 if cfg.zero_init else INIT_STD * (2 * cfg.n_layer) ** -0.5


class LearnedPositions(nn.Embedding):
    def forward(self, x, positions):
        rows = self.weight[: x.size(1)] if positions is None else self.weight[positions]
        return x + rows


class Rope(nn.Module):
    """Rotary positions for q and k; tables in float32, as in Hugging Face's Llama."""

    def __init__(self, cfg):
        super().__init__()
        self.cfg = cfg
        with torch.device("cpu"):  # the same on every device
            angles = torch.outer(torch.arange(cfg.block_size).float(), self.frequencies())
        self.register_buffer("cos", angles.cos(), persistent=False)  # (T, D/2)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def frequencies(self):
        """Radians per position of each pair, (D/2,); Llama 3.1 divides slow ones by rope_factor."""
        cfg, D = self.cfg, self.cfg.head_size
        freq = 1.0 / cfg.rope_theta ** (torch.arange(0, D, 2).float() / D)
        if cfg.rope_factor is None:
            return freq
        turns = cfg.rope_original * freq / (2 * math.pi)  # within the original context
        # Llama 3.1's low_freq_factor 1, high_freq_factor 4
        keep = ((turns - 1) / (4 - 1)).clamp(0, 1)
        return keep * freq + (1 - keep) * freq / cfg.rope_factor

    def forward(self, q, k, q_norm, k_norm, positions):
        rows = slice(q.size(2)) if positions is None else positions
        cos, sin = self.cos[rows], self.sin[rows]  # (T, D/2)
        if cos.dim() == 3:  # positions of each row, (B, T)
            cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        return kernels.rope(q, q_norm, cos, sin), kernels.rope(k, k_norm, cos, sin)


class NoRope(nn.Module):
    def forward(self, q, k, q_norm, k_norm, positions):
        return q_norm(q), k_norm(k)


class ValueEmbedding(nn.Embedding):
    """Adds a table's row of each token to v (https://github.com/KellerJordan/modded-nanogpt)."""

    init_std = 0.0

    def forward(self, v, idx):
        rows = super().forward(idx).unflatten(-1, (v.size(1), -1))  # (B, T, H_kv, D)
        return v + rows.transpose(1, 2).type_as(v)


class EmbeddingMix(nn.Module):
    """(1 + a / 4) x + (0.1 + b / 4) x0: a and b are learned from zero, x0 is the embedded tokens.

    The factors move at a quarter of the rate, as in https://github.com/karpathy/nanochat.
    """

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2))

    def reset_parameters(self):
        nn.init.zeros_(self.weight)

    def forward(self, x, embedded):  # (B, T, C) each
        a, b = self.weight / 4
        return ((1 + a) * x.float() + (0.1 + b) * embedded.float()).type_as(x)


class HeadGate(nn.Module):
    """Multiplies each head's output by 2 sigmoid(W x), x: channels of the block's normed input.

    As in https://arxiv.org/abs/2505.06708; W starts at zero, so the gates start at one.
    """

    def __init__(self, cfg):
        super().__init__()
        self.channels = cfg.gate_channels
        self.weight = nn.Parameter(torch.empty(cfg.n_head * self.channels))

    def reset_parameters(self):
        nn.init.zeros_(self.weight)

    def forward(self, y, x):  # (B, T, H, D), (B, T, C)
        weight = self.weight.view(-1, self.channels).type_as(x)
        gates = 2 * torch.sigmoid(F.linear(x[..., : self.channels], weight))  # (B, T, H)
        return y * gates.unsqueeze(-1)


class Unchanged(nn.Module):
    """Stands for a part that a model does not have."""

    def forward(self, x, _):
        return x


class SeparateValues(nn.Module):
    """Copies v, a view of what qkv made, so that keeping it does not keep q and k."""

    def forward(self, v, _):
        return v.transpose(1, 2).contiguous().transpose(1, 2)


class Attention(nn.Module):
    core = staticmethod(kernels.attention)  # tokens mix here alone

    def __init__(self, cfg, rope, layer):
        super().__init__()
        self.heads, self.head_dim = [cfg.n_head, cfg.kv_heads, cfg.kv_heads], cfg.head_size
        self.backend, self.dropout = cfg.attention, cfg.dropout
        self.qkv = Linear(cfg.n_embd, sum(self.heads) * cfg.head_size, bias=cfg.bias)
        self.q_norm = nn.RMSNorm(cfg.head_size, cfg.norm_eps) if cfg.qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(cfg.head_size, cfg.norm_eps) if cfg.qk_norm else nn.Identity()
        self.rope, self.values = rope, Unchanged()
        if layer in cfg.value_layers:
            self.values = ValueEmbedding(cfg.padded_vocab, cfg.kv_heads * cfg.head_size)
        elif cfg.positions == "rope" and not cfg.qk_norm:
            # RoPE makes other q and k, so that nothing needs those before, but for their norms
            self.values = SeparateValues()
        self.gate = HeadGate(cfg) if cfg.attention_gate else Unchanged()
        self.proj = Linear(cfg.attention_width, cfg.n_embd, bias=cfg.bias)
        self.proj.init_std = residual_std(cfg)

    def forward(self, x, idx, positions):
        q, k, v = kernels.qkv(x, self.qkv, self.heads, self.head_dim)
        q, k = self.rope(q, k, self.q_norm, self.k_norm, positions)  # (B, H, T, D), also v
        v = self.values(v, idx)
        y = self.core(q, k, v, self.backend, self.dropout * self.training)
        y = self.gate(y.transpose(1, 2), x).flatten(2)  # (B, T, H D)
        return self.proj(y)


class MLP(nn.Module):
    """proj(activation(up(x)))"""

    core = staticmethod(kernels.mlp)

    def __init__(self, cfg, activation):
        super().__init__()
        self.up = Linear(cfg.n_embd, cfg.mlp_hidden, bias=cfg.bias)
        self.proj = Linear(cfg.mlp_hidden, cfg.n_embd, bias=cfg.bias)
        self.proj.init_std = residual_std(cfg)
        self.activation = activation

    def forward(self, x):
        return self.core(x, self.up, self.activation, self.proj)


class SwiGLU(nn.Module):
    """proj(silu(gate(x)) * up(x)); gate and up are one matrix, so one GEMM."""

    core = staticmethod(kernels.mlp)

    def __init__(self, cfg):
        super().__init__()
        self.gate_up = Linear(cfg.n_embd, 2 * cfg.mlp_hidden, bias=cfg.bias)
        self.proj = Linear(cfg.mlp_hidden, cfg.n_embd, bias=cfg.bias)
        self.proj.init_std = residual_std(cfg)

    def forward(self, x):
        return self.core(x, self.gate_up, kernels.swiglu, self.proj)


def make_norm(cfg):
    if cfg.norm == "rmsnorm":
        return RMSNorm(cfg.n_embd, cfg.norm_eps)
    return LayerNorm(cfg.n_embd, cfg.norm_eps, bias=cfg.bias)


def make_mlp(cfg):
    if cfg.mlp == "swiglu":
        return SwiGLU(cfg)
    return MLP(cfg, {"gelu": kernels.gelu, "relu2": kernels.relu2}[cfg.mlp])


class Block(nn.Module):
    def __init__(self, cfg, rope, layer):
        super().__init__()
        self.norm_1, self.attn = make_norm(cfg), Attention(cfg, rope, layer)
        self.norm_2, self.mlp = make_norm(cfg), make_mlp(cfg)
        self.dropout = nn.Dropout(cfg.dropout)

    def forward(self, x, idx, positions):
        x = x + self.dropout(self.attn(self.norm_1(x), idx, positions))
        x = x + self.dropout(self.mlp(self.norm_2(x)))
        return x


class Head(nn.Linear):
    """Logits of the real vocabulary, without the padding rows, or their cross-entropy."""

    def __init__(self, cfg):
        super().__init__(cfg.n_embd, cfg.padded_vocab, bias=False)
        self.vocab_size = cfg.vocab_size
        if cfg.zero_init and not cfg.tie_embeddings:
            self.init_std = 0.0

    def forward(self, x, targets, reduction="mean"):
        return kernels.linear_cross_entropy(x, self, targets, reduction, self.vocab_size)

    def logits(self, x):
        return F.linear(x, self.weight)[..., : self.vocab_size].float()


class GPT(nn.Module):
    """A decoder-only transformer; `cfg` is a GPTConfig or anything with its fields."""

    def __init__(self, cfg):
        super().__init__()
        self.cfg = cfg
        learned = cfg.positions == "learned"
        rope = NoRope() if learned else Rope(cfg)
        self.wte = nn.Embedding(cfg.padded_vocab, cfg.n_embd)
        if cfg.embed_norm:
            self.wte.init_std = 1.0
        self.wpe = LearnedPositions(cfg.block_size, cfg.n_embd) if learned else Unchanged()
        self.embed_norm = nn.Identity()
        if cfg.embed_norm:
            self.embed_norm = nn.RMSNorm(cfg.n_embd, cfg.norm_eps, elementwise_affine=False)
        self.dropout = nn.Dropout(cfg.dropout)
        self.blocks = nn.ModuleList(Block(cfg, rope, layer) for layer in range(cfg.n_layer))
        self.mixes = nn.ModuleList(Unchanged() for _ in self.blocks)
        for layer in cfg.mixed_layers:
            self.mixes[layer] = EmbeddingMix()
        self.layers = list(zip(self.mixes, self.blocks))  # as `hidden` calls them
        self.norm = make_norm(cfg)
        self.head = Head(cfg)
        if cfg.tie_embeddings:
            self.head.weight = self.wte.weight

    def forward(self, idx, targets, positions=None, reduction="mean"):
        """A micro-batch -> the mean loss in nats, of how many targets, what to log.

        idx, targets: (B, T) int64, T <= block_size; a target of -100 does not count.
        positions: (T,) or (B, T) int64, of the tokens in their sequences; None: 0 to T - 1.
        reduction: "mean", or in validation "rows": loss and count are (B,), of each row.
        The last of the three is {name: scalar tensor}.
        """
        x = self.hidden(idx, positions)
        loss, count = self.head(x, targets, reduction)
        return loss, count, {}

    def hidden(self, idx, positions=None):
        """(B, T) ids -> (B, T, C), the normalised residual stream that the head reads."""
        T, most = idx.size(1), self.cfg.block_size
        assert T <= most, f"{T} tokens, block_size={most}"
        x = embedded = self.embed(idx, positions)
        for mix, block in self.layers:
            x = block(mix(x, embedded), idx, positions)
        return self.norm(x)

    def embed(self, idx, positions):
        x = self.embed_norm(self.wpe(self.wte(idx), positions))
        return kernels.residual(self.dropout(x))

    def token_losses(self, idx, targets):
        """-log p of each target, (B, T) in nats, 0 where it is -100; without gradients."""
        return self.head(self.hidden(idx), targets, "none")[0]

    def logits(self, idx, at=slice(None), positions=None):
        """(B, T) ids -> (B, len(at), vocab_size) float32; at: a tensor or a slice of tokens."""
        return self.head.logits(self.hidden(idx, positions)[:, at])

    @torch.no_grad()
    def init_weights(self):
        """Gives first values to all parameters but those that have theirs from an `__init__`."""
        for name, module in self.named_modules():
            with first_values.whole(module, name, self.given):
                initialize(module)


def initialize(module):
    """Draws the weight of a linear layer or an embedding from N(0, init_std), by default INIT_STD.

    Biases are zero. A module with a `reset_parameters` of its own has the values that it gives.
    """
    reset = getattr(type(module), "reset_parameters", None)
    if reset in (nn.Linear.reset_parameters, nn.Embedding.reset_parameters):
        nn.init.normal_(module.weight, std=getattr(module, "init_std", INIT_STD))
        if getattr(module, "bias", None) is not None:
            nn.init.zeros_(module.bias)
        if getattr(module, "padding_idx", None) is not None:  # of an edit's embedding
            module.weight[module.padding_idx] = 0
    elif reset:
        module.reset_parameters()


def build(cfg, device, seed=None, dtype=torch.float32):
    """A GPT on `device`; without a seed its weights are any."""
    if cfg.attention == "auto":
        cfg = replace(cfg, attention=best_attention(device)[0])

    def in_dtype(parameter):
        if parameter.dtype == torch.float32:
            parameter.data = parameter.data.to(dtype)

    if seed is not None:
        torch.manual_seed(seed)
    with torch.device(device):
        model = first_values.made(lambda: GPT(shape_of(cfg)), in_dtype).to(device)
    if seed is not None:
        torch.manual_seed(seed)
        model.init_weights()
    return model


def shape_of(cfg):
    return GPTConfig(**{f.name: getattr(cfg, f.name) for f in fields(GPTConfig)})


def on_meta(cfg):
    """A GPT of cfg's shape whose parameters take no memory yet, for `allocate`."""
    model = first_values.made(lambda: GPT(shape_of(cfg)), first_values.to_meta)
    # of an edit's parameters, for optim.py; `allocate` makes other parameters
    model.parameter_attributes = {name: vars(p) for name, p in model.named_parameters()}
    return model


def allocate(model, device, seed=None):
    """Allocates a model of `on_meta`, and initialises its weights if `seed` is given."""
    places = {}  # {parameter: [(module, name)]}; weights that are shared have several
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            places.setdefault(parameter, []).append((module, name))

    def on_device(tensor):
        if not tensor.is_meta:
            return tensor
        made = torch.empty_like(tensor, device=device)  # of its class: FSDP2 asks it how to gather
        if made.is_floating_point():
            made.fill_(torch.nan)
        return made

    model._apply(on_device).to(device)
    for (first, name), *others in places.values():
        for module, other in others:  # _apply has allocated them apart
            module._parameters[other] = first._parameters[name]
    for name, parameter in model.named_parameters():
        vars(parameter).update(model.parameter_attributes[name])
    if seed is not None:
        torch.manual_seed(seed)
        with warnings.catch_warnings():
            # on CPU ranks a draw into a sharded parameter gives each of them the same rows
            warnings.filterwarnings("error", "DTensor random operators")
            model.init_weights()
    return model
