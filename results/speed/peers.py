"""The same training step here, in transformers, with Liger's kernels, and in nanoGPT.

    python results/speed/peers.py --batch_tokens=131072 --clone=../nanoGPT          # GPT-2 124M
    python results/speed/peers.py config/llama_124m.py
    python results/speed/peers.py config/llama_124m.py --curves=out/peers --data_dir=data/books

All start from the same weights and read the same random tokens, or with --curves those of data_dir,
and write their losses for plot.py. The last token of a row has no target, since transformers shifts
the labels itself. Each row is a process; with TORCHDYNAMO_SUPPRESS_ERRORS=1 what torch.compile
cannot take runs as it is.
"""

import dataclasses
import importlib.util
import json
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import optim
import train
from bench import StepConfig
from configurator import run
from measure import step
from model import build
from results.processes import last_line, need_gpu, need_packages
from run import hf
from run.build import choose, make_loader
from run.flops import ModelAnalysis
from scale import parallel
from settings import check
from system.errors import UserError

PEERS = {
    "ours": "this repository",
    "hf": "transformers",
    "liger": "  + Liger's kernels",
    "nanogpt": "nanoGPT",
}
SMALL = (
    "--n_layer=2 --n_embd=64 --n_head=2 --block_size=64 --vocab_size=257 --batch_size=2 "
    "--batch_tokens=128 --compile=False --steps=2 --settle=0"
)


@dataclasses.dataclass
class Config(StepConfig):
    peer: str | None = None  # ours, hf, liger or nanogpt: its row alone, in this process
    clone: str | None = None  # folder of a clone of nanoGPT, for its row
    curves: str | None = None  # folder for the losses, on data_dir instead of random tokens


def main(cfg):
    check(cfg, 1)
    if cfg.peer:
        print(measure(cfg))
        return 0
    need_gpu(cfg.device, SMALL)
    print(f"{'':<22}first loss   step")
    codes = []
    for peer, name in PEERS.items():
        command = [sys.executable, __file__, *sys.argv[1:], f"--peer={peer}"]
        words, code = last_line(command)
        print(f"{name:<22}{words}", flush=True)
        codes.append(code)
    return int(all(codes))  # 1 if none ended well


def measure(cfg):
    """The row of cfg.peer in words."""
    world = parallel.join(cfg)
    own, _ = choose(cfg, world.device)
    analysis = ModelAnalysis(own, world.device)
    if cfg.peer != "ours" and own.precision == "fp8":
        own = dataclasses.replace(own, precision="bf16")
    job = train.Training(own, world) if cfg.peer == "ours" else Peer(own, world.device)
    loader = make_loader(own, world) if cfg.curves else None
    batches = loader.next if loader else step.synthetic(own, world)
    losses, update = [], job.update
    # ours adds up shares of a step's tokens, of which some have no target (run/figures.py)
    tokens = own.batch_tokens if cfg.peer == "ours" else 1

    def recorded(sums, norm):
        """A step at its own rate, where measure/step.py has that of the first."""
        share = len(losses) / own.max_steps
        optim.set_learning_rate(job.state.optimizer, optim.learning_rate(len(losses), share, own))
        losses.append(sums[0] * tokens / sums[1])
        update(sums, norm)

    def without_last_targets():
        x, y = batches()
        return x, torch.cat([y[:, :-1], torch.full_like(y[:, -1:], -100)], 1)

    job.update = recorded
    for _ in range(1 + cfg.settle):
        step.step(job, without_last_targets, own)
    times = step.step_times(job, without_last_targets, own)
    losses = [loss.item() for loss in losses]
    if loader:
        loader.close()
        lines = [
            dict(kind="train", step=n, tokens=n * own.batch_tokens, loss=x)
            for n, x in enumerate(losses, 1)
        ]
        Path(cfg.curves).mkdir(parents=True, exist_ok=True)
        Path(cfg.curves, f"{cfg.peer}.jsonl").write_text(
            "".join(json.dumps(x) + "\n" for x in lines)
        )
    gib = torch.cuda.max_memory_allocated() / 2**30
    return f"{losses[0]:10.4f}   {step.speed(times, own, world, analysis)}, {gib:.1f} GiB"


class Peer:
    """Another repository's model with our weights and optimizer, as a step calls a Training."""

    def __init__(self, cfg, device):
        with tempfile.TemporaryDirectory() as folder:
            tensors = build(cfg, device, cfg.seed).state_dict()
            saved = hf.save_hf(cfg, tensors, Path(folder) / "hf")
            model, self.loss = (
                nanogpt(cfg, saved) if cfg.peer == "nanogpt" else transformer(cfg, saved)
            )
        model.to(device).train()
        self.model = torch.compile(model) if cfg.compile else model
        self.state = SimpleNamespace(model=model, optimizer=optim.make_optimizer(model, cfg))
        self.autocast = torch.autocast(device.type, torch.bfloat16, enabled=cfg.precision == "bf16")
        self.accumulation, self.limit = cfg.micro_steps(1), cfg.clip or float("inf")

    def accumulate(self, next_batch):
        """The micro-steps' mean loss, of 1."""
        total = 0.0
        for _ in range(self.accumulation):
            with self.autocast:
                loss = self.loss(self.model, *next_batch()) / self.accumulation
            loss.backward()
            total += loss.detach()
        return torch.stack([total, torch.ones_like(total)])

    def normalize_and_clip(self, _):
        return torch.nn.utils.clip_grad_norm_(self.state.model.parameters(), self.limit)

    def update(self, *_):
        self.state.optimizer.step()
        self.state.optimizer.zero_grad(set_to_none=True)


def transformer(cfg, saved):
    """(transformers' model in float32, how its loss is computed)."""
    need_packages("transformers")
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        saved, attn_implementation="sdpa", dtype=torch.float32
    )
    if cfg.peer == "liger":
        need_packages("liger_kernel")
        from liger_kernel.transformers import _apply_liger_kernel_to_instance

        _apply_liger_kernel_to_instance(model=model)
    return model, lambda compute, x, y: compute(input_ids=x, labels=x, use_cache=False).loss


def nanogpt(cfg, saved):
    """(nanoGPT's model in float32, with our padded vocabulary, how its loss is computed)."""
    if cfg.clone is None or cfg.mlp != "gelu":
        raise UserError("needs a GPT-2 and --clone=FOLDER, a clone of github.com/karpathy/nanoGPT")
    spec = importlib.util.spec_from_file_location("nanogpt_model", Path(cfg.clone) / "model.py")
    # its dataclass looks there
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    shape = {
        k: getattr(cfg, k) for k in ("block_size", "n_layer", "n_head", "n_embd", "dropout", "bias")
    }
    model = module.GPT(module.GPTConfig(vocab_size=cfg.padded_vocab, **shape))
    tensors = load_file(saved / "model.safetensors")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # transposed there
            conv1d = name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))
            theirs = tensors[name].T if conv1d else tensors[name]
            parameter[: len(theirs)] = theirs
    return model, lambda compute, x, y: compute(x, y.masked_fill(y == -100, -1))[1]


if __name__ == "__main__":
    run(main, Config)
