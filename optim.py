"""Parameter groups, the optimizer, and learning-rate schedules as pure functions of the step."""

import math

import torch

from configurator import UserError
from scale import adam8


def param_groups(model, weight_decay):
    """Two AdamW groups: tensors of two and more dimensions (matrices, embeddings) decay; biases and norms do not."""
    params = [p for p in model.parameters() if p.requires_grad]
    decayed = [p for p in params if p.dim() >= 2]
    others = [p for p in params if p.dim() < 2]
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]


def make_optimizer(model, cfg):
    """AdamW (https://arxiv.org/abs/1711.05101): PyTorch's, fused on CUDA and the CPU, or adamw8bit."""
    fused = next(model.parameters()).device.type in ("cuda", "cpu")
    if not fused and cfg.optimizer == "adamw" and cfg.max_skipped_steps:
        raise UserError("max_skipped_steps needs PyTorch's fused AdamW, which this device does not have; leave it at 0")
    groups = param_groups(model, cfg.weight_decay)
    options = dict(lr=cfg.lr, betas=(cfg.beta1, cfg.beta2), eps=cfg.adam_eps)
    if cfg.optimizer == "adamw8bit":
        return adam8.AdamW8bit(groups, **options, seed=cfg.seed)
    return torch.optim.AdamW(groups, **options, fused=fused)


def warmup_steps(cfg):
    """Number of warm-up steps: cfg.warmup_tokens in steps, rounded up, if it is set, else cfg.warmup_steps."""
    return cfg.warmup_steps if cfg.warmup_tokens is None else math.ceil(cfg.warmup_tokens / cfg.batch_tokens)


def learning_rate(step, cfg):
    """Learning rate of `step`, counted from 0: linear warm-up, then cfg.schedule to lr * min_lr_ratio at max_steps.

    cosine: half a cosine (https://arxiv.org/abs/1608.03983). wsd: constant, then linear over the last cooldown_fraction
    of the run (https://arxiv.org/abs/2404.06395). constant: no decay.
    """
    warmup, low = warmup_steps(cfg), cfg.lr * cfg.min_lr_ratio
    if step < warmup:
        return cfg.lr * (step + 1) / warmup
    if cfg.schedule == "constant":
        return cfg.lr
    if cfg.schedule == "cosine":
        progress = min(1.0, (step - warmup) / max(1, cfg.max_steps - warmup))
        return low + (cfg.lr - low) * 0.5 * (1 + math.cos(math.pi * progress))
    cooldown = cfg.cooldown_fraction * cfg.max_steps
    left = max(0.0, cfg.max_steps - step) / max(1.0, cooldown)
    return low + (cfg.lr - low) * min(1.0, left)


def set_learning_rate(optimizer, lr):
    for group in optimizer.param_groups:
        group["lr"] = lr
