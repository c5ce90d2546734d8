"""--cuda_graph: the host launches all kernels of train.py's micro-step as one CUDA graph.

The host needs tens of microseconds to launch a kernel. Where a micro-batch or a model is small, or
the host slow, kernels take less, and the GPU waits (https://developer.nvidia.com/blog/cuda-graphs).
"""

import gc
import warnings

import torch
import torch.distributed as dist
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from scale import parallel
from system.errors import UserError, brief, listed

EAGER_STEPS = 3  # steps before the capture, in which all is compiled and allocated


class GraphedMicroStep:
    """A micro-step on a GPU, replayed as a graph that reads its batch from tensors of its own.

    A step's first micro-step, which finds no gradients, writes them. The others add to them, by a
    graph of their own.
    """

    def __init__(self, micro_step, model, reduce_dtype):
        self.micro_step = micro_step
        # the largest first, so that in `average` small ones do not misalign others
        self.parameters = sorted(model.parameters(), key=torch.numel, reverse=True)
        # whether gradients are summed over ranks in bf16, else in their own dtype
        self.in_bf16 = reduce_dtype == "bf16"
        self.model = model
        self.numbers = {}  # attributes of the model, which a capture holds as constants
        self.device = self.parameters[0].device
        self.stream = stream(self.device)
        self.steps = 0  # so far
        self.batch = None  # the tensors of a micro-batch, which the graphs read
        self.captured = {}  # {"writes gradients" or "adds to them": what `capture` returns}
        self.pool = None  # the memory of all graphs

    def __call__(self, *batch, average=True):
        """The micro-step's sums, a list of tensors. batch: x, y and perhaps positions.

        average: it is the step's last micro-step, which averages the gradients over the ranks.
        """
        begins_step = all(p.grad is None for p in self.parameters)
        if begins_step:
            self.refuse_changes()
            self.steps += 1
        self.fill_batch([tensor for tensor in batch if tensor is not None])
        if self.steps <= EAGER_STEPS:
            sums = self.launch()
        else:
            sums = self.replay("writes gradients" if begins_step else "adds to them")
        if average and dist.is_initialized():
            self.average()
        return [total.clone() for total in sums]  # the next replay overwrites them

    def refuse_changes(self):
        """Raises UserError for what has changed since a capture, which holds it as it was."""
        if not self.captured:
            return
        parallel.refuse_changes(self.model)
        changed = numbers(self.model).items() - self.numbers.items()
        if changed:
            what = f"replays the {listed(sorted(dict(changed)))} of the capture, changed since"
            advice = "make it a tensor that is filled in place, or leave it out"
            raise UserError(f"cuda_graph=True {what}; {advice}")

    def fill_batch(self, batch):
        if self.batch is None:
            self.batch = [torch.empty_like(tensor, device=self.device) for tensor in batch]
        for own, given in zip(self.batch, batch, strict=True):
            if own.shape != given.shape:
                shapes = f"{tuple(given.shape)} after {tuple(own.shape)}"
                what = f"cuda_graph=True needs batches of one shape, not {shapes}"
                raise UserError(f"{what}; leave it out")
            own.copy_(given, non_blocking=True)

    def launch(self):
        """Runs the micro-step on the capture's stream, whose workspaces then exist before it."""
        usual = torch.cuda.current_stream()
        self.stream.wait_stream(usual)
        with torch.cuda.stream(self.stream):
            sums = self.micro_step(*self.batch)
        usual.wait_stream(self.stream)
        return sums

    def replay(self, kind):
        """The sums of the graph of a kind, which is captured first where there is none."""
        launched = None
        if not self.captured:  # later the graph holds the memory that launched kernels would need
            launched = self.launch_apart()
        if kind not in self.captured:
            self.captured[kind] = self.capture()
        graph, sums, grads = self.captured[kind]
        graph.replay()
        for parameter, grad in grads.items():
            parameter.grad = grad
        if launched is not None:
            replayed = torch.stack(sums)
            if not torch.allclose(launched, replayed, rtol=1e-4, equal_nan=True):
                found = f"{replayed.tolist()} instead of {launched.tolist()}"
                what = f"a replay gives other sums than the launched micro-step, {found}"
                hint = "does model.py count, or draw from Python's random numbers? leave it out"
                raise UserError(f"cuda_graph=True: {what}; {hint}")
        return sums

    def launch_apart(self):
        """The sums of a launched micro-step; model and generators stay as they were."""
        buffers = list(self.model.buffers())
        before = [buffer.clone() for buffer in buffers]
        with torch.random.fork_rng([self.device]):
            sums = torch.stack(self.launch())
        for buffer, value in zip(buffers, before):
            buffer.copy_(value)
        self.model.zero_grad()
        return sums

    def capture(self):
        """(graph, sums, {parameter: gradient}), of which nothing is computed yet."""
        gc.collect()  # a graph that is freed during the capture would end it
        self.numbers = numbers(self.model)
        graph = torch.cuda.CUDAGraph()
        try:  # thread_local: the loader's thread may allocate and copy meanwhile
            with torch.cuda.graph(
                graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"
            ):
                sums = self.micro_step(*self.batch)
        except RuntimeError as error:
            cause = error.__context__ or error  # where the capture then cannot be ended either
            if isinstance(cause, torch.OutOfMemoryError):
                raise cause from None
            hint = "does an edit wait for the GPU, as with .item()?"
            raise UserError(
                f"cuda_graph=True: the micro-step cannot be captured ({brief(cause)}); {hint}"
            ) from cause
        grads = {p: p.grad for p in self.parameters if p.grad is not None}
        self.pool = graph.pool()
        return graph, sums, grads

    def average(self):
        """The gradients' mean over the ranks, as DDP computes it, in one tensor."""
        grads = [p.grad for p in self.parameters if p.grad is not None]
        flat = _flatten_dense_tensors(grads)
        if self.in_bf16:
            flat = flat.bfloat16()
        dist.all_reduce(flat.div_(dist.get_world_size()))
        torch._foreach_copy_(grads, _unflatten_dense_tensors(flat, grads))


def numbers(model):
    """{name: value} of the attributes of its modules that are numbers."""
    found = {}
    for prefix, module in model.named_modules():
        for name, value in vars(module).items():
            if type(value) in (int, float):
                found[f"{prefix}.{name}".removeprefix(".")] = value
    return found


def waits(function, *arguments):
    """Why a call waits for the GPU, or "".

    A capture of such a call would fail, and spoil the random numbers.
    """
    with warnings.catch_warnings(action="ignore"):  # that this mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        function(*arguments)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        return str(error)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return ""


def stream(device):
    """The stream of the capture and of the steps before it.

    What adds to gradients runs on the stream of the first forward.
    """
    if device.type != "cuda":
        what = f"cuda_graph=True needs a CUDA device, this is {device.type}"
        raise UserError(f"{what}; try --cuda_graph=False")
    return torch.cuda.Stream(device)
