"""GPT-2's training speed from plain float32 to fp8, one change a rung (docs/speed.md).

    python results/speed/ladder.py --rows=16       # as build-nanogpt; 64: as config/gpt2_124m.py

A rung is a process with the changes of all rungs up to it. One that fails says why, and the next
ones go on. Further words are settings of `bench.py step` for all rungs, such as --steps=20 or
--n_layer=24. On a CPU it takes a small model and --device=cpu; the rungs that need a GPU say so.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import optim
from bench import StepConfig
from configurator import run
from measure import step
from results.processes import last_line, need_gpu
from scale import parallel
from settings import check

PLAIN = (
    "--precision=fp32 --compile=False --attention=math --vocab_multiple=1 "
    "--ops=torch --fused_adamw=False"
)
RUNGS = {
    "float32, plain attention": PLAIN,
    "TF32": "--precision=tf32",
    "bf16 autocast": "--precision=bf16",
    "torch.compile": "--compile=True",
    "flash attention": "--attention=flash",
    "cuDNN attention": "--attention=cudnn",
    "padded vocabulary": "--vocab_multiple=128",
    "fused AdamW": "--fused_adamw=True",
    "fused kernels": "--ops=fused",
    "CUDA graph": "--cuda_graph=True",
    "fp8": "--precision=fp8",
}

SMALL = "--n_layer=2 --n_embd=64 --n_head=2 --block_size=64 --vocab_size=257 --rows=2 --steps=2"


@dataclass
class Config(StepConfig):
    rows: int = 16  # rows of block_size tokens in a step, which is one micro-step
    fused_adamw: bool = True  # False: PyTorch's default on a GPU, a kernel an operation
    alone: bool = False  # time these settings in this process


def main(cfg):
    if cfg.alone:
        measure(cfg)
        return 0
    need_gpu(cfg.device, SMALL)
    settings = {}
    codes = []
    for name, change in RUNGS.items():
        tried = settings | dict(word.split("=") for word in change.split())
        words = [f"{key}={value}" for key, value in tried.items()]
        command = [sys.executable, __file__, *sys.argv[1:], "--alone=True", *words]
        said, code = last_line(command)
        print(f"{name:<26}{said}   {change}", flush=True)
        codes.append(code)
        if code == 0:
            settings = tried
    return int(all(codes))  # 1 if none ended well


def measure(cfg):
    cfg.batch_size, cfg.batch_tokens = cfg.rows, cfg.rows * cfg.block_size
    check(cfg, 1)
    world = parallel.join(cfg)
    own, _, job = step.build(cfg, world)
    if not cfg.fused_adamw:
        options = dict(lr=cfg.lr, betas=(cfg.beta1, cfg.beta2), foreach=True)
        job.state.optimizer = torch.optim.AdamW(optim.param_groups(job.state.model, cfg), **options)
    next_batch = step.synthetic(own, world)
    for _ in range(1 + cfg.settle):
        step.step(job, next_batch, own)
    times = step.step_times(job, next_batch, own)
    gib = torch.cuda.max_memory_allocated() / 2**30
    print(f"{step.speed(times, own, world, job.analysis)}, {gib:.1f} GiB")


if __name__ == "__main__":
    run(main, Config)
