"""What a patch is: text replaced in the sources, the modes it is run in, and what must come out."""

import dataclasses
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

# In one process. All but the last three are a run of train.py each.
MASKED = "masked"  # on shards with answer masks
ACCUMULATED = "accumulated"  # likewise, with other micro-steps
RESUMED = "resumed"  # from the middle on, which must be bitwise
BLOCK, SELECTIVE, ATTENTION = "block", "selective", "attention"  # --remat
COMPILED = "compiled"  # torch.compile's graphs, run by ATen's operators
PLAIN = "plain"  # a plain loop over whole batches, see plain.py
SAMPLED = "sampled"  # with and without a KV cache
EXPORTED = "exported"  # to Hugging Face
# Over two ranks.
DDP = "ddp"  # on the masked shards, where the ranks have different numbers of targets
FSDP = "fsdp"
CONTEXT = "context"  # FSDP2 and context_parallel=2
RESUMED_DDP, RESUMED_FSDP = "resumed ddp", "resumed fsdp"  # bitwise as DDP and FSDP go on
RANKS = (DDP, FSDP, CONTEXT, RESUMED_DDP, RESUMED_FSDP)
UNPATCHED = "the folder of a run without the patch"  # as a setting's value


def own_loss(model, x, y):
    """(loss, extras) of the model's own forward on the whole batch of a step."""
    loss, _, extras = model(x, y)
    return loss, extras


@dataclasses.dataclass
class Patch:
    """An experiment: what a user changes in which files, and what must come out.

    edits: (old text, new text); the old text, the anchor, is in one file, exactly once.
    file: of experiments/, applied before them; adds: settings that the sources have by it alone.
    modes: in which it must equal its own plain run in one process, or be refused there.
    sample: those of them that ./test.sh runs, (): one plain run; None: it leaves it to --all.
    refused: {mode: words of the one line that ends the run there}; "eager": it never runs.
    """

    name: str
    what: str
    edits: list
    modes: tuple
    sample: tuple | None = None
    refused: dict = dataclasses.field(default_factory=dict)
    settings: dict = dataclasses.field(default_factory=dict)
    file: Path | None = None
    adds: dict = dataclasses.field(default_factory=dict)
    # what the plain loop of plain.py does otherwise than for the sources as they are
    loss: Callable = own_loss  # (model, x, y) -> (loss, {extra: value}) of a step's whole batch
    make_loss: Callable | None = None  # cfg -> such a function, in place of `loss`
    rows: Callable = lambda step: 8  # of a step
    length: Callable = lambda step: 32  # of the rows of a step
    lr: Callable | None = None  # of a step
    optimizer: Callable | None = None  # (model, cfg) -> one, with its groups' factors if any
    data: Callable | None = None  # (first row, rows) -> (x, y)
    also: Callable | None = None  # (lines of log.jsonl) -> what is wrong with them, or None
    limits: tuple | None = None  # relative, on losses and moments, if steps magnify rounding
    unchanged: bool = False  # it has no effect on losses and gradients
    cached: bool = True  # samples come with a KV cache; False: a warning says that they do not
    export: str = ""  # words of the one line of a refusal


class MissingAnchor(Exception):
    """The sources were edited where a patch would be applied."""


def apply(patch, folder):
    """Applies a patch to a copy of the sources. Raises MissingAnchor."""
    if patch.file:
        apply_file(patch.file, folder)
    texts = {path: path.read_text() for path in Path(folder).glob("*.py")}
    for old, new in patch.edits:
        counts = {path: text.count(old) for path, text in texts.items() if old in text}
        if [*counts.values()] != [1]:
            found = {path.name: n for path, n in counts.items()}
            raise MissingAnchor(f"{patch.name}: not once in one file but {found}: {old.strip()!r}")
        (path,) = counts
        texts[path] = texts[path].replace(old, new)
        path.write_text(texts[path])


def apply_file(file, folder):
    """`git apply` of a file in a folder that need not be a repository. Raises MissingAnchor."""
    if not shutil.which("git"):
        raise MissingAnchor(f"no git, which applies {file.name}")
    outside = os.environ | {"GIT_CEILING_DIRECTORIES": str(Path(folder).resolve().parent)}
    done = subprocess.run(
        ["git", "apply", file], cwd=folder, env=outside, capture_output=True, text=True
    )
    if done.returncode:
        raise MissingAnchor(f"{file.name} does not apply to these sources: {done.stderr.strip()}")
