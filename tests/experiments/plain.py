"""A plain training loop over whole batches.

It knows no micro-steps, ranks, counts, masks' effect on factors, checkpoints or graphs. It
takes from the sources only the model, its initial weights, the groups of parameters, and the
schedule.
"""

import itertools

import numpy as np
import torch

HEADER_BYTES = 1024


class Data:
    """A split's rows, read without the loader; targets without loss in a mask are -100."""

    def __init__(self, folder, split, length):
        paths = sorted(folder.glob(f"*_{split}_*.bin"))
        tokens = [np.fromfile(path, "<u2", offset=HEADER_BYTES).astype(np.int64) for path in paths]
        masks = [np.ones(len(t), bool) for t in tokens]
        for i, path in enumerate(paths):
            if path.with_suffix(".mask").exists():
                bits = np.fromfile(path.with_suffix(".mask"), np.uint8)
                masks[i] = np.unpackbits(bits, bitorder="little")[: len(tokens[i])].astype(bool)
        self.tokens, self.loss, self.length = np.concatenate(tokens), np.concatenate(masks), length

    def rows(self, first, count):
        """(x, y), each (count, length)."""
        at = (first + np.arange(count))[:, None] * self.length + np.arange(self.length)
        y = np.where(self.loss[at + 1], self.tokens[at + 1], -100)
        return torch.from_numpy(self.tokens[at]), torch.from_numpy(y)


def train(patch, cfg, folder):
    """What a run of the patch is compared with, {name: values}.

    "losses", "val": {step: loss}; "extras": {step: {name: value}}; "moments": {parameter: first
    moment}.
    """
    import model as models
    import optim

    data, val = Data(folder, "train", cfg.block_size), Data(folder, "val", cfg.block_size)
    rows = patch.data or data.rows
    loss_of = patch.make_loss(cfg) if patch.make_loss else patch.loss
    model = models.build(cfg, torch.device("cpu"), cfg.seed)
    if patch.optimizer:
        optimizer = patch.optimizer(model, cfg)
    else:
        options = dict(betas=(cfg.beta1, cfg.beta2), eps=1e-8)
        optimizer = torch.optim.AdamW(optim.param_groups(model, cfg), **options)
    two_forms = hasattr(optimizer, "average")  # of weights, as in Schedule-Free
    found = dict(losses={}, val={}, extras={}, moments={})
    first = 0
    for step in range(cfg.max_steps + 1):
        if two_forms:
            optimizer.average(True)
        if cfg.eval_interval and step % cfg.eval_interval == 0:
            model.eval()
            with torch.no_grad():
                loss, _ = loss_of(model, *val.rows(0, cfg.eval_tokens // cfg.block_size))
            found["val"][step] = loss.item()
        if step == cfg.max_steps:
            break
        model.train()
        if two_forms:
            optimizer.average(False)
        x, y = rows(first, patch.rows(step))
        first += len(x)
        T = patch.length(step)
        loss, extras = loss_of(model, x.reshape(-1, T), y.reshape(-1, T))
        optimizer.zero_grad()
        loss.backward()
        parameters = [p for p in model.parameters() if p.grad is not None]
        torch.nn.utils.clip_grad_norm_(parameters, cfg.clip)
        lr = patch.lr(step) if patch.lr else optim.learning_rate(step, step / cfg.max_steps, cfg)
        for group in optimizer.param_groups:
            group["lr"] = lr * group.get("factor", 1.0)
        optimizer.step()
        found["losses"][step + 1] = loss.item()
        found["extras"][step + 1] = {name: float(value) for name, value in extras.items()}
    names = {p: name for name, p in model.named_parameters()}
    states = [part.state for part in optim.parts_of(optimizer)]
    for p, state in itertools.chain(*(part.items() for part in states)):
        for moment in {"exp_avg", "momentum"} & state.keys():
            found["moments"][names[p]] = state[moment].numpy()
    return found
