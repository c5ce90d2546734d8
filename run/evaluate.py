"""Evaluations: validation loss, bits per byte and standard errors, HellaSwag, samples, your own."""

import contextlib
import functools
import math

import numpy as np
import torch

import optim
from run.checkpoint import everywhere
from run.logger import progress
from run.signals import Stopped
from scale import context_parallel, generators, parallel
from system.errors import UserError, is_rank_0

SAMPLES = dict(n=4, max_new_tokens=64, temperature=0.8, top_k=50)
# names that log.jsonl has already, which no evaluation may take
TAKEN = {"train", "start", "saved", "skipped", "spike", "done", "stopped"}


@torch.no_grad()
def score_rows(model, loader, tokens, own_tokens=lambda x, y: (x, y), check=lambda: None):
    """Evaluates a split's first rows, about `tokens` tokens -> (table, documents).

    Both are equal on every rank. table: float64 (3, rows), as `sums_of_rows` has them. documents:
    (rows,), the number of each row's; where the forward knows no rows, table has a column a batch,
    and all have one number. own_tokens: makes (x, y, positions) of this rank of a batch, or (x, y)
    of whole rows. check: called before each batch, which may end it.
    """
    rows = loader.eval_rows(tokens)
    batches = math.ceil(rows / (loader.world * loader.B))
    token_bytes = loader.token_bytes
    if token_bytes is not None:
        token_bytes = torch.as_tensor(token_bytes, device=parallel.device_of(model))
    found = []
    for x, y in progress(loader.eval_batches(tokens), "validation", batches):
        check()
        found.append(sums_of_rows(model, *own_tokens(x, y), token_bytes=token_bytes))
    found = torch.stack(found)
    table = found.new_zeros(batches, loader.world, *found.shape[1:])
    table[:, loader.rank] = found
    table = parallel.sum_over_ranks(table).movedim(2, 0).flatten(1)
    documents = np.zeros(table.size(1), int)
    if found.size(2) == loader.B:
        table = table[:, :rows]  # without those that fill up the last batch
        documents = loader.documents(rows)
    return table.double().cpu().numpy(), documents


def sums_of_rows(model, x, y, positions=None, token_bytes=None):
    """Sums over the targets of each row of a forward.

    (3, B): the loss in nats, the targets, bytes of their text (NaN: unknown); (3, 1) of a loss of
    one's own that knows no rows. token_bytes: a tensor (V,), or None.
    """
    loss, count, _ = model(x, y, positions, "rows")
    count = torch.as_tensor(count, device=x.device).view(-1)
    if len(count) == 1:
        y = y.reshape(1, -1)
    text = torch.full(count.shape, torch.nan, device=x.device)
    if token_bytes is not None:
        real = y >= 0
        sizes = token_bytes[y.clamp(min=0)] * real
        # of the targets that a forward leaves out, or adds, nobody knows the bytes
        text = torch.where(count == real.sum(1), sizes.sum(1), text)
    nats = torch.where(count > 0, loss * count, 0.0)  # the mean of no target may be NaN
    return torch.stack([nats, count, text])


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
    nats, targets, text = table
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
            if not math.isnan(value):  # where a folder is a single document
                words[-1] += f" ±{value:.4f}"
        else:
            shown = f"{value:.4f}" if isinstance(value, float) else value
            words.append(f"{name} {shown}")
    return " | ".join(words)


class Evaluations:
    """The evaluations of a run: named functions at intervals; one chooses the best checkpoint."""

    def __init__(self, training, log, watch):
        """training: a train.Training, of whose state `evaluated` is set here."""
        self.training = training
        self.log = log
        self.watch = watch
        self.each = {}  # {name: (interval, function, at_start)}
        self.best = None, None  # name, figure that chooses the best checkpoint, the lowest

    def add(self, name, interval, function, best=None, at_start=True):
        """Adds a function of the model that is called at intervals and at the end.

        It returns {figure: number, or text}, the same on every rank. It runs on all ranks, each
        with whole rows of one document, without gradients, in the run's precision and with the
        model in eval mode; random numbers that it draws do not change those of training.
        interval: in steps; 0: never. best: its figure that chooses the best checkpoint, in place of
        those that were to before. at_start: whether it is called before the first step too.
        """
        if name in TAKEN or name in self.each:
            raise UserError(f"the name {name!r} of an evaluation is in use already; choose another")
        if interval:
            self.each[name] = interval, function, at_start
            if best:
                self.best = name, best

    def due(self):
        """{name: function} of those that are due; none if a run resumed here had evaluated."""
        state = self.training.state
        if state.step == state.evaluated:
            return {}
        ended = optim.share_done(state, self.training.cfg) == 1
        found = {}
        for name, (interval, function, at_start) in self.each.items():
            at_interval = state.step % interval == 0 and (state.step or at_start)
            if at_interval or ended:
                found[name] = function
        return found

    def run(self):
        """Runs those that are due, until the run is to stop; returns their score.

        The score is of the evaluation that chooses the best checkpoint; None without one.
        """
        state = self.training.state
        model = state.model
        device = parallel.device_of(model)
        chooser, figure = self.best
        score = None
        model.eval()
        with contextlib.suppress(Stopped):
            for name, function in self.due().items():
                self.watch.check()
                began = parallel.synchronize(device)
                with generators.preserved(device), torch.no_grad(), self.training.autocast:
                    with context_parallel.whole_rows(model):
                        found = function(model) or {}
                found["seconds"] = parallel.synchronize(device) - began
                self.log.print(f"{name} {state.step} | {in_words(found)}")
                self.log.record(name, state.step, **found)
                if name == chooser:
                    score = float(found[figure])
                    if not math.isfinite(score):
                        self.log.refuse(state.step, f"{name} {figure} {score}")
            state.evaluated = state.step
        model.train()
        self.watch.agreed()  # a signal that came meanwhile ends the run before its next step
        return score


def add_evaluations(evaluations, cfg, world, val_loaders):
    """Adds what cfg asks for. val_loaders: [(weight in loss and tokens, loader)] of the folders."""
    if cfg.eval_interval:
        add_validation(evaluations, cfg, world, val_loaders)
    if not (cfg.hellaswag_interval or cfg.sample_interval):
        return
    from corpus import tokenizer as tokenizers

    tokenizer = tokenizers.load(cfg.tokenizer or "gpt2", cfg.vocab_size)
    if cfg.sample_interval:
        from run import sampling

        def sample(model):
            prompt = cfg.sample_prompt
            return {"texts": sampling.texts(model, tokenizer, prompt, seed=cfg.seed, **SAMPLES)}

        evaluations.add("sample", cfg.sample_interval, sample, at_start=False)
    if cfg.hellaswag_interval:
        add_hellaswag(evaluations, cfg, tokenizer)


def add_validation(evaluations, cfg, world, loaders):
    """Adds the losses of the data folders, and their mean by weights.

    Bits per byte of folders differ too much to have a mean.
    """
    splits = ", ".join(f"{weight:g} of {loader.fingerprint}" for weight, loader in loaders)
    # runs can be compared where this text is the same
    held_out = f"{splits}; {cfg.eval_tokens} tokens in rows of {cfg.block_size}"

    own_tokens = functools.partial(context_parallel.own_tokens, cfg, world)

    def evaluate(model):
        folders = {}
        for weight, loader in loaders:
            tokens = max(loader.T, round(weight * cfg.eval_tokens))
            # as in training, with its document masks, and rows divided by context parallelism
            with context_parallel.whole_rows(model, False):
                scored = score_rows(model, loader, tokens, own_tokens, evaluations.watch.check)
            score = loss_of_table(*scored)
            folders[loader.data_dir] = score
        if len(folders) > 1:
            weights = [weight for weight, _ in loaders]
            losses = [score["loss"] for score in folders.values()]
            errors = [score.get("loss_stderr", math.nan) for score in folders.values()]
            error = math.hypot(*np.multiply(weights, errors))
            score = dict(loss=np.dot(weights, losses), loss_stderr=error, folders=folders)
        return score | {"held_out": held_out}

    evaluations.add("val", cfg.eval_interval, evaluate, best="loss")


def add_hellaswag(evaluations, cfg, tokenizer):
    import hellaswag

    # rank 0 alone reads or downloads the file, the others get its examples
    load = functools.partial(hellaswag.load, cfg.hellaswag_file) if is_rank_0() else list
    try:
        examples = parallel.gather_objects(everywhere(load))[0]
    except UserError as error:
        if cfg.hellaswag_file:
            raise
        evaluations.log.warn(f"{error}; this run goes on without")
        return
    prepared = hellaswag.prepare(examples, tokenizer, cfg.block_size)
    score = functools.partial(hellaswag.score, prepared=prepared, check=evaluations.watch.check)
    evaluations.add("hellaswag", cfg.hellaswag_interval, score)
