"""What checkpointed blocks keep for their backward; --remat_offload: in pinned host memory."""

import collections
import contextlib
import weakref

import torch

# from so many bytes on, host memory is pinned here: PyTorch pins blocks of a power of two
PINNED_EXACTLY = 2**26


class BlockActivations:
    """The kept tensors of one block, which leave the device and come back together."""

    def __init__(self, previous):
        self.previous = previous  # a weak reference to those of the block before
        self.members = weakref.WeakSet()
        self.on_device = True
        self.ready = None  # the event after the last copies, to or from the host


class KeptTensor:
    def __init__(self, activations, tensor):
        self.activations = activations
        self.tensor = tensor  # None while it is on the host alone
        self.host = None


class ActivationStore:
    """Keeps tensors from the forward to the backward; with `offload` in pinned host memory.

    Copies have their own stream, and another block's time. The tensors of block n go to the host
    during the forward of block n + 1 and leave the device when block n + 2 begins. They come back
    during the backward of block n + 1, in which `get` starts the copies. So the device holds those
    of two blocks. Host buffers are used again.
    """

    def __init__(self, offload):
        self.offload = offload
        self.device = self.stream = None
        self.current = BlockActivations(None)  # of the block whose forward runs
        self.leaving = collections.deque()  # activations of blocks that are still on the device
        self.buffers = collections.defaultdict(list)  # of the host, that are free, by layout

    def begin_block(self):
        """Before a block's forward. References are weak: one without a backward leaves nothing."""
        self.current = BlockActivations(weakref.ref(self.current))
        if self.offload:
            self.leaving.append(self.current)
        # two stay: this block, and the one before, whose copy to the host may be under way
        if len(self.leaving) > 2:
            self.free_on_device(self.leaving.popleft())

    def keep(self, tensor):
        """Returns a KeptTensor, of which `get` returns the tensor again."""
        kept = KeptTensor(self.current, tensor)
        if self.offload and tensor.numel():
            self.device = tensor.device
            self.current.members.add(kept)
            free = self.buffers[layout(tensor)]
            kept.host = free.pop() if free else host_like(tensor)
            with self.copying(self.current):
                kept.host.copy_(tensor, non_blocking=True)
        return kept

    def get(self, kept):
        """The tensor; the copies of the block before are started."""
        own = kept.activations
        before = own.previous()
        # own ones first: they are waited for below, those of the block before are not
        for activations in (own, before):
            if activations is not None and not activations.on_device:
                self.fetch(activations)
        self.wait_for_copies(own)
        return kept.tensor

    def free_on_device(self, activations):
        """Frees them for work that comes after their copies to the host."""
        self.wait_for_copies(activations)
        for kept in activations.members:
            kept.tensor = None
        activations.on_device = False

    def fetch(self, activations):
        """Starts the copies back to the device."""
        # before `copying`: its stream then waits for the usual one, which may still use this memory
        for kept in activations.members:
            kept.tensor = torch.empty_like(kept.host, device=self.device)
        with self.copying(activations):
            for kept in activations.members:
                kept.tensor.copy_(kept.host, non_blocking=True)
                # free at once: a later copy into it waits in this stream
                self.buffers[layout(kept.host)].append(kept.host)
        activations.on_device = True

    def wait_for_copies(self, activations):
        """The usual stream goes on after them; the host does not wait."""
        if activations.ready is not None:
            torch.cuda.current_stream().wait_event(activations.ready)

    @contextlib.contextmanager
    def copying(self, activations):
        """On CUDA, copies in their own stream, after what was computed; then records `ready`."""
        if self.device.type != "cuda":
            yield
            return
        if self.stream is None:
            self.stream = torch.cuda.Stream(self.device)
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            yield
            activations.ready = self.stream.record_event()


def layout(tensor):
    """Host memory has the tensor's strides, which PyTorch's cuDNN attention takes for granted."""
    return tensor.shape, tensor.stride(), tensor.dtype


def host_like(tensor):
    """Host memory for a tensor's values, pinned if they are on a GPU, large ones exactly."""
    if tensor.is_cuda and tensor.nbytes < PINNED_EXACTLY:
        return torch.empty_like(tensor, device="cpu", pin_memory=True)
    host = torch.empty_like(tensor, device="cpu")
    if tensor.is_cuda:
        runtime = torch.cuda.cudart()
        torch.cuda.check_error(runtime.cudaHostRegister(host.data_ptr(), host.nbytes, 0))
        unpinned = weakref.finalize(host, runtime.cudaHostUnregister, host.data_ptr())
        unpinned.atexit = False  # the process's end unpins it faster
    return host
