"""Patches of the loss: more losses, other targets, logged figures, and refused forwards."""

import torch.nn.functional as F

from experiments import patch as modes
from experiments.patch import OF_LOSS, Patch

FORWARD = """        loss, count = self.head(x, targets, reduction)
        return loss, count, {}
"""
HEAD = "        self.head = Head(cfg)\n"
TIE = "            self.head.weight = self.wte.weight\n"
LOOP = """        for mix, block in self.layers:
            x = block(mix(x, embedded), idx, positions)
        return self.norm(x)
"""
BLOCK_FORWARD = """    def forward(self, x, idx, positions):
        x = x + self.dropout(self.attn(self.norm_1(x), idx, positions))
        x = x + self.dropout(self.mlp(self.norm_2(x)))
        return x
"""
MAKE_MLP = "        self.norm_2, self.mlp = make_norm(cfg), make_mlp(cfg)\n"
BLOCK_CLASS = "class Block(nn.Module):\n"

IN_CONTEXT = (*OF_LOSS, modes.CONTEXT)
WHOLE_ROWS = (*IN_CONTEXT, modes.FSDP)  # as a row's tokens meet in the loss


def forward(*lines):
    """Edits that replace what GPT.forward does with the hidden states."""
    return {"model.py": [(FORWARD, "".join(f"        {line}\n" for line in lines))]}


def logits_of(model, x):
    return model.logits(x)


def mean(values, y):
    """The mean of (B, T) values over the targets that count."""
    return values[y >= 0].sum() / (y >= 0).sum()


def each(model, x, y):
    """(B, T) losses of the tokens, 0 where a target is -100."""
    log_p = logits_of(model, x).log_softmax(-1)
    return -log_p.gather(-1, y.clamp(min=0).unsqueeze(-1)).squeeze(-1) * (y >= 0)


def usual(model, x, y):
    return mean(each(model, x, y), y), {}


def after_separator(model, x, y):
    y = y.masked_fill(x == 256, -100)
    return mean(each(model, x, y), y), {}


def two_ahead(model, x, y):
    hidden = model.hidden(x)
    ahead = F.pad(y[:, 1:], (0, 1), value=-100)
    log_p = model.head_2.logits(hidden).log_softmax(-1)
    second = -log_p.gather(-1, ahead.clamp(min=0).unsqueeze(-1)).squeeze(-1) * (ahead >= 0)
    return mean(each(model, x, y) + 0.5 * second, y), {"second": mean(second, y)}


def only_in_training(model, x, y):
    loss = mean(each(model, x, y), y)
    if not model.training:
        return loss, {}
    size = mean(model.hidden(x).square().mean(-1), y)
    return loss + 0.1 * size, {"size": size}


TWO_AHEAD = """        losses, _ = self.head(x, targets, "none")
        ahead = F.pad(targets[:, 1:], (0, 1), value=-100)
        second, _ = self.head_2(x, ahead, "none")
        loss, count = kernels.mean_loss(losses + 0.5 * second, targets, reduction)
        return loss, count, {"second": kernels.mean_loss(second, targets, reduction)[0]}
"""
BY_TOKEN = '''class MoE(nn.Module):
    """Two kinds of bytes have an MLP each, which does not run where there is none of them."""

    def __init__(self, cfg):
        super().__init__()
        self.experts = nn.ModuleList(make_mlp(cfg) for _ in range(3))

    def forward(self, x, idx):
        best = torch.where(idx == ord("("), 1, torch.where(idx == ord("_"), 2, 0))
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            chosen = best == i
            if chosen.any():
                y[chosen] = expert(x[chosen])
        return y


'''
HAS_MORE = "model.py has other parameters than a gpt2"

UNPATCHED = Patch(
    "no patch",
    "what the others are compared with; its anchor is the usual loss",
    {"model.py": [(FORWARD, FORWARD)]},
    OF_LOSS,
    sample=(modes.PLAIN, modes.DDP),
    loss=usual,
    unchanged=True,
)
PATCHES = [
    UNPATCHED,
    Patch(
        "a mean of PyTorch's",
        "the forward ignores `reduction`: F.cross_entropy's mean, of a count in tokens",
        forward(
            "loss = F.cross_entropy(self.head.logits(x).flatten(0, 1), targets.flatten())",
            "return loss, (targets >= 0).sum(), {}",
        ),
        IN_CONTEXT,
        sample=(modes.PLAIN, modes.MASKED, modes.ACCUMULATED),
        loss=usual,
        unchanged=True,
    ),
    Patch(
        "no loss after a separator",
        "what follows a document's separator is no target",
        forward(
            "targets = targets.masked_fill(idx == 256, -100)",
            "return *self.head(x, targets, reduction), {}",
        ),
        IN_CONTEXT,
        sample=(modes.PLAIN, modes.MASKED),
        loss=after_separator,
    ),
    Patch(
        "a tied second head",
        "as two tokens ahead, with the embedding's weight",
        {
            "model.py": [
                (HEAD, HEAD + "        self.head_2 = Head(cfg)\n"),
                (TIE, TIE + "            self.head_2.weight = self.wte.weight\n"),
                (FORWARD, TWO_AHEAD),
            ]
        },
        WHOLE_ROWS,
        loss=two_ahead,
        refused=modes.MIXES,
        extras=("second",),
        export=HAS_MORE,
    ),
    Patch(
        "experts without tokens",
        "an MLP for each kind of token, of which some do not run in some micro-steps",
        {
            "model.py": [
                (BLOCK_CLASS, BY_TOKEN + BLOCK_CLASS),
                (MAKE_MLP, MAKE_MLP.replace("make_mlp(cfg)", "MoE(cfg)")),
                (BLOCK_FORWARD, BLOCK_FORWARD.replace("self.norm_2(x))", "self.norm_2(x), idx)")),
            ]
        },
        (modes.PLAIN, modes.MASKED, modes.ACCUMULATED, modes.DDP, modes.FSDP, modes.BLOCK),
        sample=(modes.DDP, modes.FSDP),
    ),
    Patch(
        "a loss in training only",
        "the hidden states' size is part of the loss where self.training, and logged there",
        forward(
            "loss, count = self.head(x, targets, reduction)",
            "if not self.training:",
            "    return loss, count, {}",
            "size, _ = kernels.mean_loss(x.square().mean(-1), targets, reduction)",
            'return loss + 0.1 * size, count, {"size": size}',
        ),
        OF_LOSS,
        sample=(modes.PLAIN,),
        loss=only_in_training,
        extras=("size",),
    ),
    Patch(
        "extras that change",
        "the forward returns another extra every second time",
        forward(
            "loss, count = self.head(x, targets, reduction)",
            'self.calls = getattr(self, "calls", 0) + 1',
            'return loss, count, {"even" if self.calls % 2 == 0 else "odd": loss}',
        ),
        (modes.DDP,),
        sample=(),
        refused={
            "eager": "GPT.forward returned the extras",
            modes.DDP: "GPT.forward returned the extras",
        },
    ),
    Patch(
        "a bare loss",
        "the forward returns the loss alone, as before",
        forward("return self.head(x, targets, reduction)[0]"),
        (modes.DDP,),
        sample=(),
        refused={
            "eager": "expected (loss, count, extras), see docs/experiment.md",
            modes.DDP: "expected (loss, count, extras), see docs/experiment.md",
        },
    ),
]
