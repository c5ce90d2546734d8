"""What must be the same on all ranks: settings, code and data.

Several nodes may have a copy each.
"""

import dataclasses
from pathlib import Path

import torch

from corpus.shards import sampled_digest
from run import source
from scale import parallel
from system.errors import UserError, listed

# settings that may differ by node: of data_dir the data is compared, of the others only whether
# there is a path
PLACES = ("out_dir", "init_from", "data_dir", "tokenizer", "hellaswag_file")


def same_on_all_ranks(facts):
    """Raises UserError if the facts of a rank, {name: value or digest}, are not those of rank 0."""
    if found := difference(facts):
        raise UserError(f"{found}; start every rank with the same command, code and data")


def difference(facts):
    """In words, the first rank whose facts are not those of rank 0, and how; else None."""
    of_ranks = parallel.gather_objects({name: str(value) for name, value in facts.items()})
    first = of_ranks[0]
    for rank, own in enumerate(of_ranks):
        found = []
        for name in first | own:
            here = own.get(name)  # None: absent
            there = first.get(name)
            if here != there:
                found.append(f"{name}={here!s:.40} instead of {there!s:.40}")
        if found:
            return f"rank {rank} has {listed(found)}, unlike rank 0"
    return None


def settings(cfg):
    """Raises UserError unless all ranks have rank 0's settings, sources and PyTorch.

    cfg: from run.build.choose, before anything whose collectives depend on a setting.
    """
    own = dataclasses.asdict(cfg)
    del own["device"]
    for name in PLACES:
        own[name] = own[name] is not None
    same_on_all_ranks(own | source.BEGAN | {"torch": torch.__version__})


def data(loader, val_loaders):
    """Raises UserError unless all ranks' data has rank 0's `fingerprint`, where a loader has one.

    val_loaders: (weight, loader) of each folder.
    """
    facts = {"training data": identity(loader)}
    for i, (_, val_loader) in enumerate(val_loaders):
        facts[f"validation data {i}"] = identity(val_loader)
    same_on_all_ranks(facts)


def identity(loader):
    return f"{getattr(loader, 'fingerprint', None)}, eot {getattr(loader, 'eot', None)}"


def weights(folder):
    """Raises UserError unless all ranks have the same Hugging Face weights.

    Of a large file blocks spread over it are compared.
    """
    paths = sorted(Path(folder).glob("*.safetensors"))
    same_on_all_ranks({path.name: sampled_digest(path) for path in paths})
