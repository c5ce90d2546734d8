"""Evaluation: validation loss and bits per byte with standard errors, HellaSwag, samples, and your own."""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable

import numpy as np
import torch

import optim
from configurator import UserError
from run import agreement
from run.figures import scalar
from run.logger import progress
from scale import context_parallel, generators, parallel

SAMPLES = dict(n=4, max_new_tokens=64, temperature=0.8, top_k=50)
TAKEN = {"train", "start", "saved", "skipped", "spike", "norms", "done", "stopped"}  # kinds of log.jsonl


@torch.no_grad()
def validate(model, loader, tokens, autocast, own=lambda x, y: (x, y, None), stop=lambda: False):
    """Evaluates a split's first rows, about `tokens` tokens -> (table, extras), equal on every rank.

    table: float64 (3, rows): a row's loss in nats, its targets, bytes of their text (0 or NaN: unknown).
    extras: {name: mean over the targets} of the forward. own: this rank's part of a batch.
    """
    device, stride = parallel.device_of(model), loader.world * loader.B
    sizes = None if loader.token_bytes is None else torch.as_tensor(loader.token_bytes, device=device)
    rows = loader.eval_rows(tokens)
    table = torch.zeros(3, -(-rows // stride) * stride, device=device)
    sums = {}
    batches = progress(loader.eval_batches(tokens), "validation", -(-rows // stride), stop)
    for first, batch in zip(range(loader.rank * loader.B, table.size(1), stride), batches):
        x, y, positions = own(*batch)
        with autocast:
            loss, count, extras = losses_of_rows(model, x, y, positions)
        real = y >= 0
        text = real * 0 if sizes is None else sizes[y.clamp(min=0)] * real
        # of the targets that a forward leaves out, or adds, nobody knows the bytes
        text = torch.where(count == real.sum(1), text.sum(1), torch.nan)
        table[:, first : first + loader.B] = torch.stack([loss * count, count, text])
        for name, value in extras.items():
            sums[name] = sums.get(name, 0.0) + value
    table = parallel.sum_over_ranks(table)[:, :rows].double().cpu().numpy()
    names = sorted({name for names in parallel.gather_objects([*sums]) for name in names})
    if not names:
        return table, {}
    zero = torch.zeros((), device=device)  # of a rank whose rows only fill a batch up
    totals = parallel.sum_over_ranks(torch.stack([sums.get(name, zero) for name in names]))
    return table, dict(zip(names, (totals / max(1.0, table[1].sum())).tolist()))


def losses_of_rows(model, x, y, positions):
    """((B,) mean loss of each row, (B,) targets of each, {extra: its sum over the targets}) of a forward.

    A forward with a loss of its own that knows no rows is called for one row at a time.
    """
    loss, count, extras = model(x, y, positions, "rows")
    if not torch.is_tensor(count) or loss.shape != x.shape[:1] or count.shape != loss.shape:
        each = [model(x[b : b + 1], y[b : b + 1], positions) for b in range(len(x))]
        loss = torch.stack([scalar("loss", value, x.device) for value, _, _ in each])
        count = torch.stack([scalar("count", value, x.device) for _, value, _ in each])
        found = [found for _, _, found in each]
        extras = {n: torch.stack([scalar(n, one[n], x.device) for one in found]) for n in found[0]}
    sums = {}
    for name, value in extras.items():
        if torch.is_tensor(value) and value.shape == count.shape:  # of each row
            value = value.detach().float()
        else:
            value = scalar(name, value, x.device)
        sums[name] = torch.where(count > 0, value * count, 0.0).sum()  # the mean of no target may be NaN
    return torch.where(count > 0, loss.float(), 0.0), count, sums


def ratio(amounts, units, documents):
    """(sum(amounts) / sum(units), its standard error for documents drawn at random).

    documents: the number of each row's document. Linearised, as in Cochran, Sampling Techniques, 6.4.
    """
    amounts, units = np.bincount(documents, amounts), np.bincount(documents, units)
    mean, n = amounts.sum() / units.sum(), np.count_nonzero(units)
    deviations = amounts - mean * units
    return mean, math.sqrt((deviations**2).sum() * n / (n - 1)) / units.sum() if n > 1 else math.nan


def losses(table, documents):
    """{"loss": nats a token, "bpb": bits per byte or None, "stderr", "bpb_stderr"} of `validate`'s table."""
    nats, targets, text = table
    loss, stderr = ratio(nats, targets, documents)
    known = text.any() and not np.isnan(text).any()
    bits = ratio(nats / math.log(2), text, documents) if known else (None, None)
    return dict(loss=loss, stderr=stderr, bpb=bits[0], bpb_stderr=bits[1])


def mixed(each, shares):
    """The `losses` of a mixture of folders, with theirs; bits per byte differ too much to have a mean."""
    parts = [*each.values()]
    if len(parts) == 1:
        return parts[0] | {"folders": {}}
    loss = sum(share * part["loss"] for share, part in zip(shares, parts))
    stderr = math.hypot(*(share * part["stderr"] for share, part in zip(shares, parts)))
    return dict(loss=loss, stderr=stderr, bpb=None, folders=each)


def in_words(score):
    """Parts of a line for the console; after ±, the standard errors."""
    spread = lambda error: "" if math.isnan(error) else f" ±{error:.4f}"  # of one document it is unknown
    words = [f"loss {score['loss']:.4f}{spread(score['stderr'])}"]
    if score["bpb"] is not None:
        words.append(f"{score['bpb']:.4f}{spread(score['bpb_stderr'])} bits/byte")
    return words


@dataclasses.dataclass
class Evaluation:
    """What Evaluations.add was given."""

    interval: int
    function: Callable
    lines: Callable
    best: str | None
    whole_rows: bool
    at_start: bool


class Evaluations:
    """The evaluations of a run: functions with a name and an interval; one chooses the best checkpoint."""

    def __init__(self, state, autocast, log, watch, cfg):
        """state: a train.State, of which `evaluated` and `score` are set here."""
        self.state, self.autocast, self.log, self.watch = state, autocast, log, watch
        self.cfg = cfg
        self.each = {}  # {name: Evaluation}

    def add(self, name, interval, function, lines=None, best=None, whole_rows=True, at_start=True):
        """Calls function(model) every `interval` steps and at the end; 0: never. at_start: before step 1 too.

        function returns {figure: number, or text}, the same on every rank, or None if the run is to stop. It
        runs on all ranks, without gradients, in the run's precision and with the model in eval mode; random
        numbers that it draws do not change those of training. lines: from that dict to lines for the console.
        best: the figure by which the best checkpoint is chosen, the lowest; of one evaluation only.
        whole_rows: each rank has whole rows, of one document each; False: as in training, with its document
        masks, and rows divided by context parallelism.
        """
        if name in self.each or name in TAKEN:
            raise UserError(f"the name {name!r} of an evaluation is in use already; choose another")
        chosen = [other for other, evaluation in self.each.items() if evaluation.best]
        if best and chosen and interval:
            raise UserError(f"evaluations {chosen[0]!r} and {name!r} both choose the best checkpoint")
        if interval:
            self.each[name] = Evaluation(interval, function, lines or in_figures, best, whole_rows, at_start)

    def due(self):
        """Names of those that are due now; none if the run was resumed here and had evaluated before."""
        step = self.state.step
        if step == self.state.evaluated:
            return []
        found, ended = [], optim.share_done(self.state, self.cfg) == 1
        for name, own in self.each.items():
            at_interval = step % own.interval == 0 and (step > 0 or own.at_start)
            if at_interval or ended:
                found.append(name)
        return found

    def run(self):
        """Runs those that are due, unless the run is to stop meanwhile."""
        state, score = self.state, None
        device = parallel.device_of(state.model)
        state.model.eval()
        for name in self.due():
            evaluation = self.each[name]
            if self.watch.agreed():
                break
            began = parallel.synchronize(device)
            rows = context_parallel.alone(state.model) if evaluation.whole_rows else contextlib.nullcontext()
            with rows, torch.no_grad(), self.autocast, generators.kept(device):
                found = evaluation.function(state.model)
            if self.watch.stopping:
                break
            if not isinstance(found, dict):
                expected = "expected {figure: number}"
                raise UserError(f"evaluation {name!r} returned {type(found).__name__}; {expected}")
            seconds = parallel.synchronize(device) - began
            found = {"seconds": seconds} | {n: plain(name, n, value) for n, value in found.items()}
            for line in evaluation.lines(found):
                self.log.print(f"{name} {state.step} | {line}")
            self.log.record(name, state.step, **found)
            if evaluation.best and evaluation.best not in found:
                raise UserError(f"evaluation {name!r} has no figure {evaluation.best!r}: {', '.join(found)}")
            if evaluation.best:
                score = found[evaluation.best]
                self.log.refuse(state.step, f"{name} {evaluation.best}", score)
        else:
            state.evaluated, state.score = state.step, score
        state.model.train()
        self.watch.agreed()  # a signal that came meanwhile ends the run before its next step


def plain(evaluation, name, value):
    """A figure as log.jsonl can hold it; a tensor or an array with one element as a number."""
    if name in ("step", "kind"):
        raise UserError(f"evaluation {evaluation!r}: {name} is a name of the log's own; choose another")
    if torch.is_tensor(value) or isinstance(value, (np.ndarray, np.generic)):
        if math.prod(value.shape) != 1:
            shape = tuple(value.shape)
            raise UserError(f"evaluation {evaluation!r}: {name} has the shape {shape}; expected one number")
        return value.item()
    return value


def in_figures(found):
    """One line for the console of an evaluation's figures."""
    words = []
    for name, value in found.items():
        if name != "seconds":
            words.append(f"{name} {value:.4f}" if isinstance(value, float) else f"{name} {value}")
    return [" | ".join([*words, f"{found['seconds']:.1f} s"])]


def validation(model, loaders, tokens, autocast, own, stop):
    """The losses of the data folders. loaders: [(share of the loss and of the tokens, loader)]."""
    each, extras = {}, {}
    for share, loader in loaders:
        part = max(loader.T, round(share * tokens))
        table, found = validate(model, loader, part, autocast, own, stop)
        if stop():
            return None
        each[loader.data_dir] = losses(table, loader.documents(table.shape[1]))
        for name, value in found.items():
            extras[name] = extras.get(name, 0.0) + share * value
    score = mixed(each, [share for share, _ in loaders])
    return score | {"extras": extras} if extras else score


def validation_lines(score):
    words = [f"{folder}: {', '.join(in_words(part))}" for folder, part in score["folders"].items()]
    words += [f"{name} {value:.4f}" for name, value in score.get("extras", {}).items()]
    return [" | ".join([*in_words(score), *words, f"{score['seconds']:.1f} s"])]


def add_evaluations(evaluations, cfg, world, val_loaders):
    """Adds what cfg asks for; returns warnings of what cannot be evaluated. val_loaders: see validation."""
    if cfg.eval_interval:
        add_validation(evaluations, cfg, world, val_loaders)
    if not (cfg.hellaswag_interval or cfg.sample_interval):
        return []
    from corpus import tokenizer as tokenizers

    tokenizer = tokenizers.load(cfg.tokenizer or "gpt2", cfg.vocab_size)
    if cfg.sample_interval:
        add_samples(evaluations, cfg, world, tokenizer)
    return add_hellaswag(evaluations, cfg, world, tokenizer) if cfg.hellaswag_interval else []


def add_validation(evaluations, cfg, world, loaders):
    own = functools.partial(context_parallel.own_tokens, cfg, world)
    stop = evaluations.watch.agreed
    splits = ", ".join(f"{share:g} of {getattr(loader, 'fingerprint', None)}" for share, loader in loaders)
    held_out = f"{splits}; {cfg.eval_tokens} tokens in rows of {cfg.block_size}"  # the same: runs compare

    def evaluate(model):
        found = validation(model, loaders, cfg.eval_tokens, evaluations.autocast, own, stop)
        return found and found | {"held_out": held_out}

    evaluations.add("val", cfg.eval_interval, evaluate, validation_lines, best="loss", whole_rows=False)


def add_samples(evaluations, cfg, world, tokenizer):
    """Each rank draws its own; the console has rank 0's, log.jsonl the others' with their rank as well."""
    from run import sampling

    def evaluate(model):
        options = dict(tokenizer=tokenizer, prompt=cfg.sample_prompt, seed=cfg.seed + world.rank)
        first, *others = parallel.gather_objects(sampling.texts(model, **options, **SAMPLES))
        found = {"texts": first}
        if others:
            found["others"] = [{"rank": rank, "texts": texts} for rank, texts in enumerate(others, 1)]
        return found

    lines = lambda found: map(repr, found["texts"])
    evaluations.add("sample", cfg.sample_interval, evaluate, lines, at_start=False)


def add_hellaswag(evaluations, cfg, world, tokenizer):
    """Returns [a warning] where the examples cannot be had."""
    import hellaswag

    found = problem = None  # a problem of one rank is one of all
    try:
        found = hellaswag.load(cfg.hellaswag_file)
    except hellaswag.Unavailable as error:
        problem = str(error)
    for why in parallel.gather_objects(problem):
        if why:
            return [f"no HellaSwag in this run: {why}"]
    agreement.examples(found)
    examples = hellaswag.prepare(found, tokenizer, cfg.block_size)

    def evaluate(model):
        return hellaswag.evaluate(model, examples, world.device, stop=evaluations.watch.agreed)[0]

    lines = lambda score: [hellaswag.in_words(score)]
    evaluations.add("hellaswag", cfg.hellaswag_interval, evaluate, lines)
    return []
