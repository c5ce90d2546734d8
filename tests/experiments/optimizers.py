"""Patches of the optimizer, of what a run keeps beside the weights, and of which weights it trains.

The optimizers are written as a user writes them; the plain loop executes the same text, so that
what is compared is how the run calls them, saves their states and makes them again.
"""

import importlib
import re

import torch

from experiments import patch as modes
from experiments.inside import ROOT
from experiments.losses import BLOCK_CLASS, MAKE_MLP
from experiments.patch import Patch
from scale.shards import local

BUILD = "def build(name, groups, model, cfg):\n"
ADAMW = "    return torch.optim.AdamW(groups, **options, fused=fused)\n"
UPDATE = "        training.update(totals, norm)\n"
PAGE = (ROOT / "docs/experiment.md").read_text()
LION = re.search(r"```python\n(class Lion.*?)```", PAGE, re.S)[1] + "\n\n"  # the page's own text
ROUTED = '''class Routed(nn.Module):
    """Four MLPs; a router picks one for each token, and its bias evens out how often."""

    def __init__(self, cfg, activation):
        super().__init__()
        self.router = Linear(cfg.n_embd, 4, bias=False)
        self.balance = Balance()
        self.experts = nn.ModuleList(MLP(cfg, activation) for _ in range(4))

    def forward(self, x):
        scores = torch.sigmoid(self.router(x))
        chosen = F.one_hot((scores + self.balance.bias).argmax(-1), 4)
        if self.training:
            self.balance.counts += chosen.sum((0, 1))
        parts = torch.stack([expert(x) for expert in self.experts], -1)
        return (parts * (chosen * scores).unsqueeze(-2)).sum(-1)


class Balance(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("bias", torch.empty(4))
        self.register_buffer("counts", torch.empty(4, dtype=torch.long))

    def reset_parameters(self):
        nn.init.zeros_(self.bias)
        nn.init.zeros_(self.counts)


'''
STACK = '''class Stack(nn.Module):
    """Adds three products with square matrices."""

    def __init__(self, cfg):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3, cfg.n_embd, cfg.n_embd))

    def reset_parameters(self):
        nn.init.zeros_(self.weight)

    def forward(self, x):
        return x + sum(F.silu(x @ matrix) for matrix in self.weight.type_as(x))


'''
BALANCED = """        for name, module in state.model.named_modules():
            if name.endswith("balance"):
                counts = parallel.sum_over_ranks(module.counts.float())
                module.bias += 0.05 * (counts.mean() - counts).sign()
"""
RESUMED = (modes.RESUMED, modes.DDP, modes.RESUMED_DDP)
EVERYWHERE = (
    modes.PLAIN,
    modes.MASKED,
    modes.ACCUMULATED,
    *RESUMED,
    modes.FSDP,
    modes.RESUMED_FSDP,
)
READERS = (modes.SAMPLED, modes.EXPORTED)
# for an optimizer whose step does not run on FSDP2's rows
ROWS_ALONE = (modes.PLAIN, modes.MASKED, modes.ACCUMULATED, *RESUMED)


def made(text, name):
    """The class of this name that a text defines."""
    namespace = {"torch": torch, "local": local}
    exec(text, namespace)
    return namespace[name]


def of_groups(make):
    """The `optimizer` of a Patch, of all groups; factors as make_optimizer sets them."""

    def optimizer(model, cfg):
        import optim

        return with_factors(make(optim.param_groups(model, cfg), cfg), cfg)

    return optimizer


def with_factors(optimizer, cfg):
    for group in optimizer.param_groups:
        group["factor"] = group["lr"] / cfg.lr
    return optimizer


def optimizer(name, what, text, call, make, in_modes, **more):
    """A patch with another optimizer in AdamW's place.

    text: its class; call: what `build` returns.
    """
    edits = [(BUILD, text + BUILD)] if text else []
    edits.append((ADAMW, f"    return {call}\n"))
    return Patch(name, what, {"optim.py": edits}, in_modes, optimizer=of_groups(make), **more)


PATCHES = [
    optimizer(
        "Lion",
        "the worked example of docs/experiment.md; its state is made in the first step",
        LION,
        "Lion(groups, cfg.lr)",
        lambda groups, cfg: made(LION, "Lion")(groups, cfg.lr),
        EVERYWHERE,
        sample=(modes.PLAIN, modes.RESUMED_FSDP),
        # no biases: the gradients of k's are rounding, and so is their sign
        settings=dict(lr=1e-3, bias=False),
    ),
    optimizer(
        "Adafactor",
        "PyTorch's, whose states have not the shape of the parameter",
        "",
        "torch.optim.Adafactor(groups, lr=cfg.lr)",
        lambda groups, cfg: torch.optim.Adafactor(groups, lr=cfg.lr),
        ROWS_ALONE,
        sample=(modes.PLAIN, modes.RESUMED),
        settings=dict(lr=0.01),
    ),
    Patch(
        "a stack of matrices",
        "each of which is one for Muon, as are the others of the block",
        {
            "model.py": [
                (BLOCK_CLASS, STACK + BLOCK_CLASS),
                (MAKE_MLP, MAKE_MLP + "        self.stack = Stack(cfg)\n"),
                (
                    "        x = x + self.dropout(self.mlp(self.norm_2(x)))\n",
                    "        x = x + self.dropout(self.mlp(self.norm_2(self.stack(x))))\n",
                ),
            ]
        },
        (*EVERYWHERE, modes.BLOCK),
        sample=(modes.PLAIN,),
        settings=dict(optimizer="muon", lr=0.01),
        optimizer=lambda model, cfg: importlib.import_module("optim").make_optimizer(model, cfg),
    ),
    Patch(
        "a router's bias",
        "changed without a gradient, from counts that the forward keeps in a buffer",
        {
            "model.py": [
                (BLOCK_CLASS, ROUTED + BLOCK_CLASS),
                (MAKE_MLP, MAKE_MLP + "        self.mlp = Routed(cfg, kernels.gelu)\n"),
            ],
            "train.py": [(UPDATE, UPDATE + BALANCED)],
        },
        (modes.ACCUMULATED, *RESUMED, modes.FSDP, modes.RESUMED_FSDP, modes.BLOCK, *READERS),
        sample=(modes.RESUMED,),
        export="model.py has other parameters than a gpt2",
        refused={modes.BLOCK: "remat=block: the buffer"},
        settings=dict(lr=0.01),
    ),
]
