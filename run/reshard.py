"""Resharding: a checkpoint that any number of ranks saved is read by rows on any other number.

Of a sharded model each rank writes its rows into files of its own, whose headers say which rows of
how many. open_merged makes one tensor of them, and load_resharded reads this rank's rows of it.
"""

import json
import operator
from pathlib import Path

import torch
from safetensors import safe_open

from corpus import as_user_error
from run.states import CheckpointError
from scale.shards import copy_into
from system import files

STATE_FORM = {  # for files.read_json
    "step": files.count,
    "config?": {},
    "loader?": {},
    "scaler?": {},
    "tokens?": files.count,
    "seconds?": files.number,
    "world_size?": files.count,
    "evaluated?": (True, False),
    "wandb_id?": (files.text, None),
    "val_loss?": (files.number, None),  # a State's score
}
GROUP_FORM = {  # of each group in values.json
    "ranks": files.count,
    "shards": files.count,
    "trees": [lambda tree: True],
    "of_each_rank": [files.text],
}
# ends of names of tensors with a row per token id
TABLES = ("wte.weight", "head.weight", "values.weight")


class MergedTensor:
    """A tensor whose rows lie in one or more files; nothing is read before it is asked for.

    merged[a:b] reads rows a to b to the CPU, merged[...] all.
    """

    def __init__(self, name, parts, rows=None):
        """parts: [(first row, slice of safetensors)].

        rows: how many all parts are to hold; None: any number.
        """
        self.parts = sorted(parts, key=operator.itemgetter(0))
        end = 0
        complete = True
        for first, part in self.parts:
            complete = complete and first == end
            end = first + (part.get_shape() or [0])[0]
        if not complete or rows not in (None, end):
            expected = end if rows is None else rows
            raise CheckpointError(
                f"{name}: not each of {expected} rows is there once; is a rank's file gone?"
            )
        _, part = self.parts[0]
        shape = part.get_shape()
        if shape:
            self.shape = torch.Size([end, *shape[1:]])
            self.dtype = part[:0].dtype
        else:
            self.shape = torch.Size()
            self.dtype = part[...].dtype

    def __getitem__(self, rows):
        if rows is ... and len(self.parts) == 1:
            return self.parts[0][1][...]
        if rows is ...:
            rows = slice(0, self.shape[0])
        pieces = []
        for first, part in self.parts:
            begin = max(rows.start - first, 0)
            end = min(rows.stop - first, part.get_shape()[0])
            if begin < end:
                pieces.append(part[begin:end])
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def open_merged(folder):
    """({group: {name: MergedTensor}}, state) of a checkpoint, the files of its ranks merged.

    A group is a file, or a file of each rank. state: of state.json, and as "values" that of
    values.json, which older checkpoints lack.
    """
    parts = {}  # {(group, name): (parts of a MergedTensor, its rows)}
    for path in sorted(Path(folder).glob("*.safetensors")):
        group = path.name.partition(".")[0]
        with as_user_error(f"{path} is damaged or not safetensors", CheckpointError):
            file = safe_open(path, "pt")
            shards = json.loads((file.metadata() or {}).get("shards", "{}"))
            for name in file.keys():
                first, rows = shards.get(name, (0, None))
                found, _ = parts.setdefault((group, name), ([], rows))
                found.append((first, file.get_slice(name)))
    tensors = {}
    for (group, name), part in parts.items():
        tensors.setdefault(group, {})[name] = MergedTensor(f"{folder}: {name}", *part)
    state = read_state_json(folder)
    values = Path(folder) / "values.json"
    if values.exists():
        form = dict.fromkeys(["optimizer?", "buffers?", "own?"], GROUP_FORM)
        state["values"] = files.read_json(values, CheckpointError, form)
    return tensors, state


def with_prefix(tensors, prefix):
    """Those whose names begin so, by the rest of their names."""
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}


def read_state_json(folder):
    """state.json of a checkpoint; {} where there is none.

    Raises CheckpointError if it is damaged.
    """
    path = Path(folder) / "state.json"
    return files.read_json(path, CheckpointError, STATE_FORM) if path.exists() else {}


def persistent_buffers(model):
    """{name: tensor} of the buffers that a checkpoint holds."""
    held = model.state_dict(keep_vars=True)
    return {name: b for name, b in model.named_buffers(remove_duplicate=False) if name in held}


def check_model_tensors(model, tensors, may_lack=()):
    """Raises CheckpointError unless {name: tensor or MergedTensor} fit the model.

    They are of its parameters and its persistent buffers; the number of padding rows may be
    another. may_lack: names of which there may be none.
    """
    own = dict(model.named_parameters()) | persistent_buffers(model)
    wrong = []
    for name in sorted(own.keys() - set(may_lack) | tensors.keys()):
        found = tuple(tensors[name].shape) if name in tensors else "absent"
        expected = tuple(own[name].shape) if name in own else "absent"
        fits = found == expected
        if name.endswith(TABLES) and found[1:] == expected[1:]:
            fits = min(found[0], expected[0]) >= model.cfg.vocab_size
        if not fits:
            wrong.append(f"{name}: {found}, expected {expected}")
    if wrong:
        raise CheckpointError(
            f"weights do not fit the model: {'; '.join(wrong[:4])} ({len(wrong)} in all)"
        )


def load_resharded(model, tensors, may_lack=()):
    """Copies {name: tensor or MergedTensor} into a model, on each rank the rows that it holds.

    Padding rows that they lack are zeros. may_lack: names of which there may be no tensor; those
    keep their values. Returns the names that did.
    """
    kept = set(may_lack) - tensors.keys()
    check_model_tensors(model, tensors, kept)
    for name, tensor in [*model.named_parameters(), *persistent_buffers(model).items()]:
        if name not in kept:
            copy_into(tensor, tensors[name])
    return sorted(kept)
