"""Activation checkpointing: blocks keep little and compute the rest again in the backward.

--remat=selective  keeps all but the inside of the MLP, which is most of the activations
                   (https://arxiv.org/abs/2205.05198); costs another GEMM
--remat=block      keeps the block's input (https://arxiv.org/abs/1604.06174); runs it twice
--remat=attention  keeps attention's output too: what grows with the context's square runs once
--remat_tile=16384 computes an MLP on so many tokens at a time, so that its wide tensors are small
--remat_offload    block, attention: what is kept waits in pinned host memory

The block's own forward runs twice, with the states of torch's, numpy's and Python's random numbers
replayed, so that any edit of it is right.
"""

import contextlib
import functools
import math

import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import kernels
from fast import forms
from scale import generators, memory
from scale.activation_offload import ActivationStore, KeptTensor
from system.errors import UserError


def always(*_, **__):
    return CheckpointPolicy.MUST_RECOMPUTE


RECOMPUTE_ALL = {}  # options of a compiled checkpoint
if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 12):
    # which keeps what an autograd.Function saves (pull request 177396)
    RECOMPUTE_ALL["context_fn"] = functools.partial(create_selective_checkpoint_contexts, always)


def apply(model, cfg, device_type="cpu"):
    """Puts cfg.remat around each cfg.remat_every-th block from the first; results do not change."""
    if cfg.remat == "attention":
        refuse_other_attention(cfg, device_type)
    store = ActivationStore(cfg.remat_offload)
    for i in memory.recomputed_blocks(cfg, len(model.blocks)):
        block = model.blocks[i]
        attention = None
        if cfg.remat == "selective" or cfg.remat_tile:
            recompute_mlp(block, cfg.remat_tile)
        if cfg.remat == "attention":
            attention = keep_attention(block, store)
        if cfg.remat != "selective":
            mix, _ = model.layers[i]
            model.layers[i] = mix, CheckpointedBlock(block, store, attention)


def refuse_other_attention(cfg, device_type):
    """Raises UserError unless attention is PyTorch's, with an operator that KeptAttention knows."""
    if device_type != "cpu":
        in_16_bits = device_type == "cuda" and cfg.precision not in ("fp32", "tf32")
        if not in_16_bits or cfg.attention not in ("cudnn", "flash"):
            why = f"it is {cfg.attention} in {cfg.precision} on {device_type}; try --remat=block"
            raise UserError(f"remat=attention needs attention=cudnn or flash in 16 bits, {why}")
    if "attention" in forms.edits:
        why = f"keeps the results of PyTorch's attention, and {forms.edits['attention']}"
        raise UserError(f"remat=attention {why}; try --remat=block")


def recompute_mlp(block, tile):
    """Wraps the core of a block's MLP, once where an edit's blocks share it."""
    mlp = part_of(block, "mlp")
    if not isinstance(mlp.core, RecomputedMLP):
        mlp.core = RecomputedMLP(mlp.core, tile)


def keep_attention(block, store):
    """Wraps the core of a block's attention, once as in `recompute_mlp`; returns what wraps it."""
    attn = part_of(block, "attn")
    if not isinstance(attn.core, KeptAttention):
        if attn.core is not kernels.attention:
            raise other_core("attn", "another")
        attn.core = KeptAttention(attn.core, store)
    return attn.core


def part_of(block, name):
    """The block's part of this name, which must have a `core`."""
    part = getattr(block, name, None)
    if not hasattr(part, "core"):
        raise other_core(name, "none")
    return part


def other_core(name, found):
    what = f"this remat wraps {name}.core, and model.py's block has {found}"
    return UserError(f"{what}; try --remat=block")


class CheckpointedBlock:
    """A block that keeps its inputs, and the results of a KeptAttention in it, and runs again."""

    def __init__(self, block, store, attention=None):
        self.block, self.store, self.attention = block, store, attention

    def __call__(self, *inputs, **named):
        """named: an edit's inputs, which are kept as they are, on the device."""
        if not torch.is_grad_enabled():
            return self.block(*inputs, **named)
        self.store.begin_block()
        kept = list(inputs)  # after the forward KeptTensors in place of those with gradients
        results = []  # of the attention, which the recomputation takes

        def forward(_):
            own = []
            for x in kept:
                if isinstance(x, KeptTensor):  # in the recomputation
                    x = self.store.get(x).detach().requires_grad_()
                own.append(x)
            return self.block(*own, **named)

        def contexts():
            first, again = generators.replay()
            if self.attention is not None:
                first = self.attention.use(results, recording=True, numbers=first)
                again = self.attention.use(results, recording=False, numbers=again)
            return first, again

        # the empty tensor says on which device the random state is to be kept
        out = checkpoint(forward, inputs[0].new_empty(0), use_reentrant=False, context_fn=contexts)
        for i, x in enumerate(inputs):
            if torch.is_tensor(x) and x.requires_grad:
                kept[i] = self.store.keep(x.detach())
        return out


class KeptAttention:
    """attn.core that runs once: a block's recomputation takes the results of its forward."""

    def __init__(self, core, store):
        self.core, self.store = core, store
        self.results = None  # of the block that runs, outside of `use` None
        self.recording = False

    @contextlib.contextmanager
    def use(self, results, recording, numbers):
        """Around the block; numbers: a context of `generators.replay`."""
        self.results, self.recording = results, recording
        try:
            with numbers:
                yield
        finally:
            self.results = None

    @torch.compiler.disable
    def __call__(self, q, k, v, backend, dropout=0.0):
        if self.results is None or dropout:  # an edit's; it is drawn again as the block runs again
            return self.core(q, k, v, backend, dropout)
        q, k = q.to(v.dtype), k.to(v.dtype)  # RMSNorm under autocast gives float32
        if not q.is_cuda and q.size(1) != k.size(1):  # the CPU's operator has no grouped heads
            k, v = (t.repeat_interleave(q.size(1) // t.size(1), dim=1) for t in (k, v))
        return AttentionOnce.apply(q, k, v, backend, self)


class AttentionOnce(torch.autograd.Function):
    """Attention without dropout, computed once; saves q, k and v: its results are kept apart."""

    @staticmethod
    def forward(ctx, q, k, v, backend, attention):
        store = attention.store
        ctx.save_for_backward(q, k, v)
        ctx.backend, ctx.store = backend, store
        if attention.recording:
            out, lse, *small = attention_results(q, k, v, backend)
            ctx.result = [store.keep(out), store.keep(lse), *small]
            attention.results.append(ctx.result)
        else:
            ctx.result = attention.results.pop(0)
            out = store.get(ctx.result[0])
        return out.detach()  # another tensor than the kept one, which must not hold this graph

    @staticmethod
    def backward(ctx, dy):
        aten = torch.ops.aten
        q, k, v = ctx.saved_tensors
        out, lse, *small = ctx.result
        out, lse = ctx.store.get(out), ctx.store.get(lse)
        ctx.result.clear()  # autograd frees what a function saved, but not what ctx refers to
        if dy.stride() != out.stride():  # see fast/gradients.py
            dy = torch.empty_like(out).copy_(dy)
        inputs = dy, q, k, v, out, lse
        if not q.is_cuda:
            return (
                *aten._scaled_dot_product_flash_attention_for_cpu_backward(*inputs, 0.0, True),
                None,
                None,
            )
        *lengths, seed, offset = small
        if ctx.backend == "cudnn":
            backward = aten._scaled_dot_product_cudnn_attention_backward
            return *backward(*inputs, seed, offset, None, *lengths, 0.0, True), None, None
        backward = aten._scaled_dot_product_flash_attention_backward
        return *backward(*inputs, *lengths, 0.0, True, seed, offset), None, None


def attention_results(q, k, v, backend):
    """(output, logsumexp and whatever else the backward takes) of causal attention."""
    aten = torch.ops.aten
    if not q.is_cuda:
        return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)
    if backend == "cudnn":
        return aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, True)[:8]
    return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[:8]


class RecomputedMLP:
    """mlp.core that keeps its input and computes the rest again in the backward.

    tile: on so many tokens at a time; None: on all at once.
    """

    def __init__(self, core, tile):
        self.core, self.tile = core, tile

    def __call__(self, x, up, activation, down):
        def run(x):
            return self.core(x, up, activation, down)

        if self.tile is not None:
            parts = [part for part in (up, activation, down) if isinstance(part, torch.nn.Module)]
            return self.tiled(
                x, run, [p for part in parts for p in part.parameters() if p.requires_grad]
            )
        if not torch.is_grad_enabled():
            return run(x)
        if torch.compiler.is_compiling():
            return checkpoint(run, x, use_reentrant=False, **RECOMPUTE_ALL)
        # replays numpy's and Python's random numbers too; run/build.py refuses to compile those
        return checkpoint(run, x, use_reentrant=False, context_fn=generators.replay)

    @torch.compiler.disable
    def tiled(self, x, run, parameters):
        """In slices of equal lengths if possible, and multiples of 16 as fp8's GEMMs need them."""
        T = x.size(1)
        count = math.ceil(T / self.tile)
        size = math.ceil(T / count / 16) * 16
        tiles = [slice(first, min(T, first + size)) for first in range(0, T, size)]
        if torch.is_grad_enabled():
            x = RecomputeInTiles.apply(x, run, tiles, *parameters)
        return ForwardInTiles.apply(x, run, tiles)


class ForwardInTiles(torch.autograd.Function):
    """run(x) tile by tile; passes its result's gradient on as that of x, to RecomputeInTiles.

    They are two so that a checkpointed block saves x before the MLP: its recomputation stops there.
    """

    @staticmethod
    def forward(ctx, x, run, tiles):
        return torch.cat([run(x[:, t]) for t in tiles], 1)

    @staticmethod
    def backward(ctx, dout):
        return dout, None, None


class RecomputeInTiles(torch.autograd.Function):
    """Identity of x: (B, T, C); its backward runs an MLP again and differentiates it, in tiles."""

    @staticmethod
    def forward(ctx, x, run, tiles, *parameters):
        ctx.save_for_backward(x)
        ctx.run, ctx.tiles, ctx.parameters = run, tiles, parameters
        ctx.autocast = (
            torch.is_autocast_enabled(x.device.type),
            torch.get_autocast_dtype(x.device.type),
        )
        ctx.states = generators.states(x.device)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dout):
        (x,) = ctx.saved_tensors
        enabled, dtype = ctx.autocast
        dx = torch.empty_like(x)
        sums = [None] * len(ctx.parameters)
        # without autocast's cache: a tile would get the casts, and the freed graph, of the last one
        autocast = torch.autocast(x.device.type, dtype, enabled, cache_enabled=False)
        with autocast, generators.preserved(x.device), torch.enable_grad():
            generators.restore(ctx.states, x.device)  # as in the forward, until the end
            for t in ctx.tiles:
                xt = x[:, t].detach().requires_grad_()
                out = ctx.run(xt)
                dy = dout[:, t].to(out.dtype)
                dx[:, t], *grads = torch.autograd.grad(
                    out, [xt, *ctx.parameters], dy, allow_unused=True
                )
                del out
                # the sums are in float32, whatever the parameter's dtype
                for i, grad in enumerate(grads):
                    # None: an edit's layer may have a parameter that its forward does not use
                    if grad is not None:
                        sums[i] = grad.float() if sums[i] is None else sums[i].add_(grad)
        for i, parameter in enumerate(ctx.parameters):
            if sums[i] is not None:
                sums[i] = sums[i].to(parameter.dtype)
        return dx, None, None, *sums
