"""A training step of transformers' Llama 3 8B with Liger's kernels, over one or several GPUs.

    python results/speed/peers_8b.py config/llama3_8b_128k_one_gpu.py --init_from=None --no_update \
        --steps=1 --settle=0
    torchrun --standalone --nproc_per_node=4 results/speed/peers_8b.py config/llama3_8b.py \
        --batch_tokens=262144 --reduce_dtype=bf16 --steps=3 --settle=1

The rows "Hugging Face + Liger" of docs/results.md; those of this repository are `bench.py step`
with the same words. peers.py has smaller models, from our weights and with the losses. Here the
weights are random, in the dtype of --weights. With --remat transformers' own checkpointing keeps
each block's input. Needs liger-kernel.
"""

import dataclasses
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from peers import Peer

from bench import StepConfig
from configurator import run
from measure import step
from results.processes import need_gpu, need_packages
from run import hf
from run.build import choose
from run.flops import ModelAnalysis
from run.logger import describe_device, show
from scale import parallel
from settings import check

SMALL = (
    "--kernels=none --n_layer=2 --n_embd=64 --n_head=4 --n_kv_head=2 --n_hidden=88 "
    "--vocab_size=257 --block_size=64 --batch_tokens=256 --steps=1 --settle=0"
)


@dataclasses.dataclass
class Config(StepConfig):
    kernels: Literal["liger", "none"] = "liger"  # none: transformers' own
    compile: bool = False  # each block
    update: bool = True  # fused AdamW; --no_update: without, where its states do not fit


def main(cfg):
    check(cfg)
    need_gpu(cfg.device, SMALL)
    need_packages(*["transformers", "liger_kernel"][: 2 if cfg.kernels == "liger" else 1])
    world = parallel.join(cfg)
    own, _ = choose(cfg, world.device)
    job = Transformer(own, world)
    if world.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()  # of building the whole model
    batches = step.synthetic(own, world)
    for _ in range(1 + own.settle):
        step.step(job, batches, own)
    times = step.step_times(job, batches, own)
    rows = [
        describe_device(world),
        ("step", step.speed(times, own, world, ModelAnalysis(own, world.device))),
    ]
    if world.device.type == "cuda":
        rows.append(("memory", f"{torch.cuda.max_memory_allocated() / 2**30:.1f} GiB at the peak"))
    if world.main:
        show(rows)
    parallel.stop()


class Transformer(Peer):
    """transformers' model of our shape in training, sharded if there are several ranks."""

    def __init__(self, cfg, world):
        from transformers import AutoConfig, AutoModelForCausalLM

        content = hf.config_json(cfg, "float32")
        theirs = AutoConfig.for_model(content.pop("model_type"), **content)
        dtype = torch.bfloat16 if cfg.weights == "bf16" else torch.float32
        torch.manual_seed(cfg.seed)  # the same weights on each rank, which keeps its rows of them
        with torch.device(world.device):
            model = AutoModelForCausalLM.from_config(
                theirs, dtype=dtype, attn_implementation="sdpa"
            )
        if cfg.kernels == "liger":
            from liger_kernel.transformers import _apply_liger_kernel_to_instance

            _apply_liger_kernel_to_instance(model=model)
        model.train()
        if cfg.remat != "none":
            model.gradient_checkpointing_enable({"use_reentrant": False})
        for block in model.model.layers if cfg.compile else ():
            block.compile()
        if world.size > 1:
            shard(model, cfg)
        self.model = model
        self.loss = lambda compute, x, y: compute(input_ids=x, labels=x, use_cache=False).loss
        if cfg.update:
            optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.lr, fused=True)
        else:
            optimizer = SimpleNamespace(
                param_groups=[], step=lambda: None, zero_grad=model.zero_grad
            )
        self.state = SimpleNamespace(model=model, optimizer=optimizer)
        # FSDP2 casts itself
        mixed = cfg.precision == "bf16" and cfg.weights == "fp32" and world.size == 1
        self.autocast = torch.autocast(world.device.type, torch.bfloat16, enabled=mixed)
        self.accumulation, self.limit = cfg.micro_steps(world.size), cfg.clip or float("inf")


def shard(model, cfg):
    """FSDP2: a unit for each block, one for the rest."""
    dtype = torch.bfloat16 if cfg.precision == "bf16" else None
    reduced = torch.bfloat16 if cfg.reduce_dtype == "bf16" else torch.float32
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduced)
    for block in model.model.layers:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)


if __name__ == "__main__":
    run(main, Config)
