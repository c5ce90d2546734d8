"""--cuda_graph: a replayed micro-step has the launched one's bits; what it cannot do is refused."""

import contextlib
import subprocess
import sys
import types

import pytest
import ranks
import torch
from compare import take_step
from conftest import ROOT, losses, train_here

import train
from configurator import configure
from scale import cuda_graph, parallel
from settings import Config
from system.errors import UserError

WORDS = "--n_layer=2 --n_head=4 --n_embd=256 --vocab_size=500 --block_size=128".split()
WORDS += ["--batch_size=4", "--compile=False", "--deterministic=True", "--warmup_steps=0"]
LLAMA = "--positions=rope --norm=rmsnorm --mlp=swiglu --bias=False --tie_embeddings=False"
REPLAYED = {
    "dropout": "--precision=bf16 --batch_tokens=1024 --dropout=0.1",
    "llama": f"--precision=bf16 --batch_tokens=1536 --optimizer=muon {LLAMA}",
    "fp8": "--precision=fp8 --batch_tokens=1024",
    "fp16": "--precision=fp16 --batch_tokens=1024",
    "growing": "--precision=tf32 --batch_tokens=1024 --growing",
    "compiled": "--precision=bf16 --batch_tokens=1024 --compile=True",
}


@pytest.fixture
def deterministic():
    parallel.make_deterministic()


@pytest.mark.gpu
@pytest.mark.parametrize("name", REPLAYED)
def test_replayed_steps_equal_launched_ones(name, deterministic):
    """Losses and gradient norms of six steps, the last three by the graph, and the last weights."""
    launched, replayed = both_ways(REPLAYED[name].split())
    same(launched, replayed)
    found = launched[0][::2]
    assert max(found) - found[-1] > 0.1, "the losses fall"  # that of a step without targets is 0


def both_ways(more, device="cuda"):
    """[(losses and norms, weights) of launched steps, the same of replayed ones].

    On the CPU, where the capture is imitated, the model is smaller. --growing: one micro-step in
    each of the first four steps, the last of which is replayed; each micro-batch has another share
    of targets that do not count, one in four none that does.
    """
    words = [*WORDS, *(word for word in more if word != "--growing"), f"--device={device}"]
    words += ["--n_embd=64", "--block_size=32"] if device == "cpu" else []
    world = parallel.start(device)
    growing = "--growing" in more
    return [six_steps(configure(Config, words), world, graph, growing) for graph in (False, True)]


def six_steps(cfg, world, graph, growing):
    """([loss and norm of each step], {name: weight}) on the same random batches."""
    cfg.cuda_graph = graph
    own, _ = train.choose(cfg, world.device)
    job = train.Training(own, world)
    job.state.model.train()
    torch.manual_seed(1 + world.rank)
    shape = 64, cfg.batch_size, cfg.block_size + 1
    taken = iter(torch.randint(0, 50, shape, device=world.device))

    def next_batch():
        row = next(taken)
        x, y = row[:, :-1], row[:, 1:]
        return x, y.masked_fill(y % 4 > x[0, 0] % 4 - 1, -100) if growing else y

    found = []
    for step in range(6):
        job.accumulation = 1 if growing and step < 4 else cfg.micro_steps(world.size)
        loss, norm = take_step(job, next_batch, 1e-3)
        found += [loss.item(), norm.item()]
    assert graph == isinstance(job.graph, cuda_graph.GraphedMicroStep)
    assert not graph or job.graph.captured
    return found, {name: p.detach().cpu().clone() for name, p in job.state.model.named_parameters()}


def imitate(put):
    """Streams on the CPU, and captures whose replays write the tensors of the first run."""
    stream = lambda device=None: types.SimpleNamespace(wait_stream=lambda other: None)

    def capture(self):
        before = {p: p.grad.clone() for p in self.parameters if p.grad is not None}
        self.numbers = cuda_graph.numbers(self.model)
        sums = self.micro_step(*self.batch)
        grads = {p: p.grad for p in self.parameters}
        for p, grad in before.items():  # a capture computes nothing
            p.grad.copy_(grad)

        def replay():
            for p in self.parameters:
                p.grad = grads[p] if before else None
            for own, new in zip(sums, self.micro_step(*self.batch), strict=True):
                own.copy_(new)
            for p, grad in grads.items():
                grad.copy_(p.grad)

        graph = types.SimpleNamespace(replay=replay)
        return graph, sums, grads

    put(cuda_graph, "stream", stream)
    put(torch.cuda, "current_stream", stream)
    put(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    put(torch.random, "fork_rng", lambda devices: contextlib.nullcontext())
    put(cuda_graph.GraphedMicroStep, "capture", capture)


GROWING = ["--batch_tokens=768", "--growing"]


def same(launched, replayed):
    assert launched[0] == replayed[0]
    torch.testing.assert_close(replayed[1], launched[1], rtol=0, atol=0)


def in_rank(more, device):
    """For ranks.call."""
    if device == "cpu":
        imitate(setattr)
    else:
        parallel.make_deterministic()
    return both_ways(more, device)


def test_ranks_average_the_gradients_of_replays():
    """Two ranks with one micro-step each, then three, as under DDP."""
    first, second = ranks.call(2, in_rank, GROWING, "cpu")
    same(*first), same(*second)
    same(([], first[1][1]), ([], second[1][1]))
    assert first[1][0] != second[1][0], "each rank has its own loss"


@pytest.mark.gpu
def test_a_run_with_evaluations_resumes(data_dir, tmp_path, deterministic):
    """A run that evaluates and saves between replays, or is resumed, equals one without a graph."""
    settings = dict(device="cuda", precision="bf16", deterministic=True, save_interval=6)
    settings |= dict(eval_interval=3, sample_interval=4)
    expected = losses(train_here(data_dir, tmp_path / "a", **settings))
    settings["cuda_graph"] = True
    assert losses(train_here(data_dir, tmp_path / "b", **settings)) == expected
    resumed = train_here(data_dir, tmp_path / "c", resume=tmp_path / "b/step_00000006", **settings)
    assert losses(resumed) == {step: loss for step, loss in expected.items() if step > 6}


@pytest.mark.gpu
@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize(
    "more", ["--precision=bf16 --reduce_dtype=bf16", "--precision=fp8 --compile=True"]
)
def test_ddp_on_gpus(number, more):
    if torch.cuda.device_count() < number:
        pytest.skip(f"needs {number} GPUs")
    words = [*more.split(), "--batch_tokens=2048"]
    for launched, replayed in ranks.call(number, in_rank, words, "cuda", timeout=300):
        same(launched, replayed)


WAITS = """
import torch
from scale.cuda_graph import GraphedMicroStep
layer = torch.nn.Linear(2, 1, device="cuda")
def micro_step(x, y):
    loss = layer(x).sub(y).mean()
    loss.backward()
    return [loss.detach() * (1 if loss.item() > 0 else 2)]
replayed = GraphedMicroStep(micro_step, layer, "fp32")
for _ in range(4):
    replayed(torch.ones(3, 2, device="cuda"), torch.ones(3, 1, device="cuda"))
    layer.zero_grad()
"""


@pytest.mark.gpu
def test_a_step_that_waits_for_the_gpu_is_named():
    options = dict(cwd=ROOT, capture_output=True, text=True, timeout=120)
    done = subprocess.run([sys.executable, "-c", WAITS], **options)
    words = "UserError: cuda_graph=True: the micro-step cannot be captured"
    assert done.returncode and words in done.stderr.strip().splitlines()[-1], done.stderr


def test_a_micro_step_that_counts_is_refused(monkeypatch):
    """Its replays would repeat one number; a counter in a buffer counts each step once."""
    imitate(monkeypatch.setattr)
    layer = torch.nn.Linear(2, 1)
    layer.register_buffer("calls", torch.zeros(1))
    calls = []

    def micro_step(x, y, factor=lambda: 1.0):
        layer.calls += 1
        loss = (layer(x) - y).mean() * factor()
        loss.backward()
        return [loss.detach()]

    def counting(x, y):
        calls.append(None)
        return micro_step(x, y, lambda: len(calls))

    def steps(function):
        replayed = cuda_graph.GraphedMicroStep(function, layer, "fp32")
        for _ in range(cuda_graph.EAGER_STEPS + 1):
            layer.zero_grad()
            replayed(torch.ones(3, 2), torch.zeros(3, 1))

    steps(micro_step)
    # launched, captured, and replayed; the imitated capture computes
    assert layer.calls == cuda_graph.EAGER_STEPS + 2
    with pytest.raises(UserError, match="other sums"):
        steps(counting)


def test_a_cpu_has_no_graphs(data_dir, tmp_path):
    with pytest.raises(UserError, match="CUDA device"):
        train_here(data_dir, tmp_path, cuda_graph=True)
