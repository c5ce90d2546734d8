"""settings.py: recipes are legal, conflicts are named with a fix, and no torch is needed."""

import dataclasses
import math
import re
from pathlib import Path

import pytest
from conftest import ROOT

from configurator import configure
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
    if name == "test":
        cfg = dataclasses.replace(cfg, batch_tokens=cfg.rank_tokens * ranks)
    check(cfg, ranks)


@pytest.mark.parametrize("words, ranks, message", [
    ("--parallel=fsdp --precision=fp16", 2, "precision=fp16"),
    ("--parallel=hsdp --shard_size=3", 4, "shard_size=3"),
    ("--weights=bf16 --optimizer=adamw8bit", 2, "reduce_dtype=bf16"),
    ("--cuda_graph --remat=block", 1, "remat=block"),
    ("--context_parallel=3", 4, "context_parallel=3"),
    ("--context_parallel=2 --block_size=1023", 2, "try 1022"),
    ("--context_parallel=8 --batch_size=1", 8, "n_head=12"),
    ("--n_head=0 --beta1=1.0", 1, "n_head=0"),
    ("--lr=inf --rope_theta=nan", 1, "lr=inf"),
    ("--grad_clip=1", 1, "clip"),
    ("--batch_tokens=10", 1, "try 65536"),
    ("--batch_schedule=65000:0.5", 2, "try 131072"),
    ("--batch_schedule=65536", 1, "TOKENS:SHARE"),
    ("--max_seconds=9 --max_tokens=9", 1, "one of them"),
    ("--init_from=resume", 1, "--resume=auto"),
    ("--backend=nccl", 1, "device, from"),
])  # fmt: skip
def test_what_cannot_be_is_one_line(words, ranks, message):
    with pytest.raises(UserError, match=message) as error:
        check(configure(Config, words.split()), ranks)
    assert "\n" not in str(error.value)


def test_none_is_off_and_ranks_are_those_of_torchrun(monkeypatch):
    off = ["clip", "rope_factor", "shuffle_seed", "remat_tile", "shard_size"]
    check(Config(**dict.fromkeys(off)))
    check(Config(), 8)
    monkeypatch.setenv("WORLD_SIZE", "3")
    check(Config())  # SLURM and containers set it, torchrun sets RANK
    for name, value in dict(RANK="0", LOCAL_RANK="0", LOCAL_WORLD_SIZE="3").items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="= 196608"):
        check(Config())
