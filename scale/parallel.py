"""Processes and devices; DDP and FSDP2 around a model; and the few collectives that the project uses."""

import contextlib
import inspect
import os
import time
import warnings
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d, fsdp, init_device_mesh, rendezvous
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_flatten, tree_unflatten

import fast
from errors import UserError, launched, this_rank
from scale import memory
from scale.shards import copy_into, local

NCCL_LATER = 10  # seconds after timeout_s until NCCL ends the process; the run reports a hang before


class World(NamedTuple):
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
    if cfg.offload_states and os.environ.get("OMP_NUM_THREADS") == "1":
        # torchrun leaves each rank one core; the update of 200M parameters took 210 ms on one, 111 on two
        cores = len(os.sched_getaffinity(0)) // this_rank().local_size
        torch.set_num_threads(max(1, cores))
    return start(cfg.device, cfg.timeout_s, cfg.parallel != "ddp" or cfg.remat != "none", cfg.offload_states)


def make_deterministic():
    """Before CUDA starts: the same bits each time, but for NCCL's sums, or a RuntimeError of an operation."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # scratch memory of fixed size for a stream
    torch.use_deterministic_algorithms(True)  # warn_only keeps the atomic additions of attention's backward
    torch.utils.deterministic.fill_uninitialized_memory = False  # or every new tensor is written once more


def start(device="auto", timeout_s=600, expandable=False, on_cpu=False):
    """Joins the process group that torchrun describes (none without it) and claims this process's device.

    expandable: the allocator's segments grow, which fragments memory less. on_cpu: GPUs' ranks reduce there.
    """
    rank, size, *_ = this_rank()
    device = pick_device(device)
    if device.type == "cuda":
        if expandable and not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
            os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
        torch.cuda.set_device(device)
    if launched() and not dist.is_initialized():
        backend = ("cpu:gloo,cuda:nccl" if on_cpu else "nccl") if device.type == "cuda" else "gloo"
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        options = dict(rank=rank, world_size=size, device_id=device if "nccl" in backend else None)
        try:  # with a device NCCL connects now instead of in the first step
            store = next(rendezvous("env://", timeout=timedelta(seconds=timeout_s)))[0]
            store = dist.PrefixStore(f"attempt_{attempt}", store)  # torchrun's outlives a restart
            options["store"] = store
            check_backend(store, rank, backend)
            dist.init_process_group(backend, **options, timeout=time_limit(timeout_s, backend))
        except (ValueError, RuntimeError, OverflowError) as error:
            why, hint = str(error).partition("\n")[0], "is --master_addr reachable, and --master_port free?"
            raise UserError(f"the ranks could not join over {backend} ({why}); {hint}") from None
    return World(rank, size, device)


def check_backend(store, rank, backend):
    """Raises UserError on a rank that would join over another backend than rank 0, and wait without end."""
    if rank == 0:
        store.set("backend", backend)
    elif (first := store.get("backend").decode()) != backend:
        words = f"rank {rank} joins over {backend}, rank 0 over {first}"
        error = UserError(f"{words}: it has another device, or another --device or --offload_states")
        error.loud = True  # the other ranks do not know of it
        raise error


def pick_device(name):
    """The torch.device of this process; auto: CUDA, else MPS, else the CPU; cuda: the local rank's GPU."""
    cuda = torch.cuda.is_available() or torch.cuda.device_count()  # where a GPU fails, torch says why
    found = {"cuda": cuda, "mps": torch.backends.mps.is_available(), "cpu": True}
    name = next(kind for kind in found if found[kind]) if name == "auto" else name
    kind, _, index = name.partition(":")
    if kind not in found or index and not index.isdigit():
        raise UserError(f"device={name}: expected auto, cpu, cuda, cuda:N or mps")
    index = int(index or this_rank().local_rank) if kind == "cuda" else 0
    if not found[kind] or index and index >= torch.cuda.device_count():  # counting takes half a second
        few = f"{torch.cuda.device_count() if kind == 'cuda' else 0} of that kind found"
        raise UserError(f"device={name}: {few}; try --device=cpu, or a smaller --nproc_per_node")
    return torch.device(kind, index) if kind == "cuda" else torch.device(kind)


def stop():
    if dist.is_initialized():
        dist.destroy_process_group()


def store_connection():
    """A separate connection, for a thread, to the store of the process group; None without ranks."""
    return distributed_c10d._get_default_store().clone() if dist.is_initialized() else None


def time_limit(timeout_s, backend=None):
    """After how long a collective of a backend, None: of the run's, fails."""
    backend = dist.get_backend_config() if backend is None else backend
    return timedelta(seconds=timeout_s + NCCL_LATER * ("nccl" in backend))


def shard(model, cfg, world, analysis=None):
    """FSDP2 (https://arxiv.org/abs/2304.11277) with a unit for embedding, head and each of memory.units.

    fsdp gathers a block for its forward and for its backward, or less often (see `keep_gathered`), zero2 once
    a step; hsdp is fsdp within groups of shard_size ranks, each of which holds a copy. analysis: the
    run.flops.ModelAnalysis of what a forward does; None: it is not known, and there will be no backward.
    """
    regular = analysis is not None and analysis.regular
    mesh = make_mesh(cfg, world)
    low = torch.bfloat16 if cfg.precision in ("bf16", "fp8") else None
    summed = torch.bfloat16 if cfg.reduce_dtype == "bf16" else torch.float32
    options = dict(mesh=mesh, mp_policy=fsdp.MixedPrecisionPolicy(param_dtype=low, reduce_dtype=summed))
    if cfg.offload_states:
        options["offload_policy"] = fsdp.CPUOffloadPolicy(pin_memory=world.device.type == "cuda")
    frees = cfg.parallel != "zero2"  # parameters after each use; zero2 does so after the last micro-step
    if memory.gathers_8_bits(cfg, mesh.size(-1)):
        plain = analysis.read_elsewhere if analysis else ()
        layers = [module for name, module in model.blocks.named_modules(prefix="blocks") if name not in plain]
        fast.fp8.gather_in_8_bits(layers, mesh.size(-1))
    if analysis and analysis.chooses:
        for block in model.blocks:
            block.register_forward_hook(with_all_gradients)
    sizes = [sum(p.numel() for p in block.parameters()) for block in model.blocks]
    apart = not regular or cfg.remat in ("block", "attention")
    parts = [[model.blocks[i] for i in unit] for unit in memory.units(sizes, apart)]
    if not cfg.tie_embeddings:  # a shared weight belongs to the root's unit
        parts = [[model.wte], [model.head], *parts]
    # what keep_gathered takes first: nothing is computed beside the gathers of embedding and head
    model.unit_sizes = []
    for modules in parts:
        size = sum(p.numel() for module in modules for p in module.parameters())
        model.unit_sizes.append((modules[0], size))
        fsdp.fully_shard(modules, reshard_after_forward=frees and modules != [model.head], **options)
    if not cfg.tie_embeddings:
        fsdp.register_fsdp_forward_method(model.head, "logits")
    fsdp.fully_shard(model, **options)
    for method in ("logits", "token_losses"):
        fsdp.register_fsdp_forward_method(model, method)
    model.kept = [] if frees else units(model)  # gathered from a step's first forward to its last backward
    if not frees:
        model.register_forward_pre_hook(gather_all)


def keep_gathered(model, cfg, world, parameters, optimizer):
    """Keeps units of fsdp and hsdp gathered during a step, as zero2 does all, as the GPU has room for them.

    parameters: of the model; optimizer: the name of one whose states are not known, or None. Returns rows of
    the start-up summary.
    """
    edited = parameters != memory.parameter_counts(cfg)[0]
    if not isinstance(model, fsdp.FSDPModule) or cfg.parallel == "zero2" or edited or optimizer:
        return []
    free = room(cfg, world)
    if free <= 0:
        return []
    whole = 0
    for unit, size in model.unit_sizes:
        if whole + 2 * size > free:
            break
        whole += 2 * size
        unit.set_reshard_after_forward(False, recurse=False)
        model.kept.append(unit)
    few = f"{len(model.kept)} of {len(model.unit_sizes)} units stay gathered during a step"
    return [("gathered", f"{few}, {whole / memory.GIB:.1f} GiB")]


def room(cfg, world):
    """Bytes of a GPU that the estimate leaves; 0 where it does not hold. All ranks call it.

    5% stay aside, and 10% in a step of one micro-step: there a unit that stays gathered saves one gather of
    two, while an allocator short of memory waits for the GPU (131,072 tokens on four: 0.8 s of 12).
    """
    if world.device.type != "cuda" or memory.not_estimated(cfg):
        return 0
    share = torch.cuda.get_per_process_memory_fraction(world.device)
    limit = share * torch.cuda.mem_get_info(world.device)[1]
    aside = memory.MARGIN if cfg.micro_steps(world.size) == 1 else 0.05
    return (1 - aside) * min(gather_objects(limit)) - memory.takes(cfg, world.size)


def with_all_gradients(block, _, result):
    """A forward hook: the block's backward gives each of its parameters a gradient, perhaps zeros.

    FSDP2's ranks would otherwise sum different gradients, where an expert has tokens on one of them alone.
    """
    parts, form = tree_flatten(result)
    for i, part in enumerate(parts):
        if torch.is_tensor(part) and part.requires_grad:
            used = [p for p in block.parameters() if p.requires_grad]
            parts[i] = AllGradients.apply(part, *used)
            return tree_unflatten(parts, form)


class AllGradients(torch.autograd.Function):
    """Identity of x, with gradients of zeros for the parameters."""

    @staticmethod
    def forward(ctx, x, *parameters):
        ctx.like = [(p.shape, p.dtype, p.device) for p in parameters]
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dx):
        return dx, *(torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.like)


def make_mesh(cfg, world):
    """The ranks as FSDP2 sees them: one row, or for hsdp a row for each copy of the model."""
    size, first = memory.shards_of(cfg, world.size), int(cfg.parallel != "hsdp")
    shape, names = (world.size // size, size)[first:], ("replicate", "shard")[first:]
    mesh = init_device_mesh(world.device.type, shape, mesh_dim_names=names)
    for group in mesh.get_all_groups():  # instead of PyTorch's limits, 10 (NCCL) or 30 minutes (gloo)
        distributed_c10d._set_pg_timeout(time_limit(cfg.timeout_s), group)
    return mesh


def gather_all(model, *_):
    """zero2, before a step's first forward: gathers all units; FSDP2's own hooks waited 230 ms of 6,300."""
    for unit in units(model):
        unit.unshard(async_op=True)


def reshard(model):
    """Frees the gathered parameters that an evaluation left (zero2), so that parameters() are shards."""
    for unit in units(model):
        unit.reshard()


def units(model):
    return [module for module in model.modules() if isinstance(module, fsdp.FSDPModule)]


@contextlib.contextmanager
def whole(module):
    """Within it the module's own parameters are whole float32 tensors, which are then copied into them.

    So their first values depend neither on sharding nor on dtype. Raises UserError if some are not given.
    """
    own = {name: p for name, p in module._parameters.items() if p is not None}
    for name, parameter in own.items():
        on = parameter.device_mesh.device_type if isinstance(parameter, DTensor) else parameter.device
        empty = torch.full(parameter.shape, torch.nan, dtype=torch.float32, device=on)
        module._parameters[name] = torch.nn.Parameter(empty, requires_grad=parameter.requires_grad)
    yield
    for name, parameter in own.items():
        given = module._parameters[name].detach()
        module._parameters[name] = parameter
        if given.isnan().any():
            what = f"{type(module).__name__}.{name} has no initial value"
            raise UserError(f"model.py: {what}: does its reset_parameters() give it one?")
        copy_into(parameter, given)


def wrap(model, cfg, world, unused=False):
    """The model as the loop calls it: in DDP if nothing else averages gradients. unused: some have none."""
    if not dist.is_initialized() or cfg.parallel != "ddp":
        return model
    on_gpu, in_bf16 = world.device.type == "cuda", cfg.reduce_dtype == "bf16" and cfg.weights == "fp32"
    if in_bf16 and not on_gpu:
        raise UserError("reduce_dtype=bf16 under DDP needs a CUDA device; try --reduce_dtype=fp32")
    warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated")  # torch 2.11 has no newer name
    options = dict(gradient_as_bucket_view=True, broadcast_buffers=False, find_unused_parameters=unused)
    ddp = Averaged(model, device_ids=[world.device] if on_gpu else None, **options)
    if in_bf16:
        ddp.register_comm_hook(None, bf16_compress_hook)
    return ddp


class Averaged(DistributedDataParallel):
    """DDP that has the model's methods and parts too: self.model.logits(...) is right in a training step.

    So is state.model.logits(...) beside such a call; by itself its gradients would not be averaged.
    """

    calls = 0  # with gradients, in this micro-step

    def __getattr__(self, name):
        if name == "module" or hasattr(DistributedDataParallel, name):
            return super().__getattr__(name)
        with contextlib.suppress(AttributeError):
            return super().__getattr__(name)
        part = getattr(self.module, name)
        if not inspect.ismethod(part):
            return part

        def call(*args, **options):
            self.method = part
            return self(*args, **options)

        return call

    def forward(self, *args, **options):
        self.calls += int(torch.is_grad_enabled())
        if self.calls > 1 and self.find_unused_parameters and self.require_backward_grad_sync:
            what = "DDP allows one call of self.model in a micro-step where some parameters have no gradient"
            raise UserError(
                f"{what}; drop those parameters (see the warning at the start), or --parallel=fsdp"
            )
        return super().forward(*args, **options)

    def _run_ddp_forward(self, *args, **options):
        method = self.__dict__.pop("method", None)
        if method is None:
            return super()._run_ddp_forward(*args, **options)
        with self._inside_ddp_forward():
            return method(*args, **options)


@contextlib.contextmanager
def sync_gradients(model, on):
    """Around a micro-step. on: the step's last, in which DDP, and hsdp among its copies, sum gradients."""
    if isinstance(model, DistributedDataParallel):
        model.require_backward_grad_sync = on
        model.calls = 0
    elif isinstance(model, fsdp.FSDPModule):
        model.set_requires_all_reduce(on)
        for unit in model.kept:
            unit.set_reshard_after_backward(on, recurse=False)
    yield
    if isinstance(model, Averaged) and on and not model.calls:
        what = "a micro-step calls only state.model, whose gradients DDP does not average over the ranks"
        raise UserError(f"{what}; write self.model(...) or self.model.logits(...)")


def sum_over_ranks(tensor):
    """All-reduces the tensor in place and returns it."""
    if dist.is_initialized():
        dist.all_reduce(tensor)
    return tensor


def not_finite(loss, norm):
    """A tensor: 1.0 if the loss or the gradients' norm of any rank is not finite, else 0.0."""
    return sum_over_ranks((~torch.isfinite(loss.to(norm) + norm)).float()).clamp(max=1)


@contextlib.contextmanager
def holding(model, weights):
    """Within it the parameters are {name: tensor}, laid out as they are themselves, such as an average's.

    It takes the memory of one copy of them.
    """
    kept = {}
    reshard(model)
    for name, p in model.named_parameters():
        kept[name] = p.detach().clone()
        p.detach().copy_(weights[name])
    try:
        yield
    finally:
        reshard(model)
        for name, p in model.named_parameters():
            p.detach().copy_(kept[name])


def share(tensors):
    """Gives all ranks rank 0's values."""
    for tensor in tensors:
        if dist.is_initialized():
            dist.broadcast(tensor, 0)


def average_buffers(model):
    """Makes the floating-point persistent buffers of a model the mean of those of all ranks."""
    size = rank_and_size()[1]
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point() and name not in module._non_persistent_buffers_set:
                sum_over_ranks(buffer.div_(size))


def all_finite(tensors, device):
    """Whether none of the tensors of any rank holds inf or NaN; waits for `device`, that of the ranks."""
    floats = [local(t) for t in tensors if t.is_floating_point() and t.dtype.itemsize > 1]  # no 8-bit codes
    by_device = {}
    for own in floats:
        if own.numel():  # of a short tensor a rank may have no rows
            by_device.setdefault(own.device, []).append(own)
    tops = [torch.zeros((), device=device)]
    for some in by_device.values():
        tops += [top.float().to(tops[0]) for top in torch._foreach_norm(some, float("inf"))]
    top = torch.stack(tops).max()
    return not not_finite(top, top).item()


def all_zero(model):
    """Names of the trained parameters that are zero on all ranks; waits for the device."""
    trained = {name: local(p) for name, p in model.named_parameters() if p.requires_grad}
    nonzero = sum_over_ranks(torch.stack([rows.count_nonzero() for rows in trained.values()]))
    return [name for name, count in zip(trained, nonzero.tolist()) if count == 0]


def rank_and_size():
    """(rank of this process, number of processes) in the process group."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def gather_objects(value):
    """[value of rank 0, of rank 1, …] on every rank."""
    values = [value] * rank_and_size()[1]
    if dist.is_initialized():
        dist.all_gather_object(values, value)
    return values


def barrier():
    if dist.is_initialized():
        dist.barrier()


def device_of(model):
    """The device on which a model computes; with offload_states its parameters are on the CPU."""
    p = next(model.parameters())
    on_gpu = isinstance(p, DTensor) and p.device_mesh.device_type == "cuda"
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else p.device


def synchronize(device):
    """Waits until the device has finished, then reads the clock: time.perf_counter(), in seconds."""
    if device.type != "cpu":
        getattr(torch, device.type).synchronize()
    return time.perf_counter()


class Moment:
    """A point in time on the device: a CUDA event; other devices are waited for."""

    def __init__(self, device):
        self.event = torch.cuda.Event(enable_timing=True) if device.type == "cuda" else None
        self.time = self.event.record() if self.event else synchronize(device)

    def since(self, earlier):
        """Seconds since an earlier Moment; the device must have passed both."""
        return earlier.event.elapsed_time(self.event) / 1e3 if self.event else self.time - earlier.time


class Later:
    """A small tensor copied to the host in the background: `get` waits for it, not for later work."""

    def __init__(self, tensor):
        self.tensor = tensor.to("cpu", non_blocking=tensor.is_cuda)  # pinned
        self.moment = Moment(tensor.device)

    def get(self):
        if self.moment.event:
            self.moment.event.synchronize()
        return self.tensor.tolist()
