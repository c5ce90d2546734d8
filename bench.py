"""Where the time goes: the training step, single operations, collectives.

    python bench.py step config/gpt2_124m.py [--key=value ...]                   # one GPU (or the CPU)
    torchrun --standalone --nproc_per_node=4 bench.py step config/gpt2_124m.py   # several
    python bench.py ops                                                          # loss, norms, MLP, attention; one GPU
    torchrun --standalone --nproc_per_node=4 bench.py comm                       # all-reduce and the others, by size
    python bench.py memory config/llama3_8b.py --world=8 --gpu_gib=80            # what a run will take; no GPU needed
    python bench.py plan config/llama3_8b.py --world=8 --gpu_gib=80              # the fastest settings that fit

`step` builds what train.py builds and feeds it random tokens with the frequencies of text. It prints the median step,
the share of matmuls, attention, and so on, and the floor: every matmul and the attention alone, and all in turn.
--trace=FILE writes a chrome trace (chrome://tracing, ui.perfetto.dev), --snapshot=FILE the allocations
(pytorch.org/memory_viz).
"""

import dataclasses
import itertools
import re
import statistics
import sys
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

import context
import cublas
import hopper
import kernels
import memory
import model as models
import parallel
import plan
import train
from configurator import UserError, refuse, run, too_small
from logger import describe_device, device_name, peak_flops, show

KINDS = [  # a kernel is of the first kind whose pattern is in its name
    ("communication", "nccl"),
    ("attention", "sdpa|flash|fmha|cudnn::fusion|pytorch_flash"),
    ("matmul", "nvjet|gemm|cutlass|xmma|splitk|hopper_"),
    ("head + loss", "cross_entropy|exponential_rows|target_logits|log_softmax|nll_loss"),
    ("optimizer", "multi_tensor_apply|fusedadam|lpnorm"),
    ("elementwise", ""),
]


@dataclass
class StepConfig(train.Config):
    steps: int = 50  # steps timed; 0: none, with --settle=0 --breakdown=False there is but the first
    settle: int = 5  # steps before
    document_tokens: int = 8192  # with document_mask: how long documents are, in the mean
    gpu_gib: float | None = None  # memory that may be used, of a GPU with more; None: all
    breakdown: bool = True  # what the time goes into, by kind of kernel; two more steps and the floor's operations
    trace: str | None = None  # write a chrome trace of two steps here
    snapshot: str | None = None  # write a record of the first steps' allocations here


def step(cfg):
    world = parallel.join(cfg)
    began = time.perf_counter()
    train.check(cfg, world.size)
    refuse(too_small(cfg, {"steps": 0, "settle": 0, "gpu_gib": 1}))
    if cfg.gpu_gib and world.device.type == "cuda":
        most = torch.cuda.mem_get_info(world.device)[1]
        torch.cuda.set_per_process_memory_fraction(min(1.0, cfg.gpu_gib * 2**30 / most), world.device)
    own, rows = train.choose(cfg, world.device)
    if cfg.snapshot and world.device.type == "cuda":
        torch.cuda.memory._record_memory_history()
    job = train.build(own, world, eot=separator(own) if own.document_mask else None)
    next_batch = synthetic(own, world)
    say = print if world.main else lambda *_: None
    show([describe_device(world), *rows], say)
    job.step(next_batch, cfg.lr)
    parallel.synchronize(world.device)
    say(f"{'first step':<12} {time.perf_counter() - began:.1f} s after the start, compilation included")
    for _ in range(cfg.settle):
        job.step(next_batch, cfg.lr)
    if times := step_times(job, next_batch, cfg):
        median = statistics.median(times)
        rate, peak = cfg.batch_tokens / median, peak_flops(world.device, own.precision)
        mfu = "n/a" if peak is None else f"{rate * job.raw.flops_per_token() / peak / world.size:.1%}"
        spread = f"median of {len(times)} ({min(times) * 1e3:.1f} to {max(times) * 1e3:.1f})"
        say(f"{'step':<12} {median * 1e3:.1f} ms, {spread}; {rate:,.0f} tokens/s, MFU {mfu}")
    if world.device.type == "cuda":
        say(f"{'memory':<12} {memory_peak()}, {power(world.device)}")
        if cfg.snapshot:
            torch.cuda.memory._dump_snapshot(cfg.snapshot)
            torch.cuda.memory._record_memory_history(enabled=None)
        if cfg.breakdown:
            breakdown(job, next_batch, own, world, say)


def synthetic(cfg, world, count=8):
    """Endless batches of random tokens on the device, the nth most frequent n times as rare as the first (Zipf)."""
    generator = torch.Generator().manual_seed(cfg.seed + world.rank // cfg.context_parallel)
    odds = 1 / torch.arange(1, cfg.vocab_size + 1, dtype=torch.float64)
    rows = torch.multinomial(odds, count * cfg.batch_size * (cfg.block_size + 1), True, generator=generator)
    batches = rows.view(count, cfg.batch_size, cfg.block_size + 1).to(world.device)
    pairs = [context.own_tokens(cfg, world, (b[:, :-1], b[:, 1:])) for b in batches]
    return itertools.cycle([(x.contiguous(), y.contiguous()) for x, y in pairs]).__next__


def separator(cfg):
    """The id that is once in cfg.document_tokens of synthetic's."""
    harmonic = sum(1 / n for n in range(1, cfg.vocab_size + 1))
    return min(cfg.vocab_size, max(1, round(cfg.document_tokens / harmonic))) - 1


def step_times(job, next_batch, cfg):
    """Seconds of each of cfg.steps steps, launched as train.py does: on CUDA one ahead of the one waited for."""
    device = parallel.device_of(job.raw)
    begin, results, ahead = parallel.Moment(device), [], int(device.type == "cuda")
    for step in range(cfg.steps):
        results.append(parallel.Later(torch.stack(job.step(next_batch, cfg.lr))))
        if step >= ahead:
            results[step - ahead].get()
    if results:
        results[-1].get()
    return [b.since(a) for a, b in itertools.pairwise([begin, *(r.moment for r in results)])]


def breakdown(job, next_batch, cfg, world, say):
    """Prints the device time of a step by kind of kernel, beside the floor."""
    micros, steps = job.accumulation, 2
    events = kernel_events(
        lambda: [job.step(next_batch, cfg.lr) for _ in range(steps)], cfg.trace if world.main else None
    )
    targets = next_batch()[1]
    x = torch.randn(*targets.shape, cfg.n_embd, device=world.device, dtype=torch.bfloat16)

    def head_alone():
        with job.autocast:
            loss = job.raw.head(x.requires_grad_(), targets, "mean")
        torch.autograd.grad(loss, [x, job.raw.head.weight])  # into no .grad, whose hooks would start a reduction

    head, rounds = [], 16  # long enough that the clock is what it is in a step
    if not isinstance(job.raw.head.weight, DTensor):  # a sharded head's matmuls are not told from the others'
        head = kernel_events(lambda: [head_alone() for _ in range(rounds)])
    floor, hot, watts = floor_times(cfg, world.device)
    by_kind = {kind: total(events, kind) / steps for kind, _ in KINDS}
    in_head = sum(total(head, kind) for kind, _ in KINDS) * micros / rounds
    for kind in ("matmul", "elementwise"):
        by_kind[kind] -= total(head, kind) * micros / rounds
    by_kind["head + loss"] = in_head or by_kind["head + loss"]
    busy = union(events) / steps
    by_kind["communication"] = busy - union([e for e in events if kind_of(e[0]) != "communication"]) / steps
    wall = (max(e[2] for e in events) - min(e[1] for e in events)) / steps
    say(f"\n{'ms a step':<28}{'measured':>10}{'bf16 floor':>12}")
    for kind in ("matmul", "attention", "head + loss", "elementwise", "optimizer", "communication"):
        least = f"{floor[kind] * micros:12.1f}" if kind in floor else ""
        name = {"communication": "communication, exposed", "matmul": "matmul, head's apart"}.get(kind, kind)
        say(f"{name:<28}{by_kind[kind]:10.1f}{least}")
    say(f"{'idle':<28}{wall - busy:10.1f}")
    least, hot = sum(floor.values()) * micros, hot * micros
    say(f"{'all':<28}{wall:10.1f}{least:12.1f}   the floor is {cfg.batch_tokens / least * 1e3:,.0f} tokens/s")
    say(f"{'the same in turn, for 3 s':<38}{hot:12.1f}   {cfg.batch_tokens / hot * 1e3:,.0f} tokens/s, {watts}")
    say("\nmost time in                                                        ms a step   times      us each")
    names = {name for name, *_ in events}
    for name in sorted(names, key=lambda n: -sum(e[2] - e[1] for e in events if e[0] == n))[:16]:
        times = [e[2] - e[1] for e in events if e[0] == name]
        each = f"{len(times) / steps:7.0f} {sum(times) / len(times) * 1e3:12.1f}"
        say(f"  {name[:64]:<64} {sum(times) / steps:10.2f} {each}")


def kernel_events(work, trace=None):
    """[(name, begin, end) in ms] of what the device did in work()."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        work()
        torch.cuda.synchronize()
    if trace:
        prof.export_chrome_trace(trace)
    events = [e for e in prof.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return [(e.name, e.time_range.start / 1e3, e.time_range.end / 1e3) for e in events]


def kind_of(name):
    return next(kind for kind, pattern in KINDS if re.search(pattern, name, re.IGNORECASE))


def total(events, kind):
    return sum(end - begin for name, begin, end in events if kind_of(name) == kind)


def union(events):
    """ms in which at least one of the events was running."""
    covered, reached = 0.0, float("-inf")
    for _, begin, end in sorted(events, key=lambda e: e[1]):
        covered += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return covered


def floor_times(cfg, device):
    """What the matmuls and causal attention of a micro-batch take in bf16: ({"matmul", "attention", "head + loss"}: ms,
    each timed alone, ms of all in turn at the clock that the chip's power allows, what `power` says of that)."""
    layer, head = floor_work(cfg, device)
    floor = {kind: cfg.n_layer * sum(clock(work) for work in works) for kind, works in layer.items()}
    floor["head + loss"] = sum(clock(work) for work in head)

    def micro_batch():
        for work in [*itertools.chain(*layer.values())] * cfg.n_layer + head:
            work()

    return floor, *sustained(micro_batch, device)


def floor_work(cfg, device):
    """({"matmul", "attention"}: what a layer's forward and backward call, the head's three matmuls)."""
    ranks = cfg.context_parallel
    N, C, D = cfg.batch_size * cfg.block_size // ranks, cfg.n_embd, cfg.head_dim
    q, k, v = (
        torch.randn(cfg.batch_size, h, cfg.block_size, D, device=device, dtype=torch.bfloat16, requires_grad=True)
        for h in (cfg.n_head // ranks, max(1, cfg.kv_heads // ranks), max(1, cfg.kv_heads // ranks))
    )
    y = kernels.attention(q, k, v, cfg.attention)
    dy = torch.randn_like(y)
    layer = {
        "matmul": [work for M, K in cfg.block_matmuls for work in three_matmuls(N, K, M, device)],
        "attention": [
            lambda: kernels.attention(q, k, v, cfg.attention),
            lambda: torch.autograd.grad(y, (q, k, v), dy, retain_graph=True),
        ],
    }
    return layer, three_matmuls(N, C, cfg.padded_vocab, device)


def three_matmuls(N, K, M, device):
    """[x @ W.T, dy @ W, dy.T @ x] for x: (N, K), W: (M, K), each to be called."""
    x, w, dy = (torch.randn(s, device=device, dtype=torch.bfloat16) for s in ((N, K), (M, K), (N, M)))
    y, dx, dw = torch.empty_like(dy), torch.empty_like(x), torch.empty_like(w)
    products = [(x, w.t(), y), (dy, w, dx), (dy.t(), x, dw)]
    return [lambda p=p: torch.mm(p[0], p[1], out=p[2]) for p in products]


def sustained(work, device, seconds=3):
    """(median ms of work(), called over and over for so long, in the second half; what the chip draws at the end)"""
    moments, began = [], time.perf_counter()
    while time.perf_counter() - began < seconds or len(moments) < 3:
        work()
        moments.append(torch.cuda.Event(enable_timing=True))
        moments[-1].record()
        moments[-2:][0].synchronize()  # one ahead of the one waited for
    watts = power(device)
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(moments[len(moments) // 2 :])), watts


def clock(work, rounds=10, repeat=3):
    """Median ms of work() on the device, several launched at once so that the host's time does not count."""
    for _ in range(2):
        began = parallel.synchronize(torch.device("cuda"))
        work()
    if parallel.synchronize(torch.device("cuda")) - began > 0.1:  # long work needs no repetition
        rounds, repeat = 3, 1
    times = []
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(repeat):
            work()
        end.record()
        times.append((begin, end))
    torch.cuda.synchronize()
    return statistics.median(b.elapsed_time(e) for b, e in times) / repeat


def memory_peak():
    """In words, with how often there was no room for a tensor, so that all waited while freed memory was collected."""
    peak, held = torch.cuda.max_memory_allocated() / 2**30, torch.cuda.max_memory_reserved() / 2**30
    waits = torch.cuda.memory_stats().get("num_alloc_retries", 0)
    return f"{peak:.1f} GiB at the peak, {held:.1f} held" + f", {waits} waits for room" * (waits > 0)


def power(device):
    """What the chip draws and its clock just now; n/a where the driver's library is not at hand."""
    try:
        return f"{torch.cuda.power_draw(device) / 1e3:.0f} W at {torch.cuda.clock_rate(device)} MHz just now"
    except Exception:  # pynvml missing
        return "power n/a (pip install nvidia-ml-py)"


@dataclass
class OpsConfig:
    rounds: int = 10  # times each operation is timed
    device: str = "cuda"  # a CUDA device


def ops(cfg):
    """Each operation beside what PyTorch compiles and, for the loss, beside Liger's and CCE's if they are installed."""
    if not torch.cuda.is_available():
        raise UserError("bench.py ops needs an NVIDIA GPU, none found")
    print(f"{device_name(torch.device(cfg.device))}, torch {torch.__version__}; bf16; forward and backward together\n")
    print(f"{'linear + cross-entropy, mean':<44}{'ms':>10}{'MiB':>10}")
    for N, C, V, vocab in [(65_536, 768, 50_304, 50_257), (32_768, 4_096, 128_256, 128_256)]:
        loss_table(N, C, V, vocab, cfg.rounds)
    print(f"\n{'65,536 x 768':<44}{'ms':>10}")
    sublayer_table(cfg.rounds)
    if hopper.available(torch.device(cfg.device)):
        print(f"\n{'products, 65,536 x 768 x 3,072, 200 on end':<55}{'us':>9}")
        product_table(cfg.rounds)


def product_table(rounds):
    """Those that hopper.py has, beside cuBLASLt's; so many that the chip is at its power limit, as in a step."""
    M, C, H = 65_536, 768, 3072
    x, up, down, before = (
        torch.randn(*shape, device="cuda", dtype=torch.bfloat16) for shape in ((M, C), (H, C), (C, H), (M, H))
    )
    column_sums = lambda y: y.sum(0, dtype=torch.float32)
    bias, out, aux = before[0].clone(), torch.empty_like(before), torch.empty_like(before)
    rows = [
        ("plain, the fastest", lambda: cublas.matmul(x, up.t(), out)),
        ("bias and GELU, both results kept, cuBLASLt", lambda: cublas.matmul(x, up.t(), out, bias=bias, gelu=aux)),
        ("  ours", lambda: hopper.gelu(x, up, bias)),
        (
            "times the GELU's slope, column sums, cuBLASLt",
            lambda: column_sums(cublas.matmul(x, down, out, dgelu=before)),
        ),
        ("  ours", lambda: hopper.dgelu(x, down, before)),
    ]
    for name, work in rows:
        print(f"{name:<55}{clock(work, rounds, 200) * 1e3:9.0f}", flush=True)


def loss_table(N, C, V, vocab, rounds):
    import fused

    x = torch.randn(1, N, C, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = (torch.randn(V, C, device="cuda") * 0.02).bfloat16().requires_grad_()
    targets = torch.randint(0, vocab, (1, N), device="cuda")
    plain = torch.compile(kernels.linear_cross_entropy)

    def ours(mib):
        def loss():
            kernels.LOGITS_BYTES = mib * 2**20
            return fused.linear_cross_entropy(x, weight, targets, "mean", vocab)

        return loss

    rows = [
        ("torch.compile", lambda: plain(x, weight, targets, "mean", vocab)),
        ("ours, 256 MiB of logits at a time", ours(256)),
        ("ours, 1 GiB", ours(1024)),
        ("Liger", liger(x, weight, targets)),
        ("CCE", cce(x, weight, targets)),
    ]
    print(f"{N:,} x {C:,} x {V:,}")
    print(f"{'  three matmuls alone':<44}{sum(map(clock, three_matmuls(N, C, V, 'cuda'))):10.1f}")
    torch.cuda.empty_cache()
    for name, loss in rows:
        if loss is None:
            print(f"  {name:<42}{'not installed':>20}")
            continue

        def work(loss=loss):
            loss().backward()
            x.grad = weight.grad = None

        work()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        mib = (torch.cuda.max_memory_allocated() - before) / 2**20
        print(f"  {name:<42}{clock(work, rounds, 1):10.1f}{mib:10.0f}", flush=True)


def liger(x, weight, targets):
    try:
        from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction as Function
    except ImportError:
        return None
    flat = targets.flatten()

    def loss():
        result = Function.apply(x[0], weight, flat)
        return result[0] if isinstance(result, tuple) else result

    return loss


def cce(x, weight, targets):
    try:
        from cut_cross_entropy import linear_cross_entropy
    except ImportError:
        return None
    return lambda: linear_cross_entropy(x, weight, targets)


def sublayer_table(rounds):
    import fused

    B, T, C, H = 64, 1024, 768, 12
    shape = models.GPTConfig(n_embd=C, n_head=H, attention="cudnn")
    x, branch, dy = (torch.randn(B, T, C, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    x.requires_grad_(), branch.requires_grad_()
    bias = torch.zeros(C, device="cuda", requires_grad=True)
    norm = nn.LayerNorm(C, device="cuda")

    def torch_add_norm(x, branch, bias):
        total = x + branch + bias.to(x.dtype)
        return total, F.layer_norm(total.float(), (C,), norm.weight, norm.bias, norm.eps).to(x.dtype)

    compiled = torch.compile(torch_add_norm)
    pair = (dy, dy)
    timed(rounds, "residual + bias + LayerNorm, torch.compile", lambda: compiled(x, branch, bias), pair)
    timed(rounds, "  ours", lambda: fused.add_norm(fused.Pending(x, branch, bias), norm), pair)
    plain = models.MLP(shape, models.gelu).cuda().bfloat16()
    mlp = models.MLP(shape, models.gelu).cuda()
    fused.swap_modules(nn.ModuleList([mlp]))
    compiled_mlp = torch.compile(plain)
    timed(rounds, "GELU MLP, torch.compile", lambda: (compiled_mlp(x),), (dy,))
    timed(rounds, "  ours", lambda: (mlp(x),), (dy,))
    q, k, v = (
        torch.randn(B, T, H, C // H, device="cuda", dtype=torch.bfloat16).transpose(1, 2).requires_grad_()
        for _ in range(3)
    )
    for backend in ("cudnn", "flash", "efficient"):
        timed(
            rounds, f"attention, {backend}", lambda b=backend: (kernels.attention(q, k, v, b),), (torch.randn_like(q),)
        )


def timed(rounds, name, work, gradients):
    def both():
        torch.autograd.backward(work(), gradients)

    print(f"{name:<44}{clock(both, rounds):10.3f}", flush=True)


@dataclass
class CommConfig:
    device: str = "auto"  # auto, cpu, cuda
    max_mib: int = 1024  # largest message, in MiB of bf16
    rounds: int = 10  # times each is timed


def comm(cfg):
    """Bus bandwidth as NCCL's own tests define it: comparable with the links' speed, whatever the number of ranks."""
    refuse(too_small(cfg, {"rounds": 1, "max_mib": 1}))
    world = parallel.start(cfg.device)
    if world.size == 1:
        raise UserError("bench.py comm needs several ranks; try torchrun --standalone --nproc_per_node=4 bench.py comm")
    n = world.size
    if world.main:
        print(f"{n} x {device_name(world.device)}; GB/s of bus bandwidth (us)\n{'MiB':>8}", end="")
        print("".join(f"{name:>24}" for name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")))
    size = 1
    while size <= cfg.max_mib:
        whole = torch.ones(size * 2**19, device=world.device, dtype=torch.bfloat16)
        part, other = whole[: whole.numel() // n].clone(), torch.empty_like(whole)
        calls = [
            (2 * (n - 1) / n, dist.all_reduce, [whole]),
            ((n - 1) / n, dist.all_gather_into_tensor, [whole, part]),
            ((n - 1) / n, dist.reduce_scatter_tensor, [part, whole]),
            ((n - 1) / n, dist.all_to_all_single, [other, whole]),
        ]
        cells = []
        for share, call, tensors in calls:
            try:
                seconds = seconds_of(lambda c=call, t=tensors: c(*t), world.device, cfg.rounds)
                cells.append(f"{share * whole.numel() * 2 / seconds / 1e9:8.1f} ({seconds * 1e6:9.0f})")
            except RuntimeError:  # gloo has no reduce-scatter
                cells.append("n/a")
        if world.main:
            print(f"{size:>8}" + "".join(f"{c:>24}" for c in cells), flush=True)
        size *= 4


def seconds_of(call, device, rounds):
    """Median seconds of a collective, started by all ranks together."""
    times = []
    for _ in range(rounds + 2):
        parallel.barrier()
        began = parallel.synchronize(device)
        call()
        times.append(parallel.synchronize(device) - began)
    return statistics.median(times[2:])


@dataclass
class MemoryConfig(train.Config):
    world: int = 1  # ranks
    gpu_gib: float = 80.0  # memory of a GPU that may be used


def for_arithmetic(cfg):
    """cfg with the precision that the arithmetic is for."""
    refuse(too_small(cfg, {"world": 1, "gpu_gib": 1}))
    if cfg.precision not in ("auto", "bf16", "fp8"):
        raise UserError(f"precision={cfg.precision}: the arithmetic is for bf16 and fp8; try --precision=bf16")
    return dataclasses.replace(cfg, precision="bf16" if cfg.precision == "auto" else cfg.precision)


def memory_table(cfg):
    """GiB a rank of the settings given, part by part, and of the other ways to shard and to recompute."""
    cfg = for_arithmetic(cfg)
    train.check(cfg, cfg.world)
    parts = memory.estimate(cfg, cfg.world)
    for name, size in [*parts.items(), ("all", sum(parts.values()))]:
        print(f"{name:<28}{size / memory.GIB:8.2f} GiB")
    print(f"\n{'':<34}{f'largest in {cfg.gpu_gib:g} GiB':>28}")
    print(f"{'parallel':<10}{'remat':<12}{'GiB a rank':>12}{'batch_size':>14}{'or block_size':>14}")
    budget = cfg.gpu_gib * memory.GIB
    for kind in dict.fromkeys([*plan.ways_to_shard(cfg, cfg.world), cfg.parallel]):
        for remat in ("none", "selective", "attention", "block"):
            other = plan.spread(cfg, kind, remat=remat)
            if remat in ("none", "selective"):
                other = dataclasses.replace(other, remat_tile=None, remat_offload=False)
            if not train.legal(other, cfg.world):
                continue
            found = (memory.largest_batch(other, cfg.world, budget), memory.longest_row(other, cfg.world, budget))
            most = "".join(f"{f'{n:,}' if n else 'none fits':>14}" for n in found)
            print(f"{kind:<10}{remat:<12}{memory.takes(other, cfg.world) / memory.GIB:>12.1f}{most}")


@dataclass
class PlanConfig(MemoryConfig):
    show: int = 8  # candidates printed


def plan_table(cfg):
    """The fastest settings that fit, by arithmetic, and what the first would spend its time on."""
    cfg = for_arithmetic(cfg)
    found = plan.search(cfg, cfg.world, cfg.gpu_gib * memory.GIB)
    if not found:
        raise UserError(
            f"nothing fits {cfg.gpu_gib:g} GiB on {cfg.world} GPUs; try a larger --world, --optimizer=adamw8bit "
            "--weights=bf16, or a shorter --block_size"
        )
    print(f"{'s a step':>9}{'tokens/s/GPU':>14}{'GiB':>8}  settings, beside those given")
    for seconds, takes, other in found[: cfg.show]:
        rate = cfg.batch_tokens / seconds / cfg.world
        print(f"{seconds:9.2f}{rate:14,.0f}{takes / memory.GIB:8.1f}  {plan.as_flags(other, cfg)}")
    print(f"\n{'the first':<28}s a step")
    for name, seconds in plan.seconds(found[0][2], cfg.world).items():
        print(f"{name:<28}{seconds:8.2f}")


COMMANDS = {
    "step": (step, StepConfig),
    "ops": (ops, OpsConfig),
    "comm": (comm, CommConfig),
    "memory": (memory_table, MemoryConfig),
    "plan": (plan_table, PlanConfig),
}

if __name__ == "__main__":
    name = sys.argv.pop(1) if len(sys.argv) > 1 else "--help"
    if name not in COMMANDS:
        print(__doc__)
        sys.exit(0 if name in ("--help", "-h") else f"error: bench.py {name}: expected one of {', '.join(COMMANDS)}")
    command, settings = COMMANDS[name]

    def main(cfg):
        try:
            command(cfg)
        except torch.OutOfMemoryError:
            _, budget = torch.cuda.mem_get_info()
            budget = min(budget, (getattr(cfg, "gpu_gib", None) or budget) * 2**30)
            raise UserError(memory.advice(cfg, parallel.rank_and_size()[1], budget, train.legal)) from None
        finally:
            parallel.stop()  # after what holds the process group is gone: it may hang otherwise

    run(main, settings)
