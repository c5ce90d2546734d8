"""Kernels as PyTorch operators, which torch.compile takes as they are, and helpers of kernels."""

import torch
import triton
import triton.language as tl

from fast import hopper

LOG2E = tl.constexpr(1.4426950408889634)
LIBRARY = torch.library.Library("pretrain", "FRAGMENT")
# whether Triton's interpreter, which knows no PTX, runs the kernels
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


def operator(name, fake, mutates=()):
    """Decorator: makes a function of tensors the operator pretrain::<name>, without a gradient.

    fake: makes empty results from the same arguments, for torch.compile. mutates: names of the
    arguments that it writes to. torch.library.custom_op's Python around each call took 22 ms more
    in a micro-step of GPT-2.
    """

    def define(function):
        schema = torch.library.infer_schema(function, mutates_args=mutates)
        LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"pretrain::{name}", fake, lib=LIBRARY)
        return getattr(torch.ops.pretrain, name).default

    return define


def cdiv(size, tile):
    """size / tile, rounded up.

    triton.cdiv takes 5 us, 1,300 times in a micro-step of GPT-2 124M in fp8.
    """
    return -(-size // tile)


def power_of_2(number):
    """The least power of two that is at least `number`.

    triton.next_power_of_2 is as slow as triton.cdiv.
    """
    return 1 << (number - 1).bit_length()


def on_hopper(x):
    """Whether the CUDA kernels of hopper.py can multiply this tensor."""
    return x.dtype == torch.bfloat16 and hopper.available(x.device)


def dtypes_of(*parameters):
    """The dtypes that the parameters' gradients must have; None where there is no parameter."""
    return [None if p is None else p.dtype for p in parameters]


def in_dtype(x, dtype):
    """A parameter or its gradient in another dtype; None where one of the two is None."""
    if x is not None and dtype is not None:
        return x.to(dtype)


@triton.jit
def load_float32(at, inside):
    """The numbers at these addresses, in float32; 0 where not inside."""
    return tl.load(at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def exp2(x):
    """2^x in float32 in one instruction, zero below 2^-126.

    tl.exp2 takes four more for such numbers.
    """
    if INTERPRETED:
        return tl.exp2(x)
    return tl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1
    )


@triton.jit
def reciprocal(x):
    """1 / x in float32 in one instruction, wrong by a bit at most, zero for x above 2^126.

    A division takes five more.
    """
    if INTERPRETED:
        return 1 / x
    return tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1
    )
