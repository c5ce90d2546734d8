"""Patches of what a model is made of and keeps: shared parts, first values, hooks, attributes."""

from experiments import patch as modes
from experiments.loop import CLIP_CALL
from experiments.losses import BLOCK_CLASS, BLOCK_FORWARD, FORWARD, HEAD, MAKE_MLP
from experiments.patch import Patch

BLOCKS = (
    "        self.blocks = nn.ModuleList(Block(cfg, rope, layer) for layer in range(cfg.n_layer))\n"
)
STATE = "    state = training.state\n"
MLP_CALL = "self.dropout(self.mlp(self.norm_2(x)))"
COUNT = """class Count(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("n", torch.empty(1))

    def reset_parameters(self):
        nn.init.zeros_(self.n)

    def forward(self, x):
        if self.training:
            self.n = self.n + 1
        return x * (1 + 0.01 * self.n)


"""
GROKFAST = """        slow = state.own.setdefault("slow", {})
        for name, p in state.model.named_parameters():
            if name not in slow:
                slow[name] = torch.zeros_like(p)
            slow[name].lerp_(p.grad, 0.1)
            p.grad.add_(slow[name])
"""
LOST = "has no first value"


def of_mlp(part, call, text=""):
    """Edits that give a block a part; call: what stands in place of its MLP's result."""
    edits = [
        (MAKE_MLP, MAKE_MLP + f"        {part}\n"),
        (BLOCK_FORWARD, BLOCK_FORWARD.replace(MLP_CALL, call)),
    ]
    if text:
        edits.append((BLOCK_CLASS, text + BLOCK_CLASS))
    return {"model.py": edits}


def after_blocks(*lines):
    return {"model.py": [(HEAD, HEAD + "".join(f"        {line}\n" for line in lines))]}


def refused(name, what, edits, words):
    return Patch(name, what, edits, (), sample=(), refused={"eager": words})


def in_init(name, what, edits, words=None, sample=()):
    """A patch that holds on one device and in copies, and is refused where FSDP2 shards."""
    sharded = {modes.FSDP: words} if words else {}
    return Patch(name, what, edits, (modes.DDP, modes.FSDP), sample=sample, refused=sharded)


def in_loop(name, what, lines, sample, words, **more):
    """A patch of train.py's lines after the run is built, which is refused in some modes."""
    edits = {"train.py": [(STATE, STATE + "".join(f"    {line}\n" for line in lines))]}
    return Patch(name, what, edits, sample, sample=sample, refused=words, **more)


PATCHES = [
    Patch(
        "one block for all layers",
        "as ALBERT's: the list has one block three times",
        {
            "model.py": [
                (
                    BLOCKS,
                    "        self.blocks = nn.ModuleList([Block(cfg, rope, 0)] * cfg.n_layer)\n",
                )
            ]
        },
        (
            *(modes.PLAIN, modes.BLOCK, modes.SELECTIVE, modes.ATTENTION, modes.COMPILED),
            *(modes.SAMPLED, modes.FSDP, modes.CONTEXT, modes.RESUMED_FSDP),
        ),
        sample=(modes.ATTENTION, modes.FSDP),
        settings=dict(n_layer=3),
    ),
    Patch(
        "one weight in two blocks",
        "shared in __init__, by modules that FSDP2 gathers at different times",
        after_blocks("self.blocks[1].mlp.up.weight = self.blocks[0].mlp.up.weight"),
        (modes.PLAIN, modes.DDP, modes.FSDP),
        sample=(modes.FSDP,),
        refused={modes.FSDP: "blocks.1.mlp.up.weight is shared by blocks; share the module"},
    ),
    in_init(
        "nanoGPT's first values",
        "by self.apply in __init__",
        after_blocks(
            "def first(module):",
            "    if isinstance(module, nn.Linear):",
            "        nn.init.normal_(module.weight, std=0.1)",
            "self.apply(first)",
        ),
        f"blocks.0.attn.qkv.weight {LOST}",
        sample=(modes.DDP, modes.FSDP),
    ),
    in_init(
        "tensors in a list",
        "computed in __init__",
        of_mlp("self.scales = [torch.full((cfg.n_embd,), 0.5)]", f"self.scales[0] * {MLP_CALL}"),
        sample=(modes.FSDP,),
    ),
    Patch(
        "a GRU in each block",
        "PyTorch's, which lists its own weights in an attribute",
        of_mlp(
            "self.gru = nn.GRU(cfg.n_embd, cfg.n_embd, batch_first=True)",
            f"{MLP_CALL} + self.gru(x)[0]",
        ),
        (modes.RESUMED, modes.BLOCK, modes.FSDP, modes.CONTEXT),
        sample=(modes.FSDP,),
        refused=modes.MIXES,
    ),
    Patch(
        "a buffer put anew",
        "a count that the forward replaces instead of changing it",
        of_mlp("self.count = Count()", f"self.count({MLP_CALL})", COUNT),
        (modes.RESUMED, modes.BLOCK),
        sample=(modes.BLOCK,),
        refused={modes.BLOCK: "remat=block"},
    ),
    Patch(
        "a loss in an attribute",
        "of the MLP's output, which GPT.forward adds up: it is read after it is set",
        {
            "model.py": [
                (MAKE_MLP, MAKE_MLP + "        self.size = None\n"),
                (
                    BLOCK_FORWARD,
                    BLOCK_FORWARD.replace(
                        "        return x\n",
                        "        self.size = x.square().mean()\n        return x\n",
                    ),
                ),
                (
                    FORWARD,
                    "        loss, count = self.head(x, targets, reduction)\n"
                    "        size = sum(block.size for block in self.blocks)\n"
                    "        return loss + size * self.training, count, {}\n",
                ),
            ]
        },
        (modes.RESUMED, modes.BLOCK, modes.COMPILED, modes.FSDP),
        sample=(modes.BLOCK,),
    ),
    in_loop(
        "a parameter frozen in train.py",
        "after DDP was told which gradients to wait for",
        ["state.model.wpe.weight.requires_grad_(False)"],
        (modes.DDP, modes.FSDP),
        dict.fromkeys(
            (modes.DDP, modes.FSDP), "requires_grad of wpe.weight is False, and was True"
        ),
    ),
    Patch(
        "a filter of gradients made in the first step",
        "in State.own, which is empty when a resumed run begins",
        {"train.py": [(CLIP_CALL, CLIP_CALL + GROKFAST)]},
        (modes.RESUMED, modes.FSDP, modes.RESUMED_FSDP),
        sample=(modes.RESUMED,),
    ),
]
