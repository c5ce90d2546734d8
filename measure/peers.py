"""The same training step in this repository, in plain transformers, and in transformers with Liger's kernels.

All three start from the same weights and read the same tokens, so that their first losses agree; the last token of a
row has no target, because transformers shifts the labels itself. Each runs in a process of its own.
"""

import dataclasses
import importlib.util
import itertools
import tempfile
from pathlib import Path

import torch

import optim
import train
from configurator import UserError, refuse, too_small
from fast import chips
from measure import ladder, step
from measure import rates as results
from model import build
from run import files
from run.account import Account
from run.logger import changed, device_name
from scale import parallel
from settings import Config

PEERS = {"ours": "this repository", "hf": "transformers", "liger": "transformers + Liger"}
FIXED = ("optimizer", "remat", "document_mask", "dropout", "weights", "init_from", "z_loss", "label_smoothing")
BATCHES = 8  # different ones
FORM = {"figures": {"loss": files.number, "step_ms": results.positive, "tokens_per_s": results.positive}}


def measure(cfg):
    """Prints a row for each peer, or for cfg.peer, and writes the figures to cfg.out; cfg: a bench.PeersConfig."""
    refuse(too_small(cfg, {"steps": 1, "settle": 0}))
    ladder.refuse_ranks("peers")
    plain = {name: getattr(Config, name) for name in FIXED}
    wrong = [f"{k}={getattr(cfg, k)}" for k, v in plain.items() if getattr(cfg, k) != v]
    refuse([f"bench.py peers measures the same step everywhere, without {', '.join(wrong)}"] if wrong else [])
    if cfg.out:
        results.refuse_unwritable("out", cfg.out)
    if cfg.peer == "all":
        return table(cfg)
    if reason := missing(cfg.peer, parallel.pick_device(cfg.device)):
        raise UserError(reason)
    figures = timed(cfg)
    print(f"{PEERS[cfg.peer]}: first loss {figures['loss']:.4f}, {line(figures)}")
    if cfg.out:
        write(cfg, figures)


def table(cfg):
    """A row for each peer, from a process of its own."""
    device, rows = parallel.pick_device(cfg.device), []
    print(f"{device_name(device)}, torch {torch.__version__}; each row is a process that compiles anew")
    print(f"\n{'':<22}{'first loss':>12}{'ms a step':>12}{'tokens/s':>12}{'MFU':>7}{'GiB':>7}{'ours':>8}", flush=True)
    for peer, name in PEERS.items():
        reason = missing(peer, device)
        row = {"left_out": reason} if reason else in_a_process(cfg, peer)
        rows.append({"peer": peer, **row})
        words = f"  not here: {reason}" if reason else f"  failed: {row.get('failed')}"
        if "tokens_per_s" in row:
            ours = rows[0].get("tokens_per_s")  # how many times as fast ours is
            words = f"{row['loss']:>12.4f}{line(row)}" + (f"{ours / row['tokens_per_s']:>7.2f}x" if ours else "")
        print(f"{name:<22}{words}", flush=True)
        if cfg.out:
            write(cfg, {"peers": rows})


def write(cfg, figures):
    device = device_name(parallel.pick_device(cfg.device))
    results.write(cfg.out, "peers", cfg, device, 1, torch.__version__, figures)


def line(figures):
    """Step, rate, MFU and memory as the table has them."""
    mfu, gib = ladder.mfu_and_gib(figures)
    return f"{figures['step_ms']:>12.1f}{figures['tokens_per_s']:>12,.0f}{mfu:>7}{gib:>7}"


def missing(peer, device):
    """Why a peer cannot run on this machine, or None."""
    packages = {"hf": ["transformers"], "liger": ["transformers", "liger_kernel"]}.get(peer, [])
    if absent := [name.replace("_", "-") for name in packages if importlib.util.find_spec(name) is None]:
        return f"not installed: pip install {' '.join(absent)}"
    return "its kernels are for GPUs" if peer == "liger" and chips.of(device).maker == "cpu" else None


def in_a_process(cfg, peer):
    """Figures of `bench.py peers --peer=peer` with cfg's settings, or {"failed": why}."""
    words = [f"--{name}={value}" for name, value in changed(cfg).items() if name not in ("out", "peer")]
    return ladder.figures_of(["peers", *words, f"--peer={peer}"], FORM)


def timed(cfg):
    """{"loss": of the first step, and the figures of its speed and memory} of cfg.peer."""
    world = parallel.join(cfg)
    own, _ = train.choose(cfg, world.device)
    job = train.build(own, world) if cfg.peer == "ours" else Peer(own, world, cfg.peer == "liger")
    next_batch = without_last_targets(step.synthetic(own, world, BATCHES))
    figures = {"loss": job.step(next_batch, cfg.lr)[0].item()}
    for _ in range(cfg.settle):
        job.step(next_batch, cfg.lr)
    times = step.step_times(job, next_batch, cfg)
    own = own if cfg.peer == "ours" else job.cfg  # whose precision says by which peak MFU divides
    figures |= step.rates(times, own, world, job.account.flops_per_token)[1]
    on_gpu = world.device.type == "cuda"
    return figures | {"peak_gib": torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None}


def without_last_targets(next_batch):
    """Repeats the next BATCHES batches, whose rows then have no target at their last token."""
    batches = [next_batch() for _ in range(BATCHES)]
    for _, targets in batches:
        targets[:, -1] = -100
    return itertools.cycle(batches).__next__


class Peer(train.Training):
    """The training step of train.py over transformers' model of the same weights, in bf16 where ours is in fp8."""

    def __init__(self, cfg, world, liger):
        precision = "bf16" if cfg.precision == "fp8" else cfg.precision
        self.cfg = dataclasses.replace(cfg, precision=precision)
        self.account = Account(cfg, world.device)
        self.raw = theirs(cfg, world.device, liger)
        compute = torch.compile(self.raw) if cfg.compile else self.raw
        self.model = lambda x, y: compute(input_ids=x, labels=x, use_cache=False).loss  # it shifts the labels itself
        self.optimizer = optim.make_optimizer(self.raw, self.cfg)
        self.scaler = torch.amp.GradScaler(world.device.type, enabled=precision == "fp16")
        self.autocast = parallel.autocast(precision, world.device)
        self.accumulation = cfg.micro_steps(world.size)
        self.clip, self.skips = cfg.clip, False


def theirs(cfg, device, liger):
    """transformers' model in float32 with the weights that ours starts from; raises UserError where it has none."""
    import transformers

    from run import hf

    with tempfile.TemporaryDirectory() as folder:
        path = hf.save_hf(build(cfg, device, cfg.seed), Path(folder) / "hf")
        options = dict(attn_implementation="sdpa", dtype=torch.float32)
        model = transformers.AutoModelForCausalLM.from_pretrained(path, **options).to(device).train()
    if liger:
        from liger_kernel.transformers import _apply_liger_kernel_to_instance, monkey_patch

        if model.config.model_type not in monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN:
            raise UserError(f"Liger has no kernels for {model.config.model_type}")
        _apply_liger_kernel_to_instance(model=model)
    return model
