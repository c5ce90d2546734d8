"""Faster versions of the model's parts for CUDA in bf16, put in from outside by `swap`; model.py does not know.

Triton kernels and the products of cublas.py and hopper.py stand behind custom operators, so that torch.compile takes
them as they are.
tests/test_fused.py compares each with float64.
"""

import functools
from typing import NamedTuple

import torch
import torch.nn as nn
import triton
import triton.language as tl

import cublas
import hopper
import kernels
import model as models
from hopper import sm_count

LIBRARY = torch.library.Library("pretrain", "FRAGMENT")  # of this file's operations and fp8.py's
NORM_WIDTH = 1024  # columns of a row that a warp takes
NORM_BACK_WARPS, NORM_BACK_STAGES = 8, 3  # warps a multiprocessor; C = 768: 154 us, four programs of two warps: 313
PACK_PROGRAMS, PACK_WARPS, PACK_STAGES = 8, 1, 3
SWIGLU_BLOCK, SWIGLU_WARPS = 2048, 8
RELU2_ROWS, RELU2_COLS, RELU2_PROGRAMS, RELU2_STAGES, RELU2_WARPS = 8, 256, 8, 3, 4  # programs: a multiprocessor's
LOG2E = tl.constexpr(1.4426950408889634)
CE_BLOCK, CE_WARPS = 2048, 8  # 4.2 ms for 65,536 rows of 50,304 on an H200; 4,096 x 8: 4.8, 1,024 x 4: 5.2


def swap(model, sharded=False):
    """Replaces, in place, the parts of a GPT by the classes below; parameters and their names stay.

    sharded: a block's parameters are at hand in its own forward only, so that none is left to the next block's. Layers
    whose widths are not multiples of 8 (16 bytes in bf16) are left as they are; so are residual additions with dropout.
    """
    if torch.cuda.is_available() and hopper.available(torch.device("cuda", torch.cuda.current_device())):
        hopper.compiling()
    swap_modules(model)
    blocks = model.blocks
    if all(type(b.attn.proj) is type(b.mlp.proj) is Linear and b.dropout.p == 0 for b in blocks):
        for block in blocks:
            block.__class__ = Block
            block.attn.proj.__class__ = DeferredBias
            if not sharded:
                block.mlp.proj.__class__ = DeferredBias
        model.norm.__class__ = LayerNorm if isinstance(model.norm, nn.LayerNorm) else RMSNorm
    return model


def swap_modules(model):
    for module in model.modules():
        if any(size % 8 for p in module.parameters() for size in p.shape):
            continue
        if type(module) is nn.Linear:
            module.__class__ = Linear
        elif type(module) is models.MLP:
            module.__class__ = {models.gelu: GeluMLP, models.relu2: Relu2MLP}.get(module.activation, models.MLP)
        elif type(module) is models.SwiGLU:
            module.__class__ = SwiGLU
        elif type(module) is models.Head:
            module.__class__ = Head
        elif type(module) is models.Attention:
            module.__class__ = Attention
        elif type(module) is models.Rope:
            module.__class__ = Rope


class Linear(nn.Linear):
    """y = x W^T + b in bf16, weight gradient in the weight's own dtype; algorithms chosen by timing."""

    def forward(self, x):
        return linear(x.to(torch.bfloat16), self.matrix(), self.bias, torch.is_grad_enabled())

    def matrix(self):
        """The weight, as the layer's forward and its parents' take it."""
        return self.weight


class DeferredBias(Linear):
    """Its bias is added by the next norm's kernel, with the residual stream."""

    def forward(self, x):
        return linear(x.to(torch.bfloat16), self.matrix(), None, torch.is_grad_enabled())


class GeluMLP(models.MLP):
    """The GELU is computed in the first product's epilogue, its derivative in that of the second's backward; on Hopper
    the gradient of the first bias too."""

    def forward(self, x):
        return mlp(GeluMLPFunction, x, self.up, self.proj)


class Relu2MLP(models.MLP):
    """The gradients for the first bias are summed in the pass that computes them."""

    def forward(self, x):
        return mlp(Relu2MLPFunction, x, self.up, self.proj)


class SwiGLU(models.SwiGLU):
    """The backward computes silu(gate) * up again, with the gradients of both, in one pass."""

    def forward(self, x):
        return mlp(SwiGLUFunction, x, self.gate_up, self.proj)


class Attention(models.Attention):
    """The gradients of q, k and v are packed and summed for the bias in one pass; on Hopper they are multiplied where
    they are, if that is faster."""

    def project(self, x):
        q, k, v = self.split(x.to(torch.bfloat16))
        return *self.rope(self.q_norm(q), self.k_norm(k)), v

    def split(self, x):
        return QKV.apply(x, self.qkv.matrix(), self.qkv.bias, self.heads, self.head_dim, torch.is_grad_enabled())


class Rope(models.Rope):
    """Its backward turns back as the forward turns; what torch.compile derives from the forward took three times it."""

    def forward(self, q, k):
        cos, sin = self.tables(q.size(2))
        return Turn.apply(q, cos, sin), Turn.apply(k, cos, sin)


class Turn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(cos, sin)
        return kernels.apply_rope(x, cos, sin)

    @staticmethod
    def backward(ctx, dy):
        cos, sin = ctx.saved_tensors
        return kernels.apply_rope(dy, cos, -sin), None, None


class Pending(NamedTuple):
    """A residual stream whose last addition, x + branch + bias, is left to the next norm."""

    x: torch.Tensor
    branch: torch.Tensor
    bias: torch.Tensor | None


def settled(x):
    """The residual stream of a Pending, its addition done."""
    if not isinstance(x, Pending):
        return x
    total = x.x + x.branch
    return total if x.bias is None else total + x.bias.to(total.dtype)


class Block(models.Block):
    """Takes the residual stream or a Pending, and returns a Pending."""

    def forward(self, x):
        x, h = add_norm(x, self.norm_1)
        return self.feed(x, self.attn(h))

    def feed(self, x, branch):
        """The block from its first residual addition on."""
        x, h = add_norm(Pending(x, branch, self.attn.proj.bias), self.norm_2)
        return Pending(x, self.mlp(h), self.mlp.proj.bias if isinstance(self.mlp.proj, DeferredBias) else None)

    def before(self, x):
        """As remat.before."""
        return self.attn.project(add_norm(x, self.norm_1)[1])

    def after(self, x, y):
        """As remat.after."""
        return settled(self.feed(x, self.attn.combine(y)))


class LayerNorm(nn.LayerNorm):
    """The model's last norm, of the last block's Pending."""

    def forward(self, x):
        return add_norm(x, self)[1]


class RMSNorm(nn.RMSNorm):
    def forward(self, x):
        return add_norm(x, self)[1]


class Head(models.Head):
    """The loss in chunks of tokens, its gradients computed in the forward; the logits are never whole."""

    def forward(self, x, targets, reduction):
        if reduction == "none" and torch.is_grad_enabled():  # a weight for each token is known in the backward only
            return super().forward(x, targets, reduction)
        return linear_cross_entropy(x.to(torch.bfloat16), self.weight, targets, reduction, *self.options())


# -- products


def operator(name):
    """Makes a function of tensors one operation to torch.compile, pretrain::name, with no gradient of its own.

    As torch.library.custom_op, without the Python that it runs around each call: with it a slow host launched a
    micro-step of GPT-2 in fp8 in 85 ms, without in 63, and the GPU computes it in 86. To be called from an
    autograd.Function, which has the gradient.
    """

    def define(function):
        schema = torch.library.infer_schema(function, mutates_args=())
        LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        operation = getattr(torch.ops.pretrain, name).default
        operation.register_fake = functools.partial(torch.library.register_fake, f"pretrain::{name}", lib=LIBRARY)
        return operation

    return define


@operator("product")
def product(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype, tune: bool
) -> torch.Tensor:
    return cublas.matmul(a, b, a.new_empty(a.size(0), b.size(1), dtype=dtype), bias=bias, tune=tune)


@product.register_fake
def _(a, b, bias, dtype, tune):
    return a.new_empty(a.size(0), b.size(1), dtype=dtype)


@operator("product_gelu")
def product_gelu(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, tune: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """(GELU of the product, the product)"""
    if on_hopper(a):
        return hopper.gelu(a, b.t(), bias)
    out, before = (a.new_empty(a.size(0), b.size(1)) for _ in range(2))
    return cublas.matmul(a, b, out, bias=bias, gelu=before, tune=tune), before


@product_gelu.register_fake
def _(a, b, bias, tune):
    return a.new_empty(a.size(0), b.size(1)), a.new_empty(a.size(0), b.size(1))


@operator("product_dgelu")
def product_dgelu(a: torch.Tensor, b: torch.Tensor, before: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(the product times the GELU's derivative at `before`, its float32 column sums or, where it has none, nothing)"""
    if on_hopper(a):
        return hopper.dgelu(a, b, before)
    return cublas.matmul(a, b, torch.empty_like(before), dgelu=before), before.new_empty(0, dtype=torch.float32)


@product_dgelu.register_fake
def _(a, b, before):
    return torch.empty_like(before), before.new_empty(before.size(1) * on_hopper(a), dtype=torch.float32)


def on_hopper(x):
    """Whether hopper.py multiplies it."""
    return x.dtype == torch.bfloat16 and hopper.available(x.device)


class LinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, tune):
        return linear_forward(ctx, x, weight, bias, tune).unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        flat = dy.flatten(0, -2).contiguous()
        dx = product(flat, w, None, flat.dtype, True).unflatten(0, dy.shape[:-1])
        dw, db = weight_gradients(flat, x, *ctx.dtypes)
        return dx, dw, db, None


def linear_forward(ctx, x, weight, bias, tune):
    """(..., K) -> (M, N), with what the backward needs kept in ctx."""
    flat, w, b = operands(ctx, x, weight, bias)
    ctx.save_for_backward(flat, w)
    return product(flat, w.t(), b, x.dtype, tune)


def operands(ctx, x, *parameters):
    """(rows of x: (..., K), the parameters in its dtype); what dtypes their gradients are to be in is kept in ctx."""
    ctx.dtypes = dtypes_of(*parameters)
    return x.flatten(0, -2), *[None if p is None else p.to(x.dtype) for p in parameters]


def dtypes_of(*parameters):
    """What their gradients are to be in; None where there is no parameter."""
    return [None if p is None else p.dtype for p in parameters]


def as_gradients(sums, dtypes):
    return [None if dtype is None else s.to(dtype) for s, dtype in zip(sums, dtypes, strict=True)]


def weight_gradients(dy, x, weight_dtype, bias_dtype, sums=None):
    """Of y = x W^T + b, for all rows; sums: the columns' of dy, if they are at hand."""
    dw = product(dy.t(), x, None, weight_dtype, True)
    if bias_dtype is None:
        return dw, None
    return dw, (dy.sum(0, dtype=torch.float32) if sums is None else sums).to(bias_dtype)


def linear(x, weight, bias, tune=True):
    """x: (..., K) in 16 bits; weight: (N, K), bias: (N,) or None, of a dtype that their gradients get -> (..., N)."""
    return LinearFunction.apply(x, weight, bias, tune)


def mlp(function, x, up, proj):
    """The autograd.Function of an MLP, of x: (..., K) and what its two layers hold."""
    bias = None if isinstance(proj, DeferredBias) else proj.bias
    return function.apply(x.to(torch.bfloat16), up.matrix(), up.bias, proj.matrix(), bias, torch.is_grad_enabled())


def mlp_function(up, down):
    """The autograd.Function of w2 act(w1 x + b1) + b2.

    up(x, w1^T, b1, tune) -> (act(w1 x + b1), what `down` takes of it); down(dy, w2, *that) -> (gradient of what the
    activation takes, the activation, the gradient's column sums if they are at hand or None); of all rows.
    """

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w1, b1, w2, b2, tune):
            flat, w1, b1, w2, b2 = operands(ctx, x, w1, b1, w2, b2)
            act, kept = up(flat, w1.t(), b1, tune)
            ctx.save_for_backward(flat, w1, w2, *kept)
            return product(act, w2.t(), b2, x.dtype, tune).unflatten(0, x.shape[:-1])

        @staticmethod
        def backward(ctx, dy):
            x, w1, w2, *kept = ctx.saved_tensors
            flat = dy.flatten(0, -2).contiguous()
            dbefore, act, sums = down(flat, w2, *kept)
            dw2, db2 = weight_gradients(flat, act, *ctx.dtypes[2:])
            dw1, db1 = weight_gradients(dbefore, x, *ctx.dtypes[:2], sums)
            dx = product(dbefore, w1, None, dy.dtype, True).unflatten(0, dy.shape[:-1])
            return dx, dw1, db1, dw2, db2, None

    return Function


def gelu_up(x, w, bias, tune):
    act, before = product_gelu(x, w, bias, tune)
    return act, (act, before)


def gelu_down(dy, w, act, before):
    dbefore, sums = product_dgelu(dy, w, before)
    return dbefore, act, sums if len(sums) else None


def relu2_up(x, w, bias, tune):
    before = product(x, w, bias, x.dtype, tune)
    act = models.relu2(before).to(x.dtype)  # autocast squares in float32
    return act, (act, before)


def relu2_down(dy, w, act, before):
    dbefore, sums = relu2_backward(product(dy, w, None, dy.dtype, True), before)
    return dbefore, act, sums


def swiglu_up(x, w, bias, tune):
    gate_up = product(x, w, bias, x.dtype, tune)
    return swiglu(gate_up), (gate_up,)


def swiglu_down(dy, w, gate_up):
    return *swiglu_backward(product(dy, w, None, dy.dtype, True), gate_up), None


GeluMLPFunction = mlp_function(gelu_up, gelu_down)
Relu2MLPFunction = mlp_function(relu2_up, relu2_down)
SwiGLUFunction = mlp_function(swiglu_up, swiglu_down)


@operator("relu2_backward")
def relu2_backward(dact: torch.Tensor, before: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(gradient of `before`, its float32 column sums) of that of relu(before)^2; contiguous (N, H)."""
    N, H = dact.shape
    dbefore, strips = torch.empty_like(dact), triton.cdiv(H, RELU2_COLS)
    programs = min(triton.cdiv(N, RELU2_ROWS), triton.cdiv(RELU2_PROGRAMS * sm_count(dact.device), strips))
    parts = torch.empty(programs, H, dtype=torch.float32, device=dact.device)
    _relu2_backward[(programs, strips)](
        dact, before, dbefore, parts, N, H=H, ROWS=RELU2_ROWS, COLS=RELU2_COLS, PROGRAMS=programs,
        STEPS=triton.cdiv(N, programs * RELU2_ROWS), STAGES=RELU2_STAGES, num_warps=RELU2_WARPS,
    )  # fmt: skip
    return dbefore, parts.sum(0)


@relu2_backward.register_fake
def _(dact, before):
    return torch.empty_like(dact), dact.new_empty(dact.size(1), dtype=torch.float32)


@triton.jit
def _relu2_backward(
    dact, before, dbefore, parts, N,
    H: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, PROGRAMS: tl.constexpr, STEPS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    rows, cols = tl.arange(0, ROWS), tl.program_id(1) * COLS + tl.arange(0, COLS)
    sums = tl.zeros((ROWS, COLS), tl.float32)
    for step in tl.range(STEPS, num_stages=STAGES):
        first = tl.cast((program + step * PROGRAMS) * ROWS, tl.int64)
        inside = (first + rows < N)[:, None] & (cols < H)[None, :]
        at = first * H + (rows[:, None] * H + cols[None, :])
        grad = tl.load(dact + at, mask=inside, other=0.0).to(tl.float32)
        grad *= 2 * tl.maximum(tl.load(before + at, mask=inside, other=0.0).to(tl.float32), 0.0)
        tl.store(dbefore + at, grad.to(dbefore.dtype.element_ty), mask=inside)
        sums += grad
    tl.store(parts + program * H + cols, tl.sum(sums, 0), mask=cols < H)


@operator("swiglu")
def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of the halves of contiguous (N, 2 H) -> (N, H)"""
    N, H = gate_up.size(0), gate_up.size(1) // 2
    act = gate_up.new_empty(N, H)
    _swiglu[(N, triton.cdiv(H, SWIGLU_BLOCK))](gate_up, act, H=H, BLOCK=SWIGLU_BLOCK, num_warps=SWIGLU_WARPS)
    return act


@swiglu.register_fake
def _(gate_up):
    return gate_up.new_empty(gate_up.size(0), gate_up.size(1) // 2)


@operator("swiglu_backward")
def swiglu_backward(dact: torch.Tensor, gate_up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(gradient of gate_up, silu(gate) * up) of the gradient of the latter."""
    N, H = dact.shape
    dgate_up, act = torch.empty_like(gate_up), torch.empty_like(dact)
    grid = N, triton.cdiv(H, SWIGLU_BLOCK)
    _swiglu_backward[grid](dact, gate_up, dgate_up, act, H=H, BLOCK=SWIGLU_BLOCK, num_warps=SWIGLU_WARPS)
    return dgate_up, act


@swiglu_backward.register_fake
def _(dact, gate_up):
    return torch.empty_like(gate_up), torch.empty_like(dact)


@triton.jit
def _swiglu(gate_up, act, H: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_up + row * 2 * H + cols, mask=cols < H, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * H + H + cols, mask=cols < H, other=0.0).to(tl.float32)
    tl.store(act + row * H + cols, (gate * tl.sigmoid(gate) * up).to(act.dtype.element_ty), mask=cols < H)


@triton.jit
def _swiglu_backward(dact, gate_up, dgate_up, act, H: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    d = tl.load(dact + row * H + cols, mask=cols < H, other=0.0).to(tl.float32)
    gate = tl.load(gate_up + row * 2 * H + cols, mask=cols < H, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * H + H + cols, mask=cols < H, other=0.0).to(tl.float32)
    s = tl.sigmoid(gate)
    silu = gate * s
    out = dgate_up + row * 2 * H + cols
    tl.store(act + row * H + cols, (silu * up).to(act.dtype.element_ty), mask=cols < H)
    tl.store(out, (d * up * (s + silu * (1 - s))).to(act.dtype.element_ty), mask=cols < H)
    tl.store(out + H, (d * silu).to(act.dtype.element_ty), mask=cols < H)


class QKV(torch.autograd.Function):
    """The linear layer before attention, (B, T, C) -> q, k, v: (B, H, T, D)."""

    @staticmethod
    def forward(ctx, x, weight, bias, heads, head_dim, tune):
        return split_heads(linear_forward(ctx, x, weight, bias, tune), x.shape[:-1], heads, head_dim)

    @staticmethod
    def backward(ctx, dq, dk, dv):
        x, w = ctx.saved_tensors
        dx, dw, db = qkv_gradients(*join_heads(dq, dk, dv), x, w, ctx.dtypes[0])
        return dx.unflatten(0, (dq.size(0), dq.size(2))), *as_gradients((dw, db), ctx.dtypes), None, None, None


@operator("qkv_gradients")
def qkv_gradients(
    dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor, x: torch.Tensor, w: torch.Tensor, weight_dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(gradient of x, of w, the float32 column sums) of y = x w^T, whose gradient is dq, dk and dv side by side."""
    parts = dq, dk, dv
    if not (on_hopper(x) and all(part.size(1) % hopper.PART == 0 for part in parts)):
        return packed_gradients(parts, x, w, weight_dtype)
    ways = packed_gradients, parts_gradients
    key = x.device, *x.shape, *w.shape, weight_dtype
    if key not in QKV_WAYS:
        tried = [functools.partial(way, parts, x, w, weight_dtype) for way in ways]
        QKV_WAYS[key] = ways[cublas.fastest(tried, x.device)]
    return QKV_WAYS[key](parts, x, w, weight_dtype)


@qkv_gradients.register_fake
def _(dq, dk, dv, x, w, weight_dtype):
    return torch.empty_like(x), torch.empty_like(w, dtype=weight_dtype), w.new_empty(w.size(0), dtype=torch.float32)


QKV_WAYS = {}  # the faster one for a shape


def parts_gradients(parts, x, w, weight_dtype):
    dx, dw, sums = hopper.linear_backward(parts, x, w)
    return dx, dw.to(weight_dtype), sums


def packed_gradients(parts, x, w, weight_dtype):
    dy, sums = pack(*parts)
    dx = cublas.matmul(dy, w, torch.empty_like(x))
    return dx, cublas.matmul(dy.t(), x, torch.empty_like(w, dtype=weight_dtype)), sums


def split_heads(y, shape, heads, head_dim):
    """(B * T, C) of shape (B, T) -> q, k, v: (B, H, T, D)."""
    return y.view(*shape, sum(heads), head_dim).transpose(1, 2).split(heads, dim=1)


def join_heads(*parts):
    """The reverse for gradients, (B, H, T, D) each -> [(B * T, H * D), ...], contiguous, not yet side by side."""
    return [d.transpose(1, 2).flatten(0, 1).flatten(1).contiguous() for d in parts]


@operator("pack")
def pack(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(torch.cat((a, b, c), 1), its column sums in float32) of contiguous (N, A), (N, B) and (N, C)."""
    N, widths = a.size(0), [a.size(1), b.size(1), c.size(1)]
    out = a.new_empty(N, sum(widths))
    programs = min(N, PACK_PROGRAMS * sm_count(a.device))
    parts = torch.empty(programs, sum(widths), dtype=torch.float32, device=a.device)
    _pack[(programs, 3)](
        a, b, c, out, parts, N, A=widths[0], B=widths[1], C=widths[2], BLOCK=triton.next_power_of_2(max(widths)),
        PROGRAMS=programs, STEPS=triton.cdiv(N, programs), STAGES=PACK_STAGES, num_warps=PACK_WARPS,
    )  # fmt: skip
    return out, parts.sum(0)


@pack.register_fake
def _(a, b, c):
    width = a.size(1) + b.size(1) + c.size(1)
    return a.new_empty(a.size(0), width), a.new_empty(width, dtype=torch.float32)


@triton.jit
def _pack(
    a, b, c, out, parts, N,
    A: tl.constexpr, B: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr, PROGRAMS: tl.constexpr, STEPS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    program, which = tl.program_id(0), tl.program_id(1)
    source, width, start = a, A, 0
    if which == 1:
        source, width, start = b, B, A
    if which == 2:
        source, width, start = c, C, A + B
    cols = tl.arange(0, BLOCK)
    sums = tl.zeros((BLOCK,), tl.float32)
    for step in tl.range(STEPS, num_stages=STAGES):
        row = tl.cast(program + step * PROGRAMS, tl.int64)
        inside = (cols < width) & (row < N)
        x = tl.load(source + row * width + cols, mask=inside, other=0.0)
        tl.store(out + (row * (A + B + C) + start) + cols, x, mask=inside)
        sums += x.to(tl.float32)
    tl.store(parts + program * (A + B + C) + start + cols, sums, mask=cols < width)


# -- residual addition and norm


def add_norm(x, norm):
    """(sum, its LayerNorm or RMSNorm in bf16) of x: a Pending, whose addition is done first, or the sum itself."""
    options = (norm.weight, getattr(norm, "bias", None), norm.eps, isinstance(norm, nn.LayerNorm))
    return AddNorm.apply(*x, *options) if isinstance(x, Pending) else (x, Norm.apply(x, *options))


class AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, branch, bias, weight, shift, eps, centred):
        total, h, stats = norm_forward(x, branch, bias, weight, shift, eps, centred)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(total, stats, weight)
        ctx.centred, ctx.dtypes = centred, dtypes_of(weight, shift, bias)
        return total, h

    @staticmethod
    def backward(ctx, dtotal, dh):
        dx, sums = norm_backward(dtotal, dh, *ctx.saved_tensors, ctx.centred)
        dweight, dshift, dbias = as_gradients(sums.unbind(), ctx.dtypes)
        return dx, dx.to(dh.dtype), dbias, dweight, dshift, None, None


class Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, shift, eps, centred):
        _, h, stats = norm_forward(x, None, None, weight, shift, eps, centred)
        ctx.save_for_backward(x, stats, weight)
        ctx.centred, ctx.dtypes = centred, dtypes_of(weight, shift)
        return h

    @staticmethod
    def backward(ctx, dh):
        dx, sums = norm_backward(None, dh, *ctx.saved_tensors, ctx.centred)
        dweight, dshift = as_gradients(sums[:2].unbind(), ctx.dtypes)
        return dx, dweight, dshift, None, None


@operator("norm_forward")
def norm_forward(
    x: torch.Tensor,
    branch: torch.Tensor | None,
    bias: torch.Tensor | None,
    weight: torch.Tensor,
    shift: torch.Tensor | None,
    eps: float,
    centred: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(x + branch + bias, its norm in bf16, (mean, 1 / deviation) of each row); the sum is empty without a branch."""
    total, h, stats = norm_results(x, branch)
    C, N = x.size(-1), x.numel() // x.size(-1)
    block = triton.next_power_of_2(C)
    rows = max(1, 4096 // block)
    _norm_forward[(triton.cdiv(N, rows),)](
        x.contiguous(), None if branch is None else branch.contiguous(), bias, weight, shift, total, h, stats, N, eps,
        C=C, CENTRED=centred, BLOCK=block, ROWS=rows, num_warps=max(2, block // NORM_WIDTH),
    )  # fmt: skip
    return total, h, stats


@norm_forward.register_fake
def norm_results(x, branch=None, *_):
    total = x.new_empty(0) if branch is None else torch.empty_like(x, memory_format=torch.contiguous_format)
    stats = torch.empty(2, x.numel() // x.size(-1), dtype=torch.float32, device=x.device)
    return total, torch.empty(x.shape, dtype=torch.bfloat16, device=x.device), stats


@operator("norm_backward")
def norm_backward(
    dtotal: torch.Tensor | None,
    dh: torch.Tensor,
    total: torch.Tensor,
    stats: torch.Tensor,
    weight: torch.Tensor,
    centred: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(gradient of the sum, float32 (3, C): those of weight and shift, and the column sums of the first).

    Each program keeps its rows' part of the column sums in registers: nothing is read twice.
    """
    C, N = total.size(-1), total.numel() // total.size(-1)
    block = triton.next_power_of_2(C)
    warps = max(1, block // NORM_WIDTH)
    programs = min(N, max(1, NORM_BACK_WARPS // warps) * sm_count(total.device))
    dx, parts = torch.empty_like(total), torch.empty(programs, 3, C, dtype=torch.float32, device=total.device)
    _norm_backward[(programs,)](
        None if dtotal is None else dtotal.contiguous(), dh.contiguous(), total, stats, weight, dx, parts, N,
        C=C, CENTRED=centred, BLOCK=block, PROGRAMS=programs, STEPS=triton.cdiv(N, programs),
        STAGES=NORM_BACK_STAGES, num_warps=warps,
    )  # fmt: skip
    return dx, parts.sum(0)


@norm_backward.register_fake
def _(dtotal, dh, total, stats, weight, centred):
    return torch.empty_like(total), torch.empty(3, total.size(-1), dtype=torch.float32, device=total.device)


@triton.jit
def _norm_forward(
    x, branch, bias, weight, shift, total, h, stats, N, eps,
    C: tl.constexpr, CENTRED: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * ROWS
    start = tl.cast(first, tl.int64) * C  # 64 bits once, not for each element
    cols = tl.arange(0, BLOCK)
    rows = first + tl.arange(0, ROWS)
    inside = (rows < N)[:, None] & (cols < C)[None, :]
    at = tl.arange(0, ROWS)[:, None] * C + cols[None, :]
    x, total, h = x + start, total + start, h + start
    if branch is not None:
        branch += start
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if branch is not None:
        value += tl.load(branch + at, mask=inside, other=0.0).to(tl.float32)
        if bias is not None:
            value += tl.load(bias + cols, mask=cols < C, other=0.0).to(tl.float32)[None, :]
        rounded = value.to(total.dtype.element_ty)
        tl.store(total + at, rounded, mask=inside)
        value = rounded.to(tl.float32)  # what the backward reads
    mean = tl.zeros((ROWS,), tl.float32)
    if CENTRED:
        mean = tl.sum(value, 1) / C
        value = tl.where(inside, value - mean[:, None], 0.0)
    rstd = 1 / tl.sqrt(tl.sum(value * value, 1) / C + eps)
    tl.store(stats + rows, mean, mask=rows < N)
    tl.store(stats + N + rows, rstd, mask=rows < N)
    out = value * rstd[:, None] * tl.load(weight + cols, mask=cols < C).to(tl.float32)[None, :]
    if shift is not None:
        out += tl.load(shift + cols, mask=cols < C).to(tl.float32)[None, :]
    tl.store(h + at, out.to(h.dtype.element_ty), mask=inside)


@triton.jit
def _norm_backward(
    dtotal, dh, total, stats, weight, dx, parts, N,
    C: tl.constexpr, CENTRED: tl.constexpr, BLOCK: tl.constexpr, PROGRAMS: tl.constexpr, STEPS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    w = tl.load(weight + cols, mask=cols < C, other=0.0).to(tl.float32)
    dweight = tl.zeros((BLOCK,), tl.float32)
    dshift = tl.zeros((BLOCK,), tl.float32)
    column = tl.zeros((BLOCK,), tl.float32)
    for step in tl.range(STEPS, num_stages=STAGES):
        row = program + step * PROGRAMS
        inside = (cols < C) & (row < N)
        start = tl.cast(row, tl.int64) * C
        given = tl.load(dh + start + cols, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(total + start + cols, mask=inside, other=0.0).to(tl.float32)
        rstd = tl.load(stats + N + row, mask=row < N, other=0.0)
        if CENTRED:
            value = tl.where(inside, value - tl.load(stats + row, mask=row < N, other=0.0), 0.0)
        value *= rstd
        dweight += given * value
        dshift += given
        given *= w
        grad = given - value * (tl.sum(given * value) / C)
        if CENTRED:
            grad -= tl.sum(given) / C
        grad *= rstd
        if dtotal is not None:
            grad += tl.load(dtotal + start + cols, mask=inside, other=0.0).to(tl.float32)
        column += grad
        tl.store(dx + start + cols, grad.to(dx.dtype.element_ty), mask=inside)
    parts += program * 3 * C + cols
    tl.store(parts, dweight, mask=cols < C)
    tl.store(parts + C, dshift, mask=cols < C)
    tl.store(parts + 2 * C, column, mask=cols < C)


# -- linear and cross-entropy


def linear_cross_entropy(x, weight, targets, reduction, vocab_size, softcap=None, smoothing=0.0, z_loss=0.0):
    """As kernels.linear_cross_entropy, for x in 16 bits. "none" has no gradient."""
    options = (vocab_size, softcap, smoothing, z_loss)
    if reduction == "none":
        flat, w = x.flatten(0, -2).contiguous(), weight.to(x.dtype)
        losses = cross_entropy_chunks(flat, w, targets.flatten(), *options, None)[0]
        return losses.view_as(targets)
    loss = LinearCrossEntropy.apply(x, weight, targets, options, torch.is_grad_enabled())
    return reduced(loss, targets, reduction)


def reduced(loss, targets, reduction):
    """The sum of the tokens' losses, or for "mean" over the targets that are not ignored."""
    return loss / (targets >= 0).sum() if reduction == "mean" else loss


class LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, targets, options, grad):
        flat, w = x.flatten(0, -2).contiguous(), weight.to(x.dtype)
        dtype = sum_dtype(weight) if grad else None
        losses, *gradients = cross_entropy_chunks(flat, w, targets.flatten(), *options, dtype)
        keep_gradients(ctx, x, weight, *gradients)
        return losses.sum()

    @staticmethod
    def backward(ctx, grad):
        return *kept_gradients(ctx, grad), None, None, None


def sum_dtype(weight):
    """What the weight's gradient is summed in: its own dtype but for float16, whose range is too small."""
    return torch.float32 if weight.dtype == torch.float16 else weight.dtype


def keep_gradients(ctx, x, weight, dx, dw, factors=None):
    """For the backward of a loss whose forward has computed the gradients of its sum; factors: as of
    cross_entropy_chunks."""
    ctx.save_for_backward(dx, dw, factors)
    ctx.shape, ctx.weight_dtype = x.shape, weight.dtype


def kept_gradients(ctx, grad):
    dx, dw, factors = ctx.saved_tensors
    by_row = grad if factors is None else grad * factors[:, None]
    return dx.mul_(by_row).view(ctx.shape), dw.mul_(grad).to(ctx.weight_dtype)


@operator("cross_entropy_chunks")
def cross_entropy_chunks(
    x: torch.Tensor,
    w: torch.Tensor,
    targets: torch.Tensor,
    vocab_size: int,
    softcap: float | None,
    smoothing: float,
    z_loss: float,
    dw_dtype: torch.dtype | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(loss of each token in float32; the gradients of their sum by x, whose rows are yet to be multiplied with the
    factors, and by w; the factors, (N,)); without a dtype for the gradient of w no gradients.

    x: (N, C), w: (P, C), both contiguous, in 16 bits; targets: (N,).
    """
    N, P = x.size(0), w.size(0)
    rows, grad = min(N, chunk_rows(P)), dw_dtype is not None
    losses, dx, dw = empty_results(x, w, dw_dtype)
    in_product = on_hopper(x) and softcap is None and not smoothing and not z_loss
    shifts, factors = target_logits(x, w, targets) if in_product else None, torch.ones_like(losses)
    logits = x.new_empty(rows if grad or not in_product else 0, P)
    for i in range(0, N, rows):
        own = slice(i, i + rows)
        xi, ti = x[own], targets[own]
        li = logits[: xi.size(0)]
        if in_product:
            xi = exponential_rows(xi, w, ti, shifts[own], losses[own], factors[own], li, vocab_size, grad)
        else:
            cublas.matmul(xi, w.t(), li, tune=grad)
            cross_entropy_rows(li, ti, losses[own], li, 1.0, vocab_size, softcap, smoothing, z_loss, grad)
        if grad:
            cublas.matmul(li, w, dx[own])
            cublas.matmul(li.t(), xi, dw, accumulate=i > 0)
    return losses, dx, dw, factors


@cross_entropy_chunks.register_fake
def _(x, w, targets, vocab_size, softcap, smoothing, z_loss, dw_dtype):
    losses, dx, dw = empty_results(x, w, dw_dtype)
    return losses, dx, dw, torch.empty_like(losses)


def chunk_rows(P):
    """Rows of P logits in kernels.LOGITS_BYTES, a power of two."""
    return 2 ** max(4, (kernels.LOGITS_BYTES // (2 * P)).bit_length() - 1)


def cross_entropy_rows(logits, targets, losses, grads, scale, vocab_size, softcap, smoothing, z_loss, grad):
    """Fills `losses`, (rows,), and with grad also `grads`, (rows, P), which may be `logits`: their gradient * scale."""
    _cross_entropy[(logits.size(0),)](
        logits, targets, losses, grads, softcap or 0.0, smoothing, z_loss, scale,
        P=logits.size(1), V=vocab_size, CAP=softcap is not None, SMOOTH=smoothing > 0, GRAD=grad,
        DITHER=grads.dtype == torch.float8_e5m2,
        BLOCK=CE_BLOCK, num_warps=CE_WARPS,
    )  # fmt: skip


def empty_results(x, w, dw_dtype):
    losses = torch.empty(x.size(0), dtype=torch.float32, device=x.device)
    if dw_dtype is None:
        return losses, x.new_empty(0), x.new_empty(0)
    return losses, torch.empty_like(x), torch.empty_like(w, dtype=dw_dtype)


@triton.jit
def _cross_entropy(
    logits, targets, losses, grads, softcap, smoothing, z_loss, scale,
    P: tl.constexpr, V: tl.constexpr, CAP: tl.constexpr, SMOOTH: tl.constexpr, GRAD: tl.constexpr, DITHER: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One row a program: its loss, and with GRAD the gradient of its logits, scaled. Rows are P long, V of it real.

    exp is taken against the largest of the last block's logits and the target's, so that the pass needs no running
    maximum; in the rare row where that overflows it is taken again against the true one. The second pass goes
    backwards: it begins with what the cache still holds. Blocks but the last are full, so that they need no mask.
    """
    row = tl.program_id(0).to(tl.int64)
    logits += row * P
    grads += row * P
    target = tl.load(targets + row)
    cols = tl.arange(0, BLOCK)
    FULL: tl.constexpr = V // BLOCK * BLOCK
    if target < 0:
        tl.store(losses + row, 0.0)
        if GRAD:
            for start in range(0, P, BLOCK):
                tl.store(grads + start + cols, tl.zeros((BLOCK,), grads.dtype.element_ty), mask=start + cols < P)
        return
    picked = _capped(tl.load(logits + target), softcap, CAP)
    tail = tl.load(logits + FULL + cols, mask=FULL + cols < V, other=-float("inf"))
    tail = tl.where(FULL + cols < V, _capped(tail, softcap, CAP), -float("inf"))
    top = tl.maximum(picked, tl.max(tail))
    norms = tl.exp2((tail - top) * LOG2E)
    totals = tl.where(FULL + cols < V, tail, 0.0)
    for start in range(0, FULL, BLOCK):
        x = _capped(tl.load(logits + start + cols), softcap, CAP)
        norms += tl.exp2(x * LOG2E - top * LOG2E)
        if SMOOTH:
            totals += x
    norm = tl.sum(norms)
    if norm == float("inf"):
        highest = tail
        for start in range(0, FULL, BLOCK):
            highest = tl.maximum(highest, _capped(tl.load(logits + start + cols), softcap, CAP))
        top = tl.max(highest)
        norms = tl.exp2((tail - top) * LOG2E)
        for start in range(0, FULL, BLOCK):
            norms += tl.exp2((_capped(tl.load(logits + start + cols), softcap, CAP) - top) * LOG2E)
        norm = tl.sum(norms)
    lse = top + tl.log(norm)
    smooth = tl.sum(totals) / V if SMOOTH else 0.0
    tl.store(losses + row, lse - (1 - smoothing) * picked - smoothing * smooth + z_loss * lse * lse)
    if GRAD:
        gain = (1 + 2 * z_loss * lse) * scale  # d (lse + z lse^2) = (1 + 2 z lse) softmax
        uniform = smoothing / V * scale
        shift = lse * LOG2E
        grad = _ce_grad(tail, shift, gain, uniform, softcap, CAP, SMOOTH)
        if DITHER:
            grad = _dithered(grad, FULL + cols, lse)
        grad = tl.where(FULL + cols < V, grad, 0.0)
        tl.store(grads + FULL + cols, grad.to(grads.dtype.element_ty), mask=FULL + cols < P)
        for back in range(BLOCK, FULL + 1, BLOCK):
            at = FULL - back + cols
            x = _capped(tl.load(logits + at), softcap, CAP)
            grad = _ce_grad(x, shift, gain, uniform, softcap, CAP, SMOOTH)
            if DITHER:
                grad = _dithered(grad, at, lse)
            tl.store(grads + at, grad.to(grads.dtype.element_ty))
        for start in range(FULL + BLOCK, P, BLOCK):  # padding that reaches beyond the tail's block
            tl.store(grads + start + cols, tl.zeros((BLOCK,), grads.dtype.element_ty), mask=start + cols < P)
        tl.debug_barrier()  # the target's own gradient goes over what the loop stored there
        at_target = _ce_grad(picked, shift, gain, uniform, 1.0, False, SMOOTH) - (1 - smoothing) * scale
        if CAP:
            at_target *= 1 - (picked / softcap) * (picked / softcap)
        if DITHER:
            at_target = _dithered(at_target, target, lse)
        tl.store(grads + target, at_target.to(grads.dtype.element_ty))


def target_logits(x, w, targets):
    """(N,) float32: each row's logit of its target by log2(e), infinite where that is ignored."""
    shifts = torch.empty(x.size(0), dtype=torch.float32, device=x.device)
    C = x.size(1)
    _target_logits[(x.size(0),)](x, w, targets, shifts, C=C, BLOCK=min(2048, triton.next_power_of_2(C)))
    return shifts


def exponential_rows(x, w, targets, shifts, losses, factors, grads, vocab_size, grad):
    """The loss of rows as log sum exp(logit - the target's), the exponentials taken in the logits' product: they are
    not read once more. Fills `losses`, (rows,), and with grad `factors`, (rows,), and `grads`, (rows, P): times its
    factor a row is the gradient of its logits. -> x with its rows times their factors, for the weight's gradient.
    """
    sums = hopper.exponentials(x, w, shifts, vocab_size, grads if grad else None)
    scaled = torch.empty_like(x) if grad else x
    (rows, C), (P, parts) = x.shape, (w.size(0), sums.size(1))
    _exponential_rows[(rows,)](
        grads, sums, x, w, targets, shifts, losses, factors, scaled, parts,
        P=P, V=vocab_size, C=C, GRAD=grad, PARTS=triton.next_power_of_2(parts),
        BLOCK=min(2048, triton.next_power_of_2(C)),
    )  # fmt: skip
    return scaled


@triton.jit
def _target_logits(x, w, targets, shifts, C: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row)
    products = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, C, BLOCK):
        at = start + tl.arange(0, BLOCK)
        a = tl.load(x + row * C + at, mask=at < C, other=0.0).to(tl.float32)
        b = tl.load(w + tl.maximum(target, 0) * C + at, mask=at < C, other=0.0).to(tl.float32)
        products += a * b
    shift = tl.sum(products) * LOG2E
    tl.store(shifts + row, tl.where(target < 0, float("inf"), shift))


@triton.jit
def _exponential_rows(
    grads, sums, x, w, targets, shifts, losses, factors, scaled, parts,
    P: tl.constexpr, V: tl.constexpr, C: tl.constexpr, GRAD: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row a program, of exponentials against its target's logit, whose partial sums are at hand. Those of a row to
    be ignored are zeros, and so will its gradients be.

    In the rare row that has a logit so far above the target's that they, or what they are divided by, may leave bf16's
    range, all is computed again against the largest: slowly.
    """
    LARGEST: tl.constexpr = 2.0**100
    row = tl.program_id(0).to(tl.int64)
    grads += row * P
    x += row * C
    scaled += row * C
    target = tl.load(targets + row)
    part = tl.arange(0, PARTS)
    total = tl.sum(tl.load(sums + row * parts + part, mask=part < parts, other=0.0))
    total = tl.where(total < 1, 1.0, total)  # the target's is 1, but for rounding
    at_target = 1 - total
    loss = tl.log(total)
    if total > LARGEST:
        ROWS: tl.constexpr = 16
        shift = tl.load(shifts + row)
        top = shift
        total = tl.full((), 0.0, tl.float32)
        for start in range(0, P, ROWS):
            logits = _logits(x, w, start + tl.arange(0, ROWS), V, C) * LOG2E
            higher = tl.maximum(top, tl.max(logits))
            total = total * tl.exp2(top - higher) + tl.sum(tl.exp2(logits - higher))
            top = higher
        if GRAD:
            for start in range(0, P, ROWS):
                cols = start + tl.arange(0, ROWS)
                powers = tl.exp2(_logits(x, w, cols, V, C) * LOG2E - top)
                tl.store(grads + cols, powers.to(grads.dtype.element_ty), mask=cols < P)
            tl.debug_barrier()
        at_target = -total  # beside which the target's is nothing
        loss = tl.log(total) + (top - shift) / LOG2E
    tl.store(losses + row, tl.where(target < 0, 0.0, loss))
    if GRAD:
        tl.store(grads + target, at_target.to(grads.dtype.element_ty), mask=target >= 0)
        tl.store(factors + row, 1 / total)
        for start in range(0, C, BLOCK):
            at = start + tl.arange(0, BLOCK)
            a = tl.load(x + at, mask=at < C, other=0.0).to(tl.float32)
            tl.store(scaled + at, (a / total).to(scaled.dtype.element_ty), mask=at < C)


@triton.jit
def _logits(x, w, cols, V: tl.constexpr, C: tl.constexpr):
    """Those of a row in some columns, -inf from V on."""
    BLOCK: tl.constexpr = 64
    logits = tl.zeros(cols.shape, tl.float32)
    for start in range(0, C, BLOCK):
        at = start + tl.arange(0, BLOCK)
        a = tl.load(x + at, mask=at < C, other=0.0).to(tl.float32)
        inside = (cols < V)[:, None] & (at < C)[None, :]
        b = tl.load(w + cols.to(tl.int64)[:, None] * C + at[None, :], mask=inside, other=0.0).to(tl.float32)
        logits += tl.sum(a[None, :] * b, 1)
    return tl.where(cols < V, logits, -float("inf"))


@triton.jit
def _ce_grad(x, shift, gain, uniform, softcap, CAP: tl.constexpr, SMOOTH: tl.constexpr):
    grad = tl.exp2(x * LOG2E - shift) * gain
    if SMOOTH:
        grad -= uniform
    if CAP:
        grad *= 1 - (x / softcap) * (x / softcap)
    return grad


@triton.jit
def _dithered(x, at, seed):
    """x rounded up or down to two bits behind the point, e5m2's, at random in proportion: right in the mean.

    A token's probability is much the same at most positions, so that the error of the nearest value would add up. A
    row begins at a place of its own, from which a golden step leads from column to column: one multiplication each.
    """
    start = seed.to(tl.float32).to(tl.uint32, bitcast=True) * 0x9E3779B1
    start = (start ^ (start >> 15)) * 0x85EBCA77
    start = (start ^ (start >> 13)) * 0xC2B2AE3D
    bits = x.to(tl.uint32, bitcast=True) + ((at.to(tl.uint32) * 0x9E3779B1 + start) >> 11)
    return (bits & 0xFFE00000).to(tl.float32, bitcast=True)


@triton.jit
def _capped(x, softcap, CAP: tl.constexpr):
    x = x.to(tl.float32)
    if CAP:
        x = softcap * _tanh(x / softcap)
    return x


@triton.jit
def _tanh(x):
    return 2 * tl.sigmoid(2 * x) - 1
