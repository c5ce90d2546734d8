"""The patches of experiments/: in each mode they equal a run in one process, or are refused."""

import importlib

from experiments import patch as modes
from experiments.inside import ROOT
from experiments.losses import HAS_MORE, each, mean
from experiments.patch import ALL, UNPATCHED, Patch

FOLDER = ROOT / "experiments"
NO_CORE = {modes.SELECTIVE: "model.py's block has none; try --remat=block"}
# ranks, and micro-steps, draw other numbers
DRAWN = (
    modes.RESUMED,
    modes.BLOCK,
    modes.SELECTIVE,
    modes.ATTENTION,
    modes.COMPILED,
    modes.SAMPLED,
)
DRAWN += (modes.EXPORTED, modes.CONTEXT, modes.RESUMED_DDP, modes.RESUMED_FSDP)


# without states of its own a patch resumes over ranks as it does in one process
STATELESS = tuple(mode for mode in ALL if mode not in (modes.RESUMED_DDP, modes.RESUMED_FSDP))


def shelved(name, what, edits=None, modes=STATELESS, **more):
    """A Patch of experiments/NAME.patch; edits: of what it has put there."""
    return Patch(name, what, edits or {}, modes, file=FOLDER / f"{name}.patch", **more)


def within_documents(name):
    """That patch is refused under document masks, at the start."""
    settings = dict(n_layer=3, document_mask=True)
    refused = dict.fromkeys(("eager", modes.DDP), "document_mask=True")
    options = dict(settings=settings, refused=refused, file=FOLDER / f"{name}.patch")
    return Patch(f"{name} within documents", "refused", {}, (modes.DDP,), **options)


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
    import saved

    teacher = saved.load_model(cfg.teacher)

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
    val, average = (
        {x["step"]: x["loss"] for x in log if x["kind"] == kind} for kind in ("val", "average")
    )
    is_wrong = lambda step, loss: loss <= val[step] if step else loss != val[step]
    wrong = [step for step, loss in average.items() if is_wrong(step, loss)]
    return f"averages {average} beside {val}" if wrong or 6 not in average else None


def measured(log):
    """Against the gradient norm of the step, which is that of all matrices and vectors."""
    norms = {x["step"]: x["norm"] for x in log if x["kind"] == "train"}
    lines = [x for x in log if x["kind"] == "norms"]
    wrong = [x["step"] for x in lines if not 0 < max(x["gradient"].values()) < norms[x["step"]]]
    return f"gradients above the norm in steps {wrong}" if wrong or not lines else None


LLAMA = dict(norm="rmsnorm", positions="rope", mlp="swiglu", bias=False)
DIFFERS = "transformers' logits differ by"
ONE_POSITION = "masked diffusion has logits of one position at a time"

PATCHES = [
    shelved(
        "sliding_window",
        "two of three blocks see the last tokens only",
        edits={"model.py": [("WINDOW = 64", "WINDOW = 8")]},
        sample=(modes.SAMPLED, modes.BLOCK),
        cached=False,
        export=DIFFERS,
    ),
    shelved("looped_model", "the inner blocks run twice", settings=dict(n_layer=3), export=DIFFERS),
    shelved(
        "multi_token_prediction",
        "in training a further block predicts the token after the next",
        loss=two_ahead,
        extras=("second",),
        refused=modes.MIXES,
        export=HAS_MORE,
    ),
    shelved(
        "mixture_of_experts",
        "one of four MLPs for each token; blocks return their balance as a second result",
        sample=(modes.PLAIN, modes.BLOCK, modes.SELECTIVE),
        loss=balanced,
        extras=("uneven",),
        refused=modes.MIXES | NO_CORE,
        export="model.py has other parameters than a gpt2",
    ),
    shelved(
        "masked_diffusion",
        "a random share of each row is hidden, and is all that is predicted",
        modes=tuple(mode for mode in DRAWN if mode != modes.CONTEXT),  # which is not proved
        sample=(modes.RESUMED, modes.BLOCK),
        cached=False,
        export=ONE_POSITION,
    ),
    shelved(
        "lora",
        "two narrow factors beside each of attention's layers, while all else is frozen",
        # with an init_std of 0 the factors' product would stay near zero
        edits={"model.py": [("self.lora_b.init_std = 0.0", "self.lora_b.init_std = 0.2")]},
        sample=(modes.RESUMED,),
        settings=dict(lr=0.03),
        export=HAS_MORE,
    ),
    shelved(
        "ema",
        "a running mean of the weights in State.own, evaluated beside them",
        modes=ALL,
        sample=(modes.RESUMED,),
        unchanged=True,
        also=averaged,
    ),
    shelved(
        "norms",
        "the RMS of each matrix' weight, gradient and update is logged",
        edits={"train.py": [("EVERY = 10", "EVERY = 2")]},
        sample=(modes.PLAIN, modes.FSDP),
        unchanged=True,
        also=measured,
    ),
    shelved(
        "schedule_free",
        "its groups hold numbers that its steps change, and weights have two forms",
        modes=ALL,
        sample=(modes.PLAIN, modes.RESUMED, modes.RESUMED_FSDP),
        settings=dict(lr=3e-3, schedule="constant"),
        adds=dict(optimizer="schedule_free"),
        optimizer=own_optimizer,
    ),
    shelved(
        "soap",
        "its states are whole matrices and lists of them, its steps those of a rank's rows",
        modes=ALL,
        edits={"optim.py": [("lr, betas, eps=1e-8):", "lr, betas, eps=1e-3):")]},
        # wide: where eigenvalues differ by little, rounding turns a basis far
        limits=(2e-4, 0.1),
        settings=dict(lr=3e-3),
        adds=dict(optimizer="soap"),
        optimizer=own_optimizer,
    ),
    shelved(
        "z_loss",
        "a squared log of the softmax's denominator is added to the loss and logged",
        edits={"model.py": [("1e-4 * z", "1e-2 * z")]},
        sample=(modes.PLAIN, modes.DDP, modes.FSDP),
        loss=with_z,
        extras=("z",),
    ),
    shelved(
        "sequence_warmup",
        "rows of a quarter, then of half of block_size, as many tokens a step",
        sample=(modes.PLAIN, modes.RESUMED),
        length=lambda step: (8, 16, 32)[min(step, 2)],
    ),
    shelved(
        "distillation",
        "half of the loss is the divergence from a checkpoint's predictions",
        # not the teacher's seed, or the two would hardly differ
        adds=dict(teacher=UNPATCHED, seed=2),
        make_loss=distilled,
        extras=("divergence",),
        refused={modes.CONTEXT: "which divides the rows"},
    ),
    shelved(
        "mup",
        "rates, first weights and the head follow the width",
        export=DIFFERS,
        optimizer=own_optimizer,
    ),
    shelved(
        "byte_patches",
        "the inner block sees the mean of each four tokens as one",
        settings=dict(n_layer=3),
        refused=modes.MIXES,
        cached=False,
        export=DIFFERS,
    ),
    shelved(
        "value_residual",
        "the first block's values go on to all others: a block takes and returns two tensors",
        sample=(modes.BLOCK, modes.ATTENTION, modes.SAMPLED),
        export=HAS_MORE,
    ),
    shelved(
        "key_offset_bigrams",
        "a quarter of a key is that of the token before, beside a table for pairs of tokens",
        sample=(modes.BLOCK,),
        settings=dict(LLAMA),
        refused=modes.MIXES,
        cached=False,
        export=HAS_MORE.replace("gpt2", "llama"),
    ),
    shelved(
        "half_shift",
        "half of the embedding's channels are those of the token before",
        refused=modes.MIXES,
        cached=False,
        export=DIFFERS,
    ),
    within_documents("byte_patches"),
    within_documents("half_shift"),
]
