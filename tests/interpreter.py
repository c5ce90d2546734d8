"""Makes Triton's interpreter, which runs kernels without a GPU, about three times as fast.

A quarter of its time goes into looking for overflow of integers, for which a test's arrays are too
small, and as much into patching triton.language again whenever one jitted function calls another.
"""

import dataclasses
import importlib.util
import os


def hasten():
    """conftest.py calls it once TRITON_INTERPRET is set.

    A Triton without 3.7's internals stays as it is.
    """
    if os.environ.get("TRITON_INTERPRET") != "1" or importlib.util.find_spec("triton") is None:
        return
    from triton.language import core
    from triton.runtime import interpreter

    if (
        not {"interpreter_builder", "InterpretedFunction", "_patch_lang"}
        <= vars(interpreter).keys()
    ):
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
