"""A training step timed as in train.py, on random tokens, and its GPU time by kernel."""

import collections
import contextlib
import itertools
import statistics
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import set_checkpoint_early_stop

import optim
import train
from configurator import too_small
from run.build import choose
from run.logger import describe_device, show
from run.signals import errors_explained
from scale import parallel
from system.errors import refuse, say

# ends documents with document_mask: one in 7,800 tokens of `synthetic` in GPT-2's vocabulary
SEPARATOR = 718
PROFILED = 2  # steps that are profiled
SHOWN = 25  # kernels that take most time


def measure(cfg):
    """Times cfg.steps training steps and prints the result; cfg: a checked bench.StepConfig."""
    refuse(too_small(cfg, {"steps": 0, "settle": 0, "gpu_gib": 1}))
    for path in filter(None, [cfg.trace, cfg.snapshot]):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
    world = parallel.join(cfg)
    recorded = contextlib.nullcontext()
    if cfg.snapshot and world.main:
        recorded = history(cfg.snapshot)
    with errors_explained(cfg, world), recorded:
        if cfg.gpu_gib and world.device.type == "cuda":
            most = torch.cuda.mem_get_info(world.device)[1]
            share = min(1.0, cfg.gpu_gib * 2**30 / most)
            torch.cuda.set_per_process_memory_fraction(share, world.device)
        take_steps(cfg, world)


@contextlib.contextmanager
def history(path):
    """Records this process's use of the GPU's memory; writes it at the end, after an error too."""
    torch.cuda.memory._record_memory_history(stacks="python")
    try:
        # activation checkpointing ends a recomputation early by an exception,
        # which the recording loses
        with set_checkpoint_early_stop(False):
            yield
    finally:
        torch.cuda.memory._dump_snapshot(path)
        torch.cuda.memory._record_memory_history(enabled=None)


def take_steps(cfg, world):
    """The work of `measure`."""
    on_gpu = world.device.type == "cuda"
    show([describe_device(world)], say)
    cfg, rows, job = build(cfg, world)
    next_batch = synthetic(cfg, world)
    size = f"{job.accumulation} micro-steps of {cfg.rank_tokens:,} tokens a rank"
    show([*rows, *job.analysis.rows(), *job.rows, ("a step", size)], say)
    for _ in range(1 + cfg.settle):  # the first compiles
        step(job, next_batch, cfg)
    if times := step_times(job, next_batch, cfg):
        show([("step", speed(times, cfg, world, job.analysis))], say)
    if on_gpu:
        peak = torch.cuda.max_memory_allocated() / 2**30
        held = torch.cuda.max_memory_reserved() / 2**30
        show([("memory", f"{peak:.1f} GiB at the peak, {held:.1f} reserved")], say)
    if cfg.trace or cfg.breakdown and on_gpu:
        kernels = profiled(job, next_batch, cfg, world)
    if cfg.breakdown and on_gpu:
        say(f"\n{kernels.total():9.2f} ms  all kernels of a step; the rest of it the GPU waits")
        for name, ms in kernels.most_common(SHOWN):
            say(f"{ms:9.2f} ms  {name[:66]}")


def build(cfg, world):
    """(cfg with every "auto" resolved, rows of the start-up summary, Training), as in train.py."""
    own, rows = choose(cfg, world.device)
    return own, rows, train.Training(own, world, eot=min(SEPARATOR, own.vocab_size - 1))


def step(job, next_batch, cfg):
    """A step at the schedule's first rate: at full rate a wide model diverges on random tokens."""
    optim.set_learning_rate(job.state.optimizer, optim.learning_rate(0, 0.0, cfg))
    totals = job.accumulate(next_batch)
    norm = job.normalize_and_clip(totals)
    job.update(totals, norm)


def synthetic(cfg, world):
    """Endless batches, eight in turn, of random tokens: token n has odds 1/n (Zipf), as in text."""
    generator = torch.Generator().manual_seed(cfg.seed + world.rank // cfg.context_parallel)
    shape = (8, cfg.batch_size, cfg.block_size + 1)
    draws = torch.rand(shape, dtype=torch.float64, generator=generator)
    # the powers fall between n and n + 1 with odds log(1 + 1/n)
    tokens = ((cfg.vocab_size + 1) ** draws).long() - 1
    tokens = tokens.to(world.device)
    batches = zip(tokens[..., :-1].contiguous(), tokens[..., 1:].contiguous())
    return itertools.cycle(batches).__next__


def step_times(job, next_batch, cfg):
    """Seconds of each of cfg.steps steps; as in train.py, a GPU always has the next step queued."""
    device = parallel.device_of(job.state.model)
    moments = [parallel.Moment(device)]
    for _ in range(cfg.steps):
        step(job, next_batch, cfg)
        moments.append(parallel.Moment(device))
        if moments[-2].event:
            moments[-2].event.synchronize()
    parallel.synchronize(device)
    return [b.since(a) for a, b in itertools.pairwise(moments)]


def speed(times, cfg, world, analysis):
    """Median step, tokens/s and MFU in words."""
    median = statistics.median(times)
    rate = cfg.batch_tokens / median
    share = analysis.mfu(rate, world.size)
    used = "n/a" if share is None else f"{share:.1%}"
    spread = f"median of {len(times)} ({min(times) * 1e3:.1f} to {max(times) * 1e3:.1f})"
    return f"{median * 1e3:.1f} ms, {spread}; {rate:,.0f} tokens/s, MFU {used}"


def profiled(job, next_batch, cfg, world):
    """{name: ms a step} of a GPU's kernels or a CPU's operators; rank 0 writes a trace."""
    kind = "CUDA" if world.device.type == "cuda" else "CPU"
    parallel.synchronize(world.device)
    # without acc_events, torch 2.11 warns
    with profile(activities=[getattr(ProfilerActivity, kind)], acc_events=True) as prof:
        for _ in range(PROFILED):
            step(job, next_batch, cfg)
        parallel.synchronize(world.device)
    if cfg.trace and world.main:
        prof.export_chrome_trace(cfg.trace)
    own = getattr(torch.autograd.DeviceType, kind)
    found = collections.Counter()
    for event in prof.events():
        if event.device_type == own:
            found[event.name] += event.time_range.elapsed_us() / 1e3 / PROFILED
    return found
