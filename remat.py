"""Rematerialisation: blocks that keep little of their forward and compute it again in the backward.

--remat=block      keeps what goes into a block alone; costs another forward of it (https://arxiv.org/abs/1604.06174)
--remat=selective  keeps the outputs of attention and of the matmuls that are narrow for what they cost; the wide ones,
                   the norms and the activations are computed again (https://arxiv.org/abs/2205.05198)
--remat_every=3    does so in every third block only
"""

import functools

from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

ATTENTION = ("scaled_dot_product", "flash_attention", "flex_attention")
PRODUCTS = {
    "aten::mm": 0,
    "aten::addmm": 1,
    "pretrain::product": 0,
    "pretrain::product8": 0,
}  # place of the left operand
WIDE = 2  # a product more than this many times as wide as its operand is not kept: MLP's first, mostly


def apply(model, kind, every=1):
    """Puts it in place in every `every`-th block, from the first; numbers do not change."""
    for block in model.blocks[::every]:
        block.__class__ = rematerialised(type(block), kind, block.dropout.p > 0)


@functools.cache
def rematerialised(block_class, kind, random):
    """The class of such a block; one class for all, so that they share a compiled graph."""
    options = dict(use_reentrant=False, preserve_rng_state=random)
    if kind == "selective":
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, keep)

    class Rematerialised(block_class):
        again = block_class.forward

        def forward(self, x):
            return checkpoint(self.again, x, **options)

    return Rematerialised


def keep(context, op, *args, **kwargs):
    """Whether the output of an operation is kept."""
    name = op.name().split(".")[0]
    if any(part in name for part in ATTENTION):
        return CheckpointPolicy.MUST_SAVE
    if name in PRODUCTS:
        left, right = args[PRODUCTS[name] : PRODUCTS[name] + 2]
        return CheckpointPolicy.MUST_SAVE if right.size(1) <= WIDE * left.size(1) else CheckpointPolicy.PREFER_RECOMPUTE
    return CheckpointPolicy.PREFER_RECOMPUTE
