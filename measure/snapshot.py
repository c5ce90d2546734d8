"""A GPU's memory in the last step, drawn from files of `bench.py step --snapshot=FILE`."""

import pickle

import numpy as np
from matplotlib.figure import Figure

from corpus import as_user_error
from measure.pictures import colors, theme, write
from system.errors import UserError

GIB = 2**30
CHANGES = {"alloc": 1, "free_requested": -1}  # signs of what torch.cuda.memory_allocated counts


def measure(cfg):
    """Draws the files of a bench.SnapshotConfig beside each other, on one scale, into cfg.out."""
    if not cfg.words:
        raise UserError("give a file that bench.py step --snapshot=FILE wrote, or several")
    names = cfg.names.split(",") if cfg.names else cfg.words
    if len(names) != len(cfg.words):
        raise UserError(
            f"names={cfg.names} has {len(names)} names, but there are {len(cfg.words)} files"
        )
    curves = [last_step(read(path)) for path in cfg.words]
    with theme(cfg.dark):
        write(draw(curves, names), cfg.out)


def read(path):
    """The snapshot in a file, a pickle, which may run code when it is read: open your own alone."""
    with as_user_error(f"{path}: not a file of bench.py step --snapshot"), open(path, "rb") as file:
        found = pickle.load(file)
        if "device_traces" not in found:
            raise ValueError("no device_traces in it")
    return found


def last_step(snapshot):
    """[bytes that tensors held after each allocation and each free] of the last step.

    Of the whole history, if the last step is not marked.
    """
    held = 0
    found = []
    for event in max(snapshot["device_traces"], key=len):
        # other actions: of a segment, or of a block whose free was requested before
        if event["action"] in CHANGES:
            held += CHANGES[event["action"]] * event["size"]
            if event["time_us"] >= snapshot.get("last_step", 0):
                found.append(held)
    if not found:
        why = "was bench.py step ended before?"
        raise UserError(f"the snapshot has no allocation in the last step; {why}")
    return found


def draw(curves, names):
    """A figure with a panel for each curve, on the same scale of memory."""
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    panels = figure.subplots(1, len(curves), sharey=True, squeeze=False)[0]
    for axes, curve, name, color in zip(panels, curves, names, colors()):
        sizes = np.array(curve) / GIB
        axes.fill_between(range(len(sizes)), sizes, color=color, alpha=0.35, linewidth=0)
        axes.plot(sizes, color=color, linewidth=1.2)
        axes.axhline(sizes.max(), color=color, linewidth=0.8, linestyle=":")
        axes.set_title(f"{name}: {sizes.max():.1f} GiB at the peak")
        axes.set(xlabel="allocations and frees of a step, in order", xlim=(0, len(sizes) - 1 or 1))
    panels[0].set_ylabel("GiB that tensors hold")
    panels[0].set_ylim(0)
    return figure
