"""The patches of experiments/: in each mode they equal a run in one process, or are refused.

Modes in which a patch could not differ from another one that is run there are left out: a change of
layers is run with remat, compiled, sampled and over shards, one of the loss with masks and
micro-steps, one of the loop or optimizer resumed.
"""

from experiments import patch as modes
from experiments.edits import HAS_MORE, each, mean, own_optimizer
from experiments.inside import ROOT
from experiments.patch import UNPATCHED, Patch

FOLDER = ROOT / "experiments"
REMAT = (modes.BLOCK, modes.SELECTIVE, modes.ATTENTION)
LAYERS = (modes.COMPILED, modes.SAMPLED, modes.CONTEXT)  # which is over shards
LOSS = (modes.PLAIN, modes.MASKED, modes.ACCUMULATED, modes.DDP)
# refused with context parallelism: an edit for which a rank needs more than its part of a row
MIXES = {modes.CONTEXT: "context_parallel=2: the "}  # loss, or a gradient where weights are zero
NO_CORE = {modes.SELECTIVE: "go around mlp.core"}


def shelved(name, what, modes, edits=None, **more):
    """A Patch of experiments/NAME.patch; edits: of what it has put there."""
    return Patch(name, what, edits or [], modes, file=FOLDER / f"{name}.patch", **more)


def within_documents(name):
    """That patch is refused under document masks, at the start."""
    options = dict(settings=dict(n_layer=3, document_mask=True), file=FOLDER / f"{name}.patch")
    refused = {"eager": "document_mask=True"}
    return Patch(f"{name} within documents", "refused", {}, (), refused=refused, **options)


def with_z(model, x, y):
    loss = mean(each(model, x, y), y)
    if not model.training:
        return loss, {}
    z = mean(model.logits(x).logsumexp(-1) ** 2, y)
    return loss + 1e-2 * z, {"z": z}


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


DIFFERS = "transformers' logits differ by"
ONE_POSITION = "masked diffusion has logits of one position at a time"

PATCHES = [
    shelved(
        "sliding_window",
        "two of three blocks see the last tokens only",
        (modes.BLOCK, modes.ATTENTION, modes.EXPORTED, modes.SAMPLED, modes.CONTEXT),
        edits=[("WINDOW = 64", "WINDOW = 8")],
        sample=(modes.SAMPLED, modes.BLOCK),
        cached=False,
        export=DIFFERS,
    ),
    shelved(
        "looped_model",
        "the inner blocks run twice",
        (modes.BLOCK, modes.ATTENTION, *LAYERS),
        settings=dict(n_layer=3),
    ),
    shelved(
        "multi_token_prediction",
        "in training a further block predicts the token after the next",
        (*LOSS, modes.FSDP, modes.CONTEXT),
        refused=MIXES,
    ),
    shelved(
        "mixture_of_experts",
        "one of four MLPs for each token; blocks return their balance as a second result",
        (*LOSS, modes.BLOCK, modes.SELECTIVE, modes.FSDP, *LAYERS),
        sample=(modes.PLAIN, modes.BLOCK, modes.SELECTIVE),
        refused=MIXES | NO_CORE,
    ),
    shelved(
        "masked_diffusion",
        "a random share of each row is hidden, and is all that is predicted",
        # ranks, and micro-steps, draw other numbers
        (modes.RESUMED, *REMAT, modes.EXPORTED, modes.SAMPLED, modes.RESUMED_DDP),
        sample=(modes.RESUMED, modes.BLOCK),
        cached=False,
        export=ONE_POSITION,
    ),
    shelved(
        "lora",
        "two narrow factors beside each of attention's layers, while all else is frozen",
        (modes.RESUMED, modes.EXPORTED, modes.SAMPLED, modes.DDP, modes.FSDP, modes.RESUMED_FSDP),
        # with an init_std of 0 the factors' product would stay near zero
        edits=[("self.lora_b.init_std = 0.0", "self.lora_b.init_std = 0.2")],
        sample=(modes.RESUMED,),
        settings=dict(lr=0.03),
        export=HAS_MORE,
    ),
    shelved(
        "ema",
        "a running mean of the weights in State.own, evaluated beside them",
        (modes.RESUMED, modes.RESUMED_DDP, modes.FSDP, modes.RESUMED_FSDP),
        sample=(modes.RESUMED,),
        unchanged=True,
        also=averaged,
    ),
    shelved(
        "norms",
        "the RMS of each matrix' weight, gradient and update is logged",
        (modes.ACCUMULATED, modes.FSDP),
        edits=[("EVERY = 10", "EVERY = 2")],
        sample=(modes.FSDP,),
        unchanged=True,
        also=measured,
    ),
    shelved(
        "schedule_free",
        "its groups hold numbers that its steps change, and weights have two forms",
        (modes.PLAIN, modes.RESUMED, modes.RESUMED_DDP, modes.FSDP, modes.RESUMED_FSDP),
        sample=(modes.PLAIN, modes.RESUMED, modes.RESUMED_FSDP),
        settings=dict(lr=3e-3, schedule="constant"),
        adds=dict(optimizer="schedule_free"),
        optimizer=own_optimizer,
    ),
    shelved(
        "soap",
        "its states are whole matrices and lists of them, its steps those of a rank's rows",
        (modes.PLAIN, modes.RESUMED, modes.RESUMED_DDP, modes.FSDP, modes.RESUMED_FSDP),
        edits=[("lr, betas, eps=1e-8):", "lr, betas, eps=1e-3):")],
        # wide: where eigenvalues differ by little, rounding turns a basis far
        limits=(2e-4, 0.1),
        settings=dict(lr=3e-3),
        adds=dict(optimizer="soap"),
        optimizer=own_optimizer,
    ),
    shelved(
        "z_loss",
        "a squared log of the softmax's denominator is added to the loss and logged",
        (*LOSS, modes.FSDP, modes.CONTEXT),
        edits=[("1e-4 * z", "1e-2 * z")],
        sample=(modes.PLAIN, modes.DDP, modes.FSDP),
        loss=with_z,
    ),
    shelved(
        "sequence_warmup",
        "rows of a quarter, then of half of block_size, as many tokens a step",
        (*LOSS, modes.RESUMED, modes.COMPILED, modes.CONTEXT),
        sample=(modes.PLAIN, modes.RESUMED),
        length=lambda step: (8, 16, 32)[min(step, 2)],
    ),
    shelved(
        "distillation",
        "half of the loss is the divergence from a checkpoint's predictions",
        (*LOSS, modes.RESUMED, modes.FSDP, modes.CONTEXT),
        # not the teacher's seed, or the two would hardly differ
        adds=dict(teacher=UNPATCHED, seed=2),
        make_loss=distilled,
        refused={modes.CONTEXT: "which divides the rows"},
    ),
    shelved(
        "mup",
        "rates, first weights and the head follow the width",
        (modes.PLAIN, modes.SAMPLED, modes.FSDP),
        optimizer=own_optimizer,
    ),
    shelved(
        "byte_patches",
        "the inner block sees the mean of each four tokens as one",
        (modes.BLOCK, modes.FSDP, *LAYERS),
        settings=dict(n_layer=3),
        refused=MIXES,
        cached=False,
    ),
    shelved(
        "value_residual",
        "the first block's values go on to all others: a block takes and returns two tensors",
        (*REMAT, *LAYERS),
        sample=(modes.BLOCK, modes.ATTENTION, modes.SAMPLED),
    ),
    shelved(
        "key_offset_bigrams",
        "a quarter of a key is that of the token before, beside a table for pairs of tokens",
        (modes.BLOCK, modes.ATTENTION, modes.EXPORTED, modes.FSDP, *LAYERS),
        sample=(modes.BLOCK,),
        settings=dict(norm="rmsnorm", positions="rope", mlp="swiglu", bias=False),
        refused=MIXES,
        cached=False,
        export=HAS_MORE.replace("gpt2", "llama"),
    ),
    shelved(
        "speedrun",
        "a table learns in the backward; gradients are shared; weights are averaged at the end",
        (modes.RESUMED, *REMAT, modes.EXPORTED, modes.DDP, modes.FSDP, *LAYERS),
        sample=(modes.RESUMED, modes.DDP),
        refused=dict.fromkeys((modes.DDP, modes.FSDP, modes.CONTEXT), "is for one GPU"),
        settings=dict(norm="rmsnorm", positions="rope", mlp="relu2", bias=False),
        cached=False,
        export=HAS_MORE.replace("gpt2", "llama"),
    ),
    shelved(
        "half_shift",
        "half of the embedding's channels are those of the token before",
        (modes.SAMPLED, modes.CONTEXT),
        refused=MIXES,
        cached=False,
    ),
    within_documents("byte_patches"),
    within_documents("half_shift"),
    within_documents("speedrun"),
]
