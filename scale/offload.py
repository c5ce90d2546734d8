"""Keeps tensors of a forward for its backward, on the device or, copied meanwhile, in the host's memory."""

import collections
import contextlib
import weakref

import torch


class Group:
    """The tensors of one block, which wait together; `previous` is a weak reference to the group before."""

    def __init__(self, previous):
        self.members, self.previous, self.ready, self.on_device = [], previous, None, True

    def kept(self):
        return [kept for member in self.members if (kept := member()) is not None]


class Kept:
    """One tensor of a group: `tensor` on the device, None while it is on the host alone."""

    def __init__(self, group, tensor):
        self.group, self.tensor, self.device, self.host = group, tensor, tensor.device, None


class Shelf:
    """Keeps tensors from the forward to the backward; with `offload` in pinned host memory.

    `begin` opens a group, `put` adds to it, `take` returns a tensor. Copies have their own stream: a group
    goes out while the next block is computed, and comes back while the gradients of the block after it are
    computed, so that the device holds two groups at a time. Host buffers are used again.
    """

    def __init__(self, offload):
        self.offload, self.stream, self.group, self.last = offload, None, None, lambda: None
        self.buffers, self.leaving = collections.defaultdict(list), collections.deque()

    def begin(self):
        """Opens a block's group. References are weak: a forward without a backward leaves nothing."""
        self.group = Group(self.last)
        if self.offload:
            self.last = weakref.ref(self.group)
            self.leaving.append(self.group)
        while len(self.leaving) > 2:  # of the block before, the copy to the host may still be under way
            self._free(self.leaving.popleft())

    def put(self, tensor):
        kept = Kept(self.group, tensor)
        if self.offload and tensor.numel():
            self.group.members.append(weakref.ref(kept))
            free = self.buffers[
                _key(tensor)
            ]  # of the tensor's strides, which cuDNN attention takes for granted
            kept.host = (
                free.pop() if free else torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
            )
            with self._copying(tensor.device) as stream:
                kept.host.copy_(tensor, non_blocking=True)
                self.group.ready = stream.record_event() if stream else None
        return kept

    def take(self, kept):
        """The tensor; the copies of the group before are started."""
        group = kept.group
        for other in (group, group.previous()):
            if other is not None and not other.on_device:
                self._fetch(other)
        if group in self.leaving:  # the last ones of a forward never left
            self.leaving.remove(group)
        elif group.ready is not None:
            torch.cuda.current_stream().wait_event(group.ready)
        return kept.tensor

    def _fetch(self, group):
        group.on_device, members = True, group.kept()
        for kept in members:
            kept.tensor = torch.empty_like(kept.host, device=kept.device)
        with self._copying(members[0].device if members else torch.device("cpu")) as stream:
            for kept in members:
                kept.tensor.copy_(kept.host, non_blocking=True)
                self.buffers[_key(kept.host)].append(kept.host)  # a later copy into it waits in this stream
            group.ready = stream.record_event() if stream else None

    def _free(self, group):
        """Frees the device's tensors for work that comes after the copies to the host."""
        if group.ready is not None:
            torch.cuda.current_stream().wait_event(group.ready)
        for kept in group.kept():
            kept.tensor = None
        group.on_device = False

    @contextlib.contextmanager
    def _copying(self, device):
        """The copies' stream, which first waits for what was computed; None on the CPU."""
        if device.type != "cuda":
            yield None
            return
        self.stream = self.stream or torch.cuda.Stream(device)
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            yield self.stream


def _key(tensor):
    return tensor.shape, tensor.stride(), tensor.dtype
