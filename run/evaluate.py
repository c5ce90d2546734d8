"""Evaluations: validation loss, bits per byte and standard errors, HellaSwag, samples, your own."""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable

import numpy as np
import torch

import optim
from run import agreement
from run.figures import scalar
from run.logger import progress
from scale import context_parallel, generators, parallel
from system.errors import UserError

SAMPLES = dict(n=4, max_new_tokens=64, temperature=0.8, top_k=50)
# names that log.jsonl has already, which no evaluation may take
TAKEN = {"train", "start", "saved", "skipped", "spike", "done", "stopped"}


def whole_rows(x, y):
    """(x, y, positions) of a rank that has whole rows of a batch."""
    return x, y, None


def never():
    return False


@torch.no_grad()
def score_rows(model, loader, tokens, *, autocast, own_tokens=whole_rows, stop=never):
    """Evaluates a split's first rows, about `tokens` tokens -> (table, extras, documents).

    All are equal on every rank. table: float64 (3, rows): a row's loss in nats, its targets, bytes
    of their text (NaN: unknown). extras: {name: mean over the targets} of the forward. documents:
    (rows,), the number of each row's, one for all where the forward knows no rows. own_tokens:
    makes (x, y, positions) of this rank of a batch. stop(): whether to leave the rest.
    """
    device = parallel.device_of(model)
    token_bytes = None
    if loader.token_bytes is not None:
        token_bytes = torch.as_tensor(loader.token_bytes, device=device)
    rows = loader.eval_rows(tokens)
    batch_rows = loader.world * loader.B  # of all ranks
    batches = math.ceil(rows / batch_rows)
    table = torch.zeros(3, batches * batch_rows, device=device)
    sums = {}
    by_row = True
    first = loader.rank * loader.B  # this rank's first row of the batch
    for x, y in progress(loader.eval_batches(tokens), "validation", batches, stop):
        x, y, positions = own_tokens(x, y)
        with autocast:
            loss, targets, extras, by_row = losses_of_rows(model, x, y, positions)
        text = bytes_of_rows(y, targets, token_bytes)
        table[:, first : first + loader.B] = torch.stack([loss * targets, targets, text])
        first += batch_rows
        for name, value in extras.items():
            sums[name] = sums.get(name, 0.0) + value
    table = parallel.sum_over_ranks(table)[:, :rows].double().cpu().numpy()
    documents = loader.documents(rows) if by_row else np.zeros(rows, int)
    return table, means_over_ranks(sums, table[1].sum(), device), documents


def bytes_of_rows(y, targets, token_bytes):
    """(B,): bytes of the text of each row's targets; NaN where they are not known.

    y: (B, T). targets: (B,), their number as the forward counts it. token_bytes: (V,), or None.
    """
    unknown = torch.full(targets.shape, torch.nan, device=y.device)
    if token_bytes is None:
        return unknown
    real = y >= 0
    text = (token_bytes[y.clamp(min=0)] * real).sum(1)
    # of the targets that a forward leaves out, or adds, nobody knows the bytes
    return torch.where(targets == real.sum(1), text, unknown)


def means_over_ranks(sums, targets, device):
    """{name: mean over the targets} of this rank's sums and the others'."""
    # a rank that read no rows has no names
    names = {name for names in parallel.gather_objects([*sums]) for name in names}
    means = {}
    for name in sorted(names):
        total = parallel.sum_over_ranks(sums.get(name, torch.zeros((), device=device)))
        means[name] = (total / max(1.0, targets)).item()
    return means


def losses_of_rows(model, x, y, positions):
    """(loss, targets, extras, whether they are of each row) of a forward.

    loss: (B,), the mean of each row. targets: (B,), their number in each row. extras: {name: its
    sum over the targets}. Of a forward with a loss of its own that knows no rows, each row has the
    mean of all.
    """
    loss, count, extras = model(x, y, positions, "rows")
    by_row = torch.is_tensor(count) and loss.shape == count.shape == x.shape[:1]
    if not by_row:
        loss = scalar("loss", loss, x.device).expand(len(x))
        count = scalar("count", count, x.device).expand(len(x)) / len(x)
    sums = {}
    for name, value in extras.items():
        if torch.is_tensor(value) and value.shape == count.shape:  # of each row
            value = value.detach().float()
        else:
            value = scalar(name, value, x.device)
        # where there is no target, the mean may be NaN
        sums[name] = torch.where(count > 0, value * count, 0.0).sum()
    return torch.where(count > 0, loss.float(), 0.0), count, sums, by_row


def ratio(amounts, units, documents):
    """(sum(amounts) / sum(units), its standard error for documents drawn at random).

    documents: the number of each row's document. The error is linearised, as in Cochran, Sampling
    Techniques, 6.4.
    """
    amounts, units = np.bincount(documents, amounts), np.bincount(documents, units)
    mean = amounts.sum() / units.sum()
    n = np.count_nonzero(units)
    if n == 1:
        return mean, math.nan
    deviations = amounts - mean * units
    return mean, math.sqrt((deviations**2).sum() * n / (n - 1)) / units.sum()


def loss_of_table(table, documents):
    """The loss of `score_rows`'s table.

    {"loss": nats a token, "bpb": bits per byte or None, "stderr", "bpb_stderr"}.
    """
    nats, targets, text = table
    loss, stderr = ratio(nats, targets, documents)
    bpb = bpb_stderr = None
    if not np.isnan(text).any():
        bpb, bpb_stderr = ratio(nats / math.log(2), text, documents)
    return dict(loss=loss, stderr=stderr, bpb=bpb, bpb_stderr=bpb_stderr)


def in_words(score):
    """Parts of a line for the console; after ±, the standard errors."""
    words = [f"loss {with_error(score['loss'], score['stderr'])}"]
    if score["bpb"] is not None:
        words.append(f"{with_error(score['bpb'], score['bpb_stderr'])} bits/byte")
    return words


def with_error(mean, stderr):
    if math.isnan(stderr):  # a single document tells nothing of the error
        return f"{mean:.4f}"
    return f"{mean:.4f} ±{stderr:.4f}"


def in_figures(found):
    """One line for the console of an evaluation's figures."""
    words = []
    for name, value in found.items():
        if name != "seconds":
            words.append(f"{name} {value:.4f}" if isinstance(value, float) else f"{name} {value}")
    return [" | ".join([*words, f"{found['seconds']:.1f} s"])]


@dataclasses.dataclass
class Evaluation:
    """A function of the model that is called every `interval` steps and at the end.

    It returns {figure: number, or text}, the same on every rank, or None if the run is to stop. It
    runs on all ranks, without gradients, in the run's precision and with the model in eval mode;
    random numbers that it draws do not change those of training.
    """

    interval: int
    function: Callable
    lines: Callable = in_figures  # from that dict to lines for the console
    # the figure by which the best checkpoint is chosen, the lowest; of one evaluation only
    best: str | None = None
    # each rank has whole rows, of one document each; False: as in training, with its document
    # masks, and rows divided by context parallelism
    whole_rows: bool = True
    at_start: bool = True  # before step 1 too


class Evaluations:
    """The evaluations of a run: named functions at intervals; one chooses the best checkpoint."""

    def __init__(self, state, autocast, log, watch, cfg):
        """state: a train.State, of which `evaluated` is set here."""
        self.state = state
        self.autocast = autocast
        self.log = log
        self.watch = watch
        self.cfg = cfg
        self.each = {}  # {name: Evaluation}

    def add(self, name, interval, function, **options):
        """Adds an Evaluation; the options are its other fields. interval=0: never."""
        if name in self.each or name in TAKEN:
            raise UserError(f"the name {name!r} of an evaluation is in use already; choose another")
        if interval:
            self.each[name] = Evaluation(interval, function, **options)
        if sum(evaluation.best is not None for evaluation in self.each.values()) > 1:
            raise UserError(f"evaluation {name!r}: another one chooses the best checkpoint already")

    def due(self):
        """Names of those that are due now; none if a run resumed here had evaluated before."""
        step = self.state.step
        if step == self.state.evaluated:
            return []
        ended = optim.share_done(self.state, self.cfg) == 1
        found = []
        for name, own in self.each.items():
            at_interval = step % own.interval == 0 and (step > 0 or own.at_start)
            if at_interval or ended:
                found.append(name)
        return found

    def run(self):
        """Runs those that are due, unless the run is to stop meanwhile; returns their score.

        The score is of the evaluation that chooses the best checkpoint; None without one.
        """
        state = self.state
        score = None
        state.model.eval()
        for name in self.due():
            evaluation = self.each[name]
            if self.watch.agreed():
                break
            found = self._figures(name, evaluation)
            if self.watch.stopping:
                break
            for line in evaluation.lines(found):
                self.log.print(f"{name} {state.step} | {line}")
            self.log.record(name, state.step, **found)
            if evaluation.best:
                score = found[evaluation.best]
                self.log.refuse(state.step, f"{name} {evaluation.best}", score)
        if not self.watch.stopping:
            state.evaluated = state.step
        state.model.train()
        self.watch.agreed()  # a signal that came meanwhile ends the run before its next step
        return score

    def _figures(self, name, evaluation):
        """What an evaluation returns, as log.jsonl can hold it, and the seconds that it took."""
        model = self.state.model
        device = parallel.device_of(model)
        began = parallel.synchronize(device)
        rows = contextlib.nullcontext()
        if evaluation.whole_rows:
            rows = context_parallel.whole_rows(model)
        with rows, torch.no_grad(), self.autocast, generators.preserved(device):
            found = evaluation.function(model)
        if self.watch.stopping:
            return None
        figures = {"seconds": parallel.synchronize(device) - began}
        for figure, value in found.items():
            figures[figure] = loggable(name, figure, value)
        return figures


def loggable(evaluation, name, value):
    """A figure as log.jsonl can hold it; a tensor or an array with one element as a number."""
    if name in ("step", "kind", "seconds"):
        raise UserError(
            f"evaluation {evaluation!r}: {name} is a name of the log's own; choose another"
        )
    return value.item() if hasattr(value, "item") else value


def validation_loss(model, loaders, tokens, *, autocast, own_tokens, stop):
    """The losses of the data folders, and of their mixture; None once stop() is true.

    loaders: [(weight in the loss and in the tokens, loader)]. The rest: see score_rows. Bits per
    byte of folders differ too much to have a mean.
    """
    folders = {}
    extras = {}
    loss = 0.0
    errors = []
    for weight, loader in loaders:
        part = max(loader.T, round(weight * tokens))
        table, means, documents = score_rows(
            model, loader, part, autocast=autocast, own_tokens=own_tokens, stop=stop
        )
        if stop():
            return None
        score = loss_of_table(table, documents)
        folders[loader.data_dir] = score
        loss += weight * score["loss"]
        errors.append(weight * score["stderr"])
        for name, mean in means.items():
            extras[name] = extras.get(name, 0.0) + weight * mean
    if len(folders) == 1:
        found = score | {"folders": {}}
    else:
        found = dict(loss=loss, stderr=math.hypot(*errors), bpb=None, folders=folders)
    if extras:
        found["extras"] = extras
    return found


def validation_lines(score):
    words = in_words(score)
    for folder, part in score["folders"].items():
        words.append(f"{folder}: {', '.join(in_words(part))}")
    for name, value in score.get("extras", {}).items():
        words.append(f"{name} {value:.4f}")
    return [" | ".join([*words, f"{score['seconds']:.1f} s"])]


def add_evaluations(evaluations, cfg, world, val_loaders):
    """Adds what cfg asks for; returns warnings of what cannot be evaluated.

    val_loaders: see validation.
    """
    if cfg.eval_interval:
        add_validation(evaluations, cfg, world, val_loaders)
    if not (cfg.hellaswag_interval or cfg.sample_interval):
        return []
    from corpus import tokenizer as tokenizers

    tokenizer = tokenizers.load(cfg.tokenizer or "gpt2", cfg.vocab_size)
    if cfg.sample_interval:
        add_samples(evaluations, cfg, tokenizer)
    if cfg.hellaswag_interval:
        return add_hellaswag(evaluations, cfg, tokenizer)
    return []


def add_validation(evaluations, cfg, world, loaders):
    splits = ", ".join(
        f"{weight:g} of {getattr(loader, 'fingerprint', None)}" for weight, loader in loaders
    )
    # runs can be compared where this text is the same
    held_out = f"{splits}; {cfg.eval_tokens} tokens in rows of {cfg.block_size}"

    def evaluate(model):
        found = validation_loss(
            model,
            loaders,
            cfg.eval_tokens,
            autocast=evaluations.autocast,
            own_tokens=functools.partial(context_parallel.own_tokens, cfg, world),
            stop=evaluations.watch.agreed,
        )
        if found:
            found["held_out"] = held_out
        return found

    options = dict(lines=validation_lines, best="loss", whole_rows=False)
    evaluations.add("val", cfg.eval_interval, evaluate, **options)


def add_samples(evaluations, cfg, tokenizer):
    """Adds samples, the same on every rank."""
    from run import sampling

    def evaluate(model):
        options = dict(seed=cfg.seed, **SAMPLES)
        return {"texts": sampling.texts(model, tokenizer, cfg.sample_prompt, **options)}

    def lines(found):
        return [repr(text) for text in found["texts"]]

    evaluations.add("sample", cfg.sample_interval, evaluate, lines=lines, at_start=False)


def add_hellaswag(evaluations, cfg, tokenizer):
    """Returns [a warning] where the examples cannot be had."""
    import hellaswag

    examples = problem = None
    try:
        examples = hellaswag.load(cfg.hellaswag_file)
    except hellaswag.Unavailable as error:
        problem = str(error)
    for why in parallel.gather_objects(problem):  # a problem of one rank is one of all
        if why:
            return [f"no HellaSwag in this run: {why}"]
    agreement.examples(examples)
    prepared = hellaswag.prepare(examples, tokenizer, cfg.block_size)

    def evaluate(model):
        losses = hellaswag.losses(model, prepared, stop=evaluations.watch.agreed)
        score, _ = hellaswag.scored(prepared, losses)
        return score

    def lines(score):
        return [hellaswag.in_words(score)]

    evaluations.add("hellaswag", cfg.hellaswag_interval, evaluate, lines=lines)
    return []
