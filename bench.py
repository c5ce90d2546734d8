"""Where the time and the memory go: training steps, single operations, collectives; and estimates by arithmetic.

    python bench.py step config/gpt2_124m.py [--key=value ...]                   # one GPU (or the CPU)
    torchrun --standalone --nproc_per_node=4 bench.py step config/gpt2_124m.py   # several GPUs
    python bench.py ladder --rows=16                                             # from float32 to fp8, rung by rung
    python bench.py peers config/llama_124m.py                                   # beside transformers, Liger, nanoGPT
    python bench.py ops                                                          # loss, norm, MLP, attention; one GPU
    torchrun --standalone --nproc_per_node=4 bench.py comm                       # all-reduce and others by size
    python bench.py support [--gpu=h100]                                         # which fast forms run, why others not
    python bench.py memory config/llama3_8b.py --world=8 --gpu_gib=80            # memory that a run needs; no GPU
    python bench.py plan config/llama3_8b.py --world=8 --gpu_gib=80              # the fastest settings that fit; no GPU
    python bench.py plan config/llama3_8b.py --rates=h100,step.json,comm.json --write=config/mine.py

`step` builds what train.py builds and feeds it random tokens with the frequencies of text. It prints the median step,
the GPU time by kind of kernel, and the floor: every GEMM and attention kernel timed alone, and all of them back to
back. --trace=FILE writes a chrome trace (chrome://tracing, ui.perfetto.dev), --snapshot=FILE the allocations
(pytorch.org/memory_viz). --out=FILE of `step` and `comm` writes the figures as JSON, with which `plan --rates` plans.
`ladder` is `step` eleven times, each time with one change more that makes GPT-2 124M faster (docs/speed.md).
`python bench.py COMMAND --help` lists a command's settings. The code is in measure/.
"""

import sys
from dataclasses import dataclass
from typing import Literal

from configurator import UserError, run
from settings import Config, check


@dataclass
class StepConfig(Config):
    # Measurement
    steps: int = 50  # steps timed; 0: none, with --settle=0 --breakdown=False only the first step runs
    settle: int = 5  # warm-up steps before them
    document_tokens: int = 8192  # with document_mask: mean length of a document
    gpu_gib: float | None = None  # limit on the memory used of a larger GPU; None: all
    gpu: str | None = None  # take the forms of an older GPU, as `support` names them: a100, 4090, h100
    fused_adamw: bool = (
        True  # AdamW in one kernel, as in training; False: PyTorch's default, a kernel an operation
    )
    breakdown: bool = True  # GPU time by kind of kernel and the floor, from two more steps
    trace: str | None = None  # write a chrome trace of two steps to this file
    snapshot: str | None = None  # write a record of all allocations until the last timed step to this file
    out: str | None = None  # write the settings and figures to this file as JSON, for plan --rates


@dataclass
class LadderConfig:
    rows: int = 16  # rows of block_size tokens in a step; 16 as published, or 64 as in config/gpt2_124m.py
    steps: int = 20  # steps timed in each rung
    settle: int = 5  # warm-up steps before them
    device: str = "auto"  # auto, cpu, cuda, mps
    out: str | None = None  # write settings and figures of all rungs to this file as JSON, after each rung
    # Model: GPT-2 124M, or another size
    vocab_size: int = 50257  # number of token ids
    block_size: int = 1024  # tokens in a sequence
    n_layer: int = 12  # blocks
    n_head: int = 12  # heads
    n_embd: int = 768  # width


@dataclass
class PeersConfig(Config):
    # Measurement
    steps: int = 20  # steps timed
    settle: int = 5  # warm-up steps before them
    peer: Literal["all", "ours", "hf", "liger", "nanogpt"] = (
        "all"  # all: in turn, each in a process of its own
    )
    clone: str | None = None  # folder of a clone of nanoGPT, for its row
    curves: str | None = (
        None  # train on data_dir instead of random tokens; losses go to this folder, for plot.py
    )
    out: str | None = None  # write the figures to this file as JSON


@dataclass
class OpsConfig:
    rounds: int = 10  # repetitions of each operation
    device: str = "cuda"  # a CUDA device


@dataclass
class CommConfig:
    device: str = "auto"  # auto, cpu, cuda
    max_mib: int = 1024  # largest message, in MiB of bf16
    rounds: int = 10  # repetitions of each collective
    out: str | None = None  # write the figures to this file as JSON, for plan --rates


@dataclass
class SupportConfig:
    gpu: str | None = None  # a100, 4090, h100, h200, b200 or mi300x instead of this machine's
    device: str = "auto"  # auto, cpu, cuda, mps


@dataclass
class MemoryConfig(Config):
    # Machine to plan for
    world: int = 1  # ranks, one a GPU
    gpu_gib: float = 80.0  # memory of a GPU that may be used


@dataclass
class PlanConfig(MemoryConfig):
    show: int = 8  # candidates printed
    rates: str = "h200"  # h200 (measured), h100, a100 (data sheets), files of --out; several: h100,step.json
    write: str | None = None  # write the best settings to this new config file, which train.py takes


def step(cfg):
    check(cfg)  # before torch is imported, which takes seconds
    from measure import step

    on_device(step.measure, cfg)


def ladder(cfg):
    from measure import ladder

    ladder.measure(cfg)


def peers(cfg):
    check(cfg, 1)
    from measure import peers

    on_device(peers.measure, cfg)


def ops(cfg):
    from measure import ops

    on_device(ops.measure, cfg)


def comm(cfg):
    from measure import comm

    on_device(comm.measure, cfg)


def support(cfg):
    from measure import support

    support.measure(cfg)


def memory(cfg):
    from measure import tables

    tables.memory_table(cfg)


def plan(cfg):
    from measure import tables

    tables.plan_table(cfg)


def on_device(measure, cfg):
    """Runs measure(cfg); out of memory becomes one line of advice, and the process group is closed at the end."""
    import torch

    from scale import memory, parallel

    try:
        measure(cfg)
    except torch.OutOfMemoryError:
        if not isinstance(cfg, StepConfig):
            raise UserError("out of memory: another process may use this GPU (nvidia-smi)") from None
        _, budget = torch.cuda.mem_get_info()
        budget = min(budget, (cfg.gpu_gib or budget) * 2**30)
        raise UserError(memory.advice(cfg, parallel.rank_and_size()[1], budget)) from None
    finally:
        parallel.stop()  # after measure's locals are gone: FSDP2 modules alive at this point may make it hang


COMMANDS = {
    "step": (step, StepConfig),
    "ladder": (ladder, LadderConfig),
    "peers": (peers, PeersConfig),
    "ops": (ops, OpsConfig),
    "comm": (comm, CommConfig),
    "support": (support, SupportConfig),
    "memory": (memory, MemoryConfig),
    "plan": (plan, PlanConfig),
}

if __name__ == "__main__":
    name = sys.argv.pop(1) if len(sys.argv) > 1 else "--help"
    if name not in COMMANDS:
        if name not in ("--help", "-h"):
            print(
                f"error: bench.py {name}: expected one of {', '.join(COMMANDS)}; see --help", file=sys.stderr
            )
            sys.exit(2)
        print(__doc__)
        sys.exit()
    run(*COMMANDS[name])
