"""--deterministic: runs of a command end with equal bits; nothing is chosen by time or order."""

import pytest
import ranks
import torch
from compare import LLAMA, slow
from conftest import flags, load_checkpoint, train_here

from fast.chips import best_attention
from scale import parallel

GPT = dict(n_embd=768, n_head=12, block_size=256, batch_size=16, batch_tokens=8192, max_steps=5)
GPT["save_interval"] = 5
GROUPED = GPT | LLAMA | dict(n_kv_head=4)
RUNS = {"gpt": GPT, "fp8": GPT | dict(precision="fp8", dropout=0.1)}
RUNS |= {"documents": GROUPED | dict(document_mask=True)}
RUNS |= {"remat": GROUPED | dict(remat="attention", optimizer="muon")}
RUNS |= {"compiled": slow(GPT | dict(compile=True))}


def assert_same_bits(folder, step):
    """Of weights and moments in the checkpoints of two runs, a and b."""
    a, b = (load_checkpoint(folder / run / f"step_{step:08}")[0] for run in "ab")
    for kind in ("model", "optimizer"):
        assert a[kind]
        torch.testing.assert_close(a[kind], b[kind], rtol=0, atol=0)


def test_two_runs_on_a_cpu_are_equal(data_dir, tmp_path):
    for name in "ab":
        options = dict(dropout=0.1, shuffle_seed=1, eval_interval=6, deterministic=True)
        train_here(data_dir, tmp_path / name, **options)
        assert torch.are_deterministic_algorithms_enabled()
    assert_same_bits(tmp_path, 12)


@pytest.mark.gpu
@pytest.mark.parametrize("settings", RUNS.values(), ids=RUNS)
def test_two_runs_on_a_gpu_are_equal(data_dir, tmp_path, settings):
    """Each run is a process of its own: a second run in one process would keep what was timed."""
    settings = dict(precision="bf16") | settings
    for name in "ab":
        words = flags(data_dir, tmp_path / name, **settings, device="cuda", deterministic=True)
        done = ranks.run(0, words, timeout=300)
        assert done.returncode == 0, done.stderr
        assert "fused" in done.stdout
    assert_same_bits(tmp_path, 5)


def test_attention_is_not_cudnns(monkeypatch):
    parallel.make_deterministic()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    device = torch.device("cuda", 0)
    assert best_attention(device)[0] == "flash" and best_attention(device, "fp32")[0] == "efficient"
    torch.use_deterministic_algorithms(False)
    assert best_attention(device)[0] == "cudnn"
