"""Rates for the plan: by the name of a GPU, or from what `bench.py step` and `comm` measured. Imports no torch.

    python bench.py step config/llama3_8b.py --out=step.json                                  # on the GPU in question
    torchrun --standalone --nproc_per_node=8 bench.py comm --out=comm.json
    python bench.py plan config/llama3_8b.py --world=8 --rates=h100,step.json,comm.json       # later ones override

A step's rates are such that the plan of its settings takes the measured time in GEMMs, in attention and in all else.
"""

import dataclasses
from pathlib import Path

from configurator import UserError, typed
from run import files
from scale import plan
from settings import Config

# Data sheets of the SXM cards: dense FLOP/s in bf16 and fp8, bytes/s of memory, of NVLink, of PCIe in one direction,
# and of the memory of an NVIDIA DGX: two sockets of 8 channels each, DDR4-3200 with the A100, else DDR5-4800.
DATASHEETS = {
    "a100": (312e12, None, 2.04e12, 300e9, 32e9, 410e9),  # 80 GB
    "h100": (989e12, 1979e12, 3.35e12, 450e9, 64e9, 614e9),
    "h200": (989e12, 1979e12, 4.8e12, 450e9, 64e9, 614e9),
}
MESSAGE_MIB = 256  # largest message whose bandwidth counts: FSDP2's and DDP's are of 25 to some 100 MiB


def positive(value):
    """a number over 0"""
    return files.number(value) and value > 0


def some(value):
    """a whole number over 0"""
    return files.count(value) and value > 0


def of_name(name):
    """Rates of a GPU: its data sheet's, each times the share that H200s reach of theirs in training steps."""
    shares = dict(
        matmul=0, matmul_fp8=1, attention=0, memory=2, link=3, all_to_all=3, host=4, cpu=5
    )  # in a data sheet
    own, measured = DATASHEETS[name], DATASHEETS["h200"]
    rates = {k: own[i] and own[i] / measured[i] * getattr(plan.H200, k) for k, i in shares.items()}
    return plan.Rates(**rates)


def of(words):
    """(plan.Rates, lines that say where each is from) for names of GPUs and files, such as "h100,step.json".

    A later one overrides an earlier one; a rate that none of them has is H200's. Raises UserError for an unknown name
    and for a file of another form.
    """
    rates, lines = plan.H200, []
    for word in words.split(","):
        if word in DATASHEETS:
            rates = of_name(word)
            source = "measured in training steps of this repository (docs/results.md), cpu assumed"
            if word != "h200":
                source = "from its data sheet, not measured: each figure times the share that H200s reach of theirs"
            lines = [f"{word}: {source}"]
            continue
        if not Path(word).is_file():
            names = ", ".join(sorted(DATASHEETS))
            raise UserError(
                f"rates={word}: expected one of {names}, or a file that bench.py step or comm --out wrote"
            )
        lines = lines or of("h200")[1]
        found, line = of_file(word)
        rates, lines = dataclasses.replace(rates, **found), [*lines, line]
    return rates, lines


def of_file(path):
    """({name of a rate: value}, a line that says what was measured) from a file that `write` wrote."""
    form = {"bench": ("step", "comm"), "device": files.text, "ranks": some, "figures": {}, "settings": {}}
    result = files.read_json(path, form=form)
    found = of_step(path, result) if result["bench"] == "step" else of_collectives(path, result)
    return found, f"{path}: {' '.join(found)} measured on {result['ranks']} x {result['device']}"


def of_step(path, result):
    """The rates with which plan.seconds gives the measured step's times in GEMMs, in attention and in all else.

    With offload_states the last gives way to the CPU's update: copies count among the GPU's times of "elementwise".
    """
    names = ("matmul", "head + loss", "attention", "elementwise", "optimizer", "idle")
    if "ms" not in result["figures"]:
        raise UserError(
            f"rates={path}: no GPU times by kind of kernel in it; measure on a GPU, with --breakdown=True"
        )
    ms = result["figures"]["ms"]
    if wrong := files.misfit(
        ms, dict.fromkeys(names, files.number) | {"matmul": positive, "attention": positive}
    ):
        raise UserError(f"{path} is damaged: figures.ms: {wrong}")
    known = {field.name for field in dataclasses.fields(Config)}
    try:
        settings = {name: value for name, value in result["settings"].items() if name in known}
        cfg = Config(**typed(Config, settings, known))
        amount, micros = plan.work(cfg, result["ranks"]), cfg.micro_steps(result["ranks"])
    except (UserError, ArithmeticError) as error:
        raise UserError(f"{path} is damaged: settings: {error}") from None
    rest = sum(ms[name] for name in ("elementwise", "optimizer", "idle")) / 1e3
    rest = max(rest - micros * cfg.n_layer * plan.LAUNCH, rest / 2, 1e-6)
    matmul, gemms = "matmul_fp8" if cfg.precision == "fp8" else "matmul", ms["matmul"] + ms["head + loss"]
    found = {matmul: amount["matmul"] / gemms * 1e3, "attention": amount["attention"] / ms["attention"] * 1e3}
    if not cfg.offload_states:
        return found | {"memory": amount["elementwise"] / rest}
    if wrong := files.misfit(result["figures"], {"update_ms": positive, "ms": {}}):
        raise UserError(f"{path} is damaged: figures: {wrong}")
    moved = plan.update_bytes(cfg, result["ranks"]) / result["figures"]["update_ms"] * 1e3
    return found | {"cpu": moved * plan.sharing(result["ranks"])}


def of_collectives(path, result):
    """link: the mean of the collectives of FSDP2 and DDP at the largest message up to MESSAGE_MIB; all_to_all."""
    one = {"mib": positive, "all_reduce?": positive, "all_gather?": positive, "reduce_scatter?": positive}
    form = {"bus_gb_per_s": [one | {"all_to_all?": positive}]}
    if wrong := files.misfit(result["figures"], form):
        raise UserError(f"{path} is damaged: figures: {wrong}")
    rows = [row for row in result["figures"]["bus_gb_per_s"] if row["mib"] <= MESSAGE_MIB]
    largest = max(rows, key=lambda row: row["mib"], default={})
    ring = [largest[name] for name in ("all_reduce", "all_gather", "reduce_scatter") if name in largest]
    if not ring:
        raise UserError(f"{path} is damaged: no collective was measured with up to {MESSAGE_MIB} MiB")
    found = {"link": sum(ring) / len(ring) * 1e9}
    return found | ({"all_to_all": largest["all_to_all"] * 1e9} if "all_to_all" in largest else {})


def refuse_unwritable(setting, path):
    """Raises UserError if a file cannot be made at `path`: before a measurement of minutes instead of after it."""
    folder = Path(path).absolute().parent
    if not folder.is_dir() or Path(path).is_dir():
        what = "is a folder" if Path(path).is_dir() else f"there is no folder {folder}"
        raise UserError(f"{setting}={path}: {what}; give another --{setting}")


def write(path, bench, cfg, device, ranks, version, figures):
    """Writes a result of bench.py as one JSON object. cfg: its settings; version: torch's."""
    result = dict(bench=bench, device=device, ranks=ranks, torch=version, figures=figures)
    try:
        files.write_json(path, result | {"settings": dataclasses.asdict(cfg)})
    except OSError as error:
        raise UserError(f"out={path}: {error.strerror}; give another --out") from None
