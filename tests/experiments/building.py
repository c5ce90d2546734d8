"""Patches of what a model is made of and keeps: shared parts, first values, hooks, attributes."""

from experiments import patch as modes
from experiments.loop import CLIP_CALL
from experiments.losses import BLOCK_CLASS, BLOCK_FORWARD, FORWARD, HEAD, MAKE_MLP
from experiments.patch import Patch
from experiments.positions import CORE_CALL
from experiments.shelf import own_optimizer

BLOCKS = (
    "        self.blocks = nn.ModuleList(Block(cfg, rope, layer) for layer in range(cfg.n_layer))\n"
)
STATE = "    state = training.state\n"
ROTATED = "    return rotated(layer(x), cos, sin)\n"
ROPE_CALL = "kernels.rope(q, q_norm, cos, sin),"
BY_NAME = CORE_CALL.replace("= self.core", "= 1.5 * self.core")
BY_NAME = BY_NAME.replace("self.backend", "backend=self.backend")
BY_NAME = BY_NAME.replace("self.dropout", "dropout=self.dropout")
MLP_CALL = "self.dropout(self.mlp(self.norm_2(x)))"
GAIN = """class Gain(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(SHAPE))

    def reset_parameters(self):
        nn.init.constant_(self.weight, 0.7)

    def forward(self, x):
        return (x * self.weight).type_as(x)


"""
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


def gain(shape):
    return of_mlp("self.gain = Gain(cfg)", f"self.gain({MLP_CALL})", GAIN.replace("SHAPE", shape))


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
        "one MLP for all blocks",
        "a module that is a part of several blocks",
        after_blocks("for block in self.blocks:", "    block.mlp = self.blocks[0].mlp"),
        (modes.PLAIN, modes.BLOCK, modes.SELECTIVE, modes.FSDP, modes.RESUMED_FSDP),
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
    Patch(
        "an operation with another parameter",
        "a kernels.rope that scales, which the fused form does not take",
        {
            "kernels.py": [
                ("def rope(x, layer, cos, sin):\n", "def rope(x, layer, cos, sin, scale=1.0):\n"),
                (ROTATED, ROTATED.replace("layer(x)", "scale * layer(x)")),
            ],
            "model.py": [(ROPE_CALL, ROPE_CALL.replace("sin),", "sin, scale=1.5),"))],
        },
        (modes.BLOCK, modes.COMPILED, modes.FSDP),
        sample=(),
        settings=dict(positions="rope"),
    ),
    Patch(
        "a core with an argument by name",
        "as PyTorch's own functions are called",
        {"model.py": [(CORE_CALL, BY_NAME)]},
        (
            *(modes.BLOCK, modes.ATTENTION, modes.COMPILED, modes.SAMPLED),
            *(modes.CONTEXT, modes.MASKED),
        ),
        sample=(modes.ATTENTION, modes.CONTEXT),
    ),
    in_init(
        "an identity as first value",
        "which nn.init writes through `out`",
        of_mlp("nn.init.eye_(self.mlp.up.weight)", MLP_CALL),
        "parameters without values where FSDP2 shards",
    ),
    in_init(
        "a weight made of numbers",
        "in __init__, in place of the layer's own",
        of_mlp(
            "self.mlp.up.weight = nn.Parameter(0.1 * torch.ones(cfg.mlp_hidden, cfg.n_embd))",
            MLP_CALL,
        ),
        f"blocks.0.mlp.up.weight {LOST}",
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
        "a bias set in __init__",
        "by .data, which autograd does not see",
        of_mlp(
            "self.side = Linear(cfg.n_embd, cfg.n_embd)\n        self.side.bias.data.fill_(1.0)",
            f"torch.sigmoid(self.side(x)) * {MLP_CALL}",
        ),
        f"blocks.0.side.bias {LOST}",
    ),
    in_init(
        "a hook set in __init__",
        "on the gradient of a parameter",
        after_blocks("self.wpe.weight.register_hook(lambda grad: 0.1 * grad)"),
        "wpe.weight has a hook on its gradient, which FSDP2 does not call",
    ),
    in_init(
        "tensors in a list",
        "computed in __init__",
        of_mlp("self.scales = [torch.full((cfg.n_embd,), 0.5)]", f"self.scales[0] * {MLP_CALL}"),
        sample=(modes.FSDP,),
    ),
    refused(
        "a float64 parameter",
        "which the norm of gradients does not take",
        gain("cfg.n_embd, dtype=torch.float64"),
        "blocks.0.gain.weight is torch.float64",
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
        "an attribute of a parameter",
        "which optim.py reads, as Mamba's _no_weight_decay",
        {
            "model.py": [
                (MAKE_MLP, MAKE_MLP + "        self.mlp.up.weight._no_weight_decay = True\n")
            ],
            "optim.py": [
                (
                    "        if p.dim() == 2 and p in embeddings:\n",
                    '        if hasattr(p, "_no_weight_decay"):\n'
                    '            kind = "vector"\n'
                    "        elif p.dim() == 2 and p in embeddings:\n",
                )
            ],
        },
        (modes.PLAIN, modes.RESUMED, modes.DDP, modes.FSDP),
        sample=(modes.FSDP,),
        settings=dict(weight_decay=20.0),
        optimizer=own_optimizer,
    ),
    Patch(
        "a parameter without dimensions",
        "a learned scale; FSDP2 divides rows",
        gain("()"),
        (modes.PLAIN, modes.RESUMED, modes.DDP, modes.FSDP),
        sample=(modes.FSDP,),
        refused={modes.FSDP: "blocks.0.gain.weight has no dimensions"},
    ),
    Patch(
        "a bf16 parameter",
        "beside float32 ones; FSDP2 gathers a block in one dtype",
        gain("cfg.n_embd, dtype=torch.bfloat16"),
        (modes.RESUMED, modes.FSDP),
        sample=(modes.RESUMED, modes.FSDP),
        refused={modes.FSDP: "blocks.0.gain.weight is torch.bfloat16"},
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
        "a count in Python",
        "a number that the forward raises and reads",
        of_mlp("self.calls = 0", f"0.1 * self.calls * {MLP_CALL}\n        self.calls += 1"),
        (modes.BLOCK,),
        sample=(modes.BLOCK,),
        refused={"eager": "resume", modes.BLOCK: "re"},
    ),
    Patch(
        "a memory of the batch before",
        "a tensor in an attribute, which the next forward reads",
        of_mlp(
            "self.memory = 0.0",
            f"{MLP_CALL} + 5 * self.memory\n        self.memory = x.detach().abs().mean()",
        ),
        (modes.BLOCK,),
        sample=(modes.BLOCK,),
        refused={"eager": "resume", modes.BLOCK: "re"},
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
        "a frozen parameter that train.py thaws",
        "which the optimizer never had",
        {
            **after_blocks("self.wpe.weight.requires_grad_(False)"),
            "train.py": [(STATE, STATE + "    state.model.wpe.weight.requires_grad_(True)\n")],
        },
        (modes.DDP, modes.FSDP),
        sample=(),
        refused=dict.fromkeys(
            ("eager", modes.DDP, modes.FSDP), "requires_grad of wpe.weight is True, and was False"
        ),
    ),
    in_loop(
        "a hook in train.py",
        "on the gradient of a parameter, which FSDP2 does not call",
        ["state.model.wpe.weight.register_hook(lambda grad: 0.1 * grad)"],
        (modes.DDP, modes.FSDP),
        {modes.FSDP: "wpe.weight has a hook on its gradient, which FSDP2 does not call"},
    ),
    Patch(
        "a filter of gradients made in the first step",
        "in State.own, which is empty when a resumed run begins",
        {"train.py": [(CLIP_CALL, CLIP_CALL + GROKFAST)]},
        (modes.RESUMED, modes.FSDP, modes.RESUMED_FSDP),
        sample=(modes.RESUMED,),
    ),
    Patch(
        "a setting of several numbers",
        "a tuple, which JSON holds as a list",
        {
            "settings.py": [
                (
                    "    # Model: variants\n",
                    "    scales: tuple[float, ...] = (0.5, 1.0)\n    # Model: variants\n",
                )
            ],
            **of_mlp("self.scale = cfg.scales[0]", f"self.scale * {MLP_CALL}"),
        },
        (modes.RESUMED,),
        sample=(modes.RESUMED,),
    ),
]
