"""A training step timed as train.py runs it, on random tokens, and its GPU time by kind of kernel."""

import itertools
import re
import statistics
import time

import torch
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

import optim
from configurator import UserError, refuse, too_small
from fast import chips
from measure import rates as results
from measure.floor import floor_times, power
from run.flops import peak_flops
from run.logger import describe_device, device_name, show
from scale import context, parallel
from settings import check

KINDS = [  # a kernel is of the first kind whose pattern its name contains
    ("communication", "nccl"),
    ("attention", "sdpa|flash|fmha|cudnn::fusion|pytorch_flash"),
    ("matmul", "nvjet|gemm|cutlass|xmma|splitk|hopper_"),
    ("head + loss", "cross_entropy|exponential_rows|target_logits|log_softmax|nll_loss"),
    ("optimizer", "multi_tensor_apply|fusedadam|lpnorm"),
    ("elementwise", ""),
]


def measure(cfg):
    """Times cfg.steps training steps and prints the result; cfg: a bench.StepConfig."""
    world = parallel.join(cfg)
    began = time.perf_counter()
    check(cfg, world.size)
    refuse(too_small(cfg, {"steps": 0, "settle": 0, "gpu_gib": 1}))
    if not cfg.fused_adamw and (cfg.optimizer != "adamw" or cfg.max_skipped_steps):
        raise UserError("fused_adamw=False is for optimizer=adamw and max_skipped_steps=0; leave it at True")
    if cfg.out:
        results.refuse_unwritable("out", cfg.out)
    on_gpu, say = world.device.type == "cuda", print if world.main else lambda *_: None
    if cfg.gpu:
        imitate(cfg.gpu, world.device)
    if cfg.gpu_gib and on_gpu:
        most = torch.cuda.mem_get_info(world.device)[1]
        torch.cuda.set_per_process_memory_fraction(min(1.0, cfg.gpu_gib * 2**30 / most), world.device)
    if cfg.snapshot and on_gpu:
        torch.cuda.memory._record_memory_history()
    own, rows, job = build(cfg, world)
    if not cfg.fused_adamw:
        job.optimizer = unfused_adamw(job.raw, own)
    next_batch = synthetic(own, world)
    show([describe_device(world), *rows, *job.account.rows()], say)
    step(job, next_batch, cfg)
    first = parallel.synchronize(world.device) - began
    say(f"{'first step':<12} {first:.1f} s after the start, compilation included")
    figures = {"first_step_s": first} | timed(job, next_batch, own, world, say)
    if cfg.breakdown:
        update = update_time(job, next_batch, cfg)
        say(f"{'update':<12} {update * 1e3:.1f} ms, the optimizer's part of a step")
        figures |= {"update_ms": update * 1e3} | (
            breakdown(job, next_batch, own, world, say) if on_gpu else {}
        )
    if cfg.out and world.main:
        results.write(cfg.out, "step", own, device_name(world.device), world.size, torch.__version__, figures)


def imitate(name, device):
    """Has this process take the fast forms that it would take on the GPU of this name, to time them on `device`.

    Raises UserError if the device cannot run them.
    """
    chip, own = chips.named(name), chips.of(device)
    hopper = chips.no_hopper_kernels(chip) is None and chips.no_hopper_kernels(
        own
    )  # code for 9.0 runs there alone
    if chip.maker != own.maker or chip.capability > own.capability or hopper:
        raise UserError(
            f"gpu={name}: {device_name(device)} cannot run all of its forms; expected an older NVIDIA GPU"
        )
    chips.imitated = chip


def step(job, next_batch, cfg):
    """A step at the schedule's first rate: at the full rate a wide model's first steps on random tokens diverge."""
    return job.step(next_batch, optim.learning_rate(0, cfg))


def timed(job, next_batch, cfg, world, say):
    """Prints the time of a step and the memory of the steps until now -> {name: figure}."""
    figures = {}
    for _ in range(cfg.settle):
        step(job, next_batch, cfg)
    if times := step_times(job, next_batch, cfg):
        words, figures = rates(times, cfg, world, job.account.flops_per_token)
        say(f"{'step':<12} {words}")
    if world.device.type == "cuda":
        say(f"{'memory':<12} {memory_peak()}, {power(world.device)}")
        figures["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        if cfg.snapshot:
            torch.cuda.memory._dump_snapshot(cfg.snapshot)
            torch.cuda.memory._record_memory_history(enabled=None)
    return figures


def build(cfg, world):
    """(Config with every "auto" resolved, rows of the start block, the Training) as train.py builds them."""
    import train

    own, rows = train.choose(cfg, world.device)
    return own, rows, train.Training(own, world, eot=separator(own) if own.document_mask else None)


def unfused_adamw(model, cfg):
    """optim.py's AdamW as PyTorch runs it by default on a GPU: each of its operations on all parameters at once."""
    options = dict(lr=cfg.lr, betas=(cfg.beta1, cfg.beta2), eps=cfg.adam_eps)
    return torch.optim.AdamW(optim.param_groups(model, cfg), **options, foreach=True)


def synthetic(cfg, world, count=8):
    """Endless batches of random tokens on the device with the frequencies of text: token n has odds 1/n (Zipf)."""
    generator = torch.Generator().manual_seed(cfg.seed + world.rank // cfg.context_parallel)
    odds = 1 / torch.arange(1, cfg.vocab_size + 1, dtype=torch.float64)
    rows = torch.multinomial(odds, count * cfg.batch_size * (cfg.block_size + 1), True, generator=generator)
    batches = rows.view(count, cfg.batch_size, cfg.block_size + 1).to(world.device)
    pairs = [context.own_tokens(cfg, world, (b[:, :-1], b[:, 1:])) for b in batches]
    return itertools.cycle([(x.contiguous(), y.contiguous()) for x, y in pairs]).__next__


def separator(cfg):
    """The id that occurs once in cfg.document_tokens of `synthetic`'s tokens."""
    harmonic = sum(1 / n for n in range(1, cfg.vocab_size + 1))
    return min(cfg.vocab_size, max(1, round(cfg.document_tokens / harmonic))) - 1


def step_times(job, next_batch, cfg):
    """Seconds of each of cfg.steps steps; as in train.py, a GPU always has the next step queued."""
    device = parallel.device_of(job.raw)
    begin, results, ahead = parallel.Moment(device), [], int(device.type == "cuda")
    for n in range(cfg.steps):
        results.append(parallel.Later(torch.stack(step(job, next_batch, cfg))))
        if n >= ahead:
            results[n - ahead].get()
    if results:
        results[-1].get()
    return [b.since(a) for a, b in itertools.pairwise([begin, *(r.moment for r in results)])]


def update_time(job, next_batch, cfg):
    """Median seconds of the optimizer's update in five steps."""
    device, update, spans = parallel.device_of(job.raw), job.optimizer.step, []

    def timed(*arguments, **options):
        begin = parallel.Moment(device)
        result = update(*arguments, **options)
        spans.append((begin, parallel.Moment(device)))
        return result

    job.optimizer.step = timed
    for _ in range(5):
        step(job, next_batch, cfg)
    del job.optimizer.step  # the class's again
    parallel.synchronize(device)
    return statistics.median(end.since(begin) for begin, end in spans)


def rates(times, cfg, world, flops_per_token):
    """Median step, tokens/s and MFU: (in words, {name: figure})."""
    median = statistics.median(times)
    rate, peak = cfg.batch_tokens / median, peak_flops(world.device, cfg.precision)
    known = peak is not None and flops_per_token is not None
    mfu = rate * flops_per_token / peak / world.size if known else None
    figures = {
        "step_ms": median * 1e3,
        "steps_ms": [t * 1e3 for t in times],
        "tokens_per_s": rate,
        "mfu": mfu,
    }
    spread = f"median of {len(times)} ({min(times) * 1e3:.1f} to {max(times) * 1e3:.1f})"
    return (
        f"{median * 1e3:.1f} ms, {spread}; {rate:,.0f} tokens/s, MFU {f'{mfu:.1%}' if known else 'n/a'}",
        figures,
    )


def memory_peak():
    """Peak memory in words, and how often the allocator had to wait and collect freed blocks before an allocation."""
    peak, held = torch.cuda.max_memory_allocated() / 2**30, torch.cuda.max_memory_reserved() / 2**30
    waits = torch.cuda.memory_stats().get("num_alloc_retries", 0)
    return f"{peak:.1f} GiB at the peak, {held:.1f} reserved" + f", {waits} allocation retries" * (waits > 0)


def breakdown(job, next_batch, cfg, world, say):
    """Prints the GPU time of a step by kind of kernel beside the floor, and the kernels that take most of it.

    Returns {"ms": {kind: ms a step}, "floor_ms": {kind: ms a step}}.
    """
    micros, steps = job.accumulation, 2
    trace = cfg.trace if world.main else None
    events = kernel_events(lambda: [step(job, next_batch, cfg) for _ in range(steps)], trace)
    by_kind, wall, busy = times_by_kind(events, head_events(job, next_batch, cfg, world), micros, steps)
    floor, hot, watts = floor_times(cfg, world.device)
    floor, hot = {kind: ms * micros for kind, ms in floor.items()}, hot * micros
    say(f"\n{'ms a step':<28}{'measured':>10}{'bf16 floor':>12}")
    for kind in ("matmul", "attention", "head + loss", "elementwise", "optimizer", "communication"):
        least = f"{floor[kind]:12.1f}" if kind in floor else ""
        name = {"communication": "communication, exposed", "matmul": "matmul without the head"}.get(
            kind, kind
        )
        say(f"{name:<28}{by_kind[kind]:10.1f}{least}")
    say(
        f"{'idle':<28}{wall - busy:10.1f}{'':<15}{kernels_and_advice(len(events) / steps, wall - busy, wall)}"
    )
    least = sum(floor.values())
    say(f"{'all':<28}{wall:10.1f}{least:12.1f}   the floor is {cfg.batch_tokens / least * 1e3:,.0f} tokens/s")
    say(
        f"{'floor back to back for 3 s':<38}{hot:12.1f}   {cfg.batch_tokens / hot * 1e3:,.0f} tokens/s, {watts}"
    )
    say(
        "\nkernels by time                                                     ms a step   times      us each"
    )
    names = {name for name, *_ in events}
    for name in sorted(names, key=lambda n: -sum(e[2] - e[1] for e in events if e[0] == n))[:16]:
        times = [e[2] - e[1] for e in events if e[0] == name]
        each = f"{len(times) / steps:7.0f} {sum(times) / len(times) * 1e3:12.1f}"
        say(f"  {name[:64]:<64} {sum(times) / steps:10.2f} {each}")
    return {"ms": by_kind | {"idle": wall - busy}, "floor_ms": floor | {"back to back": hot}}


def kernels_and_advice(kernels, idle, wall):
    """How many kernels a step has, in words, and what to try where the GPU idles for over 5% of it; idle, wall: ms."""
    waits = (
        "; the GPU waits for the host: try a larger --batch_size, or --cuda_graph" if idle > wall / 20 else ""
    )
    return f"{kernels:,.0f} kernels a step{waits}"


def head_events(job, next_batch, cfg, world, rounds=16):
    """Kernel events of the head and loss alone, forward and backward, divided by `rounds`; [] for a sharded head.

    16 rounds are long enough for the GPU to reach the clock that it has in a step.
    """
    targets = next_batch()[1]
    x = torch.randn(*targets.shape, cfg.n_embd, device=world.device, dtype=torch.bfloat16)

    def head_alone():
        with job.autocast:
            loss = job.raw.head(x.requires_grad_(), targets, "mean")
        torch.autograd.grad(
            loss, [x, job.raw.head.weight]
        )  # not into .grad, whose hooks would start a reduction

    if isinstance(job.raw.head.weight, DTensor):
        return []
    events = kernel_events(lambda: [head_alone() for _ in range(rounds)])
    return [(name, begin / rounds, end / rounds) for name, begin, end in events]


def times_by_kind(events, head, micros, steps):
    """({kind: ms a step}, ms from the first kernel to the last, ms with any kernel running).

    head: events of the head alone, whose GEMMs and elementwise kernels are moved to "head + loss".
    """
    by_kind = {kind: total(events, kind) / steps for kind, _ in KINDS}
    in_head = sum(total(head, kind) for kind, _ in KINDS) * micros
    for kind in ("matmul", "elementwise"):
        by_kind[kind] -= total(head, kind) * micros
    by_kind["head + loss"] = in_head or by_kind["head + loss"]
    busy = union(events) / steps
    by_kind["communication"] = busy - union([e for e in events if kind_of(e[0]) != "communication"]) / steps
    wall = (max(e[2] for e in events) - min(e[1] for e in events)) / steps
    return by_kind, wall, busy


def kernel_events(work, trace=None):
    """[(name, begin, end) in ms] of the GPU kernels of work(); trace: a file for a chrome trace."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as prof:  # without it, torch 2.11 warns
        work()
        torch.cuda.synchronize()
    if trace:
        prof.export_chrome_trace(trace)
    events = [e for e in prof.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return [(e.name, e.time_range.start / 1e3, e.time_range.end / 1e3) for e in events]


def kind_of(name):
    """The kind of a kernel by its name."""
    return next(kind for kind, pattern in KINDS if re.search(pattern, name, re.IGNORECASE))


def total(events, kind):
    """Sum of the durations of the events of a kind, in ms."""
    return sum(end - begin for name, begin, end in events if kind_of(name) == kind)


def union(events):
    """ms in which at least one of the events was running."""
    covered, reached = 0.0, float("-inf")
    for _, begin, end in sorted(events, key=lambda e: e[1]):
        covered += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return covered
