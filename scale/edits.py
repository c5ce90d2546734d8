"""Finds what an edited model.py would lose: state that no checkpoint holds."""

import torch


def numbers(model):
    """{name: (the module's __dict__, its key there, the value)} of attributes that are numbers."""
    found = {}
    for prefix, module in model.named_modules():
        for name, value in vars(module).items():
            if type(value) in (int, float):
                found[f"{prefix}.{name}".removeprefix(".")] = vars(module), name, value
    return found


def changed_numbers(before):
    """Names of `numbers` that have other values now."""
    found = []
    for name, (attributes, own, value) in before.items():
        now = attributes.get(own)
        if type(now) in (int, float) and now != value:
            found.append(name)
    return found


def versions(model):
    """{name: (a buffer, how often it was changed so far)} of a model's buffers."""
    return {name: (buffer, buffer._version) for name, buffer in model.named_buffers()}


def changed_buffers(model, before):
    """Names of the buffers that were changed or replaced since `before`, their `versions`."""
    found = []
    for name, buffer in model.named_buffers():
        earlier, version = before.get(name, (None, 0))
        if buffer is not earlier or buffer._version != version:
            found.append(name)
    return found


@torch.no_grad()
def read_from_before(model):
    """Names of the attributes with tensors that one forward leaves and the next one reads."""
    kept = {}
    for prefix, module in model.named_modules():
        for name, value in [*vars(module).items()]:
            if torch.is_tensor(value):
                kept[f"{prefix}.{name}".removeprefix(".")] = value
                setattr(module, name, object())  # with which nothing can be computed
    if kept:
        tokens = torch.zeros(1, model.cfg.block_size, dtype=torch.long, device="meta")
        try:
            model(tokens, tokens)
        except Exception:  # of any type
            return [*kept]
    return []
