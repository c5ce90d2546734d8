"""Builds a run: settings resolved for the device, loaders, the model in its fixed order, the summary."""

import dataclasses
import itertools
import shlex

import torch
import torch.distributed as dist

import kernels
import model as models
from configurator import UserError
from corpus import mixture
from corpus.loader import DataError, TokenLoader, find_shards, read_manifest, read_sizes
from fast.attention import best_attention
from run import checkpoint, hf
from run.flops import Account, parameter_counts
from run.logger import human
from scale import context, memory, parallel
from scale.compile import compile_model
from scale.precision import pick_ops, pick_precision


def choose(cfg, device):
    """(cfg with every "auto" resolved for the device, rows of the start-up summary with the reasons)."""
    precision, why_precision = pick_precision(cfg.precision, device, cfg.weights)
    attention, why_attention = cfg.attention, "as set"
    if attention == "auto":
        attention, why_attention = best_attention(device, precision)
    ops, why_ops = pick_ops(cfg.ops, device, precision)
    rows = [
        ("precision", f"{precision} ({why_precision}), compile {'on' if cfg.compile else 'off'}"),
        ("attention", f"{attention} ({why_attention})"),
        ("ops", f"{ops} ({why_ops})"),
    ]
    if cfg.offload_states:
        words = f"{torch.get_num_threads()} threads a rank; OMP_NUM_THREADS=2 or more sets it"
        rows.append(("update", f"on the CPU (offload_states), {words}"))
    if cfg.document_mask:
        varlen = device.type == "cuda" and precision not in ("fp32", "tf32")
        how = "flash attention for variable lengths" if varlen else "T x T masks, slow for long rows"
        rows.append(("documents", f"a token attends within its own ({how})"))
    return dataclasses.replace(cfg, precision=precision, attention=attention, ops=ops), rows


def make_loaders(cfg, world):
    """(training loader, [(share, validation loader)] of the folders)."""
    refuse_other_tokenizer(cfg)
    rank, ranks = world.rank // cfg.context_parallel, world.size // cfg.context_parallel
    common = dict(vocab_size=cfg.vocab_size, B=cfg.batch_size, T=cfg.block_size)
    common |= dict(rank=rank, world=ranks, device=world.device)
    order = dict(shuffle_seed=cfg.shuffle_seed, align=cfg.align_documents, batch_tokens=cfg.batch_tokens)
    loader = TokenLoader(cfg.data_dir, "train", **order, **common)
    shares = loader.shares_of(cfg.eval_tokens) if cfg.eval_interval else []
    return loader, [(share, TokenLoader(folder, "val", **common)) for folder, share, _ in shares]


def refuse_other_tokenizer(cfg):
    """Raises DataError unless there is data with the tokenizer of the Hugging Face weights in init_from."""
    if cfg.tokenizer is None or not hf.names_hf(cfg.init_from):
        return
    command = f"python fineweb.py --tokenizer={shlex.quote(cfg.tokenizer)}"  # which alone would take GPT-2's
    for folder, _ in mixture.folders(cfg.data_dir):
        try:
            find_shards(folder, "train")
        except DataError as error:
            make = f"{command} --out_dir={shlex.quote(str(folder))}"
            raise DataError(str(error).replace("python fineweb.py", make)) from None
        manifest = read_manifest(folder)
        name, sizes = manifest.get("tokenizer"), read_sizes(folder, manifest)
        if name != cfg.tokenizer and sizes is not None and not hf.same_tokenizer(cfg.tokenizer, sizes):
            words = f"the weights of init_from={cfg.init_from} use {cfg.tokenizer}; make the data again"
            raise DataError(f"data_dir={folder} was tokenized with {name}, {words} with {command}")


def make_batches(cfg, world, loader):
    """A function that returns this rank's part of the next (x, y); with cfg.overfit of the first step's.

    With a mask it returns (x, y, weight): this weight times the sum of losses, added up over micro-steps and
    averaged over ranks, is the mean over the targets of the whole step, which differ in number by micro-step.
    """

    def next_batch():
        x, y, *targets = loader.next()
        return *context.own_tokens(cfg, world, (x, y)), *(world.size / max(1, n) for n in targets)

    if cfg.overfit:
        next_batch = itertools.cycle([next_batch() for _ in range(cfg.micro_steps(world.size))]).__next__
    return next_batch


def build_model(cfg, world, weights=None, eot=None):
    """(model, the model as the loop calls it, Account): on meta, prepared, allocated, loaded, in DDP.

    cfg: from `choose`. weights: {name: Stored} of a checkpoint; None: the weights of cfg.init_from, or new
    ones. eot: the manifest's separator of documents.
    """
    device, account = world.device, Account(cfg, world.device)
    if account.bypassed and (cfg.document_mask or cfg.context_parallel > 1):
        words = f"{'document_mask' if cfg.document_mask else 'context_parallel'} goes around attn.core"
        raise UserError(f"{words}, which model.py's attention does not call: see docs/experiment.md")
    memory.refuse_beyond_host(cfg, world.size, account.parameters if device.type == "cpu" else 0)
    model = models.on_meta(cfg)
    prepare(model, cfg, world, eot, account.regular)
    models.allocate(model, "cpu" if cfg.offload_states else device, cfg.seed, fill=parallel.fill)
    if weights:
        checkpoint.load_model_tensors(model, weights)
    elif cfg.init_from:
        load_initial_weights(model, cfg)
    for buffer in model.buffers():  # offload_states allocated them on the CPU
        buffer.data = buffer.data.to(device)
    if cfg.precision == "fp8":
        kernels.fp8.reset(model)
    return model, parallel.wrap(model, cfg, world, bool(account.unused)), account


def prepare(model, cfg, world, eot, regular):
    """Applies, to a model on meta, in this order: fp8, documents, remat, context parallel, compile, FSDP2."""
    sharded = dist.is_initialized() and cfg.parallel != "ddp"
    if cfg.offload_states and not sharded:
        raise UserError("offload_states=True needs a process group; start it with torchrun, 1 rank or more")
    for parameter in model.parameters() if cfg.weights == "bf16" else ():
        parameter.data = parameter.data.bfloat16()  # all of them: FSDP2 requires one dtype in a unit
    for layer in model.modules() if cfg.precision == "fp8" else ():
        if type(layer) in (models.Linear, models.Head):  # a subclass has a forward that fp8 does not know
            kernels.fp8.track(layer)
    if cfg.document_mask:
        from scale import documents

        documents.apply(model, documents.separator(cfg, eot))
    if cfg.remat != "none":
        from scale import remat

        remat.apply(model, cfg, world.device.type)
    if cfg.context_parallel > 1:
        context.apply(model, cfg, world)
    if cfg.compile:
        compile_model(model, sharded)
    if sharded:
        parallel.shard(model, cfg, world, regular)


def load_initial_weights(model, cfg):
    """Copies the weights that cfg.init_from names into a model of the same shape, on each rank its rows."""
    if hf.names_hf(cfg.init_from):
        tensors, shape = hf.open_hf(cfg.init_from[3:])
    else:
        tensors, shape, _ = checkpoint.open_model(cfg.init_from)
    free = ["vocab_multiple"]
    if cfg.positions == "rope" or cfg.block_size < shape.block_size:  # RoPE has no weights for positions
        free.append("block_size")
    if wrong := checkpoint.shape_differences(dataclasses.asdict(shape), cfg, free):
        raise UserError(f"init_from={cfg.init_from} is another model: {'; '.join(wrong)}")
    if cfg.positions == "learned" and cfg.block_size < shape.block_size:
        tensors["wpe.weight"] = tensors["wpe.weight"][0 : cfg.block_size]
    checkpoint.load_model_tensors(model, tensors, cfg.vocab_size)  # padding rows keep their initial values


def describe(cfg, world, job, loader, start):
    """Rows of the start-up summary: the model, its memory, the data, the batch, and where it resumes."""
    ranks, account = f"{world.size} ranks", job.account
    if cfg.context_parallel > 1:
        ranks = f"{world.size // cfg.context_parallel} groups of {cfg.context_parallel} ranks"
    micro = f"{cfg.batch_size} x {cfg.block_size} x {ranks} x {job.accumulation} micro-steps"
    total, matmul = parameter_counts(job.raw)
    tokens = loader.position + (cfg.max_steps - start.step) * cfg.batch_tokens
    data = f"{human(loader.tokens)} training tokens, tokenizer {cfg.tokenizer or 'unknown'}"
    rows = [
        ("parameters", f"{total:,}, of them {matmul:,} in matmuls; vocabulary padding not counted"),
        *account.rows(),
        ("memory", memory.describe(cfg, world.size, account.parameters, account.as_settings_say(cfg))),
        ("data", f"{cfg.data_dir}: {data}"),
    ]
    for folder, share, epochs in loader.shares_of(tokens) if len(loader.folders) > 1 else []:
        rows.append(("", f"{folder}: {share:.1%} of the rows, {epochs:.2f} epochs"))
    rows.append(("step", f"{cfg.batch_tokens:,} tokens: {micro}"))
    rows.append(("run", f"steps {start.step} to {cfg.max_steps}: {human(tokens)} tokens"))
    if hf.names_hf(cfg.init_from):
        rows.append(("init_from", f"{cfg.init_from}: {hf.adopted(cfg)}"))
    return rows + start.rows(cfg)
