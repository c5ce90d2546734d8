"""Whether an edit mixes tokens where --context_parallel and --document_mask would not know of it.

Tokens may mix in the cores of attention, which these two wrap, and nowhere else. So an edit is
tried with cores that leave each token to itself: a row in parts must then be what it is as a whole,
and what comes before a document must not change its loss. The model is a narrow copy of the same
code, in float32 and with random weights, since initial weights may be zero.
"""

import contextlib
import dataclasses
import functools

import torch

import model as models
from scale import context_parallel, generators, parallel
from system.errors import UserError

PART = 16  # tokens in each part of a row


def check(model, cfg, world, autocast, eot=None):
    """Raises UserError for an edit that would silently be wrong. All ranks call it.

    eot: the id that separates documents; None: there is none.
    """
    if cfg.document_mask and eot is not None:
        if found_by(crosses_documents, model, cfg, world, autocast, eot):
            why = "model.py mixes tokens outside of attn.core, so that they cross documents"
            raise UserError(f"document_mask=True: {why}; leave it out, or mix them in attn.core")
    if cfg.context_parallel > 1:
        if found_by(parts_differ, model, cfg, world, autocast, eot):
            why = "model.py mixes tokens outside of attn.core, or in its loss"
            raise UserError(
                f"context_parallel={cfg.context_parallel} divides rows among ranks, and {why}"
            )


@torch.no_grad()
def found_by(trial, model, cfg, world, autocast, eot):
    """What trial(model, its settings, device, eot) finds on any rank of a narrow copy.

    Where an edit cannot be built or run that narrow, it is a trial of the run's own model.
    """
    precision = torch.get_float32_matmul_precision()
    try:
        # not TF32, whose rounding would hide what mixes tokens by little
        torch.set_float32_matmul_precision("highest")
        small, shape = narrow_copy(cfg, world)
        small.train()  # what is added to the loss in training alone counts too
        with tokens_apart(small, cfg), generators.preserved(world.device):
            found = trial(small, shape, world.device, eot)
    except UserError:
        raise
    except Exception:  # of any type: an edit that depends on a width, say
        torch.set_float32_matmul_precision(precision)
        model.eval()
        with (
            tokens_apart(model, cfg),
            generators.preserved(world.device),
            autocast,
            torch.compiler.set_stance("force_eager"),
        ):
            found = trial(model, cfg, world.device, eot)
        model.train()
        parallel.free_gathered(model)
    finally:
        torch.set_float32_matmul_precision(precision)
    return any(parallel.gather_objects(found))


def narrow_copy(cfg, world):
    """(model, its settings): cfg's depth and heads, of 8 channels each, with random weights."""
    T = min(cfg.block_size, PART * max(2, cfg.context_parallel))
    changes = dict(n_embd=8 * cfg.n_head, head_dim=8, n_hidden=16 * cfg.n_head, block_size=T)
    changes |= dict(attention="math", dropout=0.0, precision="fp32")
    shape = dataclasses.replace(cfg, **changes)
    with generators.preserved(world.device):
        small = models.build(shape, world.device, cfg.seed)
        for parameter in small.parameters():
            noise = torch.randn_like(parameter)
            if parameter.dim() > 1:
                parameter.copy_(noise / parameter.size(-1) ** 0.5)
            else:
                parameter.add_(0.1 * noise)
    return small, shape


@contextlib.contextmanager
def tokens_apart(model, cfg):
    """Within it cores mix no tokens.

    With context parallelism a core is asked first whether it depends on which heads it is given,
    since a rank has some of them.
    """
    ranks = context_parallel.ContextRanks(group=None, rank=0, size=cfg.context_parallel)
    attentions = context_parallel.attentions(model, "a check of tokens", any_core=True)
    before = {module: module.core for module in attentions}
    for module in attentions:
        divided = context_parallel.Ulysses(context_parallel.innermost(module.core), ranks)
        module.core = functools.partial(attention_apart, divided)
    try:
        yield
    finally:
        for module, core in before.items():
            module.core = core


def attention_apart(divided, q, k, v, *options, **named):
    """In place of attn.core: of each token its own values, and a mean of its query and key.

    divided: the real core in a context_parallel.Ulysses, which tries it on each rank's heads. q:
    (B, H, T, D); k, v: (B, H_kv, T, D) -> (B, H, T, D).
    """
    N = divided.ranks.size
    if N > 1 and not divided.is_head_free(q, k, v, *options, **named):
        why = "attn.core depends on which heads it is given: give it a parameter heads=slice(None)"
        raise UserError(f"context_parallel={N} gives each rank some heads, and {why}")
    # RoPE turns q and k by their positions, which a product of the two would not show
    own = v + k.mean(-1, keepdim=True)
    return own.repeat_interleave(q.size(1) // k.size(1), dim=1) + q.mean(-1, keepdim=True)


def random_rows(cfg, tokens, device):
    """(2, tokens + 1) random ids, the same on all ranks."""
    draw = torch.Generator().manual_seed(cfg.seed)
    return torch.randint(cfg.vocab_size, (2, tokens + 1), generator=draw).to(device)


def parts_differ(model, cfg, device, eot):
    """Whether logits or losses of as many parts as share a row differ from those of the whole.

    A forward that draws random numbers cannot be compared, and counts as the same.
    """
    T = min(cfg.block_size, PART * cfg.context_parallel)
    rows = random_rows(cfg, T, device)
    if eot is not None:  # an edit may count from it on
        rows = torch.where(rows == eot, (rows + 1) % cfg.vocab_size, rows)
        rows[:, 2 :: PART // 2] = eot
    x, y = rows[:, :-1], rows[:, 1:]
    loss, count, _ = model(x, y)
    again, _, _ = model(x, y)
    expected = model.logits(x)
    nats = targets = 0
    logits = []
    for positions in torch.arange(T, device=device).chunk(cfg.context_parallel):
        part, part_count, _ = model(x[:, positions], y[:, positions], positions)
        nats += part * part_count
        targets += part_count
        logits.append(model.logits(x[:, positions], positions=positions))
    # how far rounding may move logits, in their standard deviations; a loss moves 20 times less.
    # In float32 32 blocks moved neither by 1e-7.
    bound = {"fp32": 1e-4, "tf32": 0.02}.get(cfg.precision, 0.1)
    # not true of NaN, as of a mean over no tokens
    logits_agree = (torch.cat(logits, 1) - expected).std() <= bound * expected.std()
    losses_agree = abs(nats / targets - loss) <= bound / 20 * abs(loss)
    counts_agree = abs(targets - count) <= 0.5
    return bool(loss == again) and not bool(logits_agree and losses_agree and counts_agree)


def crosses_documents(model, cfg, device, eot):
    """Whether ids before a document change its loss; False if the forward draws random numbers."""
    T = min(cfg.block_size, 2 * PART)
    begin = T // 2 | 1  # odd: an edit may merge each two or four tokens
    first, second = random_rows(cfg, T, device)
    second[begin:] = first[begin:]
    rows = torch.stack([first, second, first])
    rows[:, begin] = eot
    targets = rows[:, 1:].clone()
    targets[:, :begin] = -100
    loss, other, again = (model(row[None, :-1], y[None])[0] for row, y in zip(rows, targets))
    # the same shapes give the same bits, but in fp8, whose scales are of whole tensors
    most = 1e-3 if cfg.precision == "fp8" else 1e-6
    return bool(abs(other - loss) > most * abs(loss) and loss == again)
