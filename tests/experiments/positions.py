"""Patches of how a model knows positions."""

from experiments import patch as modes
from experiments.patch import OF_LAYERS, Patch
from experiments.randomness import CORE

LEARNED = """\
        rows = self.weight[: x.size(1)] if positions is None else self.weight[positions]
        return x + rows
"""
TABLE = (
    "        self.wpe = LearnedPositions(cfg.block_size, cfg.n_embd) if learned else Unchanged()\n"
)
EMBED = "        x = embedded = self.embed(idx, positions)\n"
ATTENTION_CLASS = "class Attention(nn.Module):\n"
CORE_CALL = "        y = self.core(q, k, v, self.backend, self.dropout * self.training)\n"

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
DISTANCE = """\
        at = torch.arange(q.size(2), device=q.device) if positions is None else positions
        at = at.to(q.dtype).view(1, 1, -1, 1).expand(q.size(0), q.size(1), -1, 1)
        rates = 2.0 ** -torch.arange(1, q.size(1) + 1, device=q.device).view(1, -1, 1, 1)
        pad = (0, self.head_dim - 1)
        scale = (2 * self.head_dim) ** 0.5  # of attention, which divides by it
        ones = F.pad(torch.ones_like(at), pad)
        # as wide again: q k + rate * position of k
        q = torch.cat([q * 2**0.5, ones * rates * scale], dim=-1)
        k = torch.cat([k, F.pad(at, pad)], dim=-1)
"""
PER_DOCUMENT = """        T = idx.size(1)
        at = torch.arange(T, device=idx.device) if positions is None else positions
        begins = torch.where(idx == 256, at, 0).cummax(1).values  # (B, T)
        x = embedded = self.embed(idx, at - begins)
"""
SINES = """        at = torch.arange(x.size(1), device=x.device) if positions is None else positions
        rates = 0.5 ** torch.arange(x.size(-1) // 2, device=x.device)
        angles = at.unsqueeze(-1) * rates
        return x + 0.02 * torch.cat([angles.sin(), angles.cos()], dim=-1)
"""
ROPE_ROWS = "        cos, sin = self.cos[rows], self.sin[rows]  # (T, D/2)\n"
ROPE = dict(positions="rope")
# a rank that has a part of a row does not know where its document began
WHOLE_ROWS = (modes.PLAIN, modes.BLOCK, modes.SAMPLED, modes.FSDP, modes.CONTEXT)


def row_by_row(model, x, y):
    """The loss of each row alone, for which (1, T) positions go with any number of heads."""
    parts = [model(x[b : b + 1], y[b : b + 1]) for b in range(len(x))]
    return sum(loss * count for loss, count, _ in parts) / sum(count for _, count, _ in parts), {}


PATCHES = [
    Patch(
        "ALiBi",
        "another function as attn.core, whose bias depends on the number of the head",
        {
            "model.py": [
                (ATTENTION_CLASS, ALIBI + ATTENTION_CLASS),
                (CORE, "    core = staticmethod(alibi)\n"),
            ]
        },
        (*OF_LAYERS, modes.ATTENTION),
        refused={
            modes.ATTENTION: "a block has called none",
            modes.CONTEXT: "context_parallel=2: the loss",
        },
        cached=False,
    ),
    Patch(
        "ALiBi that is told its heads",
        "as ALiBi, with the heads of q as an argument, so that ranks can share a row",
        {
            "model.py": [
                (ATTENTION_CLASS, ALIBI_OF_HEADS + ATTENTION_CLASS),
                (CORE, "    core = staticmethod(alibi)\n"),
            ]
        },
        (modes.PLAIN, modes.CONTEXT),
        sample=(modes.CONTEXT,),
    ),
    Patch(
        "ALiBi in q and k",
        "the bias as further channels of q and k, so that attn.core stays",
        {"model.py": [(CORE_CALL, DISTANCE + CORE_CALL)]},
        OF_LAYERS,
        cached=False,
        refused={modes.CONTEXT: "context_parallel=2 exchanges heads of one width"},
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
    Patch(
        "rotary positions of documents",
        "as positions of documents, with RoPE",
        {
            "model.py": [
                (
                    EMBED,
                    PER_DOCUMENT.replace("embed(idx, at - begins)", "embed(idx, positions)")
                    + "        positions = at - begins\n",
                ),
                (
                    ROPE_ROWS,
                    "        cos, sin = (t.unsqueeze(1) if t.dim() == 3 else t for t in "
                    "(self.cos[rows], self.sin[rows]))\n",
                ),
            ]
        },
        settings=ROPE,
        modes=(modes.PLAIN, modes.BLOCK, modes.SAMPLED),
        cached=False,
    ),
    Patch(
        "rotary positions as they are",
        "likewise, without a dimension for heads, which fits by chance where heads are as many as "
        "rows",
        {
            "model.py": [
                (
                    EMBED,
                    PER_DOCUMENT.replace("embed(idx, at - begins)", "embed(idx, positions)")
                    + "        positions = at - begins\n",
                ),
            ]
        },
        (modes.PLAIN,),
        loss=row_by_row,
        settings=ROPE,
    ),
    Patch(
        "positions with an offset",
        "learned positions from 2 on, as OPT's",
        {
            "model.py": [
                (TABLE, TABLE.replace("cfg.block_size", "cfg.block_size + 2")),
                (
                    LEARNED,
                    "        T = x.size(1)\n"
                    "        at = torch.arange(T, device=x.device) if positions is None else "
                    "positions\n"
                    "        return x + self.weight[at + 2]\n",
                ),
            ]
        },
        OF_LAYERS,
        sample=(modes.SAMPLED,),
    ),
    Patch(
        "no positions",
        "the table stays without use, so that no loss depends on it",
        {"model.py": [(LEARNED, "        return x\n")]},
        (*OF_LAYERS, modes.DDP),
        sample=(modes.DDP,),
    ),
    Patch(
        "sines as positions",
        "computed in the forward, without a table",
        {"model.py": [(LEARNED, SINES)]},
        OF_LAYERS,
    ),
]
