"""FSDP2 (https://arxiv.org/abs/2304.11277): weights, gradients, optimizer states in shards."""

from collections import Counter

import torch
from torch.distributed import distributed_c10d, fsdp, init_device_mesh
from torch.utils._pytree import tree_map

import fast
from scale import memory, parallel
from system.errors import UserError


def shard(model, cfg, world, analysis=None):
    """Shards a model in units, each gathered at once: embedding, head, blocks (see `units_of`).

    fsdp gathers a block for its forward and for its backward, or less often (see `keep_gathered`),
    zero2 once a step; hsdp is fsdp within groups of shard_size ranks, each of which holds a copy.
    analysis: the run.flops.ModelAnalysis of what a forward does; None: it is not known, and there
    will be no backward.
    """
    mesh = make_mesh(cfg, world)
    options = {"mesh": mesh, "mp_policy": precisions(cfg)}
    if cfg.offload_states:
        options["offload_policy"] = fsdp.CPUOffloadPolicy(pin_memory=world.device.type == "cuda")
    if memory.gathers_8_bits(cfg, mesh.size(-1)):
        layers = layers_for_8_bits(model, analysis.read_elsewhere if analysis else ())
        fast.fp8.gather_in_8_bits(layers, mesh.size(-1))
    # values, or numbers that a rank draws, may decide which parameters a block uses
    if analysis and (analysis.problem or analysis.draws):
        for block in model.blocks:
            block.register_forward_hook(with_all_gradients)

    names = dict(model.named_parameters())
    units = units_of(model, cfg, analysis)
    for modules in units:
        # parameters are freed after each use; in zero2 after a step's last micro-step, and those of
        # the head not before the backward, which begins with it
        frees = cfg.parallel != "zero2" and modules != [model.head]
        fsdp.fully_shard(modules, reshard_after_forward=frees, **options)
    fsdp.fully_shard(model, **options)
    for name, _ in model.named_parameters():
        if name not in names:
            why = "is shared by modules that FSDP2 divides apart; share a module, not a weight"
            raise UserError(f"model.py: {name} {why} (docs/experiment.md)")
    for module, method in ((model.head, "logits"), (model, "logits"), (model, "token_losses")):
        # it does nothing for a head that is no unit
        fsdp.register_fsdp_forward_method(module, method)
    # {a unit's first module, which FSDP2 takes for the unit: bytes}, for `keep_gathered`
    model.unit_bytes = {modules[0]: bytes_of_unit(modules) for modules in units}
    # units that are gathered from a step's first forward to its last backward
    model.unsharded_units = []
    if cfg.parallel == "zero2":
        model.unsharded_units = parallel.units(model)
        model.register_forward_pre_hook(gather_all)


def layers_for_8_bits(model, read_elsewhere):
    """The blocks' layers with a weight that is neither shared nor named in `read_elsewhere`."""
    layers = dict(model.blocks.named_modules(prefix="blocks"))
    uses = Counter(getattr(layer, "weight", None) for layer in layers.values())
    found = []
    for name, layer in layers.items():
        if f"{name}.weight" not in read_elsewhere and uses[getattr(layer, "weight", None)] == 1:
            found.append(layer)
    return found


def precisions(cfg):
    """The dtypes in which FSDP2 gathers weights and sums up gradients."""
    in_16_bits = cfg.precision in ("bf16", "fp8")
    return fsdp.MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if in_16_bits else None,
        reduce_dtype=torch.bfloat16 if cfg.reduce_dtype == "bf16" else torch.float32,
    )


def units_of(model, cfg, analysis):
    """[modules of a unit], in the order in which `keep_gathered` takes them.

    Embedding and head come first: nothing is computed beside their gathers. A head that shares the
    embedding's weight belongs to the root's unit. Blocks that run just once share units of up to
    memory.UNIT_MIB.
    """
    units = []
    if not cfg.tie_embeddings:
        units = [[model.wte], [model.head]]
    blocks = list(dict.fromkeys(model.blocks))  # an edit may have one of them several times
    units += shared_modules(blocks)
    again = cfg.remat in ("block", "attention")
    runs_once = analysis is not None and analysis.regular and not again
    limit = memory.UNIT_MIB * 2**20 if runs_once else 0
    unit = []
    for block in blocks:
        if not unit or bytes_of_unit([*unit, block]) > limit:
            unit = []
            units.append(unit)
        unit.append(block)
    return units


def make_mesh(cfg, world):
    """The ranks as FSDP2 sees them: one row, or for hsdp a row for each copy of the model."""
    shards = memory.shards_of(cfg, world.size)
    shape, names = (shards,), ("shard",)
    if cfg.parallel == "hsdp":
        shape, names = (world.size // shards, shards), ("replicate", "shard")
    mesh = init_device_mesh(world.device.type, shape, mesh_dim_names=names)
    # timeout_s instead of PyTorch's limits, 10 (NCCL) or 30 minutes (gloo)
    for group in mesh.get_all_groups():
        distributed_c10d._set_pg_timeout(parallel.time_limit(cfg.timeout_s), group)
    return mesh


def shared_modules(blocks):
    """Lists of a module with parameters each, which several blocks have: gathered at each call."""
    users = Counter(module for block in blocks for module in block.modules())
    found = []
    inside = set()
    for module, count in users.items():  # outer ones come first
        if count > 1 and module not in inside and bytes_of_unit([module]):
            found.append([module])
            inside.update(module.modules())
    return found


def bytes_of_unit(modules):
    """Bytes of their parameters, gathered in 16 bits."""
    return 2 * sum(p.numel() for module in modules for p in module.parameters())


def gather_all(model, *_):
    """Gathers all units before a step's first forward with zero2.

    FSDP2's own hooks waited 230 ms of 6,300.
    """
    for unit in parallel.units(model):
        unit.unshard(async_op=True)


def keep_gathered(model, cfg, world, parameters):
    """Keeps units of fsdp and hsdp gathered during a step, as many as the GPU has room for.

    Such a unit is gathered in a step's first forward and freed in its last backward (see
    parallel.sync_gradients). Gathers are collective: all ranks choose the same units, the first
    ones. zero2 keeps all. parameters: how many the model has. Returns rows of the start-up
    summary.
    """
    if not isinstance(model, fsdp.FSDPModule) or cfg.parallel == "zero2":
        return []
    if not memory.is_estimated(cfg, parameters):
        return []
    left = room(cfg, world)
    held = 0
    for unit, size in model.unit_bytes.items():
        if size > left - held:
            break
        held += size
        unit.set_reshard_after_forward(False, recurse=False)
        model.unsharded_units.append(unit)
    count = f"{len(model.unsharded_units)} of {len(model.unit_bytes)} units"
    beside = f"{held / 2**30:.1f} GiB that the estimate does not count"
    return [("gathered", f"{count} stay gathered during a step: {beside}")]


def room(cfg, world):
    """Bytes of a GPU that the estimate leaves, 0 on a CPU. All ranks call it.

    5% stay aside, and 10% in a step of one micro-step: there a unit that stays gathered saves one
    gather of two, while an allocator short of memory waits for the GPU (0.8 s of 12 with 131,072
    tokens on four).
    """
    if world.device.type != "cuda":
        return 0
    share = torch.cuda.get_per_process_memory_fraction(world.device)
    limit = share * torch.cuda.mem_get_info(world.device)[1]
    aside = memory.MARGIN if cfg.micro_steps(world.size) == 1 else 0.05
    return (1 - aside) * min(parallel.gather_objects(limit)) - memory.total_bytes(cfg, world.size)


def with_all_gradients(block, _, result):
    """A forward hook: the block's backward gives each of its parameters a gradient, perhaps zeros.

    FSDP2's ranks would sum different gradients where an expert has tokens on one of them alone.
    """
    nothing = sum(p.flatten()[:0].sum() for p in block.parameters() if p.requires_grad)

    def attach(part):
        if torch.is_tensor(part) and part.requires_grad:
            return part + nothing
        return part

    return tree_map(attach, result)
