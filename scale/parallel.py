"""Processes and devices, parameters and gradients over ranks, collectives, and time on a device."""

import os
import time
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import fsdp, rendezvous
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from scale.shards import local
from system.errors import UserError, launched, this_rank


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
        # torchrun leaves each rank one core; the update of 200M parameters took 210 ms on one core,
        # 111 on two
        cores = len(os.sched_getaffinity(0)) // this_rank().local_size
        torch.set_num_threads(max(1, cores))
    expandable = cfg.parallel != "ddp" or cfg.remat != "none"
    return start(cfg.device, cfg.timeout_s, expandable, on_cpu=cfg.offload_states)


def make_deterministic():
    """Called before CUDA starts; from then on the same bits each time, but for NCCL's sums.

    An operation that cannot do that raises RuntimeError.
    """
    # cuBLAS: scratch memory of fixed size for a stream
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # not with warn_only, which keeps the atomic additions of attention's backward
    torch.use_deterministic_algorithms(True)
    # True would write every new tensor once more
    torch.utils.deterministic.fill_uninitialized_memory = False


def start(device="auto", timeout_s=600, expandable=False, on_cpu=False):
    """Joins the process group that torchrun describes, if any, and claims this process's device.

    expandable: the allocator's segments grow, which fragments memory less. on_cpu: ranks with GPUs
    reduce tensors on the CPU too.
    """
    rank, size, *_ = this_rank()
    world = World(rank, size, pick_device(device))
    backend = "gloo"
    if world.device.type == "cuda":
        backend = "cpu:gloo,cuda:nccl" if on_cpu else "nccl"
        if expandable and not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
            os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
        # ms; after timeout_s NCCL's watchdog waits four times as long before it ends the process,
        # by default a minute
        os.environ.setdefault("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "500")
        torch.cuda.set_device(world.device)
    if not launched() or dist.is_initialized():
        return world
    limit = time_limit(timeout_s)
    store = next(rendezvous("env://", timeout=limit))[0]
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.PrefixStore(f"attempt_{attempt}", store)  # torchrun's outlives a restart
    dist.init_process_group(
        backend,
        store=store,
        rank=world.rank,
        world_size=world.size,
        device_id=world.device if world.device.type == "cuda" else None,  # NCCL then connects now
        timeout=limit,
    )
    return world


def pick_device(name):
    """This process's torch.device; auto: CUDA, else MPS, else CPU; cuda: the local rank's GPU."""
    # a GPU that fails counts, since torch then says why
    cuda = torch.cuda.is_available() or torch.cuda.device_count()
    found = {"cuda": cuda, "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        name = next(kind for kind in found if found[kind])
    if name != "cuda" and found[name]:
        return torch.device(name)
    index = this_rank().local_rank
    # `index == 0` comes first: counting takes half a second
    if found[name] and (index == 0 or index < torch.cuda.device_count()):
        return torch.device("cuda", index)
    raise UserError(f"device={name} is not there; try --device=cpu, or a smaller --nproc_per_node")


def stop():
    if dist.is_initialized():
        # until gloo's threads have let go of the last tensors: for that they need the GIL, which
        # the group's destructor holds while it waits for them
        time.sleep(0.1)
        dist.destroy_process_group()


def time_limit(timeout_s):
    """After how long a collective fails."""
    return timedelta(seconds=timeout_s)


def units(model):
    """The parts of a model that FSDP2 gathers, itself among them; [] of any other model."""
    return [module for module in model.modules() if isinstance(module, fsdp.FSDPModule)]


def free_gathered(model):
    """Frees what an evaluation left gathered (FSDP2, zero2): parameters() are then shards."""
    for unit in units(model):
        unit.reshard()


def begin_step(model):
    """Makes parameters() the shards again, and gradients none, after code that ran the model."""
    free_gathered(model)
    model.zero_grad(set_to_none=True)


def checksums(model):
    """int64 (n,): of each parameter the sum of its bits, of the rows that this rank holds."""
    sums = []
    for p in model.parameters():
        rows = local(p).contiguous()
        integer = getattr(torch, f"int{8 * rows.itemsize}")
        sums.append(rows.view(integer).sum(dtype=torch.int64))
    return torch.stack(sums)


def copies_differ(model):
    """Names of parameters of which ranks hold copies that differ; they must not drift apart.

    All ranks call it; it waits for the device.
    """
    p = next(model.parameters())
    group = None
    if isinstance(p, DTensor):
        if p.device_mesh.ndim == 1:
            return []
        group = p.device_mesh.get_group("replicate")
    if not dist.is_initialized():
        return []
    own = checksums(model)
    first = own.clone()
    dist.broadcast(first, group=group, group_src=0)
    differ = sum_over_ranks((own != first).int()).tolist()
    return [name for (name, _), found in zip(model.named_parameters(), differ) if found]


def sync_gradients(model, on):
    """Before a micro-step.

    on: it is the step's last, in which DDP, and hsdp among its copies, sum gradients.
    """
    if isinstance(model, DistributedDataParallel):
        model.require_backward_grad_sync = on
    elif isinstance(model, fsdp.FSDPModule):
        model.set_requires_all_reduce(on)
        for unit in model.unsharded_units:
            unit.set_reshard_after_backward(on, recurse=False)
    if on:
        divided = isinstance(model, (DistributedDataParallel, fsdp.FSDPModule))
        refuse_changes(model, may_freeze=not divided)


def refuse_changes(model, may_freeze=False):
    """Raises UserError if a parameter was frozen or thawed after the model was built.

    DDP, FSDP2 and a CUDA graph have recorded which parameters are trained, and the optimizer lacks
    those that were frozen. may_freeze: freezing one is right, as it is without these three. Under
    FSDP2 a hook on a parameter's gradient is an error as well.
    """
    for name, p, before in model.trained:
        if isinstance(model, fsdp.FSDPModule) and p._backward_hooks:
            what = f"{name} has a hook on its gradient, which FSDP2 does not call"
            raise UserError(f"{what}; change it in train.py, in Training.normalize_and_clip")
        freezes = may_freeze and not p.requires_grad
        if p.requires_grad != before and not freezes:
            what = f"requires_grad of {name} is {p.requires_grad}, and was {before}"
            raise UserError(f"{what} when the model was built; set it in GPT.__init__")


def sum_over_ranks(tensor):
    """All-reduces the tensor in place and returns it."""
    if dist.is_initialized():
        dist.all_reduce(tensor)
    return tensor


def max_over_ranks(number, device):
    """The largest integer of any rank; waits for `device`, that of the ranks."""
    if not dist.is_initialized():  # which need not wait for the device
        return number
    largest = torch.tensor(number, device=device)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return largest.item()


def broadcast(tensors):
    """Gives all ranks rank 0's values."""
    for tensor in tensors:
        if dist.is_initialized():
            dist.broadcast(tensor, 0)


def all_finite(tensors, device):
    """Whether no tensor of any rank holds inf or NaN; waits for `device`, that of the ranks."""
    checked = []
    for own in map(local, tensors):
        # no 8-bit codes; of a short tensor a rank may have no rows
        if own.is_floating_point() and own.itemsize > 1 and own.numel():
            checked.append(own)
    largest = torch.nn.utils.get_total_norm(checked, float("inf")).to(device)
    spoilt = ~torch.isfinite(largest)
    return sum_over_ranks(spoilt.float()).item() == 0


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
    if isinstance(p, DTensor) and p.device_mesh.device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return p.device


def synchronize(device):
    """Waits until the device has finished; returns time.perf_counter() then, in seconds."""
    if device.type != "cpu":
        getattr(torch, device.type).synchronize()
    return time.perf_counter()


class Moment:
    """A point in time on the device: a CUDA event; other devices are waited for."""

    def __init__(self, device):
        self.event = None
        if device.type == "cuda":
            self.event = torch.cuda.Event(enable_timing=True)
            self.event.record()
        else:
            self.time = synchronize(device)

    def since(self, earlier):
        """Seconds since an earlier Moment; the device must have passed both."""
        if self.event:
            return earlier.event.elapsed_time(self.event) / 1e3
        return self.time - earlier.time


class Later:
    """A small tensor copied to the host in the background; `get` waits for it alone."""

    def __init__(self, tensor):
        self.tensor = tensor.to("cpu", non_blocking=tensor.is_cuda)  # pinned
        self.moment = Moment(tensor.device)

    def get(self):
        if self.moment.event:
            self.moment.event.synchronize()
        return self.tensor.tolist()
