"""Builds a run: settings resolved for the device, loaders, the model in its fixed order, the start block."""

import dataclasses
import itertools
import shlex

import model as models
from configurator import UserError
from corpus import mixture
from corpus.loader import DataError, TokenLoader, find_shards, read_manifest, read_sizes
from fast.attention import best_attention
from run import checkpoint, hf_config
from run.flops import Account, parameter_counts
from run.logger import human
from scale import context, documents, memory, parallel


def choose(cfg, device):
    """(cfg with every "auto" resolved for the device, rows of the start block with the reasons)."""
    precision, why_precision = parallel.pick_precision(cfg.precision, device, cfg.weights)
    attention, why_attention = cfg.attention, "as set"
    if attention == "auto":
        attention, why_attention = best_attention(device, precision)
    ops, why_ops = parallel.pick_ops(cfg.ops, device, precision)
    rows = [
        ("precision", f"{precision} ({why_precision}), compile {'on' if cfg.compile else 'off'}"),
        ("attention", f"{attention} ({why_attention})"),
        ("ops", f"{ops} ({why_ops})"),
    ]
    rows += [("update", parallel.describe_update())] if cfg.offload_states else []
    rows += [("documents", documents.describe(device, precision))] if cfg.document_mask else []
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
    if cfg.tokenizer is None or not hf_config.names_hf(cfg.init_from):
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
        if name != cfg.tokenizer and sizes is not None and not hf_config.same_tokenizer(cfg.tokenizer, sizes):
            raise DataError(
                f"data_dir={folder} was tokenized with {name}, the weights of init_from={cfg.init_from} use "
                f"{cfg.tokenizer}; make the data again with {command}"
            )


def make_batches(cfg, world, loader):
    """A function that returns this rank's part of the next (x, y); with cfg.overfit it repeats the first step's.

    With a mask it returns (x, y, weight): this weight times the sum of losses, added up over micro-steps and averaged
    over ranks, is the mean over the targets of the whole step, which are not equally many in each micro-step.
    """

    def next_batch():
        x, y, *targets = loader.next()
        return *context.own_tokens(cfg, world, (x, y)), *(world.size / max(1, n) for n in targets)

    if cfg.overfit:
        next_batch = itertools.cycle([next_batch() for _ in range(cfg.micro_steps(world.size))]).__next__
    return next_batch


def build_model(cfg, world, weights=None, eot=None):
    """(model, the model as the loop calls it, Account). The order: on meta, prepared, allocated, loaded, wrapped.

    cfg: from `choose`. weights: {name: Stored} of a checkpoint; None: the weights of cfg.init_from, or new ones. eot:
    see documents.separator.
    """
    account = Account(cfg, world.device)
    if account.bypassed and (cfg.document_mask or cfg.context_parallel > 1):
        setting = "document_mask" if cfg.document_mask else "context_parallel"
        raise UserError(
            f"{setting} goes around attn.core, which model.py's attention does not call: see docs/experiment.md"
        )
    raw = models.on_meta(cfg)
    parallel.prepare(raw, cfg, world, eot, account.regular)
    models.allocate(raw, "cpu" if cfg.offload_states else world.device, cfg.seed, fill=parallel.fill)
    if weights:
        checkpoint.load_model_tensors(raw, weights)
    elif cfg.init_from:
        load_initial_weights(raw, cfg)
    return raw, parallel.wrap(raw, cfg, world, bool(account.unused)), account


def load_initial_weights(model, cfg):
    """Copies the weights that cfg.init_from names into a new model of the same shape, on each rank its rows."""
    if hf_config.names_hf(cfg.init_from):
        from run import hf

        tensors, shape = hf.open_hf(cfg.init_from[3:])
    else:
        tensors, shape, _ = checkpoint.open_model(cfg.init_from)
    free = ["vocab_multiple"]
    if (
        cfg.positions == "rope" or cfg.block_size < shape.block_size
    ):  # no weight of a RoPE model depends on it
        free.append("block_size")
    if wrong := checkpoint.shape_differences(dataclasses.asdict(shape), cfg, free):
        raise UserError(f"init_from={cfg.init_from} is another model: {'; '.join(wrong)}")
    if cfg.positions == "learned" and cfg.block_size < shape.block_size:
        tensors["wpe.weight"] = tensors["wpe.weight"][0 : cfg.block_size]
    checkpoint.load_model_tensors(
        model, tensors, cfg.vocab_size
    )  # the padding rows keep their initial values


def describe(cfg, world, job, loader, start):
    """Rows of the start block: the model, its memory, the data, batch and length of the run, and where it resumes."""
    ranks = f"{world.size} ranks"
    if cfg.context_parallel > 1:
        ranks = f"{world.size // cfg.context_parallel} groups of {cfg.context_parallel} ranks"
    micro = f"{cfg.batch_size} x {cfg.block_size} x {ranks} x {job.accumulation} micro-steps"
    total, matmul = parameter_counts(job.raw)
    tokens = loader.position + (cfg.max_steps - start.step) * cfg.batch_tokens
    shares = loader.shares_of(tokens) if len(loader.folders) > 1 else []
    rows = [
        ("parameters", f"{total:,}, of them {matmul:,} in matmuls; vocabulary padding not counted"),
        *job.account.rows(),
        (
            "memory",
            memory.describe(cfg, world.size, job.account.parameters, job.account.as_settings_say(cfg)),
        ),
        (
            "data",
            f"{cfg.data_dir}: {human(loader.tokens)} training tokens, tokenizer {cfg.tokenizer or 'unknown'}",
        ),
        *(
            ("", f"{folder}: {share:.1%} of the rows, {epochs:.2f} epochs")
            for folder, share, epochs in shares
        ),
        ("step", f"{cfg.batch_tokens:,} tokens: {micro}"),
        ("run", f"steps {start.step} to {cfg.max_steps}: {human(tokens)} tokens"),
    ]
    if hf_config.names_hf(cfg.init_from):
        rows.append(("init_from", f"{cfg.init_from}: {hf_config.adopted(cfg)}"))
    return rows + ([("resumed", str(start.folder)), *start.schedule(cfg)] if start.folder else [])
