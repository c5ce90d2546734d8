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
from system.errors import UserError

PLAIN = (type(None), bool, int, float, str)


class CheckpointError(UserError):
    exit_code = 4


def pack(state):
    """({group: {name: tensor}}, JSON) of a train.State; the tensors are the run's own.

    Raises CheckpointError for what is no tree.
    """
    weights = dict(state.model.named_parameters())
    tensors = {"model": dict(weights)}
    leaves, shape = flattened(trees_of(state))
    for name, leaf in leaves.items():
        group, _, inner = name.partition("/")
        if torch.is_tensor(leaf):
            tensors.setdefault(group, {})[inner] = leaf
            owner = weights.get(inner.split("/")[1]) if group == "optimizer" else None
            leaves[name] = described(name, leaf, owner, state.model)
        elif not isinstance(leaf, PLAIN):
            holds = "tensors, numbers, texts, and dicts, lists and tuples of them"
            kind = type(leaf).__name__
            raise CheckpointError(f"{name} is of type {kind}; a checkpoint holds {holds}")
    values = {"step": state.step, "tokens": state.tokens, "seconds": state.seconds}
    return tensors, values | layout(state.model) | {"leaves": leaves, "tree": shape}


def layout(model):
    """How many ranks hold a model, among how many it is divided, and their type of device."""
    p = next(model.parameters())
    return {
        "ranks": parallel.rank_and_size()[1],
        "shards": p.device_mesh.size(-1) if isinstance(p, DTensor) else 1,
        "device": parallel.device_of(model).type,
    }


def trees_of(state):
    """{group: tree} of what a train.State holds beside its weights and numbers."""
    own = {}
    for name, value in state.own.items():
        own[name] = value.state_dict() if hasattr(value, "state_dict") else value
    return {
        "model": persistent_buffers(state.model),
        "optimizer": optimizer_tree(state.optimizer, state.model),
        "own": own,
        "scaler": state.scaler.state_dict(),
        "loader": state.loader.state_dict(),
        "rank": rank_tree(state.model),
    }


def flattened(trees):
    """({name: leaf}, the shape of the trees as text); a name is the path to a leaf, group/key/key.

    PyTorch raises NotImplementedError for a container that it does not know.
    """
    leaves, shape = pytree.tree_flatten_with_path(trees)
    named = {}
    for path, leaf in leaves:
        name = "/".join(str(getattr(part, "key", getattr(part, "idx", ""))) for part in path)
        if name in named:
            raise CheckpointError(f"a checkpoint cannot hold two values by the name {name}")
        named[name] = leaf
    return named, pytree.treespec_dumps(shape)


def described(name, tensor, owner, model):
    """What the JSON says of a tensor. owner: the parameter that it is a state of, or None."""
    found = {}
    if isinstance(tensor, DTensor):
        if Shard(0) not in tensor.placements:
            layout = f"{name} is divided as {tensor.placements}"
            raise CheckpointError(f"{layout}; a checkpoint holds tensors that are divided by rows")
        found["rows"] = True
    elif owner is not None and owner.shape == tensor.shape and not isinstance(owner, DTensor):
        found["rows"] = True
    if tensor.is_cpu and not next(model.parameters()).is_cpu:
        found["cpu"] = True
    return found


def optimizer_tree(optimizer, model):
    """What an optimizer holds: its states, and what steps have changed of its groups.

    One with a `state_dict` of its own says itself what it holds.
    """
    names = {p: name for name, p in model.named_parameters()}
    states = {}
    parts = []
    for part in parts_of(optimizer):
        if type(part).state_dict is not torch.optim.Optimizer.state_dict:
            parts.append(part.state_dict())
            continue
        for key, value in part.state.items():
            states[names[key] if torch.is_tensor(key) else key] = value
        parts.append([changed_by_steps(group) for group in part.param_groups])
    return {"states": states, "parts": parts}


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


def rank_tree(model):
    """What is a rank's own: its generators and, with fp8, the amaxes that set its next scales."""
    return {
        "generators": generators.states(parallel.device_of(model)),
        "amaxes": [amax.cpu() for amax in magnitudes(model)],
    }


def magnitudes(model):
    """Buffers with the amax of fp8's previous calls, in the model's order.

    Of a buffer only the first two values are more than 0 between its calls.
    """
    buffers = model.named_buffers()
    return [buffer.view(-1)[:2] for name, buffer in buffers if name.endswith("_amax")]


# -- back


def unpack(state, values, tensors):
    """Fills a new train.State, whose model has the weights already; returns warnings.

    values: the JSON; tensors: {group: {name: tensor, or what gives its rows (see copy_into)}}.
    Tensors that the state has are filled, others are made.
    """
    now = layout(state.model)
    beside = next(state.model.parameters())
    own_rank = all(now[name] == values[name] for name in ("ranks", "device"))
    there, _ = flattened(trees_of(state))
    leaves = dict(values["leaves"])
    for name, leaf in leaves.items():
        if isinstance(leaf, dict) and (own_rank or not name.startswith("rank/")):
            leaves[name] = filled(name, there.get(name), values, tensors, beside=beside, now=now)
    trees = pytree.tree_unflatten(leaves.values(), pytree.treespec_loads(values["tree"]))
    load_optimizer(state.optimizer, trees["optimizer"], state.model)
    warnings = load_own(state.own, trees["own"])
    state.scaler.load_state_dict(trees["scaler"])
    state.loader.load_state_dict(trees["loader"])
    state.step = values["step"]
    state.tokens = values["tokens"]
    state.seconds = values["seconds"]
    if own_rank:
        load_rank(state.model, trees["rank"])
    else:
        before = f"saved by {values['ranks']} ranks on {values['device']}"
        warnings.append(f"{before}: random numbers and fp8's scales start afresh")
    return warnings


def filled(name, there, values, tensors, *, beside, now):
    """The tensor of a name. there: what the state has in its place, if anything.

    beside: a parameter, as which a new tensor is laid out; now: `layout` of the model.
    """
    group, _, inner = name.partition("/")
    saved = tensors.get(group, {}).get(inner)
    leaf = values["leaves"][name]
    by_rows = "rows" in leaf
    if saved is None:
        own = f"each of {values['ranks']} ranks had its own {name}"
        raise CheckpointError(f"{own}; go on with as many ranks, not {now['ranks']}")
    if not torch.is_tensor(there):
        if not by_rows and saved.shape.numel() > 1 and now["shards"] != values["shards"]:
            own = f"{name} has the shape of no parameter and was saved by {values['shards']} shards"
            raise CheckpointError(f"{own}; go on with as many, not {now['shards']}")
        options = {"dtype": saved.dtype}
        if by_rows and isinstance(beside, DTensor):
            options |= dict(device_mesh=beside.device_mesh, placements=beside.placements)
            there = distributed.empty(saved.shape, **options).to(beside.device)
        else:
            device = "cpu" if "cpu" in leaf else beside.device
            there = torch.empty(saved.shape, **options, device=device)
    if (there.shape, there.dtype) != (saved.shape, saved.dtype):
        was, here = ([*tensor.shape, tensor.dtype] for tensor in (saved, there))
        raise CheckpointError(f"{name} is {was} in the checkpoint, now {here}")
    copy_into(there, saved)
    return there


def load_optimizer(optimizer, tree, model):
    """Gives a new optimizer what `optimizer_tree` found.

    PyTorch's own load_state_dict would cast each state to the dtype of its parameter.
    """
    parameters = dict(model.named_parameters())
    parts = parts_of(optimizer)
    owners = {p: part for part in parts for group in part.param_groups for p in group["params"]}
    for name, states in tree["states"].items():
        p = parameters.get(name, name)
        owners.get(p, parts[0]).state[p] = states
    for part, saved in zip(parts, tree["parts"], strict=True):
        if isinstance(saved, dict):
            part.load_state_dict(saved)
            continue
        for group, values in zip(part.param_groups, saved, strict=True):
            group.update(values)


def load_rank(model, tree):
    """Restores what `rank_tree` found."""
    generators.restore(tree["generators"], parallel.device_of(model))
    amaxes = magnitudes(model)
    # DDP has two for a weight, FSDP2 one
    if [amax.shape for amax in amaxes] == [saved.shape for saved in tree["amaxes"]]:
        for amax, saved in zip(amaxes, tree["amaxes"]):
            amax.copy_(saved)


def load_own(own, saved):
    """Fills State.own; returns warnings of what is on one side alone."""
    warnings = []
    for name in sorted(own.keys() - saved.keys()):
        warnings.append(f"own[{name!r}] is not in the checkpoint: it begins as it is made")
    for name, value in saved.items():
        if hasattr(own.get(name), "load_state_dict"):
            own[name].load_state_dict(value)
            continue
        if name not in own:  # the loop may make it in its first step
            warnings.append(f"own[{name!r}] is the checkpoint's; this run has not made it so far")
        own[name] = value
    return warnings
