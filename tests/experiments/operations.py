"""Patches of kernels.py: the operations, of which other modes have forms of their own."""

from experiments import patch as modes
from experiments.patch import OF_LAYERS, Patch

QUERIES = (
    "    grouped = q.size(1) != k.size(1)\n",
    "    q = q * 3\n    grouped = q.size(1) != k.size(1)\n",
)


PATCHES = [
    Patch(
        "larger queries",
        "three times the scores, at the top of attention",
        {"kernels.py": [QUERIES]},
        (*OF_LAYERS, modes.ATTENTION, modes.COMPILED, modes.FSDP, modes.RESUMED),
        sample=(modes.SAMPLED, modes.ATTENTION),
        cached=False,
    ),
]
