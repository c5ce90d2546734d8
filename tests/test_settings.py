"""settings.py: recipes are legal, conflicts are named with a fix, and no torch is needed."""

import dataclasses
import itertools
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

from configurator import configure, describe
from settings import Config, check
from system.errors import UserError

RECIPES = sorted(path.stem for path in (ROOT / "config").glob("*.py"))


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_is_legal_on_the_ranks_of_its_command(name, monkeypatch):
    monkeypatch.chdir(ROOT)
    first = "".join(Path(f"config/{name}.py").read_text().replace("\\\n#    ", "").splitlines()[:1])
    assert f"train.py config/{name}.py" in first
    # 1 without torchrun
    ranks = math.prod(map(int, re.findall(r"--(?:nnodes|nproc_per_node)=(\d+)", first)))
    cfg = configure(Config, [f"config/{name}"])
    check(
        dataclasses.replace(cfg, batch_tokens=cfg.micro_tokens(ranks)) if name == "test" else cfg,
        ranks,
    )


@pytest.mark.parametrize("words, ranks, message", [
    ("--parallel=fsdp --precision=fp16", 2, "=fsdp, which has no loss scaler; try --precision=bf"),
    ("--parallel=hsdp --shard_size=3", 4, "shard_size=3 must divide the number of ranks, 4"),
    ("--weights=bf16 --optimizer=adamw8bit", 2, "which DDP sums in bf16; try --reduce_dtype=bf16"),
    ("--weights=bf16", 1, "optimizer=adamw, which loses small updates; try --optimizer=adamw8"),
    ("--weights=bf16 --optimizer=adamw8bit --precision=fp32", 1, "=fp32, which needs more bits"),
    ("--deterministic --attention=cudnn", 1,
     "=cudnn, which adds in no fixed order; try --attention=fl"),
    ("--cuda_graph --remat=block", 1, "cuda_graph=True does not go with remat=block"),
    ("--cuda_graph --parallel=zero2", 2, "cuda_graph=True does not go with parallel=zero2"),
    ("--remat_tile=128", 1, "remat_tile=128 does not go with remat=none"),
    ("--remat_every=2", 1, "remat_every=2.0 does not go with remat=none"),
    ("--remat_every=auto", 1, "remat_every=auto does not go with remat=none"),
    ("--remat=block --remat_tile=0", 1, "remat_tile=0 must be at least 1"),
    ("--document_mask --remat=attention", 1, "remat=attention does not go with document_mask=True"),
    ("--context_parallel=3", 4, "context_parallel=3 must divide the number of ranks, 4"),
    ("--context_parallel=0", 1, "context_parallel=0 must divide"),
    ("--context_parallel=2 --block_size=1023", 2, "divisible by context_parallel=2; try 1022"),
    ("--context_parallel=8 --batch_size=1", 8, "n_head=12 must be divisible by context_parallel=8"),
    ("--context_parallel=4 --n_kv_head=6", 4, "one of n_kv_head=6 and context_parallel=4 must"),
    ("--n_head=0 --n_kv_head=0 --clip=nan", 1,
     "clip=nan is not a float"),
    ("--clip=0", 1, "clip=0.0 must be over 0"),
    ("--beta1=1.0 --lr=-1", 1, "beta1=1.0 must be below 1; lr=-1.0 must be at least 0"),
    ("--grad_clip=1 --eval_iters=9", 1,
     "did you mean clip.*; did you mean eval_tokens, which is in tok"),
    ("--batch_tokens=10", 1, "batch_tokens=10 is not divisible .* = 65536; try 65536"),
    ("--batch_schedule=65000:0.5", 2,
     "batch_schedule=65000 is not divisible by block_size.ranks = 2048; try 65536"),
    ("--batch_schedule=1024:0.5", 2, "batch_schedule=1024 is not divisible by .* try 2048"),
    ("--batch_schedule=24576:0.5", 1, "batch_schedule: a later micro-batch, of 65536 tokens, "
     "must be a multiple of the first one's 24576; try another --batch_size"),
    ("--batch_schedule=32768:0.2,49152:0.5", 1, "of 49152 tokens, must be a multiple of the"),
    ("--batch_schedule=65536", 1, "batch_schedule=65536: expected TOKENS:SHARE,... that grow"),
    ("--batch_schedule=65536:0.5,131072:0.2", 1, "expected TOKENS:SHARE,... that grow"),
    ("--batch_schedule=131072:0.2,65536:0.5", 1, "that grow, below batch_tokens and 1, such as"),
    ("--batch_schedule=524288:0.5", 1, "that grow, below batch_tokens"),
    ("--batch_schedule=65536:1.0", 1, "that grow, below batch_tokens and 1"),
    ("--batch_schedule=65536:0.0", 1, "that grow, below batch_tokens and 1"),
    ("--batch_schedule=65536:nan", 1, "that grow, below batch_tokens and 1"),
    ("--batch_schedule=65536:0.1 --overfit", 1, "overfit=True, which repeats one batch"),
    ("--max_tokens=0", 1, "max_tokens=0 must be at least 1"),
    ("--max_seconds=0", 1, "max_seconds=0.0 must be over 0"),
    ("--max_seconds=nan", 1, "max_seconds=nan is not a float"),
    ("--max_seconds=inf", 1, "max_seconds=inf is not a float"),
    ("--max_seconds=9 --max_tokens=9", 1, "max_tokens=9, which ends the run too; try one of them"),
    ("--max_seconds=9 --weight_decay=None", 1, "weight_decay=None, which counts the steps"),
    ("--max_seconds=9 --deterministic", 1,
     "deterministic=True, which a clock is not; try --max_tokens"),
])  # fmt: skip
@pytest.mark.fault(12, 18, 80)
def test_what_cannot_be_is_one_line(words, ranks, message):
    with pytest.raises(UserError, match=message) as error:
        check(configure(Config, words.split()), ranks)
    assert "\n" not in str(error.value)


def test_none_is_off_and_ranks_are_those_of_torchrun(monkeypatch):
    off = ["clip", "softcap", "rope_factor", "shuffle_seed", "remat_tile", "shard_size"]
    check(Config(**dict.fromkeys(off)))
    check(Config(), 8)
    monkeypatch.setenv("WORLD_SIZE", "3")
    check(Config())  # SLURM and containers set it, torchrun sets RANK
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UserError, match="= 196608"):
        check(Config())


def test_help_has_sections_the_most_used_first_and_a_comment_for_every_setting():
    rows = describe(Config).splitlines()
    sections = [row for row in rows if row and not row.startswith(" ")]
    assert sections[:3] == ["Run:", "Data:", "Batch and schedule:"] and sections[-1].startswith(
        "Model"
    )
    shown = [row for row in rows if row.startswith("  --")]
    names = [row.split("=")[0].strip(" -") for row in shown]
    assert sorted(names) == sorted(f.name for f in dataclasses.fields(Config))
    assert len(names) <= 91
    # a long setting has its comment on the next row
    for row, below in itertools.pairwise([*rows, ""]):
        if row.startswith("  --"):
            assert row[28:].strip() or below.startswith(" " * 28)


def test_no_torch_is_imported():
    code = (
        "import sys, configurator, settings, run.source, system.files; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
