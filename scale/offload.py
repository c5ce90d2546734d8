"""Keeps tensors of a forward for its backward, on the device or, copied meanwhile, in the host's memory."""

import collections
import contextlib
import weakref

import torch


class Group:
    """The tensors of one block, which wait together; `previous` is a weak reference to the group before."""

    def __init__(self, previous):
        self.members, self.previous, self.ready, self.on_device = weakref.WeakSet(), previous, None, True


class Kept:
    """One tensor of a group: `tensor` on the device, None while it is on the host alone."""

    def __init__(self, group, tensor):
        self.group, self.tensor, self.device, self.host = group, tensor, tensor.device, None


class Shelf:
    """Keeps tensors from the forward to the backward; with `offload` in pinned host memory.

    Copies have their own stream: a group goes out while the next block is computed, and comes back while the
    gradients of the block after it are, so that the device holds two groups. Host buffers are used again.
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
            group = self.leaving.popleft()
            if group.ready is not None:  # frees the tensors for work that comes after the copies
                torch.cuda.current_stream().wait_event(group.ready)
            for kept in group.members:
                kept.tensor = None
            group.on_device = False

    def put(self, tensor):
        kept = Kept(self.group, tensor)
        if self.offload and tensor.numel():
            self.group.members.add(kept)
            buffers = self.buffers[key(tensor)]
            new = lambda: torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
            kept.host = buffers.pop() if buffers else new()
            with self.copying(self.group, tensor.device):
                kept.host.copy_(tensor, non_blocking=True)
        return kept

    def take(self, kept):
        """The tensor; the copies of the group before are started."""
        for group in (kept.group, kept.group.previous()):
            if group is not None and not group.on_device:
                self.fetch(group, kept.device)
        if kept.group in self.leaving:  # the last ones of a forward never left
            self.leaving.remove(kept.group)
        elif kept.group.ready is not None:
            torch.cuda.current_stream().wait_event(kept.group.ready)
        return kept.tensor

    def fetch(self, group, device):
        for kept in group.members:  # memory of the usual stream
            kept.tensor = torch.empty_like(kept.host, device=device)
        with self.copying(group, device):
            for kept in group.members:
                kept.tensor.copy_(kept.host, non_blocking=True)
                self.buffers[key(kept.host)].append(kept.host)  # a later copy into it waits in this stream
        group.on_device = True

    @contextlib.contextmanager
    def copying(self, group, device):
        """On CUDA: in the copies' stream, which waits for what was computed; then the group is ready."""
        if device.type != "cuda":
            yield
            return
        self.stream = self.stream or torch.cuda.Stream(device)
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            yield
            group.ready = self.stream.record_event()


def key(tensor):
    """Host memory has the tensor's strides, which PyTorch's cuDNN attention takes for granted."""
    return tensor.shape, tensor.stride(), tensor.dtype
