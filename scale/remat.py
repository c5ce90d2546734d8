"""Activation checkpointing: blocks keep little of their forward and compute it again in the backward.

--remat=selective  keeps all but the inside of the MLP, whose wide tensors are most of the activations
                   (https://arxiv.org/abs/2205.05198); costs another GEMM
--remat=block      keeps the block's input (https://arxiv.org/abs/1604.06174); costs another forward of it
--remat=attention  keeps attention's output besides: what grows with the square of the context runs once
--remat_tile=16384 computes an MLP on so many tokens at a time, so that its wide tensors are small
--remat_offload    block, attention: what is kept waits in pinned host memory

The block's own forward runs twice, with the states of torch's, numpy's and Python's random numbers replayed,
so that any edit of it is right.
"""

import collections
import contextlib
import functools
import weakref

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import kernels
from errors import UserError
from fast import forms
from scale import generators, memory

# Before torch 2.12 a compiled checkpoint keeps what an autograd.Function saves (pull request 177396).
always = lambda *_, **__: CheckpointPolicy.MUST_RECOMPUTE
contexts = dict(context_fn=functools.partial(create_selective_checkpoint_contexts, always))
RECOMPUTE_ALL = contexts if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 12) else {}


def apply(model, cfg, device_type="cpu"):
    """Puts cfg.remat around each cfg.remat_every-th block, from the first; results do not change."""
    if cfg.remat == "attention" and device_type != "cpu":
        in_16_bits = device_type == "cuda" and cfg.precision not in ("fp32", "tf32")
        if not in_16_bits or cfg.attention not in ("cudnn", "flash"):
            why = f"it is {cfg.attention} in {cfg.precision} on {device_type}; try --remat=block"
            raise UserError(f"remat=attention needs attention=cudnn or flash in 16 bits, {why}")
    shelf = Shelf(cfg.remat_offload)
    for i in memory.blocks_again(cfg, len(model.blocks)):
        block, tape = model.blocks[i], Tape(shelf)
        if cfg.remat == "selective" or cfg.remat_tile:
            mlp = part_of(block, "mlp")
            mlp.core = RecomputedMLP(mlp.core, cfg.remat_tile)
        if cfg.remat == "attention":
            if "attention" in forms.edits:
                why = f"keeps the results of PyTorch's attention, and {forms.edits['attention']}"
                raise UserError(f"remat=attention {why}; try --remat=block")
            attn = part_of(block, "attn", kernels.attention)
            attn.core = KeptAttention(attn.core, tape)
        if cfg.remat != "selective":
            model.stack[i] = Checkpointed(block, tape)


def part_of(block, name, core=None):
    """The block's part, which must have a `core`, that of `core` if it is given."""
    part = getattr(block, name, None)
    if not hasattr(part, "core") or core not in (None, part.core):
        what = "another" if hasattr(part, "core") else "none"
        raise UserError(f"this remat wraps {name}.core, and model.py's block has {what}; try --remat=block")
    return part


class Checkpointed:
    """A block that keeps its inputs, and attention's results if they are on the tape, and runs again."""

    def __init__(self, block, tape):
        self.block, self.tape = block, tape

    def __call__(self, *inputs, **named):
        """named: an edit's inputs, which are kept as they are, not on the shelf."""
        if not torch.is_grad_enabled():
            return self.block(*inputs, **named)
        shelf, kept, results = self.tape.shelf, list(inputs), []
        shelf.begin()
        forward = lambda _: self.block(*(taken(shelf, x) for x in kept), **named)
        replay = generators.Replay()

        def contexts():
            recorded, replayed = replay.contexts()
            return (
                both(self.tape.use(results, recording=True), recorded),
                both(self.tape.use(results, recording=False), replayed),
            )

        # the empty tensor says on which device the random state is to be kept
        out = checkpoint(forward, inputs[0].new_empty(0), use_reentrant=False, context_fn=contexts)
        kept[:] = (shelf.put(x.detach()) if torch.is_tensor(x) and x.requires_grad else x for x in inputs)
        return out


@contextlib.contextmanager
def both(outer, inner):
    with outer, inner:
        yield


def taken(shelf, x):
    """An input of the block as its recomputation takes it; one without a gradient, which is kept as it is."""
    return shelf.take(x).detach().requires_grad_() if isinstance(x, Kept) else x


class Tape:
    """Attention's results in the block that runs: recorded in its forward, played in its recomputation."""

    def __init__(self, shelf):
        self.shelf, self.results, self.recording = shelf, None, False

    @contextlib.contextmanager
    def use(self, results, recording):
        self.results, self.recording, self.position = results, recording, 0
        try:
            yield
        finally:
            self.results = None

    def next(self, compute):
        """The next result, computed or played: [output, logsumexp, both on the shelf, *what is small]."""
        if self.recording:
            out, lse, *small = compute()
            self.results.append([self.shelf.put(out), self.shelf.put(lse), *small])
        self.position += 1
        return self.results[self.position - 1]


class KeptAttention:
    """attn.core that takes its result from the tape when its block is computed again."""

    def __init__(self, core, tape):
        self.core, self.tape = core, tape

    @torch.compiler.disable
    def __call__(self, q, k, v, backend, dropout=0.0):
        if self.tape.results is None or dropout:  # an edit's; it is drawn again as the block runs again
            return self.core(q, k, v, backend, dropout)
        q, k = q.to(v.dtype), k.to(v.dtype)  # RMSNorm under autocast gives float32
        if not q.is_cuda and q.size(1) != k.size(1):  # the CPU's operator has no grouped heads
            k, v = (t.repeat_interleave(q.size(1) // t.size(1), dim=1) for t in (k, v))
        return AttentionFromTape.apply(q, k, v, backend, self.tape)


class AttentionFromTape(torch.autograd.Function):
    """Attention without dropout; saves q, k and v alone, since its results wait on the tape."""

    @staticmethod
    def forward(ctx, q, k, v, backend, tape):
        ctx.save_for_backward(q, k, v)
        ctx.backend, ctx.shelf = backend, tape.shelf
        ctx.result = tape.next(lambda: attention_results(q, k, v, backend))
        kept = ctx.result[0]
        # another tensor than the kept one, which must not hold this graph
        return (kept.tensor if tape.recording else tape.shelf.take(kept)).detach()

    @staticmethod
    def backward(ctx, dy):
        (q, k, v), aten = ctx.saved_tensors, torch.ops.aten
        out, lse, *small = (ctx.shelf.take(x) if isinstance(x, Kept) else x for x in ctx.result)
        ctx.result.clear()  # autograd frees what a function saved, but not what ctx refers to
        if dy.stride() != out.stride():  # see fast/gradients.py
            dy = torch.empty_like(out).copy_(dy)
        inputs = dy, q, k, v, out, lse
        if not q.is_cuda:
            return *aten._scaled_dot_product_flash_attention_for_cpu_backward(*inputs, 0.0, True), None, None
        *lengths, seed, offset = small
        if ctx.backend == "cudnn":
            state, backward = (seed, offset, None), aten._scaled_dot_product_cudnn_attention_backward
            return *backward(*inputs, *state, *lengths, 0.0, True), None, None
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
    """mlp.core that keeps its input and computes the rest again in the backward; `tile`: tokens at a time."""

    def __init__(self, core, tile):
        self.core, self.tile = core, tile

    def __call__(self, x, up, activation, down):
        run = lambda x: self.core(x, up, activation, down)
        if self.tile is not None:
            parts = [part for part in (up, activation, down) if isinstance(part, torch.nn.Module)]
            return self.tiled(x, run, [p for part in parts for p in part.parameters() if p.requires_grad])
        if not torch.is_grad_enabled():
            return run(x)
        # not when compiled: run/build.py refuses blocks that draw numpy's or Python's random numbers then
        contexts = dict(context_fn=generators.Replay().contexts)
        if torch.compiler.is_compiling():
            contexts = RECOMPUTE_ALL
        return checkpoint(run, x, use_reentrant=False, **contexts)

    @torch.compiler.disable
    def tiled(self, x, run, parameters):
        """In slices of equal lengths if possible, and multiples of 16 as fp8's GEMMs need them."""
        T = x.size(1)
        size = -(-T // -(-T // self.tile) // 16) * 16
        tiles = [slice(i, min(T, i + size)) for i in range(0, T, size)]
        x = RecomputeInTiles.apply(x, run, tiles, *parameters) if torch.is_grad_enabled() else x
        return ForwardInTiles.apply(x, run, tiles)


class ForwardInTiles(torch.autograd.Function):
    """run(x) tile by tile; its "gradient of x" is that of its result; RecomputeInTiles computes the rest.

    Apart, so that a checkpointed block saves x before the MLP runs: its recomputation stops there.
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
        ctx.states = generators.states(x.device)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dout):
        (x,), (enabled, dtype), parameters = ctx.saved_tensors, ctx.autocast, ctx.parameters
        dx, sums = torch.empty_like(x), [None] * len(parameters)
        # without autocast's cache, which would hand a tile the casts, and the freed graph, of the tile before
        autocast = torch.autocast(x.device.type, dtype, enabled, cache_enabled=False)
        with autocast, generators.kept(x.device), torch.enable_grad():
            generators.restore(ctx.states, x.device)  # as in the forward, until the end
            for t in ctx.tiles:
                xt = x[:, t].detach().requires_grad_()
                out = ctx.run(xt)
                dy = dout[:, t].to(out.dtype)
                dx[:, t], *grads = torch.autograd.grad(out, [xt, *parameters], dy, allow_unused=True)
                del out
                for i, grad in enumerate(grads):  # summed in float32, whatever the parameter's dtype
                    if grad is not None:  # an edit's layer may have a parameter that its forward does not use
                        sums[i] = grad.float() if sums[i] is None else sums[i].add_(grad)
        sums = [s if s is None else s.to(p.dtype) for s, p in zip(sums, parameters, strict=True)]
        return dx, None, None, *sums


class Group:
    """The tensors of one block, which wait together; `previous` is a weak reference to the group before."""

    def __init__(self, previous):
        self.members, self.previous, self.ready, self.on_device = weakref.WeakSet(), previous, None, True


class Kept:
    """One tensor of a group: `tensor` on the device, None while it is on the host alone."""

    def __init__(self, group, tensor):
        self.group, self.tensor, self.device, self.host = group, tensor, tensor.device, None


class Shelf:
    """Keeps tensors from the forward to the backward; with `offload` in pinned host memory.

    Copies have their own stream: a group goes out during the next block's forward and comes back during the
    backward of the block after it, so that the device holds two groups. Host buffers are used again.
    """

    def __init__(self, offload):
        self.offload, self.stream, self.group, self.last = offload, None, None, lambda: None
        self.buffers, self.leaving = collections.defaultdict(list), collections.deque()

    def begin(self):
        """Opens a block's group. References are weak: a forward without a backward leaves nothing."""
        self.group = Group(self.last)
        if self.offload:
            self.last = weakref.ref(self.group)
            self.leaving.append(self.group)
        while len(self.leaving) > 2:  # of the block before, the copy to the host may still be under way
            group = self.leaving.popleft()
            if group.ready is not None:  # frees the tensors for work that comes after the copies
                torch.cuda.current_stream().wait_event(group.ready)
            for kept in group.members:
                kept.tensor = None
            group.on_device = False

    def put(self, tensor):
        kept = Kept(self.group, tensor)
        if self.offload and tensor.numel():
            self.group.members.add(kept)
            if not (buffers := self.buffers[key(tensor)]):
                buffers.append(host_like(tensor))
            kept.host = buffers.pop()
            with self.copying(self.group, tensor.device):
                kept.host.copy_(tensor, non_blocking=True)
        return kept

    def take(self, kept):
        """The tensor; the copies of the group before are started."""
        for group in (kept.group, kept.group.previous()):
            if group is not None and not group.on_device:
                self.fetch(group, kept.device)
        if kept.group in self.leaving:  # the last ones of a forward never left
            self.leaving.remove(kept.group)
        elif kept.group.ready is not None:
            torch.cuda.current_stream().wait_event(kept.group.ready)
        return kept.tensor

    def fetch(self, group, device):
        for kept in group.members:  # memory of the usual stream
            kept.tensor = torch.empty_like(kept.host, device=device)
        with self.copying(group, device):
            for kept in group.members:
                kept.tensor.copy_(kept.host, non_blocking=True)
                self.buffers[key(kept.host)].append(kept.host)  # a later copy into it waits in this stream
        group.on_device = True

    @contextlib.contextmanager
    def copying(self, group, device):
        """On CUDA: in the copies' stream, which waits for what was computed; then the group is ready."""
        if device.type != "cuda":
            yield
            return
        self.stream = self.stream or torch.cuda.Stream(device)
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            yield
            group.ready = self.stream.record_event()


def host_like(tensor):
    """Host memory for a tensor's values, pinned if they are on a GPU.

    PyTorch's pinned memory is in blocks of a power of two, in which 3 GiB take 4: large ones are pinned here.
    """
    if not tensor.is_cuda:
        return torch.empty_like(tensor)
    if tensor.nbytes < memory.PINNED_EXACTLY:
        return torch.empty_like(tensor, device="cpu", pin_memory=True)
    host = torch.empty_like(tensor, device="cpu")
    runtime = torch.cuda.cudart()
    torch.cuda.check_error(runtime.cudaHostRegister(host.data_ptr(), host.nbytes, 0))
    unpinned = weakref.finalize(host, runtime.cudaHostUnregister, host.data_ptr())
    unpinned.atexit = False  # the process's end unpins it faster
    return host


def key(tensor):
    """Host memory has the tensor's strides, which PyTorch's cuDNN attention takes for granted."""
    return tensor.shape, tensor.stride(), tensor.dtype
