"""Makes Triton's interpreter, which runs kernels without a GPU, about four times as fast.

A quarter of its time goes into looking for overflow of integers, for which a test's arrays are too
small, and as much into patching triton.language again whenever one jitted function calls another.
Of the rest a third goes into what is the same for every tensor of a shape or dtype, and into a
general conversion of floats.
"""

import dataclasses
import importlib.util
import math
import os

import numpy as np


def hasten():
    """conftest.py calls it once TRITON_INTERPRET is set.

    A Triton without 3.7's internals stays as it is.
    """
    if os.environ.get("TRITON_INTERPRET") != "1" or importlib.util.find_spec("triton") is None:
        return
    from triton.language import core
    from triton.runtime import interpreter

    used = {"interpreter_builder", "InterpretedFunction", "_patch_lang"}
    if not used | {"_get_np_dtype", "_convert_float"} <= vars(interpreter).keys():
        return
    builder, ready = interpreter.interpreter_builder, {}
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)

    def call(function, *args, **kwargs):
        """One jitted function called by another.

        Those of Triton's own library use triton.language.core.
        """
        if function.fn not in ready:
            if any(value is core for value in function.fn.__globals__.values()):
                interpreter._patch_lang(function.fn)
            ready[function.fn] = function.rewrite()
        return ready[function.fn](*args, **kwargs)

    interpreter.InterpretedFunction.__call__ = call
    remember(core, interpreter)
    interpreter._convert_float = with_halves(core, interpreter._convert_float)


def remember(core, interpreter):
    """Makes a shape's tuple, and a dtype's type in numpy, once, not for each tensor."""
    shapes, dtypes, dtype_of = {}, {}, interpreter._get_np_dtype

    def init(tensor, handle, type):
        shape = tuple(type.shape) if type.is_block() else ()
        if shape not in shapes:
            sizes = core.tuple([core.constexpr(size) for size in shape])
            shapes[shape] = core.constexpr(math.prod(shape)), sizes
        tensor.handle, tensor.type, tensor.dtype = handle, type, type.scalar
        tensor.numel, tensor.shape = shapes[shape]

    def numpy_dtype(dtype):
        name = dtype.scalar.name
        if name not in dtypes:
            dtypes[name] = dtype_of(dtype)
        return dtypes[name]

    core.tensor.__init__, interpreter._get_np_dtype = init, numpy_dtype


def with_halves(core, convert_float):
    """_convert_float, to which a bfloat16 is a float32's upper half, cut off and not rounded."""

    def convert(data, source, target, rounding):
        if rounding is None and (source, target) == (core.bfloat16, core.float32):
            bits = data.astype(np.uint32) << np.uint32(16)
        elif rounding is None and (source, target) == (core.float32, core.bfloat16):
            bits = (data.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
        else:
            return convert_float(data, source, target, rounding)
        return bits.reshape(data.shape)

    return convert
