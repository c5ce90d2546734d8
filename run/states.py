"""What an optimizer and a run's own objects hold, as tensors and JSON; made again from them, of any type.

A value is a tensor, a number, a text, True, False, None, or a list, tuple or dict of values. JSON holds it as
it is, but for {"tensor": its name, ...}, {"parameter": name}, {"float": text} and {"tuple", "size", "dict" or
"ordered": items}. Tensors of a parameter's shape, and DTensors, are saved and read by rows on any number of
ranks. Others are a rank's own: saved once where they are bitwise the same on all ranks, else by each rank.
"""

import hashlib
import json
import math
from collections import Counter, OrderedDict

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard

from configurator import UserError
from optim import parts_of
from scale import parallel
from scale.shards import copy_into, local
from system import files

SEQUENCES = {"tuple": tuple, "size": torch.Size}
MAPPINGS = {"dict": dict, "ordered": OrderedDict}
PLAIN = (type(None), bool, int, str)
FORM = {
    "ranks": files.count,
    "shards": files.count,
    "trees": [lambda tree: True],
    "of_each_rank": [files.text],
}
FORM = dict.fromkeys(["optimizer?", "buffers?", "own?"], FORM)  # of values.json
COMPARED_BYTES = 64 * 2**20  # of tensors that are compared over the ranks at a time
# attributes of PyTorch's optimizers that are no state of theirs
PYTORCHS = {"defaults", "state", "param_groups", "found_inf", "grad_scale", "as_made"}
PYTORCHS |= {"_opt_called", "_need_device_dtype_check_for_fused", "_warned_capturable_if_run_uncaptured"}


class CheckpointError(UserError):
    exit_code = 4


class Packed:
    """Makes JSON of values. by_rows, others: {name: tensor}, of those saved by rows and of the others."""

    def __init__(self, model):
        self.names = {id(p): name for name, p in model.named_parameters()}
        self.device = next(model.parameters()).device
        self.by_rows, self.others = {}, {}
        self.seen = {}  # {id of a tensor: (its node, itself)}
        self.memory = {}  # {address: the name of the tensor there}
        self.has_nan = False  # a number of Python's

    def pack(self, value, name, like=None):
        """The JSON of a value. name: of its tensors; like: the parameter that it belongs to, if to one."""
        if type(value) in PLAIN:
            return value
        if type(value) is float and math.isfinite(value):
            return value
        if type(value) is float:
            self.has_nan = self.has_nan or math.isnan(value)
            return {"float": repr(value)}
        if torch.is_tensor(value):
            return self.pack_tensor(value, name, like)
        if type(value) is list:
            return [self.pack(item, f"{name}.{i}", like) for i, item in enumerate(value)]
        for kind, made in SEQUENCES.items():
            if type(value) is made:
                return {kind: [self.pack(item, f"{name}.{i}", like) for i, item in enumerate(value)]}
        for kind, made in MAPPINGS.items():
            if type(value) is made:
                pairs = value.items()
                if any(torch.is_tensor(key) for key in value):
                    raise CheckpointError(f"{name} is a dict with tensors as keys, which no checkpoint holds")
                return {kind: [[self.pack(k, name), self.pack(v, f"{name}.{k}", like)] for k, v in pairs]}
        holds = "a checkpoint holds tensors, numbers, texts, lists, tuples and dicts"
        raise CheckpointError(f"{name} is of type {type(value).__name__}: {holds}")

    def pack_tensor(self, value, name, like):
        if id(value) in self.names:
            return {"parameter": self.names[id(value)]}
        if id(value) in self.seen:  # one tensor in several places, which it is to be again
            return self.seen[id(value)][0]
        while name in self.by_rows or name in self.others:  # of the keys 1 and "1"
            name += "_"
        where = local(value).untyped_storage()
        if where.nbytes() and self.memory.setdefault(where.data_ptr(), name) != name:
            other = self.memory[where.data_ptr()]
            raise CheckpointError(
                f"{name} shares its memory with {other}; a checkpoint holds them apart only"
            )
        node = {"tensor": name}
        if value.device.type == "cpu" and (self.device if like is None else like.device).type != "cpu":
            node["cpu"] = True
        alike = like is not None and value.shape == like.shape
        if isinstance(value, DTensor):
            if any(not isinstance(place, Replicate) and place != Shard(0) for place in value.placements):
                layout = f"{name} is laid out as {value.placements}"
                raise CheckpointError(f"{layout}: a checkpoint holds rows of tensors, or whole ones")
            kind = "whole"
            if Shard(0) in value.placements:
                kind = "like" if alike else "rows"
            node[kind] = True
            self.by_rows[name] = value
        elif alike and not isinstance(like, DTensor):
            node["like"] = True  # DDP's copies, as the weights
            self.by_rows[name] = value
        else:
            node["shape"], node["dtype"] = list(value.shape), str(value.dtype)
            self.others[name] = value
        self.seen[id(value)] = node, value
        return node


def pack_optimizer(packed, optimizer, model):
    """The JSON of an optimizer: states, and what of its groups and attributes its own steps have changed."""
    params = {p: name for name, p in model.named_parameters()}
    found = []
    for number, one in enumerate(parts_of(optimizer)):
        at = f"{number}." if number else ""
        states = {}
        more = {}  # of states that belong to no parameter
        for key, state in one.state.items():
            if not torch.is_tensor(key):
                more[key] = state
            elif key in params and isinstance(state, dict):
                states[params[key]] = packed.pack(state, params[key], key)
            else:
                what = "of a tensor that is no parameter, or is no dict"
                raise CheckpointError(f"a state of {type(one).__name__} is {what}")
        groups = [changed(one, i) for i in range(len(one.param_groups))]
        own = {"type": type(one).__name__, "states": states}
        own["more"] = packed.pack(more, f"{at}more")
        own["groups"] = packed.pack(groups, f"{at}groups")
        own["attributes"] = packed.pack(changed(one, None), f"{at}attributes")
        found.append(own)
    return found


def load_optimizer(optimizer, unpacked, tree):
    """Gives a new optimizer, without a step, what pack_optimizer found. tree: None in older checkpoints."""
    each = parts_of(optimizer)
    unpacked.portable = False
    if tree is None:
        tree = older(each, unpacked)
    was, now = [own["type"] for own in tree], [type(one).__name__ for one in each]
    if was != now:
        raise CheckpointError(f"{unpacked.what} are of {', '.join(was)}, now it is {', '.join(now)}")
    for one, own in zip(each, tree):
        params = {p for group in one.param_groups for p in group["params"]}
        names = {name: p for name, p in unpacked.params.items() if p in params}
        if lost := sorted(own["states"].keys() - names.keys()):
            raise CheckpointError(f"{unpacked.what} do not fit the model: {lost[0]} ({len(lost)} in all)")
        for name, p in names.items():
            made = set(one.state.get(p, ()))
            if name in own["states"]:
                one.state[p] = unpacked.unpack(own["states"][name], p, one.state.get(p))
            if lost := made - set(one.state.get(p, ())):
                raise CheckpointError(f"{unpacked.what} do not fit the model: {name}.{min(lost)} is absent")
        one.state.update(unpacked.unpack(own["more"]))
        there = [values_of(one, i) for i in range(len(one.param_groups))]
        groups = unpacked.unpack(own["groups"], there=there)
        if any(groups) and len(groups) != len(one.param_groups):
            counts = f"{len(groups)} groups of parameters, now there are {len(one.param_groups)}"
            raise CheckpointError(f"{unpacked.what} are of {counts}")
        for group, values in zip(one.param_groups, groups):
            group.update(values)
        for name, value in unpacked.unpack(own["attributes"], there=values_of(one, None)).items():
            setattr(one, name, value)
    if len(unpacked.made) < len(unpacked.tensors):
        name = min(unpacked.tensors.keys() - unpacked.made.keys())
        raise CheckpointError(f"{unpacked.what} do not fit the model: {name}")


def older(each, unpacked):
    """The tree of a checkpoint that has no JSON, but {"<parameter>.<state>": tensor}."""
    found = [{"type": type(one).__name__, "states": {}} for one in each]
    for own in found:
        own |= {"more": {"dict": []}, "groups": [], "attributes": {"dict": []}}
    owner = {p: i for i, one in enumerate(each) for group in one.param_groups for p in group["params"]}
    kinds = Counter()  # of states that the optimizer has not made yet
    for key, stored in sorted(unpacked.tensors.items()):
        name, _, kind = key.rpartition(".")
        p = unpacked.params.get(name)
        if p not in owner:
            raise CheckpointError(f"{unpacked.what} do not fit the model: {key}")
        number = owner[p]
        node = {"tensor": key, "like": True}
        if stored.shape != p.shape:
            node = {"tensor": key, "shape": list(stored.shape)}
        found[number]["states"].setdefault(name, {"dict": []})["dict"].append([kind, node])
        if kind not in each[number].state.get(p, ()):
            kinds[number, kind] += 1
    for number in range(len(each)):
        counts = {kind: n for (owned, kind), n in kinds.items() if owned == number}
        if len(set(counts.values())) > 1:
            raise CheckpointError(f"{unpacked.what} do not fit the model: {min(counts, key=counts.get)}")
    return found


def pack_own(packed, own):
    """The JSON of State.own; of an object with a state_dict, what that returns."""
    found = {}
    for name, value in own.items():
        value = value.state_dict() if hasattr(value, "state_dict") else value
        found[name] = packed.pack(value, name)
    return found


def load_own(own, unpacked, tree):
    """Fills State.own in place; tensors, lists and dicts stay the same objects. Returns warnings."""
    for name in sorted(own.keys() & tree.keys()):
        value = own[name]
        if hasattr(value, "load_state_dict"):
            value.load_state_dict(unpacked.unpack(tree[name], there=value.state_dict()))
        else:
            own[name] = unpacked.unpack(tree[name], there=value)
    new, gone = sorted(own.keys() - tree.keys()), sorted(tree.keys() - own.keys())
    words = [f"own[{name!r}] is not in the checkpoint: it begins as it is made" for name in new]
    return words + [f"own[{name!r}] of the checkpoint is not in this run" for name in gone]


def values_of(optimizer, group):
    """{name: value} of a group by number, without what the loop sets; None: of the optimizer's attributes."""
    if group is not None:
        values = optimizer.param_groups[group]
        return {key: value for key, value in values.items() if key not in ("params", "lr", "factor")}
    return {key: value for key, value in vars(optimizer).items() if key not in PYTORCHS and is_state(value)}


def is_state(value):
    """Whether an attribute may be a state of the optimizer: a value, and none that holds parameters."""
    if type(value) in MAPPINGS.values():
        return all(is_state(item) for pair in value.items() for item in pair)
    if type(value) in (list, *SEQUENCES.values()):
        return all(is_state(item) for item in value)
    if torch.is_tensor(value):
        return not isinstance(value, torch.nn.Parameter)
    return type(value) in (*PLAIN, float)


def remember(optimizer):
    """Notes, before the first step, the values that come from the settings and not from a step."""
    for one in parts_of(optimizer):
        places = [*range(len(one.param_groups)), None]
        one.as_made = {at: {k: marked(v) for k, v in values_of(one, at).items()} for at in places}


def changed(optimizer, group):
    """As values_of, but only of those that are no longer as `remember` found them."""
    before = getattr(optimizer, "as_made", {}).get(group)
    if before is None:
        return {}
    return {k: v for k, v in values_of(optimizer, group).items() if k not in before or before[k] != marked(v)}


def marked(value):
    """A text that tells two values apart."""
    if torch.is_tensor(value):
        return f"{value.dtype} {tuple(value.shape)} {digest(local(value))}"
    if isinstance(value, dict):
        return repr([(marked(k), marked(v)) for k, v in value.items()])
    if isinstance(value, (list, tuple)):
        return type(value).__name__ + repr([marked(item) for item in value])
    return f"{type(value).__name__} {value!r}"


def digest(tensor):
    return hashlib.sha256(bytes_of(tensor).cpu().numpy()).hexdigest()


def bytes_of(tensor):
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def agree(tree, packed, model, device):
    """(JSON of values.json, {name: tensor} that all ranks have, of this rank alone) of a packed tree.

    All ranks call it. Raises CheckpointError where they do not hold the same tensors by rows.
    """
    rank, ranks = parallel.rank_and_size()
    rows = {name: (list(t.shape), str(t.dtype)) for name, t in packed.by_rows.items()}
    text = json.dumps([tree, rows])
    saved = {"ranks": ranks, "shards": shards_of(model)}
    if len(set(parallel.gather_objects(hashlib.sha256(text.encode()).hexdigest()))) > 1:
        for other, found in enumerate(parallel.gather_objects(rows)):
            if found != rows:
                name = min(name for name in found.keys() | rows if found.get(name) != rows.get(name))
                raise CheckpointError(
                    f"{name} is {rows.get(name)} on rank {rank}, {found.get(name)} on rank {other}"
                )
        saved |= {"trees": parallel.gather_objects(tree), "of_each_rank": sorted(packed.others)}
        return saved, packed.by_rows, packed.others
    differ = differing(packed.others, device)
    same = {name: tensor for name, tensor in packed.others.items() if name not in differ}
    own = {name: packed.others[name] for name in differ}
    return saved | {"trees": [tree], "of_each_rank": differ}, packed.by_rows | same, own


def shards_of(model):
    """Among how many ranks FSDP2 divides a model; 1: each has all of it."""
    p = next(model.parameters())
    return p.device_mesh.size(-1) if isinstance(p, DTensor) else 1


def differing(tensors, device):
    """Names of the tensors, of the same shapes on all ranks, that are not bitwise the same on all."""
    if not dist.is_initialized() or not tensors:
        return []
    flags, some, size = [], [], 0
    for i, tensor in enumerate(tensors.values()):
        some.append(bytes_of(tensor).to(device))
        size += some[-1].numel()
        if size > COMPARED_BYTES or i == len(tensors) - 1:
            own = torch.cat(some)
            first = own.clone()
            dist.broadcast(first, 0)
            parts = own.ne(first).split([part.numel() for part in some])
            flags += [part.any() for part in parts]
            some, size = [], 0
    flags = parallel.sum_over_ranks(torch.stack(flags).float()).tolist()
    return [name for name, flag in zip(tensors, flags) if flag]


class Unpacked:
    """Makes values again from JSON and tensors that a checkpoint holds."""

    def __init__(self, what, saved, tensors, model):
        """what: in words, for errors; saved: agree's JSON; tensors: {name: Stored}, of this rank too."""
        self.what, self.saved, self.tensors = what, saved, tensors
        self.params = dict(model.named_parameters())
        self.any = next(model.parameters())
        self.shards = shards_of(model)
        self.made = {}  # {name: tensor}
        self.portable = True  # tensors that are no rows mean the same however the model is divided

    def unpack(self, node, like=None, there=None):
        """The value. like: the parameter that it belongs to; there: what is in its place, to be filled."""
        if isinstance(node, list):
            return self.unpack_items(node, list, like, there)
        if not isinstance(node, dict):
            return node
        for kind, made in SEQUENCES.items():
            if kind in node:
                return made(self.unpack_items(self.items(node[kind]), made, like, there))
        for kind, made in MAPPINGS.items():
            if kind in node:
                return self.unpack_pairs(self.items(node[kind]), made, like, there)
        if "float" in node:
            return float(self.text(node["float"]))
        if "parameter" in node:
            return self.param(node["parameter"])
        if "tensor" in node:
            return self.tensor(node, like, there)
        raise self.damaged(node)

    def unpack_items(self, nodes, made, like, there):
        found = []
        for i, node in enumerate(nodes):
            in_place = there[i] if type(there) is made and i < len(there) else None
            found.append(self.unpack(node, like, in_place))
        if made is list and type(there) is list:
            there[:] = found
            return there
        return found

    def unpack_pairs(self, pairs, made, like, there):
        there = there if type(there) is made else made()
        found = []
        for pair in pairs:
            if not isinstance(pair, list) or len(pair) != 2:
                raise self.damaged(pair)
            key = self.unpack(pair[0])
            if isinstance(key, (list, dict)) or torch.is_tensor(key):
                raise self.damaged(pair)
            found.append((key, self.unpack(pair[1], like, there.get(key))))
        there.clear()
        there.update(found)
        return there

    def tensor(self, node, like, there):
        name = self.text(node["tensor"])
        if name in self.made:
            return self.made[name]
        if name not in self.tensors:
            raise CheckpointError(f"{self.what}: {name} is absent from the checkpoint")
        stored = self.tensors[name]
        target = there
        if not torch.is_tensor(there):
            target = self.place(name, node, stored, like)
        elif (there.shape, there.dtype) != (stored.shape, stored.dtype):
            was, now = ([*tensor.shape, tensor.dtype] for tensor in (stored, there))
            raise CheckpointError(f"{self.what}: {name} is {was} in the checkpoint, now {now}")
        with torch.no_grad():
            if not stored.shape or not by_rows(target):
                local(target).copy_(stored[...])
            else:
                copy_into(target, stored)
        self.made[name] = target
        return target

    def place(self, name, node, stored, like):
        """A new tensor for a stored one, laid out as the one that was saved."""
        p = self.any if like is None else like
        device = "cpu" if node.get("cpu") else p.device
        options = dict(dtype=stored.dtype, device=device)
        if node.get("like"):
            if like is None or stored.shape != like.shape:
                now = None if like is None else tuple(like.shape)
                raise CheckpointError(f"{self.what}: {name} is {tuple(stored.shape)}, its parameter {now}")
            return torch.empty_like(like, requires_grad=False, **options)
        if "shape" in node:  # a rank's own
            if not self.portable and stored.shape.numel() > 1 and self.saved.get("shards") != self.shards:
                before = f"saved by a model among {self.saved.get('shards')} ranks"
                why = f"{self.what}: {name} {tuple(stored.shape)} has not the parameter's shape"
                raise CheckpointError(f"{why}; {before}, it can go on so alone, not among {self.shards}")
            return torch.empty(stored.shape, **options)
        if not isinstance(p, DTensor):
            return torch.empty(stored.shape, **options)
        places = p.placements if node.get("rows") else [Replicate()] * p.device_mesh.ndim
        return distributed(stored.shape, p.device_mesh, places, options)

    def param(self, name):
        if name not in self.params:
            raise CheckpointError(f"{self.what}: {name} is absent from the model")
        return self.params[name]

    def items(self, value):
        if not isinstance(value, list):
            raise self.damaged(value)
        return value

    def text(self, value):
        if not isinstance(value, str):
            raise self.damaged(value)
        return value

    def damaged(self, node):
        return CheckpointError(f"values.json is damaged: {json.dumps(node)[:60]} is no value of {self.what}")


def by_rows(tensor):
    return not isinstance(tensor, DTensor) or Shard(0) in tensor.placements


def distributed(shape, mesh, places, options):
    """A new DTensor of a global shape, in rows as torch.chunk divides them, or whole on each rank."""
    whole = torch.empty(shape, device="meta", dtype=options["dtype"])
    rows = shape[0] if shape else 0
    if Shard(0) in places:
        along = list(places).index(Shard(0))
        each = -(-rows // mesh.size(along))
        first = min(each * mesh.get_local_rank(along), rows)
        rows = min(first + each, rows) - first
        part = torch.empty((rows, *shape[1:]), **options)
    else:
        part = torch.empty(shape, **options)
    return DTensor.from_local(part, mesh, places, run_check=False, shape=whole.shape, stride=whole.stride())
