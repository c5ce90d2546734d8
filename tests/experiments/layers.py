"""Patches of the architecture: blocks, attention, MLPs, and the order in which blocks run."""

from experiments import patch as modes
from experiments.losses import BLOCK_FORWARD, HAS_MORE, HEAD, LOOP
from experiments.patch import OF_LAYERS, Patch

EXPORTED = (*OF_LAYERS, modes.EXPORTED)  # which new parameters let it refuse


def block(*lines):
    """An edit of a block's whole forward."""
    text = "".join(f"        {line}\n" for line in lines)
    return (BLOCK_FORWARD, f"    def forward(self, x, idx, positions):\n{text}")


PATCHES = [
    Patch(
        "attention and MLP in parallel",
        "both read norm_1; norm_2 is left without a use",
        {
            "model.py": [
                block(
                    "h = self.norm_1(x)",
                    "return x + self.dropout(self.attn(h, idx, positions)) + "
                    "self.dropout(self.mlp(h))",
                )
            ]
        },
        (*OF_LAYERS, modes.COMPILED, modes.DDP),
        sample=(modes.COMPILED,),
    ),
    Patch(
        "a second list of blocks",
        "two more blocks, in a list of their own, after the others",
        {
            "model.py": [
                (
                    HEAD,
                    HEAD
                    + "        more = [Block(cfg, rope, layer) for layer in range(2)]\n"
                    + "        self.late = nn.ModuleList(more)\n",
                ),
                (
                    LOOP,
                    LOOP.replace(
                        "self.layers", "[*self.layers, *zip([Unchanged()] * 2, self.late)]"
                    ),
                ),
            ]
        },
        (*EXPORTED, modes.COMPILED, modes.RESUMED, modes.DDP, modes.FSDP),
        sample=(modes.FSDP,),
        export=HAS_MORE,
    ),
]
