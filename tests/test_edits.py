"""Edits of model.py and kernels.py take effect and are right: fused, remat, masks, ranks, fp8.

Two steps of train.py's Training and an evaluation are compared with the same edit in plain PyTorch,
float32 and one process. With SGD, since AdamW keeps little more of gradients than their signs.

Tolerances. A bf16 number has a relative error of 2^-9, and a gradient has gone through some twenty
such roundings: 2e-3 in a loss of 16 tokens and 3e-2 in the change of a parameter are what PyTorch's
own autocast does to model.py as it is; of edits that are more sensitive, thrice the error of
autocast. Without the edit some parameter changes by a quarter otherwise at least. fp8 has 4 bits,
gradients 3, and the interpreter loses a carry (see test_fp8.py): directions of changes are
compared, which without the edit are clearly others.
"""

import contextlib
import functools
import sys
import tempfile
import types
import zlib
from pathlib import Path

import pytest
import ranks
import torch
import torch.nn.functional as F
from compare import DEVICE, GPU, LLAMA, error, runs_kernels, slow, take_step
from conftest import ROOT, compile_to_graphs, stand_in_for_cublas
from torch._dynamo import external_utils, symbolic_convert

pytest.importorskip("triton", reason="Triton is installed with PyTorch's CUDA builds only")
import kernels
import model as unedited
import train
from fast import forms, texts
from fast.chips import best_attention
from run import build, evaluate, sampling, source
from run.flops import ModelAnalysis
from scale import activation_checkpointing, context_parallel, documents, memory, parallel
from scale.shards import copy_into
from settings import Config

pytestmark = [pytest.mark.device, runs_kernels]

LOSS, CHANGE, OTHER = 2e-3, 3e-2, 0.25  # relative; see above
LOSS_FP8, ALIKE = (1e-2, 0.95) if GPU else (4e-2, 0.85)  # relative; cosine of changes

STEPS, ROWS, SEPARATOR = 2, 2, 7
SHAPE = dict(n_layer=2, n_head=4, vocab_size=200, vocab_multiple=8, clip=None)
SHAPE |= dict(batch_size=2, compile=GPU)
SHAPE |= dict(n_embd=256, block_size=128) if GPU else dict(n_embd=64, block_size=8)
TILE = 64 if GPU else 8
GROUPED = dict(n_kv_head=2, tie_embeddings=False, **LLAMA)

# -- the edits: {name: [(lines of model.py, what stands there instead), ...]}

ATTEND = "x = x + self.dropout(self.attn(self.norm_1(x), idx, positions))\n"
ATTEND_OF_TWO = "y, first = self.attn(self.norm_1(x), idx, positions, first)\n        x = x + y\n"
TRANSFORM = "x = x + self.dropout(self.mlp(self.norm_2(x)))\n"
BLOCK = "    def forward(self, x, idx, positions):\n        x = x + "
ATTENTION = "    def forward(self, x, idx, positions):\n        q, k, v ="
ATTENTION_PROJ = "        self.proj = Linear(cfg.attention_width, cfg.n_embd, bias=cfg.bias)\n"
CORE = "        y = self.core("
GATE = "y = self.gate(y.transpose(1, 2), x).flatten(2)  # (B, T, H D)\n"
LOOP = """        for mix, block in self.layers:
            x = block(mix(x, embedded), idx, positions)
"""
LOOP_OF_TWO = LOOP.replace("x =", "x, first =").replace("positions)", "positions, first)")
HEAD_GATE = "        self.head_gate = Linear(cfg.n_embd, cfg.n_head)\n"
GATED = "y = (self.head_gate(x).sigmoid().mT.unsqueeze(-1) * y).transpose(1, 2).flatten(2)\n"
NORMED = CORE.replace("y = ", "q, k = self.q_norm_2(q), self.k_norm_2(k)\n        y = ")
LORA = """class LoRA(Linear):
    def __init__(self, width, out, bias):
        super().__init__(width, out, bias)
        self.a, self.b = Linear(width, 16, bias=False), Linear(16, out, bias=False)

    def forward(self, x):
        return super().forward(x) + 0.5 * self.b(self.a(x))


class Attention(nn.Module):
"""


def second_norms(kind):
    """Norms of q and k after RoPE, which are views."""
    parts = f"        self.q_norm_2, self.k_norm_2 = ({kind} for _ in 'qk')\n"
    return [(ATTENTION_PROJ, ATTENTION_PROJ + parts), (CORE, NORMED)]


EDITS = {
    "attention and MLP in parallel": [
        (ATTEND, "h = self.norm_1(x)\n"),  # norm_2 is left without a use, as in PaLM
        (TRANSFORM, "x = x + self.attn(h, idx, positions) + self.mlp(h)\n"),
    ],
    "another activation": [('{"gelu": kernels.gelu,', '{"gelu": torch.sin,')],
    # before the transposition: another layout of attention's gradient
    "a gate for each head": [(ATTENTION_PROJ, ATTENTION_PROJ + HEAD_GATE), (GATE, GATED)],
    # the first block's values go on to all others: a block takes and returns two tensors
    "value residual": [
        (ATTENTION, ATTENTION.replace("positions)", "positions, first)")),
        (CORE, "        v = v if first is None else 0.5 * (v + first)\n" + CORE),
        ("return self.proj(y)\n", "return self.proj(y), v if first is None else first\n"),
        (BLOCK, BLOCK.replace("positions)", "positions, first)")),
        (ATTEND, ATTEND_OF_TWO),
        (TRANSFORM + "        return x\n", TRANSFORM + "        return x, first\n"),
        (LOOP, "        first = None\n" + LOOP_OF_TWO),
    ],
    "a second norm on q and k": second_norms("nn.RMSNorm(cfg.head_size)"),
    "a fused norm on q and k": second_norms("RMSNorm(cfg.head_size, cfg.norm_eps)"),
    "norms without weights": [
        ("LayerNorm(cfg.n_embd, cfg.norm_eps, bias=cfg.bias)", "RMSNorm(cfg.n_embd, None, False)")
    ],
    "a skipped layer": [(LOOP, LOOP.replace("self.layers", "self.layers[::2]"))],
    "a weight used twice": [
        (TRANSFORM, TRANSFORM + "        x = x + F.linear(x, self.attn.proj.weight)\n")
    ],
    "LoRA": [("class Attention(nn.Module):\n", LORA), ("self.qkv = Linear(", "self.qkv = LoRA(")],
}
# -- an edit of each definition in kernels.py that a fused form computes: {name: (text, another)}

DEFINITIONS = {
    "Linear": (
        "F.linear(x, forms.weight_of(self), self.bias)",
        "F.linear(1.5 * x, self.weight, self.bias)",
    ),
    "gelu": ('return F.gelu(x, approximate="tanh")', "return torch.sin(3 * x)"),
    "mlp": ("return down(activation(up(x)))", "return down(activation(up(x))) + x"),
    "LayerNorm": ("self.weight, self.bias, self.eps)", "1.5 * self.weight, self.bias, self.eps)"),
    "rotated": (
        "    in_float32 = x.float()",
        "    x = 4 * F.normalize(x, dim=-1)\n    in_float32 = x.float()",
    ),
    "attention": ("    grouped = q.size(1)", "    q = q * 3\n    grouped = q.size(1)"),
    "plain_cross_entropy": (
        "F.linear(x, weight).float()",
        "3 * torch.sin(F.linear(x, weight).float())",
    ),
}
SHAPES = {"rotated": GROUPED, "a second norm on q and k": GROUPED}
PLAIN = {  # operations that run in plain PyTorch, and why; of all others not one does
    "another activation": {("mlp", "another activation"): 2},
    "a gate for each head": {("linear", "a width is no multiple of 8"): 2},
    "norms without weights": {("norm", forms.UNUSUAL_NORM): 5},
    "LoRA": {("qkv", forms.OTHER_LAYER): 2},
}

TILES = dict(remat_tile=TILE, block_size=2 * TILE)
ATTENTION = dict(remat="attention", remat_offload=True)
MASKED, FP8 = dict(document_mask=True), dict(precision="fp8")
CASES = [
    ("attention and MLP in parallel", {}),
    ("a fused norm on q and k", {}),
    ("a gate for each head", ATTENTION),
    ("value residual", ATTENTION | TILES),
    ("value residual", MASKED),
    ("LoRA", FP8),
    ("a second norm on q and k", ATTENTION),  # q and k in float32
    slow("value residual", dict(remat="selective")),
    slow("value residual", dict(remat="block", remat_every=2)),
]
CASES += [("value residual", dict(compile=True))] * (not GPU)  # there all
# of definitions: what a mode computes without calling them, all others are found to be plain below
CASES += [
    ("Linear", FP8),
    ("mlp", dict(remat="block") | TILES),
    ("gelu", dict(remat="selective")),
    ("LayerNorm", ATTENTION),
    ("attention", MASKED),
    ("rotated", MASKED | dict(remat="block")),
]

SHARDED, ZERO2 = dict(parallel="fsdp", unit_mib=0), dict(parallel="zero2", unit_mib=0)
ALL_AT_ONCE = dict(parallel="fsdp", context_parallel=2, remat="selective", document_mask=True)
IN_FP8 = dict(block_size=128 if GPU else 16, precision="fp8")  # rows: a multiple of 16
MODES = [
    ("value residual", SHARDED | dict(context_parallel=2)),
    ("a skipped layer", dict(parallel="fsdp")),  # of blocks that would be one unit
    ("attention", ALL_AT_ONCE),
    slow("a weight used twice", IN_FP8 | SHARDED),  # which is not gathered in 8 bits
    slow("LoRA", IN_FP8 | ZERO2),  # gathered in 8 bits, but for layers with another forward
]


def replaced(file, edits):
    """The text of a file with edits, (text, its replacement)."""
    text = (ROOT / file).read_text()
    for old, new in edits:
        assert text.count(old) == 1, f"{file} has this {text.count(old)} times, not once:\n{old}"
        text = text.replace(old, new)
    return text


def edited(file, edits):
    """The module of a file with edits."""
    module = types.ModuleType(file.removesuffix(".py"))
    exec(compile(replaced(file, edits), f"{file} with an edit", "exec"), vars(module))
    return module


@contextlib.contextmanager
def in_place(edit):
    """Within it, what imported `model` or `kernels` uses them edited, or for None as they are."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        assert sys.modules["model"] is unedited and not forms.edits
        if edit in DEFINITIONS:
            file = Path(folder, "kernels.py")
            file.write_text(replaced("kernels.py", [DEFINITIONS[edit]]))
            forms.edits.update(texts.edited(file))
            put_in_place(kernels, edited("kernels.py", [DEFINITIONS[edit]]), patch)
            put_in_place(unedited, edited("model.py", []), patch)
        elif edit:
            put_in_place(unedited, edited("model.py", EDITS[edit]), patch)
        try:
            yield
        finally:
            forms.edits.clear()


# so that all are there before one is put in place
IMPORTERS = build, context_parallel, documents, activation_checkpointing, sampling


def put_in_place(old, new, patch):
    patch.setitem(sys.modules, old.__name__, new)
    for importer in list(sys.modules.values()):
        for name in ("models", "kernels"):
            if getattr(importer, "__dict__", {}).get(name) is old and importer.__name__ != __name__:
                patch.setattr(importer, name, new)


def config(edit, settings):
    cfg = Config(**{**SHAPE, **SHAPES.get(edit, {}), "device": DEVICE, **settings})
    cfg.batch_tokens = ROWS * cfg.block_size
    return cfg


def steps(edit, shape_of=None, fast=True, unit_mib=None, **settings):
    """(losses, {parameter: change}) of two steps and an evaluation with an edit; all ranks agree.

    shape_of: the edit whose shape the model has, for edit=None. fast: in bf16 (or fp8) with fused
    kernels.
    """
    cfg = config(shape_of or edit, dict(precision="bf16" if fast else "fp32") | settings)
    with pytest.MonkeyPatch.context() as patch, in_place(edit):
        patch.setattr(forms, "enabled", set())
        patch.setattr(memory, "UNIT_MIB", memory.UNIT_MIB if unit_mib is None else unit_mib)
        world = parallel.join(cfg)
        cfg.attention = best_attention(world.device)[0] if fast else "math"
        if fast and GPU:
            forms.enable(world.device)
        elif fast:
            forms.enabled.add("cpu")
            stand_in_for_cublas(patch.setattr)
        if cfg.compile:
            torch._dynamo.reset()
            forget_modules()
        job = train.Training(cfg, world, eot=SEPARATOR)
        if edit or shape_of:  # else the usual initial weights
            draw(job.state.model)
        return train_and_evaluate(job, cfg, world)


def forget_modules():
    """torch.compile remembers which module a name is; a test may have put another one there."""
    symbolic_convert._import_module.cache_clear()
    for name in [name for name in vars(external_utils) if name.startswith("__import_")]:
        delattr(external_utils, name)


def train_and_evaluate(job, cfg, world):
    before = whole_parameters(job.state.model)
    job.state.optimizer = torch.optim.SGD(job.state.model.parameters())
    groups, group = world.size // cfg.context_parallel, world.rank // cfg.context_parallel
    generator = torch.Generator().manual_seed(0)
    losses = []
    for step in range(STEPS + 1):
        rows = torch.randint(0, cfg.vocab_size, (ROWS, cfg.block_size + 1), generator=generator)
        rows[:, cfg.block_size // 3] = SEPARATOR
        batches = rows[group::groups].to(world.device).split(cfg.batch_size)
        micros = [(batch[:, :-1], batch[:, 1:]) for batch in batches]
        if step < STEPS:
            loss, _ = take_step(job, functools.partial(next, iter(micros)), lr=0.1)
        else:
            after = whole_parameters(job.state.model)
            job.state.model.eval()
            own = [context_parallel.own_tokens(cfg, world, *micro) for micro in micros]
            loss = evaluated(job, own)
        losses.append(parallel.sum_over_ranks(loss.clone()).item() / world.size)
    return losses, {name: after[name] - p for name, p in before.items()}


@torch.no_grad()
def evaluated(job, micros):
    """The mean loss over the targets of these batches, as run/evaluate.py computes it."""
    with job.autocast:
        found = [evaluate.sums_of_rows(job.state.model, *micro) for micro in micros]
    nats, targets, _ = sum(table.sum(1) for table in found)
    return nats / targets


def draw(model):
    """Weights by names and shapes alone; a layer's results are about as large as its inputs."""
    for name, initial in whole_parameters(model).items():
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        whole = torch.randn(initial.shape, generator=generator)
        matrix = initial.dim() == 2  # else a norm or a bias
        whole = whole * initial.size(1) ** -0.5 if matrix else 0.1 * whole + initial
        copy_into(model.get_parameter(name), whole)


def whole_parameters(model):
    found = {}
    for name, p in model.named_parameters():
        whole = p.full_tensor() if hasattr(p, "full_tensor") else p
        found[name] = whole.detach().float().cpu().clone()
    return found


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
    """(largest relative error of a loss, of a parameter's change)"""
    losses = [abs(a - b) / b for a, b in zip(found[0], reference[0], strict=True)]
    return max(losses), max(error(*pair) for pair in pairs(found, reference))


def pairs(found, reference):
    """The changes of each parameter that both have and the reference changes."""
    both = [name for name, change in reference[1].items() if name in found[1] and change.any()]
    return [(found[1][name], reference[1][name]) for name in both]


def least_alike(found, reference):
    """Smallest cosine of a parameter's change with the one of the reference."""
    flat = (map(torch.flatten, pair) for pair in pairs(found, reference))
    return min(F.cosine_similarity(*pair, 0).item() for pair in flat)


def check(edit, found, settings):
    """Asserts that the steps are those of plain PyTorch with the edit.

    They must not be those without the edit, or without the document mask.
    """
    shape = {name: settings[name] for name in ("block_size", "document_mask") if name in settings}
    reference, others = plain(edit, **shape), [plain(None, edit, **shape)]
    others += [plain(edit)] if "document_mask" in shape else []
    loss, change = errors(found, reference)
    if settings.get("precision") == "fp8":
        assert loss < LOSS_FP8 and least_alike(found, reference) > ALIKE
        norms = [sum(p.square().sum() for p in run[1].values()) for run in (found, reference)]
        assert abs(norms[0] / norms[1] - 1) < 0.1
        assert least_alike(found, others[0]) < ALIKE - 0.05, "the edit has no effect"
    else:
        autocast = errors(plain(edit, precision="bf16", **shape), reference)
        assert loss < max(LOSS, 3 * autocast[0]) and change < max(CHANGE, 3 * autocast[1])
        why = "the edit or the mask has no effect"
        assert all(errors(found, other)[1] > OTHER for other in others), why
    for name, change in found[1].items():
        assert bool(change.any()) == bool(reference[1][name].any()), name


def words(value):
    return value if isinstance(value, str) else " ".join(f"{name}={x}" for name, x in value.items())


@pytest.mark.parametrize("edit, settings", CASES, ids=words)
def test_in_one_process(edit, settings, monkeypatch):
    if not GPU:
        compile_to_graphs(monkeypatch.setattr)
    check(edit, steps(edit, **settings), settings)


@pytest.mark.skipif(GPU and torch.cuda.device_count() < 2, reason="needs two GPUs, or none")
@pytest.mark.parametrize("edit, mode", MODES, ids=words)
def test_over_two_ranks(edit, mode):
    settings = dict(batch_size=mode.get("context_parallel", 1), **mode)
    found = ranks.call(2, steps_in_rank, edit, settings)
    assert found[0][0] == found[1][0]
    check(edit, found[0], mode)


@pytest.mark.parametrize("edit", EDITS)
def test_which_operations_become_plain(edit, monkeypatch):
    monkeypatch.setattr(forms, "enabled", {DEVICE})
    with in_place(edit):
        found = ModelAnalysis(config(edit, dict(precision="bf16")), torch.device(DEVICE))
    assert found.problem is None
    assert {call: n for call, n in found.calls.items() if call[1]} == PLAIN.get(edit, {})
    assert sum(n for call, n in found.calls.items() if call[1] is None) >= 4
    unused = {"attention and MLP in parallel": 4, "a skipped layer": 12}
    assert len(found.unused) == unused.get(edit, 0)


# operations that are no more fused after an edit of a definition in kernels.py
EDITED = {
    "Linear": {"linear", "mlp", "qkv"},
    "gelu": {"mlp"},
    "mlp": {"mlp"},
    "LayerNorm": {"norm"},
    "rotated": {"rope"},
    "attention": set(),  # PyTorch's own kernels
    "plain_cross_entropy": {"linear_cross_entropy"},
}


@pytest.mark.parametrize("edit", DEFINITIONS)
def test_the_summary_names_an_edited_definition(edit, monkeypatch):
    monkeypatch.setattr(forms, "enabled", {DEVICE})
    fused, rows = [], []
    for own in (None, edit):
        with in_place(own):
            cfg = config(edit, dict(precision="bf16"))
            found = ModelAnalysis(cfg, torch.device(DEVICE))
            fused.append({name for name, why in found.calls if why is None})
            rows.append(dict(found.rows()))
    assert fused[0] - fused[1] == EDITED[edit]
    assert f"kernels.{edit} was edited" in rows[1]["edited"] and "edited" not in rows[0]


@pytest.mark.parametrize("edit", ["attention", "rotated"])
def test_an_edited_attention_samples_without_a_cache(edit):
    cfg = config(edit, dict(attention="math"))
    sampling.without.cache_clear()
    with in_place(edit):
        model = sys.modules["model"].build(cfg, torch.device(DEVICE), 0).eval()
        assert (sampling.make_cache(model, 0) is None) == (edit == "attention")


def test_the_compile_cache_is_of_these_sources():
    """No graph holds an edit of an operator's backward, so that the graph is as before."""
    build.compile_model(unedited.build(config(None, {}), torch.device(DEVICE), 0))
    assert torch.compiler.config.cache_key_tag == source.tag()
