"""What any model.py computes (operations, FLOPs, MFU), from a forward and backward on meta."""

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
from system.errors import brief, listed

# {pattern in a device's name: dense TFLOP/s in 16 bits}, from data sheets; the first one counts
PEAK_TFLOPS = {
    "B200|GB200": 2250,
    "H100 PCIe|H800 PCIe": 756,
    "H100 NVL|H200 NVL": 835,
    "H100|H200|H800|GH200": 989,
    "A100|A800": 312,
    "L40S": 362,
    "L4": 121,
    "A10": 125,
    "RTX 5090": 209.5,
    "RTX 4090": 165,
    "RTX 3090": 71,
    "V100": 125,
    "T4": 65,
    "MI300X": 1307,
}
RELATIVE = {"bf16": 1, "fp16": 1, "fp8": 2, "tf32": 0.5}  # to 16 bits


def peak_flops(device, precision):
    """Peak FLOP/s of one device at this precision; None if unknown, and the MFU is then n/a."""
    if device.type != "cuda" or precision not in RELATIVE:
        return None
    name = torch.cuda.get_device_name(device)
    if re.search(r"\b(Laptop|D|MIG)\b", name):  # a smaller chip of that name, or a part of one
        return None
    for pattern, tflops in PEAK_TFLOPS.items():
        if re.search(rf"\b({pattern})\b", name):  # an L40 is no L4, an RTX A1000 no A100
            return tflops * 1e12 * RELATIVE[precision]
    return None


class OperationCounter(TorchFunctionMode):
    """Counts the calls of operations that run within it, and FLOPs; notes which tensors are read.

    calls: Counter of (operation, why it is plain; None: it is fused). read: those that something
    other than an operation takes, parameters among them.
    """

    def __init__(self, device_type, dtype):
        super().__init__()
        self.where = device_type, dtype
        self.calls = Counter()
        self.read = set()
        self.flops = FlopCounterMode(display=False)
        self.causal = 0  # FLOPs of all pairs of tokens, in causal attention
        self.inside = False  # of an operation that is fused, and so are those that it calls

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        causal = kwargs.get("is_causal")
        if causal:
            self.causal -= self.flops.get_total_flops()  # before the call
        result = function(*args, **kwargs)
        if causal:
            self.causal += self.flops.get_total_flops()
        if any(map(torch.is_tensor, tree_leaves(result))):
            self.read.update(filter(torch.is_tensor, tree_leaves((args, kwargs))))
        return result

    def run(self, form, definition, args, kwargs):
        """A call in plain PyTorch, which the form notes; none of the forms returns a result."""
        outer = self.inside
        form(definition, *args, **kwargs)
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


class ModelAnalysis:
    """What a model computes: its `calls`, flops_per_token, `peak` (FLOP/s), `unused` parameters.

    unused: parameters without a gradient. regular: every block ran once. draws: the forward drew
    random numbers on the host, which may decide what runs.
    read_elsewhere: parameters that something other than an operation of kernels.py reads. problem:
    why the forward could not be run without values, so that nothing of this is known: values may
    decide which parameters it uses.
    """

    def __init__(self, cfg, device):
        model = models.on_meta(cfg).to("meta")
        ran = []
        for block in model.blocks:
            block.register_forward_hook(lambda block, *_: ran.append(block))
        operations = OperationCounter(device.type, DTYPES.get(cfg.precision, torch.float32))
        self.flops_per_token = self.problem = None
        generators.seed(cfg.seed)  # as all ranks do, since DDP depends on what is found
        before = generators.on_host()
        forms.counting = operations
        try:
            with operations:
                self.flops_per_token = flops_per_token(model, cfg, operations)
        except Exception as error:  # of any type: meta tensors have no values
            self.problem = brief(error)
        finally:
            forms.counting = None
        self.calls = operations.calls
        self.peak = peak_flops(device, cfg.precision)
        self.parameters = sum(p.numel() for p in model.parameters())
        self.draws = before != generators.on_host()
        self.regular = ran == list(model.blocks)
        self.unused, self.read_elsewhere = [], []
        for name, p in model.named_parameters():
            if self.problem or p in operations.read:
                self.read_elsewhere.append(name)
            if not self.problem and p.requires_grad and p.grad is None:
                self.unused.append(name)

    def mfu(self, tokens_per_s, devices):
        """Model FLOPs utilisation; None if it is unknown.

        As in https://arxiv.org/abs/2204.02311, appendix B.
        """
        if not self.flops_per_token or not self.peak:
            return None
        return tokens_per_s * self.flops_per_token / (devices * self.peak)

    def rows(self):
        """Rows of the start-up summary: which calls are fused, which are plain, and why."""
        if self.problem:
            return [("operations", f"not counted, nor is MFU, on meta: {self.problem}")]
        by_reason = {None: []}
        for (name, reason), n in self.calls.items():
            by_reason.setdefault(reason, []).append(f"{name} {n}")
        rows = [("operations", f"fused: {', '.join(by_reason.pop(None)) or 'none'}")]
        for reason, names in by_reason.items():
            rows.append(("plain", f"{', '.join(names)}: {reason}"))
        for edit in dict.fromkeys(forms.edits.values()):
            rows.append(("edited", f"{edit}, and runs as it stands, in plain PyTorch"))
        if self.unused:
            rows.append(("warning", f"no loss depends on {listed(self.unused)}"))
        return rows


def flops_per_token(model, cfg, operations):
    """FLOPs of a token for MFU.

    Recomputation does not count, nor does attention with document masks, whose FLOPs the data
    decide.
    """
    T = cfg.block_size
    tokens = torch.zeros(1, T, dtype=torch.long, device="meta")
    with operations.flops:
        loss, _, _ = model(tokens, tokens, None, reduction="mean")
    loss.backward()
    forward = operations.flops.get_total_flops() - operations.causal
    if not cfg.document_mask:  # of T keys a query sees (T + 1) / 2 on average
        forward += operations.causal * (T + 1) // (2 * T)
    return 3 * forward / T
