"""What must be the same on all ranks: settings, code and data.

Several nodes may have a copy each.
"""

import dataclasses
import hashlib
import json
import platform
from importlib import metadata
from pathlib import Path

from corpus.shards import sampled_digest
from run import source
from scale import parallel
from system.errors import UserError, warn

# settings that may differ by node: of data_dir the data is compared, of the others only whether
# there is a path
PLACES = ("out_dir", "init_from", "data_dir", "tokenizer", "hellaswag_file")
PACKAGES = ("torch", "numpy", "safetensors", "tiktoken", "tokenizers", "triton")


def settings(cfg):
    """Raises UserError unless all ranks have rank 0's settings and sources.

    Where they have other packages, it warns.

    cfg: from run.build.choose, before anything whose collectives depend on a setting.
    """
    own = dataclasses.asdict(cfg)
    del own["device"]
    own |= {name: "a path" for name in PLACES if own[name] is not None}
    if own["resume"] not in ("none", "auto"):
        own["resume"] = "a folder"
    facts = {name: f"{name}={value}" for name, value in own.items()}
    facts |= {name: f"{name} of SHA-256 {digest[:12]}" for name, digest in source.BEGAN.items()}
    refuse(facts)
    warn(difference({name: f"{name} {version}" for name, version in versions().items()}))


def data(cfg, loader, val_loaders):
    """Raises UserError unless all ranks' data has rank 0's `fingerprint`, where a loader has one.

    It also raises it where the loader's batches have other rows than batch_schedule needs.
    val_loaders: (weight, loader) of each folder.
    """
    ranks = parallel.rank_and_size()[1]
    rows = cfg.loader_rows(ranks)
    if rows < cfg.batch_size and getattr(loader, "B", None) != rows:
        what = f"batch_schedule={cfg.batch_schedule} has steps of {rows} rows a rank"
        why = f"which only a loader with batches of B={rows} rows gives; try --batch_size={rows}"
        raise UserError(f"{what}, {why}")
    loaders = [loader, *(val_loader for _, val_loader in val_loaders)]
    found = [getattr(loader, "fingerprint", None) for loader in loaders]
    own = f"data_dir={cfg.data_dir} whose splits have the fingerprints {', '.join(map(str, found))}"
    first, theirs = parallel.gather_objects((own, found))[0]
    refuse({"data": first if found == theirs else own})


def weights(folder):
    """Raises UserError unless all ranks have the same Hugging Face weights.

    Of a large file blocks spread over it are compared.
    """
    found = []
    for path in sorted(Path(folder).glob("*.safetensors")):
        found.append(f"{path.name} of {sampled_digest(path)[:12]}")
    refuse({"weights": ", ".join(found)})


def examples(found):
    """Raises UserError unless all ranks have the same HellaSwag examples: each may read a copy."""
    digest = hashlib.sha256(json.dumps(found).encode()).hexdigest()
    refuse({"hellaswag_file": f"HellaSwag examples of SHA-256 {digest[:12]}"})


def versions():
    """{"torch": "2.13.0", ...} of Python and of the packages that compute."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "that is absent"
    return found


def refuse(facts):
    """Raises UserError if the facts of a rank, {name: in words}, are not those of rank 0."""
    if found := difference(facts):
        raise UserError(f"{found}; start every rank with the same command, code and data")


def difference(facts):
    """In words, the first rank whose {name: fact in words} is not rank 0's, and how; else None."""
    of_ranks = parallel.gather_objects(facts)
    first = of_ranks[0]
    for rank, own in enumerate(of_ranks):
        pairs = []
        for name in first | own:
            here = own.get(name, f"no {name}")
            there = first.get(name, f"no {name}")
            if here != there:
                pairs.append(f"{here}, rank 0 has {there}")
        if pairs:
            more = f" ({len(pairs)} differences)" if len(pairs) > 3 else ""
            return f"rank {rank} has {'; it has '.join(pairs[:3])}{more}"
    return None
