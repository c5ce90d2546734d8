"""bench.py as a person runs it, on the CPU, and the arithmetic of memory and speed against what H200s showed."""

import dataclasses
import re
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from conftest import ROOT, train_ranks
from ranks import call

import kernels
import model as models
import train
from bench import COMMANDS, StepConfig
from configurator import UserError, configure
from fast import adam8
from measure import ops, step
from run import flops
from scale import memory, parallel, plan
from settings import Config


def bench(*words, ranks=0):
    return train_ranks(ranks, words, script="bench.py")


def here(name, *words):
    """A command in this process, without the seconds that a new one takes to import torch."""
    command, settings = COMMANDS[name]
    command(configure(settings, list(words)))


TINY = [str(ROOT / "config/test.py"), "--device=cpu", "--vocab_size=257"]


def test_step_is_timed(capsys):
    here("step", *TINY, "--steps=3", "--settle=1")
    said = capsys.readouterr().out
    assert re.search(r"^step +([\d.]+) ms, median of 3 .* ([\d,]+) tokens/s, MFU n/a$", said, re.MULTILINE), (
        said
    )
    assert re.search(r"^first step +[\d.]+ s", said, re.MULTILINE), said


def test_step_of_a_sharded_model_with_sequences_over_two_ranks():
    words = [
        "--device=cpu",
        "--steps=2",
        "--settle=1",
        "--vocab_size=257",
        "--parallel=fsdp",
        "--context_parallel=2",
    ]
    done = bench("step", "config/test.py", *words, ranks=2)
    assert done.returncode == 0 and "median of 2" in done.stdout, done.stderr


def test_the_first_step_alone(capsys):
    here("step", *TINY, "--steps=0", "--settle=0")
    said = capsys.readouterr().out
    assert re.search(r"^first step +[\d.]+ s", said, re.MULTILINE) and not re.search(
        "^step ", said, re.MULTILINE
    )


def test_collectives_over_two_ranks():
    done = bench("comm", "--device=cpu", "--max_mib=1", ranks=2)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^ +1 .*\d+\.\d \( +\d+\)", done.stdout, re.MULTILINE), done.stdout


RECIPES = sorted(ROOT.glob("config/*.py"))


@pytest.mark.parametrize("recipe", RECIPES, ids=[path.stem for path in RECIPES])
def test_parameter_counts_are_those_of_a_real_model(recipe):
    cfg = configure(Config, [str(recipe)])
    variants = [
        cfg,
        dataclasses.replace(
            cfg, qk_norm=not cfg.qk_norm, bias=not cfg.bias, mlp="relu2", attention_gate=True
        ),
    ]
    variants.append(dataclasses.replace(cfg, value_embeddings=cfg.n_layer))  # a table in the last block
    for other in variants:
        parameters = dict(models.on_meta(other).named_parameters())
        block = sum(p.numel() for name, p in parameters.items() if name.startswith("blocks.0."))
        assert memory.parameter_counts(other) == (sum(p.numel() for p in parameters.values()), block)


def test_the_arithmetic_repeats_the_modules_constants():
    assert memory.GROUP == adam8.GROUP


def test_the_estimate_counts_the_logits_that_a_run_may_hold(monkeypatch):
    cfg = configure(Config, [str(ROOT / "config/gpt2_124m.py"), "--precision=bf16"])
    usual, whole = memory.loss_bytes(cfg), memory.takes(cfg, 1)
    monkeypatch.setattr(memory, "LOGITS_MIB", 10**6)
    assert memory.loss_bytes(cfg) - usual == 2 * cfg.rank_tokens * cfg.padded_vocab - 2**30
    assert memory.takes(cfg, 1) > whole  # now the loss is the peak


def test_the_estimate_counts_the_gradients_in_ddps_buckets():
    cfg = configure(Config, [str(ROOT / "config/gpt2_124m.py"), "--precision=bf16"])
    total = memory.parameter_counts(cfg)[0]
    one, two = (dataclasses.replace(cfg, batch_tokens=steps * cfg.micro_tokens(2)) for steps in (1, 2))
    assert memory.takes(two, 2) - memory.takes(one, 2) == 4 * total
    graph = dataclasses.replace(two, cuda_graph=True)  # without DDP
    assert memory.takes(graph, 2) == memory.takes(one, 2) == memory.takes(cfg, 1)


def test_the_estimate_counts_muons_updates():
    """Two bytes a number of the blocks' matrices, beside gradients and moments: the peak where blocks keep little."""
    words = [str(ROOT / "config/gpt2_1558m.py"), "--precision=bf16", "--remat=block", "--batch_size=1"]
    adam, muon = (configure(Config, [*words, f"--optimizer={name}"]) for name in ("adamw", "muon"))
    parts = memory.estimate(muon, 1)
    block = memory.parameter_counts(muon)[1]
    assert parts["updates"] == 2 * muon.n_layer * block and "updates" not in memory.estimate(adam, 1)
    assert sum(parts.values()) / memory.GIB == pytest.approx(20.5, rel=0.01)


def test_the_estimate_of_an_edited_model_says_that_it_cannot_know():
    cfg = configure(Config, [str(ROOT / "config/gpt2_124m.py"), "--precision=bf16", "--ops=fused"])
    count = memory.parameter_counts(cfg)[0]
    assert memory.describe(cfg, 1, count) == memory.describe(cfg, 1)
    assert re.search(r"about [\d.]+ GiB of a GPU in all$", memory.describe(cfg, 1))
    edited = memory.describe(cfg, 1, 2 * count)
    for words in (edited, memory.describe(cfg, 1, count, usual=False)):
        assert "in all" not in words and "activations are not estimated" in words


@pytest.mark.parametrize(
    "words", [["plan", "config/llama3_8b.py", "--world=8"], ["memory", "config/gpt2_124m.py"]]
)
def test_arithmetic_imports_no_torch(words):
    code = "import runpy, sys; runpy.run_path('bench.py', run_name='__main__'); assert 'torch' not in sys.modules"
    done = subprocess.run(
        [sys.executable, "-c", code, *words], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0 and "GiB" in done.stdout, done.stderr


FOUR_LAYERS = ["--n_layer=4", "--parallel=ddp", "--remat=none", "--batch_size=1", "--batch_tokens=32768"]
OFFLOADED = [
    "--batch_size=32",
    "--batch_tokens=65536",
    "--parallel=zero2",
    "--offload_states",
    "--remat=selective",
]
GATED = ["--value_embeddings=2", "--attention_gate=True"]
ROWS_20K = [
    "--block_size=20480",
    "--batch_size=4",
    "--batch_tokens=81920",
    "--remat=attention",
    "--remat_offload",
]
DOCUMENTS = ["--document_mask=True", "--remat=block"]
MANY_ROWS = ["--remat=attention", "--batch_size=256", "--batch_tokens=262144"]


@pytest.mark.parametrize(
    "recipe, precision, words, measured",
    [("gpt2_124m", "bf16", [], 21.4), ("gpt2_124m", "fp8", [], 19.7), ("modern_350m", "bf16", [], 49.3)]
    + [
        ("modern_124m", "bf16", [], 35.2),
        ("modern_124m", "fp8", [], 39.9),
        ("modern_124m", "bf16", GATED, 41.3),
    ]
    + [("gpt2_350m", "bf16", ["--batch_size=32"], 31.2), ("gpt2_774m", "bf16", ["--batch_size=16"], 36.8)]
    + [("gpt2_1558m", "bf16", ["--batch_size=8"], 46.5), ("gpt2_1558m", "fp8", ["--batch_size=8"], 42.9)]
    + [("gpt2_350m", "bf16", [], 55.5), ("gpt2_774m", "bf16", [], 59.5)]
    + [
        ("gpt2_1558m", "bf16", [], 65.1),
        ("gpt2_1558m", "fp8", [], 59.1),
        ("llama3_8b_one_gpu", "bf16", [], 60.4),
    ]
    + [
        ("llama3_8b_one_gpu", "bf16", ["--remat=none"], 74.4),
        ("llama3_8b_one_gpu", "fp8", ["--remat_every=2"], 75.0),
    ]
    + [("llama3_70b", "bf16", FOUR_LAYERS, 102.7), ("gpt3_2700m", "bf16", OFFLOADED, 88.6)]
    + [("gpt3_2700m", "bf16", [], 66.0), ("llama3_8b_one_gpu", "bf16", ROWS_20K, 62.5)]
    + [("llama3_8b_128k_one_gpu", "bf16", DOCUMENTS, 60.9), ("gpt2_124m", "bf16", MANY_ROWS, 17.1)],
)
def test_memory_is_what_an_h200_took(recipe, precision, words, measured):
    """Peak memory in GiB that `bench.py step` or train.py printed on one H200."""
    cfg = configure(Config, [str(ROOT / f"config/{recipe}.py"), f"--precision={precision}", *words])
    assert sum(memory.estimate(cfg, 1).values()) / memory.GIB == pytest.approx(measured, rel=0.07)


LLAMA, LONG = ["config/llama3_8b.py"], ["--block_size=131072", "--batch_tokens=131072"]
MICRO_STEPS, SIXTH = (
    ["--batch_tokens=262144", "--reduce_dtype=bf16"],
    ["--remat=selective", "--remat_every=6"],
)
LONGER = [
    "--block_size=262144",
    "--batch_tokens=262144",
    "--remat=block",
    "--remat_offload=True",
    "--remat_tile=16384",
]
HELD = ["--remat=attention", "--remat_offload=True", "--remat_tile=16384"]


@pytest.mark.parametrize(
    "ranks, words, gib, rate",
    [
        (1, ["config/gpt2_124m.py"], 21.4, 622_705),
        (4, ["config/gpt2_124m.py"], None, 593_195),
        (4, [*LLAMA, *MICRO_STEPS], 63.6, 10_189),
        (4, [*LLAMA, *MICRO_STEPS, "--parallel=zero2"], 77.2, 10_920),
        (4, [*LLAMA, *MICRO_STEPS, "--precision=fp8"], 68.6, 14_170),
        (4, [*LLAMA, *MICRO_STEPS, "--precision=fp8", "--parallel=zero2", *SIXTH], None, 15_150),
        (4, [*LLAMA, *LONG, "--context_parallel=4", "--remat=selective"], None, 3_179),
        (1, ["config/llama3_8b_one_gpu.py", *LONG, *HELD], 62.2, 3_169),
        (1, ["config/llama3_8b_one_gpu.py", *LONGER], 74.5, None),
    ],
)
def test_memory_and_speed_are_what_h200s_showed(ranks, words, gib, rate):
    """GiB and tokens/s a GPU that `bench.py step` printed; the memory must be right, the speed comparable.

    No memory is given for selective: it was measured when selective kept less (the norms were computed again).
    """
    cfg = configure(Config, [str(ROOT / words[0]), "--precision=bf16", *words[1:]])
    if gib:
        assert sum(memory.estimate(cfg, ranks).values()) / memory.GIB == pytest.approx(gib, rel=0.05)
    if rate:
        assert cfg.batch_tokens / sum(plan.seconds(cfg, ranks).values()) / ranks == pytest.approx(
            rate, rel=0.1
        )


SMALL = ["config/gpt2_124m.py", "--batch_size=16", "--batch_tokens=16384"]
FP8, GRAPH = ["--precision=fp8"], ["--cuda_graph"]
XL = ["config/gpt2_1558m.py", "--batch_tokens=131072"]


@pytest.mark.parametrize(
    "words, ms, waits",
    [
        (SMALL, 40.3, True),
        ([*SMALL, *GRAPH], 28.6, False),
        ([*SMALL, *FP8], 62.2, True),
        ([*SMALL, *FP8, *GRAPH], 24.8, False),
        (XL, 2_462, False),
        ([*XL, *FP8], 1_865, True),
        ([*XL, *FP8, *GRAPH], 1_819, False),
        ([*XL, *FP8, "--batch_size=8"], 3_781, True),
    ],
)
def test_a_step_takes_what_the_host_takes_to_launch_it(words, ms, waits):
    """ms: what `bench.py step` printed on one H200; waits: whether the GPU waits for the host."""
    cfg = configure(Config, [str(ROOT / words[0]), "--precision=bf16", *words[1:]])
    parts = plan.seconds(cfg, 1)
    assert sum(parts.values()) * 1e3 == pytest.approx(ms, rel=0.1)
    assert ("waiting for the host" in parts) == waits


def test_plan_finds_what_fits_and_is_fastest():
    """A batch that fits is kept; a model too large for one GPU is sharded; a long context needs remat."""
    budget = 80 * memory.GIB

    def best(ranks, *words):
        cfg = configure(Config, [str(ROOT / words[0]), *words[1:], "--precision=bf16"])
        found = plan.search(cfg, ranks, budget)
        assert all(takes <= budget for _, takes, _ in found)
        assert [s for s, _, _ in found] == sorted(s for s, _, _ in found)
        assert all(other.remat_tile is None or other.remat_tile < other.rank_tokens for _, _, other in found)
        return cfg, found[0][2] if found else None

    cfg, first = best(1, "config/gpt2_124m.py")
    assert first.batch_size >= 64 and first.remat == "none"
    assert best(1, *LLAMA, "--parallel=ddp")[1] is None
    cfg, first = best(8, *LLAMA)
    assert first.parallel in ("fsdp", "zero2")
    again = configure(Config, [str(ROOT / LLAMA[0]), "--precision=bf16", *plan.as_flags(first, cfg).split()])
    assert again == first
    assert best(1, "config/llama3_8b_one_gpu.py", *LONG)[1].remat == "attention"
    assert best(1, *LLAMA, "--offload_states=True")[1].parallel in ("fsdp", "zero2", "hsdp")


AWAY = [*LLAMA, "--offload_states=True", "--parallel=fsdp"]
CPU = "update on the CPU, copies"


def planned(ranks, *words, rates=plan.H200):
    """{part: seconds} of a step; AWAY's words first."""
    return plan.seconds(
        configure(Config, [str(ROOT / words[0]), "--precision=bf16", *words[1:]]), ranks, rates
    )


def test_the_plan_counts_the_update_on_the_cpu():
    """One micro-step: 4 bytes a parameter for the norm and 28 for the update, at the bandwidth that the ranks share."""
    total = memory.parameter_counts(configure(Config, [str(ROOT / LLAMA[0])]))[0]
    for ranks in (2, 4, 8):
        one = [*AWAY, f"--batch_tokens={8192 * ranks}"]
        assert planned(ranks, *one)[CPU] == pytest.approx(total * 32 / plan.H200.cpu)
        assert CPU not in planned(ranks, *LLAMA, "--parallel=fsdp")
        on_gpu = planned(ranks, *one, "--offload_states=False")["elementwise"]
        assert planned(ranks, *one)["elementwise"] == pytest.approx(
            on_gpu - total / ranks * 40 / plan.H200.memory
        )
    slower = dataclasses.replace(plan.H200, cpu=plan.H200.cpu / 2)
    assert planned(8, *one, rates=slower)[CPU] == pytest.approx(2 * planned(8, *one)[CPU])


def test_the_plan_counts_the_copies_of_offloaded_states():
    total = memory.parameter_counts(configure(Config, [str(ROOT / LLAMA[0])]))[0]
    four, eight = ["--batch_tokens=32768"], ["--batch_tokens=65536"]  # a micro-step on four ranks, two
    share, rates = 4 * total / 4, plan.H200
    waits = planned(4, *AWAY, *four, "--parallel=zero2")[CPU] - planned(4, *AWAY, *four)[CPU]
    assert waits == pytest.approx(share / rates.host)  # zero2 copies at the start of the step
    again = planned(4, *AWAY, *eight)[CPU] - planned(4, *AWAY, *four)[CPU]
    assert again == pytest.approx(share / (plan.PAGEABLE * rates.host) + 3 * share / (rates.cpu / 4))
    assert (
        planned(4, *AWAY, *eight, "--parallel=hsdp")[CPU] == planned(4, *AWAY, *four)[CPU]
    )  # sums on the GPU
    slow = dataclasses.replace(rates, host=1e9)  # too slow to hide: two gathers, and gradients back
    exposed, compute = "communication, exposed", ("matmul", "attention", "elementwise")
    parts, usual = planned(4, *AWAY, *four, rates=slow), planned(4, *AWAY, *four, "--offload_states=False")
    hidden = plan.HIDDEN * sum(parts[name] for name in compute)
    assert parts[exposed] - usual[exposed] == pytest.approx(3 * share / 1e9 - hidden, rel=1e-2)
    alone = planned(1, *AWAY, "--batch_tokens=8192")[
        CPU
    ]  # the copies of one GPU wait; it has half of the bandwidth
    assert alone == pytest.approx(8 * total / rates.host + 32 * total / (rates.cpu / 2))


def held_in_rank(words):
    """Bytes in this rank after a step: ([of each weight], [of each gradient], of the moments), and the estimate."""
    cfg = configure(StepConfig, words)
    world = parallel.join(cfg)
    own, _, job = step.build(cfg, world)
    job.optimizer.zero_grad = lambda **_: None
    job.step(step.synthetic(own, world), 1e-3)
    weights = list(job.raw.parameters())
    assert all(t.device.type == "cpu" for p in weights for t in (p, p.grad))
    moments = [value for state in job.optimizer.state.values() for value in state.values() if value.dim()]
    sizes = [
        [t.to_local().nbytes for t in tensors] for tensors in (weights, [p.grad for p in weights], moments)
    ]
    return sizes[0], sizes[1], sum(sizes[2]), memory.on_host(own, world.size)


@pytest.mark.parametrize("kind", ["fsdp", "zero2"])
def test_the_hosts_memory_is_what_offloaded_states_take(kind):
    """Over two ranks on the CPU, where nothing is pinned: pinned, each size would be the next power of two."""
    words = [
        *TINY,
        "--n_embd=192",
        "--n_head=4",
        f"--parallel={kind}",
        "--offload_states=True",
        "--compile=False",
    ]
    for weights, gradients, moments, estimate in call(2, held_in_rank, words):
        pinned = [sum(1 << (size - 1).bit_length() for size in sizes) for sizes in (weights, gradients)]
        assert pinned == pytest.approx([estimate["parameters"], estimate["gradients"]], rel=0.02)
        assert moments == pytest.approx(estimate["optimizer"], rel=1e-3)
        assert sum(weights) + sum(gradients) == moments


def test_offloading_more_than_the_host_has_is_refused(monkeypatch):
    """Half a million tokens of Llama 3 8B keep 128 GiB there, and the weights, gradients and moments as much again."""
    assert 2**28 < memory.host_limit() < 2**50
    words = [
        "config/llama3_8b.py",
        "--device=cpu",
        "--block_size=524288",
        "--batch_tokens=524288",
        "--batch_size=1",
    ]
    words += ["--remat=block", "--remat_offload", "--parallel=fsdp", "--offload_states", "--precision=bf16"]
    cfg = configure(Config, words)
    need = sum(memory.on_host(cfg, 1).values())
    assert need == pytest.approx(256 * memory.GIB, rel=0.01)
    whole = dict(remat="attention", offload_states=False, batch_tokens=2 * 3 * 2**17, block_size=3 * 2**17)
    activations = memory.on_host(dataclasses.replace(cfg, **whole), 1)["activations"]
    assert activations == 32 * (2 * 4 * memory.GIB + 2**26), (
        "pinned: 3 GiB take 4, and attention's logsumexp 64 MiB"
    )
    for limit in (None, need):
        monkeypatch.setattr(memory, "host_limit", lambda limit=limit: limit)
        memory.refuse_beyond_host(cfg, 1)
    monkeypatch.setattr(memory, "host_limit", lambda: 128 * memory.GIB)
    message = r"--offload_states and --remat_offload would take about 25\d GiB of this host's .* 1 rank; there are 128"
    with pytest.raises(UserError, match=message):
        memory.refuse_beyond_host(cfg, 1)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    with pytest.raises(UserError, match=message):  # before a byte of it is allocated
        train.Training(cfg, parallel.World(0, 1, torch.device("cpu")))


def test_a_model_that_a_cpus_host_cannot_hold_is_refused(monkeypatch):
    cfg = configure(Config, ["config/llama3_8b.py", "--device=cpu", "--parallel=ddp"])
    monkeypatch.setattr(memory, "host_limit", lambda: 64 * memory.GIB)
    with pytest.raises(
        UserError, match="8,030,261,248 parameters, .* 120 GiB of this host's .* 1 rank; there are 64"
    ):
        train.Training(cfg, parallel.World(0, 1, torch.device("cpu")))


def three_steps_in_rank(words):
    """(Losses of three steps on one GPU, bytes of its memory at the peak, bytes by the estimate).

    A single rank in DDP has the buckets that each of two has; the estimate of one rank is of a process without DDP.
    """
    cfg = configure(StepConfig, words)
    world = parallel.join(cfg)
    own, _, job = step.build(cfg, world)
    next_batch = step.synthetic(own, world)
    found = [job.step(next_batch, own.lr)[0].item() for _ in range(3)]
    ranks = 2 if own.parallel == "ddp" else 1
    own = dataclasses.replace(own, batch_tokens=ranks * own.batch_tokens)
    return found, torch.cuda.max_memory_allocated(), memory.takes(own, ranks)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["ddp", *(f"{kind} --offload_states" for kind in ("fsdp", "zero2", "hsdp"))])
def test_a_gpu_takes_the_estimated_memory(mode):
    """Each mode that one GPU can run, with two micro-steps a step and heads that are 80 wide."""
    words = [
        "--n_layer=6",
        "--n_head=16",
        "--n_embd=1280",
        "--vocab_size=50304",
        "--batch_size=16",
        "--lr=1e-4",
    ]
    words += [
        "--block_size=1024",
        "--batch_tokens=32768",
        "--remat=selective",
        "--precision=bf16",
        "--device=cuda",
    ]
    [(losses, peak, estimate)] = call(
        1, three_steps_in_rank, [*words, *f"--parallel={mode}".split()], timeout=200
    )
    assert peak == pytest.approx(estimate, rel=0.12)
    assert losses[0] == pytest.approx(11, abs=0.6) and losses[2] < losses[0]


def test_memory_and_plan_print_the_hosts_memory(capsys):
    here("memory", *AWAY, "--world=4")
    line = re.search(
        r"^host memory  ([\d.]+) GiB for 4 ranks of a host, ([\d.]+) a rank: parameters",
        capsys.readouterr().out,
        re.M,
    )
    assert float(line[1]) == pytest.approx(4 * float(line[2]), rel=1e-2) and 120 < float(line[1]) < 135
    here("plan", *AWAY, "--world=4")
    said = capsys.readouterr().out
    assert "host memory  127" in said and re.search(rf"^{CPU} +\d", said, re.M)
    here("plan", *LLAMA, "--world=4")
    said = capsys.readouterr().out
    assert "host memory" not in said and CPU not in said


def test_memory_falls_as_it_must():
    cfg = configure(Config, [str(ROOT / "config/llama3_8b.py"), "--precision=bf16"])
    takes = {}
    for kind in ("ddp", "zero2", "fsdp"):
        for remat in ("none", "selective", "block"):
            other = dataclasses.replace(cfg, parallel=kind, remat=remat)
            takes[kind, remat] = sum(memory.estimate(other, 8).values())
    assert takes["ddp", "none"] > takes["zero2", "none"] > takes["fsdp", "none"]
    assert takes["fsdp", "none"] > takes["fsdp", "selective"] > takes["fsdp", "block"]
    budget = 80 * memory.GIB
    rows = memory.largest_batch(dataclasses.replace(cfg, remat="block"), 8, budget)
    fits, over = (dataclasses.replace(cfg, remat="block", batch_size=b) for b in (rows, rows + 1))
    assert sum(memory.estimate(fits, 8).values()) <= budget < sum(memory.estimate(over, 8).values())
    length = memory.longest_row(dataclasses.replace(cfg, remat="block"), 8, budget)
    fits, over = (dataclasses.replace(cfg, remat="block", block_size=t) for t in (length, length + 1024))
    assert memory.takes(fits, 8) <= budget < memory.takes(over, 8)
    assert memory.longest_row(cfg, 8, 2 * memory.GIB) == 0


def test_out_of_memory_says_what_would_take_less(monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(train, "train", full)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 24 * memory.GIB))
    cfg = configure(Config, [str(ROOT / "config/gpt2_124m.py"), "--batch_size=128", "--device=cpu"])
    words = r"^out of memory: .* of 24.0 a GPU by estimate; try a smaller --batch_size, --remat=selective or --opt"
    with pytest.raises(UserError, match=words):
        train.main(cfg)
    assert "another process" in memory.advice(cfg, 1, 200 * memory.GIB)
    assert "--parallel=fsdp" in memory.advice(cfg, 2, 24 * memory.GIB)


@pytest.mark.parametrize("word", ["--attention=math", "--ops=torch"])
def test_no_estimate_where_operations_keep_more_than_it_counts(word):
    said = f"^{word[2:]}: the arithmetic .*; try {word.partition('=')[0]}=auto$"
    for command in ("memory", "plan"):
        with pytest.raises(UserError, match=said):
            here(command, str(ROOT / "config/gpt2_124m.py"), word)
    cfg = configure(Config, [str(ROOT / "config/gpt2_124m.py"), "--precision=bf16", "--ops=fused", word])
    assert "in all" not in memory.describe(cfg, 1)
    assert "another process" not in memory.advice(cfg, 1, 200 * memory.GIB)


def test_mistakes_are_one_line():
    mistakes = [
        (["steps"], "error: bench.py steps: expected one of step, ladder, peers, ops, comm, support, memory"),
        (["memory", "--world=0"], "error: world=0 must be at least 1"),
        (["memory", "--precision=fp32"], "error: precision=fp32: the arithmetic is for bf16 and fp8"),
        (
            ["plan", "config/llama3_8b.py", "--world=8", "--n_head=7"],
            "n_embd=4096 must be divisible by n_head=7",
        ),
        (
            ["plan", "config/llama3_8b.py", "--parallel=ddp", "--gpu_gib=8"],
            "error: nothing fits 8 GiB a GPU, --world=1",
        ),
        (["memory", "--n_head=0"], "error: n_head=0 must be at least 1"),
        (["step", "--stepss=3"], "unknown setting --stepss; did you mean steps?"),
    ]
    for words, expected in mistakes:
        done = bench(*words)
        assert done.returncode != 0 and expected in done.stderr and "Traceback" not in done.stderr, (
            done.stderr
        )


@pytest.mark.parametrize(
    "words, message",
    [
        (["ops"], "bench.py ops needs an NVIDIA GPU"),
        (["comm", "--device=cpu"], "bench.py comm needs several ranks"),
        (["step", *TINY, "--precision=fp8"], "precision=fp8 needs a CUDA device"),
        (["step", *TINY, "--steps=-1"], "steps=-1 must be at least 0"),
    ],
)
def test_mistakes_found_on_the_device_are_one_line(words, message):
    if words == ["ops"] and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(UserError, match=message) as error:
        here(*words)
    assert "\n" not in str(error.value)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    "name, words", [("ops", ["--rounds=1"]), ("step", [*TINY[:1], "--steps=2", "--settle=1"])]
)
def test_tables_on_a_gpu(name, words, capsys):
    here(name, *words)
    said = capsys.readouterr().out
    expected = "ours, 1 GiB" if name == "ops" else "floor back to back for 3 s"
    assert re.search(rf"{expected} +[\d.]+", said), said


def test_ops_compares_the_fast_forms(monkeypatch):
    monkeypatch.setattr(kernels, "served", {"cuda"})
    norm, mlp = ops.sublayers("meta")
    x, targets = (
        torch.empty(1, 8, 768, device="meta", dtype=torch.bfloat16),
        torch.zeros(1, 8, device="meta").long(),
    )
    with flops.census("cuda", torch.bfloat16) as seen:
        ops.our_add_norm(x, x, norm)
        ops.our_mlp(x, mlp.bfloat16())
        ops.our_loss(x, kernels.Linear(768, 136, False, "meta", torch.bfloat16), targets, 130, 1024)
    assert seen.calls == {("add_norm", None): 1, ("mlp", None): 1, ("linear_cross_entropy", None): 1}


def test_a_gpu_that_waits_for_the_host_is_named():
    """The two figures are GPT-2 124M's in fp8 on an H200 and on an H100 with a slower host."""
    assert step.kernels_and_advice(7_000, 20.3, 684.4) == "7,000 kernels a step"
    assert "waits for the host: try a larger --batch_size" in step.kernels_and_advice(7_000, 263.6, 979.3)


def test_fsdp2_gathers_blocks_up_to_a_size(monkeypatch):
    """By each block's own size: one with a table of value embeddings is larger than the others."""
    monkeypatch.setattr(memory, "UNIT_MIB", 100)
    mi = 2**20  # parameters, of 2 bytes each
    for sizes, apart, expected in [
        ([7 * mi] * 12, False, [[0, 1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11]]),
        ([7 * mi] * 3, True, [[0], [1], [2]]),
        ([60 * mi] * 2, False, [[0], [1]]),  # each alone is more
        ([7 * mi, 45 * mi, 7 * mi, 7 * mi, 37 * mi, 1], False, [[0], [1], [2, 3], [4, 5]]),
    ]:
        assert memory.units(sizes, apart) == expected
    for cfg in (Config(n_layer=12, parallel="fsdp", value_embeddings=3), Config(n_layer=12, parallel="fsdp")):
        block = memory.parameter_counts(cfg)[1]
        sizes = [sum(p.numel() for p in module.parameters()) for module in models.on_meta(cfg).blocks]
        assert sizes == [
            block + (layer in cfg.value_layers) * cfg.padded_vocab * cfg.n_embd for layer in range(12)
        ]
