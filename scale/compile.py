"""torch.compile, block by block."""

import torch


def compile_model(model, sharded=False):
    """Compiles a model in place, so that state-dict keys keep their names; all blocks share one graph.

    optimize_ddp would cut a block's graph where a bucket ends; remat=selective would keep all (torch 2.11).
    """
    torch._dynamo.config.recompile_limit = 64  # training, validation and HellaSwag have their own shapes
    torch._dynamo.config.optimize_ddp = False
    if not sharded:  # FSDP2 gathers the embedding in a hook, which a compiled function would not call
        model.embed = torch.compile(model.embed)
    for block in model.blocks:
        block.compile()
    model.head.compile()
