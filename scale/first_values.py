"""First values of parameters: what a model's `__init__` gives holds, `initialize` gives the rest.

Where FSDP2 shards, parameters are on PyTorch's meta device until then, and values that `__init__`
gave them are lost: such a parameter is named, as is one that nothing gives a value.
"""

import contextlib
import sys

import torch
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from system.errors import UserError

aten = torch.ops.aten
EMPTY = (aten.empty.memory_format, aten.empty_like.default, aten.new_empty.default)


class Unset(TorchDispatchMode):
    """Within it `memory` is what torch.empty made and nothing but `reset_parameters` wrote to."""

    def __init__(self):
        super().__init__()
        self.memory = {}  # {a storage's number: it, so that no other gets its number}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function in EMPTY:
            self.memory[number_of(result)] = result.untyped_storage()
        elif function._schema.is_mutable and not is_running("reset_parameters"):
            for tensor in filter(torch.is_tensor, tree_leaves((args[:1], kwargs))):
                self.memory.pop(number_of(tensor), None)
        return result


def number_of(tensor):
    return tensor.untyped_storage()._cdata


def is_running(name):
    """Whether a function of this name is running."""
    frame = sys._getframe(1)
    while frame and frame.f_code.co_name != name:
        frame = frame.f_back
    return frame is not None


def made(make, place):
    """The model that make() returns; place(parameter) is called as soon as a module has one.

    model.given: names of the parameters to which `__init__` gave values after their layer was made,
    or instead of the layer's own.
    """
    unset = Unset()
    placed = set()

    def register(module, name, parameter):
        if parameter is None:
            return
        # a reset_parameters of model.py's own is meant to replace what the parameter was made of
        reset = getattr(type(module), "reset_parameters", None)
        own = reset is not None and not reset.__module__.startswith("torch.")
        is_unset = unset.memory.pop(number_of(parameter), None) or own
        if reset is None and number_of(parameter) in placed:  # weight_norm keeps its layer's values
            is_unset = False
        place(parameter)
        placed.add(number_of(parameter))
        if is_unset:
            unset.memory[number_of(parameter)] = parameter.untyped_storage()

    handle = register_module_parameter_registration_hook(register)
    try:
        with unset:
            model = make()
    finally:
        handle.remove()
    model.given = set()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if number_of(parameter) not in unset.memory:
            model.given.add(name)
    return model


def to_meta(parameter):
    """Moves a parameter to the meta device, in place, so that it may be shared."""
    if not parameter.is_meta:
        there = torch.nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
        torch.utils.swap_tensors(parameter, there)


@contextlib.contextmanager
def whole(module, prefix, given):
    """Within it a module's own parameters are whole float32 tensors of NaN, then copied into them.

    So their first values depend neither on sharding nor on dtype. Those in `given` stay as they
    are. Raises UserError for one that has no value then.
    """
    # large imports, which building on one device does not need
    from torch.distributed.tensor import DTensor

    from scale.shards import copy_into, local

    own = dict(module.named_parameters(recurse=False))
    for name, parameter in own.items():
        device = parameter.device
        if isinstance(parameter, DTensor):  # on the CPU with offload_states
            device = parameter.device_mesh.device_type
        dtype = torch.promote_types(parameter.dtype, torch.float32)
        first = torch.full(parameter.shape, torch.nan, dtype=dtype, device=device)
        module._parameters[name] = torch.nn.Parameter(first, parameter.requires_grad)
    yield
    for name, parameter in own.items():
        first = module._parameters[name].detach()
        module._parameters[name] = parameter
        where = f"{prefix}.{name}".removeprefix(".")
        if where not in given:
            copy_into(parameter, first)
        if local(parameter).isnan().any():
            why = "has no first value: give it one in reset_parameters() of its module"
            if isinstance(parameter, DTensor):
                why += ", since FSDP2 loses what __init__ gives it"
            raise UserError(f"model.py: {where} {why} (docs/experiment.md)")
