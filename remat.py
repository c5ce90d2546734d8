"""Rematerialisation: blocks that keep little of their forward and compute it again in the backward.

--remat=block      keeps what goes into a block alone; costs another forward of it (https://arxiv.org/abs/1604.06174)
--remat=attention  keeps attention's output besides: all that grows with the square of the context is computed once
--remat=selective  keeps also the outputs of the matmuls that are narrow for what they cost; the wide ones, the norms
                   and the activations are computed again (https://arxiv.org/abs/2205.05198)
--remat_every=3    does so in every third block only
--remat_tile=16384 block, attention: runs a block's MLP on so many tokens at a time, so that its wide tensors are small
--remat_offload    block, attention: what is kept waits in pinned host memory, copied while the GPU computes
"""

import collections
import contextlib
import functools
import weakref

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import kernels
from configurator import UserError

ATTENTION = ("scaled_dot_product", "flash_attention", "varlen_attn")
# place of the left operand
PRODUCTS = {"aten::mm": 0, "aten::addmm": 1, "pretrain::product": 0, "pretrain::product8": 0}
KEEPERS = ("cudnn", "flash")  # SDPA backends whose output remat=attention can keep on a GPU
WIDE = 2  # a product more than this many times as wide as its operand is not kept: MLP's first, mostly


def apply(model, cfg, device_type="cpu"):
    """Puts cfg.remat in place in every cfg.remat_every-th block, from the first; numbers do not change."""
    if cfg.remat == "attention" and device_type != "cpu":
        if device_type != "cuda" or cfg.attention not in KEEPERS or cfg.precision in ("fp32", "tf32"):
            words = f"it is {cfg.attention} in {cfg.precision} on {device_type}"
            raise UserError(f"remat=attention needs attention=cudnn or flash in 16 bits, {words}; try --remat=block")
    shelf = Shelf(cfg.remat_offload)
    for block in model.blocks[:: cfg.remat_every]:
        if cfg.remat == "selective":
            block.__class__ = selective(type(block), block.dropout.p > 0)
            continue
        if cfg.remat == "attention":
            block.attn.__class__, block.attn.tape = keeping(type(block.attn)), None
        block.__class__ = rematerialised(type(block))
        block.shelf, block.tile, block.random = shelf, cfg.remat_tile, block.dropout.p > 0


def problems(cfg):
    """What cannot be combined, a line each."""
    found = []
    if cfg.remat not in ("block", "attention") and (cfg.remat_tile or cfg.remat_offload):
        found.append(f"remat_tile and remat_offload are for remat=block and remat=attention, remat is {cfg.remat}")
    if cfg.remat == "attention" and cfg.dropout:
        found.append(f"remat=attention cannot have dropout={cfg.dropout}; try --remat=block")
    if cfg.remat == "attention" and not cfg.problems() and cfg.head_dim % 8:
        found.append(f"remat=attention needs n_embd / n_head = {cfg.head_dim} to be a multiple of 8; try --remat=block")
    if cfg.remat_tile is not None and cfg.remat_tile < 1:
        found.append(f"remat_tile={cfg.remat_tile} must be at least 1, or None for all tokens at once")
    return found


# -- selective: PyTorch's own


@functools.cache
def selective(block_class, random):
    """The class of such a block; one class for all, so that they share a compiled graph."""
    options = dict(use_reentrant=False, preserve_rng_state=random)
    options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, keep)

    class Selective(block_class):
        again = block_class.forward

        def forward(self, x):
            return checkpoint(self.again, x, **options)

    return Selective


def keep(context, op, *args, **kwargs):
    """Whether the output of an operation is kept."""
    name = op.name().split(".")[0]
    if any(part in name for part in ATTENTION):
        return CheckpointPolicy.MUST_SAVE
    if name in PRODUCTS:
        left, right = args[PRODUCTS[name] : PRODUCTS[name] + 2]
        return CheckpointPolicy.MUST_SAVE if right.size(1) <= WIDE * left.size(1) else CheckpointPolicy.PREFER_RECOMPUTE
    return CheckpointPolicy.PREFER_RECOMPUTE


# -- block and attention: a block in three parts, before(x) -> q, k, v; attention; after(x, y), which tiles can run


def before(block, x):
    return block.attn.project(block.norm_1(x))


def after(block, x, y):
    x = x + block.dropout(block.attn.combine(y))
    return x + block.dropout(block.mlp(block.norm_2(x)))


@functools.cache
def rematerialised(block_class):
    """The class of such a block. Its parts are compiled, not the whole, whose bookkeeping is no matter for graphs."""

    class Rematerialised(block_class):
        before = getattr(block_class, "before", before)
        after = getattr(block_class, "after", after)

        def forward(self, x):
            x = x if isinstance(x, torch.Tensor) else settled(x)
            if torch.is_grad_enabled():
                return Recompute.apply(self, x, *self.parameters())
            return self.tiled(x, self.attended(x))

        def attended(self, x):
            """y: (B, H, T, D), a tensor proper: one that a collective has not brought yet is not for graphs."""
            y = self.attn.attend(*self.before(x))
            return y if type(y) is torch.Tensor else y.clone()

        def tiled(self, x, y):
            return torch.cat([self.after(x[:, t], y[:, :, t]) for t in self.tiles(x)], 1)

        def tiles(self, x):
            """Slices of the tokens of x: (B, T, C), of equal lengths if T can be divided so, and multiples of 16."""
            T = x.size(1)
            count = -(-T // (self.tile or T))
            size = -(-T // count // 16) * 16  # as fp8's products want them
            return [slice(i, min(T, i + size)) for i in range(0, T, size)]

        def compile(self, **options):
            self.before = torch.compile(self.before, **options)
            self.after = torch.compile(self.after, **options)

    return Rematerialised


def settled(pending):
    import fused  # which needs Triton; without it there is nothing pending

    return fused.settled(pending)


@functools.cache
def keeping(attention_class):
    """The class of an attention that can note its result on a tape, and take it from there instead of computing."""

    class Keeping(attention_class):
        def attend(self, q, k, v):
            if self.tape is None:
                return super().attend(q, k, v)
            q, k = q.to(v.dtype), k.to(v.dtype)  # autocast's RMSNorm gives float32; SDPA itself would cast
            if not q.is_cuda and q.size(1) != k.size(1):  # the CPU's operator has no grouped heads
                k, v = (t.repeat_interleave(q.size(1) // t.size(1), dim=1) for t in (k, v))
            if not self.tape:
                self.tape += kernels.attention_kept(q, k, v, self.backend)
                return self.tape[0]
            return kernels.KeptAttention.apply(q, k, v, self.backend, *self.tape)

    return Keeping


@contextlib.contextmanager
def on_tape(attention, tape):
    """Within it `attention` uses the tape, where it has one: writes on an empty one, reads a full one."""
    if hasattr(attention, "tape"):
        attention.tape = tape
    try:
        yield
    finally:
        if hasattr(attention, "tape"):
            attention.tape = None


class Recompute(torch.autograd.Function):
    """Rematerialised's forward; parameters are given so that their gradients are this function's to return."""

    @staticmethod
    def forward(ctx, block, x, *parameters):
        ctx.block, ctx.parameters = block, parameters
        ctx.autocast = torch.is_autocast_enabled(x.device.type), torch.get_autocast_dtype(x.device.type)
        ctx.state = random_state(x.device) if block.random else None
        tape = []
        with on_tape(block.attn, tape):
            y = block.attended(x)
        out = block.tiled(x, y)
        ctx.small = tape[2:]  # numbers and states, beside attention's output and logsumexp
        ctx.kept = block.shelf.put([x, *tape[:2]])
        return out

    @staticmethod
    def backward(ctx, dout):
        block, device = ctx.block, dout.device
        x, *tape = block.shelf.take(ctx.kept)
        enabled, dtype = ctx.autocast
        # no cache: it would hand a tile the casts, and with them the freed graph, of the one before
        with (
            torch.autocast(device.type, dtype, enabled, cache_enabled=False),
            replayed(ctx.state, device),
            torch.enable_grad(),
        ):
            x = x.detach().requires_grad_()
            with on_tape(block.attn, [*tape, *ctx.small] if tape else None):
                y = block.attended(x)
            dx, dy, grads = after_backward(block, x.detach(), y.detach(), dout, ctx.parameters)
            more = torch.autograd.grad(y, [x, *ctx.parameters], dy, allow_unused=True)
        grads = [a if b is None else b if a is None else a + b for a, b in zip(grads, more[1:], strict=True)]
        return None, dx.add_(more[0]), *grads


def after_backward(block, x, y, dout, parameters):
    """Gradients of `after` by x, y and the parameters it uses, tile by tile; None for the other parameters."""
    dx, sums = torch.empty_like(x), [None] * len(parameters)
    # laid out (B, T, H, D) as a block that keeps all would get it: PyTorch finds a plan of cuDNN's attention backward
    # by the layouts of q, k and v alone, and runs one made for another layout of dy as well, with wrong numbers
    dy = torch.empty_like(y.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)
    tiles = block.tiles(x)
    for t in tiles:
        xt, yt = x[:, t].detach().requires_grad_(), y[:, :, t].detach().requires_grad_()
        out = block.after(xt, yt)
        dx[:, t], dy[:, :, t], *grads = torch.autograd.grad(
            out, [xt, yt, *parameters], dout[:, t].to(out.dtype), allow_unused=True
        )
        del out
        for i, grad in enumerate(grads):
            if grad is not None and len(tiles) > 1:  # summed in float32, whatever the parameter's type
                sums[i] = grad.float() if sums[i] is None else sums[i].add_(grad)
            elif grad is not None:
                sums[i] = grad
    return dx, dy, [None if s is None else s.to(p.dtype) for s, p in zip(sums, parameters, strict=True)]


def random_state(device):
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


@contextlib.contextmanager
def replayed(state, device):
    """Random numbers as they were at `state`, and afterwards as they would have been without this; None: left alone."""
    if state is None:
        yield
        return
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.set_rng_state(state[0])
        if state[1] is not None:
            torch.cuda.set_rng_state(state[1], device)
        yield


class Kept:
    """What a block keeps, on the device or the host; previous: the block's before it, next in the backward."""

    def __init__(self, tensors, previous):
        self.tensors, self.device, self.previous = tensors, tensors[0].device, previous
        self.host, self.ready = None, None


class Shelf:
    """Keeps tensors from the forward to the backward; with `offload` in pinned host memory.

    Copies have a stream of their own. One block's go out while the next is computed, and the next block's come in while
    one's gradients are computed, so that the device holds two blocks' at a time. The host's buffers are used again.
    """

    def __init__(self, offload):
        self.offload, self.stream, self.last = offload, None, lambda: None
        self.buffers, self.leaving = collections.defaultdict(list), collections.deque()

    def put(self, tensors):
        kept = Kept(tensors, self.last)
        if not self.offload:
            return kept
        self.last = weakref.ref(kept)  # weak: of a forward that has no backward nothing stays
        kept.host = [self.buffer(t) for t in tensors]
        with self.copying(tensors[0].device) as stream:
            for host, tensor in zip(kept.host, tensors, strict=True):
                host.copy_(tensor, non_blocking=True)
            kept.ready = stream.record_event() if stream else None
        self.leaving.append(kept)
        while len(self.leaving) > 1:
            self.let_go(self.leaving.popleft())
        return kept

    def take(self, kept):
        """The tensors; the copy of the block before is started."""
        for other in (kept, kept.previous()):
            if other is not None and other.tensors is None:
                self.fetch(other)
        if kept in self.leaving:  # the last ones of a forward, still here
            self.leaving.remove(kept)
        elif kept.ready is not None:
            torch.cuda.current_stream().wait_event(kept.ready)
        tensors, kept.tensors = kept.tensors, None
        for host in kept.host or ():
            self.buffers[host.shape, host.stride(), host.dtype].append(host)
        return tensors

    def fetch(self, kept):
        kept.tensors = [torch.empty_like(host, device=kept.device) for host in kept.host]
        with self.copying(kept.device) as stream:
            for host, tensor in zip(kept.host, kept.tensors, strict=True):
                tensor.copy_(host, non_blocking=True)
            kept.ready = stream.record_event() if stream else None

    def let_go(self, kept):
        """Frees the device's copy: for work that comes after the copy to the host."""
        if kept.ready is not None:
            torch.cuda.current_stream().wait_event(kept.ready)
        kept.tensors = None

    def buffer(self, tensor):
        """On the host, laid out as the tensor: PyTorch's cuDNN attention takes its result's layout for a given one."""
        free = self.buffers[tensor.shape, tensor.stride(), tensor.dtype]
        return free.pop() if free else torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)

    @contextlib.contextmanager
    def copying(self, device):
        """The stream of the copies, which waits for what was computed; None on the CPU."""
        if device.type != "cuda":
            yield None
            return
        self.stream = self.stream or torch.cuda.Stream(device)
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            yield self.stream
