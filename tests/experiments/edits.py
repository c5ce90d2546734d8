"""Small edits of the sources for what only a run can show: its loop, files, ranks and samples.

What is computed in each mode is proved of many more edits in test_prove.py, test_edits.py and
test_activation_checkpointing.py.
"""

import importlib
import re

import torch

from experiments import patch as modes
from experiments.inside import ROOT
from experiments.patch import Patch
from scale.shards import local

# -- anchors: lines of model.py, optim.py and train.py

FORWARD = """        loss, count = self.head(x, targets, reduction)
        return loss, count, {}
"""
HEAD = "        self.head = Head(cfg)\n"
LAYERS = "        for mix, block in self.layers:\n"
BLOCKS = (
    "        self.blocks = nn.ModuleList(Block(cfg, rope, layer) for layer in range(cfg.n_layer))\n"
)
BLOCK_CLASS = "class Block(nn.Module):\n"
MAKE_MLP = "        self.norm_2, self.mlp = make_norm(cfg), make_mlp(cfg)\n"
MLP_CALL = "        x = x + self.dropout(self.mlp(self.norm_2(x)))\n"
BUILD = "def build(name, groups, model, cfg):\n"
ADAMW = "    return torch.optim.AdamW(groups, **options, fused=True)\n"
LOADER = "    loader = make_loader(cfg, world)\n"
STATE_CLASS = "@dataclasses.dataclass\nclass State:\n"
STATE = "    state = training.state\n"
CLIP = "        norm = training.normalize_and_clip(totals)\n"
UPDATE = "        training.update(totals, norm)\n"

# -- what the edits write there

MEAN = """        loss = F.cross_entropy(self.head.logits(x).flatten(0, 1), targets.flatten())
        return loss, (targets >= 0).sum(), {}
"""
EVEN_OR_ODD = """        loss, count = self.head(x, targets, reduction)
        self.calls = getattr(self, "calls", 0) + 1
        return loss, count, {"even" if self.calls % 2 == 0 else "odd": loss}
"""
SIZES = """
    def sizes(self):
        return sum(block.size for block in self.blocks) * self.training
"""
ALL_LAYERS = "        for mix, block in [*self.layers, *zip([Unchanged()] * 2, self.late)]:\n"
LATE = "        self.late = nn.ModuleList(Block(cfg, rope, layer) for layer in (0, 1))\n"
GRU = "        self.gru = nn.GRU(cfg.n_embd, cfg.n_embd, batch_first=True)\n"
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


class Rare(nn.Module):
    """Sixteen MLPs, of which most have no token of a step."""

    def __init__(self, cfg):
        super().__init__()
        self.experts = nn.ModuleList(make_mlp(cfg) for _ in range(16))

    def forward(self, x):
        chosen = (x[..., 0].detach() * 8).long().clamp(-8, 7) + 8
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            if (chosen == number).any():
                y[chosen == number] = expert(x[chosen == number])
        return y


class Balance(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("bias", torch.empty(4))
        self.register_buffer("counts", torch.empty(4, dtype=torch.long))

    def reset_parameters(self):
        nn.init.zeros_(self.bias)
        nn.init.zeros_(self.counts)


'''
BALANCED = """        for name, module in state.model.named_modules():
            if name.endswith("balance"):
                counts = parallel.sum_over_ranks(module.counts.float())
                module.bias += 0.05 * (counts.mean() - counts).sign()
"""
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
GROKFAST = """        slow = state.own.setdefault("slow", {})
        for name, p in state.model.named_parameters():
            if name not in slow:
                slow[name] = torch.zeros_like(p)
            slow[name].lerp_(p.grad, 0.1)
            p.grad.add_(slow[name])
"""
TASK = '''class Reversal:
    """Rows made on the fly: 16 random ids, then backwards; row i is the same on any rank."""

    def __init__(self, cfg, world):
        self.B, self.rank, self.world, self.rows = cfg.batch_size, world.rank, world.size, 0

    def next(self):
        first = self.rows + self.rank * self.B
        rows = [self.row(i) for i in range(first, first + self.B)]
        self.rows += self.world * self.B
        batch = torch.stack(rows)
        x, y = batch[:, :-1], batch[:, 1:].clone()
        y[:, :16] = -100  # only the answer counts
        return x, y

    def row(self, i):
        ids = torch.randint(0, 250, (16,), generator=torch.Generator().manual_seed(i))
        return torch.cat([ids, torch.tensor([256]), ids.flip(0)])

    def state_dict(self):
        return {"rows": self.rows}

    def load_state_dict(self, state):
        self.rows = state["rows"]

    def close(self):
        pass


'''
PAGE = (ROOT / "docs/experiment.md").read_text()
LION = re.search(r"```python\n(class Lion.*?)```", PAGE, re.S)[1] + "\n\n"  # the page's own text

# -- what must come out


def mean(values, y):
    """The mean of (B, T) values over the targets that count."""
    return values[y >= 0].sum() / (y >= 0).sum()


def each(model, x, y):
    """(B, T) losses of the tokens, 0 where a target is -100."""
    log_p = model.logits(x).log_softmax(-1)
    return -log_p.gather(-1, y.clamp(min=0).unsqueeze(-1)).squeeze(-1) * (y >= 0)


def usual(model, x, y):
    return mean(each(model, x, y), y), {}


def after_separator(model, x, y):
    return usual(model, x, y.masked_fill(x == 256, -100))


def reversal(first, rows):
    """The rows of TASK, written once more."""
    made = []
    for i in range(first, first + rows):
        ids = torch.randint(0, 250, (16,), generator=torch.Generator().manual_seed(i)).tolist()
        made.append([*ids, 256, *ids[::-1]])
    x = torch.tensor(made)[:, :-1]
    y = torch.tensor(made)[:, 1:]
    y[:, :16] = -100
    return x, y


def lion(model, cfg):
    """The optimizer of a Patch; its groups have factors as make_optimizer sets them."""
    namespace = {"torch": torch, "local": local}
    exec(LION, namespace)
    optimizer = namespace["Lion"](importlib.import_module("optim").param_groups(model, cfg), cfg.lr)
    for group in optimizer.param_groups:
        group["factor"] = group["lr"] / cfg.lr
    return optimizer


def own_optimizer(model, cfg):
    return importlib.import_module("optim").make_optimizer(model, cfg)


HAS_MORE = "model.py has other parameters than a gpt2"
UNPATCHED = Patch(
    "no patch",
    "what the others are compared with; its anchor is the usual loss",
    [(FORWARD, FORWARD)],
    (modes.PLAIN, modes.MASKED, modes.ACCUMULATED, modes.EXPORTED, modes.DDP),
    sample=(modes.PLAIN, modes.DDP),
    loss=usual,
    unchanged=True,
)
PATCHES = [
    UNPATCHED,
    Patch(
        "a mean of PyTorch's",
        "the forward ignores `reduction`: F.cross_entropy's mean, of a count in tokens",
        [(FORWARD, MEAN)],
        (modes.PLAIN, modes.MASKED, modes.ACCUMULATED, modes.CONTEXT),
        sample=(modes.PLAIN, modes.MASKED, modes.ACCUMULATED),
        loss=usual,
        unchanged=True,
    ),
    Patch(
        "no loss after a separator",
        "what follows a document's separator is no target",
        [(FORWARD, "        targets = targets.masked_fill(idx == 256, -100)\n" + FORWARD)],
        (modes.PLAIN, modes.MASKED, modes.ACCUMULATED, modes.DDP, modes.CONTEXT),
        sample=(modes.PLAIN, modes.MASKED),
        loss=after_separator,
    ),
    Patch(
        "extras that change",
        "the forward returns another extra every second time",
        [(FORWARD, EVEN_OR_ODD)],
        (),
        sample=(),
        refused={"eager": "GPT.forward returned the extras"},
    ),
    Patch(
        "a second list of blocks",
        "two more blocks, in a list of their own, after the others",
        [(HEAD, HEAD + LATE), (LAYERS, ALL_LAYERS)],
        (modes.BLOCK, modes.SAMPLED, modes.CONTEXT),
        sample=(modes.SAMPLED,),
    ),
    Patch(
        "one block for all layers",
        "as ALBERT's: the list has one block three times",
        [(BLOCKS, "        self.blocks = nn.ModuleList([Block(cfg, rope, 0)] * 3)\n")],
        (modes.ATTENTION, modes.SAMPLED, modes.FSDP, modes.RESUMED_FSDP),
        sample=(modes.ATTENTION, modes.FSDP),
        settings=dict(n_layer=3),
    ),
    Patch(
        "one weight in two blocks",
        "shared in __init__, by modules that FSDP2 gathers at different times",
        [(HEAD, HEAD + "        self.blocks[1].mlp.up.weight = self.blocks[0].mlp.up.weight\n")],
        (modes.PLAIN, modes.DDP, modes.FSDP),
        sample=(modes.FSDP,),
        refused={modes.FSDP: "blocks.1.mlp.up.weight is shared by modules"},
    ),
    Patch(
        "a GRU in each block",
        "PyTorch's, which lists its own weights in an attribute",
        [(MAKE_MLP, MAKE_MLP + GRU), (MLP_CALL, MLP_CALL + "        x = x + self.gru(x)[0]\n")],
        (modes.FSDP,),
        sample=(modes.FSDP,),
    ),
    Patch(
        "a loss in an attribute",
        "of a block's output, which GPT.forward adds up: it is read after it is set",
        [
            (MAKE_MLP, MAKE_MLP + "        self.size = None\n"),
            (MLP_CALL, MLP_CALL + "        self.size = x.square().mean()\n"),
            (FORWARD, FORWARD.replace("return loss, ", "return loss + self.sizes(), ") + SIZES),
        ],
        (modes.BLOCK, modes.COMPILED, modes.FSDP),
        sample=(modes.BLOCK,),
    ),
    Patch(
        "a parameter frozen in train.py",
        "after DDP was told which gradients to wait for",
        [(STATE, STATE + "    state.model.wpe.weight.requires_grad_(False)\n")],
        (modes.DDP,),
        sample=(modes.DDP,),
        refused={modes.DDP: "requires_grad of wpe.weight is False, and was True"},
    ),
    Patch(
        "a filter of gradients made in the first step",
        "in State.own, which is empty when a resumed run begins",
        [(CLIP, CLIP + GROKFAST)],
        (modes.RESUMED, modes.FSDP, modes.RESUMED_FSDP),
        sample=(modes.RESUMED,),
    ),
    Patch(
        "a task made on the fly",
        "a loader of one's own with four methods, and no tokenizer",
        [(STATE_CLASS, TASK + STATE_CLASS), (LOADER, "    loader = Reversal(cfg, world)\n")],
        (modes.PLAIN, modes.RESUMED),
        sample=(modes.PLAIN, modes.RESUMED),
        settings=dict(eval_interval=0, tokenizer=None, data_dir="nowhere"),
        data=reversal,
    ),
    Patch(
        "Lion",
        "the worked example of docs/experiment.md; its state is made in the first step",
        [(BUILD, LION + BUILD), (ADAMW, "    return Lion(groups, cfg.lr)\n")],
        (modes.PLAIN, modes.FSDP, modes.RESUMED_FSDP),
        sample=(modes.PLAIN, modes.RESUMED_FSDP),
        # no biases: the gradients of k's are rounding, and so is their sign
        settings=dict(lr=1e-3, bias=False),
        optimizer=lion,
    ),
    Patch(
        "a stack of matrices",
        "each of which is one for Muon, as are the others of the block",
        [
            (BLOCK_CLASS, STACK + BLOCK_CLASS),
            (MAKE_MLP, MAKE_MLP + "        self.stack = Stack(cfg)\n"),
            (MLP_CALL, MLP_CALL.replace("self.norm_2(x)", "self.norm_2(self.stack(x))")),
        ],
        (modes.PLAIN, modes.FSDP, modes.RESUMED_FSDP),
        sample=(modes.PLAIN,),
        settings=dict(optimizer="muon", lr=0.01),
        optimizer=own_optimizer,
    ),
    Patch(
        "a router's bias",
        "changed without a gradient, from counts that the forward keeps in a buffer",
        [
            (BLOCK_CLASS, ROUTED + BLOCK_CLASS),
            (MAKE_MLP, MAKE_MLP + "        self.mlp = Routed(cfg, kernels.gelu)\n"),
            (UPDATE, UPDATE + BALANCED),
        ],
        (modes.RESUMED, modes.BLOCK, modes.RESUMED_DDP, modes.FSDP, modes.RESUMED_FSDP),
        sample=(modes.RESUMED,),
        refused={modes.BLOCK: "remat=block: the buffer"},
        settings=dict(lr=0.01),
    ),
    Patch(
        "experts without tokens",
        "their gradients are zeros in every mode: AdamW's momentum and decay move them alike",
        [
            (BLOCK_CLASS, ROUTED + BLOCK_CLASS),
            (MAKE_MLP, MAKE_MLP + "        self.mlp = Rare(cfg)\n"),
        ],
        (modes.DDP, modes.FSDP, modes.BLOCK, modes.RESUMED_FSDP),
        sample=(modes.FSDP,),
        settings=dict(lr=0.01),
    ),
]
