"""DDP around a model: each rank has all of it, and gradients are averaged."""

import inspect
import warnings

import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel


def wrap(model, cfg, world, unused):
    """The model as the loop calls it: in DDP if nothing else averages gradients.

    unused: a micro-step may leave parameters without a gradient.
    """
    if not dist.is_initialized() or cfg.parallel != "ddp":
        return model
    on_gpu = world.device.type == "cuda"
    in_bf16 = cfg.reduce_dtype == "bf16" and cfg.weights == "fp32"
    # the argument's newer name is not in torch 2.11
    warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated")
    ddp = DDP(
        model,
        device_ids=[world.device] if on_gpu else None,
        gradient_as_bucket_view=True,
        broadcast_buffers=False,
        find_unused_parameters=unused,
    )
    if in_bf16:
        ddp.register_comm_hook(None, bf16_compress_hook)
    return ddp


class DDP(DistributedDataParallel):
    """DDP with the model's methods and parts: self.model.logits(...) is right in a training step.

    So is state.model.logits(...) beside such a call; by itself its gradients would not be averaged.
    """

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
        part = getattr(self.module, name)
        if not inspect.ismethod(part):
            return part

        def call(*args, **options):
            self.method = part
            return self(*args, **options)

        return call

    def _run_ddp_forward(self, *args, **options):
        method = self.__dict__.pop("method", None)
        if method is None:
            return super()._run_ddp_forward(*args, **options)
        with self._inside_ddp_forward():
            return method(*args, **options)
