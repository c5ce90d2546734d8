"""Processes and devices: who runs where, how the model is compiled and wrapped, and the few collectives in use."""

import contextlib
import importlib.util
import os
import time
import warnings
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

import context
import documents
import remat
from configurator import UserError


@dataclass(frozen=True)
class World:
    """This process among the others, as torchrun numbers them."""

    rank: int
    size: int
    device: torch.device

    @property
    def main(self):
        return self.rank == 0


def join(cfg):
    """`start`, as a train.Config wants it."""
    tight = cfg.parallel != "ddp" or cfg.remat != "none"
    return start(cfg.device, pick_backend(cfg), cfg.timeout_s, expandable=tight)


def start(device="auto", backend="auto", timeout_s=600, expandable=False):
    """Joins the process group that torchrun describes (none without it) and claims this process's device.

    expandable: GPU memory in pages that are put together anew, unless the environment says otherwise. Without it, small
    tensors in the place of a large one that is gone keep the next large one from it, and near the limit steps wait
    while room is made.
    """
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    device = pick_device(device, int(os.environ.get("LOCAL_RANK", 0)))
    if device.type == "cuda":
        if expandable and not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
            os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
        torch.cuda.set_device(device)
    if "RANK" in os.environ and not dist.is_initialized():
        backend = ("nccl" if device.type == "cuda" else "gloo") if backend == "auto" else backend
        bound = device if "nccl" in backend else None  # the communicator is made now, not in the first step
        try:
            dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s), device_id=bound)
        except (ValueError, RuntimeError) as error:
            reason = str(error).partition("\n")[0]
            raise UserError(f"backend={backend}: the ranks could not join ({reason}); try --backend=auto") from None
    return World(rank, size, device)


def pick_backend(cfg):
    """cfg.backend, where auto is also for tensors on the CPU if states are there: the gradients' norm, checkpoints."""
    both = cfg.offload_states and cfg.backend == "auto" and pick_device(cfg.device).type == "cuda"
    return "cpu:gloo,cuda:nccl" if both else cfg.backend


def pick_device(name, local_rank=0):
    """The torch.device of this process: auto takes CUDA, then Apple's MPS, then the CPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    if name == "cuda":
        if local_rank >= torch.cuda.device_count():
            raise UserError(
                f"device=cuda: local rank {local_rank} has no GPU, {torch.cuda.device_count()} found; "
                "try a smaller --nproc_per_node, or --device=cpu"
            )
        return torch.device("cuda", local_rank)
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    found = {"cpu": 1, "cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}
    if device is None or device.type not in found:
        raise UserError(f"device={name}: expected auto, cpu, cuda, cuda:N or mps")
    if (device.index or 0) >= found[device.type]:
        raise UserError(f"device={name}: {found[device.type]} of that kind found; try --device=cpu")
    return device


def stop():
    if dist.is_initialized():
        dist.destroy_process_group()


def pick_precision(name, device, weights="fp32"):
    """(precision, reason), with auto resolved for the device and what the weights are kept in."""
    if name == "auto" and weights == "bf16":
        return "bf16", "the weights' own"
    if name == "auto" and device.type == "cuda":
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return "bf16", "this GPU has bf16 matrix units"
        return "fp16", "this GPU has no bf16 matrix units"
    if name == "auto":
        return "fp32", f"{device.type} has no fast lower precision"
    if name in ("tf32", "fp16", "fp8") and device.type != "cuda":
        raise UserError(f"precision={name} needs a CUDA device, this is {device.type}; try --precision=fp32")
    if name == "fp8" and torch.cuda.get_device_capability(device) < (8, 9):
        raise UserError("precision=fp8 needs a GPU with fp8 matrix units (Ada, Hopper or later); try --precision=bf16")
    return name, "as set"


def autocast(precision, device):
    """The context that a forward runs in. Weights stay what they are; TF32 serves what is left in float32."""
    torch.set_float32_matmul_precision("highest" if precision == "fp32" else "high")
    dtype = {"bf16": torch.bfloat16, "fp8": torch.bfloat16, "fp16": torch.float16}.get(precision)
    return contextlib.nullcontext() if dtype is None else torch.autocast(device.type, dtype)


def pick_ops(name, device, precision):
    """(torch or fused, reason), with auto resolved: fused.py where it runs."""
    missing = None
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] < 8:
        missing = "fused.py is for NVIDIA GPUs from Ampere on"
    elif precision not in ("bf16", "fp8"):
        missing = f"fused.py is for bf16 and fp8, precision is {precision}"
    elif importlib.util.find_spec("triton") is None:
        missing = "fused.py needs the package triton"
    if name == "fused" and missing:
        raise UserError(f"ops=fused: {missing}; try --ops=torch")
    if precision == "fp8" and (missing or name == "torch"):
        raise UserError(f"precision=fp8 needs ops=fused: {missing or 'ops is torch'}; try --precision=bf16")
    if name != "auto":
        return name, "as set"
    return ("torch", missing) if missing else ("fused", "cuBLASLt and Triton, on Hopper also CUDA: fused.py")


def bf16_residual(model):
    """Keeps the residual stream in bf16, not float32, under bf16 autocast (norms still compute in float32).

    GPT-2 124M on one H200: 42 ms less of a step's 1,042, with the same loss; llm.c and Megatron-LM do likewise.
    """
    for module in (model.dropout, model.norm):
        module.register_forward_hook(lambda module, inputs, output: output.to(torch.bfloat16))


def compile_model(model, by_block, sharded=False):
    """torch.compile in place, so that state-dict keys keep their names.

    by_block: all blocks share one graph, the first step comes early, and each block's gradients are ready, so that DDP
    reduces them, while the backward goes on. Whole: residual additions fuse with the next norm, which fused.py does by
    itself: 20 ms of 1,020 a step (GPT-2 124M, one H200, ops=torch), but the first step takes 36 s instead of 8.
    """
    torch._dynamo.config.recompile_limit = 64  # train, validation, HellaSwag and sampling each have shapes of their own
    if by_block:
        if not sharded:  # where the embedding has hooks that gather it, which a graph would leave out
            model.embed = torch.compile(model.embed)
        for block in model.blocks:
            block.compile()
    else:
        model.hidden = torch.compile(model.hidden)
    model.head.compile()


def prepare(model, cfg, world, eot=None):
    """What is done to a model on meta, in a fixed order: other layers put in, compiled, its parameters sharded.

    eot: the token that precedes each document, for cfg.document_mask; None: rows are taken for single documents.
    """
    sharded = dist.is_initialized() and cfg.parallel != "ddp"
    if cfg.offload_states and not sharded:
        raise UserError("offload_states=True needs a process group; start it with torchrun, --nproc_per_node=1 for one")
    if cfg.weights == "bf16":
        for parameter in model.parameters():  # all of them: FSDP2 wants one dtype a unit
            parameter.data = parameter.data.bfloat16()
    if cfg.precision in ("bf16", "fp8") and cfg.bf16_residual:
        bf16_residual(model)
    if cfg.ops == "fused":
        import fused

        fused.swap(model, sharded)
    if cfg.precision == "fp8":
        import fp8

        fp8.swap(model)
    if cfg.document_mask:
        documents.apply(model, eot)
    if cfg.remat != "none":
        remat.apply(model, cfg, world.device.type)
    if cfg.context_parallel > 1:
        context.apply(model, cfg, world)
    if cfg.compile:
        by_block = world.size > 1 or cfg.ops == "fused" or cfg.remat != "none"
        compile_model(model, by_block, sharded)
    if sharded:
        shard(model, cfg, world)


def conflicts(cfg, world_size):
    """Settings that cannot be combined, a line each; remat.py, context.py and documents.py say what theirs refuse."""
    found = []
    if cfg.parallel != "ddp" and cfg.precision == "fp16":
        found.append(f"parallel={cfg.parallel} has no loss scaler for precision=fp16; try --precision=bf16")
    if cfg.parallel == "hsdp" and cfg.shard_size is not None and (cfg.shard_size < 1 or world_size % cfg.shard_size):
        found.append(f"shard_size={cfg.shard_size} must divide the number of ranks, {world_size}")
    if cfg.parallel != "hsdp" and cfg.shard_size is not None:
        found.append(f"shard_size={cfg.shard_size} is for parallel=hsdp, parallel is {cfg.parallel}")
    found += low_memory_problems(cfg, world_size) + remat.problems(cfg) + context.problems(cfg, world_size)
    return found + documents.problems(cfg)


def low_memory_problems(cfg, world_size):
    """As `conflicts`, for 8-bit optimizer, bf16 weights and states on the CPU."""
    found = []
    if cfg.optimizer == "adamw8bit" and cfg.precision == "fp16":
        found.append("optimizer=adamw8bit has no loss scaler for precision=fp16; try --precision=bf16")
    if cfg.weights == "bf16":
        if cfg.optimizer == "adamw":
            found.append("weights=bf16 would lose small updates with optimizer=adamw; try --optimizer=adamw8bit")
        if cfg.precision in ("fp32", "tf32", "fp16"):
            found.append(f"weights=bf16 cannot give precision={cfg.precision}; try --precision=bf16")
        if not cfg.bf16_residual:
            found.append("weights=bf16 makes the residual stream bf16 too, bf16_residual=False is not to be had")
        if cfg.parallel == "ddp" and world_size > 1 and cfg.reduce_dtype == "fp32":
            found.append("weights=bf16 has bf16 gradients, which DDP sums as they are; try --reduce_dtype=bf16")
    if cfg.offload_states:
        if cfg.parallel == "ddp":
            found.append("offload_states=True needs a sharded model, parallel is ddp; try --parallel=fsdp")
        if cfg.optimizer == "adamw8bit":
            found.append("offload_states=True updates on the CPU, where adamw8bit is slow; try --optimizer=adamw")
        if cfg.backend == "nccl":
            found.append("offload_states=True needs gloo beside backend=nccl; try --backend=auto")
    return found


def shard(model, cfg, world):
    """FSDP2 (https://arxiv.org/abs/2304.11277), a unit for each block, embedding and head; rows of tensors are split.

    Small blocks, up to cfg.unit_mib, are one unit: fewer and larger messages, and less for the host to do.

    fsdp: parameters, gradients and optimizer states; a block's parameters are gathered for its forward and again for
    its backward. zero2: parameters stay gathered through a step. hsdp: as fsdp in groups of shard_size ranks, each of
    which holds a copy. In bf16 and fp8 gathers are in bf16, in fp8 those of the blocks' weights in 8 bits; gradients
    are summed in cfg.reduce_dtype.
    offload_states: what is sharded is in the CPU's memory, and so is the optimizer's work; a unit travels to the device
    when it is gathered.
    """
    size = cfg.shard_size or int(os.environ.get("LOCAL_WORLD_SIZE", world.size))
    shape = {"hsdp": (world.size // size, size)}.get(cfg.parallel, (world.size,))
    mesh = init_device_mesh(world.device.type, shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    low = cfg.precision in ("bf16", "fp8")
    reduce_dtype = torch.bfloat16 if cfg.reduce_dtype == "bf16" else torch.float32
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if low else None, reduce_dtype=reduce_dtype)
    options = dict(mesh=mesh, mp_policy=policy)
    frees = cfg.parallel != "zero2"  # gathered parameters, after each use and micro-step, not after the last alone
    if cfg.offload_states:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=world.device.type == "cuda")
    if gathers_8_bits(cfg, mesh.size(-1)):
        import fp8

        fp8.gather_in_8_bits(model, mesh.size(-1))
    blocks, count = list(model.blocks), blocks_a_unit(cfg, sum(p.numel() for p in model.blocks[0].parameters()))
    for i in range(0, len(blocks), count):
        fully_shard(blocks[i : i + count], reshard_after_forward=frees, **options)
    if not cfg.tie_embeddings:  # a shared weight is the last unit's
        fully_shard(model.wte, reshard_after_forward=frees, **options)
        fully_shard([model.norm, model.head], reshard_after_forward=False, **options)
        register_fsdp_forward_method(model.head, "logits")
    fully_shard(model, **options)
    register_fsdp_forward_method(model, "logits")
    model.frees_gathered = frees
    if not frees:
        model.register_forward_pre_hook(gather_all)


def blocks_a_unit(cfg, numbers):
    """Blocks of so many numbers each that FSDP gathers as one."""
    return max(1, (cfg.unit_mib or 0) * 2**20 // (2 * numbers))


def gathers_8_bits(cfg, shards):
    """Whether FSDP among so many ranks gathers the blocks' weights in fp8, with their transposes: bytes as in bf16."""
    return cfg.precision == "fp8" and shards > 1 and not cfg.offload_states


def gather_all(model, *_):
    """Begins to gather all that is not (zero2, a step's first forward), a unit after the other while blocks compute.

    A unit's own hook would take the memory for it from another stream's, where it stays for nothing till the next step:
    near the limit, steps of Llama 3 8B (four H200s, 80 GiB) waited 230 ms of 6,300 for room.
    """
    for unit in units(model):
        unit.unshard(async_op=True)


def reshard(model):
    """Frees gathered parameters that an evaluation left (zero2): the model's are the sharded ones again."""
    for unit in units(model):
        unit.reshard()


def units(model):
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def fill(tensor, function):
    """function(tensor); of a sharded or bf16 one on a whole in float32, of which this rank's part is kept: the same."""
    sharded = isinstance(tensor, DTensor)
    if not sharded and tensor.dtype == torch.float32:
        return function(tensor)
    device = tensor.device_mesh.device_type if sharded else tensor.device
    whole = torch.empty(tensor.shape, dtype=torch.float32, device=device)
    function(whole)
    copy_into(tensor, whole)


def own_rows(tensor):
    """(first, last): the rows of a whole tensor that this rank holds of it; FSDP2 splits them as torch.chunk does."""
    if not isinstance(tensor, DTensor):
        return 0, tensor.size(0)
    along = tensor.placements.index(Shard(0))  # the mesh's only dimension, or hsdp's second
    each = -(-tensor.size(0) // tensor.device_mesh.size(along))
    first = min(each * tensor.device_mesh.get_local_rank(along), tensor.size(0))
    last = min(first + each, tensor.size(0))
    assert last - first == tensor.to_local().size(0), "not as torch.chunk splits"
    return first, last


def local(tensor):
    """What this rank holds of a tensor, without gradient: a view."""
    return tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor.detach()


def is_first_copy(tensor):
    """Whether no rank before this one holds the same numbers, so that each is saved once."""
    if not isinstance(tensor, DTensor):
        return rank_and_size()[0] == 0
    places = zip(tensor.device_mesh.get_coordinate(), tensor.placements)
    return all(at == 0 for at, placement in places if placement.is_replicate())


def copy_into(tensor, whole, rows=None):
    """tensor[:rows] = whole[:rows], of a sharded tensor this rank's part; all rows if None.

    whole: a tensor, or what reads rows a to b by whole[a:b] (checkpoint.Stored): no others are read.
    """
    first, last = own_rows(tensor)
    last = last if rows is None else min(last, rows)
    if first < last:
        local(tensor)[: last - first].copy_(whole[first:last])


def device_of(model):
    """Where a model computes: its parameters may be kept elsewhere."""
    parameter = next(model.parameters())
    if not isinstance(parameter, DTensor) or parameter.device_mesh.device_type == "cpu":
        return parameter.device
    return torch.device(parameter.device_mesh.device_type, torch.cuda.current_device())


def wrap(model, cfg, world):
    """The model as the loop calls it: under DDP if there are ranks and it is not sharded; its buffers on the device."""
    for buffer in model.buffers():
        buffer.data = buffer.data.to(world.device)
    if not dist.is_initialized() or cfg.parallel != "ddp":
        return model
    ids = [world.device.index] if world.device.type == "cuda" else None
    options = dict(device_ids=ids, gradient_as_bucket_view=True, broadcast_buffers=False)
    warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated")  # torch 2.11 knows no other name for it
    ddp = DistributedDataParallel(model, bucket_cap_mb=cfg.bucket_mib, **options)
    if cfg.reduce_dtype == "bf16" and cfg.weights == "fp32":
        ddp.register_comm_hook(None, bf16_compress_hook)
    return ddp


def sync_gradients(model, on):
    """on: the next backward is a step's last, the only one in which DDP, and hsdp among its copies, sums gradients."""
    if isinstance(model, DistributedDataParallel):
        model.require_backward_grad_sync = on
    elif isinstance(model, FSDPModule):
        model.set_requires_all_reduce(on)
        model.set_reshard_after_backward(on or model.frees_gathered)


def clip_gradients(model, limit):
    """Scales the gradients to a norm of at most `limit` over all ranks (None: leaves them); returns the norm.

    On a rank's own parts in one kernel a pass, where torch's takes the tensors one by one: 20 ms of a step of 614
    (Llama 3 8B, fp8, four H200s).
    """
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    own = [g.to_local() if isinstance(g, DTensor) else g for g in grads]
    square = torch.stack(torch._foreach_norm(own, dtype=torch.float32)).square().sum()
    if isinstance(grads[0], DTensor):
        dist.all_reduce(square, group=grads[0].device_mesh.get_group("shard"))
    norm = square.sqrt()
    if limit is not None:
        torch._foreach_mul_(own, (limit / (norm + 1e-6)).clamp(max=1))
    return norm


def sum_over_ranks(tensor):
    """All-reduced in place and returned."""
    if dist.is_initialized():
        dist.all_reduce(tensor)
    return tensor


def rank_and_size():
    """Of this process among those of the process group."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def gather_objects(value):
    """[value of rank 0, of rank 1, …] on every rank."""
    if not dist.is_initialized():
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def barrier():
    if dist.is_initialized():
        dist.barrier()


def synchronize(device):
    """Waits for the device, so that a clock read next is honest."""
    if device.type != "cpu":
        getattr(torch, device.type).synchronize()
    return time.perf_counter()


class Moment:
    """A point in what the device was given to do, waited for where it has no events."""

    def __init__(self, device):
        self.time, self.event = None, None
        if device.type == "cuda":
            self.event = torch.cuda.Event(enable_timing=True)
            self.event.record()
        else:
            self.time = synchronize(device)

    def since(self, earlier):
        """Seconds; both moments must be over."""
        return earlier.event.elapsed_time(self.event) / 1e3 if self.event else self.time - earlier.time


class Later:
    """A small tensor on its way to the host: `get` waits for it alone, not for what the device was given since."""

    def __init__(self, tensor):
        device, self.tensor = tensor.device, tensor
        if device.type == "cuda":
            self.tensor = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self.tensor.copy_(tensor, non_blocking=True)
        self.moment = Moment(device)

    def get(self):
        if self.moment.event:
            self.moment.event.synchronize()
        return self.tensor.tolist()
