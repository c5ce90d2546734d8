"""run/prove.py: an edit holds in the modes of a run, or the run ends in one line that names one.

Each edit is made in the process of a rank, which then proves a narrow copy of it.
"""

import contextlib
import io

import pytest
import ranks
import torch
import torch.nn.functional as F
from conftest import flags, write_manifest, write_shard

SEPARATOR = 256


def proved(edit, words):
    """(the row of the summary or what the line says, warnings) of a rank."""
    import train
    from configurator import UserError, configure
    from run.build import make_loader
    from run.prove import prove
    from scale import parallel
    from settings import Config

    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        EDITS[edit]() if edit else None
        cfg = configure(Config, list(words))
        world = parallel.join(cfg)
        loader = make_loader(cfg, world)
        before = loader.state_dict()
        try:
            rows = prove(train.Training, cfg, world, loader, loader.eot)
            assert loader.state_dict() == before
            found = rows[0][1]
        except UserError as error:
            rows = []
            found = f"refused: {error}"
    return found, said.getvalue(), rows


EDITS = {}


def edit(function):
    EDITS[function.__name__] = function
    return function


def around(owner, name, make):
    """Replaces a method by make(the method)."""
    setattr(owner, name, make(getattr(owner, name)))


def block_forward(change):
    """Changes what a block returns: change(block, x) -> x."""
    import model as models

    def make(forward):
        def changed(self, x, idx, positions):
            return change(self, forward(self, x, idx, positions))

        return changed

    around(models.Block, "forward", make)


def gpt_forward(change):
    """Changes a loss: change(model, idx, targets, loss, count) -> (loss, count)."""
    import model as models

    def make(forward):
        def changed(self, idx, targets, positions=None, reduction="mean"):
            loss, count, extras = forward(self, idx, targets, positions, reduction)
            return *change(self, idx, targets, loss, count), extras

        return changed

    around(models.GPT, "forward", make)


def shifted(x):
    return F.pad(x, (0, 0, 1, 0))[:, :-1]


@edit
def token_shift():
    block_forward(lambda block, x: x + 0.5 * shifted(x))
