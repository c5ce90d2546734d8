"""Patches of kernels.py: the operations, of which other modes have forms of their own."""

import torch

from experiments import patch as modes
from experiments.patch import OF_LAYERS, Patch

QUERIES = (
    "    grouped = q.size(1) != k.size(1)\n",
    "    q = q * 3\n    grouped = q.size(1) != k.size(1)\n",
)
NORMED = (
    "    first, second = x.float().chunk(2, dim=-1)\n",
    "    x = 4 * F.normalize(x, dim=-1)\n    first, second = x.float().chunk(2, dim=-1)\n",
)
GELU = (
    '    return F.gelu(x, approximate="tanh")  # GPT-2\'s own form\n',
    "    return x * torch.sigmoid(3 * x)\n",
)
SHARPER = (
    "    logits = cap(logits.float(), softcap)\n",
    "    logits = cap(1.5 * logits.float(), softcap)\n",
)
ROPE = dict(positions="rope")
MASKS = dict(document_mask=True)


def by_documents(model, x, y):
    """The loss of each document of a row alone, at its positions in the row."""
    total, count = 0, 0
    for row, targets in zip(x, y):
        bounds = sorted({0, *(row == 256).nonzero().flatten().tolist(), len(row)})
        for first, last in zip(bounds, bounds[1:]):
            own = slice(first, last)
            loss, n, _ = model(row[None, own], targets[None, own], torch.arange(first, last))
            total = total + loss * n
            count += n
    return total / count, {}


PATCHES = [
    Patch(
        "larger queries",
        "three times the scores, at the top of attention",
        {"kernels.py": [QUERIES]},
        (*OF_LAYERS, modes.ATTENTION, modes.COMPILED, modes.FSDP, modes.RESUMED),
        sample=(modes.SAMPLED, modes.ATTENTION),
        cached=False,
    ),
    Patch(
        "larger queries within documents",
        "the same under document masks",
        {"kernels.py": [QUERIES]},
        (modes.PLAIN, modes.BLOCK, modes.COMPILED, modes.CONTEXT),
        sample=(modes.PLAIN,),
        settings=MASKS,
        loss=by_documents,
    ),
    Patch(
        "documents, and another attention",
        "a function of one's own as attn.core under document masks, which sees each document alone",
        {
            "model.py": [
                (
                    "    core = staticmethod(kernels.attention)  # tokens mix here alone\n",
                    "    core = staticmethod(\n"
                    "        lambda *qkv: F.scaled_dot_product_attention(*qkv[:3], is_causal=True, "
                    "scale=1)\n"
                    "    )\n",
                )
            ]
        },
        (modes.PLAIN, modes.BLOCK, modes.CONTEXT),
        settings=MASKS,
        loss=by_documents,
    ),
    Patch(
        "normed rotations",
        "queries and keys are normed inside RoPE, whose backward is written by hand",
        {"kernels.py": [NORMED]},
        (*OF_LAYERS, modes.ATTENTION, modes.COMPILED),
        sample=(modes.PLAIN,),
        settings=ROPE,
    ),
    Patch(
        "another GELU",
        "a sigmoid's, in kernels.py",
        {"kernels.py": [GELU]},
        (*OF_LAYERS, modes.SELECTIVE, modes.EXPORTED),
        sample=(modes.EXPORTED,),
        export="transformers' logits differ by",
    ),
    Patch(
        "another linear layer",
        "a tenth of its input besides, where there is room",
        {
            "kernels.py": [
                (
                    "        return F.linear(x, forms.weight_of(self), self.bias)\n",
                    "        y = F.linear(x, self.weight, self.bias)\n"
                    "        return y + 0.1 * x if y.shape == x.shape else y\n",
                )
            ]
        },
        (*OF_LAYERS, modes.COMPILED, modes.FSDP),
    ),
    Patch(
        "sharper logits",
        "in the cross-entropy of kernels.py",
        {"kernels.py": [SHARPER]},
        (modes.PLAIN, modes.MASKED, modes.ACCUMULATED, modes.DDP, modes.COMPILED),
        sample=(modes.PLAIN, modes.MASKED),
    ),
]
