"""Builds a run.

Resolves the settings for the device, makes the loaders, builds the model in its fixed order and
describes all of it in the start-up summary.
"""

from dataclasses import replace

import numpy as np
import torch

import fast
import model as models
import optim
from corpus import mixture
from corpus import tokenizer as tokenizers
from corpus.loader import DataError, TokenLoader
from corpus.shards import read_manifest, read_token_bytes, verify
from fast import forms
from fast.chips import best_attention
from run import agreement, checkpoint, hf, pack, source
from run.flops import ModelAnalysis
from scale import (
    activation_checkpointing,
    context_parallel,
    cuda_graph,
    ddp,
    documents,
    fsdp,
    memory,
    parallel,
)
from scale.precision import pick_ops, pick_precision
from settings import conflicts
from system.errors import UserError, listed, warn


def choose(cfg, device):
    """(cfg with each "auto" resolved for the device, rows of the start-up summary that say why)."""
    reasons = {}
    in_fp16 = replace(cfg, precision="fp16")
    fp16 = not conflicts(in_fp16, parallel.rank_and_size()[1])
    precision, reasons["precision"] = pick_precision(cfg.precision, device, cfg.weights, fp16)
    ops, reasons["ops"] = pick_ops(cfg.ops, device, precision)
    cfg = replace(cfg, precision=precision, ops=ops)
    if cfg.attention == "auto":
        attention, reasons["attention"] = best_attention(device, precision)
        cfg = replace(cfg, attention=attention)
    free = 0
    if device.type == "cuda":
        share = torch.cuda.get_per_process_memory_fraction(device)
        free, total = torch.cuda.mem_get_info(device)
        free = min(free, share * total)
    # every rank takes part, also one that was started without auto
    free = parallel.gather_objects(free)
    cfg, chosen = memory.choose(cfg, len(free), min(free))
    reasons |= chosen
    return cfg, [(name, f"{getattr(cfg, name)} ({why})") for name, why in reasons.items()]


def try_out(cfg, world, step):
    """The settings of a dry run from a step on: two steps, of which nothing is saved.

    It compares the shards with their checksums first, on rank 0.
    """
    if world.main:
        verify(cfg.data_dir)
    steps = 2 + cuda_graph.EAGER_STEPS if cfg.cuda_graph else 2
    return replace(
        cfg,
        max_steps=step + steps,
        max_tokens=None,
        max_seconds=None,
        batch_schedule=None,
        save_interval=0,
    )


def make_loader(cfg, world):
    """The training data: an object with next, state_dict, load_state_dict and close.

    docs/experiment.md describes them.
    """
    if cfg.tokenizer:
        refuse_other_tokenizer(cfg, cfg.tokenizer)
    return TokenLoader(
        cfg.data_dir,
        "train",
        batch_tokens=cfg.batch_tokens,
        shuffle_seed=cfg.shuffle_seed,
        allow_data_change=cfg.allow_data_change,
        **for_rank(cfg, world),
    )


def validation_loaders(cfg, world):
    """[(weight in the loss and in the tokens, loader)] of the folders' validation splits."""
    folders = mixture.folders(str(cfg.data_dir))
    whole = sum(weight for _, weight in folders)
    options = for_rank(cfg, world)
    return [(weight / whole, TokenLoader(folder, "val", **options)) for folder, weight in folders]


def for_rank(cfg, world):
    """Arguments of a TokenLoader.

    Ranks read different rows, but those that share a sequence read the same ones.
    """
    return dict(
        vocab_size=cfg.vocab_size,
        B=cfg.batch_size,
        T=cfg.block_size,
        device=world.device,
        rank=world.rank // cfg.context_parallel,
        world=world.size // cfg.context_parallel,
    )


def refuse_other_tokenizer(cfg, tokenizer):
    """Raises DataError if the data was made with another one, whose ids have other bytes.

    tokenizer: its name or file, given or of the weights in init_from.
    """
    for folder, _ in mixture.folders(cfg.data_dir):
        name = read_manifest(folder).get("tokenizer")
        sizes = read_token_bytes(folder)
        if name == tokenizer or sizes is None:
            continue
        if not np.array_equal(tokenizers.load(tokenizer).token_bytes(), sizes):
            raise DataError(
                f"data_dir={folder} was tokenized with {name}, but --tokenizer or the weights in "
                f"init_from={cfg.init_from} use {tokenizer}; leave --tokenizer out, or make the "
                f"data again with python fineweb.py --tokenizer={tokenizer}"
            )


def build_model(cfg, world, weights=None, eot=None, analysis=None):
    """(model, ModelAnalysis): prepared, with its first values, loaded.

    On one device and in copies it is built for real; where FSDP2 shards, on meta until then.

    cfg: from `choose`. weights: a checkpoint's; None: those of cfg.init_from, or new ones. eot: the
    separator of the data. analysis: the model's, if it was made before.
    """
    device = world.device
    analysis = analysis or ModelAnalysis(cfg, device)
    sharded = torch.distributed.is_initialized() and cfg.parallel != "ddp"
    if sharded:
        with torch.device(device):  # its buffers and other tensors; its parameters are on meta
            model = models.on_meta(cfg)
    else:
        dtype = torch.bfloat16 if cfg.weights == "bf16" else torch.float32
        model = models.build(cfg, device, cfg.seed, dtype)
    prepare(model, cfg, eot, sharded)
    if sharded:
        fsdp.shard(model, cfg, world, analysis)
        models.allocate(model, "cpu" if cfg.offload_states else device, cfg.seed)
    buffers = pack.persistent_buffers(model)
    may_lack = set(buffers)  # an edit may have added some
    if not weights and cfg.init_from:
        weights = open_initial_weights(cfg)
        may_lack.update(name for name, _ in model.named_parameters())  # such as LoRA's
    if weights:
        new = checkpoint.load_weights(model, weights, may_lack)
        warn(new and f"{listed(new)}: not in the checkpoint, with first values")
    for buffer in model.buffers():  # offload_states allocated them on the CPU
        buffer.data = buffer.data.to(device)
    parallel.broadcast(buffers.values())
    if cfg.precision == "fp8":
        fast.fp8.reset(model)
    # what parallel.refuse_changes compares with
    model.trained = [(name, p, p.requires_grad) for name, p in model.named_parameters()]
    return model, analysis


def separator(cfg, loader):
    """The id before each document, the data's or the tokenizer's; None where nobody asks for it."""
    eot = getattr(loader, "eot", None)
    if eot is None and cfg.document_mask:
        if not cfg.tokenizer:
            why = f"needs to know the separator, and {cfg.data_dir}/manifest.json is not there"
            raise UserError(f"document_mask {why}; set --tokenizer")
        return tokenizers.load(cfg.tokenizer).eot
    return eot


def prepare(model, cfg, eot, sharded):
    """Applies in this order, before FSDP2: fp8, documents, remat, context parallel, compile."""
    if cfg.offload_states and not sharded:
        raise UserError(
            "offload_states=True needs a process group; start it with torchrun, 1 rank or more"
        )
    if cfg.weights == "bf16":
        for parameter in model.parameters():  # every one: FSDP2 requires one dtype in a unit
            parameter.data = parameter.data.bfloat16()
    if cfg.precision == "fp8":
        choose_fp8_layers(model)
    if cfg.document_mask:
        documents.apply(model, eot)
    if cfg.remat != "none":
        activation_checkpointing.apply(model, cfg)
    if cfg.context_parallel > 1:
        context_parallel.apply(model, cfg)
    if cfg.compile:
        compile_model(model, sharded)


def choose_fp8_layers(model):
    """Makes linear layers and the head train in fp8, but for those whose forward is edited."""
    for layer in model.modules():
        definition = {models.Linear: "Linear", models.Head: "cross_entropy"}.get(type(layer))
        if definition and definition not in forms.edits:
            fast.fp8.train_in_fp8(layer)


def compile_model(model, sharded=False, backend="inductor"):
    """Compiles a model in place: state-dict keys keep their names, all blocks share one graph.

    DDP's optimizer of graphs, optimize_ddp, is off: it would cut a block's graph where a bucket
    ends, and remat=selective would then keep every activation (torch 2.11). No graph contains the
    backward of a custom operator, so that the compile cache would not notice an edit of it; it is
    given a digest of our code.
    """
    from torch._inductor.codegen.triton import TritonOverrides  # takes a second

    # so many, since training, validation and HellaSwag have their own shapes
    torch._dynamo.config.recompile_limit = 64
    # torch 2.13's dropout repeats its mask within a tensor, and recomputes another (pytorch#198333)
    TritonOverrides._can_use_4x_random = staticmethod(lambda: False)
    torch._dynamo.config.optimize_ddp = False
    torch._functorch.config.autograd_cache_allow_custom_autograd_functions = True
    torch._inductor.config.unsafe_marked_cacheable_functions = {
        "torch.nn.attention._sdpa_kernel": torch.__version__,
        "torch.nn.attention._backend_from_string": torch.__version__,
    }
    # FSDP2 gathers the embedding in a hook, which a compiled function would not call
    if not sharded:
        model.embed = torch.compile(model.embed, backend=backend)
    mixes = [model.mixes[layer] for layer in model.cfg.mixed_layers]
    for part in (*model.blocks, *mixes, model.head):
        part.compile(backend=backend)
    torch.compiler.config.cache_key_tag = source.tag()


def wrap(model, cfg, world, analysis):
    """(the model as a micro-step calls it, in DDP, rows of the start-up summary, of FSDP2)."""
    rows = fsdp.keep_gathered(model, cfg, world, analysis.parameters)
    unused = bool(analysis.problem or analysis.unused or analysis.draws)
    return ddp.wrap(model, cfg, world, unused), rows


def open_initial_weights(cfg):
    """{name: tensor or MergedTensor} of the weights in cfg.init_from.

    Raises UserError if they are of another model, or of another tokenizer than the data.
    """
    name = cfg.init_from
    if name.startswith("hf:"):
        name = name.removeprefix("hf:")
        agreement.weights(hf.fetch(name))
        saved = hf.open_hf(name)
    else:  # open_whole compares the manifest over ranks
        saved = checkpoint.open_model(name)
    if cfg.tokenizer and saved.tokenizer:  # of the data, which bench.py does not read
        refuse_other_tokenizer(cfg, saved.tokenizer)
    shorter = cfg.block_size < saved.shape.block_size
    free = ["vocab_multiple"]
    if cfg.positions == "rope" or shorter:  # RoPE has no weights
        free.append("block_size")
    if wrong := saved.shape.differences(cfg, free):
        why = f"init_from={cfg.init_from} is another model: {'; '.join(wrong)}"
        raise UserError(f"{why}; with hf: leave these settings out, else give those of its run")
    tensors = saved.tensors
    if cfg.positions == "learned" and shorter:
        tensors["wpe.weight"] = tensors["wpe.weight"][0 : cfg.block_size]
    return tensors


def describe(cfg, training, start):
    """Rows of the start-up summary: model, memory, data, batch, and where it resumes."""
    analysis, world, state = training.analysis, training.world, training.state
    tokens = None
    until = f"{cfg.max_seconds} s of steps; max_steps does not count"
    if cfg.max_seconds is None:
        steps, tokens = optim.length_of_run(cfg, state.step, state.tokens)
        until = f"{steps}: {tokens:,} tokens"
    rows = [
        ("parameters", f"{analysis.parameters:,} with vocabulary padding"),
        *analysis.rows(),
        *training.rows,
        *describe_optimizer(state.optimizer, cfg.lr),
        ("memory", memory.describe(cfg, world.size, analysis.parameters)),
    ]
    if hasattr(state.loader, "describe"):
        rows += state.loader.describe(tokens)
    of_rank = f"{cfg.rank_tokens:,} on each of {world.size} ranks"
    micro = f"{training.accumulation} micro-steps of {of_rank}"
    rows.append(("step", f"{cfg.batch_tokens:,} tokens: {micro}"))
    rows.append(("run", f"steps {state.step} to {until}"))
    if cfg.compile:
        words = "embedding, blocks and head, once: 5 to 20 s on a GPU, up to a minute on a CPU"
        rows.append(("compiling", words))
    return rows + start.rows(cfg)


def describe_optimizer(optimizer, lr):
    """Rows of the optimizer and of its param_groups: size, peak rate and decay.

    lr: the peak rate, of which a group's own is its `factor`.
    """
    name = " and ".join(type(one).__name__ for one in optim.parts_of(optimizer))
    rows = [("optimizer", name)]
    for group in optimizer.param_groups:
        count = sum(p.numel() for p in group["params"])
        rate = lr * group.get("factor", 1.0)
        decay = group.get("weight_decay", 0.0)
        kind = group.get("kind", "all")
        rows.append(("", f"{kind}: {count:,} parameters, rate {rate:g}, decay {decay:g}"))
    return rows
