"""A training step timed as train.py runs it, on random tokens, and its GPU time by kind of kernel."""

import contextlib
import itertools
import pickle
import re
import statistics
import time
from functools import partial
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import set_checkpoint_early_stop

import kernels
import optim
import train
from configurator import UserError, refuse, too_small
from run.build import choose
from run.logger import describe_device, progress, show
from run.signals import Watch, errors_explained
from scale import parallel

SEPARATOR = 718  # ends documents with document_mask: one in 8,192 tokens of `synthetic` in GPT-2's vocabulary
NCCL = "communication, exposed"
KINDS = {  # a kernel is of the first kind whose pattern its name contains
    NCCL: "nccl",
    "attention": "sdpa|flash|fmha|cudnn::fusion|pytorch_flash",
    "GEMMs": "nvjet|gemm|cutlass|xmma|splitk|hopper_",  # on Hopper the loss is in the epilogue of the head's
    "loss": "cross_entropy|exponential_rows|target_logits|log_softmax|nll_loss",
    "optimizer": "multi_tensor_apply|fusedadam|lpnorm",
    "elementwise": "",
}


def measure(cfg):
    """Times cfg.steps training steps and prints the result; cfg: a bench.StepConfig that was checked."""
    refuse(too_small(cfg, {"steps": 0, "settle": 0, "gpu_gib": 1}) + without_folder(cfg))
    world = parallel.join(cfg)
    with Watch(world, cfg.timeout_s, saves=False), errors_explained(cfg, world):
        measure_on(world, cfg)


def measure_on(world, cfg):
    """`measure` on the ranks that have joined."""
    began = time.perf_counter()
    on_gpu, say = world.device.type == "cuda", partial(print, flush=True) if world.main else lambda *_: None
    if cfg.snapshot and not on_gpu:
        where = f"which has none on {world.device.type}"
        raise UserError(f"snapshot={cfg.snapshot} is a history of a GPU's memory, {where}; try --trace")
    if cfg.gpu_gib and on_gpu:
        most = torch.cuda.mem_get_info(world.device)[1]
        torch.cuda.set_per_process_memory_fraction(min(1.0, cfg.gpu_gib * 2**30 / most), world.device)
    with history(cfg.snapshot) if cfg.snapshot and world.main else contextlib.nullcontext({}) as marks:
        take_steps(cfg, world, began, say, marks)


def without_folder(cfg):
    """Problems, one line each: files to be written, for which there is no folder."""
    found = []
    for name, path in [("trace", cfg.trace), ("snapshot", cfg.snapshot)]:
        if path and not Path(path).parent.is_dir():
            found.append(f"{name}={path}: there is no folder {Path(path).parent}")
    return found


@contextlib.contextmanager
def history(path):
    """Records what this process does with the GPU's memory; writes it at the end, after an error too.

    Yields a dict, whose entries the file has beside those of torch.cuda.memory._snapshot().
    """
    marks = {}
    torch.cuda.memory._record_memory_history(stacks="python")
    try:
        # a checkpoint that ends its recomputation early does so by an exception, which the recording loses
        with set_checkpoint_early_stop(False):
            yield marks
    finally:
        snapshot = torch.cuda.memory._snapshot() | marks
        torch.cuda.memory._record_memory_history(enabled=None)
        with open(path, "wb") as file:
            pickle.dump(snapshot, file)


def take_steps(cfg, world, began, say, marks):
    """The work of `measure`. began: when the process joined the others; marks: the snapshot's own entries."""
    on_gpu = world.device.type == "cuda"
    show([describe_device(world)], say)
    cfg, rows, job = build(cfg, world)
    next_batch, size = synthetic(cfg, world), f"{job.accumulation} micro-steps of {cfg.rank_tokens:,} tokens"
    show([*rows, *job.analysis.rows(), *job.rows, ("first step", f"{size} a rank ...")], say)
    step(job, next_batch, cfg)
    first = parallel.synchronize(world.device) - began
    show([("first step", f"{first:.1f} s after the start, compilation included")], say)
    for _ in progress(range(cfg.settle), "warm-up steps", bar=False):
        step(job, next_batch, cfg)
    if times := step_times(job, next_batch, cfg):
        show([("step", speed(times, cfg, world, job.analysis))], say)
    if on_gpu:
        peak, held = torch.cuda.max_memory_allocated() / 2**30, torch.cuda.max_memory_reserved() / 2**30
        show([("memory", f"{peak:.1f} GiB at the peak, {held:.1f} reserved")], say)
    if on_gpu and cfg.breakdown:
        breakdown(job, next_batch, cfg, world, say)
    elif cfg.trace:
        two_steps(job, next_batch, cfg, world)
    if cfg.snapshot:
        parallel.synchronize(world.device)
        # us, in the middle of a pause: the history's clock is near this one, not the same
        marks["last_step"] = time.time_ns() // 1000 + 5000
        time.sleep(0.01)
        step(job, next_batch, cfg)
        parallel.synchronize(world.device)


def build(cfg, world):
    """(cfg with every "auto" resolved, rows of the start-up summary, Training) as train.py builds them."""
    own, rows = choose(cfg, world.device)
    eot = min(SEPARATOR, own.vocab_size - 1) if own.document_mask else None
    return own, rows, train.Training(own, world, eot=eot)


def step(job, next_batch, cfg):
    """A step at the schedule's first rate: at the full rate a wide model diverges on random tokens."""
    optim.set_learning_rate(job.state.optimizer, optim.learning_rate(0, 0.0, cfg))
    totals = job.accumulate(next_batch)
    norm = job.clip(totals)
    job.update(totals, norm)


def synthetic(cfg, world, count=8):
    """Endless batches of random tokens with the frequencies of text: token n has odds 1/n (Zipf)."""
    generator = torch.Generator().manual_seed(cfg.seed + world.rank // cfg.context_parallel)
    odds = 1 / torch.arange(1, cfg.vocab_size + 1, dtype=torch.float64)
    rows = torch.multinomial(odds, count * cfg.batch_size * (cfg.block_size + 1), True, generator=generator)
    batches = rows.view(count, cfg.batch_size, cfg.block_size + 1).to(world.device)
    return itertools.cycle([(b[:, :-1].contiguous(), b[:, 1:].contiguous()) for b in batches]).__next__


def step_times(job, next_batch, cfg):
    """Seconds of each of cfg.steps steps; as in train.py, a GPU always has the next step queued."""
    device = parallel.device_of(job.state.model)
    moments = [parallel.Moment(device)]
    for _ in progress(range(cfg.steps), "steps", bar=False):
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


def breakdown(job, next_batch, cfg, world, say):
    """Prints the GPU time of a step by kind of kernel beside the floor, and the kernels that take most."""
    events, steps = two_steps(job, next_batch, cfg, world), 2
    floor = {kind: ms * job.accumulation for kind, ms in floor_times(cfg, world.device).items()}
    floor["all"] = sum(floor.values())
    say(f"\n{'ms a step':<28}{'measured':>10}{'bf16 floor':>12}")
    for kind, ms in times_by_kind(events, steps).items():
        say(f"{kind:<28}{ms:>10.1f}" + (f"{floor[kind]:>12.1f}" if kind in floor else ""))
    say(f"\n{'kernels by time':<66} {'ms a step':>10} {'times':>7} {'us each':>12}")
    by_name = {}
    for name, begin, end in events:
        by_name.setdefault(name, []).append(end - begin)
    for name, times in sorted(by_name.items(), key=lambda item: -sum(item[1]))[:16]:
        each = f"{len(times) / steps:7.0f} {sum(times) / len(times) * 1e3:12.1f}"
        say(f"  {name[:64]:<64} {sum(times) / steps:10.2f} {each}")


def two_steps(job, next_batch, cfg, world):
    """`profiled` two steps; rank 0 writes their trace."""

    def work():
        for _ in range(2):
            step(job, next_batch, cfg)

    return profiled(work, world.device, cfg.trace if world.main else None)


def floor_times(cfg, device):
    """{"GEMMs", "attention": ms of a micro-batch in bf16, forward and backward, each kernel timed alone}."""
    heads = [max(1, n // cfg.context_parallel) for n in (cfg.n_head, cfg.kv_heads, cfg.kv_heads)]
    options = dict(device=device, dtype=torch.bfloat16, requires_grad=True)
    q, k, v = (torch.randn(cfg.batch_size, n, cfg.block_size, cfg.head_size, **options) for n in heads)
    forward = lambda: kernels.attention(q, k, v, cfg.attention)
    y = forward()
    dy = torch.randn_like(y)
    attention = [forward, lambda: torch.autograd.grad(y, (q, k, v), dy, retain_graph=True)]
    gemms = [work for M, K in cfg.block_matmuls for work in three_matmuls(cfg.rank_tokens, K, M, device)]
    head = three_matmuls(cfg.rank_tokens, cfg.n_embd, cfg.padded_vocab, device)
    times = {"GEMMs": cfg.n_layer * sum(map(clock, gemms)) + sum(map(clock, head))}
    return times | {"attention": cfg.n_layer * sum(map(clock, attention))}


def three_matmuls(N, K, M, device):
    """Calls of a linear layer's three GEMMs, x @ W.T, dy @ W and dy.T @ x, for x: (N, K) and W: (M, K)."""
    x, w, dy = (torch.randn(s, device=device, dtype=torch.bfloat16) for s in ((N, K), (M, K), (N, M)))
    y, dx, dw = torch.empty_like(dy), torch.empty_like(x), torch.empty_like(w)
    return [partial(torch.mm, a, b, out=c) for a, b, c in ((x, w.t(), y), (dy, w, dx), (dy.t(), x, dw))]


def clock(work):
    """Median ms of work() on the GPU; its launches are hidden behind the L2 cache's clearing before it."""
    from triton.testing import do_bench

    return do_bench(work, return_mode="median")


def times_by_kind(events, steps):
    """{kind: ms a step}; idle: without any kernel, all: from the first one to the last."""
    by_kind = dict.fromkeys(KINDS, 0.0)
    for name, begin, end in events:
        by_kind[kind_of(name)] += (end - begin) / steps
    busy = union(events) / steps
    by_kind[NCCL] = busy - union([e for e in events if kind_of(e[0]) != NCCL]) / steps
    wall = (max(e[2] for e in events) - min(e[1] for e in events)) / steps
    return by_kind | {"idle": wall - busy, "all": wall}


def profiled(work, device, trace=None):
    """[(name, begin, end) in ms] of a GPU's kernels, or a CPU's operators, in work(); trace: see --trace."""
    kind = "CUDA" if device.type == "cuda" else "CPU"
    activities = [getattr(ProfilerActivity, kind)]
    parallel.synchronize(device)
    with profile(activities=activities, acc_events=True) as prof:  # without acc_events, torch 2.11 warns
        work()
        parallel.synchronize(device)
    if trace:
        prof.export_chrome_trace(trace)
    found = [e for e in prof.events() if e.device_type == getattr(torch.autograd.DeviceType, kind)]
    return [(e.name, e.time_range.start / 1e3, e.time_range.end / 1e3) for e in found]


def kind_of(name):
    return next(kind for kind, pattern in KINDS.items() if re.search(pattern, name, re.IGNORECASE))


def union(events):
    """ms in which at least one of the events was running."""
    covered, reached = 0.0, float("-inf")
    for _, begin, end in sorted(events, key=lambda e: e[1]):
        covered += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return covered
