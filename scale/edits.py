"""Finds what an edited model.py would lose: first values.

The model is built on PyTorch's meta device, where tensors have no values. Allocating it gives each
parameter a new tensor, and `initialize` the first values.
"""

import sys

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from system.errors import UserError

aten = torch.ops.aten
# they make tensors without values
EMPTY = (aten.empty.memory_format, aten.empty_like.default, aten.empty_strided.default)


class Written(TorchDispatchMode):
    """Notes the tensors that are given values while it is active, but not by reset_parameters."""

    def __init__(self):
        super().__init__()
        self.tensors = []  # kept, so that no other takes their place in memory

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if is_running("reset_parameters"):
            return result
        if function._schema.is_mutable:
            self.tensors += filter(torch.is_tensor, tree_leaves((args[:1], kwargs)))
        elif function not in EMPTY and not any(r.alias_info for r in function._schema.returns):
            self.tensors += filter(torch.is_tensor, tree_leaves(result))
        return result


def is_running(name):
    """Whether a function of this name is running."""
    frame = sys._getframe(1)
    while frame and frame.f_code.co_name != name:
        frame = frame.f_back
    return frame is not None


def refuse_lost(model, written):
    """Raises UserError for a value, a hook or a tensor of a model on meta that would be lost."""
    places = {storage_of(tensor) for tensor in written.tensors}
    for prefix, module in model.named_modules():
        wrong = lost_attributes(module)
        # a reset_parameters of model.py's own is meant to replace what __init__ gave
        reset = getattr(type(module), "reset_parameters", None)
        is_pytorchs = getattr(reset, "__module__", "").startswith("torch.")
        for name, p in module.named_parameters(recurse=False):
            if not p.is_meta or is_pytorchs and storage_of(p) in places:
                why = "is given values in __init__, which are lost: give them in reset_parameters()"
                wrong.append(f"{name} {why} of a subclass, or by init_std (docs/experiment.md)")
            elif p._backward_hooks or p._post_accumulate_grad_hooks:
                why = "has a hook on its gradient, which is lost; change gradients in train.py"
                wrong.append(f"{name} {why}, in Training.normalize_and_clip")
            elif p.dtype == torch.float64:
                wrong.append(f"{name} is in float64; expected 32 or 16 bits")
        if wrong:
            where = f"{prefix}." if prefix else ""
            raise UserError(f"model.py: {where}{wrong[0]}")


def lost_attributes(module):
    """Problems, a line each: a module's attributes with tensors that `allocate` does not know."""
    own = {*module.parameters(recurse=False), *module.buffers(recurse=False)}
    wrong = []
    for name, value in vars(module).items():
        found = filter(torch.is_tensor, tree_leaves(value))
        if any(t.is_meta and t not in own for t in found):  # PyTorch's RNNs list their own
            why = "holds a tensor, which has no data in __init__; make it a buffer with"
            wrong.append(f"{name} {why} persistent=False, filled in reset_tables()")
    return wrong


def storage_of(tensor):
    return tensor.untyped_storage()._cdata
