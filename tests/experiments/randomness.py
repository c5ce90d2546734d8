"""Patches that draw numbers with torch, numpy and Python, each of which remat must replay."""

from experiments import patch as modes
from experiments.losses import BLOCK_CLASS, BLOCK_FORWARD
from experiments.patch import Patch

IMPORTS = "import math\nfrom dataclasses import fields, replace\n"
WITH_RANDOM = "import math\nimport random\nfrom dataclasses import fields, replace\n"
WITH_NUMPY = "import torch.nn.functional as F\n\nimport kernels\n"
NUMPY = "import numpy as np\nimport torch.nn.functional as F\n\nimport kernels\n"
# Each rank, and each division into micro-steps, draws other numbers.
RANDOM = (modes.RESUMED, modes.BLOCK, modes.SELECTIVE, modes.SAMPLED)
RANDOM_IN_BLOCK = (*RANDOM, modes.ATTENTION)
CORE = "    core = staticmethod(kernels.attention)  # tokens mix here alone\n"
ACTIVATION = '    return MLP(cfg, {"gelu": kernels.gelu, "relu2": kernels.relu2}[cfg.mlp])\n'

PATCHES = [
    Patch(
        "masked channels, numpy",
        "a block's input loses some channels, drawn with numpy",
        {
            "model.py": [
                (WITH_NUMPY, NUMPY),
                (
                    BLOCK_FORWARD,
                    BLOCK_FORWARD.replace(
                        "        x = x + self.dropout(self.attn",
                        "        if self.training:\n"
                        "            kept = torch.from_numpy(np.random.rand(x.size(-1)) > 0.1)\n"
                        "            x = x * kept.to(x.device)\n"
                        "        x = x + self.dropout(self.attn",
                    ),
                ),
            ]
        },
        RANDOM_IN_BLOCK,
        sample=(modes.BLOCK, modes.RESUMED),
    ),
    Patch(
        "dropped layers, Python",
        "a block is skipped with a probability of a fifth, as Python's random has it",
        {
            "model.py": [
                (IMPORTS, WITH_RANDOM),
                (
                    BLOCK_FORWARD,
                    BLOCK_FORWARD.replace(
                        "        x = x + self.dropout(self.attn",
                        "        if self.training and random.random() < 0.2:\n"
                        "            return x\n"
                        "        x = x + self.dropout(self.attn",
                    ),
                ),
            ]
        },
        RANDOM_IN_BLOCK,
    ),
    Patch(
        "a random activation",
        "an activation whose slope is drawn with torch, numpy and Python, inside of mlp.core",
        {
            "model.py": [
                (IMPORTS, WITH_RANDOM),
                (WITH_NUMPY, NUMPY),
                (
                    BLOCK_CLASS,
                    "def noisy(x):\n"
                    "    slope = random.random() + np.random.rand() + torch.rand((), "
                    "device=x.device)\n"
                    "    return F.leaky_relu(x) * slope\n\n\n" + BLOCK_CLASS,
                ),
                (ACTIVATION, "    return MLP(cfg, noisy)\n"),
            ]
        },
        (modes.RESUMED, modes.BLOCK, modes.SELECTIVE, modes.ATTENTION),
        sample=(modes.SELECTIVE, modes.ATTENTION),
    ),
]
