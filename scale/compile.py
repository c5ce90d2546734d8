"""torch.compile, block by block."""

import torch

SHAPES = 64  # recompilations allowed: training, validation, HellaSwag and sampling each have their own shapes


def compile_model(model, sharded=False):
    """Compiles a model in place, so that state-dict keys keep their names; all blocks share one graph.

    DDP reduces a block's gradients when its backward ends. optimize_ddp would cut its graph where a bucket
    ends: nothing is fused across the cut, and with torch 2.11 remat=selective then keeps everything.
    """
    torch._dynamo.config.recompile_limit = SHAPES
    torch._dynamo.config.optimize_ddp = False
    if not sharded:  # FSDP2 gathers the embedding in a hook, which a compiled function would not call
        model.embed = torch.compile(model.embed)
    for block in model.blocks:
        block.compile()
    model.head.compile()
