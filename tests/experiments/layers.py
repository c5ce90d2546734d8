"""Patches of the architecture: blocks, attention, MLPs, and the order in which blocks run."""

from experiments import patch as modes
from experiments.losses import BLOCK_CLASS, BLOCK_FORWARD, HAS_MORE, HEAD, LOOP, MAKE_MLP
from experiments.patch import OF_LAYERS, Patch
from experiments.positions import CORE_CALL
from experiments.randomness import ACTIVATION

ATTENTION_PROJ = "        self.proj = Linear(cfg.attention_width, cfg.n_embd, bias=cfg.bias)\n"
ATTENTION_END = "        return self.proj(y)\n"
GATE = "        y = self.gate(y.transpose(1, 2), x).flatten(2)  # (B, T, H D)\n"
EMBED_TOKENS = "        x = self.embed_norm(self.wpe(self.wte(idx), positions))\n"
SHIFT = '''class Shift(nn.Module):
    """Mixes each token with the one before it."""

    def __init__(self, cfg):
        super().__init__()
        self.share = nn.Parameter(torch.empty(cfg.n_embd))

    def reset_parameters(self):
        nn.init.constant_(self.share, 0.5)

    def forward(self, x):
        return x + self.share * F.pad(x[:, :-1], (0, 0, 1, 0))


'''
NORMS = "        self.norm_3, self.norm_4 = make_norm(cfg), make_norm(cfg)\n"
EXPORTED = (*OF_LAYERS, modes.EXPORTED)  # which new parameters let it refuse
WHOLE_ROWS = (*EXPORTED, modes.FSDP)


def block(*lines):
    """An edit of a block's whole forward."""
    text = "".join(f"        {line}\n" for line in lines)
    return (BLOCK_FORWARD, f"    def forward(self, x, idx, positions):\n{text}")


def shifted(text):
    """Edits that put the module of a text with `class Shift` before each MLP."""
    edits = [
        (BLOCK_CLASS, text + BLOCK_CLASS),
        (MAKE_MLP, MAKE_MLP + "        self.shift = Shift(cfg)\n"),
        (BLOCK_FORWARD, BLOCK_FORWARD.replace("self.norm_2(x)", "self.shift(self.norm_2(x))")),
    ]
    return {"model.py": edits}


def loop(text):
    return {"model.py": [(LOOP, text)]}


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
        "post-norm",
        "norms after the addition, README's own",
        {
            "model.py": [
                block(
                    "x = self.norm_1(x + self.dropout(self.attn(x, idx, positions)))",
                    "return self.norm_2(x + self.dropout(self.mlp(x)))",
                )
            ]
        },
        OF_LAYERS,
    ),
    Patch(
        "sandwich norm",
        "further norms after attention and MLP",
        {
            "model.py": [
                (MAKE_MLP, MAKE_MLP + NORMS),
                block(
                    "x = x + self.norm_3(self.attn(self.norm_1(x), idx, positions))",
                    "return x + self.norm_4(self.mlp(self.norm_2(x)))",
                ),
            ]
        },
        EXPORTED,
        export=HAS_MORE,
    ),
    Patch(
        "another activation",
        "SiLU, README's own",
        {"model.py": [(ACTIVATION, "    return MLP(cfg, F.silu)\n")]},
        (*OF_LAYERS, modes.SELECTIVE),
        sample=(modes.PLAIN, modes.SELECTIVE),
    ),
    Patch(
        "head gates",
        "a sigmoid of the block's input scales each head",
        {
            "model.py": [
                (
                    ATTENTION_PROJ,
                    ATTENTION_PROJ + "        self.head_gate = Linear(cfg.n_embd, cfg.n_head)\n",
                ),
                (
                    GATE,
                    "        y = torch.sigmoid(self.head_gate(x)).mT.unsqueeze(-1) * y  # (B, H, "
                    "T, D)\n"
                    "        y = y.transpose(1, 2).flatten(2)\n",
                ),
            ]
        },
        (*EXPORTED, modes.ATTENTION),
        export=HAS_MORE,
    ),
    Patch(
        "a gate on channels",
        "README's first edit",
        {
            "model.py": [
                (
                    ATTENTION_PROJ,
                    ATTENTION_PROJ
                    + "        self.channel_gate = Linear(cfg.n_embd, cfg.n_embd, bias=False)\n",
                ),
                (
                    ATTENTION_END,
                    "        return self.proj(y * torch.sigmoid(self.channel_gate(x)))\n",
                ),
            ]
        },
        EXPORTED,
        sample=(modes.EXPORTED,),
        export=HAS_MORE,
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
    Patch(
        "a skipped layer",
        "the second block stays without use",
        loop(LOOP.replace("self.layers", "self.layers[::2]")),
        (*OF_LAYERS, modes.DDP),
    ),
    Patch(
        "skip connections",
        "the last block reads the embedding as well, by name",
        {
            "model.py": [
                (
                    BLOCK_FORWARD,
                    BLOCK_FORWARD.replace(
                        "positions):\n", "positions, x0):\n        x = x + 0.5 * x0\n"
                    ),
                ),
                (
                    LOOP,
                    "        x0 = x\n" + LOOP.replace("idx, positions)", "idx, positions, x0=x0)"),
                ),
            ]
        },
        OF_LAYERS,
    ),
    Patch(
        "token shift",
        "each token is mixed with the one before: tokens mix outside of attn.core",
        shifted(SHIFT),
        WHOLE_ROWS,
        refused=modes.MIXES,
        cached=False,
        export=HAS_MORE,
    ),
    Patch(
        "token shift across documents",
        "as a token shift, under document masks",
        shifted(SHIFT),
        (modes.DDP,),
        sample=(),
        settings=dict(document_mask=True),
        refused=dict.fromkeys(("eager", modes.DDP), "document_mask=True"),
    ),
    Patch(
        "a token shift from zero",
        "as a token shift, of which the first weights are zero: at first it changes nothing",
        shifted(SHIFT.replace("self.share, 0.5", "self.share, 0.0")),
        (modes.CONTEXT,),
        refused=modes.MIXES,
        cached=False,
    ),
    Patch(
        "a convolution over time",
        "PyTorch's own Conv1d, one for each channel",
        {
            "model.py": [
                (
                    MAKE_MLP,
                    MAKE_MLP
                    + "        C = cfg.n_embd\n"
                    + "        self.conv = nn.Conv1d(C, C, 3, groups=C)\n",
                ),
                (
                    BLOCK_FORWARD,
                    BLOCK_FORWARD.replace(
                        "        x = x + self.dropout(self.mlp",
                        "        x = x + self.conv(F.pad(x.mT, (2, 0))).mT\n"
                        "        x = x + self.dropout(self.mlp",
                    ),
                ),
            ]
        },
        WHOLE_ROWS,
        refused=modes.MIXES,
        cached=False,
        export=HAS_MORE,
    ),
    Patch(
        "normed queries and keys",
        "without weights, just before attn.core",
        {
            "model.py": [
                (
                    CORE_CALL,
                    "        q, k = (F.rms_norm(t, (self.head_dim,)) for t in (q, k))\n"
                    + CORE_CALL,
                )
            ]
        },
        (*OF_LAYERS, modes.ATTENTION),
    ),
    Patch(
        "a layer that no loss uses",
        "its parameters stay as they are, which a warning says",
        {"model.py": [(HEAD, HEAD + "        self.spare = Linear(cfg.n_embd, cfg.n_embd)\n")]},
        (*EXPORTED, modes.DDP),
        unchanged=True,
        export=HAS_MORE,
    ),
    Patch(
        "scaled embeddings",
        "by the root of their width, as Gemma's",
        {
            "model.py": [
                (
                    EMBED_TOKENS,
                    EMBED_TOKENS.replace("self.wte(idx)", "self.wte(idx) * self.cfg.n_embd**0.5"),
                )
            ]
        },
        OF_LAYERS,
    ),
]
