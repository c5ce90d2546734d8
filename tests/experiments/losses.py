"""Patches of the loss: more losses, other targets, logged figures, and refused forwards."""

import torch
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
HIDDEN_CALL = "        x = self.hidden(idx, positions)\n"
MAKE_MLP = "        self.norm_2, self.mlp = make_norm(cfg), make_mlp(cfg)\n"
BLOCK_CLASS = "class Block(nn.Module):\n"

IN_CONTEXT = (*OF_LOSS, modes.CONTEXT)
WHOLE_ROWS = (*IN_CONTEXT, modes.FSDP)  # as a row's tokens meet in the loss
ALL = (*IN_CONTEXT, modes.RESUMED, modes.BLOCK, modes.SELECTIVE, modes.ATTENTION, modes.COMPILED)


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


def smoothed(model, x, y):
    uniform = -logits_of(model, x).log_softmax(-1).mean(-1)
    return mean(0.9 * each(model, x, y) + 0.1 * uniform, y), {}


def focal(model, x, y):
    losses = each(model, x, y)
    return mean(losses * (1 - torch.exp(-losses)) ** 2, y), {}


def usual(model, x, y):
    return mean(each(model, x, y), y), {}


def after_separator(model, x, y):
    y = y.masked_fill(x == 256, -100)
    return mean(each(model, x, y), y), {}


def weighted(model, x, y):
    return mean(each(model, x, y) * (1 + y % 3), y), {}


def weighted_mean(model, x, y):
    weights = (1 + y % 3) * (y >= 0)
    return (each(model, x, y) * weights).sum() / weights.sum(), {}


def per_row(model, x, y):
    rows = each(model, x, y).sum(1) / (y >= 0).sum(1).clamp(min=1)
    return (1 + rows).log().mean(), {}


def two_ahead(model, x, y):
    hidden = model.hidden(x)
    ahead = F.pad(y[:, 1:], (0, 1), value=-100)
    log_p = model.head_2.logits(hidden).log_softmax(-1)
    second = -log_p.gather(-1, ahead.clamp(min=0).unsqueeze(-1)).squeeze(-1) * (ahead >= 0)
    return mean(each(model, x, y) + 0.5 * second, y), {"second": mean(second, y)}


def at_every_layer(model, x, y):
    states = model.embed(x, None)
    total = 0.0
    for i, block in enumerate(model.blocks):
        states = block(states, x, None)
        log_p = model.head.logits(model.norm(states)).log_softmax(-1)
        losses = -log_p.gather(-1, y.clamp(min=0).unsqueeze(-1)).squeeze(-1) * (y >= 0)
        total = total + (1.0 if i == len(model.blocks) - 1 else 0.3) * mean(losses, y)
    return total, {}


def only_in_training(model, x, y):
    loss = mean(each(model, x, y), y)
    if not model.training:
        return loss, {}
    size = mean(model.hidden(x).square().mean(-1), y)
    return loss + 0.1 * size, {"size": size}


def with_entropy(model, x, y):
    p = logits_of(model, x).softmax(-1)
    return mean(each(model, x, y), y), {"entropy": mean(-(p * p.log()).sum(-1), y), "two": 2.0}


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
HAS_MORE = "model.py has parameters that a Hugging Face gpt2 does not have"

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
        "label smoothing",
        "a tenth of the target is uniform",
        forward(
            "flat = self.head.logits(x).flatten(0, 1), targets.flatten()",
            'losses = F.cross_entropy(*flat, reduction="none", label_smoothing=0.1)',
            "losses = losses.view_as(targets)",
            "return *kernels.mean_loss(losses, targets, reduction), {}",
        ),
        OF_LOSS,
        loss=smoothed,
    ),
    Patch(
        "focal loss",
        "a loss of one's own through kernels.mean_loss",
        forward(
            'losses, _ = self.head(x, targets, "none")',
            "losses = losses * (1 - torch.exp(-losses)).square()",
            "return *kernels.mean_loss(losses, targets, reduction), {}",
        ),
        IN_CONTEXT,
        loss=focal,
    ),
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
        "a count of Python's",
        "the number of targets is an int, and 0 for a batch whose answers are masked",
        forward(
            "loss, _ = self.head(x, targets, reduction)",
            "if reduction != 'mean':",
            "    return loss, (targets >= 0).sum(1), {}",
            "return loss, (targets >= 0).sum().tolist(), {}",
        ),
        OF_LOSS,
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
        "weights of tokens",
        "each token's loss has a factor; the mean is over the number of targets",
        forward(
            'losses, _ = self.head(x, targets, "none")',
            "return *kernels.mean_loss(losses * (1 + targets % 3), targets, reduction), {}",
        ),
        OF_LOSS,
        loss=weighted,
    ),
    Patch(
        "a weighted mean",
        "as weights of tokens, but the mean is over the sum of the weights, which is the count",
        forward(
            'losses, _ = self.head(x, targets, "none")',
            "weights = (1 + targets % 3) * (targets >= 0)",
            "dims = None if reduction == 'mean' else 1",
            "count = weights.sum(dims)",
            "return (losses * weights).sum(dims) / count.clamp(min=1), count, {}",
        ),
        IN_CONTEXT,
        loss=weighted_mean,
    ),
    Patch(
        "a loss of rows",
        "the logarithm of each row's mean; the count is a number of Python, that of the rows",
        forward(
            'rows, _ = self.head(x, targets, "rows")',
            "return (1 + rows).log().mean(), len(rows), {}",
        ),
        WHOLE_ROWS,
        loss=per_row,
        refused=modes.MIXES,
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
    ),
    Patch(
        "a loss at every layer",
        "the head reads the inner blocks' states too",
        {
            "model.py": [
                (
                    LOOP,
                    "        self.inner = []\n"
                    "        for mix, block in self.layers:\n"
                    "            x = block(mix(x, embedded), idx, positions)\n"
                    "            self.inner.append(x)\n"
                    "        return self.norm(x)\n",
                ),
                (
                    FORWARD,
                    "        loss, count = self.head(x, targets, reduction)\n"
                    "        for inner in self.inner[:-1]:\n"
                    "            loss = loss + 0.3 * self.head(self.norm(inner), targets, "
                    "reduction)[0]\n"
                    "        return loss, count, {}\n",
                ),
            ]
        },
        (*IN_CONTEXT, modes.BLOCK, modes.COMPILED),
        loss=at_every_layer,
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
        "entropy",
        "the entropy of the predictions is logged and changes nothing",
        forward(
            "loss, count = self.head(x, targets, reduction)",
            "log_p = self.head.logits(x).log_softmax(-1)",
            "entropy, _ = kernels.mean_loss(-(log_p.exp() * log_p).sum(-1), targets, reduction)",
            'return loss, count, {"entropy": entropy.detach(), "two": 2.0}',
        ),
        OF_LOSS,
        loss=with_entropy,
        extras=("entropy", "two"),
        unchanged=True,
    ),
    Patch(
        "a probe in an extra",
        "a layer that no loss uses, but an extra that is logged, without detach",
        {
            "model.py": [
                (HEAD, HEAD + "        self.probe = Linear(cfg.n_embd, 1)\n"),
                (
                    FORWARD,
                    "        loss, count = self.head(x, targets, reduction)\n"
                    "        squares = self.probe(x.detach()).squeeze(-1).square()\n"
                    "        guess, _ = kernels.mean_loss(squares, targets, reduction)\n"
                    '        return loss, count, {"guess": guess}\n',
                ),
            ]
        },
        OF_LOSS,
        extras=("guess",),
        unchanged=True,
        export=HAS_MORE,
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
        "extras of one rank",
        "the ranks return extras of other names",
        forward(
            "loss, count = self.head(x, targets, reduction)",
            "several = torch.distributed.is_initialized()",
            'name = f"a{torch.distributed.get_rank()}" if several else "a"',
            "return loss, count, {name: loss}",
        ),
        (modes.DDP,),
        refused={modes.DDP: "GPT.forward returned the extras"},
        extras=("a",),
        unchanged=True,
    ),
    Patch(
        "an extra that is no number",
        "the losses of all tokens are returned as an extra",
        forward(
            "loss, count = self.head(x, targets, reduction)",
            'return loss, count, {"each": self.head(x, targets, "none")[0]}',
        ),
        (),
        sample=(),
        refused={"eager": "GPT.forward returned each of shape (4, 32); expected one number"},
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
    Patch(
        "a loss and a count",
        "the forward returns no extras",
        forward("return self.head(x, targets, reduction)"),
        (),
        refused={"eager": "expected (loss, count, extras), see docs/experiment.md"},
    ),
    Patch(
        "a loss that is no mean",
        "the forward returns the losses of all tokens",
        forward('return *self.head(x, targets, "none"), {}'),
        (),
        refused={"eager": "GPT.forward returned"},
    ),
]
