"""The rows of a sharded tensor (FSDP2's DTensor) that a rank holds, read and written."""

import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

# torch 2.13 gave it this name, and warns of all_gather_into_tensor
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def rows_of(tensor, rank=None):
    """(first, last) of the rows of a rank's shard; None: this rank's.

    FSDP2 splits rows as torch.chunk does.
    """
    rows = tensor.size(0)
    if not isinstance(tensor, DTensor) or Shard(0) not in tensor.placements:
        return 0, rows
    along = tensor.placements.index(Shard(0))  # with hsdp the second dimension of the mesh
    if rank is None:
        rank = tensor.device_mesh.get_local_rank(along)
    each = -(-rows // tensor.device_mesh.size(along))
    return min(each * rank, rows), min(each * (rank + 1), rows)


def local(tensor):
    """A view of the rows that this rank holds, detached."""
    return tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor.detach()


def is_first_copy(tensor):
    """Whether no lower rank holds the same rows; only the first copy is saved."""
    if isinstance(tensor, DTensor):
        return not any(tensor.device_mesh.get_coordinate()[:-1])  # hsdp's copies
    return not dist.is_initialized() or dist.get_rank() == 0


def copy_into(tensor, whole):
    """Copies this rank's rows of `whole`; rows that it lacks are zeros.

    It reads no others, and these as whole[a:b].
    """
    own = local(tensor)
    if not tensor.shape:
        own.copy_(whole)
        return
    first, last = rows_of(tensor)
    found = whole[first:last]
    own[: len(found)] = found
    own[len(found) :] = 0
