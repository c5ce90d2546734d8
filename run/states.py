"""What an optimizer and a run's own objects hold, as tensors and JSON; made again from them.

The objects may be of any type. A value is a tensor, a number, a text, True, False, None, or a list,
tuple or dict of values. JSON holds it as it is, but for {"tensor": its name, ...}, {"parameter":
name}, {"float": text} and {"tuple", "size", "dict" or "ordered": items}. Tensors of a parameter's
shape, and DTensors, are saved and read by rows on any number of ranks. Others are a rank's own:
saved once where they are bitwise the same on all ranks, else by each rank.
"""

import hashlib
import json
import math
from collections import OrderedDict
from dataclasses import dataclass

import torch
from torch.distributed import tensor as distributed
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils._pytree import tree_map_only

from optim import parts_of
from scale import parallel
from scale.shards import copy_into, local
from system.errors import UserError

SEQUENCES = {"list": list, "tuple": tuple, "size": torch.Size}
MAPPINGS = {"dict": dict, "ordered": OrderedDict}
KINDS = {made: kind for kind, made in (SEQUENCES | MAPPINGS).items()}
PLAIN = (type(None), bool, int, float, str)
# of a group of parameters: set anew in each step
SET_BY_THE_LOOP = {"params", "lr", "factor"}
# attributes of optimizers that are no state of theirs
SET_BY_PYTORCH = {
    "defaults",
    "state",
    "param_groups",
    "found_inf",
    "grad_scale",
    "_opt_called",
    "_need_device_dtype_check_for_fused",
    "_warned_capturable_if_run_uncaptured",
    "as_made",  # by `remember`
}


class CheckpointError(UserError):
    exit_code = 4


class Packer:
    """Makes JSON of values and collects their tensors.

    by_rows: {name: tensor} of those that any number of ranks may read by rows; others: the same of
    those that are a rank's own.
    """

    def __init__(self, model):
        self.parameter_names = {id(p): name for name, p in model.named_parameters()}
        self.device = next(model.parameters()).device
        self.by_rows = {}
        self.others = {}
        self.nodes = {}  # {id of a tensor: its JSON}
        self.memory = {}  # {address: the name of the tensor there}
        self.checked = []  # what must be finite

    def pack(self, value, name, like=None):
        """The JSON of a value.

        name: of its tensors; like: the parameter that it belongs to, if to one.
        """
        kind = type(value)
        if torch.is_tensor(value):
            return self.pack_tensor(value, name, like)
        if kind is float and not math.isfinite(value):
            if math.isnan(value):
                self.checked.append(torch.tensor(value))
            return {"float": repr(value)}
        if kind in PLAIN:
            return value
        if kind in SEQUENCES.values():
            items = [self.pack(item, f"{name}.{i}", like) for i, item in enumerate(value)]
            return items if kind is list else {KINDS[kind]: items}
        if kind in MAPPINGS.values() and not any(torch.is_tensor(key) for key in value):
            pairs = []
            for key, item in value.items():
                pairs.append([self.pack(key, name), self.pack(item, f"{name}.{key}", like)])
            return {KINDS[kind]: pairs}
        holds = "tensors, numbers, texts, lists, tuples and dicts without tensors as keys"
        raise CheckpointError(f"{name} is of type {kind.__name__}: a checkpoint holds {holds}")

    def pack_tensor(self, tensor, name, like):
        if id(tensor) in self.parameter_names:
            return {"parameter": self.parameter_names[id(tensor)]}
        if id(tensor) in self.nodes:  # one tensor in several places, which it is to be again
            return self.nodes[id(tensor)]
        while name in self.by_rows or name in self.others:  # of the keys 1 and "1"
            name += "_"
        memory = local(tensor).untyped_storage()
        other = self.memory.setdefault(memory.data_ptr(), name)
        if memory.nbytes() and other != name:
            raise CheckpointError(
                f"{name} shares its memory with {other}; a checkpoint holds them apart only"
            )
        node = {"tensor": name}
        if tensor.device.type == "cpu" and self.device.type != "cpu":
            node["cpu"] = True
        alike = like is not None and tensor.shape == like.shape
        places = set(tensor.placements) if isinstance(tensor, DTensor) else set()
        if places - {Shard(0), Replicate()}:
            layout = f"{name} is laid out as {tensor.placements}"
            raise CheckpointError(f"{layout}: a checkpoint holds rows of tensors, or whole ones")
        if places == {Replicate()}:
            node["whole"] = True
        if places or (alike and not isinstance(like, DTensor)):
            self.by_rows[name] = tensor
        else:
            node["shape"] = list(tensor.shape)
            self.others[name] = tensor
        self.checked.append(tensor)
        self.nodes[id(tensor)] = node
        return node


def pack_optimizer(optimizer, packer):
    """The JSON of an optimizer.

    It holds the states, and what of its groups and attributes its own steps have changed.
    """
    found = []
    for number, part in enumerate(parts_of(optimizer)):
        prefix = f"{number}." if number else ""
        states = {}
        more = {}  # states that belong to no parameter
        for key, state in part.state.items():
            name = packer.parameter_names.get(id(key))
            if name and isinstance(state, dict):
                states[name] = packer.pack(state, name, key)
            elif torch.is_tensor(key):
                what = "of a tensor that is no parameter, or is no dict"
                raise CheckpointError(f"a state of {type(part).__name__} is {what}")
            else:
                more[key] = state
        attributes, *groups = changed_by_steps(part)
        found.append(
            {
                "type": type(part).__name__,
                "states": states,
                "more": packer.pack(more, f"{prefix}more"),
                "groups": packer.pack(groups, f"{prefix}groups"),
                "attributes": packer.pack(attributes, f"{prefix}attributes"),
            }
        )
    return found


def load_optimizer(optimizer, unpacker):
    """Gives a new optimizer, without a step, what pack_optimizer found."""
    parts = parts_of(optimizer)
    unpacker.portable = False
    packed = unpacker.packed
    if packed is None:
        packed = packed_of_older(parts, unpacker)
    was = [of_part["type"] for of_part in packed]
    now = [type(part).__name__ for part in parts]
    if was != now:
        raise CheckpointError(
            f"{unpacker.what} are of {', '.join(was)}, now it is {', '.join(now)}"
        )
    for part, of_part in zip(parts, packed):
        load_part(part, unpacker, of_part)
    for name in sorted(unpacker.tensors.keys() - unpacker.made.keys()):
        raise unpacker.misfit(name)


def load_part(optimizer, unpacker, packed):
    params = {p for group in optimizer.param_groups for p in group["params"]}
    for name, states in packed["states"].items():
        p = unpacker.params.get(name)
        if p not in params:
            raise unpacker.misfit(name)
        before = optimizer.state.get(p, {})
        expected = set(before)
        optimizer.state[p] = unpacker.unpack(states, p, before)
        for lost in sorted(expected - optimizer.state[p].keys()):
            raise unpacker.misfit(f"{name}.{lost} is absent")
    optimizer.state.update(unpacker.unpack(packed["more"]))
    attributes, *groups = attributes_and_groups(optimizer)
    found = unpacker.unpack(packed["groups"], there=groups)
    if any(found) and len(found) != len(optimizer.param_groups):
        raise unpacker.misfit(
            f"{len(found)} groups of parameters, now {len(optimizer.param_groups)}"
        )
    for group, values in zip(optimizer.param_groups, found):
        group.update(values)
    for name, value in unpacker.unpack(packed["attributes"], there=attributes).items():
        setattr(optimizer, name, value)


def packed_of_older(parts, unpacker):
    """What pack_optimizer would have found, of a checkpoint without JSON.

    Such a checkpoint has {"<parameter>.<state>": tensor}.
    """
    found = []
    owner = {}  # {parameter: its optimizer's states}
    for part in parts:
        states = {}
        nothing = {"dict": []}
        names = {"type": type(part).__name__, "more": nothing, "groups": [], "attributes": nothing}
        found.append(names | {"states": states})
        owner |= {p: states for group in part.param_groups for p in group["params"]}
    for key, tensor in unpacker.tensors.items():
        name, _, kind = key.rpartition(".")
        p = unpacker.params.get(name)
        if p in owner:
            node = {"tensor": key}
            if tensor.shape != p.shape:
                node["shape"] = list(tensor.shape)
            owner[p].setdefault(name, {"dict": []})["dict"].append([kind, node])
    return found


def pack_own(own, packer):
    """The JSON of State.own; of an object with a state_dict, what that returns."""
    found = {}
    for name, value in own.items():
        if hasattr(value, "state_dict"):
            value = value.state_dict()
        found[name] = packer.pack(value, name)
    return found


def load_own(own, unpacker):
    """Fills State.own in place; tensors, lists and dicts stay the same objects.

    Returns warnings.
    """
    packed = unpacker.packed or {}
    words = []
    for name in sorted(own.keys() | packed.keys()):
        value = own.get(name)
        if name not in packed:
            words.append(f"own[{name!r}] is not in the checkpoint: it begins as it is made")
        elif name not in own:
            own[name] = unpacker.unpack(packed[name])  # the loop may make it in its first step
            words.append(f"own[{name!r}] is the checkpoint's; this run has not made it so far")
        elif hasattr(value, "load_state_dict"):
            value.load_state_dict(unpacker.unpack(packed[name], there=value.state_dict()))
        else:
            own[name] = unpacker.unpack(packed[name], there=value)
    return words


def attributes_and_groups(optimizer):
    """[{name: value} of the attributes, of the first group, ...].

    What PyTorch and the loop set is left out.
    """
    found = [{k: v for k, v in vars(optimizer).items() if k not in SET_BY_PYTORCH and is_state(v)}]
    for group in optimizer.param_groups:
        found.append({k: v for k, v in group.items() if k not in SET_BY_THE_LOOP})
    return found


def is_state(value):
    """Whether an attribute may be a state of the optimizer: a value that holds no parameters."""
    kind = type(value)
    if kind in MAPPINGS.values():
        return all(is_state(key) and is_state(item) for key, item in value.items())
    if kind in SEQUENCES.values():
        return all(is_state(item) for item in value)
    return kind in PLAIN or torch.is_tensor(value) and not isinstance(value, torch.nn.Parameter)


def remember(optimizer):
    """Notes, before the first step, the values that come from the settings and not from a step."""
    for part in parts_of(optimizer):
        part.as_made = []
        for values in attributes_and_groups(part):
            part.as_made.append({name: fingerprint(value) for name, value in values.items()})


def changed_by_steps(optimizer):
    """As `attributes_and_groups`, but only what is no longer as `remember` found it."""
    if not hasattr(optimizer, "as_made"):
        remember(optimizer)
    found = []
    for values, before in zip(attributes_and_groups(optimizer), optimizer.as_made):
        found.append({k: v for k, v in values.items() if before.get(k) != fingerprint(v)})
    return found


def fingerprint(value):
    """A text that tells two values apart, by the bytes of their tensors.

    Of DTensors it takes those of this rank.
    """

    def of_tensor(tensor):
        data = local(tensor).contiguous().reshape(-1).view(torch.uint8)
        return tensor.dtype, tensor.shape, hashlib.sha256(data.cpu().numpy()).hexdigest()

    return repr(tree_map_only(torch.Tensor, of_tensor, value))


@dataclass
class RankValues:
    """What one rank is to save: JSON, the shapes of tensors by rows, digests of its own tensors."""

    packed: object
    rows: dict
    digests: dict


def of_all_ranks(own):
    """The RankValues of each rank, or one of them where all are the same."""
    digest = hashlib.sha256(json.dumps(vars(own)).encode()).digest()
    if len(set(parallel.gather_objects(digest))) == 1:
        return [own]
    return parallel.gather_objects(own)


def shared_and_own(packed, packer, model):
    """What was packed, as JSON of values.json, tensors that all ranks have, and this rank's own.

    The tensors are {name: tensor}. All ranks call it. Raises CheckpointError where they do not hold
    the same tensors by rows.
    """
    rank, ranks = parallel.rank_and_size()
    own = RankValues(packed, {}, {})
    for name, tensor in packer.by_rows.items():
        own.rows[name] = f"{list(tensor.shape)} {tensor.dtype}"
    if ranks > 1:
        for name, tensor in packer.others.items():
            own.digests[name] = fingerprint(tensor)
    of_ranks = of_all_ranks(own)
    of_each_rank = set()
    for other, theirs in enumerate(of_ranks):
        for name in differing(own.rows, theirs.rows):
            here = f"{name} is {own.rows.get(name)} on rank {rank}"
            raise CheckpointError(f"{here}, {theirs.rows.get(name)} on rank {other}")
        of_each_rank.update(differing(own.digests, theirs.digests))
    trees = [theirs.packed for theirs in of_ranks]
    if trees.count(packed) == len(trees):
        trees = [packed]
    saved = {
        "ranks": ranks,
        "shards": shards_of(model),
        "trees": trees,
        "of_each_rank": sorted(of_each_rank),
    }
    shared = packer.by_rows | packer.others
    alone = {name: shared.pop(name) for name in saved["of_each_rank"] if name in packer.others}
    return saved, shared, alone


def differing(one, other):
    """The names, sorted, whose values in two dicts differ, or that one of them lacks."""
    names = one.keys() | other.keys()
    return sorted(name for name in names if one.get(name) != other.get(name))


def shards_of(model):
    """Among how many ranks FSDP2 divides a model; 1: each has all of it."""
    p = next(model.parameters())
    return p.device_mesh.size(-1) if isinstance(p, DTensor) else 1


class Unpacker:
    """Makes values again from JSON and tensors that a checkpoint holds.

    JSON that is none of Packer's raises any error; run/resume.py makes one line of it.
    """

    def __init__(self, what, saved, tensors, model):
        """what: the saved thing in words, for errors.

        saved: shared_and_own's JSON; tensors: {name: MergedTensor}.
        """
        rank, ranks = parallel.rank_and_size()
        self.what = what
        self.tensors = tensors
        self.params = dict(model.named_parameters())
        self.first = next(model.parameters())
        self.shards = saved["shards"]
        self.shards_now = shards_of(model)
        self.made = {}  # {name: tensor}
        self.portable = True  # tensors that are no rows mean the same however the model is divided
        trees = saved["trees"]
        self.packed = trees[rank % len(trees)]
        differ = saved["of_each_rank"]
        if (differ or len(trees) > 1) and saved["ranks"] != ranks:
            name = differ[0] if differ else "what they hold"
            why = f"{name} differs from rank to rank of the {saved['ranks']} that saved it"
            raise CheckpointError(f"{what}: {why}; go on with as many, not {ranks}")

    def misfit(self, why):
        return CheckpointError(f"{self.what} do not fit the model: {why}")

    def unpack(self, node, like=None, there=None):
        """The value of a node of JSON.

        like: the parameter that it belongs to; there: what is in its place, to be filled.
        """
        if isinstance(node, list):
            node = {"list": node}
        if not isinstance(node, dict):
            return node
        if "tensor" in node:
            return self.tensor(node, like, there)
        [(kind, content)] = node.items()
        if kind == "float":
            return float(content)
        if kind == "parameter":
            return self.params[content]
        if kind in MAPPINGS:
            return self.mapping(MAPPINGS[kind], content, like, there)
        made = SEQUENCES[kind]
        before = there if type(there) is made else ()
        found = []
        for i, item in enumerate(content):
            found.append(self.unpack(item, like, before[i] if i < len(before) else None))
        if made is list and type(there) is list:
            there[:] = found
            return there
        return made(found)

    def mapping(self, made, pairs, like, there):
        if type(there) is not made:
            there = made()
        found = []
        for key, node in pairs:
            key = self.unpack(key)
            found.append((key, self.unpack(node, like, there.get(key))))
        there.clear()
        there.update(found)
        return there

    def tensor(self, node, like, there):
        name = node["tensor"]
        if name in self.made:
            return self.made[name]
        if name not in self.tensors:
            raise CheckpointError(f"{self.what}: {name} is absent from the checkpoint")
        saved = self.tensors[name]
        if not torch.is_tensor(there):
            there = self.empty(node, saved, like)
        if (there.shape, there.dtype) != (saved.shape, saved.dtype):
            was, now = ([*tensor.shape, tensor.dtype] for tensor in (saved, there))
            raise CheckpointError(f"{self.what}: {name} is {was} in the checkpoint, now {now}")
        with torch.no_grad():
            copy_into(there, saved)
        self.made[name] = there
        return there

    def empty(self, node, saved, like):
        """A new tensor for a saved one, laid out as it was."""
        beside = self.first if like is None else like
        device = "cpu" if node.get("cpu") else beside.device
        by_rows = "shape" not in node
        if by_rows and isinstance(beside, DTensor):
            mesh = beside.device_mesh
            places = beside.placements
            if node.get("whole"):
                places = [Replicate()] * mesh.ndim
            made = distributed.empty(
                saved.shape, dtype=saved.dtype, device_mesh=mesh, placements=places
            )
            return made.to(device)
        # a number means the same however the model is divided
        fits = self.portable or saved.shape.numel() <= 1 or self.shards == self.shards_now
        if not by_rows and not fits:
            tensor = f"{node['tensor']} {tuple(saved.shape)} has not the parameter's shape"
            before = f"saved by a model among {self.shards} ranks, it can go on so alone"
            raise CheckpointError(f"{self.what}: {tensor}; {before}, not among {self.shards_now}")
        return torch.empty(saved.shape, dtype=saved.dtype, device=device)
