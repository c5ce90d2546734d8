"""settings.py: recipes are legal, conflicts are named with a fix, removed settings say why, and no torch is needed."""

import dataclasses
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

from configurator import UserError, configure, describe
from settings import Config, GPTConfig, check, legal

RECIPES = sorted(path.stem for path in (ROOT / "config").glob("*.py"))


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_is_legal_on_the_ranks_of_its_command(name, monkeypatch):
    monkeypatch.chdir(ROOT)
    first = Path(f"config/{name}.py").read_text().splitlines()[0]
    assert f"train.py config/{name}.py" in first
    ranks = math.prod(
        int(n) for n in re.findall(r"--(?:nnodes|nproc_per_node)=(\d+)", first)
    )  # 1 without torchrun
    cfg = configure(Config, [f"config/{name}"])
    check(dataclasses.replace(cfg, batch_tokens=cfg.micro_tokens(ranks)) if name == "test" else cfg, ranks)


@pytest.mark.parametrize(
    "settings, ranks, message",
    [
        (
            dict(parallel="fsdp", precision="fp16"),
            2,
            "parallel=fsdp has no loss scaler for precision=fp16; try",
        ),
        (dict(parallel="hsdp", shard_size=3), 4, "shard_size=3 must divide the number of ranks, 4"),
        (dict(shard_size=2), 2, "shard_size=2 is for parallel=hsdp, parallel is ddp; try --shard_size=None"),
        (dict(optimizer="adamw8bit", precision="fp16"), 1, "optimizer=adamw8bit has no loss scaler"),
        (dict(weights="bf16", optimizer="adamw8bit"), 2, "which DDP sums in bf16; try --reduce_dtype=bf16"),
        (dict(cuda_graph=True, remat="block"), 1, "cuda_graph=True cannot capture remat=block"),
        (dict(cuda_graph=True, document_mask=True), 1, "cuda_graph=True cannot capture document_mask=True"),
        (
            dict(cuda_graph=True, parallel="zero2"),
            2,
            "cannot capture FSDP2's collectives, parallel=zero2; try",
        ),
        (dict(cuda_graph=True, context_parallel=2), 2, "cannot capture context_parallel's collectives"),
        (dict(remat_tile=128), 1, "remat_tile needs remat=selective, attention or block, remat is none"),
        (dict(remat="block", remat_tile=0), 1, "remat_tile=0 must be at least 1"),
        (
            dict(remat="attention", dropout=0.1),
            1,
            "remat=attention does not support dropout=0.1; try --remat=block",
        ),
        (dict(remat="attention", n_embd=48), 1, "n_embd / n_head = 4 to be a multiple of 8"),
        (dict(context_parallel=3), 4, "context_parallel=3 must divide the number of ranks, 4"),
        (dict(context_parallel=0), 1, "context_parallel=0 must divide"),
        (
            dict(context_parallel=2, block_size=1023),
            2,
            "must be divisible by context_parallel=2; nearest: 1022",
        ),
        (dict(context_parallel=8, batch_size=1), 8, "n_head=12 must be divisible by context_parallel=8"),
        (
            dict(context_parallel=4, n_kv_head=6),
            4,
            "one of n_kv_head=6 and context_parallel=4 must be divisible",
        ),
        (
            dict(n_head=0, n_kv_head=0, clip=float("nan")),
            1,
            "n_head=0 must be at least 1; n_kv_head=0.*clip=nan must be",
        ),
        (dict(warmup_tokens=-1), 1, "warmup_tokens=-1 must be at least 0"),
        (dict(beta1=1.0, seed=2**63), 1, r"beta1=1.0 must be below 1; seed=\d+ must be below"),
        (dict(init_from="gpt2"), 1, "init_from=gpt2 is nanoGPT's; it is --init_from=hf:gpt2 here"),
        (dict(init_from="resume"), 1, "it is --resume=auto here"),
        (dict(batch_tokens=10), 1, "batch_tokens=10 is not divisible .* = 64.1024.1 = 65536; nearest: 65536"),
    ],
)
@pytest.mark.fault(12, 18)
def test_what_cannot_be_is_one_line(settings, ranks, message):
    with pytest.raises(UserError, match=message) as error:
        check(Config(**settings), ranks)
    assert "\n" not in str(error.value)
    assert not legal(Config(**settings), ranks)


def test_none_is_off_and_ranks_are_those_of_torchrun(monkeypatch):
    off = dict.fromkeys(
        ["clip", "top_k", "softcap", "rope_factor", "shuffle_seed", "remat_tile", "shard_size"]
    )
    check(Config(**off))
    assert legal(Config(), 8) and not legal(Config(), 3)
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(UserError, match=r"64\*1024\*3"):
        check(Config())


@pytest.mark.parametrize("name", Config.gone)
def test_a_removed_setting_says_why(name, tmp_path):
    assert name not in {f.name for f in dataclasses.fields(Config)}
    (tmp_path / "c.py").write_text(f"lr = 1e-3\n{name} = 25\n")
    for word, where in (
        (str(tmp_path / "c.py"), "c.py:2: "),
        (f"--{name}=25", "command line: "),
        (f"--no_{name}", ""),
    ):
        with pytest.raises(UserError, match=f"{where}the setting (--)?{name} was removed: .") as error:
            configure(Config, [word])
        assert "\n" not in str(error.value)


def test_help_has_sections_the_most_used_first():
    rows = describe(Config).splitlines()
    sections = [row for row in rows if row and not row.startswith(" ")]
    assert sections[:3] == ["Run:", "Data:", "Batch and schedule:"] and sections[-1].startswith("Model")
    names = [row.split("=")[0].strip(" -") for row in rows if row.startswith("  --")]
    assert sorted(names) == sorted(f.name for f in dataclasses.fields(Config))
    assert all(not row.startswith("  --") or row[34:].strip() for row in rows)  # every setting has a comment
    assert (
        rows.index("Data:")
        < next(i for i, row in enumerate(rows) if "--data_dir=" in row)
        < rows.index(sections[2])
    )


def test_no_torch_is_imported():
    code = "import sys, configurator, settings, run.files, run.source; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_a_shape_is_a_part_of_a_run():
    assert (
        issubclass(Config, GPTConfig) and Config(n_head=5).problems() == GPTConfig(n_head=5).problems() != []
    )
