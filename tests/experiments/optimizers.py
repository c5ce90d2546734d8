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
OF_MUON = '    if name == "muon":\n        parts ='
VECTORS = '        "vector": dict(params=[], optimizer=beside, lr=cfg.lr, weight_decay=0.0),\n'
UPDATE = "        training.update(totals, norm)\n"
PAGE = (ROOT / "docs/experiment.md").read_text()
LION = re.search(r"```python\n(class Lion.*?)```", PAGE, re.S)[1] + "\n\n"  # the page's own text
# lists of tensors in states, None, a Python number and a text
SHAMPOO = '''class Shampoo(torch.optim.Optimizer):
    """https://arxiv.org/abs/1802.09568, with roots that are computed in every second step."""

    def __init__(self, params, lr, weight_decay=0.0, eps=1e-4):
        super().__init__(params, dict(lr=lr, weight_decay=weight_decay, eps=eps))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if len(state) == 0:
                    state["count"], state["kind"] = 0, "matrix" if p.dim() == 2 else "vector"
                    sizes = p.shape if p.dim() == 2 else p.shape[:1]
                    ones = [torch.eye(n, dtype=torch.float64) for n in sizes]
                    state["factors"] = [group["eps"] * one for one in ones]
                    state["roots"] = None
                state["count"] += 1
                g = p.grad.double()
                if state["kind"] == "matrix":
                    state["factors"][0] += g @ g.T
                    state["factors"][1] += g.T @ g
                else:
                    state["factors"][0] += torch.outer(g, g)
                if state["count"] % 2 == 1:
                    state["roots"] = tuple(self.root(factor) for factor in state["factors"])
                update = state["roots"][0] @ g
                if state["kind"] == "matrix":
                    update = update @ state["roots"][1]
                p.add_(update.to(p.dtype), alpha=-group["lr"])

    def root(self, factor):
        values, vectors = torch.linalg.eigh(factor)
        return vectors @ (values.clamp(min=1e-12) ** -0.25).diag() @ vectors.T


'''
KELLER = '''class KellerMuon(torch.optim.Optimizer):
    """https://kellerjordan.github.io/posts/muon, as its author's repository has it."""

    def __init__(self, params, lr, weight_decay=0.0, momentum=0.95):
        super().__init__(params, dict(lr=lr, weight_decay=weight_decay, momentum=momentum))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(p.grad)
                mean = state["momentum_buffer"]
                mean.lerp_(p.grad, 1 - group["momentum"])
                update = self.orthogonal(p.grad.lerp(mean, group["momentum"]))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(update, alpha=-group["lr"] * max(1, p.size(0) / p.size(1)) ** 0.5)

    def orthogonal(self, x):
        tall = x.size(0) > x.size(1)
        x = x.mT if tall else x
        x = x / (x.norm() + 1e-7)
        for _ in range(5):
            gram = x @ x.mT
            x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
        return x.mT if tall else x


'''
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


class Both:
    """Two optimizers in the plain loop."""

    def __init__(self, *each):
        self.each = each
        self.param_groups = sum((one.param_groups for one in each), [])
        self.state = {}

    def zero_grad(self):
        for one in self.each:
            one.zero_grad()

    def step(self):
        for one in self.each:
            one.step()
        self.state = {p: state for one in self.each for p, state in one.state.items()}


def vectors_apart(make):
    """AdamW, and an optimizer of all parameters that are no matrices."""

    def optimizer(model, cfg):
        import optim

        groups = optim.param_groups(model, cfg)
        own = [group for group in groups if all(p.dim() < 2 for p in group["params"])]
        others = [group for group in groups if group not in own]
        adamw = torch.optim.AdamW(others, betas=(cfg.beta1, cfg.beta2))
        return with_factors(Both(adamw, make(own, cfg)), cfg)

    return optimizer


def matrices_apart(make):
    """AdamW with the eps that it has beside Muon, and an optimizer of the blocks' matrices."""

    def optimizer(model, cfg):
        import optim

        groups = optim.param_groups(model, cfg)
        own = [group for group in groups if group["optimizer"] == "muon"]
        others = [group for group in groups if group["optimizer"] != "muon"]
        adamw = torch.optim.AdamW(others, betas=(cfg.beta1, cfg.beta2), eps=1e-10)
        return with_factors(Both(adamw, make(own, cfg)), cfg)

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
    optimizer(
        "SGD with momentum",
        "PyTorch's",
        "",
        "torch.optim.SGD(groups, lr=cfg.lr, momentum=0.9)",
        lambda groups, cfg: torch.optim.SGD(groups, lr=cfg.lr, momentum=0.9),
        EVERYWHERE,
        settings=dict(lr=0.1),
    ),
    optimizer(
        "Shampoo",
        "lists and tuples of float64 matrices, numbers and texts in its states",
        SHAMPOO,
        "Shampoo(groups, lr=cfg.lr)",
        lambda groups, cfg: made(SHAMPOO, "Shampoo")(groups, lr=cfg.lr),
        ROWS_ALONE,
        sample=None,
        settings=dict(lr=0.01),
    ),
    Patch(
        "Keller Jordan's Muon",
        "in place of ours, beside AdamW",
        {
            "optim.py": [
                (BUILD, KELLER + BUILD),
                (
                    OF_MUON,
                    '    if name == "muon":\n        return KellerMuon(groups, lr=cfg.lr)\n'
                    + OF_MUON,
                ),
            ]
        },
        EVERYWHERE,
        sample=None,
        settings=dict(optimizer="muon", lr=0.01),
        optimizer=matrices_apart(lambda groups, cfg: made(KELLER, "KellerMuon")(groups, lr=cfg.lr)),
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
        "two optimizers at once",
        "SGD for biases and norms, AdamW for the rest",
        {
            "optim.py": [
                (VECTORS, VECTORS.replace("optimizer=beside", 'optimizer="sgd"')),
                (
                    OF_MUON,
                    '    if name == "sgd":\n'
                    "        return torch.optim.SGD(groups, lr=cfg.lr, momentum=0.9)\n" + OF_MUON,
                ),
            ]
        },
        EVERYWHERE,
        sample=None,
        settings=dict(lr=0.01),
        optimizer=vectors_apart(
            lambda groups, cfg: torch.optim.SGD(groups, lr=cfg.lr, momentum=0.9)
        ),
    ),
    Patch(
        "a group with a rate of its own",
        "biases and norms at a third of the rate",
        {"optim.py": [(VECTORS, VECTORS.replace("lr=cfg.lr", "lr=cfg.lr / 3"))]},
        EVERYWHERE,
        sample=(modes.PLAIN,),
        settings=dict(lr=0.01),
        optimizer=of_groups(
            lambda groups, cfg: torch.optim.AdamW(groups, betas=(cfg.beta1, cfg.beta2))
        ),
    ),
    Patch(
        "an optimizer that cannot skip",
        "max_skipped_steps with an optimizer that does not know found_inf",
        {"optim.py": [(ADAMW, "    return torch.optim.SGD(groups, lr=cfg.lr, momentum=0.9)\n")]},
        (modes.DDP,),
        sample=(),
        settings=dict(max_skipped_steps=2),
        refused={"eager": "needs an optimizer that knows found_inf", modes.DDP: "knows found_inf"},
    ),
    Patch(
        "a parameter without an optimizer",
        "biases and norms are left out of the groups",
        {"optim.py": [(VECTORS, VECTORS), ('if group["params"]]\n', 'if group["params"]][:-1]\n')]},
        (),
        refused={"eager": "is in no group of the optimizer"},
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
        export="model.py has no blocks.0.mlp.up.weight",
        refused={modes.BLOCK: "remat=block: the buffer"},
        settings=dict(lr=0.01),
    ),
]
