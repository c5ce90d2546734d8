"""What any model.py computes (operations, FLOPs, MFU), from a forward and backward on meta."""

import inspect
import pickle
import re
from collections import Counter

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

import model as models
from fast import forms
from scale import generators
from scale.precision import DTYPES
from system.errors import UserError, listed

PRECISIONS = "fp8", "bf16", "fp16", "tf32", "fp32"
# {pattern: dense TFLOP/s in these precisions}, from data sheets
# of the patterns in a device's name the first counts
PEAK_TFLOPS = {
    "B200|GB200": (4500, 2250, 2250, 1125, 75),
    "H100 PCIe|H800 PCIe": (1513, 756, 756, 378, 51),
    "H100 NVL|H200 NVL": (1671, 835, 835, 417, 60),
    "H100|H200|H800|GH200": (1979, 989, 989, 494, 67),
    "A100|A800": (None, 312, 312, 156, 19.5),
    "L40S": (733, 362, 362, 183, 91.6),
    "L4": (242, 121, 121, 60, 30.3),
    "A10": (None, 125, 125, 62.5, 31.2),
    "RTX 5090": (419, 209.5, 209.5, 104.8, 104.8),
    "RTX 4090": (330, 165, 165, 82.6, 82.6),
    "RTX 3090": (None, 71, 71, 35.6, 35.6),
    "V100": (None, None, 125, None, 15.7),
    "T4": (None, None, 65, None, 8.1),
    "MI300X": (2615, 1307, 1307, 654, 163),  # fp32: of matrix units
}


def peak_flops(device, precision):
    """Peak FLOP/s of one device at this precision; None if unknown, and the MFU is then n/a."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    if re.search(r"\b(Laptop|D|MIG)\b", name):  # a smaller chip of that name, or a part of one
        return None
    for pattern, peaks in PEAK_TFLOPS.items():
        if re.search(rf"\b({pattern})\b", name):  # an L40 is no L4, an RTX A1000 no A100
            tflops = peaks[PRECISIONS.index(precision)]
            return None if tflops is None else tflops * 1e12
    return None


def total_and_matmul_parameters(model):
    """(parameters, those in matmuls) of a model: no vocabulary padding, a shared weight once."""
    cfg, padding = model.cfg, model.cfg.padded_vocab - model.cfg.vocab_size
    weights = {m.weight for m in model.modules() if isinstance(m, torch.nn.Linear)}
    matmuls = sum(weight.numel() for weight in weights)
    total = sum(p.numel() for p in model.parameters())
    return total - padding * sum(cfg.tables), matmuls - padding * cfg.n_embd


class OperationCounter:
    """Within it operations run in plain PyTorch and are counted.

    It learns of them from forms.fused and forms.attention.

    calls: {(operation, None or why it is not fused): n}.
    """

    def __init__(self, device_type, dtype):
        self.where = device_type, dtype
        self.calls = Counter()
        self.attention = self.causal_attention = 0  # FLOPs of all pairs of tokens, of those seen
        self.inside = False  # of an operation that is fused, and so are those that it calls

    def __enter__(self):
        forms.counting = self
        return self

    def __exit__(self, *_):
        forms.counting = None

    def run(self, form, definition, args, kwargs):
        """A call in plain PyTorch, which the form notes."""
        outer = self.inside
        result = form(definition, *args, **kwargs)
        if result is None:
            result = definition(*args, **kwargs)
        self.inside = outer
        return result

    def note(self, operation, reason):
        if not self.inside:
            self.calls[operation, reason] += 1
            self.inside = reason is None

    def weight(self, layer):
        """A linear layer's weight, but no Parameter: only reads by an edit itself are noted."""
        with torch._C.DisableTorchFunction():
            return layer.weight.view_as(layer.weight)

    def attended(self, q, v):
        """Of T keys a query sees (T + 1) / 2 on average, 2 FLOPs each for QK^T and for AV."""
        T = q.size(2)
        of_a_key = 2 * q[..., 0].numel() * (q.size(-1) + v.size(-1))
        self.attention += T * of_a_key
        self.causal_attention += (T + 1) * of_a_key // 2


class ParametersRead(TorchFunctionMode):
    """Within it, notes the parameters from which a function computes tensors."""

    def __init__(self):
        super().__init__()
        self.found = set()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if any(torch.is_tensor(leaf) for leaf in tree_leaves(result)):
            given = tree_leaves((args, kwargs))
            self.found.update(leaf for leaf in given if isinstance(leaf, torch.nn.Parameter))
        return result


def on_meta(cfg):
    """A model of which nothing has values, or, where `__init__` reads some, no parameter has."""
    try:
        with torch.device("meta"):
            model = models.on_meta(cfg)
    except Exception:  # of any type: the edit's
        model = models.on_meta(cfg)
    return model.to("meta")


class ModelAnalysis:
    """What a model computes: its `calls`, flops_per_token, `peak` (FLOP/s), `unused` parameters.

    unused: parameters without a gradient. regular: every block ran once. draws: the forward drew
    from numpy's or Python's random numbers, which may decide what runs.
    read_elsewhere: names of the blocks' linear layers whose weight is read by something other than
    an operation of kernels.py. problem: why the forward could not be run without values, so that
    nothing of this is known: values may decide which parameters it uses.
    """

    def __init__(self, cfg, device):
        model = on_meta(cfg)
        refuse_other_forms(model)
        runs = count_runs(model)
        operations = OperationCounter(device.type, DTYPES.get(cfg.precision, torch.float32))
        self.flops_per_token = self.problem = None
        generators.seed(cfg.seed)  # as all ranks do, since DDP depends on what is found
        before = pickle.dumps(generators.others())
        with operations, ParametersRead() as read:
            try:
                self.flops_per_token = flops_per_token(model, cfg, operations)
            except UserError:
                raise
            except Exception as error:  # of any type: meta tensors have no values
                if isinstance(error, TypeError) and "meta" not in str(error):
                    raise
                self.problem = f"{type(error).__name__}: {error}".partition("\n")[0]
        self.calls = operations.calls
        self.peak = peak_flops(device, cfg.precision)
        self.parameters = sum(p.numel() for p in model.parameters())
        # parameters and buffers that no checkpoint gave a value, though one was loaded
        self.new = []
        self.draws = before != pickle.dumps(generators.others())
        self.regular = False
        self.unused, self.read_elsewhere = [], []
        if not self.problem:
            self.regular = all(runs[block] == 1 for block in model.blocks)
            for name, p in model.named_parameters():
                if p.requires_grad and p.grad is None:
                    self.unused.append(name)
        for name, layer in model.blocks.named_modules(prefix="blocks"):
            if isinstance(layer, torch.nn.Linear) and (self.problem or layer.weight in read.found):
                self.read_elsewhere.append(name)

    @property
    def some_without_gradient(self):
        """Whether a micro-step may leave parameters without a gradient."""
        return bool(self.problem or self.unused or self.draws)

    def mfu(self, tokens_per_s, devices):
        """Model FLOPs utilisation; None if it is unknown.

        As in https://arxiv.org/abs/2204.02311, appendix B.
        """
        if not self.flops_per_token or not self.peak:
            return None
        return tokens_per_s * self.flops_per_token / (devices * self.peak)

    def rows(self):
        """Rows of the start-up summary: which calls are fused, which are plain, and why."""
        rows = []
        if self.new:
            rows.append(
                ("new", f"{listed(self.new)}: not in the checkpoint, with their initial values")
            )
        if self.problem:
            why = f"not counted, nor is MFU: the forward fails on meta ({self.problem})"
            return [*rows, ("operations", why)]
        by_reason = {}
        for (name, reason), n in self.calls.items():
            by_reason.setdefault(reason, []).append(f"{name} {n}")
        words = []
        if None in by_reason:
            words.append(f"fast: {', '.join(by_reason.pop(None))}")
        for reason, names in by_reason.items():
            words.append(f"plain: {', '.join(names)} ({reason})")
        rows.append(("operations", "; ".join(words)))
        for edit in dict.fromkeys(forms.edits.values()):
            rows.append(("edited", f"{edit}, and runs as it stands, in plain PyTorch"))
        if self.unused:
            names = listed(self.unused)
            rows.append(
                ("warning", f"no loss depends on {names}: these parameters stay as they are")
            )
        return rows


def count_runs(model):
    """Counter of {a block: its runs} from now on."""
    runs = Counter()

    def count(block, *_):
        runs[block] += 1

    for block in set(model.blocks):  # an edit may have one of them several times
        block.register_forward_hook(count)
    return runs


def flops_per_token(model, cfg, operations):
    """FLOPs of a token for MFU.

    Padding rows and recomputation do not count, nor does attention with document masks, whose FLOPs
    the data decide.
    """
    tokens = torch.zeros(1, cfg.block_size, dtype=torch.long, device="meta")
    with FlopCounterMode(display=False) as counter:
        found = model(tokens, tokens, None, "mean")
    refuse_other_results(found)
    found[0].backward()
    forward = counter.get_total_flops() - operations.attention
    if not cfg.document_mask:
        forward += operations.causal_attention
    padding = 0
    if "linear_cross_entropy" in {name for name, _ in operations.calls}:  # the usual loss
        padding = 2 * (cfg.padded_vocab - cfg.vocab_size) * cfg.n_embd
    return 3 * (forward / cfg.block_size - padding)


def refuse_other_results(found):
    """Raises UserError unless a forward returned (loss, count, extras): two numbers and a dict."""
    right = isinstance(found, tuple) and len(found) == 3 and isinstance(found[2], dict)
    if right:
        right = all(torch.is_tensor(number) and number.numel() == 1 for number in found[:2])
    if not right:
        shown = [tuple(leaf.shape) for leaf in tree_leaves(found) if torch.is_tensor(leaf)]
        expected = "expected (loss, count, extras), see docs/experiment.md"
        raise UserError(f"model.py: GPT.forward returned tensors of shapes {shown}; {expected}")


def refuse_other_forms(model):
    """Raises UserError for a forward that takes other arguments, and for a part compiled before."""
    try:
        inspect.signature(model.forward).bind("idx", "targets", "positions", reduction="mean")
    except TypeError as error:
        expected = "expected forward(idx, targets, positions=None, reduction='mean')"
        raise UserError(f"model.py: GPT.forward: {error}; {expected}") from None
    for name, _ in model.named_modules():
        if "_orig_mod" in name:
            raise UserError(f"model.py: {name} is compiled in __init__, and again by --compile")
