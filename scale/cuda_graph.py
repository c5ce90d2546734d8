"""--cuda_graph: the host launches all kernels of train.py's micro-step as one CUDA graph.

The host needs tens of microseconds to launch a kernel. Where a micro-batch or a model is small, or
the host slow, kernels take less, and the GPU waits (https://developer.nvidia.com/blog/cuda-graphs).
"""

import contextlib
import dataclasses
import gc
import itertools
import statistics
import time
import warnings

import torch
import torch.distributed as dist

import fast
from scale import edits, parallel
from settings import conflicts
from system.errors import UserError

EAGER_STEPS = 3  # steps before the capture, in which all is compiled, timed and allocated
TRIAL = 7  # micro-steps timed with "auto", after EAGER_STEPS of them
# part of a micro-step's time beyond its launch, below which the GPU has waited for the host
AHEAD = 0.05


def choose(cfg, world, micro_step, model):
    """(GraphedMicroStep or None, rows of the start-up summary): as set, or by a trial if "auto"."""
    if cfg.cuda_graph is True:
        return GraphedMicroStep(micro_step, model, cfg.reduce_dtype), []
    found = conflicts(dataclasses.replace(cfg, cuda_graph=True), world.size)
    against = [line for line in found if "cuda_graph" in line]
    if world.device.type != "cuda":
        against.append("it needs a CUDA device")
    if against:
        return None, [("cuda graph", f"no ({against[0]})")]
    graph = GraphedMicroStep(micro_step, model, cfg.reduce_dtype)
    rows = cfg.loader_rows(world.size)  # of the smallest micro-batch
    with as_before(model):
        launched, total = graph.trial((rows, cfg.block_size), cfg.vocab_size)
    model.zero_grad()
    if cfg.precision == "fp8":
        fast.fp8.reset(model)
    torch.cuda.empty_cache()  # what the trial took of another stream's memory
    why = f"the host takes {launched * 1e3:.1f} of a micro-step's {total * 1e3:.1f} ms to launch it"
    if launched == 0:
        why = "it waits for the GPU, as with .item()"
    gpu_waits = launched > (1 - AHEAD) * total
    if any(parallel.gather_objects(gpu_waits)):
        return graph, [("cuda graph", f"yes ({why})")]
    return None, [("cuda graph", f"no ({why})")]


@contextlib.contextmanager
def as_before(model):
    """Restores a model's buffers, such as an edit's counter, at its end."""
    before = []
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            before.append((module, name, buffer, buffer.clone()))
    yield
    for module, name, buffer, value in before:
        setattr(module, name, buffer.copy_(value))


@dataclasses.dataclass
class Captured:
    """A graph of a micro-step, and the tensors that its replays write."""

    graph: torch.cuda.CUDAGraph
    sums: list  # what the micro-step returns
    grads: dict  # {parameter: gradient}


class GraphedMicroStep:
    """A micro-step on a GPU, replayed as a graph that reads its batch from tensors of its own.

    A step's first micro-step, which finds no gradients, writes them. The others add to them, by a
    graph of their own. A step whose batches have another shape than those before begins anew.
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
        self.steps = 0  # so far with batches of this shape
        self.batch = None  # [x, y], which the graphs read
        self.captured = {}  # {"writes gradients" or "adds to them": Captured}

    def __call__(self, x, y, positions=None, average=True):
        """The micro-step's sums, a list of tensors. x, y: (B, T), in a step of one shape.

        average: it is the step's last micro-step, which averages the gradients over the ranks.
        """
        if positions is not None:
            raise UserError(
                "cuda_graph=True replays positions 0 to T - 1; with others leave it out"
            )
        begins_step = all(p.grad is None for p in self.parameters)
        if begins_step:
            if self.batch is None or self.batch[0].shape != x.shape:
                self.discard_captures(x, y)
            self.refuse_changes()
            self.steps += 1
        self.fill_batch(x, y)
        if self.steps <= EAGER_STEPS:
            sums = self.run_eagerly()
        else:
            sums = self.replay("writes gradients" if begins_step else "adds to them")
        if average and dist.is_initialized():
            self.average()
        return [total.clone() for total in sums]  # the next replay overwrites them

    def discard_captures(self, x, y):
        """Makes room for batches of another shape, which have captures of their own."""
        self.batch = [torch.empty_like(t, device=self.device) for t in (x, y)]
        self.steps = 0
        if self.captured:
            self.captured = {}
            torch.cuda.empty_cache()  # the graphs' memory

    def refuse_changes(self):
        """Raises UserError for what has changed since a capture, which holds it as it was."""
        if not self.captured:
            return
        parallel.refuse_changes(self.model)
        for name in edits.changed_numbers(self.numbers):
            what = f"cuda_graph=True replays the {name} of the capture, which has changed since"
            raise UserError(f"{what}; make it a tensor that is filled in place, or leave it out")

    def fill_batch(self, x, y):
        for own, given in zip(self.batch, (x, y)):
            if own.shape != given.shape:
                shapes = f"{tuple(given.shape)} after {tuple(own.shape)}"
                what = f"cuda_graph=True needs batches of one shape in a step, not {shapes}"
                raise UserError(f"{what}; leave it out")
            own.copy_(given, non_blocking=True)

    def trial(self, shape, vocab_size):
        """(seconds in which the host launches a micro-step, seconds that it takes), as timed.

        shape: (B, T) of a batch. They are medians over consecutive micro-steps: where other
        processes start beside it, single ones took seconds. The first is 0 for a micro-step that
        waits for the GPU. The random state stays as it was.
        """
        with torch.random.fork_rng([self.device]):
            self.batch = [torch.randint(vocab_size, shape, device=self.device) for _ in range(2)]
            for _ in range(EAGER_STEPS):
                self.run_eagerly()
            waited = waits(self.run_eagerly)
            clock = [parallel.synchronize(self.device)]
            moments = [parallel.Moment(self.device)]
            for _ in range(TRIAL):
                self.run_eagerly()
                clock.append(time.perf_counter())
                moments.append(parallel.Moment(self.device))
            parallel.synchronize(self.device)
        self.batch = None
        launches = [after - before for before, after in itertools.pairwise(clock)]
        totals = [after.since(before) for before, after in itertools.pairwise(moments)]
        launched = 0 if waited else statistics.median(launches)
        return launched, statistics.median(totals)

    def run_eagerly(self):
        """Runs the micro-step on the capture's stream, whose workspaces then exist before it."""
        usual = torch.cuda.current_stream()
        self.stream.wait_stream(usual)
        with torch.cuda.stream(self.stream):
            sums = self.micro_step(*self.batch)
        usual.wait_stream(self.stream)
        return sums

    def replay(self, kind):
        """The sums of the graph of a kind, which is captured first where there is none."""
        if kind not in self.captured:
            self.numbers = edits.numbers(self.model)
            graph, sums = self.capture()
            grads = {p: p.grad for p in self.parameters if p.grad is not None}
            self.captured[kind] = Captured(graph, sums, grads)
        captured = self.captured[kind]
        captured.graph.replay()
        for parameter, grad in captured.grads.items():
            parameter.grad = grad
        return captured.sums

    def capture(self):
        """(the graph, its sums); nothing is computed yet. Both graphs use the same memory."""
        gc.collect()  # a graph that is freed during the capture would end it
        graph = torch.cuda.CUDAGraph()
        pool = next((other.graph.pool() for other in self.captured.values()), None)
        try:  # thread_local: the loader's thread may allocate and copy meanwhile
            with torch.cuda.graph(
                graph, pool=pool, stream=self.stream, capture_error_mode="thread_local"
            ):
                sums = self.micro_step(*self.batch)
        except RuntimeError as error:
            cause = error.__context__ or error  # where the capture then cannot be ended either
            if isinstance(cause, torch.OutOfMemoryError):
                raise cause from None
            why = str(cause).partition("\n")[0]
            hint = "does an edit wait for the GPU, as with .item()?"
            raise UserError(
                f"cuda_graph=True: the micro-step cannot be captured ({why}); {hint}"
            ) from cause
        return graph, sums

    def average(self):
        """The gradients' mean over the ranks, as DDP computes it, in one tensor for each dtype."""
        grads = [p.grad for p in self.parameters if p.grad is not None]
        for dtype in dict.fromkeys(g.dtype for g in grads):
            own = [g for g in grads if g.dtype == dtype]
            sizes = [g.numel() for g in own]
            flat = own[0].new_empty(sum(sizes), dtype=torch.bfloat16 if self.in_bf16 else dtype)
            parts = [part.view_as(g) for part, g in zip(flat.split(sizes), own)]
            torch._foreach_copy_(parts, own)
            dist.all_reduce(flat.div_(dist.get_world_size()))
            torch._foreach_copy_(own, parts)


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
        raise UserError(f"cuda_graph=True needs a CUDA device, this is {device.type}; leave it out")
    return torch.cuda.Stream(device)
