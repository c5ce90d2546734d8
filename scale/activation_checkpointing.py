"""Activation checkpointing: blocks keep little and compute the rest again in the backward.

--remat=selective  keeps all but the inside of the MLP, which is most of the activations
                   (https://arxiv.org/abs/2205.05198); costs another GEMM
--remat=block      keeps the block's input (https://arxiv.org/abs/1604.06174); runs it twice
--remat=attention  keeps attention's output too: what grows with the context's square runs once
--remat_tile=16384 computes an MLP on so many tokens at a time, so that its wide tensors are small
--remat_offload    block, attention: what is kept waits in pinned host memory

The block's own forward runs twice, and draws the same numbers of torch's generators again. An edit
that draws others, such as numpy's, is refused by the proof (run/prove.py).
"""

import functools
import math

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from scale import generators, memory
from scale.activation_offload import ActivationStore, KeptTensor
from system.errors import UserError

aten = torch.ops.aten
# they return attention's output, its logsumexp and small values
ATTENTION = (
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
)


def apply(model, cfg):
    """Puts cfg.remat around each cfg.remat_every-th block from the first; results do not change."""
    store = ActivationStore(cfg.remat_offload)
    for i in memory.recomputed_blocks(cfg, len(model.blocks)):
        block = model.blocks[i]
        if cfg.remat == "selective" or cfg.remat_tile:
            mlp = getattr(block, "mlp", None)
            if not hasattr(mlp, "core"):
                what = "remat=selective and remat_tile go around mlp.core"
                raise UserError(f"{what}, and block {i} of model.py has none; try --remat=block")
            if not isinstance(mlp.core, RecomputedMLP):  # an edit's blocks may share it
                mlp.core = RecomputedMLP(mlp.core, cfg.remat_tile)
        keeps_attention = cfg.remat == "attention"
        if keeps_attention:
            block.attn.core = EagerAttention(block.attn.core)
        if cfg.remat != "selective":
            mix, _ = model.layers[i]
            model.layers[i] = mix, CheckpointedBlock(block, store, keeps_attention)


class CheckpointedBlock:
    """A block that keeps its inputs, perhaps the results of its attention, and runs again."""

    def __init__(self, block, store, keeps_attention):
        self.block, self.store, self.keeps_attention = block, store, keeps_attention

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
            if not self.keeps_attention:
                return self.block(*own, **named)
            with AttentionOnce(self.store, results):
                return self.block(*own, **named)

        # the empty tensor says on which device the random state is to be kept
        out = checkpoint(forward, inputs[0].new_empty(0), use_reentrant=False)
        for i, x in enumerate(inputs):
            if torch.is_tensor(x) and x.requires_grad:
                kept[i] = self.store.keep(x.detach())
        return out


class EagerAttention:
    """attn.core outside of compiled graphs, which could write into what it has returned."""

    def __init__(self, core):
        self.core = core

    @torch.compiler.disable
    def __call__(self, *inputs, **named):
        return self.core(*inputs, **named)


class AttentionOnce(TorchDispatchMode):
    """Around a block: its attention's results go into the list `results`, or are taken from it.

    They are taken where it holds some, in the recomputation.
    """

    def __init__(self, store, results):
        super().__init__()
        self.store, self.results, self.again = store, results, bool(results)

    @classmethod
    def ignore_compile_internals(cls):
        return True  # else nothing would be compiled within it

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function in ATTENTION and self.again:
            out, lse, *small = self.results.pop(0)
            return self.store.get(out), self.store.get(lse), *small
        found = function(*args, **(kwargs or {}))
        if function in ATTENTION:
            out, lse, *small = found
            # detached: what is returned will hold the graph
            kept = [self.store.keep(x.detach()) for x in (out, lse)]
            self.results.append(kept + small)
        return found


def always(*_, **__):
    return CheckpointPolicy.MUST_RECOMPUTE


RECOMPUTE_ALL = {}  # options of a checkpoint that may be compiled
if torch.__version__ < "2.12":  # which keeps what an autograd.Function saves (pull request 177396)
    RECOMPUTE_ALL["context_fn"] = functools.partial(create_selective_checkpoint_contexts, always)


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
        return checkpoint(run, x, use_reentrant=False, **RECOMPUTE_ALL)

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
