"""The same training step in this repository, in transformers, in transformers with Liger's kernels, and in nanoGPT.

All start from the same weights and read the same tokens, so that their first losses agree (nanoGPT's to 0.001: its
softmax is over the padding of the vocabulary too, and its GELU is the exact one, not GPT-2's with tanh); the last token
of a row has no target, because transformers shifts the labels itself. Each runs in a process of its own.
"""

import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import itertools
import json
import statistics
import sys
import tempfile
from pathlib import Path

import torch

import optim
import train
from configurator import UserError, changed, refuse, too_small
from fast import chips
from measure import ladder, step
from measure import rates as results
from model import build
from run import files, hf
from run.build import make_batches, make_loaders
from run.flops import Account
from run.logger import device_name
from scale import parallel
from settings import Config

PEERS = {
    "ours": "this repository",
    "hf": "transformers",
    "liger": "transformers + Liger",
    "nanogpt": "nanoGPT",
}
FIXED = "optimizer remat document_mask dropout weights init_from z_loss label_smoothing cuda_graph".split()
BATCHES = 8  # different ones
FORM = {"figures": {"loss": files.number, "step_ms": results.positive, "tokens_per_s": results.positive}}


def measure(cfg):
    """Prints a row for each peer, or for cfg.peer, and writes the figures to cfg.out; cfg: a bench.PeersConfig."""
    refuse(too_small(cfg, {"steps": 1, "settle": 0}))
    ladder.refuse_ranks("peers")
    plain = {name: getattr(Config, name) for name in FIXED}
    wrong = {k: v for k, v in plain.items() if getattr(cfg, k) != v}
    words = (
        ", ".join(f"{k}={getattr(cfg, k)}" for k in wrong),
        " ".join(f"--{k}={v}" for k, v in wrong.items()),
    )
    refuse(
        ["bench.py peers measures the same step everywhere, without {}; give {}".format(*words)]
        if wrong
        else []
    )
    if cfg.out:
        results.refuse_unwritable("out", cfg.out)
    if cfg.curves:
        try:
            Path(cfg.curves).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"curves={cfg.curves}: {error.strerror}; give another folder") from None
    if cfg.peer == "all":
        return table(cfg)
    if reason := missing(cfg, cfg.peer):
        raise UserError(reason)
    figures = timed(cfg)
    print(f"{PEERS[cfg.peer]}: first loss {figures['loss']:.4f}, {line(figures)}")
    if cfg.out:
        write(cfg, figures)


def table(cfg):
    """A row for each peer, from a process of its own."""
    device, rows = parallel.pick_device(cfg.device), []
    print(f"{device_name(device)}, {versions()}; each row is a process that compiles anew")
    print(
        f"\n{'':<22}{'first loss':>12}{'ms a step':>12}{'tokens/s':>12}{'MFU':>7}{'GiB':>7}{'ours':>8}",
        flush=True,
    )
    for peer, name in PEERS.items():
        reason = missing(cfg, peer)
        row = {"left_out": reason} if reason else in_a_process(cfg, peer)
        rows.append({"peer": peer, **row})
        words = f"  not here: {reason}" if reason else f"  failed: {row.get('failed')}"
        if "tokens_per_s" in row:
            ours = rows[0].get("tokens_per_s")  # how many times as fast ours is
            words = f"{row['loss']:>12.4f}{line(row)}" + (
                f"{ours / row['tokens_per_s']:>7.2f}x" if ours else ""
            )
        print(f"{name:<22}{words}", flush=True)
        if "compile_failed" in row:
            print(
                f"{'':<22}  compiled but for what torch.compile failed with: {row['compile_failed']}",
                flush=True,
            )
        if cfg.out:
            write(cfg, {"peers": rows})


def versions():
    """The versions of torch and of the peers' packages that are installed, in words."""
    found = []
    for name in ("torch", "transformers", "liger-kernel"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found.append(f"{name} {importlib.metadata.version(name)}")
    return ", ".join(found)


def write(cfg, figures):
    device = device_name(parallel.pick_device(cfg.device))
    results.write(cfg.out, "peers", cfg, device, 1, torch.__version__, figures)


def line(figures):
    """Step, rate, MFU and memory as the table has them."""
    mfu, gib = ladder.mfu_and_gib(figures)
    return f"{figures['step_ms']:>12.1f}{figures['tokens_per_s']:>12,.0f}{mfu:>7}{gib:>7}"


def missing(cfg, peer):
    """Why a peer cannot run here or lacks the model, or None."""
    if peer == "nanogpt" and not is_gpt2(cfg):
        return "its model is GPT-2"
    if peer == "nanogpt" and cfg.clone is None:
        return "clone it and give its folder: --clone=FOLDER"
    packages = {"hf": ["transformers"], "liger": ["transformers", "liger_kernel"]}.get(peer, [])
    if absent := [name.replace("_", "-") for name in packages if importlib.util.find_spec(name) is None]:
        return f"not installed: pip install {' '.join(absent)}"
    if peer == "liger" and chips.of(parallel.pick_device(cfg.device)).maker == "cpu":
        return "its kernels are for GPUs"
    return None


def is_gpt2(cfg):
    """Whether cfg's model is GPT-2 of some size, with or without biases."""
    fixed = dict(
        norm="layernorm", positions="learned", mlp="gelu", tie_embeddings=True, norm_eps=1e-5, softcap=None
    )
    fixed |= dict(qk_norm=False, embed_norm=False, attention_gate=False, value_embeddings=0)
    same = all(getattr(cfg, name) == value for name, value in fixed.items())
    return same and cfg.hidden == 4 * cfg.n_embd and cfg.kv_heads == cfg.n_head


def in_a_process(cfg, peer):
    """Figures of `bench.py peers --peer=peer` with cfg's settings, or {"failed": why}.

    Where torch.compile fails with a function of another repository, that function runs as it is, the rest compiled, and
    {"compile_failed": why} is added.
    """
    words = [f"--{name}={value}" for name, value in changed(cfg).items() if name not in ("out", "peer")]
    words = ["peers", *words, f"--peer={peer}"]
    row = ladder.figures_of(words, FORM)
    if "failed" in row and cfg.compile and peer != "ours":
        again = ladder.figures_of(words, FORM, TORCHDYNAMO_SUPPRESS_ERRORS="1")
        return row if "failed" in again else again | {"compile_failed": row["failed"]}
    return row


def timed(cfg):
    """{"loss": of the first step, and the figures of its speed and memory} of cfg.peer."""
    world = parallel.join(cfg)
    own, _ = train.choose(cfg, world.device)
    job = train.Training(own, world) if cfg.peer == "ours" else Peer(own, world)
    loader = make_loaders(own, world)[0] if cfg.curves else None
    if loader and loader.masked:
        raise UserError(f"curves: {cfg.data_dir} has tokens without loss, which the peers would train on")
    next_batch = make_batches(own, world, loader) if loader else random_batches(own, world)
    next_batch, losses = without_last_targets(next_batch), recorded(job, own)
    for _ in range(1 + cfg.settle):
        job.step(next_batch, cfg.lr)
    times = step.step_times(job, next_batch, cfg)
    figures = {"loss": losses[0].item()}
    if loader:
        loader.close()
        write_curve(cfg, losses, job.account.flops_per_token, times)
    own = own if cfg.peer == "ours" else job.cfg  # whose precision says by which peak MFU divides
    figures |= step.rates(times, own, world, job.account.flops_per_token)[1]
    on_gpu = world.device.type == "cuda"
    return figures | {"peak_gib": torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None}


def random_batches(cfg, world):
    """Repeats BATCHES batches of random tokens."""
    next_batch = step.synthetic(cfg, world, BATCHES)
    return itertools.cycle([next_batch() for _ in range(BATCHES)]).__next__


def without_last_targets(next_batch):
    """`next_batch`, but the rows have no target at their last token."""

    def batch():
        x, y = next_batch()
        return x, torch.cat([y[:, :-1], torch.full_like(y[:, -1:], -100)], 1)

    return batch


def recorded(job, cfg):
    """The list that gets the loss of each step of the job, as a tensor; the rates are those of cfg's schedule."""
    losses, take = [], job.step

    def taken(next_batch, _):
        loss, norm = take(next_batch, optim.learning_rate(len(losses), cfg))
        losses.append(loss)
        return loss, norm

    job.step = taken
    return losses


def write_curve(cfg, losses, flops_per_token, times):
    """cfg.curves/PEER.jsonl, a log that plot.py draws; times: seconds of the timed steps."""
    start = dict(
        kind="start", step=0, flops_per_token=flops_per_token, step_ms=statistics.median(times) * 1e3
    )
    lines = [
        dict(kind="train", step=n, tokens=n * cfg.batch_tokens, loss=x.item())
        for n, x in enumerate(losses, 1)
    ]
    text = "".join(json.dumps(files.finite(line)) + "\n" for line in [start, *lines])
    files.write_atomic(Path(cfg.curves) / f"{cfg.peer}.jsonl", text.encode())


class Peer(train.Training):
    """The training step of train.py over another repository's model, in bf16 where ours is in fp8; cfg.peer names it.

    Its model starts from the weights that ours starts from. Raises UserError where it has none of this shape.
    """

    def __init__(self, cfg, world):
        precision = "bf16" if cfg.precision == "fp8" else cfg.precision
        self.cfg = dataclasses.replace(cfg, precision=precision)
        self.account = Account(cfg, world.device)
        self.raw, loss = (
            nanogpt(cfg, world.device) if cfg.peer == "nanogpt" else transformer(cfg, world.device)
        )
        compute = torch.compile(self.raw) if cfg.compile else self.raw
        self.model = lambda x, y: loss(compute, x, y)
        self.optimizer = optim.make_optimizer(self.raw, self.cfg)
        self.scaler = torch.amp.GradScaler(world.device.type, enabled=precision == "fp16")
        self.autocast = parallel.autocast(precision, world.device)
        self.accumulation = cfg.micro_steps(world.size)
        self.clip, self.skips = cfg.clip, False


def transformer(cfg, device):
    """(transformers' model in float32, how a loss is had of it)."""
    import transformers

    with tempfile.TemporaryDirectory() as folder:
        path = hf.save_hf(build(cfg, device, cfg.seed), Path(folder) / "hf")
        options = dict(attn_implementation="sdpa", dtype=torch.float32)
        model = transformers.AutoModelForCausalLM.from_pretrained(path, **options).to(device).train()
    if cfg.peer == "liger":
        from liger_kernel.transformers import _apply_liger_kernel_to_instance, monkey_patch

        if model.config.model_type not in monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN:
            raise UserError(f"Liger has no kernels for {model.config.model_type}")
        _apply_liger_kernel_to_instance(model=model)
    return (
        model,
        lambda compute, x, y: compute(input_ids=x, labels=x, use_cache=False).loss,
    )  # it shifts the labels


def nanogpt(cfg, device):
    """(nanoGPT's model in float32, with our padded vocabulary as its own, how a loss is had of it)."""
    source = Path(cfg.clone) / "model.py"
    if not source.is_file():
        raise UserError(
            f"clone={cfg.clone}: no model.py there; expected a clone of github.com/karpathy/nanoGPT"
        )
    spec = importlib.util.spec_from_file_location("nanogpt_model", source)
    sys.modules[spec.name] = module = importlib.util.module_from_spec(
        spec
    )  # where its dataclass looks for itself
    spec.loader.exec_module(module)
    shape = {
        name: getattr(cfg, name) for name in ("block_size", "n_layer", "n_head", "n_embd", "dropout", "bias")
    }
    model = module.GPT(module.GPTConfig(vocab_size=cfg.padded_vocab, **shape)).to(device).train()
    ours = build(cfg, device, cfg.seed)
    parts, own = hf.hf_parts(ours), dict(ours.named_parameters())
    with torch.no_grad():
        for name, theirs in model.named_parameters():  # Hugging Face's names; the matrices lie as ours do
            theirs[: parts[name].last] = own[parts[name].ours][parts[name].first : parts[name].last]
    return model, lambda compute, x, y: compute(x, y.masked_fill(y == -100, -1))[1]
