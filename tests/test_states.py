"""run/states.py: a value of any type comes back as it was, on each rank, or one line refuses it."""

import collections
import dataclasses
import functools
import math
from types import SimpleNamespace

import pytest
import ranks
import torch
from conftest import one_line

import model as models
import train
from model import build
from run import checkpoint, checkpoint_folders, reshard, states
from run.logger import NotFinite
from run.resume import Start
from scale import fsdp, parallel
from settings import Config, GPTConfig

CPU = torch.device("cpu")
WORLD = parallel.World(0, 1, CPU)
SHAPE = dict(vocab_size=100, vocab_multiple=1, n_layer=1, n_head=2, n_embd=16, block_size=8)


class Odd(torch.optim.Optimizer):
    """States of many kinds, made late, in groups and attributes too; steps depend on them all."""

    def __init__(self, params, lr=0.1, scale=1.0, kept=None):
        super().__init__(params, dict(lr=lr, scale=scale, weight=0.0, count=0, best=math.inf))
        self.steps, self.mean = 0, torch.zeros(())
        self.kept = kept

    @torch.no_grad()
    def step(self):
        self.steps += 1
        self.mean = self.mean * 0.5 + 1
        for group in self.param_groups:
            group["count"] += 1
            group["weight"] += group["lr"]
            shared = None
            for i, p in enumerate(group["params"]):
                state = self.state[p]
                if len(state) == 0:
                    state["codes"] = torch.zeros_like(p, dtype=torch.uint8)
                    state["master"] = p.detach().clone().double()
                    state["parts"] = [
                        torch.zeros(3, dtype=torch.bfloat16),
                        ("a", 1, 1.0, None, True),
                    ]
                    state["by"] = {
                        "1": torch.zeros(1),
                        1: torch.zeros(2, 2, dtype=torch.bool),
                        "two": collections.OrderedDict(x=2),
                    }
                    state["shape"], state["alone"] = p.shape, torch.tensor(7)
                    shared = torch.zeros(1) if shared is None else shared
                    state["shared"] = shared
                if self.steps == 2 and i == 0:
                    state["late"] = torch.ones(5, dtype=torch.float16)
                if i == 0:
                    state["shared"] += 1
                state["codes"] += 1
                state["parts"][0] += 0.25
                state["master"] -= group["lr"] * group["scale"] * (p.grad.double() + state["codes"])
                state["master"] -= 0.01 * (
                    self.mean + state["shared"] + state["parts"][0].sum() + group["count"]
                )
                p.copy_(state["master"])


def state_of(seed=0, make=Odd, own=None, model=None, **options):
    model = build(GPTConfig(**SHAPE), CPU, seed=seed) if model is None else model
    loader = SimpleNamespace(state_dict=dict, load_state_dict=lambda _: None)
    optimizer = make(model.parameters(), **options)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    return train.State(model, optimizer, scaler, loader, own=own or {})


def steps(state, count, first=0):
    for step in range(first, first + count):
        torch.manual_seed(step)
        for p in state.model.parameters():
            p.grad = torch.randn(p.shape)
        state.optimizer.step()
        state.step += 1


def saved(state, folder):
    states.remember(state.optimizer) if not hasattr(state.optimizer, "as_made") else None
    saver = checkpoint.Saver(WORLD, folder, 2)
    saver.save(state, config=dict(SHAPE))
    return saver.final


def resumed(state, folder):
    """The warnings of a resume into a new state."""
    start = Start(folder.parent, str(folder), dry_run=True)
    reshard.load_resharded(state.model, start.weights)
    start.restore(state, WORLD)
    return start.warnings


def test_a_resume_on_another_type_of_device_says_so(tmp_path):
    state = state_of()
    steps(state, 1)
    folder = saved(state, tmp_path)
    start = Start(tmp_path, str(folder), dry_run=True)
    start.tensors["rng"] = {"0.cuda": torch.zeros(1)}
    start.restore(state, WORLD)
    assert start.warnings == ["not saved on cpu: random numbers and fp8's scales start afresh"]


def same(a, b):
    if torch.is_tensor(a):
        return (
            type(a) is type(b) and a.dtype == b.dtype and a.device == b.device and torch.equal(a, b)
        )
    if isinstance(a, dict):
        return type(a) is type(b) and list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and (a == b or a != a)


def test_states_groups_and_attributes_of_any_type_go_on(tmp_path):
    whole = state_of()
    states.remember(whole.optimizer)
    steps(whole, 1)
    early = saved(whole, tmp_path / "early")  # before the late state
    steps(whole, 2, first=1)
    folder = saved(whole, tmp_path / "run")
    other = state_of(seed=1)
    assert resumed(other, folder) == []
    pairs = [*zip(whole.optimizer.state.values(), other.optimizer.state.values(), strict=True)]
    assert all(same(a, b) for a, b in pairs) and "late" in pairs[0][1] and "late" not in pairs[1][1]
    assert pairs[0][1]["shared"] is pairs[1][1]["shared"]
    for a, b in zip(whole.optimizer.param_groups, other.optimizer.param_groups):
        assert same(
            {k: v for k, v in a.items() if k != "params"},
            {k: v for k, v in b.items() if k != "params"},
        )
    assert (other.optimizer.steps, other.optimizer.mean.item()) == (3, 1.75)
    steps(whole, 2, first=3)
    steps(other, 2, first=3)
    again = state_of(seed=2)
    resumed(again, early)
    steps(again, 4, first=1)
    for p, q, r in zip(*(state.model.parameters() for state in (whole, other, again))):
        assert torch.equal(p, q) and torch.equal(p, r)


def test_a_setting_that_no_step_changes_is_that_of_the_resumed_run(tmp_path):
    whole = state_of(scale=1.0)
    steps(whole, 1)  # nothing was remembered: all of the groups are settings
    first = saved(whole, tmp_path / "a")
    states.remember(whole.optimizer)
    steps(whole, 1, first=1)
    second = saved(whole, tmp_path / "b")
    other = state_of(scale=3.0)
    resumed(other, second)
    (group,) = other.optimizer.param_groups
    assert group["scale"] == 3.0 and group["count"] == 2
    other = state_of(scale=3.0)
    resumed(other, first)
    assert other.optimizer.param_groups[0]["scale"] == 3.0


def test_what_a_checkpoint_cannot_hold_is_named(tmp_path):
    state = state_of()
    state.own["set"] = {1, 2}
    with pytest.raises(
        checkpoint.CheckpointError, match="set is of type set: a checkpoint holds"
    ) as error:
        saved(state, tmp_path)
    one_line(error)
    state.own.clear()
    steps(state, 1)
    flat = torch.zeros(4)
    state.own["flat"] = [flat[:2], flat[2:]]
    with pytest.raises(checkpoint.CheckpointError, match="flat.1 shares its memory with flat.0"):
        saved(state, tmp_path)
    state.own.clear()
    name, p = next(state.model.named_parameters())
    state.optimizer.state[p]["iterator"] = iter("a")
    with pytest.raises(
        checkpoint.CheckpointError, match=f"{name}.iterator is of type str_.*iterator"
    ):
        saved(state, tmp_path)
    assert not list(tmp_path.glob("step_*"))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nothing_that_is_not_finite_is_saved(tmp_path, value):
    state = state_of(make=torch.optim.AdamW)
    steps(state, 1)
    p = next(state.model.parameters())
    state.optimizer.state[p]["exp_avg_sq"][0, 0] = value
    with pytest.raises(NotFinite, match="optimizer states are inf or NaN and were not saved"):
        saved(state, tmp_path)
    state.optimizer.state[p]["exp_avg_sq"][0, 0] = 0
    state.own["mean"] = [torch.tensor([1.0, value])]
    with pytest.raises(NotFinite, match="State.own are inf or NaN"):
        saved(state, tmp_path)
    state.own["mean"] = math.inf  # a bound, say
    saved(state, tmp_path / "bound")
    other = state_of(make=torch.optim.AdamW, own={"mean": 0})
    resumed(other, tmp_path / "bound/step_00000001")
    assert other.own["mean"] == math.inf
    state.own["mean"] = math.nan
    with pytest.raises(NotFinite, match="State.own are inf or NaN"):
        saved(state, tmp_path)
    assert not list(tmp_path.glob("step_*"))


def test_an_optimizer_without_states_goes_on(tmp_path):
    cfg = Config(**SHAPE)
    make = functools.partial(torch.optim.SGD, lr=0.1)
    state = state_of(make=make)
    steps(state, 1)
    saver = checkpoint.Saver(WORLD, tmp_path, 2)
    saver.save(state, config=dataclasses.asdict(cfg))
    start = Start(tmp_path, "auto", dry_run=True)
    start.check(cfg)
    other = state_of(make=make)
    start.restore(other, WORLD)
    assert other.step == 1


def test_another_optimizer_is_refused(tmp_path):
    state = state_of(make=torch.optim.AdamW)
    steps(state, 1)
    folder = saved(state, tmp_path)
    with pytest.raises(
        checkpoint.CheckpointError, match="optimizer states are of AdamW, now it is Odd"
    ):
        resumed(state_of(), folder)


class Counter:
    """An object with a state_dict."""

    def __init__(self):
        self.values = {"count": 0, "sum": torch.zeros(2)}

    def state_dict(self):
        return self.values

    def load_state_dict(self, values):
        self.values = values


def test_own_state_comes_back_in_place(tmp_path):
    whole = state_of(
        own={"average": {"a": torch.ones(3)}, "count": 3, "counter": Counter(), "old": 1.5}
    )
    whole.own["counter"].values = {"count": 4, "sum": torch.tensor([1.0, 2.0])}
    folder = saved(whole, tmp_path)
    average = {"a": torch.zeros(3)}
    tensor = average["a"]
    other = state_of(own={"average": average, "count": 0, "counter": Counter(), "new": 2})
    warnings = resumed(other, folder)
    assert (
        other.own["average"] is average and average["a"] is tensor and tensor.tolist() == [1, 1, 1]
    )
    assert other.own["count"] == 3 and other.own["new"] == 2
    assert same(other.own["counter"].values, whole.own["counter"].values)
    assert [w.partition(" ")[0] for w in warnings] == ["own['new']", "own['old']"]
    with pytest.raises(
        checkpoint.CheckpointError, match=r"average.a is \[3, torch.float32\] in the checkpoint"
    ):
        resumed(state_of(own={"average": {"a": torch.zeros(4)}}), folder)


# -- over two ranks


class Own(torch.optim.Optimizer):
    """A state that is each rank's own, beside one of the parameter's shape."""

    def __init__(self, params, alike=False):
        super().__init__(params, dict(lr=0.1))
        self.alike = alike

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if not state:
                state["mean"], state["own"] = torch.zeros_like(p), torch.zeros(3)
            state["mean"].lerp_(p.grad, 0.5)
            state["own"] += 1 if self.alike else 1 + torch.distributed.get_rank()
            p.sub_(0.1 * state["mean"])


def sharded_by_two(folder):
    """For ranks.call: the whole mean of each parameter, under FSDP2."""
    world = parallel.start("cpu", 60)
    cfg = Config(**SHAPE, parallel="fsdp", precision="fp32")
    model = models.on_meta(cfg)
    fsdp.shard(model, cfg, world)
    models.allocate(model, CPU, 0)
    state = state_of(make=Own, model=model, alike=True)
    for step in range(2):
        for i, p in enumerate(model.parameters()):
            p.grad = torch.full_like(p, float(i + step))
        state.optimizer.step()
    checkpoint.Saver(world, folder, 2).save(state, config=dict(SHAPE))
    found = [s["mean"].full_tensor().tolist() for s in state.optimizer.state.values()]
    parallel.stop()
    return found


def test_states_by_rows_go_on_whole_and_others_only_where_they_mean_the_same(tmp_path):
    expected, _ = ranks.call(2, sharded_by_two, tmp_path)
    folder = checkpoint_folders.find(tmp_path)
    words = (
        r"own \(3,\) has not the parameter's shape; saved by a model among 2 ranks.*, not among 1"
    )
    with pytest.raises(checkpoint.CheckpointError, match=words) as error:
        resumed(state_of(make=Own), folder)
    one_line(error)
    state = state_of(make=Own)
    for p in state.model.parameters():  # as an optimizer makes them that knows their shapes
        state.optimizer.state[p] = {"mean": torch.zeros_like(p), "own": torch.zeros(3)}
    resumed(state, folder)
    assert [s["mean"].tolist() for s in state.optimizer.state.values()] == expected


class Seen(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("table", torch.zeros(2), persistent=False)


def with_buffers(value):
    state = state_of(make=torch.optim.AdamW)
    state.model.seen = Seen()
    state.model.seen.mean += value
    return state


def buffers_of_two(folder):
    """For ranks.call: buffers that differ, after a resume, of another run, and averaged."""
    world = parallel.start("cpu", 60)
    state = with_buffers(float(world.rank))
    checkpoint.Saver(world, folder, 2).save(state, config=dict(SHAPE))
    parallel.barrier()
    other = with_buffers(7.0)
    start = Start(folder, str(folder), dry_run=True)
    reshard.load_resharded(other.model, start.weights)
    loaded = other.model.seen.mean.tolist()
    start.restore(other, world)
    found = other.model.seen.mean.tolist()
    parallel.sum_over_ranks(other.model.seen.mean.div_(world.size))  # as docs/experiment.md says
    parallel.stop()
    return loaded, found, other.model.seen.mean.tolist(), start.warnings


def test_buffers_are_each_ranks_own(tmp_path):
    first, second = ranks.call(2, buffers_of_two, tmp_path)
    assert first == ([0, 0], [0, 0], [0.5, 0.5], []) and second == ([0, 0], [1, 1], [0.5, 0.5], [])
    alone = with_buffers(7.0)
    warnings = resumed(alone, checkpoint_folders.find(tmp_path))
    assert warnings[0] == "seen.mean (1 in all) differed from rank to rank: all have rank 0's"
    assert alone.model.seen.mean.tolist() == [0, 0] and alone.model.seen.table.tolist() == [0, 0]


def saved_by_two(folder, alike):
    """For ranks.call."""
    world = parallel.start("cpu", 60)
    state = state_of(
        make=Own, alike=alike, own={"rank": world.rank, "seen": torch.full((2,), float(world.rank))}
    )
    states.remember(state.optimizer)
    steps(state, 2)
    saver = checkpoint.Saver(world, folder, 2)
    saver.save(state, config=dict(SHAPE))
    parallel.stop()
    return [s["own"].tolist() for s in state.optimizer.state.values()]


def resumed_by_two(folder):
    world = parallel.start("cpu", 60)
    state = state_of(make=Own, own={"rank": None, "seen": torch.zeros(2)})
    start = Start(folder, str(folder), dry_run=True)
    start.restore(state, world)
    parallel.stop()
    return (
        [s["own"].tolist() for s in state.optimizer.state.values()],
        state.own["rank"],
        state.own["seen"].tolist(),
    )


def test_states_that_differ_from_rank_to_rank_are_each_ranks(tmp_path):
    expected = ranks.call(2, saved_by_two, tmp_path, False)
    assert expected[0][0] == [2, 2, 2] and expected[1][0] == [4, 4, 4]
    found = ranks.call(2, resumed_by_two, tmp_path)
    assert found == [(expected[0], 0, [0, 0]), (expected[1], 1, [1, 1])]
    words = "own differs from rank to rank of the 2 that saved it; go on with as many, not 1"
    with pytest.raises(checkpoint.CheckpointError, match=words) as error:
        resumed(state_of(make=Own), checkpoint_folders.find(tmp_path))
    one_line(error)


def test_states_that_are_alike_go_on_on_one_rank(tmp_path):
    (expected, _) = ranks.call(2, saved_by_two, tmp_path, True)
    state = state_of(make=Own)
    folder = checkpoint_folders.find(tmp_path)
    with pytest.raises(
        checkpoint.CheckpointError, match="values of State.own: .* differs from rank to rank"
    ):
        resumed(state, folder)
    assert [s["own"].tolist() for s in state.optimizer.state.values()] == expected
