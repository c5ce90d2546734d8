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
TAKEN = {"train", "start", "saved", "spike", "done", "stopped"}


@torch.no_grad()
def score_rows(model, loader, tokens, autocast, own_tokens=None, stop=lambda: False):
    """Evaluates a split's first rows, about `tokens` tokens -> (table, names, documents).

    All are equal on every rank. table, names: float64 (3 + extras, rows), as `sums_of_rows` has
    them. documents: (rows,), the number of each row's, one for all where the forward knows no rows.
    own_tokens: makes (x, y, positions) of this rank of a batch; None: it has whole rows. Returns
    None once stop().
    """
    device = parallel.device_of(model)
    token_bytes = loader.token_bytes
    if token_bytes is not None:
        token_bytes = torch.as_tensor(token_bytes, device=device)
    rows = loader.eval_rows(tokens)
    batches = math.ceil(rows / (loader.world * loader.B))
    found = []
    for x, y in progress(loader.eval_batches(tokens), "validation", batches, stop):
        batch = own_tokens(x, y) if own_tokens else (x, y)
        with autocast:
            sums, names, by_row = sums_of_rows(model, *batch, token_bytes=token_bytes)
        found.append(sums)
    if stop():
        return None
    table = torch.zeros(batches, loader.world, *sums.shape, device=device)
    table[:, loader.rank] = torch.stack(found)
    table = parallel.sum_over_ranks(table).movedim(2, 0).flatten(1)[:, :rows]
    documents = loader.documents(rows) if by_row else np.zeros(rows, int)
    return table.double().cpu().numpy(), names, documents


def sums_of_rows(model, x, y, positions=None, token_bytes=None):
    """Sums over the targets of each row of a forward -> (sums, names, by_row).

    sums: (3 + extras, B), the loss in nats, the targets, bytes of their text (NaN: unknown), and
    the extras of these names. by_row: False for a loss of one's own that knows no rows: each row
    has the mean of all. token_bytes: (V,), or None.
    """
    B = len(x)
    loss, count, extras = model(x, y, positions, "rows")
    by_row = torch.is_tensor(count) and count.shape == (B,)
    if not by_row:
        count = scalar("count", count, x.device).expand(B) / B
    text = torch.full((B,), torch.nan, device=x.device)
    if token_bytes is not None:
        real = y >= 0
        # of the targets that a forward leaves out, or adds, nobody knows the bytes
        known = count == real.sum(1)
        text = torch.where(known, (token_bytes[y.clamp(min=0)] * real).sum(1), text)
    names = sorted(extras)
    means = [loss, *(extras[name] for name in names)]
    # where there is no target, the mean may be NaN
    nats, *others = (torch.where(count > 0, mean * count, 0.0) for mean in means)
    return torch.stack([nats, count, text, *others]), names, by_row


def figure(name, amounts, units, documents):
    """{name: sum(amounts) / sum(units), NAME_stderr: its error for documents drawn at random}.

    documents: the number of each row's document; a single one tells nothing of the error. That is
    linearised, as in Cochran, Sampling Techniques, 6.4.
    """
    amounts, units = np.bincount(documents, amounts), np.bincount(documents, units)
    mean = amounts.sum() / units.sum()
    n = np.count_nonzero(units)
    if n == 1:
        return {name: mean}
    deviations = amounts - mean * units
    error = math.sqrt((deviations**2).sum() * n / (n - 1)) / units.sum()
    return {name: mean, f"{name}_stderr": error}


def loss_of_table(table, documents):
    """{"loss": nats a token, "bpb": bits per byte where known}; table: see `score_rows`."""
    nats, targets, text, *_ = table
    found = figure("loss", nats, targets, documents)
    if not np.isnan(text).any():
        found |= figure("bpb", nats / math.log(2), text, documents)
    return found


def in_words(figures):
    """An evaluation's figures for the console; after ±, standard errors."""
    words = []
    for name, value in figures.items():
        if name == "held_out":  # which is for plot.py
            continue
        if isinstance(value, dict):
            words.append(f"{name}: {in_words(value)}")
        elif isinstance(value, list):
            words.append("\n".join(map(repr, value)))
        elif name.endswith("_stderr"):
            words[-1] += f" ±{value:.4f}"
        elif isinstance(value, (int, str)):
            words.append(f"{name} {value}")
        else:
            words.append(f"{name} {value:.4f}")
    return " | ".join(words)


@dataclasses.dataclass
class Evaluation:
    """A function of the model that is called every `interval` steps and at the end.

    It returns {figure: number, or text}, the same on every rank, or None if the run is to stop. It
    runs on all ranks, without gradients, in the run's precision and with the model in eval mode;
    random numbers that it draws do not change those of training.
    """

    interval: int
    function: Callable
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
        self.best = None  # (name, figure) that chooses the best checkpoint, the lowest

    def add(self, name, interval, function, best=None, **options):
        """Adds an Evaluation; interval=0: never. options: its other fields.

        best: its figure that chooses the best checkpoint, in place of those that were to before.
        """
        if name in self.each or name in TAKEN:
            raise UserError(f"the name {name!r} of an evaluation is in use already; choose another")
        if interval:
            self.each[name] = Evaluation(interval, function, **options)
            if best:
                self.best = name, best

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
            if self.watch.agreed():
                break
            found = self._figures(self.each[name])
            if self.watch.stopping:
                break
            self.log.print(f"{name} {state.step} | {in_words(found)}")
            self.log.record(name, state.step, **found)
            if self.best and self.best[0] == name:
                score = float(found[self.best[1]])
                self.log.refuse(state.step, " ".join(self.best), score)
        if not self.watch.stopping:
            state.evaluated = state.step
        state.model.train()
        self.watch.agreed()  # a signal that came meanwhile ends the run before its next step
        return score

    def _figures(self, evaluation):
        """What an evaluation returns, and the seconds that it took."""
        model = self.state.model
        device = parallel.device_of(model)
        began = parallel.synchronize(device)
        with contextlib.ExitStack() as stack, torch.no_grad(), self.autocast:
            stack.enter_context(generators.preserved(device))
            if evaluation.whole_rows:
                stack.enter_context(context_parallel.whole_rows(model))
            found = evaluation.function(model) or {}
        return found | {"seconds": parallel.synchronize(device) - began}


def validation_loss(model, loaders, tokens, **options):
    """The losses of the data folders, and of their mixture; None once it is to stop.

    loaders: [(weight in the loss and in the tokens, loader)]. options: of score_rows. Bits per byte
    of folders differ too much to have a mean.
    """
    folders = {}
    for weight, loader in loaders:
        part = max(loader.T, round(weight * tokens))
        scored = score_rows(model, loader, part, **options)
        if scored is None:
            return None
        table, names, documents = scored
        score = loss_of_table(table, documents)
        if names:
            score["extras"] = dict(zip(names, table[3:].sum(1) / table[1].sum()))
        folders[loader.data_dir] = score
    if len(folders) == 1:
        return score
    weights = [weight for weight, _ in loaders]
    losses = [score["loss"] for score in folders.values()]
    errors = [score.get("loss_stderr", math.nan) for score in folders.values()]
    error = math.hypot(*np.multiply(weights, errors))
    return dict(loss=np.dot(weights, losses), loss_stderr=error, folders=folders)


def add_evaluations(evaluations, cfg, world, val_loaders):
    """Adds what cfg asks for; returns warnings of what cannot be evaluated.

    val_loaders: see validation_loss.
    """
    if cfg.eval_interval:
        add_validation(evaluations, cfg, world, val_loaders)
    if not (cfg.hellaswag_interval or cfg.sample_interval):
        return []
    from corpus import tokenizer as tokenizers

    tokenizer = tokenizers.load(cfg.tokenizer or "gpt2", cfg.vocab_size)
    if cfg.sample_interval:
        from run import sampling

        def sample(model):
            options = dict(seed=cfg.seed, **SAMPLES)
            return {"texts": sampling.texts(model, tokenizer, cfg.sample_prompt, **options)}

        evaluations.add("sample", cfg.sample_interval, sample, at_start=False)
    if cfg.hellaswag_interval:
        return add_hellaswag(evaluations, cfg, tokenizer)
    return []


def add_validation(evaluations, cfg, world, loaders):
    splits = ", ".join(f"{weight:g} of {loader.fingerprint}" for weight, loader in loaders)
    # runs can be compared where this text is the same
    held_out = f"{splits}; {cfg.eval_tokens} tokens in rows of {cfg.block_size}"
    options = dict(
        autocast=evaluations.autocast,
        own_tokens=functools.partial(context_parallel.own_tokens, cfg, world),
        stop=evaluations.watch.agreed,
    )

    def evaluate(model):
        found = validation_loss(model, loaders, cfg.eval_tokens, **options)
        return found and found | {"held_out": held_out}

    evaluations.add("val", cfg.eval_interval, evaluate, best="loss", whole_rows=False)


def add_hellaswag(evaluations, cfg, tokenizer):
    """Returns [a warning] where the examples cannot be had."""
    import hellaswag

    examples = []
    warnings = []
    try:
        examples = hellaswag.load(cfg.hellaswag_file)
    except hellaswag.Unavailable as error:
        warnings.append(f"no HellaSwag in this run: {error}")
    agreement.examples(examples)
    if examples:
        prepared = hellaswag.prepare(examples, tokenizer, cfg.block_size)

        def evaluate(model):
            losses = hellaswag.losses(model, prepared, stop=evaluations.watch.agreed)
            return hellaswag.scored(prepared, losses)[0]

        evaluations.add("hellaswag", cfg.hellaswag_interval, evaluate)
    return warnings
