"""Compiles every Triton kernel that a training step launches, for GPUs that need not be there.

    python tests/targets.py 80 90    # kernel, capability, shared memory, warps, registers, stack

A GPU is given by its compute capability. One block takes a step on the CPU, in which launches
compile and do not run; cuBLASLt's GEMMs compute nothing, and those of the loss on Hopper are left
out.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import triton
from compare import CPU
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

import fast
import model as models
from fast import cublas, forms, hopper, loss
from settings import GPTConfig

GPT2 = dict(n_embd=768, n_head=12, vocab_size=50257)
LLAMA = dict(norm="rmsnorm", positions="rope", mlp="swiglu", bias=False, tie_embeddings=False)
SHAPES = [
    GPT2,
    GPT2 | dict(n_embd=1600, n_head=25, mlp="relu2", positions="rope", qk_norm=True),
    LLAMA | dict(n_embd=8192, n_head=64, n_kv_head=8, n_hidden=28672, vocab_size=4096),
]
HEADS = [(768, 50_304), (8192, 128_256)]  # width, rows of the vocabulary: of Hopper's loss
TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"


def device(capability):
    """Stands for a GPU in Triton: what its compiler asks of a driver."""
    answers = dict(target=GPUTarget("cuda", capability, 32), device=capability, stream=0)
    asked = {
        f"get_current_{what}": lambda *_, answer=answer: answer for what, answer in answers.items()
    }
    return SimpleNamespace(**asked, get_active_torch_device=lambda: CPU)


def compiled(capability):
    """{(kernel, hash): CompiledKernel} of each shape's step, in bf16 and, if supported, in fp8."""
    found, launch = {}, JITFunction.run

    def compile_only(self, *arguments, grid, warmup, **options):
        kernel = launch(self, *arguments, grid=grid, warmup=True, **options)
        found[self.__name__, kernel.hash] = kernel

    triton.runtime.driver.set_active(device(capability))
    JITFunction.run = compile_only
    try:
        for shape in SHAPES:
            for fp8 in (False, True)[: 1 + (capability >= 89)]:
                step(shape, fp8)
        folded(capability)
        if capability >= 89:
            gather(torch.zeros(256, 512))
        if capability == 90:
            for head in HEADS:
                hopper_loss(*head)
    finally:
        JITFunction.run = launch
    return found


def step(shape, fp8):
    cfg = GPTConfig(block_size=64, n_layer=1, **shape)
    model = models.allocate(models.on_meta(cfg), CPU)
    if fp8:
        for layer in model.modules():
            if type(layer) in (models.Linear, models.Head):
                fast.fp8.train_in_fp8(layer)
        fast.fp8.reset(model)
    for p in model.parameters():  # up to 1 billion
        p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    tokens = torch.randint(0, 1000, (2, 64))
    with torch.autocast("cpu", torch.bfloat16):
        model(tokens, tokens)[0].backward()


def folded(capability):
    """What fusion.py alone asks of the kernels."""
    x, stats = torch.zeros(64, 768, dtype=torch.bfloat16), torch.zeros(2, 64)
    fast.norm.norm_forward(x, x, torch.zeros(768), None, 1e-5, False, False)
    fast.norm.norm_backward(x, x, x, stats, torch.zeros(768), False, x[:, :12].contiguous())
    if capability >= 89:
        gates = [x[:, :6].contiguous()]
        for what, beside in dict(gate=gates, norm=[stats, stats], shifted_norm=[stats] * 3).items():
            fast.fp8.cast([x], torch.zeros(4), beside, what)


def gather(weight):
    """What two ranks' FSDP2 does with a weight in 8 bits."""
    layer = torch.nn.Module()
    layer.w_amax = torch.zeros(())
    rows = weight.as_subclass(fast.fp8.ShardIn8Bits)
    (rows8, amax), scale = rows.fsdp_pre_all_gather(None, None, None, layer, None)
    both = torch.cat([rows8, rows8]), torch.stack([amax, amax]).view(2)
    rows.fsdp_post_all_gather(both, scale, torch.bfloat16)


def hopper_loss(width, vocab_rows, tokens=16):
    """The Triton kernels around the CUDA kernel that computes logits and their exponentials."""
    x, w = (torch.zeros(rows, width, dtype=torch.bfloat16) for rows in (tokens, vocab_rows))
    targets, (losses, factors) = torch.zeros(tokens, dtype=torch.int64), torch.zeros(2, tokens)
    real, parts = hopper.exponentials, -(-vocab_rows // hopper.BN)
    hopper.exponentials = lambda *_: torch.zeros(tokens, parts, 2)
    try:
        shifts = loss.target_logits(x, w, targets)
        for grads in (torch.zeros(tokens, vocab_rows, dtype=torch.bfloat16), None):
            loss.exponential_rows(
                x, w, targets, vocab_rows,
                shifts=shifts, losses=losses, factors=factors, grads=grads,
            )  # fmt: skip
    finally:
        hopper.exponentials = real


def resources(kernel):
    """(registers a thread, bytes of stack a thread): spilled registers are on the stack."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        text = subprocess.check_output([TOOLS / "cuobjdump", "-res-usage", file.name], text=True)
    return int(re.search(r"REG:(\d+)", text)[1]), int(re.search(r"STACK:(\d+)", text)[1])


if __name__ == "__main__":
    cublas.matmul = lambda a, b, out, *_, **__: out  # untouched too
    forms.enabled = {"cpu"}
    for capability in map(int, sys.argv[1:]):
        for (name, _), kernel in compiled(capability).items():
            registers, stack = resources(kernel)
            meta = kernel.metadata
            print(name, capability, meta.shared, meta.num_warps, registers, stack, flush=True)
