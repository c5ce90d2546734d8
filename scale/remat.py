"""Activation checkpointing: blocks keep little of their forward and compute it again in the backward.

--remat=selective  keeps everything but the inside of the MLP, whose wide tensors are most of a block's activations
                   (https://arxiv.org/abs/2205.05198); costs another GEMM
--remat=block      keeps the block's input alone; costs another forward of the block (https://arxiv.org/abs/1604.06174)
--remat=attention  keeps attention's output besides, so that what grows with the square of the context runs once
--remat_every=3    does so in every third block only
--remat_tile=16384 computes an MLP on so many tokens at a time, so that its wide tensors are small
--remat_offload    block, attention: what is kept waits in pinned host memory (offload.py)

All of it goes around the model: a wrapper of a block stands in `model.stack`, one of attention's core in `attn.core`,
one of the MLP in `mlp.core`. Parameters and their names stay. The block's own forward is what runs, twice, with the
random state replayed, so that any edit of it is right.
"""

import contextlib
import functools

import torch
import torch.nn as nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import kernels
from configurator import UserError
from scale.offload import Kept, Shelf
from settings import KEEPERS

# A checkpoint that torch 2.11 compiles keeps what an autograd.Function saves, unless a context says to recompute it;
# 2.12 does not (pytorch's pull request 177396).
TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
recompute_all = functools.partial(
    create_selective_checkpoint_contexts, lambda *_, **__: CheckpointPolicy.MUST_RECOMPUTE
)


def apply(model, cfg, device_type="cpu"):
    """Puts cfg.remat around every cfg.remat_every-th block, from the first; results do not change."""
    if cfg.remat == "attention" and device_type != "cpu":
        if device_type != "cuda" or cfg.attention not in KEEPERS or cfg.precision in ("fp32", "tf32"):
            words = f"it is {cfg.attention} in {cfg.precision} on {device_type}"
            raise UserError(
                f"remat=attention needs attention=cudnn or flash in 16 bits, {words}; try --remat=block"
            )
    shelf = Shelf(cfg.remat_offload)
    for i in range(0, len(model.blocks), cfg.remat_every):
        block, tape = model.blocks[i], Tape(shelf)
        if cfg.remat == "selective" or cfg.remat_tile:
            part = part_of(block, "mlp")
            part.core = RecomputedMLP(part.core, cfg.remat_tile)
        if cfg.remat == "attention":
            if part_of(block, "attn").core is not kernels.attention:
                raise UserError(
                    "remat=attention keeps kernels.attention's output, and model.py's attn.core is another"
                )
            block.attn.core = KeptAttention(block.attn.core, tape)
        if cfg.remat != "selective":
            model.stack[i] = Checkpointed(block, tape)


def part_of(block, name):
    part = getattr(block, name, None)
    if not hasattr(part, "core"):
        raise UserError(f"this remat wraps {name}.core, and model.py's block has none; try --remat=block")
    return part


# -- a block


class Checkpointed:
    """A block whose forward keeps its input, and attention's results if they are on the tape, and runs again later."""

    def __init__(self, block, tape):
        self.block, self.tape = block, tape

    def __call__(self, *inputs, **named):
        """named: an edit's, which are kept as they are, not on the shelf."""
        if not torch.is_grad_enabled():
            return self.block(*inputs, **named)
        self.tape.shelf.begin()
        run = Run(functools.partial(self.block, **named), self.tape, inputs)
        # the empty tensor says on which device the random state is to be kept
        out = checkpoint(run.forward, inputs[0].new_empty(0), use_reentrant=False, context_fn=run.contexts)
        run.shelve()
        return out


class Run:
    """One forward of a checkpointed block: holds its inputs on the shelf until the backward."""

    def __init__(self, block, tape, inputs):
        self.block, self.tape, self.inputs, self.shelved, self.results = block, tape, inputs, False, []

    def shelve(self):
        shelf, self.shelved = self.tape.shelf, True
        self.inputs = [shelf.put(x.detach()) if torch.is_tensor(x) else x for x in self.inputs]

    def taken(self, x):
        if not isinstance(x, Kept):
            return x
        x = self.tape.shelf.take(x).detach()
        return x.requires_grad_() if x.is_floating_point() else x

    def forward(self, _):
        return self.block(*(map(self.taken, self.inputs) if self.shelved else self.inputs))

    def contexts(self):
        """(around the forward, around the recomputation), as checkpoint's context_fn returns them."""
        return self.tape.use(self.results, True), self.tape.use(self.results, False)


class Tape:
    """Attention's results in the block that runs: recorded in its forward, played back in its recomputation."""

    def __init__(self, shelf):
        self.shelf, self.results, self.recording = shelf, None, False

    @contextlib.contextmanager
    def use(self, results, recording):
        self.results, self.recording, self.position = results, recording, 0
        try:
            yield
        finally:
            self.results = None

    def record(self, results):
        self.results.append(Attended(self.shelf, *results))
        return self.results[-1]

    def play(self):
        self.position += 1
        return self.results[self.position - 1]


class Attended:
    """Attention's output and logsumexp, on the shelf, and the small tensors and numbers that its backward takes."""

    def __init__(self, shelf, out, lse, *small):
        self.shelf, self.kept, self.small = shelf, [shelf.put(out), shelf.put(lse)], small

    def tensors(self):
        return [self.shelf.take(kept) for kept in self.kept]

    def release(self):
        """Frees the tensors: autograd frees what a function saved for its backward, but not what its ctx refers to."""
        self.kept.clear()


class KeptAttention:
    """attn.core that takes its result from the tape when its block is computed again."""

    def __init__(self, core, tape):
        self.core, self.tape = core, tape

    @torch.compiler.disable
    def __call__(self, q, k, v, backend, dropout=0.0):
        if self.tape.results is None:
            return self.core(q, k, v, backend, dropout)
        q, k = (
            q.to(v.dtype),
            k.to(v.dtype),
        )  # RMSNorm under autocast gives float32, which SDPA itself would cast
        if not q.is_cuda and q.size(1) != k.size(1):  # the CPU's operator has no grouped heads
            k, v = (t.repeat_interleave(q.size(1) // t.size(1), dim=1) for t in (k, v))
        return AttentionFromTape.apply(q, k, v, backend, self.tape)


class AttentionFromTape(torch.autograd.Function):
    """Attention without dropout; saves q, k and v alone, since its results wait on the tape."""

    @staticmethod
    def forward(ctx, q, k, v, backend, tape):
        ctx.save_for_backward(q, k, v)
        ctx.backend = backend
        if tape.recording:
            results = attention_results(q, k, v, backend)
            ctx.result, out = tape.record(results), results[0]
        else:
            ctx.result = tape.play()
            out = ctx.result.tensors()[0]
        return out.detach()  # another tensor than the kept one, which must not hold this graph

    @staticmethod
    def backward(ctx, dy):
        (q, k, v), aten = ctx.saved_tensors, torch.ops.aten
        (out, lse), small = ctx.result.tensors(), ctx.result.small
        ctx.result.release()
        if dy.stride() != out.stride():  # see fast.attention.SameLayout
            dy = torch.empty_like(out).copy_(dy)
        if not q.is_cuda:
            grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
                dy, q, k, v, out, lse, 0.0, True
            )
            return *grads, None, None
        *lengths, seed, offset = small
        if ctx.backend == "cudnn":
            state, last = (seed, offset, None), ()
            backward = aten._scaled_dot_product_cudnn_attention_backward
        else:
            state, last = (), (seed, offset)
            backward = aten._scaled_dot_product_flash_attention_backward
        return *backward(dy, q, k, v, out, lse, *state, *lengths, 0.0, True, *last), None, None


def attention_results(q, k, v, backend):
    """(output, logsumexp and whatever else the backward takes) of causal attention; on CUDA by cuDNN or flash."""
    aten = torch.ops.aten
    if not q.is_cuda:
        return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)
    if backend == "cudnn":
        return aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, True)[:8]
    return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[:8]


# -- an MLP


class RecomputedMLP:
    """mlp.core that keeps its input alone and computes the rest again in the backward; `tile`: tokens at a time."""

    def __init__(self, core, tile):
        self.core, self.tile = core, tile

    def __call__(self, x, up, activation, down):
        def run(x):
            return self.core(x, up, activation, down)

        if self.tile is not None:
            parts = [part for part in (up, activation, down) if isinstance(part, nn.Module)]
            return self.tiled(x, run, [p for part in parts for p in part.parameters() if p.requires_grad])
        if not torch.is_grad_enabled():
            return run(x)
        contexts = {"context_fn": recompute_all} if TORCH < (2, 12) and torch.compiler.is_compiling() else {}
        return checkpoint(run, x, use_reentrant=False, **contexts)

    @torch.compiler.disable
    def tiled(self, x, run, parameters):
        tiles = tiles_of(x.size(1), self.tile)
        if torch.is_grad_enabled():
            x = RecomputeInTiles.apply(x, run, tiles, *parameters)
            return ForwardInTiles.apply(x, run, tiles)
        return torch.cat([run(x[:, t]) for t in tiles], 1)


def tiles_of(T, tile):
    """Slices of T tokens, of equal lengths if T can be divided so, and multiples of 16 as fp8's GEMMs need them."""
    count = -(-T // tile)
    size = -(-T // count // 16) * 16
    return [slice(i, min(T, i + size)) for i in range(0, T, size)]


class ForwardInTiles(torch.autograd.Function):
    """run(x) tile by tile; its "gradient of x" is that of its result, from which RecomputeInTiles computes the rest.

    The two are apart so that a checkpointed block saves x before the MLP runs: its recomputation then stops there, and
    the MLP runs twice in all, not three times.
    """

    @staticmethod
    def forward(ctx, x, run, tiles):
        return torch.cat([run(x[:, t]) for t in tiles], 1)

    @staticmethod
    def backward(ctx, dout):
        return dout, None, None


class RecomputeInTiles(torch.autograd.Function):
    """Identity of x: (B, T, C); its backward runs an MLP again, tile by tile, and differentiates it."""

    @staticmethod
    def forward(ctx, x, run, tiles, *parameters):
        ctx.save_for_backward(x)
        ctx.run, ctx.tiles, ctx.parameters = run, tiles, parameters
        ctx.autocast = torch.is_autocast_enabled(x.device.type), torch.get_autocast_dtype(x.device.type)
        ctx.state = random_state(x.device)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dout):
        (x,), parameters = ctx.saved_tensors, ctx.parameters
        dx, sums = torch.empty_like(x), [None] * len(parameters)
        enabled, dtype = ctx.autocast
        # without autocast's cache, which would hand a tile the casts, and the freed graph, of the tile before
        autocast = torch.autocast(x.device.type, dtype, enabled, cache_enabled=False)
        with autocast, replayed(ctx.state, x.device), torch.enable_grad():
            for t in ctx.tiles:
                xt = x[:, t].detach().requires_grad_()
                out = ctx.run(xt)
                inputs, dy = [xt, *parameters], dout[:, t].to(out.dtype)
                dx[:, t], *grads = torch.autograd.grad(out, inputs, dy, allow_unused=True)
                del out
                for i, grad in enumerate(grads):  # summed in float32, whatever the parameter's dtype
                    if grad is None:  # an edit's layer may have a parameter that its forward does not use
                        continue
                    sums[i] = (
                        grad
                        if len(ctx.tiles) == 1
                        else grad.float()
                        if sums[i] is None
                        else sums[i].add_(grad)
                    )
        return (
            dx,
            None,
            None,
            *[s if s is None else s.to(p.dtype) for s, p in zip(sums, parameters, strict=True)],
        )


def random_state(device):
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


@contextlib.contextmanager
def replayed(state, device):
    """Random numbers as they were at `state`, and afterwards as they would have been without this."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.set_rng_state(state[0])
        if state[1] is not None:
            torch.cuda.set_rng_state(state[1], device)
        yield
