"""Pre-train a GPT or a Llama.

    python train.py config/quickstart.py                                     # one process: CPU, one GPU, Apple's MPS
    torchrun --standalone --nproc_per_node=8 train.py config/gpt2_124m.py    # one node
    torchrun --nnodes=2 --nproc_per_node=8 --rdzv_backend=c10d --rdzv_endpoint=HOST:29500 train.py config/gpt2_124m.py

Settings: a config file, then --key=value (`--help` lists them). Writes out_dir/log.jsonl, config.json and step_*/.
Exit codes: 0 done, 2 a setting, 3 data, 4 a checkpoint, 5 a loss that is not finite, 143 saved and stopped by SIGTERM.
"""

import collections
import dataclasses
import functools
import itertools
import math
import shutil
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

import checkpoint
import context
import documents
import kernels
import memory
import model as models
import optim
import parallel
import remat
from configurator import UserError, refuse, run, too_small
from evaluate import Evaluator
from loader import TokenLoader, verify
from logger import Logger, human


@dataclass
class Config(models.GPTConfig):
    # where
    out_dir: str = "out/run"  # the run's folder: log.jsonl, config.json, checkpoints
    resume: str = "none"  # none; auto: go on from the newest whole checkpoint in out_dir if there is one; or a folder
    overwrite: bool = False  # start afresh in a used out_dir, its log and checkpoints removed
    init_from: str | None = None  # weights to start from: a checkpoint's folder, or Hugging Face weights as hf:NAME
    seed: int = 1337  # of the initial weights and dropout
    # data
    data_dir: str = "data/fineweb-edu"  # shards, as fineweb.py writes them
    data_format: Literal["llmc", "nanogpt"] = "llmc"  # nanogpt: headerless uint16 train.bin and val.bin
    tokenizer: str | None = None  # for samples and HellaSwag; None: the one in the data's manifest
    shuffle_seed: int | None = None  # windows in an order drawn anew each epoch; None: as they lie
    align_documents: bool = False  # every row starts where a document does, if one begins in it
    document_mask: bool = False  # a token attends within its document only, see documents.py
    verify_data: bool = False  # check every shard against the manifest's SHA-256 first
    allow_data_change: bool = False  # resume even though the shards are not the ones of the checkpoint
    # batch and schedule
    batch_size: int = 64  # rows of block_size tokens in a micro-batch (B); what fits the device
    batch_tokens: int = 524_288  # tokens an optimizer step, all ranks and micro-steps together
    max_steps: int = 19_073  # optimizer steps; 19,073 of 524,288 tokens are 10B
    lr: float = 6e-4  # peak learning rate
    min_lr_ratio: float = 0.1  # the schedule ends at lr * this
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"  # after warm-up; wsd: constant, then linear down
    warmup_steps: int = 715  # steps of linear warm-up
    warmup_tokens: int | None = None  # instead, in tokens
    cooldown_fraction: float = 0.2  # wsd: the last part of the run that decays
    optimizer: Literal["adamw", "adamw8bit"] = "adamw"  # adamw8bit: its moments in 8 bits, see adam8.py
    weight_decay: float = 0.1  # on 2-D weights, embeddings included; not on biases and norms
    beta1: float = 0.9  # AdamW
    beta2: float = 0.95  # AdamW
    adam_eps: float = 1e-8  # AdamW
    clip: float | None = 1.0  # largest gradient norm, over all ranks; None: off
    # evaluation, each every so many steps and at the end; 0: never
    eval_interval: int = 250  # validation loss
    eval_tokens: int = 10_485_760  # validation tokens, the same ones each time, shared among the ranks
    hellaswag_interval: int = 0  # HellaSwag, all 10,042 examples
    hellaswag_file: str | None = None  # a local copy; None: downloaded once and kept
    sample_interval: int = 0  # print samples
    sample_prompt: str = "Hello, I'm a language model,"  # what they continue
    n_samples: int = 4  # how many
    sample_tokens: int = 64  # how long
    temperature: float = 0.8  # of the samples
    top_k: int | None = 50  # of the samples
    # checkpoints
    save_interval: int = 1000  # every so many steps, and at the end; 0: never
    keep_last: int = 2  # checkpoints kept, besides the one with the best validation loss
    async_save: bool = False  # train on while a checkpoint is written, from a copy of all states in the CPU's memory
    # machine
    device: str = "auto"  # auto, cpu, cuda, mps
    backend: str = "auto"  # of the process group; auto: nccl on CUDA, else gloo
    timeout_s: int = 600  # how long a rank waits for the others before it gives up
    parallel: Literal["ddp", "fsdp", "zero2", "hsdp"] = "ddp"  # over ranks: each holds all; FSDP2's ways to shard
    context_parallel: int = 1  # ranks that share a sequence, see context.py
    shard_size: int | None = None  # hsdp: ranks that share a copy of the model; None: those of a node
    unit_mib: int | None = 100  # fsdp, zero2, hsdp: blocks are gathered as one up to this size in 16 bits; None: singly
    bucket_mib: int = 25  # DDP: gradients are reduced in pieces of this size, while the backward goes on
    reduce_dtype: Literal["fp32", "bf16"] = "fp32"  # what gradients are summed over the ranks in
    precision: Literal["auto", "fp32", "tf32", "bf16", "fp16", "fp8"] = (
        "auto"  # auto: bf16 if the GPU has it, else fp32
    )
    weights: Literal["fp32", "bf16"] = "fp32"  # parameters and gradients; bf16: no float32 copy, needs adamw8bit
    bf16_residual: bool = True  # in bf16 and fp8: the residual stream in bf16 as well, not in float32
    compile: bool = True  # torch.compile; needs a C++ compiler on the CPU
    ops: Literal["auto", "torch", "fused"] = "auto"  # fused: fused.py's linears and loss; auto: if they run
    offload_states: bool = False  # fsdp, zero2, hsdp: parameters, gradients and moments in the CPU's memory
    remat: Literal["none", "selective", "attention", "block"] = (
        "none"  # less memory: what of a block is kept, the rest being computed again, see remat.py
    )
    remat_every: int = 1  # in every k-th block only
    remat_tile: int | None = None  # attention, block: tokens of an MLP's at a time; None: all
    remat_offload: bool = False  # attention, block: what is kept waits in the host's memory
    # console and logs
    log_interval: int = 1  # print every so many steps; log.jsonl has them all
    wandb: bool = False  # log to Weights & Biases as well
    wandb_project: str = "pretrain"  # its project
    run_name: str | None = None  # its name there
    # trying things out
    overfit: bool = False  # train on the first batch for ever: the loss must go to zero
    dry_run: bool = False  # two steps and a validation of everything, nothing written

    def micro_tokens(self, ranks):
        """Tokens of a micro-step, all ranks together."""
        return self.batch_size * self.block_size * (ranks // self.context_parallel)


def check(cfg, world_size):
    """Raises one UserError that names every setting out of range."""
    found = cfg.problems() + parallel.conflicts(cfg, world_size)
    one = ["batch_size", "batch_tokens", "max_steps", "keep_last", "log_interval", "bucket_mib", "unit_mib"]
    one += ["remat_every", "timeout_s", "top_k", "n_samples", "sample_tokens"]
    zero = ["lr", "min_lr_ratio", "cooldown_fraction", "weight_decay", "beta1", "beta2", "warmup_steps", "temperature"]
    zero += ["eval_interval", "hellaswag_interval", "sample_interval", "save_interval", "seed", "shuffle_seed"]
    least = dict.fromkeys(one, 1) | dict.fromkeys(zero, 0) | {"eval_tokens": cfg.block_size}
    found += too_small(cfg, least)
    found += [f"{k}={getattr(cfg, k)} must be below 1" for k in ("beta1", "beta2") if getattr(cfg, k) >= 1]
    if cfg.clip is not None and cfg.clip <= 0:
        found.append(f"clip={cfg.clip} must be over 0, or None for off")
    if not cfg.adam_eps > 0:
        found.append(f"adam_eps={cfg.adam_eps} must be over 0: a gradient of zero would be divided by it")
    if cfg.seed >= 2**63:
        found.append(f"seed={cfg.seed} must be below 2**63")
    if not found:
        micro = cfg.micro_tokens(world_size)
        if cfg.batch_tokens % micro:
            below = cfg.batch_tokens // micro * micro
            rows = f"{cfg.batch_size}*{cfg.block_size}*{world_size // cfg.context_parallel}"
            found.append(
                f"batch_tokens={cfg.batch_tokens} is not divisible by batch_size*block_size*ranks = {rows} = {micro}; "
                f"nearest: {f'{below} or ' * (below > 0)}{below + micro}"
            )
    refuse(found)


def legal(cfg, world_size):
    """Whether check lets it pass, and a GPU would."""
    try:
        check(cfg, world_size)
    except UserError:
        return False
    return cfg.remat != "attention" or cfg.attention in ("auto", *remat.KEEPERS)


def claim_out_dir(cfg):
    """The checkpoint folder to resume from, or None for a fresh run, whose out_dir must be unused."""
    if cfg.resume not in ("none", "auto"):
        source = checkpoint.find(cfg.resume)
        newer = checkpoint.later(cfg.out_dir, source)
        if newer and source == Path(cfg.resume) and not cfg.dry_run:  # of a run's folder, newer ones are damaged
            raise UserError(
                f"out_dir={cfg.out_dir} holds {newer.name}, beyond {source}, which the next --resume=auto would take; "
                "remove it, or give another --out_dir"
            )
        return source
    if cfg.resume == "auto" and checkpoint.exists(cfg.out_dir):
        return checkpoint.find(cfg.out_dir)
    used = checkpoint.exists(cfg.out_dir) or (Path(cfg.out_dir) / "log.jsonl").exists()
    if used and not (cfg.overwrite or cfg.dry_run or cfg.resume == "auto"):
        raise UserError(
            f"out_dir={cfg.out_dir} holds an earlier run; try --resume=auto, --overwrite or another --out_dir"
        )
    return None


def refuse_other(cfg, source, tensors, state):
    """Raises CheckpointError if the checkpoint is none of a run of this model, optimizer and kind of weights."""
    if wrong := checkpoint.shape_differences(state["config"], cfg):
        raise checkpoint.CheckpointError(f"{source} is another model: {'; '.join(wrong)}; nothing was changed")
    new = f"for a new run from its weights: --init_from={source}"
    if "optimizer" not in tensors:
        raise checkpoint.CheckpointError(f"{source} holds weights alone; {new}")
    for name, usual in (("optimizer", "adamw"), ("weights", "fp32")):
        if (saved := state["config"].get(name, usual)) != getattr(cfg, name):
            raise checkpoint.CheckpointError(f"{source} was saved with {name}={saved}, now {getattr(cfg, name)}; {new}")


def clear_out_dir(cfg):
    for path in [*Path(cfg.out_dir).glob("step_*"), *Path(cfg.out_dir).glob("log.jsonl")]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def load_initial_weights(model, cfg):
    """Copies the weights that cfg.init_from names into a new model of the same shape, each rank what it holds."""
    if cfg.init_from.startswith("hf:"):
        import convert

        tensors, shape = convert.open_hf(cfg.init_from[3:])
    else:
        tensors, shape, _ = checkpoint.open_model(cfg.init_from)
    free = ["vocab_multiple"]
    free += ["block_size"] if cfg.positions == "rope" else []  # no weight of a RoPE model depends on it
    if wrong := checkpoint.shape_differences(dataclasses.asdict(shape), cfg, free):
        raise UserError(f"init_from={cfg.init_from} is another model: {'; '.join(wrong)}")
    checkpoint.load_model_tensors(model, tensors, cfg.vocab_size)  # the padding rows keep their own numbers


def make_loaders(cfg, world):
    """(training loader, validation loader or None)."""
    common = dict(data_dir=cfg.data_dir, data_format=cfg.data_format, vocab_size=cfg.vocab_size)
    rank, ranks = world.rank // cfg.context_parallel, world.size // cfg.context_parallel
    common |= dict(B=cfg.batch_size, T=cfg.block_size, rank=rank, world=ranks, device=world.device)
    order = dict(shuffle_seed=cfg.shuffle_seed, align=cfg.align_documents, min_tokens=cfg.batch_tokens)
    loader = TokenLoader(split="train", **order, **common)
    return loader, TokenLoader(split="val", **common) if cfg.eval_interval else None


@dataclass
class Training:
    """What a step needs. `raw` has the weights, `model` is the same compiled and wrapped, as the loop calls it."""

    raw: torch.nn.Module
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    autocast: object
    accumulation: int  # micro-steps a step
    clip: float | None

    def step(self, next_batch, lr):
        """One optimizer step over `accumulation` batches -> (loss, gradient norm), on the device and not waited for."""
        loss = 0.0
        for micro in range(self.accumulation):
            x, y = next_batch()
            parallel.sync_gradients(self.model, micro == self.accumulation - 1)
            with self.autocast:
                micro_loss = self.model(x, y) / self.accumulation
            self.scaler.scale(micro_loss).backward()
            loss += micro_loss.detach()
        self.scaler.unscale_(self.optimizer)
        norm = parallel.clip_gradients(self.raw, self.clip)
        optim.set_learning_rate(self.optimizer, lr)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        return loss, norm.to(loss)


def choose(cfg, device):
    """(cfg with every "auto" that depends on the device resolved, rows of the start block that say why)."""
    precision, why_precision = parallel.pick_precision(cfg.precision, device, cfg.weights)
    attention, why_attention = kernels.pick_attention(cfg.attention, device, precision)
    ops, why_ops = parallel.pick_ops(cfg.ops, device, precision)
    rows = [
        ("precision", f"{precision} ({why_precision}), compile {'on' if cfg.compile else 'off'}"),
        ("attention", f"{attention} ({why_attention})"),
        ("ops", f"{ops} ({why_ops})"),
    ]
    rows += [("documents", documents.describe(device, precision))] if cfg.document_mask else []
    return dataclasses.replace(cfg, precision=precision, attention=attention, ops=ops), rows


def build(cfg, world, tensors=None, eot=None):
    """The Training of a cfg from `choose`: model on meta, prepared, allocated, loaded, wrapped; its optimizer.

    tensors: the weights of a checkpoint; None: cfg.init_from's, or new ones. eot: see documents.separator.
    """
    raw = models.on_meta(cfg)
    parallel.prepare(raw, cfg, world, eot)
    models.allocate(raw, "cpu" if cfg.offload_states else world.device, cfg.seed, fill=parallel.fill)
    if tensors:
        checkpoint.load_model_tensors(raw, tensors)
    elif cfg.init_from:
        load_initial_weights(raw, cfg)
    model = parallel.wrap(raw, cfg, world)
    scaler = torch.amp.GradScaler(world.device.type, enabled=cfg.precision == "fp16")
    autocast = parallel.autocast(cfg.precision, world.device)
    accumulation = cfg.batch_tokens // cfg.micro_tokens(world.size)
    return Training(raw, model, optim.make_optimizer(raw, cfg), scaler, autocast, accumulation, cfg.clip)


def main(cfg):
    world = parallel.join(cfg)
    try:
        train(cfg, world)
    except torch.OutOfMemoryError:
        budget = torch.cuda.mem_get_info(world.device)[1]
        raise UserError(memory.advice(cfg, world.size, budget, legal)) from None
    finally:
        parallel.stop()


def train(cfg, world):
    began, device = time.perf_counter(), world.device
    check(cfg, world.size)
    own, chosen = choose(cfg, device)
    check(dataclasses.replace(cfg, precision=own.precision), world.size)  # auto has become what may be in conflict
    source = claim_out_dir(cfg)
    tensors, state = checkpoint.open_folder(source) if source else ({}, {})
    if source:
        refuse_other(cfg, source, tensors, state)
    first = step = state.get("step", 0)
    if cfg.dry_run:
        cfg = dataclasses.replace(cfg, max_steps=step + 2)
    if step > cfg.max_steps:
        raise UserError(f"{source} is beyond max_steps={cfg.max_steps}; try a larger --max_steps")

    # data
    if cfg.verify_data:
        verify(cfg.data_dir)
    loader, val_loader = make_loaders(cfg, world)
    own_tokens = functools.partial(context.own_tokens, cfg, world)

    def next_batch():
        return own_tokens(loader.next())

    cfg = dataclasses.replace(cfg, tokenizer=cfg.tokenizer or loader.tokenizer)  # recorded for sample.py

    # model
    job = build(own, world, tensors.get("model"), documents.separator(cfg, loader.eot))
    raw, optimizer, scaler = job.raw, job.optimizer, job.scaler
    if cfg.overfit:
        next_batch = itertools.cycle([next_batch() for _ in range(job.accumulation)]).__next__
    evaluate = Evaluator(cfg, raw, val_loader, cfg.tokenizer or "gpt2", job.autocast, own_tokens)
    torch.manual_seed(cfg.seed + world.rank)  # dropout differs by rank
    if source:
        checkpoint.load_optimizer_tensors(raw, optimizer, tensors["optimizer"])
        scaler.load_state_dict(state["scaler"])
        loader.load_state_dict(state["loader"], allow_data_change=cfg.allow_data_change)
        same = state["world_size"] == world.size
        if not (same and checkpoint.load_rank_tensors(tensors["rng"], raw, world.rank, device)):
            evaluate.warnings.append(f"saved by {state['world_size']} ranks: dropout and fp8's scales start anew")
    del tensors

    # console and files
    if world.main and not source and not cfg.dry_run:
        clear_out_dir(cfg)
    log = Logger(cfg, world, raw.flops_per_token(), own.precision, state.get("wandb_id"))
    ranks = f"{world.size} ranks"
    if cfg.context_parallel > 1:
        ranks = f"{world.size // cfg.context_parallel} groups of {cfg.context_parallel} ranks"
    micro = f"{cfg.batch_size} x {cfg.block_size} x {ranks} x {job.accumulation} micro-steps"
    log.start(
        [
            *chosen,
            log.describe_model(raw),
            ("memory", memory.describe(own, world.size)),
            ("data", f"{cfg.data_dir}: {human(loader.tokens)} training tokens, tokenizer {cfg.tokenizer or 'unknown'}"),
            ("step", f"{cfg.batch_tokens:,} tokens: {micro}"),
            ("run", f"steps {step} to {cfg.max_steps}: {human(cfg.max_steps * cfg.batch_tokens)} tokens"),
            *([("resumed", f"{source}")] if source else []),
            *(("warning", w) for w in [*loader.warnings, *evaluate.warnings]),
        ]
    )
    stop = 0.0  # set to 1 by SIGTERM; the ranks agree on it at the end of each step

    def ask_to_stop(*_):
        nonlocal stop
        stop = 1.0

    signal.signal(signal.SIGTERM, ask_to_stop)

    saver = checkpoint.Saver(cfg, world, log.print)

    def save():
        state = {"config": dataclasses.asdict(cfg), "loader": loader.state_dict(), "scaler": scaler.state_dict()}
        state |= {"val_loss": val_loss, "wandb_id": log.run_id}
        saver.save(step, raw, optimizer, state)
        return step

    def finish(step, lr, result):
        """Waits for a step's figures, prints and records them; True if a rank was told to stop."""
        nonlocal mark
        loss, norm, stopping, written = result.get()
        seconds, mark = result.moment.since(mark), result.moment
        if step == first + 1:
            log.print(f"first step after {time.perf_counter() - began:.1f} s, {seconds:.1f} s of them its own")
        log.step(step, loss, lr, norm, seconds)
        if written == 1:  # a save in the background is through, on every rank
            saver.wait()
        refuse_nan(step, "loss", loss)
        if not scaler.is_enabled():  # fp16's scaler leaves such steps out
            refuse_nan(step, "gradient norm", norm)
        return stopping > 0

    def refuse_nan(step, name, value):
        if not math.isfinite(value):
            saver.wait()
            since = "yet" if saved is None else f"since step {saved}"
            raise NotFinite(f"step {step}: the {name} is {value}; nothing was saved {since}; try a lower --lr")

    val_loss, saved, stopping = None, first if source else None, False
    waiting, ahead = collections.deque(), int(device.type == "cuda")  # steps launched whose figures are not read yet
    model_saves = cfg.save_interval and not cfg.dry_run
    raw.train()
    while True:
        last = step == cfg.max_steps or stopping
        save_due = model_saves and step not in (0, saved) and (last or step % cfg.save_interval == 0)
        if last or save_due or step <= first + 1 or evaluate.due_at(step):
            while waiting:
                stopping |= finish(*waiting.popleft())
        if step != saved:  # a resumed run did this before it was saved
            val_loss = evaluate(step, log) if evaluate.due_at(step) else None
            refuse_nan(step, "validation loss", val_loss or 0.0)
        if save_due:
            saved = save()
        if last:
            break
        if not waiting:
            mark = parallel.Moment(device)
        lr = optim.learning_rate(step, cfg)
        loss, norm = job.step(next_batch, lr)
        step += 1
        figures = torch.stack([loss, norm, *(torch.full_like(loss, x) for x in (stop, saver.written()))])
        waiting.append((step, lr, parallel.Later(parallel.sum_over_ranks(figures) / world.size)))
        while len(waiting) > ahead:  # the device is given a step before the last one is waited for: never idle
            stopping |= finish(*waiting.popleft())

    saver.wait()
    loader.close()
    log.close(step, saved, time.perf_counter() - began)
    if step != cfg.max_steps:
        sys.exit(143)


class NotFinite(UserError):
    exit_code = 5


if __name__ == "__main__":
    run(main, Config)
