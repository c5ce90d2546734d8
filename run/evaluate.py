"""Evaluation during a run: validation loss, bits per byte, HellaSwag, and samples to read."""

import functools
import math

import torch

import hellaswag
from corpus import tokenizer as tokenizers
from run import sampling, watch
from run.logger import progress
from scale import context, parallel


@torch.no_grad()
def validate(model, loader, tokens, autocast, own=lambda batch: batch):
    """(nats per token, bits per byte or None) over the first `tokens` validation tokens; all ranks call it.

    The result does not depend on the number of ranks or the batch size. own: a function that cuts a batch to this
    rank's tokens, for context parallelism.
    """
    device = parallel.device_of(model)
    exact = torch.float32 if device.type == "mps" else torch.float64
    sizes = None if loader.token_bytes is None else torch.as_tensor(loader.token_bytes, device=device)
    total = torch.zeros(3, dtype=exact, device=device)  # nats, targets, bytes
    batches = -(-(min(tokens, loader.tokens - 1) // loader.T) // (loader.world * loader.B))
    for x, y in progress(map(own, loader.eval_batches(tokens)), "validation", batches):
        with autocast:
            loss = model(x, y, "none")
        real = y >= 0
        text = real.sum() * 0 if sizes is None else (sizes[y.clamp(min=0)] * real).sum()
        total += torch.stack([loss.sum(dtype=exact), real.sum(), text])
    nats, targets, text = parallel.sum_over_ranks(total).tolist()
    return nats / targets, nats / math.log(2) / text if text else None


class Evaluator:
    """Runs the evaluations that are due after a step. Every rank calls it. `warnings` says which cannot run."""

    def __init__(self, cfg, world, job, val_loaders):
        """job: a train.Training; its model is evaluated under its autocast. val_loaders: see build.make_loaders."""
        self.cfg, self.model, self.autocast, self.val_loaders = cfg, job.raw, job.autocast, val_loaders
        self.own = functools.partial(context.own_tokens, cfg, world)
        self.warnings, self.examples, self.tokenizer = [], None, None
        self.done, self.loss = None, None  # the step evaluated last, its validation loss
        for share, loader in val_loaders:
            if share * cfg.eval_tokens > 1.01 * loader.tokens:
                words = f"{loader.data_dir} has {loader.tokens:,} validation tokens, less than its part of eval_tokens"
                self.warnings.append(f"{words}={cfg.eval_tokens:,}; each validation reads them once")
        if cfg.hellaswag_interval or cfg.sample_interval:
            self.tokenizer = tokenizers.load(cfg.tokenizer or "gpt2", cfg.vocab_size)
        if cfg.hellaswag_interval:
            try:
                examples = hellaswag.load(cfg.hellaswag_file)
                self.examples = hellaswag.prepare(examples, self.tokenizer, cfg.block_size)
            except hellaswag.Unavailable as error:
                self.warnings.append(f"no HellaSwag in this run: {error}")
            if not all(parallel.gather_objects(self.examples is not None)):  # all ranks take part or none
                if self.examples is not None:
                    self.warnings.append("no HellaSwag in this run: another rank has no file")
                self.examples = None

    def due(self, interval, step):
        return interval and (step % interval == 0 or step == self.cfg.max_steps)

    def due_at(self, step):
        """Whether any evaluation is due after `step`, and not done: a resumed run evaluated before it was saved."""
        cfg = self.cfg
        return step != self.done and any(
            self.due(i, step) for i in (cfg.eval_interval, cfg.hellaswag_interval, cfg.sample_interval)
        )

    def __call__(self, step, log):
        """Evaluates, prints and records to `log`; returns the validation loss, or None if it was not due."""
        self.model.eval()
        self.loss = self.validation(step, log) if self.due(self.cfg.eval_interval, step) else None
        if self.examples is not None and self.due(self.cfg.hellaswag_interval, step):
            self.hellaswag(step, log)
        if self.due(self.cfg.sample_interval, step):
            watch.boundary("samples")
            self.samples(step, log)
        self.model.train()
        self.done = step
        return self.loss

    def state(self, step):
        """What a checkpoint says of the evaluation after `step`, which a run that was told to stop may have left."""
        done = self.done == step
        return {"val_loss": self.loss if done else None, "evaluated": done or not self.due_at(step)}

    def validation(self, step, log):
        device = parallel.device_of(self.model)
        began = parallel.synchronize(device)
        loss, bpb, each = 0.0, None, {}
        for share, loader in self.val_loaders:
            tokens = max(self.cfg.block_size, round(share * self.cfg.eval_tokens))
            nats, bpb = validate(self.model, loader, tokens, self.autocast, self.own)
            loss, each[loader.data_dir] = loss + share * nats, nats
        if mixed := len(each) > 1:
            bpb = None  # bytes a token differ by folder
        words = [f"{nats:.4f} on {folder}" for folder, nats in each.items()] * mixed
        words += [] if bpb is None else [f"{bpb:.4f} bits/byte"]
        seconds = parallel.synchronize(device) - began
        log.print(" | ".join([f"val {step}", f"loss {loss:.4f}", *words, f"{seconds:.1f} s"]))
        log.record("val", step, loss=loss, bpb=bpb, seconds=seconds, **({"folders": each} if mixed else {}))
        return loss

    def hellaswag(self, step, log):
        device = parallel.device_of(self.model)
        with context.alone(self.model):
            score = hellaswag.evaluate(self.model, self.examples, device, autocast=self.autocast)
        log.print(f"hellaswag {step} | {hellaswag.in_words(score)}")
        log.record("hellaswag", step, **score)

    def samples(self, step, log):
        cfg = self.cfg
        options = (cfg.n_samples, cfg.sample_tokens, cfg.temperature, cfg.top_k, cfg.seed)
        with self.autocast, context.alone(self.model):
            texts = sampling.texts(self.model, self.tokenizer, cfg.sample_prompt, *options)
        for text in texts:
            log.print(f"sample {step} | {text!r}")
        log.record("sample", step, texts=texts)
