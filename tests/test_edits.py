"""Edits of model.py, as people make them, take effect and are right: with fused kernels, every remat,
document
masks, context parallelism, DDP, FSDP2 and fp8.

Each edit exchanges lines of model.py's text, which is then a module of its own in the place of `model`. Three
steps of train.py's Training, with SGD, are compared with the same edit in plain PyTorch in float32 in one
process: with SGD, a parameter's change is the sum of three gradients, of which AdamW would keep little more
than the signs. The weights are drawn by name, and large enough that every part of a block shows in the loss.
On the CPU the fused kernels run in Triton's interpreter, on a GPU for real, compiled block by block.

Tolerances. A bf16 number has a relative error of 2^-9, and a gradient has gone through some twenty such
roundings: 2e-3 in a loss of 16 tokens and 3e-2 in the change of a parameter are what PyTorch's own autocast
does to model.py as it is; of edits that are more sensitive, thrice the error of autocast. Without the edit
some parameter changes by 0.3 otherwise at least. fp8 has 4 bits, gradients 3, and the interpreter loses a
carry (see test_fp8.py): directions of changes are compared, which without the edit are clearly others.
"""

import functools
import os
import sys
import types
import zlib

import pytest
import ranks
import torch
import torch.nn.functional as F
from conftest import ROOT, compile_to_graphs, stand_in_for_cublas

pytest.importorskip("triton", reason="Triton is installed with PyTorch's CUDA builds only")
import kernels
import model as unedited
import train
from fast.attention import best_attention
from run.flops import Account
from scale import context, memory, parallel
from scale.shards import copy_into
from settings import Config

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(not GPU and not INTERPRETED, reason="needs a GPU or TRITON_INTERPRET"),
]
two_ranks = pytest.mark.skipif(GPU and torch.cuda.device_count() < 2, reason="needs two GPUs, or none")

LOSS, CHANGE, OTHER = 2e-3, 3e-2, 0.3  # relative; see above
LOSS_FP8, ALIKE = (1e-2, 0.95) if GPU else (4e-2, 0.85)  # relative; cosine of changes

STEPS, ROWS, SEPARATOR = 3, 2, 7
SHAPE = dict(n_layer=2, n_head=4, vocab_size=200, vocab_multiple=8, batch_size=2, clip=None, compile=GPU)
SHAPE |= dict(n_embd=256, block_size=128) if GPU else dict(n_embd=64, block_size=8)
TILE = 64 if GPU else 16
LLAMA = dict(mlp="swiglu", norm="rmsnorm", positions="rope", bias=False, n_kv_head=2, tie_embeddings=False)

# -- the edits: {name: [(lines of model.py, what stands there instead), ...]}

ATTEND = "x = x + self.dropout(self.attn(self.norm_1(x), idx))\n"
TRANSFORM = "x = x + self.dropout(self.mlp(self.norm_2(x)))\n"
ATTENDED = "self.dropout(self.attn(self.norm_1(x), idx))"
BLOCK = "    def forward(self, x, idx):\n        x = x + "
BLOCK_PARTS = "        self.norm_2, self.mlp = make_norm(cfg), make_mlp(cfg)\n"
ATTENTION = "    def forward(self, x, idx):\n        q, k, v ="
ATTENTION_PROJ = "        self.proj = Linear(cfg.attention_width, cfg.n_embd, bias=cfg.bias)\n"
CORE = "        y = self.core("
GATE = "y = self.gate(y.transpose(1, 2), x).flatten(2)  # (B, T, H D)\n"
MIX = "return self.proj(y)\n"
LOOP = "        for block in self.stack:\n            x = block(x, idx)\n"
HEAD = "        self.head = Head(cfg)\n"
LOSS_CALL = "kernels.linear_cross_entropy(x, self, targets, reduction, self.vocab_size, self.softcap)\n"
NORMED = CORE.replace("y = ", "q, k = self.q_norm_2(q), self.k_norm_2(k)\n        y = ")
LORA = """class LoRA(Linear):
    def __init__(self, width, out, bias):
        super().__init__(width, out, bias)
        self.a, self.b = Linear(width, 16, bias=False), Linear(16, out, bias=False)

    def forward(self, x):
        return super().forward(x) + 0.5 * self.b(self.a(x))


class Attention(nn.Module):
"""
NORM = """class Norm(RMSNorm):
    def reset_parameters(self):
        nn.init.zeros_(self.weight)

    def forward(self, x):
        return (1 + self.weight) * x / (x.float().abs().mean(-1, keepdim=True) + self.eps)


def make_norm(cfg):
"""


def second_norms(kind):
    """Norms of q and k after RoPE, which are views."""
    parts = f"        self.q_norm_2, self.k_norm_2 = ({kind} for _ in 'qk')\n"
    return [(ATTENTION_PROJ, ATTENTION_PROJ + parts), (CORE, NORMED)]


EDITS = {
    "attention and MLP in parallel": [
        (ATTEND, "h = self.norm_1(x)\n"),  # norm_2 is left without a use, as in PaLM
        (TRANSFORM, "x = x + self.attn(h, idx) + self.mlp(h)\n"),
    ],
    "post-norm": [
        (ATTEND, "x = self.norm_1(x + self.attn(x, idx))\n"),
        (TRANSFORM, "x = self.norm_2(x + self.mlp(x))\n"),
    ],
    "sandwich norms": [
        (BLOCK_PARTS, BLOCK_PARTS + "        self.norm_3, self.norm_4 = make_norm(cfg), make_norm(cfg)\n"),
        (ATTENDED, "self.norm_3(self.attn(self.norm_1(x), idx))"),
        (TRANSFORM, "x = x + self.norm_4(self.mlp(self.norm_2(x)))\n"),
    ],
    "another activation": [('{"gelu": kernels.gelu,', '{"gelu": torch.sin,')],
    "a gate for each head": [  # before the transposition: another layout of attention's gradient
        (ATTENTION_PROJ, ATTENTION_PROJ + "        self.head_gate = Linear(cfg.n_embd, cfg.n_head)\n"),
        (GATE, "y = (torch.sigmoid(self.head_gate(x)).mT.unsqueeze(-1) * y).transpose(1, 2).flatten(2)\n"),
    ],
    "value residual": [  # the first block's values go on to all others: a block takes and returns two tensors
        (ATTENTION, ATTENTION.replace("idx)", "idx, first)")),
        (CORE, "        v = v if first is None else 0.5 * (v + first)\n" + CORE),
        (MIX, "return self.proj(y), v if first is None else first\n"),
        (
            BLOCK,
            "    def forward(self, x, idx, first):\n"
            "        update, first = self.attn(self.norm_1(x), idx, first)\n        x = x + ",
        ),
        (ATTENDED, "update"),
        (TRANSFORM + "        return x\n", TRANSFORM + "        return x, first\n"),
        (
            LOOP,
            "        first = None\n" + LOOP.replace("x = block(x, idx)", "x, first = block(x, idx, first)"),
        ),
    ],
    "a second norm on q and k": second_norms("nn.RMSNorm(cfg.head_size)"),
    "a fused norm on q and k": second_norms("RMSNorm(cfg.head_size, cfg.norm_eps)"),
    "norms without weights": [
        ("LayerNorm(cfg.n_embd, cfg.norm_eps, bias=cfg.bias)", "RMSNorm(cfg.n_embd, None, False)")
    ],
    "one update for all tokens": [(ATTENDED, "self.attn(self.norm_1(x), idx).mean(1, keepdim=True)")],
    "a layer of every other channel": [
        (BLOCK_PARTS, BLOCK_PARTS + "        self.extra = Linear(cfg.n_embd // 2, cfg.n_embd)\n"),
        (TRANSFORM, "h = self.norm_2(x)\n        x = x + self.mlp(h) + self.extra(h[..., ::2])\n"),
    ],
    "a layer before the head": [
        (HEAD, HEAD + "        self.last = Linear(cfg.n_embd, cfg.n_embd)\n"),
        (
            "return self.norm(x)\n",
            "return F.normalize(self.last(self.norm(x)), dim=-1) * x.size(-1) ** 0.5\n",
        ),
    ],
    "a loss of PyTorch's": [
        (
            LOSS_CALL,
            "F.cross_entropy(1.5 * self.logits(x).flatten(0, 1), targets.flatten(), reduction=reduction)\n",
        )
    ],
    "a skipped layer": [(LOOP, LOOP.replace("self.stack", "self.stack[::2]"))],
    "layers run twice": [(LOOP, LOOP.replace("self.stack", "[*self.stack, *self.stack]"))],
    "the embedding in every block": [  # by name
        (BLOCK, "    def forward(self, x, idx, x0):\n        x = x + x0\n        x = x + "),
        (LOOP, "        x0 = x\n" + LOOP.replace("block(x, idx)", "block(x, idx, x0=x0)")),
    ],
    "LoRA": [("class Attention(nn.Module):\n", LORA), ("self.qkv = Linear(", "self.qkv = LoRA(")],
    "another norm": [  # by the mean absolute value, times 1 + weight
        ("def make_norm(cfg):\n", NORM),
        ("return RMSNorm(cfg.n_embd, cfg.norm_eps)", "return Norm(cfg.n_embd, cfg.norm_eps)"),
    ],
}
OF_LLAMA = {"another norm", "sandwich norms", "a second norm on q and k"}


def edited(edit):
    """model.py's module with an edit; None: as it is."""
    if edit is None:
        return unedited
    text = (ROOT / "model.py").read_text()
    for old, new in EDITS[edit]:
        assert text.count(old) == 1, f"{edit}: model.py has this {text.count(old)} times, not once:\n{old}"
        text = text.replace(old, new)
    module = types.ModuleType("model")
    exec(compile(text, f"model.py with {edit}", "exec"), vars(module))
    return module


def put_in_place(module, patch):
    """Has all that imported `model` use this module instead, as though model.py had been edited before."""
    assert sys.modules["model"] is unedited
    patch.setitem(sys.modules, "model", module)
    for importer in list(sys.modules.values()):
        if getattr(importer, "__dict__", {}).get("models") is unedited:
            patch.setattr(importer, "models", module)


# -- three steps


def config(edit, settings):
    shape = LLAMA if edit in OF_LLAMA else {}
    cfg = Config(**{**SHAPE, **shape, "device": DEVICE, **settings})
    cfg.batch_tokens = ROWS * cfg.block_size
    return cfg


def steps(edit, shape_of=None, fast=True, unit_mib=None, **settings):
    """(losses, {parameter: its change}) of three steps of a model with an edit; the same on every rank.

    shape_of: the edit whose shape the model has, for edit=None. fast: in bf16 (or fp8) with fused kernels.
    """
    cfg = config(shape_of or edit, dict(precision="bf16" if fast else "fp32") | settings)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "served", set())
        patch.setattr(memory, "UNIT_MIB", memory.UNIT_MIB if unit_mib is None else unit_mib)
        put_in_place(edited(edit), patch)
        world = parallel.join(cfg)
        cfg.attention = best_attention(world.device)[0] if fast else "math"
        if fast and GPU:
            kernels.serve(world.device)
        elif fast:
            kernels.served.add("cpu")
            stand_in_for_cublas(patch.setattr)
        if cfg.compile:
            torch._dynamo.reset()
        job = train.Training(cfg, world, eot=SEPARATOR)
        return three_steps(job, cfg, world)


def three_steps(job, cfg, world):
    draw(job.raw)
    before = whole_parameters(job.raw)
    job.optimizer = torch.optim.SGD(job.raw.parameters())
    groups, group = world.size // cfg.context_parallel, world.rank // cfg.context_parallel
    generator = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(STEPS):
        rows = torch.randint(0, cfg.vocab_size, (ROWS, cfg.block_size + 1), generator=generator)
        rows[:, cfg.block_size // 3] = SEPARATOR
        micros = iter(rows[group::groups].to(world.device).split(cfg.batch_size))

        def next_batch(micros=micros):
            batch = next(micros)
            return context.own_tokens(cfg, world, (batch[:, :-1], batch[:, 1:]))

        loss, _ = job.step(next_batch, lr=0.1)
        losses.append(parallel.sum_over_ranks(loss.clone()).item() / world.size)
    after = whole_parameters(job.raw)
    return losses, {name: after[name] - p for name, p in before.items()}


def draw(model):
    """Weights that depend on names and shapes alone; a layer's results are about as large as its inputs."""
    for name, initial in whole_parameters(model).items():
        whole = torch.randn(initial.shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
        matrix = initial.dim() == 2  # else a norm or a bias
        whole = whole * initial.size(1) ** -0.5 if matrix else 0.1 * whole + initial
        copy_into(model.get_parameter(name), whole)


def whole_parameters(model):
    whole = ((n, p.full_tensor() if hasattr(p, "full_tensor") else p) for n, p in model.named_parameters())
    return {name: p.detach().float().cpu().clone() for name, p in whole}


def steps_in_rank(edit, settings):
    """For ranks.call."""
    found = steps(edit, **settings)
    parallel.stop()
    return found


@functools.cache
def plain(edit, shape_of=None, precision="fp32", **settings):
    """steps() in plain PyTorch and in one process."""
    return steps(edit, shape_of, fast=False, compile=False, precision=precision, **settings)


def errors(found, reference):
    """(largest relative error of a loss, of a parameter's change), of the parameters that both have."""
    losses = [abs(a - b) / b for a, b in zip(found[0], reference[0], strict=True)]
    common = [name for name in found[1].keys() & reference[1].keys() if reference[1][name].any()]
    return max(losses), max(distance(found[1][name], reference[1][name]) for name in common)


def distance(a, b):
    return ((a - b).norm() / b.norm()).item()


def least_alike(found, reference):
    """Smallest cosine of a parameter's change with the one of the reference."""
    pairs = [
        (found[1][name], change) for name, change in reference[1].items() if name in found[1] and change.any()
    ]
    return min(F.cosine_similarity(a.flatten(), b.flatten(), 0).item() for a, b in pairs)


def check(edit, found, **settings):
    """Asserts that three steps are those of plain PyTorch with the edit, and not those without."""
    reference, other = plain(edit, **settings), plain(None, edit, **settings)
    autocast = errors(plain(edit, precision="bf16", **settings), reference)
    loss, change = errors(found, reference)
    assert loss < max(LOSS, 3 * autocast[0]) and change < max(CHANGE, 3 * autocast[1])
    assert errors(found, other)[1] > OTHER, "the edit has no effect"
    same_parameters_changed(found, reference)


def check_fp8(edit, found, **settings):
    reference, other = plain(edit, **settings), plain(None, edit, **settings)
    assert errors(found, reference)[0] < LOSS_FP8 and least_alike(found, reference) > ALIKE
    assert least_alike(found, other) < ALIKE - 0.05, "the edit has no effect"
    same_parameters_changed(found, reference)


def same_parameters_changed(found, reference):
    changed = [{name: bool(p.any()) for name, p in changes.items()} for _, changes in (found, reference)]
    assert changed[0] == changed[1]


# -- with fused kernels


def slow(*case):
    return pytest.param(*case, marks=pytest.mark.slow)


# for the others nothing runs that does not run for one of these
OFTEN = {"attention and MLP in parallel", "post-norm", "another activation", "a gate for each head", "LoRA"}
OFTEN |= {"value residual", "a fused norm on q and k", "a layer before the head", "a skipped layer"}


@pytest.mark.parametrize("edit", [name if name in OFTEN else slow(name) for name in EDITS])
def test_fused_kernels(edit):
    check(edit, steps(edit))


TILES = dict(remat_tile=TILE, block_size=2 * TILE)
REMAT = {
    "selective": dict(remat="selective"),
    "block": dict(remat="block"),
    "block, every other": dict(remat="block", remat_every=2),
    "attention": dict(remat="attention", remat_offload=True),
    "selective in tiles": dict(remat="selective", **TILES),
    "attention in tiles": dict(remat="attention", remat_offload=True, **TILES),
}
FAST = [("value residual", "attention"), ("the embedding in every block", "block")]
FAST += [("a second norm on q and k", "attention")]
SLOW = [slow("value residual", remat) for remat in REMAT if remat != "attention"]
SLOW += [slow("a second norm on q and k", "attention in tiles")]


@pytest.mark.parametrize("edit, remat", FAST + SLOW)
def test_remat(edit, remat):
    """Of a block that takes and returns two tensors, and with q and k in float32."""
    settings = REMAT[remat]
    check(edit, steps(edit, **settings), block_size=settings.get("block_size", SHAPE["block_size"]))


@pytest.mark.parametrize("edit", ["value residual", slow("a gate for each head")])
def test_document_masks(edit):
    """Also differs from the same edit without masks."""
    found = steps(edit, document_mask=True)
    check(edit, found, document_mask=True)
    assert errors(found, plain(edit))[1] > OTHER


@pytest.mark.parametrize("edit", ["LoRA", slow("a layer of every other channel"), slow("value residual")])
def test_fp8(edit):
    check_fp8(edit, steps(edit, precision="fp8"))


@pytest.mark.skipif(GPU, reason="on a GPU the other tests are compiled")
@pytest.mark.parametrize("edit", ["value residual", slow("LoRA")])
def test_compiled_to_graphs(edit, monkeypatch):
    compile_to_graphs(monkeypatch.setattr)
    check(edit, steps(edit, compile=True))


# -- over ranks

SHARDED = dict(parallel="fsdp", unit_mib=0)
ALL_AT_ONCE = dict(parallel="fsdp", context_parallel=2, remat="selective", document_mask=True)
MODES = [
    ("value residual", dict(context_parallel=2)),
    ("value residual", SHARDED),
    ("a layer before the head", dict(parallel="zero2", unit_mib=0, remat="block")),
    ("a skipped layer", {}),  # parameters without a gradient under DDP
    ("a skipped layer", dict(parallel="fsdp")),  # of blocks that would be one unit
    ("attention and MLP in parallel", ALL_AT_ONCE),
    slow("layers run twice", dict(parallel="fsdp")),
    slow("a second norm on q and k", dict(context_parallel=2, remat="attention")),
]


@two_ranks
@pytest.mark.parametrize("edit, mode", MODES)
def test_over_two_ranks(edit, mode):
    batch_size = 2 if "context_parallel" in mode else 1
    found = ranks.call(2, steps_in_rank, edit, dict(batch_size=batch_size, **mode))
    assert found[0][0] == found[1][0]
    check(edit, found[0], **{name: value for name, value in mode.items() if name == "document_mask"})


FP8_MODES = [slow("LoRA", dict(parallel="zero2", unit_mib=0)), slow("value residual", SHARDED)]


@two_ranks
@pytest.mark.parametrize("edit, mode", FP8_MODES)
def test_fp8_over_two_ranks(edit, mode):
    """Blocks' weights are gathered in 8 bits, those of a layer with another forward in bf16."""
    check_fp8(edit, ranks.call(2, steps_in_rank, edit, dict(batch_size=1, precision="fp8", **mode))[0])


# -- the start of a run


PLAIN = {  # operations that run in plain PyTorch, and why; of all others not one does
    "another activation": {("mlp", "another activation"): 2},
    "a gate for each head": {("linear", "a width is no multiple of 8"): 2},
    "norms without weights": {("norm", kernels.UNUSUAL_NORM): 5},
    "LoRA": {("qkv", kernels.OTHER_LAYER): 2},
}


def account(edit):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "served", {DEVICE})
        put_in_place(edited(edit), patch)
        return Account(config(edit, dict(precision="bf16")), torch.device(DEVICE))


@pytest.mark.parametrize("edit", EDITS)
def test_which_operations_become_plain(edit):
    found = account(edit)
    assert found.problem is None
    assert {call: n for call, n in found.calls.items() if call[1]} == PLAIN.get(edit, {})
    assert sum(n for call, n in found.calls.items() if call[1] is None) >= 4


def test_parameters_on_which_the_loss_does_not_depend():
    (_, words), (kind, unused) = account("attention and MLP in parallel").rows()
    assert "norm 3, qkv 2, linear 2, mlp 2, linear_cross_entropy 1" in words
    assert kind == "warning" and "blocks.0.norm_2.weight" in unused and "and 1 more" in unused
