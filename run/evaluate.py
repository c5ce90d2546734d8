"""Evaluation during a run: validation loss, bits per byte, HellaSwag, and samples to read."""

import functools
import math

import torch

from run.logger import progress
from scale import context, parallel

SAMPLES = dict(n=4, max_new_tokens=64, temperature=0.8, top_k=50)


@torch.no_grad()
def validate(model, loader, tokens, autocast, own, stop):
    """(nats per token, bits per byte or None) over the first `tokens` validation tokens, from all ranks."""
    device = parallel.device_of(model)
    exact = torch.float32 if device.type == "mps" else torch.float64
    sizes = None if loader.token_bytes is None else torch.as_tensor(loader.token_bytes, device=device)
    total = torch.zeros(3, dtype=exact, device=device)  # nats, targets, bytes
    batches = -(-(min(tokens, loader.tokens - 1) // loader.T) // (loader.world * loader.B))
    for x, y in progress(map(own, loader.eval_batches(tokens)), "validation", batches, stop):
        with autocast:
            loss = model(x, y, "none")
        real = y >= 0
        text = real.sum() * 0 if sizes is None else (sizes[y.clamp(min=0)] * real).sum()
        total += torch.stack([loss.sum(dtype=exact), real.sum(), text])
    nats, targets, text = parallel.sum_over_ranks(total).tolist()
    return nats / max(1, targets), nats / math.log(2) / text if text else None


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
        began = parallel.synchronize(parallel.device_of(self.model))
        loss, bpb, each = 0.0, None, {}
        for share, loader in loaders:
            part = max(loader.T, round(share * tokens))
            nats, bpb = validate(self.model, loader, part, self.autocast, own, self.stop)
            loss, each[loader.data_dir] = loss + share * nats, nats
        if self.stop():
            return
        if mixed := len(each) > 1:
            bpb = None  # bytes a token differ by folder
        words = [f"{nats:.4f} on {folder}" for folder, nats in each.items()] * mixed
        words += [] if bpb is None else [f"{bpb:.4f} bits/byte"]
        seconds = parallel.synchronize(parallel.device_of(self.model)) - began
        self.log.print(" | ".join([f"val {step}", f"loss {loss:.4f}", *words, f"{seconds:.1f} s"]))
        folders = {"folders": each} if mixed else {}
        self.log.record("val", step, loss=loss, bpb=bpb, seconds=seconds, **folders)
        self.loss = loss

    def hellaswag(self, step, module, examples):
        device = parallel.device_of(self.model)
        with context.alone(self.model):
            score = module.evaluate(self.model, examples, device, autocast=self.autocast, stop=self.stop)
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
