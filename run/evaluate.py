"""Evaluation: validation loss and bits per byte with standard errors, HellaSwag, and samples to read."""

import functools
import math

import numpy as np
import torch

from run.logger import progress
from scale import context, parallel

SAMPLES = dict(n=4, max_new_tokens=64, temperature=0.8, top_k=50)


@torch.no_grad()
def validate(model, loader, tokens, autocast, own=lambda batch: batch, stop=lambda: False):
    """Evaluates a split's first rows, about `tokens` tokens; returns float64 (3, rows), equal on every rank.

    The three: a row's loss in nats, its targets, bytes of their text (0: unknown). own: this rank's part.
    """
    device, stride = parallel.device_of(model), loader.world * loader.B
    sizes = None if loader.token_bytes is None else torch.as_tensor(loader.token_bytes, device=device)
    rows = loader.eval_rows(tokens)
    table = torch.zeros(3, -(-rows // stride) * stride, device=device)
    batches = progress(map(own, loader.eval_batches(tokens)), "validation", -(-rows // stride), stop)
    for first, (x, y) in zip(range(loader.rank * loader.B, table.size(1), stride), batches):
        with autocast:
            loss = model(x, y, "none").float().view_as(y)
        real = y >= 0
        text = real * 0 if sizes is None else sizes[y.clamp(min=0)] * real
        table[:, first : first + loader.B] = torch.stack([loss.sum(1), real.sum(1), text.sum(1)])
    return parallel.sum_over_ranks(table)[:, :rows].double().cpu().numpy()


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
    bits = ratio(nats / math.log(2), text, documents) if text.any() else (None, None)
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


class Evaluator:
    """Runs the evaluations of a train.Training that are due after a step. done: the step evaluated last."""

    def __init__(self, job, log, stop, max_steps, done):
        self.model, self.autocast, self.log, self.stop = job.raw, job.autocast, log, stop
        self.max_steps, self.done, self.loss, self.parts = max_steps, done, None, []

    def every(self, interval, part, *arguments):
        """Adds part(step, *arguments), before the first step, at an interval of steps and at the end."""
        self.parts += [(interval, part, arguments)] if interval else []

    def due(self, step):
        """The parts that are due after `step`; none if the run was resumed there and had evaluated before."""
        end = step == self.max_steps
        return [part for part in self.parts if step != self.done and (end or step % part[0] == 0)]

    def __call__(self, step):
        """Returns the validation loss; None if it is not due, or the run is to stop before it is known."""
        self.model.eval()
        self.loss = None
        for _, part, arguments in self.due(step):
            if not self.stop():
                part(step, *arguments)
        self.model.train()
        self.done = self.done if self.stop() else step
        return self.loss

    def state(self, step):
        """What a checkpoint records of the evaluation after `step`, which a run that stops may have left."""
        return {"val_loss": self.loss if self.done == step else None, "evaluated": not self.due(step)}

    def validation(self, step, loaders, tokens, own):
        """loaders: [(share of the loss and of the tokens, loader)] of the data folders."""
        began, each = parallel.synchronize(parallel.device_of(self.model)), {}
        for share, loader in loaders:
            part = max(loader.T, round(share * tokens))
            table = validate(self.model, loader, part, self.autocast, own, self.stop)
            if self.stop():
                return
            each[loader.data_dir] = losses(table, loader.documents(table.shape[1]))
        score = mixed(each, [share for share, _ in loaders])
        words = [f"{folder}: {', '.join(in_words(part))}" for folder, part in score["folders"].items()]
        seconds = parallel.synchronize(parallel.device_of(self.model)) - began
        self.log.print(" | ".join([f"val {step}", *in_words(score), *words, f"{seconds:.1f} s"]))
        self.log.record("val", step, **score, seconds=seconds)
        self.loss = score["loss"]

    def hellaswag(self, step, module, examples):
        device = parallel.device_of(self.model)
        with context.alone(self.model):
            score, _ = module.evaluate(self.model, examples, device, autocast=self.autocast, stop=self.stop)
        if not self.stop():
            self.log.print(f"hellaswag {step} | {module.in_words(score)}")
            self.log.record("hellaswag", step, **score)

    def samples(self, step, sample):
        with self.autocast, context.alone(self.model):
            texts = sample(self.model)
        for text in texts:
            self.log.print(f"sample {step} | {text!r}")
        self.log.record("sample", step, texts=texts)


def add_evaluations(evaluate, cfg, world, val_loaders):
    """Adds what cfg asks for; returns warnings of what cannot be evaluated."""
    warnings, own = [], functools.partial(context.own_tokens, cfg, world)
    evaluate.every(cfg.eval_interval, evaluate.validation, val_loaders, cfg.eval_tokens, own)
    if cfg.hellaswag_interval or cfg.sample_interval:
        import hellaswag
        from corpus import tokenizer as tokenizers
        from run import sampling

        tokenizer = tokenizers.load(cfg.tokenizer or "gpt2", cfg.vocab_size)
    if cfg.hellaswag_interval:
        examples = problem = None  # a problem of one rank is one of all
        try:
            examples = hellaswag.prepare(hellaswag.load(cfg.hellaswag_file), tokenizer, cfg.block_size)
        except hellaswag.Unavailable as error:
            problem = str(error)
        warnings = [f"no HellaSwag in this run: {why}" for why in parallel.gather_objects(problem) if why][:1]
        evaluate.every(0 if warnings else cfg.hellaswag_interval, evaluate.hellaswag, hellaswag, examples)
    if cfg.sample_interval:
        options = dict(tokenizer=tokenizer, prompt=cfg.sample_prompt, seed=cfg.seed, **SAMPLES)
        evaluate.every(cfg.sample_interval, evaluate.samples, functools.partial(sampling.texts, **options))
    return warnings
