"""The patches of experiments/: each in every mode equals itself in one process, or is refused there."""

import importlib

from experiments import patch as modes
from experiments.inside import ROOT
from experiments.losses import each, mean
from experiments.patch import ALL, UNPATCHED, Patch

FOLDER = ROOT / "experiments"
NO_CORE = {modes.SELECTIVE: "model.py's block has none; try --remat=block"}
OTHER_CORE = {modes.ATTENTION: "this remat wraps attn.core, and model.py's block has another"}
# ranks, and micro-steps, draw other numbers
DRAWN = (modes.RESUMED, modes.BLOCK, modes.SELECTIVE, modes.COMPILED, modes.SAMPLED, modes.EXPORTED)
OVER_RANKS = (modes.RESUMED_DDP, modes.RESUMED_FSDP)


def shelved(name, what, **more):
    """A Patch of experiments/NAME.patch."""
    return Patch(
        name, what, more.pop("edits", {}), more.pop("modes", ALL), file=FOLDER / f"{name}.patch", **more
    )


def with_z(model, x, y):
    loss = mean(each(model, x, y), y)
    if not model.training:
        return loss, {}
    z = mean(model.logits(x).logsumexp(-1) ** 2, y)
    return loss + 1e-2 * z, {"z": z}


def two_ahead(model, x, y):
    loss = mean(each(model, x, y), y)
    if not model.training:
        return loss, {}
    hidden = model.norm(model.ahead(model.hidden(x), x, None))
    log_p = model.head.logits(hidden)[:, :-1].log_softmax(-1)
    found = -log_p.gather(-1, y[:, 1:].clamp(min=0).unsqueeze(-1)).squeeze(-1) * (
        (y[:, 1:] >= 0) & (y[:, :-1] >= 0)
    )
    second = found.sum() / (y >= 0).sum()
    return loss + 0.3 * second, {"second": second}


def balanced(model, x, y):
    hidden, uneven = model.hidden(x)
    log_p = model.head.logits(hidden).log_softmax(-1)
    loss = mean(-log_p.gather(-1, y.clamp(min=0).unsqueeze(-1)).squeeze(-1), y)
    if not model.training:
        return loss, {}
    uneven = mean(uneven.unsqueeze(1).expand(y.shape), y)
    return loss + 0.01 * uneven, {"uneven": uneven}


def distilled(cfg):
    from run import checkpoint

    tensors, shape, _ = checkpoint.open_model(cfg.teacher)
    teacher = checkpoint.model_of(tensors, shape, "cpu")

    def loss(model, x, y):
        usual = mean(each(model, x, y), y)
        if not model.training:
            return usual, {}
        q = teacher.logits(x).detach().softmax(-1)
        divergence = mean((q * (q.log() - model.logits(x).log_softmax(-1))).sum(-1), y)
        return 0.5 * (usual + divergence), {"divergence": divergence}

    return loss


def own_optimizer(model, cfg):
    return importlib.import_module("optim").make_optimizer(model, cfg)


def averaged(log):
    val, average = ({x["step"]: x["loss"] for x in log if x["kind"] == kind} for kind in ("val", "average"))
    wrong = [
        step for step, loss in average.items() if (loss != val[step] if step == 0 else loss <= val[step])
    ]
    return f"averages {average} beside {val}" if wrong or 6 not in average else None


PATCHES = [
    shelved(
        "sliding_window",
        "two of three blocks see the last tokens only",
        edits={"model.py": [("WINDOW = 64", "WINDOW = 8")]},
    ),
    shelved("looped_model", "the inner blocks run twice", settings=dict(n_layer=3)),
    shelved(
        "multi_token_prediction",
        "a block predicts the token after the next",
        loss=two_ahead,
        extras=("second",),
    ),
    shelved("mixture_of_experts", "one of four MLPs for each token", loss=balanced, extras=("uneven",)),
    shelved(
        "masked_diffusion", "a random share of each row is masked and predicted", modes=(*DRAWN, *OVER_RANKS)
    ),
    shelved(
        "lora",
        "two narrow factors beside each of attention's layers, which are frozen",
        settings=dict(lr=0.03),
    ),
    shelved("ema", "a running mean of the weights", unchanged=True, also=averaged),
    shelved(
        "schedule_free", "an optimizer with two forms of the weights", adds=dict(optimizer="schedule_free")
    ),
    shelved("soap", "an optimizer in eigenbases", adds=dict(optimizer="soap"), optimizer=own_optimizer),
    shelved("z_loss", "", edits={"model.py": [("1e-4 * z", "1e-2 * z")]}, loss=with_z, extras=("z",)),
    shelved("sequence_warmup", "shorter rows at first", length=lambda step: (8, 16, 32)[min(step, 2)]),
    shelved("distillation", "", adds=dict(teacher=UNPATCHED), make_loss=distilled, extras=("divergence",)),
    shelved("mup", "rates by width"),
    shelved("byte_patches", "", settings=dict(n_layer=3)),
]
