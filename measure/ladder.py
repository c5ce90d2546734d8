"""The ladder of GPT-2's training speed: from float32 with plain attention to fp8, one change a rung, with its gain.

A rung is `bench.py step` in a process of its own, with the changes of all rungs up to it: a rung that fails leaves the
memory and the settings of the others alone, and its row's settings repeat it. docs/speed.md says why each rung helps.
"""

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path

import torch

import kernels
from configurator import UserError, refuse, too_small
from fast import chips
from measure import rates as results
from run import files
from run.logger import device_name
from scale import parallel
from settings import Config, GPTConfig, check

FIGURES = {
    "step_ms": results.positive,
    "tokens_per_s": results.positive,
}  # of a file that `step --out` writes


@dataclass(frozen=True)
class Rung:
    name: str
    change: dict  # {setting of bench.StepConfig: value}; rungs above it keep them
    lacks: Callable = lambda chip: None  # chips.Chip -> why it cannot run this rung, or None


def no_tf32(chip):
    return chips.no_bf16(chip) and "it needs matrix units for TF32, which NVIDIA's GPUs have from Ampere on"


def no_flash(chip):
    no_16_bits = chip.maker == "nvidia" and chips.no_bf16(chip)  # a CPU's takes float32 too
    return f"it takes 16-bit numbers only, and {no_16_bits}" if no_16_bits else None


def no_fused_adamw(chip):
    return (
        None
        if chip.maker in ("nvidia", "amd", "cpu")
        else "PyTorch's fused AdamW is for CUDA devices and CPUs"
    )


def no_graph(chip):
    return None if chip.maker in ("nvidia", "amd") else "graphs are for CUDA devices"


PLAIN = dict(
    precision="fp32", compile=False, attention="math", vocab_multiple=1, ops="torch", fused_adamw=False
)
RUNGS = [
    Rung("float32, plain attention", PLAIN),
    Rung("TF32", {"precision": "tf32"}, no_tf32),
    Rung("bf16 autocast", {"precision": "bf16"}, chips.no_bf16),
    Rung("torch.compile", {"compile": True}),
    Rung("flash attention", {"attention": "flash"}, no_flash),
    Rung("cuDNN attention", {"attention": "cudnn"}, chips.no_cudnn_attention),
    Rung("padded vocabulary", {"vocab_multiple": 128}),
    Rung("fused AdamW", {"fused_adamw": True}, no_fused_adamw),
    Rung("fused operations", {"ops": "fused"}, lambda chip: chips.no_fast_forms(chip) or kernels.MISSING),
    Rung("CUDA graph", {"cuda_graph": True}, no_graph),
    Rung("fp8", {"precision": "fp8"}, lambda chip: chips.no_fp8(chip) or kernels.MISSING),
]


def measure(cfg):
    """Prints a row as each rung ends, and writes all of them to cfg.out; cfg: a bench.LadderConfig."""
    common = common_settings(cfg)
    device = parallel.pick_device(cfg.device)
    print(
        f"{device_name(device)}, torch {torch.__version__}; {len(RUNGS)} rungs, each a process that compiles anew"
    )
    print(f"all rungs: python bench.py step {as_words(common)}")
    print(
        f"\n{'rung':<27}{'ms a step':>10}{'tokens/s':>12}{'MFU':>7}{'factor':>8}{'GiB':>7}  change",
        flush=True,
    )
    settings, rows, chip = dict(common), [], chips.of(device)
    for number, rung in enumerate(RUNGS, 1):
        reason = rung.lacks(chip)
        settings |= {} if reason else rung.change  # the rungs above a missing one do without its change
        row = {"left_out": reason} if reason else timed(settings)
        rows.append({"rung": rung.name, "settings": dict(settings), "factor": factor(rows, row), **row})
        print(f"{number:>2} {rung.name:<24}{line(rows[-1], rung)}", flush=True)
        if cfg.out:
            results.write(cfg.out, "ladder", cfg, device_name(device), 1, torch.__version__, {"rungs": rows})
    if not (ran := [row for row in rows if "tokens_per_s" in row]):
        raise UserError("no rung ran; each row above says why")
    print(
        f"\nfrom {ran[0]['rung']} to {ran[-1]['rung']}: {ran[-1]['tokens_per_s'] / ran[0]['tokens_per_s']:.1f} times"
    )


def common_settings(cfg):
    """{name: value} of bench.StepConfig's settings that all rungs share. Raises UserError for a mistake in cfg."""
    refuse(too_small(cfg, {"rows": 1, "steps": 1, "settle": 0}))
    refuse_ranks("ladder")
    if cfg.out:
        results.refuse_unwritable("out", cfg.out)
    shape = {f.name: getattr(cfg, f.name) for f in fields(GPTConfig) if hasattr(cfg, f.name)}
    batch = {
        "batch_size": cfg.rows,
        "batch_tokens": cfg.rows * cfg.block_size,
    }  # one micro-step: an update in each
    check(Config(**shape, **batch, device=cfg.device), 1)
    return (
        shape | batch | {"device": cfg.device, "steps": cfg.steps, "settle": cfg.settle, "breakdown": False}
    )


def refuse_ranks(command):
    if "RANK" in os.environ:
        raise UserError(f"bench.py {command} takes one GPU; start it without torchrun")


def timed(settings):
    """Figures of `bench.py step` with these settings, or {"failed": why}."""
    return figures_of(["step", *as_words(settings).split()], {"figures": FIGURES})


def figures_of(words, form, **variables):
    """Figures that `bench.py WORDS` writes, in a new process, or {"failed": why}.

    form: as in files.misfit; variables: of its environment, besides those of this process.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "figures.json"
        done = start([*words, f"--out={path}"], variables)
        if done.returncode:
            return {"failed": failure(done)}
        return files.read_json(path, form=form)["figures"]


def start(words, variables):
    """`python bench.py WORDS` -> subprocess.CompletedProcess. variables: {name: value} for its environment."""
    script, env = Path(__file__).parent.parent / "bench.py", os.environ | variables
    return subprocess.run([sys.executable, str(script), *words], capture_output=True, text=True, env=env)


def failure(done):
    """Why a process failed: the line of its error, or else its last line; out of memory without the long advice."""
    if done.returncode < 0:  # by the kernel, say, where the host's memory is full
        return f"killed by {signal.Signals(-done.returncode).name}, out of the host's memory perhaps; try fewer rows"
    lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
    errors = [text for text in lines if re.match(r"error: |[\w.]*(Error|Exception|Unsupported): ", text)]
    said = (errors or lines)[-1].removeprefix("error: ")
    return "out of memory; try fewer rows" if "out of memory" in said.lower() else said


def factor(rows, row):
    """Tokens/s over those of the last rung that ran; None for the first, and for one that did not run."""
    before = [r["tokens_per_s"] for r in rows if "tokens_per_s" in r]
    return row["tokens_per_s"] / before[-1] if before and "tokens_per_s" in row else None


def line(row, rung):
    """A row of the table, after the rung's name."""
    if "tokens_per_s" not in row:
        return f"  not here: {row['left_out']}" if "left_out" in row else f"  failed: {row['failed']}"
    (mfu, gib), times = mfu_and_gib(row), f"{v:.2f}x" if (v := row["factor"]) else ""
    return f"{row['step_ms']:>10.1f}{row['tokens_per_s']:>12,.0f}{mfu:>7}{times:>8}{gib:>7}  {as_words(rung.change)}"


def mfu_and_gib(figures):
    """MFU and peak memory of a row in words, n/a where they are not known."""
    mfu, gib = figures.get("mfu"), figures.get("peak_gib")
    return f"{mfu:.1%}" if mfu else "n/a", f"{gib:.1f}" if gib else "n/a"


def as_words(settings):
    return " ".join(f"--{name}={value}" for name, value in settings.items())
