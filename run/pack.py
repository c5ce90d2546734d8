"""What a run has come to, as named tensors and JSON; and a new run's state filled from them.

It touches no file: run/checkpoint.py does. What is packed are trees, as `state_dict` returns them:
dicts, lists and tuples of tensors, numbers, texts, True, False and None. The JSON has the shape of
the trees and, by name, their plain values; of a tensor it says how it is saved. Tensors of a
parameter's shape, and those that FSDP2 has divided, are read by rows, on any number of ranks.
"""

import torch
from torch.distributed import tensor as distributed
from torch.distributed.tensor import DTensor, Shard
from torch.utils import _pytree as pytree

from optim import parts_of
from scale import generators, parallel
from scale.shards import copy_into
from system.errors import UserError, warn

PLAIN = (type(None), bool, int, float, str)


class CheckpointError(UserError):
    exit_code = 4


def pack(state):
    """({group: {name: tensor}}, JSON) of a train.State; the tensors are the run's own.

    Raises CheckpointError for what is no tree.
    """
    weights = dict(state.model.named_parameters())
    on_cpu = next(iter(weights.values())).is_cpu
    tensors = {"model": dict(weights)}
    leaves, tree = flattened(trees_of(state))
    for name, leaf in leaves.items():
        group, _, inner = name.partition("/")
        if torch.is_tensor(leaf):
            tensors.setdefault(group, {})[inner] = leaf
            by_rows = is_by_rows(name, leaf, weights.get(name.split("/")[-2]))
            leaves[name] = {"rows": by_rows, "cpu": leaf.is_cpu and not on_cpu}
        elif not isinstance(leaf, PLAIN):
            holds = "tensors, numbers, texts, and dicts, lists and tuples of them"
            kind = type(leaf).__name__
            raise CheckpointError(f"{name} is of type {kind}; a checkpoint holds {holds}")
    values = {"step": state.step, "tokens": state.tokens, "seconds": state.seconds}
    return tensors, values | ranks_of(state.model) | {"leaves": leaves, "tree": tree}


def is_by_rows(name, tensor, owner):
    """Whether a tensor is saved by rows. owner: the parameter whose state it is, or None."""
    if isinstance(tensor, DTensor):
        if Shard(0) not in tensor.placements:
            layout = f"{name} is divided as {tensor.placements}"
            raise CheckpointError(f"{layout}; a checkpoint holds tensors that are divided by rows")
        return True
    return owner is not None and owner.shape == tensor.shape and not isinstance(owner, DTensor)


def ranks_of(model):
    """How many ranks hold a model, among how many FSDP2 divides it, and their type of device."""
    p = next(model.parameters())
    return {
        "ranks": parallel.rank_and_size()[1],
        "shards": p.device_mesh.size(-1) if isinstance(p, DTensor) else 0,
        "device": parallel.device_of(model).type,
    }


def trees_of(state):
    """{group: tree} of what a train.State holds beside its weights and numbers."""
    own = state.own.items()
    # what is a rank's own: its generators and, with fp8, the amaxes that set its next scales
    rank = {
        "generators": generators.states(parallel.device_of(state.model)),
        "amaxes": magnitudes(state.model),
    }
    return {
        "model": persistent_buffers(state.model),
        "optimizer": optimizer_trees(state.optimizer, state.model),
        "own": {name: x.state_dict() if hasattr(x, "state_dict") else x for name, x in own},
        "scaler": state.scaler.state_dict(),
        "loader": state.loader.state_dict(),
        "rank": rank,
    }


def flattened(trees):
    """({name: leaf}, the shape of the trees as text); a name is the path to a leaf, group/key/key.

    PyTorch raises NotImplementedError for a container that it does not know.
    """
    leaves, shape = pytree.tree_flatten_with_path(trees)
    named = {}
    for path, leaf in leaves:
        name = "/".join(str(getattr(part, "key", getattr(part, "idx", ""))) for part in path)
        named[name] = leaf
    if len(named) < len(leaves):
        raise CheckpointError("a checkpoint cannot hold two values by one name, as of 1 and '1'")
    return named, pytree.treespec_dumps(shape)


def optimizer_trees(optimizer, model):
    """What an optimizer's parts hold: states, and what steps have changed of their groups."""
    names = {p: name for name, p in model.named_parameters()}
    found = []
    for part in parts_of(optimizer):
        kind = type(part)
        if kind.state_dict is not torch.optim.Optimizer.state_dict:
            what = f"{kind.__name__} has a state_dict of its own, of which nothing would be saved"
            raise CheckpointError(f"{what}; keep all in `state` and `param_groups`")
        states = {names.get(key, key): state for key, state in part.state.items()}
        groups = [changed_by_steps(group) for group in part.param_groups]
        found.append({"states": states, "groups": groups})
    return found


def changed_by_steps(group):
    """{name: value} of a group of parameters where it is not as optim.make_optimizer made it.

    What no step changes is a setting, which a resumed run may have otherwise.
    """
    made = group.get("made", {})
    found = {}
    for name, value in group.items():
        is_setting = name in made and not torch.is_tensor(value) and value == made[name]
        if not is_setting and name not in ("params", "made", "lr"):  # the loop sets lr
            found[name] = value
    return found


def persistent_buffers(model):
    """{name: tensor} of the buffers that a checkpoint holds."""
    held = model.state_dict(keep_vars=True)
    return {name: b for name, b in model.named_buffers(remove_duplicate=False) if name in held}


@torch.no_grad()
def add_noise(model):
    """Makes a new model, for a trial, one that has trained, so that all of it has an effect.

    Weights are random, numbers in saved buffers larger than at first, and counters a million.
    """
    for p in model.parameters():
        scale = p.size(-1) ** -0.5 if p.dim() > 1 else 0.1
        p.add_(torch.randn_like(p), alpha=scale)
    for buffer in persistent_buffers(model).values():
        if buffer.is_floating_point():
            buffer.add_(torch.rand_like(buffer), alpha=0.1)  # a variance stays positive
        elif buffer.dtype == torch.long and not buffer.dim():
            buffer.fill_(10**6)


def magnitudes(model):
    """Buffers with the amax of fp8's previous calls, in the model's order.

    Of a buffer only the first two values are more than 0 between its calls.
    """
    buffers = model.named_buffers()
    return [buffer.view(-1)[:2] for name, buffer in buffers if name.endswith("_amax")]


# -- back


def unpack(state, values, tensors):
    """Fills a new train.State, whose model has the weights already.

    values: the JSON; tensors: {group: {name: tensor, or what gives its rows (see copy_into)}},
    with a group of each rank for those of its own. Tensors that the state has are filled, others
    are made. On other ranks than those that saved, what was a rank's own is not taken.
    """
    rank, _ = parallel.rank_and_size()
    same_ranks = ranks_of(state.model).items() <= values.items()
    own = tensors.get(f"rank{rank:05d}", {}) if same_ranks else {}
    there, _ = flattened(trees_of(state))
    leaves = dict(values["leaves"])
    for name, leaf in leaves.items():
        group, _, inner = name.partition("/")
        if not isinstance(leaf, dict) or group == "rank" and not same_ranks:
            continue
        saved = own.get(name, tensors.get(group, {}).get(inner))
        if saved is None:
            ranks = f"each of {values['ranks']} ranks had its own {name}"
            raise CheckpointError(f"{ranks}; go on with as many, and the same --parallel")
        tensor = there.get(name)
        if not torch.is_tensor(tensor):
            tensor = new_tensor(saved, leaf, next(state.model.parameters()))
        if tensor.shape != saved.shape:
            raise CheckpointError(f"{name}: checkpoint {[*saved.shape]}, now {[*tensor.shape]}")
        copy_into(tensor, saved)
        leaves[name] = tensor
    trees = pytree.tree_unflatten(leaves.values(), pytree.treespec_loads(values["tree"]))
    load_optimizer(state.optimizer, trees["optimizer"], state.model)
    for name, value in trees["own"].items():
        if hasattr(state.own.get(name), "load_state_dict"):
            state.own[name].load_state_dict(value)
        else:
            state.own[name] = value
    state.scaler.load_state_dict(trees["scaler"])
    state.loader.load_state_dict(trees["loader"])
    state.step = values["step"]
    state.tokens = values["tokens"]
    state.seconds = values["seconds"]
    if same_ranks:
        generators.restore(trees["rank"]["generators"], parallel.device_of(state.model))
    else:
        warn("saved on other ranks or devices: random numbers and fp8's scales start afresh")


def new_tensor(saved, leaf, beside):
    """An empty tensor for one that was saved; leaf: how.

    beside: a parameter, as which what is saved by rows is divided.
    """
    if leaf["rows"] and isinstance(beside, DTensor):
        layout = dict(device_mesh=beside.device_mesh, placements=beside.placements)
        tensor = distributed.empty(saved.shape, dtype=saved.dtype, **layout)
        return tensor.to(beside.device)  # the CPU with offload_states
    device = "cpu" if leaf["cpu"] else beside.device
    return torch.empty(saved.shape, dtype=saved.dtype, device=device)


def load_optimizer(optimizer, trees, model):
    """Gives a new optimizer what `optimizer_trees` found.

    PyTorch's own load_state_dict would cast each state to the dtype of its parameter.
    """
    parameters = dict(model.named_parameters())
    for part, saved in zip(parts_of(optimizer), trees, strict=True):
        for name, state in saved["states"].items():
            part.state[parameters.get(name, name)] = state
        for group, changed in zip(part.param_groups, saved["groups"], strict=True):
            group.update(changed)
