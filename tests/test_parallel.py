"""train.py over ranks: each mode equals one process and resumes any other's; failures end all."""

import errno
import os
import re
import signal
import types

import conftest
import pytest
import ranks
import saved
import torch
import torch.distributed as dist
from compare import CPU, LLAMA, copied, same_end, same_run
from conftest import flags, load_checkpoint, losses, read_log, train_here, train_in_rank
from safetensors.torch import load_file

import convert
import fast
import optim
import train
from configurator import configure
from model import build
from run import hf
from scale import ddp, fsdp, memory, parallel
from settings import Config, check
from system.errors import this_rank


def train_within(words, limits):
    """For ranks.call: train_in_rank with other values of memory.UNIT_MIB and fast.LOGITS_MIB.

    ROOM: bytes that a GPU has left, in which FSDP2's units stay gathered during a step.
    """
    memory.UNIT_MIB = limits.get("UNIT_MIB", memory.UNIT_MIB)
    fast.LOGITS_MIB = limits.get("LOGITS_MIB", fast.LOGITS_MIB)
    if "ROOM" in limits:
        memory.is_estimated = lambda *_: True
        fsdp.room = lambda *_: limits["ROOM"]
    return train_in_rank(words)


def over_ranks(number, data_dir, folder, **settings):
    """A run of train.py that succeeds; returns its folder."""
    limits = {name: settings.pop(name) for name in [*settings] if name.isupper()}
    done = ranks.call(number, train_within, flags(data_dir, folder, **settings), limits)
    assert done == [(0, "")] * number
    return folder


@pytest.fixture(scope="module")
def alone(data_dir, tmp_path_factory):
    """alone(**settings) -> the folder of that run in one process, trained once for all tests."""
    done = {}

    def run(**settings):
        key = tuple(sorted(settings.items()))
        if key not in done:
            done[key] = tmp_path_factory.mktemp("alone")
            train_here(data_dir, done[key], **settings)
        return done[key]

    return run


SHORT = dict(max_steps=6, batch_tokens=256, batch_size=2, eval_interval=3, eval_tokens=256)
SHORT |= dict(save_interval=3, keep_last=9)
# dropout is off: ranks draw their own
SHARDED = dict(eval_interval=6, save_interval=4, keep_last=9, batch_size=2)
# rates and decay of config/modern_124m.py
MUON = dict(optimizer="muon", lr=0.02, weight_decay=0.3, momentum_warmup=5)
MUON |= dict(lr_embedding=0.3, lr_head=0.012, zero_init=True, embed_norm=True)
GATED = dict(tie_embeddings=False, value_embeddings=2, attention_gate=True, embedding_mix=1)
MUON |= GATED
# Beside Muon AdamW's eps is 1e-10, and Muon decays what its update shrinks, a matter of signs:
# rounding moves some weights, by them later gradients. Over CPUs and seeds the largest ratios were
# 3e-4 and 2e-3.
ROUGHER = dict(moments=5e-3, weights=2e-2)
# 16 tokens of the loss at a time; alone: all
CHUNKS, WIDE = dict(LOGITS_MIB=1), dict(vocab_multiple=16_384)
FSDP, HSDP = dict(parallel="fsdp", UNIT_MIB=0), dict(parallel="hsdp", shard_size=2)
CONTEXT, KEPT = dict(context_parallel=2), dict(remat="attention", remat_tile=6, remat_offload=True)
FOUR = dict(batch_size=1, n_layer=3)
MODES = {  # ranks, settings of the mode, settings of the run in one process too
    "ddp": (2, {}, {}),
    # one of two blocks stays gathered
    "fsdp": (2, FSDP | dict(ROOM=150_000), dict(sample_interval=6)),
    # units of 2 blocks and 1
    "hsdp": (4, dict(UNIT_MIB=1, ROOM=10**6, **HSDP), dict(n_embd=128, **FOUR)),
    "context": (2, CONTEXT | KEPT, dict(sample_interval=6)),
    "states on the host": (2, FSDP | dict(offload_states=True), {}),
    "muon in zero2": (2, dict(parallel="zero2"), MUON),
}
COVERED = {  # by those together
    "context in fsdp": (
        4,
        FSDP | CHUNKS | CONTEXT | dict(remat="selective"),
        GATED | WIDE | LLAMA | dict(n_kv_head=1),
    ),
    "muon": (2, {}, MUON | dict(n_layer=3)),
    "muon in hsdp": (4, HSDP, MUON | FOUR | dict(mlp="relu2", qk_norm=True)),
    "adamw8bit": (2, FSDP, dict(optimizer="adamw8bit", vocab_multiple=1)),  # 257 rows
}
CASES = [pytest.param(*mode, id=name) for name, mode in MODES.items()]
CASES += [pytest.param(*mode, id=name, marks=pytest.mark.slow) for name, mode in COVERED.items()]


@pytest.mark.parametrize("number, mode, shape", CASES)
@pytest.mark.fault(20)
def test_any_mode_equals_one_process_and_resumes_across(
    data_dir, tmp_path, alone, number, mode, shape
):
    """In float32, every mode equals one process but for the order of sums.

    What ranks saved goes on in one process, and vice versa.
    """
    settings = SHORT | shape
    one = alone(**settings)
    many = over_ranks(number, data_dir, tmp_path / "many", **settings, **mode)
    same_run(one, many, **(ROUGHER if shape.get("optimizer") == "muon" else {}))
    train_here(data_dir, copied(many, 3, tmp_path / "back"), resume="auto", **settings)
    same_end(tmp_path / "back", one)
    out, settings = copied(one, 3, tmp_path / "out"), settings | mode
    same_end(over_ranks(number, data_dir, out, resume="auto", **settings), one)


@pytest.mark.slow
def test_bf16_weights_equal_one_process(data_dir, tmp_path, alone):
    """Up to the order of sums in bf16."""
    settings = dict(optimizer="adamw8bit", weights="bf16", save_interval=0, batch_size=2)
    one = losses(read_log(alone(**settings)))
    settings["reduce_dtype"] = "bf16"
    two = losses(read_log(over_ranks(2, data_dir, tmp_path / "two", **settings)))
    assert two == pytest.approx(one, rel=2e-4)


def seed_after_training(words):
    assert train_in_rank(words) == (0, "")
    return torch.initial_seed()


def test_each_rank_draws_its_own_numbers(data_dir, tmp_path):
    words = flags(data_dir, tmp_path / "run", dropout=0.1, max_steps=2, save_interval=0)
    first, second = ranks.call(2, seed_after_training, words)
    assert first != second


def time_limits_in_rank(words):
    """Seconds after which this rank gives up, in the world and in a sharded model's groups."""
    cfg = configure(Config, words)
    world = parallel.join(cfg)
    model = train.Training(train.choose(cfg, world.device)[0], world).state.model
    mesh = next(model.parameters()).device_mesh
    groups = [dist.group.WORLD, model.context_ranks.group]
    groups += map(mesh.get_group, mesh.mesh_dim_names)
    parallel.barrier()  # rank 0 holds the store, in which rank 1 may still be joining a group
    return [group._get_backend(CPU).options._timeout.total_seconds() for group in groups]


def test_every_group_has_the_time_limit_of_the_run():
    mode = dict(timeout_s=1234, parallel="hsdp", shard_size=1, context_parallel=2)
    words = flags("", "", batch_tokens=128, **mode)
    assert ranks.call(2, time_limits_in_rank, words) == 2 * [4 * [1234.0]]


def test_under_torchrun_as_one_process(data_dir, tmp_path, alone):
    """The command that people start, whose ranks import, join, end and report by themselves."""
    result = ranks.torchrun(2, flags(data_dir, tmp_path / "two", **SHORT))
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("step      6 100% |") == 1
    same_run(alone(**SHORT), tmp_path / "two")


@pytest.mark.parametrize("name, word", [("WORLD_SIZE", "2"), ("WORLD_SIZE", "")])
def test_without_torchrun_there_is_one_rank_whatever_the_environment_says(monkeypatch, name, word):
    """SLURM and containers set WORLD_SIZE, even to nothing; checks of settings see one rank too."""
    monkeypatch.setenv(name, word)
    assert parallel.start("cpu") == (0, 1, torch.device("cpu"))
    check(Config())
    assert this_rank() == (0, 1, 0, 1) and memory.shards_of(Config(parallel="hsdp"), 4) == 4


def gradients(*values):
    """A stand-in for a model whose parameters have these gradients."""
    parameters = [torch.nn.Parameter(torch.empty_like(value)) for value in values]
    for parameter, value in zip(parameters, values):
        parameter.grad = value
    return types.SimpleNamespace(parameters=lambda: parameters)


def test_the_norm_on_the_cpu_is_right_for_large_tensors():
    """34M equal numbers, added up in one float32 per SIMD lane, have a norm 1.7% too small."""
    large, odd = torch.full((2**11 + 3, 2**14), 1e-3), torch.tensor([[3.0, 0.0], [0.0, 4.0]])
    model = gradients(large, odd, torch.empty(0, 8), odd.bfloat16())
    exact = large.numel() * 1e-6 + 25 + 25
    assert optim.clip_gradients(model, None, torch.ones(())).item() == pytest.approx(
        exact**0.5, rel=1e-5
    )


def test_gradients_are_clipped_where_their_norm_is_over_the_limit_or_none():
    three_four = torch.tensor([3.0, 4.0])
    for limit, expected in ((1.0, three_four / 5), (5.1, three_four), (None, three_four)):
        model = gradients(three_four.clone())
        assert optim.clip_gradients(model, limit, torch.ones(())).item() == 5
        torch.testing.assert_close(model.parameters()[0].grad, expected)
    model = gradients(torch.tensor([1.0]), torch.tensor([float("nan")]))
    optim.clip_gradients(model, 1.0, torch.ones(()))
    assert [bool(p.grad.isnan()) for p in model.parameters()] == [False, True]


@pytest.fixture(scope="module")
def sharded(data_dir, tmp_path_factory):
    """The folder of 12 steps on two FSDP ranks, saved by each rank after steps 4, 8 and 12."""
    folder = tmp_path_factory.mktemp("sharded") / "run"
    return over_ranks(2, data_dir, folder, parallel="fsdp", **SHARDED)


def same_checkpoint(one, other, step):
    """Asserts that two runs saved the same numbers after a step, in whatever files."""
    (a, x), (b, y) = (load_checkpoint(saved.find(run / f"step_{step:08d}")) for run in (one, other))
    assert saved.position(x) == saved.position(y)
    torch.testing.assert_close(a, b, rtol=0, atol=0)


def train_from_own_rows(words):
    """For ranks.call: as train_in_rank; fails where a rank reads more than its part of a tensor."""
    size = int(os.environ["WORLD_SIZE"])

    def check(shape, dtype, rows):
        if len(shape) and dtype.is_floating_point:
            # of 257 rows the first of two needs 192, padded to 384
            most = -(-shape[0] // size) * 1.5
            assert rows and rows.stop - rows.start <= most, (shape, rows)

    saved.check_reads(check)
    return train_in_rank(words)


def train_with_a_broken_write(words, how):
    """For ranks.call: rank 1 cannot write files of step 8 (full), or is killed after one."""
    here = lambda path: os.environ["RANK"] == "1" and "step_00000008" in str(path)

    def full(path):
        if here(path) and how == "full":
            raise OSError(errno.ENOSPC, "No space left on device")

    def kill(path):
        if here(path):
            os.kill(os.getpid(), signal.SIGKILL)

    saved.while_writing(full, kill)
    return train_in_rank(words)


def test_sharded_and_in_the_background_as_one_process(data_dir, tmp_path, alone, sharded):
    same_run(alone(**SHARDED, async_save=True), sharded)
    parts = saved.parts(sharded / "step_00000008")
    assert parts["model"] == parts["optimizer"] == 2
    words = flags(data_dir, tmp_path / "run", parallel="fsdp", async_save=True, **SHARDED)
    result = ranks.run(2, words)
    assert result.returncode == 0, result.stderr
    assert [result.stdout.count(f"step_{step:08d}\n") for step in (4, 8, 12)] == [1] * 3
    for step in (4, 8, 12):
        same_checkpoint(sharded, tmp_path / "run", step)


@pytest.mark.slow
def test_resharded_from_two_ranks_to_four(data_dir, tmp_path, sharded):
    """Losses go on as uninterrupted; however tensors were cut, no rank reads more than it holds."""
    folder, settings = copied(sharded, 8, tmp_path / "4"), dict(SHARDED, resume="auto")
    words = flags(data_dir, folder, parallel="fsdp", **settings)
    assert ranks.call(4, train_from_own_rows, words) == [(0, "")] * 4
    same_end(folder, sharded, range(9, 13))


def test_merged_goes_on_exactly_as_sharded_and_exports_the_same(data_dir, tmp_path, sharded):
    merged, part = tmp_path / "merged", sharded / "step_00000004"
    convert.main(convert.Config(checkpoint=str(part), out=str(merged)))
    assert saved.parts(merged / "step_00000004")["model"] == 1
    same_checkpoint(sharded, merged, 4)
    one, other = (conftest.load_model(folder).state_dict() for folder in (part, merged))
    torch.testing.assert_close(one, other, rtol=0, atol=0)
    for name, source in (("a", part), ("b", merged)):
        convert.main(convert.Config(checkpoint=str(source), to_hf=str(tmp_path / name)))
    a, b = (load_file(tmp_path / name / "model.safetensors") for name in "ab")
    torch.testing.assert_close(a, b, rtol=0, atol=0)
    over_ranks(2, data_dir, merged, parallel="fsdp", resume="auto", **SHARDED)
    same_checkpoint(sharded, merged, 12)
    for kind in ("train", "val"):
        assert losses(read_log(merged), kind).items() <= losses(read_log(sharded), kind).items()


@pytest.mark.parametrize("async_save", [False, True])
@pytest.mark.fault(24)
def test_disk_full_on_one_rank_ends_all_with_the_same_line(data_dir, tmp_path, async_save):
    words = flags(data_dir, tmp_path / "run", parallel="fsdp", async_save=async_save, **SHARDED)
    (code, text), other = ranks.call(2, train_with_a_broken_write, words, "full", timeout=60)
    assert code == 4 and other == (code, text)
    assert re.search("rank 1: .*No space left", text) and "\n" not in text
    assert [p.name for p in (tmp_path / "run").iterdir() if p.is_dir()] == ["step_00000004"]


@pytest.mark.fault(21)
def test_kill_of_one_rank_while_it_writes(data_dir, tmp_path, sharded):
    words = flags(data_dir, tmp_path / "run", parallel="fsdp", async_save=True, **SHARDED)
    done, values = ranks.attempt(2, train_with_a_broken_write, words, "killed")
    # the broken connection may tell before the watch, as a value here
    said = done.stderr + str(values[0])
    assert done.codes[1] == -signal.SIGKILL
    assert re.search("lost (rank 1: its|another rank)", said), (done, values)
    assert saved.find(tmp_path / "run").name == "step_00000004"
    again = train_here(data_dir, tmp_path / "run", resume="auto", **SHARDED)
    assert losses(again)[12] == pytest.approx(losses(read_log(sharded))[12], rel=4e-6)
    assert not list((tmp_path / "run").glob(".writing_*"))


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_hugging_face_weights_straight_into_shards(data_dir, tmp_path, family):
    """Two ranks that read Hugging Face weights into their shards train as one process does.

    Ours have one tensor of q, k and v and one of gate and up, GPT-2's are transposed, and 257 rows
    are 384 here.
    """
    shape = dict(n_kv_head=2, n_hidden=96, **LLAMA) if family == "llama" else {}
    shape |= dict(tie_embeddings=False)
    cfg = configure(Config, [str(ranks.ROOT / "config/test.py"), *flags("", "", **shape)[1:]])
    hf.save_hf(cfg, build(cfg, CPU, seed=5).state_dict(), tmp_path / "hf")
    settings = dict(shape, eval_interval=1, max_steps=3, batch_size=2)
    settings["init_from"] = f"hf:{tmp_path / 'hf'}"
    train_here(data_dir, tmp_path / "one", **settings)
    words = flags(data_dir, tmp_path / "two", parallel="fsdp", **settings)
    assert ranks.call(2, train_from_own_rows, words) == [(0, "")] * 2
    same_run(tmp_path / "one", tmp_path / "two")


def train_with_one_gradient_apart(words):
    """For ranks.call: DDP leaves each rank its own gradient of one parameter."""
    wrap = ddp.wrap

    def wrap_others(model, *options):
        model._ddp_params_and_buffers_to_ignore = ["blocks.1.mlp.up.bias"]
        return wrap(model, *options)

    ddp.wrap = wrap_others  # until this process ends
    return train_in_rank(words)


def test_a_gradient_that_is_not_reduced_is_found(data_dir, tmp_path):
    words = flags(data_dir, tmp_path / "other", **SHORT)
    for code, said in ranks.call(2, train_with_one_gradient_apart, words):
        assert code == 4 and "copies differ" in said  # the ranks' copies differ at the first save
