"""What a model computes (operations, FLOPs, MFU), from a forward and backward of any model.py on meta."""

import math
import re
from collections import Counter
from functools import partial

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

import kernels
import model as models
from errors import UserError, listed
from fast import forms
from scale import generators
from scale.precision import DTYPES

PEAK_TFLOPS = {  # dense, from data sheets, by precision; the first pattern in a device's name counts
    "B200": {"fp8": 4500, "bf16": 2250, "fp16": 2250, "tf32": 1125, "fp32": 75},
    "H100 PCIe": {"fp8": 1513, "bf16": 756, "fp16": 756, "tf32": 378, "fp32": 51},
    "H100 NVL": {"fp8": 1671, "bf16": 835, "fp16": 835, "tf32": 417, "fp32": 60},
    "H100|H200|H800": {"fp8": 1979, "bf16": 989, "fp16": 989, "tf32": 494, "fp32": 67},
    "A100|A800": {"bf16": 312, "fp16": 312, "tf32": 156, "fp32": 19.5},
    "L40S": {"fp8": 733, "bf16": 362, "fp16": 362, "tf32": 183, "fp32": 91.6},
    "L4": {"fp8": 242, "bf16": 121, "fp16": 121, "tf32": 60, "fp32": 30.3},
    "A10": {"bf16": 125, "fp16": 125, "tf32": 62.5, "fp32": 31.2},
    "RTX 5090": {"fp8": 419, "bf16": 209.5, "fp16": 209.5, "tf32": 104.8, "fp32": 104.8},
    "RTX 4090": {"fp8": 330, "bf16": 165, "fp16": 165, "tf32": 82.6, "fp32": 82.6},
    "RTX 3090": {"bf16": 71, "fp16": 71, "tf32": 35.6, "fp32": 35.6},
    "V100": {"fp16": 125, "fp32": 15.7},
    "T4": {"fp16": 65, "fp32": 8.1},
    "MI300X": {"fp8": 2615, "bf16": 1307, "fp16": 1307, "tf32": 654, "fp32": 163},  # fp32: of matrix units
}


def peak_flops(device, precision):
    """Peak FLOP/s of one device at this precision; None where it is unknown (the MFU is then n/a)."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    peaks = next((peaks for pattern, peaks in PEAK_TFLOPS.items() if re.search(pattern, name)), {})
    return peaks[precision] * 1e12 if precision in peaks else None


def parameter_counts(model):
    """(parameters, those in matmuls) of a model: no vocabulary padding, and a shared weight once."""
    cfg, padding = model.cfg, model.cfg.padded_vocab - model.cfg.vocab_size
    matmuls = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))
    total = sum(p.numel() for p in model.parameters())
    return total - padding * sum(cfg.tables), matmuls - padding * cfg.n_embd


class Census:
    """Within it, operations run in plain PyTorch. calls: {(operation, None or why it is not fused): n}."""

    def __init__(self, device_type, dtype):
        self.where, self.calls, self.inner = (device_type, dtype), Counter(), 0
        self.attention_flops, self.attention_calls = 0, 0

    def __enter__(self):
        forms.counting = self
        return self

    def __exit__(self, *_):
        forms.counting = None

    def note(self, operation, reason, inner):
        """Called by forms.fused. inner: how many other operations this one calls where it is not fused."""
        if self.inner:  # called by an operation whose fused kernel includes this one
            self.inner -= 1
            return
        self.calls[operation, reason] += 1
        self.inner = 0 if reason else inner

    def weight(self, layer):
        """A linear layer's weight, as no Parameter: only those that an edit reads itself are noted."""
        with torch._C.DisableTorchFunction():
            return layer.weight.view_as(layer.weight)

    def elsewhere(self, core, *inputs):
        """Calls another function that stands in attention's place."""
        self.attention_calls += 1
        return core(*inputs)

    def attended(self, q, k, v):
        """Replaces attention; a query sees (T + 1) / 2 keys on average, 2 FLOPs each for QK^T and for AV."""
        (B, H, T, D), out = q.shape, v.size(-1)
        self.attention_calls += 1
        self.attention_flops += B * H * T * (T + 1) * (D + out)
        return q.new_empty(B, H, T, out) + (q.sum() + k.sum() + v.sum())


class Reads(TorchFunctionMode):
    """Within it, notes the parameters from which a function computes tensors."""

    def __init__(self):
        super().__init__()
        self.parameters = set()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if any(torch.is_tensor(leaf) for leaf in tree_leaves(result)):
            given = tree_leaves((args, kwargs))
            self.parameters.update(leaf for leaf in given if isinstance(leaf, torch.nn.Parameter))
        return result


class Account:
    """What a model computes: `calls`, flops_per_token, peak FLOP/s, unused (parameters without a gradient).

    regular: every block ran once. bypassed: one ran without attn.core. draws: one drew from numpy's or
    Python's random numbers. updates: buffers of blocks that it changed. read_elsewhere: names of the blocks'
    linear layers whose weight is read by something other than an operation of kernels.py. problem: why the
    forward could not be run without values, so that nothing of this is known. chooses: values may then decide
    which parameters it uses.
    """

    def __init__(self, cfg, device, again=False):
        model, runs = models.on_meta(cfg), Counter()
        self.peak = peak_flops(device, cfg.precision)
        self.parameters = sum(p.numel() for p in model.parameters())
        drawn = generators.Drawn()
        for block in model.blocks:
            block.register_forward_pre_hook(drawn.begin)
            block.register_forward_hook(drawn.end)
            block.register_forward_hook(lambda block, *_: runs.update([block]))
        before = {name: b._version for name, b in model.blocks.named_buffers("blocks")}
        self.flops_per_token = self.problem = None
        with Census(device.type, DTYPES.get(cfg.precision, torch.float32)) as seen, Reads() as reads:
            for module in model.modules():
                usual = getattr(module, "core", None) is kernels.attention and "attention" not in forms.edits
                if isinstance(module, models.Attention) and not usual:
                    module.core = partial(seen.elsewhere, module.core)
            try:
                self.flops_per_token = flops_per_token(model, cfg, seen)
            except UserError:
                raise
            except Exception as error:  # meta tensors have no values, and that fails again
                self.problem = f"{type(error).__name__}: {error}".partition("\n")[0]
                if not again and not Account(cfg, device, again=True).problem:
                    raise
        known, self.calls = not self.problem, seen.calls
        self.bypassed = known and seen.attention_calls < runs.total()
        trained = [(name, p) for name, p in model.named_parameters() if known and p.requires_grad]
        self.unused = [name for name, p in trained if p.grad is None]
        self.draws = drawn.found
        layers = dict(model.blocks.named_modules(prefix="blocks"))
        linear = {name: layer for name, layer in layers.items() if isinstance(layer, torch.nn.Linear)}
        read = [name for name, layer in linear.items() if layer.weight in reads.parameters]
        self.read_elsewhere = read if known else [*linear]
        self.chooses = not known  # perhaps, by values, which parameters a forward uses
        after = model.blocks.named_buffers("blocks")
        self.updates = [name for name, buffer in after if buffer._version != before[name]]
        self.new = []  # parameters and buffers that no checkpoint gave a value, though one was loaded
        self.regular = known and all(runs[block] == 1 for block in model.blocks)

    @property
    def some_without_gradient(self):
        """Whether a micro-step may leave parameters without a gradient."""
        return self.chooses or bool(self.unused)

    def mfu(self, tokens_per_s, devices):
        """Model FLOPs utilisation (https://arxiv.org/abs/2204.02311, appendix B); None if it is unknown."""
        known = self.flops_per_token and self.peak
        return tokens_per_s * self.flops_per_token / (devices * self.peak) if known else None

    def rows(self):
        """Rows of the start-up summary: which calls of operations are fused, which are plain, and why."""
        rows = []
        if self.new:
            rows.append(("new", f"{listed(self.new)}: not in the checkpoint, with their initial values"))
        if self.problem:
            why = f"not counted, nor is MFU: the forward fails on meta ({self.problem})"
            return [*rows, ("operations", why)]
        by_reason = {}
        for (name, reason), n in self.calls.items():
            by_reason.setdefault(reason, []).append(f"{name} {n}")
        words = [f"fast: {', '.join(by_reason.pop(None))}"] if None in by_reason else []
        words += [f"plain: {', '.join(names)} ({reason})" for reason, names in by_reason.items()]
        rows.append(("operations", "; ".join(words)))
        if self.unused:
            names = listed(self.unused)
            rows.append(("warning", f"no loss depends on {names}: these parameters stay as they are"))
        return rows


def flops_per_token(model, cfg, seen):
    """FLOPs of a token for MFU, without padding rows, recomputation and attention within documents."""
    tokens = torch.zeros(1, cfg.block_size, dtype=torch.long, device="meta")
    with FlopCounterMode(display=False) as counter:
        found = model(tokens, tokens, None, "mean")
    refuse_other_results(found)
    found[0].backward()
    usual_loss = "linear_cross_entropy" in {name for name, _ in seen.calls}
    padding = 2 * (cfg.padded_vocab - cfg.vocab_size) * cfg.n_embd * usual_loss
    attention = 0 if cfg.document_mask else seen.attention_flops
    return 3 * ((counter.get_total_flops() + attention) / cfg.block_size - padding)


def refuse_other_results(found):
    """Raises UserError unless a forward returned (loss, count, extras): two numbers and a dict."""
    expected = "expected (loss, count, extras), see docs/experiment.md"
    if not isinstance(found, tuple) or len(found) != 3:
        raise UserError(f"model.py: GPT.forward returned {type(found).__name__}, {expected}")
    loss, count, extras = found
    shapes = {name: tuple(getattr(value, "shape", ())) for name, value in (("loss", loss), ("count", count))}
    for name, shape in shapes.items():
        if math.prod(shape) != 1:
            raise UserError(f"model.py: GPT.forward returned a {name} of shape {shape}; {expected}")
    if not isinstance(extras, dict):
        raise UserError(f"model.py: GPT.forward returned {type(extras).__name__} for extras; {expected}")
