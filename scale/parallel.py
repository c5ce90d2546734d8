"""Processes and devices; the model compiled, sharded and wrapped; and the few collectives that the project uses."""

import contextlib
import os
import time
import warnings
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import kernels
import model as models
from configurator import UserError
from fast import chips
from scale import context, documents, memory, remat
from scale.shards import copy_into, local

NCCL_LATER = 10  # seconds after timeout_s until NCCL aborts; run/signals.py, which says who hangs, comes before
ROW = 2**14  # gradients that the CPU adds up in one float32 for their norm
BUCKET_MIB = 25  # DDP all-reduces gradients in buckets of this size during the backward; PyTorch's default


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
    """Calls `start` with the settings of a settings.Config."""
    if cfg.deterministic:
        make_deterministic()
    if cfg.offload_states:
        take_cores()
    tight = cfg.parallel != "ddp" or cfg.remat != "none"
    return start(cfg.device, pick_backend(cfg), cfg.timeout_s, expandable=tight)


def take_cores():
    """Has PyTorch use this rank's share of the cores on the CPU, unless OMP_NUM_THREADS names more than one.

    torchrun sets that to 1 for several ranks, where nobody else has, and the update would run on one core: 200M
    parameters took 210 ms on one, 111 ms on two. Without torchrun a 1 is somebody's choice.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    if "RANK" in os.environ and os.environ.get("OMP_NUM_THREADS", "1") == "1":
        torch.set_num_threads(max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1))))


def describe_update():
    """With offload_states: where the optimizer runs, in words."""
    return f"on the CPU (offload_states), threads a rank: {torch.get_num_threads()}; OMP_NUM_THREADS=2 or more sets it"


def make_deterministic():
    """Has this process compute the same bits each time; an operation that cannot raises a RuntimeError.

    PyTorch and its compiler then avoid atomic additions and choices by timing; so does fast/, which asks
    torch.are_deterministic_algorithms_enabled(). Call it before CUDA starts. Several GPUs are not covered: the order in
    which NCCL sums is its own choice.
    """
    os.environ.setdefault(
        "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
    )  # scratch memory of fixed size for each stream
    torch.use_deterministic_algorithms(
        True
    )  # with warn_only, attention's backward would keep its atomic additions
    torch.utils.deterministic.fill_uninitialized_memory = False  # or every new tensor is written once more


def start(device="auto", backend="auto", timeout_s=600, expandable=False):
    """Joins the process group that torchrun describes (none without it) and claims this process's device.

    expandable: use PyTorch's expandable segments, unless the environment configures the allocator. Without them, small
    tensors fragment the memory that a large one has left, and near the limit steps wait while the allocator frees its
    cache.
    """
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    device = pick_device(device)
    if device.type == "cuda":
        if expandable and not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
            os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
        torch.cuda.set_device(device)
    if "RANK" in os.environ and not dist.is_initialized():
        backend = ("nccl" if device.type == "cuda" else "gloo") if backend == "auto" else backend
        bound = device if "nccl" in backend else None  # NCCL connects now instead of in the first step
        limit, attempt = timedelta(seconds=timeout_s), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        try:
            store = next(rendezvous("env://", timeout=limit))[0]
            store = dist.PrefixStore(
                f"attempt_{attempt}", store
            )  # torchrun's outlives a restart, with old addresses
            limit = time_limit(timeout_s, backend)
            options = dict(store=store, rank=rank, world_size=size, timeout=limit, device_id=bound)
            dist.init_process_group(backend, **options)
        except (ValueError, RuntimeError) as error:
            reason = str(error).partition("\n")[0]
            hint = "another process has the port: give torchrun --standalone, or another --master_port"
            hint = hint if "EADDRINUSE" in reason else "try --backend=auto"
            raise UserError(f"backend={backend}: the ranks could not join ({reason}); {hint}") from None
    return World(rank, size, device)


def pick_backend(cfg):
    """cfg.backend; with offload_states, auto adds gloo, which reduces the gradients' norm on the CPU."""
    both = cfg.offload_states and cfg.backend == "auto" and pick_device(cfg.device).type == "cuda"
    return "cpu:gloo,cuda:nccl" if both else cfg.backend


def pick_device(name):
    """The torch.device of this process: auto takes CUDA (a local rank its own), then Apple's MPS, then the CPU."""
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    if name == "cuda":
        if local_rank >= torch.cuda.device_count():
            found = torch.cuda.device_count()
            if "RANK" not in os.environ:
                raise UserError(f"device=cuda: {found} GPUs found; try --device=cpu")
            raise UserError(
                f"device=cuda: local rank {local_rank} has no GPU, {found} found; "
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


def store_connection():
    """A connection of its own to the store with which the process group was made, for a thread; None without ranks."""
    return dist.distributed_c10d._get_default_store().clone() if dist.is_initialized() else None


def lost_connection(error):
    """Whether an exception says that another rank could not be reached; gloo has no type for it."""
    return isinstance(error, dist.DistError) or isinstance(error, RuntimeError) and "gloo" in str(error)


def pick_precision(name, device, weights="fp32"):
    """(precision, reason), with auto resolved by the device and the weights' dtype."""
    if name == "auto" and weights == "bf16":
        return "bf16", "the weights are in bf16"
    if name == "auto":
        missing = chips.no_bf16(chips.of(device))
        low = "fp16" if device.type == "cuda" else "fp32"
        return (low, missing) if missing else ("bf16", "this GPU has bf16 matrix units")
    if name in ("tf32", "fp16", "fp8") and device.type != "cuda":
        raise UserError(f"precision={name} needs a CUDA device, this is {device.type}; try --precision=fp32")
    if name == "fp8" and (missing := chips.no_fp8(chips.of(device))):
        raise UserError(f"precision=fp8: {missing}; try --precision=bf16")
    return name, "as set"


def autocast(precision, device):
    """The autocast context of a forward, which leaves the weights' dtype; except with fp32, float32 GEMMs use TF32."""
    torch.set_float32_matmul_precision("highest" if precision == "fp32" else "high")
    dtype = {"bf16": torch.bfloat16, "fp8": torch.bfloat16, "fp16": torch.float16}.get(precision)
    return contextlib.nullcontext() if dtype is None else torch.autocast(device.type, dtype)


def pick_ops(name, device, precision):
    """(torch or fused, reason), with auto resolved; switches the fast forms of kernels.py on or off for the device."""
    missing = kernels.serve(device, name)
    if not missing and precision not in ("bf16", "fp8"):
        missing = f"fast forms are for bf16 and fp8, precision is {precision}"
    if name == "fused" and missing:
        raise UserError(f"ops=fused: {missing}; try --ops=torch")
    if precision == "fp8" and missing:
        raise UserError(f"precision=fp8 needs the fast forms of operations: {missing}; try --precision=bf16")
    return (
        ("torch", missing)
        if missing
        else ("fused", "fast forms of operations: cuBLASLt, Triton, on Hopper CUDA")
    )


def compile_model(model, sharded=False):
    """torch.compile in place, block by block, so that state-dict keys keep their names.

    All blocks share one graph, which shortens compilation, and a block's gradients are ready when its backward ends, so
    that DDP reduces them while the backward continues. optimize_ddp would cut a block's graph where a bucket of DDP
    ends: nothing is fused across such a cut, and with torch 2.11 remat=selective then keeps everything.
    """
    torch._dynamo.config.recompile_limit = (
        64  # train, validation, HellaSwag and sampling each have their own shapes
    )
    torch._dynamo.config.optimize_ddp = False
    if not sharded:  # FSDP2 gathers the embedding in a hook, which a compiled function would not call
        model.embed = torch.compile(model.embed)
    for block in model.blocks:
        block.compile()
    model.head.compile()


def prepare(model, cfg, world, eot=None, regular=True):
    """Applies, to a model on meta, in this order: fp8, documents, remat, context parallelism, compile, FSDP2.

    eot: the token that precedes each document, for cfg.document_mask; None: each row counts as one document. regular:
    whether every block runs exactly once in a forward (run/flops.py).
    """
    sharded = dist.is_initialized() and cfg.parallel != "ddp"
    if cfg.offload_states and not sharded:
        raise UserError(
            "offload_states=True needs a process group; start it with torchrun, --nproc_per_node=1 for one"
        )
    parameters = sum(p.numel() for p in model.parameters()) if world.device.type == "cpu" else 0
    memory.refuse_beyond_host(cfg, world.size, parameters)
    kernels.limit_logits(cfg.logits_mib)
    if cfg.weights == "bf16":
        for parameter in model.parameters():  # all of them: FSDP2 requires one dtype in a unit
            parameter.data = parameter.data.bfloat16()
    if cfg.precision == "fp8":
        for layer in model.modules():
            if type(layer) in (models.Linear, models.Head):  # a subclass has a forward that fp8 does not know
                kernels.fp8.track(layer)
    if cfg.document_mask:
        documents.apply(model, eot)
    if cfg.remat != "none":
        remat.apply(model, cfg, world.device.type)
    if cfg.context_parallel > 1:
        context.apply(model, cfg, world)
        limit_time(model.spread.group, cfg)
    if cfg.compile:
        compile_model(model, sharded)
    if sharded:
        shard(model, cfg, world, regular)


def limit_time(group, cfg):
    """Gives a group of some ranks the time limit of all, instead of PyTorch's 10 (NCCL) or 30 minutes (gloo)."""
    distributed_c10d._set_pg_timeout(time_limit(cfg.timeout_s, dist.get_backend_config()), group)


def time_limit(timeout_s, backend):
    """After how long a collective fails: with NCCL, which ends the process without a word, NCCL_LATER seconds later."""
    return timedelta(seconds=timeout_s + NCCL_LATER * ("nccl" in backend))


def ranks_of_a_host(world):
    """Ranks on this host; raises UserError if hosts have different numbers of them."""
    sizes = [int(os.environ.get("LOCAL_WORLD_SIZE", world.size))] * world.size
    if dist.is_initialized():
        dist.all_gather_object(sizes, sizes[0])
    if len(set(sizes)) > 1:
        raise UserError(
            f"parallel=hsdp: hosts have {min(sizes)} to {max(sizes)} ranks; set --shard_size, a divisor of all"
        )
    return sizes[0]


def shard(model, cfg, world, regular=True):
    """FSDP2 (https://arxiv.org/abs/2304.11277) with a unit for each block, embedding and head; tensors split by rows.

    Consecutive small blocks form one unit, up to memory.UNIT_MIB: fewer, larger messages and less work for the host.

    fsdp: parameters, gradients and optimizer states are sharded; a block's parameters are gathered for its forward and
    again for its backward. zero2: parameters stay gathered during a step. hsdp: fsdp within groups of shard_size ranks,
    each of which holds a copy. With bf16 and fp8, parameters are gathered in bf16, except that fp8 gathers the blocks'
    weights in 8 bits; gradients are summed in cfg.reduce_dtype.
    offload_states: the shards are in the CPU's memory, where the optimizer runs; a unit is copied to the device when it
    is gathered.
    """
    size = cfg.shard_size or ranks_of_a_host(world) if cfg.parallel == "hsdp" else world.size
    shape = {"hsdp": (world.size // size, size)}.get(cfg.parallel, (world.size,))
    mesh = init_device_mesh(world.device.type, shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    for name in mesh.mesh_dim_names:
        limit_time(mesh.get_group(name), cfg)
    low = cfg.precision in ("bf16", "fp8")
    reduce_dtype = torch.bfloat16 if cfg.reduce_dtype == "bf16" else torch.float32
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if low else None, reduce_dtype=reduce_dtype)
    options = dict(mesh=mesh, mp_policy=policy)
    frees = (
        cfg.parallel != "zero2"
    )  # frees gathered parameters after each use; zero2 does so after the last micro-step
    if cfg.offload_states:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=world.device.type == "cuda")
    if memory.gathers_8_bits(cfg, mesh.size(-1)):
        kernels.fp8.gather_in_8_bits(model.blocks.modules(), mesh.size(-1))
    sizes = [sum(p.numel() for p in block.parameters()) for block in model.blocks]
    for unit in memory.units(sizes, apart=not regular or memory.runs_blocks_twice(cfg)):
        fully_shard([model.blocks[i] for i in unit], reshard_after_forward=frees, **options)
    if not cfg.tie_embeddings:  # a shared weight belongs to the root's unit
        fully_shard(model.wte, reshard_after_forward=frees, **options)
        fully_shard(model.head, reshard_after_forward=False, **options)
        register_fsdp_forward_method(model.head, "logits")
    fully_shard(model, **options)
    register_fsdp_forward_method(model, "logits")
    model.frees_gathered = frees
    if not frees:
        model.register_forward_pre_hook(gather_all)


def gather_all(model, *_):
    """zero2, before a step's first forward: starts the all-gather of every unit, in order, while the blocks compute.

    If each unit's own hook did so, the buffers would come from another stream's memory pool and stay there unused until
    the next step: near the limit, a step of Llama 3 8B (four H200s, 80 GiB) waited 230 ms of 6,300 for the allocator.
    """
    for unit in units(model):
        unit.unshard(async_op=True)


def reshard(model):
    """Frees the gathered parameters that an evaluation left (zero2), so that parameters() are the sharded ones."""
    for unit in units(model):
        unit.reshard()


def units(model):
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def fill(tensor, function):
    """function(tensor), drawn on the whole tensor in float32: the numbers depend on neither sharding nor dtype."""
    sharded = isinstance(tensor, DTensor)
    if not sharded and tensor.dtype == torch.float32:
        return function(tensor)
    device = tensor.device_mesh.device_type if sharded else tensor.device
    whole = torch.empty(tensor.shape, dtype=torch.float32, device=device)
    function(whole)
    copy_into(tensor, whole)


def device_of(model):
    """The device on which a model computes; with offload_states its parameters are on the CPU."""
    parameter = next(model.parameters())
    if not isinstance(parameter, DTensor) or parameter.device_mesh.device_type == "cpu":
        return parameter.device
    return torch.device(parameter.device_mesh.device_type, torch.cuda.current_device())


def wrap(model, cfg, world, unused=False):
    """The model as the loop calls it: in DDP if there are ranks and it is not sharded. Its buffers go to the device.

    A CUDA graph cannot hold DDP's collectives: graphs.Replayed averages the gradients itself.
    """
    for buffer in model.buffers():
        buffer.data = buffer.data.to(world.device)
    if cfg.precision == "fp8":
        kernels.fp8.reset(model)
    if not dist.is_initialized() or cfg.parallel != "ddp" or cfg.cuda_graph:
        return model
    ids = [world.device.index] if world.device.type == "cuda" else None
    options = dict(
        device_ids=ids, gradient_as_bucket_view=True, broadcast_buffers=False, find_unused_parameters=unused
    )
    warnings.filterwarnings(
        "ignore", "`broadcast_buffers` is deprecated"
    )  # torch 2.11 has no newer name for it
    ddp = DistributedDataParallel(model, bucket_cap_mb=BUCKET_MIB, **options)
    if cfg.reduce_dtype == "bf16" and cfg.weights == "fp32":
        if world.device.type != "cuda":
            raise UserError(
                f"reduce_dtype=bf16 under DDP needs CUDA, not {world.device.type}; try --reduce_dtype=fp32"
            )
        ddp.register_comm_hook(None, bf16_compress_hook)
    return ddp


def sync_gradients(model, on):
    """on: whether the next backward is the step's last, in which DDP, and hsdp among its copies, sum gradients."""
    if isinstance(model, DistributedDataParallel):
        model.require_backward_grad_sync = on
    elif isinstance(model, FSDPModule):
        model.set_requires_all_reduce(on)
        model.set_reshard_after_backward(on or model.frees_gathered)


def clip_gradients(model, limit):
    """Scales the gradients to a norm of at most `limit` over all ranks (None: leaves them); returns the norm.

    It runs on each rank's shards with one kernel for all tensors. torch's clip_grad_norm_ on DTensors handles them one
    by one: 20 ms of a step of 614 (Llama 3 8B, fp8, four H200s). On the CPU, where no kernel is waited for, gradients
    within the limit are not multiplied by 1: that would be a quarter of the memory traffic of the update.
    """
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    own = [g.to_local() if isinstance(g, DTensor) else g for g in grads]
    square = norms(own).square().sum()
    if isinstance(grads[0], DTensor):
        dist.all_reduce(square, group=grads[0].device_mesh.get_group("shard"))
    norm = square.sqrt()
    if limit is not None and not (norm.is_cpu and norm + 1e-6 <= limit):
        torch._foreach_mul_(own, (limit / (norm + 1e-6)).clamp(max=1))
    return norm


def norms(tensors):
    """float32 norms of parts that together make up the tensors, which lie on one device.

    On the CPU, the parts are rows of ROW numbers, shared among all threads. torch._foreach_norm uses one thread there
    and adds up each tensor in a few float32 numbers: the norm of 400M normal random numbers came out 7% too small.
    """
    if not tensors[0].is_cpu:
        return torch.stack(torch._foreach_norm(tensors, dtype=torch.float32))
    found = []
    for flat in (tensor.flatten() for tensor in tensors):
        whole = flat.numel() // ROW * ROW
        parts = flat[:whole].view(-1, ROW), flat[whole:].view(1, -1)
        found += [torch.linalg.vector_norm(part, dim=1, dtype=torch.float32) for part in parts]
    return torch.cat(found)


def sum_over_ranks(tensor):
    """All-reduces the tensor in place and returns it."""
    if dist.is_initialized():
        dist.all_reduce(tensor)
    return tensor


def not_finite(loss, norm):
    """1.0 if the loss or the gradients' norm of any rank is not finite, else 0.0: a tensor beside the norm."""
    return sum_over_ranks((~torch.isfinite(loss.to(norm) + norm)).float()).clamp(max=1)


def all_finite(model):
    """Whether no weight of any rank is inf or NaN; waits for the device."""
    own = [
        part for part in map(local, model.parameters()) if part.numel()
    ]  # a rank may hold no rows of a short tensor
    tops = torch.stack([top.float() for top in torch._foreach_norm(own, float("inf"))] or [torch.zeros(())])
    return not not_finite(tops.max(), tops.max()).item()


def rank_and_size():
    """(rank of this process, number of processes) in the process group."""
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
    """Waits until the device has finished, then reads the clock: time.perf_counter(), in seconds."""
    if device.type != "cpu":
        getattr(torch, device.type).synchronize()
    return time.perf_counter()


class Moment:
    """A point in time on the device: a CUDA event; other devices are waited for."""

    def __init__(self, device):
        self.time, self.event = None, None
        if device.type == "cuda":
            self.event = torch.cuda.Event(enable_timing=True)
            self.event.record()
        else:
            self.time = synchronize(device)

    def since(self, earlier):
        """Seconds since an earlier Moment; the device must have passed both."""
        return earlier.event.elapsed_time(self.event) / 1e3 if self.event else self.time - earlier.time


class Later:
    """A copy of a small tensor to the host in the background: `get` waits for it, not for work launched after it."""

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
