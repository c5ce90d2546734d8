"""--cuda_graph: the host launches a micro-step's kernels together, as one CUDA graph.

The host needs tens of microseconds for each kernel that it launches. Where a micro-batch or a model is small, or the
host slow, that is longer than the kernels take, and the GPU waits. A graph is captured once and launched as one
(https://developer.nvidia.com/blog/cuda-graphs); what is captured is the micro-step of train.py as it stands.
"""

import torch
import torch.distributed as dist

from configurator import UserError

EAGER = 3  # micro-steps before the capture, in which everything is compiled, timed and allocated


class Replayed:
    """A micro-step (train.Training.micro_step) of a model on one GPU; from the fourth call on a graph is replayed.

    The graph reads its batch from tensors of its own and adds to gradients that stay where they are. The optimizer may
    set .grad to None after a step as always: then the next call puts them back, filled with zeros.
    """

    def __init__(self, micro_step, model, device):
        if device.type != "cuda":
            raise UserError(f"cuda_graph=True needs a CUDA device, this is {device.type}; leave it out")
        if dist.is_initialized():
            raise UserError("cuda_graph=True is for one GPU without torchrun; leave one of them out")
        self.micro_step, self.parameters = micro_step, list(model.parameters())
        self.stream, self.graph, self.calls = torch.cuda.Stream(device), None, 0

    def __call__(self, *batch):
        """The micro-step's loss, in a tensor that the next call overwrites. batch: tensors and numbers."""
        self.calls += 1
        if self.calls <= EAGER:
            return self.beside(batch)
        if self.graph is None:
            self.capture(batch)
        if self.used[0].grad is None:  # a step's first micro-step
            torch._foreach_zero_(self.grads)
            self.attach()
        for own, given in zip(self.batch, batch, strict=True):
            own.copy_(given) if torch.is_tensor(given) else own.fill_(given)
        self.graph.replay()
        return self.loss

    def beside(self, batch):
        """The micro-step on the stream of the capture, so that what it keeps for a stream is there already."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            loss = self.micro_step(*batch)
        torch.cuda.current_stream().wait_stream(self.stream)
        self.used = [p for p in self.parameters if p.grad is not None]
        return loss

    def capture(self, batch):
        self.batch = [torch.empty_like(t) if torch.is_tensor(t) else torch.zeros((), device="cuda") for t in batch]
        self.grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.used]
        self.attach()
        self.graph = torch.cuda.CUDAGraph()
        try:  # thread_local: the loader's thread may allocate and copy meanwhile
            with torch.cuda.graph(self.graph, stream=self.stream, capture_error_mode="thread_local"):
                self.loss = self.micro_step(*self.batch)
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise UserError(
                f"cuda_graph=True: the micro-step cannot be captured ({reason}); does an edit wait for the GPU, as "
                "with .item()? leave cuda_graph out, or mend it"
            ) from error

    def attach(self):
        for parameter, grad in zip(self.used, self.grads, strict=True):
            parameter.grad = grad
