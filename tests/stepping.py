"""A step of train.Training as train.py's loop takes it, for tests that train without the loop."""

import optim


def take_step(job, next_batch, lr):
    """(this rank's mean loss over its targets, the norm of the gradients over all ranks)"""
    optim.set_learning_rate(job.state.optimizer, lr)
    totals = job.accumulate(next_batch)
    norm = job.normalize_and_clip(totals)
    loss = totals[0] * job.rank_step_tokens / totals[1].clamp(min=1)
    job.update()
    return loss, norm
