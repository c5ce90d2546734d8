"""--cuda_graph: the host launches a micro-step's kernels together, as one CUDA graph.

The host needs tens of microseconds for each kernel that it launches. Where a micro-batch or a model is small, or the
host slow, that is longer than the kernels take, and the GPU waits. A graph is captured once and launched as one
(https://developer.nvidia.com/blog/cuda-graphs); what is captured is the micro-step of train.py as it stands.
"""

import gc

import torch
import torch.distributed as dist

from configurator import UserError

EAGER = 3  # micro-steps at least before the capture, in which everything is compiled, timed and allocated


class Replayed:
    """A micro-step (train.Training.micro_step) of a model on one GPU, replayed as a graph from a step's start on.

    The graph reads its batch from tensors of its own and adds to gradients that stay where they are. The optimizer may
    set .grad to None after a step as always: then the next call puts them back, filled with zeros.
    """

    def __init__(self, micro_step, model, device):
        refuse_all_but_one_gpu(device)
        self.micro_step, self.parameters, self.device = micro_step, list(model.parameters()), device
        self.stream, self.calls = torch.cuda.Stream(device), 0
        self.graph = self.batch = self.grads = None

    def __call__(self, *batch):
        """The micro-step's loss, in a tensor that the next call may overwrite. batch: tensors and numbers."""
        given = [torch.as_tensor(value) for value in batch]
        self.batch = self.batch or [torch.empty(t.shape, dtype=t.dtype, device=self.device) for t in given]
        for own, value in zip(self.batch, given, strict=True):
            own.copy_(value, non_blocking=True)
        self.calls += 1
        begins = all(p.grad is None for p in self.parameters)  # a step
        if self.graph is None and (self.calls <= EAGER or not begins):
            return self.beside()
        if begins:
            self.attach()
        if self.graph is None:
            self.capture()
        self.graph.replay()
        return self.loss

    def beside(self):
        """The micro-step on the stream of the capture, so that what it keeps for a stream is there already."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            loss = self.micro_step(*self.batch)
        torch.cuda.current_stream().wait_stream(self.stream)
        self.used = [p for p in self.parameters if p.grad is not None]
        return loss

    def attach(self):
        """Puts the gradients back, as zeros."""
        self.grads = self.grads or [torch.empty_like(p) for p in self.used]
        torch._foreach_zero_(self.grads)
        for parameter, grad in zip(self.used, self.grads, strict=True):
            parameter.grad = grad

    def capture(self):
        gc.collect()  # a graph that is freed during the capture would end it
        self.graph = torch.cuda.CUDAGraph()
        try:  # thread_local: the loader's thread may allocate and copy meanwhile
            with torch.cuda.graph(self.graph, stream=self.stream, capture_error_mode="thread_local"):
                self.loss = self.micro_step(*self.batch)
        except RuntimeError as error:
            cause = error.__context__ or error  # where the capture then cannot be ended either
            if isinstance(cause, torch.OutOfMemoryError):
                raise cause from None
            reason = str(cause).partition("\n")[0]
            raise UserError(
                f"cuda_graph=True: the micro-step cannot be captured ({reason}); does an edit wait for the GPU, as "
                "with .item()? leave cuda_graph out, or mend it"
            ) from cause


def refuse_all_but_one_gpu(device):
    if device.type != "cuda":
        raise UserError(f"cuda_graph=True needs a CUDA device, this is {device.type}; leave it out")
    if dist.is_initialized():
        raise UserError("cuda_graph=True is for one GPU without torchrun; leave one of them out")
