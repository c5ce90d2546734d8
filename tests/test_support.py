"""bench.py support, fast/chips.py: the table of a GPU is what the code that chooses at run time would choose on it."""

import os
import re

import pytest
import torch
from conftest import one_line
from test_bench import here

import kernels
from configurator import UserError
from fast import chips
from fast.attention import best_attention
from measure import step
from scale.precision import pick_precision

hopper = pytest.importorskip("fast.hopper")
GPU = torch.device("cuda", 0)
HOPPER = ["CUDA kernels for Hopper"]
FP8, CUDNN = ["precision=fp8"], ["attention=cudnn"]
FAST = [f"kernels.{name}" for name in "linear qkv rope mlp norm add_norm linear_cross_entropy".split()]


def table(capsys, *words):
    """{form: (whether it runs, how or why not)} of what bench.py support prints."""
    here("support", *words)
    found = re.findall(r"^(\S.*?) {2,}(yes|no) {2,}(\S.*)$", capsys.readouterr().out, re.MULTILINE)
    return {form: (runs == "yes", words) for form, runs, words in found}


@pytest.fixture(params=chips.NAMED)
def named(request, monkeypatch):
    """Name of a GPU, as which this machine's device 0 shows itself to PyTorch, with cuDNN and NVRTC."""
    chip = chips.NAMED[request.param]
    monkeypatch.setattr(torch.version, "cuda", "13.0" if chip.maker == "nvidia" else None)
    capability = chip.capability if chip.maker == "nvidia" else (9, 4)  # AMD's numbers look like NVIDIA's
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    monkeypatch.setattr(hopper, "nvrtc", lambda: object())
    monkeypatch.setattr(kernels, "MISSING", None)
    return request.param


def test_the_table_of_a_name_is_what_such_a_device_gets(named, capsys):
    runs = {form: runs for form, (runs, _) in table(capsys, f"--gpu={named}").items()}
    assert all(runs[form] == (kernels.unable(GPU) is None) for form in FAST)
    assert runs["CUDA kernels for Hopper"] == hopper.available.__wrapped__(GPU)
    assert runs["attention=cudnn"] == (best_attention(GPU)[0] == "cudnn")
    assert runs["precision=bf16, by default"] == (pick_precision("auto", GPU)[0] == "bf16")
    try:
        fp8 = pick_precision("fp8", GPU)[0] == "fp8"
    except UserError as error:
        fp8 = "try --precision=bf16" not in str(error)
    assert runs["precision=fp8"] == fp8


@pytest.mark.parametrize(
    "name, no",
    [
        ("a100", FP8 + CUDNN + HOPPER),
        ("4090", CUDNN + HOPPER),
        ("h100", []),
        ("h200", []),
        ("b200", HOPPER),
        ("mi300x", FP8 + CUDNN + HOPPER + FAST),
    ],
)
def test_what_runs_on_each_gpu(name, no, capsys):
    found = table(capsys, f"--gpu={name}")
    assert {form for form, (runs, _) in found.items() if not runs} == set(no)
    assert found.keys() >= {*FAST, *FP8, *CUDNN, *HOPPER} and not kernels.served


def test_this_machine_without_a_gpu(capsys):
    found = table(capsys, "--device=cpu")
    assert not any(found[form][0] for form in (*FAST, *FP8, *CUDNN, *HOPPER))
    assert found["kernels.mlp"][1] == kernels.unable(torch.device("cpu"))
    assert found["precision=bf16, by default"] == (
        False,
        pick_precision("auto", torch.device("cpu"))[1],
    )


def test_a_missing_package_is_named(monkeypatch, capsys):
    monkeypatch.setattr(kernels, "MISSING", "the package triton is not installed")
    monkeypatch.setattr(chips, "of", lambda device: chips.NAMED["h200"])
    monkeypatch.setattr("measure.support.device_name", lambda device: "NVIDIA H200")
    found = table(capsys, "--device=cpu")
    assert all(
        found[form] == (False, "the package triton is not installed") for form in (*FAST, *FP8, *HOPPER)
    )


def test_another_name_is_one_line():
    with pytest.raises(
        UserError, match="gpu=v100: expected one of a100, 4090, h100, h200, b200, mi300x, or none"
    ) as e:
        here("support", "--gpu=v100")
    one_line(e)


@pytest.mark.parametrize(
    "lines, unusable",
    [
        ("cpuid level : 28\nflags : fpu amx_tile amx_bf16", True),
        ("cpuid level : 32\nflags : fpu amx_tile amx_bf16", False),
        ("cpuid level : 28\nflags : fpu avx512f", False),
        ("Features : fp asimd", False),  # an ARM
        (None, False),  # not Linux
    ],
)
def test_amx_without_its_description_is_left_alone(lines, unusable, tmp_path, monkeypatch):
    """A virtual machine's CPU says that it has AMX, and CPUID ends before the sizes of its tiles."""
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    if lines is not None:
        (tmp_path / "cpuinfo").write_text(f"processor : 0\n{lines}\n\nprocessor : 1\n{lines}\n")
    assert chips.without_amx(tmp_path / "cpuinfo") == unusable
    assert os.environ.pop("ONEDNN_MAX_CPU_ISA", None) == ("AVX512_CORE_FP16" if unusable else None)


def test_bf16_products_on_this_cpu():
    """Whatever this CPU says of itself; if it were wrong, this process would end."""
    a = torch.ones(64, 64).bfloat16()
    assert (a @ a).sum().item() == 64**3


def test_a_step_with_the_forms_of_another_gpu(named, monkeypatch):
    """bench.py step --gpu: an older GPU of the same maker, whose forms a newer one runs."""
    monkeypatch.setattr(chips, "imitated", None)
    monkeypatch.setattr(step, "device_name", lambda device: "this GPU")
    own = chips.of(GPU)
    for name, chip in chips.NAMED.items():
        on_hopper_alone = chip.number == 90 and own.number != 90
        if chip.maker == own.maker and chip.capability <= own.capability and not on_hopper_alone:
            step.imitate(name, GPU)
            assert chips.of(GPU) == chip and chips.of(torch.device("cpu")).maker == "cpu"
            assert best_attention(GPU)[0] == (
                "cudnn" if chip.maker == "nvidia" and chip.number >= 90 else "flash"
            )
            chips.imitated = None
        else:
            with pytest.raises(UserError, match=f"^gpu={name}: this GPU cannot run all of its forms"):
                step.imitate(name, GPU)
            assert chips.imitated is None
