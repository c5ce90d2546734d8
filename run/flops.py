"""What the model of a run computes, found by running its forward and backward once on meta tensors, before training.

model.py may have been edited in any way, so nothing is inferred from settings: the operations and the form that each
takes, the FLOPs for MFU, and the parameters that no loss depends on, are those of the code that runs.
"""

import contextlib
from collections import Counter

import torch
import torch.nn as nn
from torch.utils.flop_counter import FlopCounterMode

import kernels
import model as models

PRECISIONS = {"bf16": torch.bfloat16, "fp8": torch.bfloat16, "fp16": torch.float16}

# Dense peak TFLOP/s by precision, from the vendors' data sheets; the first key found in the device's name counts.
# AMD's fp32 figures are those of its matrix units.
PEAK_TFLOPS = {
    "B200": {"fp8": 4500, "bf16": 2250, "fp16": 2250, "tf32": 1125, "fp32": 75},
    "H200": {"fp8": 1979, "bf16": 989, "fp16": 989, "tf32": 494, "fp32": 67},
    "H100 PCIe": {"fp8": 1513, "bf16": 756, "fp16": 756, "tf32": 378, "fp32": 51},
    "H100 NVL": {"fp8": 1671, "bf16": 835, "fp16": 835, "tf32": 417, "fp32": 60},
    "H100": {"fp8": 1979, "bf16": 989, "fp16": 989, "tf32": 494, "fp32": 67},
    "H800": {"fp8": 1979, "bf16": 989, "fp16": 989, "tf32": 494, "fp32": 67},
    "A100": {"bf16": 312, "fp16": 312, "tf32": 156, "fp32": 19.5},
    "A800": {"bf16": 312, "fp16": 312, "tf32": 156, "fp32": 19.5},
    "L40S": {"fp8": 733, "bf16": 362, "fp16": 362, "tf32": 183, "fp32": 91.6},
    "L4": {"fp8": 242, "bf16": 121, "fp16": 121, "tf32": 60, "fp32": 30.3},
    "A10": {"bf16": 125, "fp16": 125, "tf32": 62.5, "fp32": 31.2},
    "RTX 5090": {"fp8": 419, "bf16": 209.5, "fp16": 209.5, "tf32": 104.8, "fp32": 104.8},
    "RTX 4090": {"fp8": 330, "bf16": 165, "fp16": 165, "tf32": 82.6, "fp32": 82.6},
    "RTX 3090": {"bf16": 71, "fp16": 71, "tf32": 35.6, "fp32": 35.6},
    "V100": {"fp16": 125, "fp32": 15.7},
    "T4": {"fp16": 65, "fp32": 8.1},
    "MI300X": {
        "fp8": 2615,
        "bf16": 1307,
        "fp16": 1307,
        "tf32": 654,
        "fp32": 163,
    },  # as in "AMD Instinct MI300X"
    "MI250X": {
        "bf16": 191.5,
        "fp16": 191.5,
        "fp32": 47.9,
    },  # of a die, half the card's: PyTorch sees two devices
}


def peak_flops(device, precision):
    """Peak FLOP/s of one device at this precision; None where it is unknown (the MFU is then n/a)."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    for key, peaks in PEAK_TFLOPS.items():
        if key in name:
            return peaks[precision] * 1e12 if precision in peaks else None
    return None


class Census:
    """Counts calls of operations: `calls` is {(operation, None or why it took its definition): number}.

    attention_flops: FLOPs of attention's forward, without the half of each square that the causal mask leaves out.
    """

    def __init__(self, device_type, dtype):
        self.where, self.calls, self.inner = (device_type, dtype), Counter(), 0
        self.attention_flops, self.attention_calls = 0, 0

    def note(self, operation, reason, inner):
        """Called by kernels.choose. inner: how many other operations the definition of this one calls."""
        if self.inner:  # called by the definition of an operation whose fast form includes this one
            self.inner -= 1
            return
        self.calls[operation, reason] += 1
        self.inner = 0 if reason else inner

    def calls_of(self, name):
        return sum(count for (operation, _), count in self.calls.items() if operation == name)

    def attended(self, q, k, v):
        """Replaces an attention call: a query sees (T + 1) / 2 keys on average, 2 FLOPs each for QK^T and for AV."""
        (B, H, T, D), out = q.shape, v.size(-1)
        self.attention_calls += 1
        self.attention_flops += B * H * T * (T + 1) * (D + out)
        return q.new_empty(B, H, T, out) + (q.sum() + k.sum() + v.sum())


@contextlib.contextmanager
def census(device_type, dtype):
    """Within it, operations are counted as if they ran on this type of device in this dtype; definitions run."""
    kernels.counting = Census(device_type, dtype)
    try:
        yield kernels.counting
    finally:
        kernels.counting = None


class Account:
    """calls: {(operation, None or why it takes its definition): number}; flops_per_token: forward and backward of a
    training token; parameters: their number; unused: names of those without a gradient; regular: every block ran
    once; bypassed: an attention module ran without its `core`, so that what wraps the core does not take part;
    problem: why nothing is known, if the forward cannot run on meta tensors (then the figures are None)."""

    def __init__(self, cfg, device):
        model = models.on_meta(cfg)
        self.calls, self.flops_per_token, self.problem, runs = Counter(), None, None, Counter()
        self.attention_calls = 0
        self.parameters = sum(p.numel() for p in model.parameters())
        self.plain_linears = sum(type(module) is nn.Linear for module in model.modules())
        for i, block in enumerate(model.blocks):
            block.register_forward_hook(lambda *_, i=i: runs.update([i]))
        for module in model.modules():
            if getattr(module, "core", None) is kernels.attention:
                module.register_forward_hook(lambda *_: runs.update(["attention"]))
        try:
            self.count(model, cfg, device)
        except (
            Exception
        ) as error:  # an edit may do anything, such as read a value, which meta tensors have not
            self.problem = f"{type(error).__name__}: {error}".partition("\n")[0]
        self.bypassed = not self.problem and self.attention_calls < runs["attention"]
        self.unused = [] if self.problem else [n for n, p in model.named_parameters() if p.grad is None]
        self.regular = not self.problem and all(runs[i] == 1 for i in range(len(model.blocks)))

    def count(self, model, cfg, device):
        """MFU counts each matmul weight once a token, causal attention once, no padding rows and no recomputation.

        With document masks it leaves attention out, whose FLOPs depend on the documents' lengths.
        """
        tokens = torch.zeros(1, cfg.block_size, dtype=torch.long, device="meta")
        with census(device.type, PRECISIONS.get(cfg.precision, torch.float32)) as seen:
            with FlopCounterMode(display=False) as counter:
                loss = model(tokens, tokens)
            loss.backward()
        padding = (
            2 * (cfg.padded_vocab - cfg.vocab_size) * cfg.n_embd * bool(seen.calls_of("linear_cross_entropy"))
        )
        attention = 0 if cfg.document_mask else seen.attention_flops
        forward = (counter.get_total_flops() + attention) / cfg.block_size - padding
        self.calls, self.flops_per_token, self.attention_calls = seen.calls, 3 * forward, seen.attention_calls

    def as_settings_say(self, cfg):
        """Whether FLOPs and activations are those of the model that GPTConfig alone describes."""
        block = sum(n * k for n, k in cfg.block_matmuls) + cfg.n_head * cfg.gate_channels
        weights = cfg.n_layer * block + cfg.vocab_size * cfg.n_embd
        keys = 0 if cfg.document_mask else (cfg.block_size + 1) / 2  # that a query sees on average, see count
        attention = 2 * cfg.n_layer * cfg.n_embd * keys
        usual = "another activation" not in {reason for _, reason in self.calls}
        return usual and self.flops_per_token == 6 * (weights + attention)

    def rows(self):
        """Rows of the start block: how many calls of each operation are fast, how many plain, and why."""
        if self.problem:
            words = (
                f"not counted, nor is MFU: model.py's forward does not run on meta tensors ({self.problem})"
            )
            return [("operations", words)]
        fast = [f"{name} {n}" for (name, reason), n in self.calls.items() if reason is None]
        plain = {}
        for (name, reason), n in self.calls.items():
            if reason is not None:
                plain.setdefault(reason, []).append(f"{name} {n}")
        words = [f"fast: {', '.join(fast)}"] * bool(fast)
        words += [f"plain: {', '.join(names)} ({reason})" for reason, names in plain.items()]
        if self.plain_linears:
            words.append(f"{self.plain_linears} nn.Linear by themselves (kernels.Linear has a fast form)")
        rows = [("operations", "; ".join(words))]
        if self.unused:
            names = ", ".join(self.unused[:3]) + f" and {len(self.unused) - 3} more" * (len(self.unused) > 3)
            rows.append(
                ("warning", f"the loss does not depend on {names}: these parameters stay as they are")
            )
        return rows


def parameter_counts(model):
    """(parameters, those in matmuls, head included) of a model: no vocabulary padding, and a shared weight once."""
    cfg = model.cfg
    padding = cfg.padded_vocab - cfg.vocab_size
    total = sum(p.numel() for p in model.parameters()) - padding * sum(cfg.tables)
    return total, sum(
        m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear)
    ) - padding * cfg.n_embd
