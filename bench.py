"""Where the time and the memory go: training steps, and memory by arithmetic.

    python bench.py step config/gpt2_124m.py     # GPUs (torchrun), or the CPU
    python bench.py memory config/llama3_8b.py --world=8 --gpu_gib=80   # no GPU
    python bench.py memory --init_from=hf:NAME_OR_FOLDER       # others' weights

`step` builds what train.py builds and feeds it random tokens with the
frequencies of text. It prints the median step and the GPU time of its
kernels. --trace=FILE writes a chrome trace (chrome://tracing, ui.perfetto.dev),
of a CPU too. --snapshot=FILE writes what the GPU's memory held from the start
on, for pytorch.org/memory_viz. `python bench.py COMMAND --help` lists a
command's settings; measure/COMMAND.py is its code.
"""

import importlib
import sys
from dataclasses import dataclass
from functools import partial

from configurator import parse, run
from run.hf import adopt
from settings import Config, check
from system.errors import fail


@dataclass
class StepConfig(Config):
    # Measurement
    steps: int = 50  # steps timed; 0: none, with --settle=0 --breakdown=False only the first runs
    settle: int = 5  # warm-up steps before them
    gpu_gib: float | None = None  # limit on the memory used of a larger GPU; None: all
    breakdown: bool = True  # GPU time of the longest kernels, from two more steps
    trace: str | None = None  # write a chrome trace of two steps to this file
    snapshot: str | None = None  # writes the first GPU's memory history to this file


@dataclass
class MemoryConfig(Config):
    # Machine
    world: int = 1  # ranks, one a GPU
    gpu_gib: float = 80.0  # memory of a GPU that may be used


COMMANDS = {"step": StepConfig, "memory": MemoryConfig}


def main(name, cfg):
    if name == "step":
        check(cfg)  # before torch is imported, which takes seconds
    importlib.import_module(f"measure.{name}").measure(cfg)
    if name == "step":
        from scale import parallel

        # after measure's locals are gone: FSDP2 modules alive at this point may make it hang
        parallel.stop()


if __name__ == "__main__":
    name = sys.argv.pop(1) if len(sys.argv) > 1 else "--help"
    if name in ("--help", "-h"):
        print(__doc__.strip())
        sys.exit()
    if name not in COMMANDS:
        fail([f"{name} is no command; expected {' or '.join(COMMANDS)}"], 2)
    # of Hugging Face weights `memory` fetches config.json alone
    complete = partial(adopt, files=["config.json"]) if name == "memory" else adopt
    run(partial(main, name), parse(COMMANDS[name], complete=complete))
