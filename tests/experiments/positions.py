"""Patches of how a model knows positions."""

from experiments import patch as modes
from experiments.patch import Patch
from experiments.randomness import CORE

EMBED = "        x = embedded = self.embed(idx, positions)\n"
ATTENTION_CLASS = "class Attention(nn.Module):\n"

ALIBI = '''def alibi(q, k, v, *_):
    """Causal attention, with a bias that falls with the distance, at a rate of each head's own."""
    H, T = q.size(1), q.size(2)
    rates = 2.0 ** -torch.arange(1, H + 1, device=q.device)
    at = torch.arange(T, device=q.device)
    bias = rates.view(-1, 1, 1) * (at - at.unsqueeze(1))  # (H, T, T)
    bias = bias.masked_fill(at > at.unsqueeze(1), -torch.inf)
    return F.scaled_dot_product_attention(q, k, v, bias.to(q.dtype))


'''
ALIBI_OF_HEADS = (
    ALIBI.replace("*_):", "*_, heads=slice(None)):")
    .replace("H, T = q.size(1), q.size(2)", "T = q.size(2)")
    .replace(
        "torch.arange(1, H + 1, device=q.device)", "torch.arange(1, 5, device=q.device)[heads]"
    )
)
PER_DOCUMENT = """        T = idx.size(1)
        at = torch.arange(T, device=idx.device) if positions is None else positions
        begins = torch.where(idx == 256, at, 0).cummax(1).values  # (B, T)
        x = embedded = self.embed(idx, at - begins)
"""
# a rank that has a part of a row does not know where its document began
WHOLE_ROWS = (modes.PLAIN, modes.BLOCK, modes.SAMPLED, modes.FSDP, modes.CONTEXT)


PATCHES = [
    Patch(
        "ALiBi that is told its heads",
        "as ALiBi, with the heads of q as an argument, so that ranks can share a row",
        {
            "model.py": [
                (ATTENTION_CLASS, ALIBI_OF_HEADS + ATTENTION_CLASS),
                (CORE, "    core = staticmethod(alibi)\n"),
            ]
        },
        (modes.PLAIN, modes.BLOCK, modes.SAMPLED, modes.CONTEXT, modes.ATTENTION),
        sample=(modes.CONTEXT,),
        refused={modes.ATTENTION: "has called none"},
        cached=False,
    ),
    Patch(
        "positions of documents",
        "learned positions that count from a document's separator on, (B, T)",
        {"model.py": [(EMBED, PER_DOCUMENT)]},
        WHOLE_ROWS,
        sample=(modes.PLAIN,),
        refused=modes.MIXES,
        cached=False,
    ),
]
