"""First values of parameters: what a model's `__init__` gives holds, `initialize` gives the rest.

Where FSDP2 shards, parameters are on PyTorch's meta device until then, and values that `__init__`
gave them are lost: such a parameter is named, as is one that nothing gives a value.
"""

import contextlib
import sys
import traceback

import torch
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from system.errors import UserError

aten = torch.ops.aten
EMPTY = (aten.empty.memory_format, aten.empty_like.default, aten.new_empty.default)


class Writes(TorchDispatchMode):
    """Notes which memory holds no values yet, or only those of a layer's `reset_parameters`.

    unset: {number of a storage: the storage, or the parameter that has it}; they are kept, since
    the number of one that was freed may be given to another.
    """

    def __init__(self):
        super().__init__()
        self.unset = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function in EMPTY:
            self.unset[number_of(result)] = result.untyped_storage()
        elif function._schema.is_mutable:
            frames = traceback.walk_stack(sys._getframe())
            if not any(frame.f_code.co_name == "reset_parameters" for frame, _ in frames):
                for tensor in filter(torch.is_tensor, tree_leaves((args[:1], kwargs))):
                    self.unset.pop(number_of(tensor), None)
        return result


def number_of(tensor):
    return tensor.untyped_storage()._cdata


def made(make, place):
    """The model that make() returns; place(parameter) is called as soon as a module has one.

    model.given: names of the parameters to which `__init__` gave values after their layer was made,
    or instead of the layer's own.
    """
    writes = Writes()
    seen = set()

    def register(module, name, parameter):
        if parameter is None or parameter in seen:
            return
        seen.add(parameter)
        # a reset_parameters of model.py's own is meant to replace what the parameter was made of
        reset = getattr(type(module), "reset_parameters", None)
        own = reset is not None and not reset.__module__.startswith("torch.")
        memory = writes.unset.pop(number_of(parameter), None)  # `place` may free it
        place(parameter)
        # that of another parameter has its values
        if own or isinstance(memory, torch.UntypedStorage):
            writes.unset[number_of(parameter)] = parameter

    handle = register_module_parameter_registration_hook(register)
    try:
        with writes:
            model = make()
    finally:
        handle.remove()
    named = model.named_parameters(remove_duplicate=False)
    model.given = {name for name, p in named if number_of(p) not in writes.unset}
    return model


def to_meta(parameter):
    """Moves a parameter to the meta device, in place, so that it may be shared."""
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
        module._parameters[name] = torch.nn.Parameter(first)
    yield
    for name, parameter in own.items():
        first = module._parameters[name].detach()
        module._parameters[name] = parameter
        where = f"{prefix}.{name}".removeprefix(".")
        if where not in given:
            copy_into(parameter, first)
        if local(parameter).isnan().any():
            why = "has no first value, as __init__ gives none under FSDP2"
            advice = "give it one in reset_parameters() of its module (docs/experiment.md)"
            raise UserError(f"model.py: {where} {why}; {advice}")
