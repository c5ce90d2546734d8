"""No test leaves a setting of the process to the next one."""

import os

import torch
from compare import CPU, small
from conftest import SETTINGS, kept

import fast
from fast import forms
from model import build
from run.build import compile_model
from scale import parallel
from scale.precision import autocast
from settings import Config


def all_settings():
    """All settings of the process: PyTorch's options to compile, and what else the code sets."""
    configs = (
        torch._dynamo.config,
        torch._functorch.config,
        torch._inductor.config,
        torch.compiler.config,
    )
    found = [config.get_config_copy() for config in configs]
    found += [torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()]
    found += [
        torch.get_num_threads(),
        torch.get_default_dtype(),
        set(forms.enabled),
        dict(os.environ),
    ]
    return [*found, torch.utils.deterministic.fill_uninitialized_memory]


def test_settings_that_a_test_leaves_are_put_back(request):
    """All that the code sets for its process; if it comes to set more, this finds it."""
    assert "settings_kept" in request.fixturenames
    before = all_settings()
    values = [getattr(owner, name) for owner, name in SETTINGS]
    with kept():
        parallel.join(Config(device="cpu", deterministic=True))
        parallel.make_deterministic()
        autocast("tf32", CPU)
        compile_model(build(small(), CPU))
        if forms.load() is None:
            fast.fusion.register()
        forms.enabled.add("cuda")
        torch.set_num_threads(torch.get_num_threads() + 1)
        torch.set_default_dtype(torch.float64)
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
        os.environ.pop("CUBLAS_WORKSPACE_CONFIG")
        assert not any(now == then for now, then in zip(all_settings(), before))
    assert all_settings() == before
    assert all(getattr(owner, name) is value for (owner, name), value in zip(SETTINGS, values))
