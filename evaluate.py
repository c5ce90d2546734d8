"""What a run is judged by while it trains: validation loss, bits per byte, HellaSwag, and samples to read."""

import math

import torch

import context
import documents
import hellaswag
import parallel
import sample
import tokenizer as tokenizers
from logger import progress


@torch.no_grad()
def validate(model, loader, tokens, autocast, own=lambda batch: batch):
    """(nats a token, bits a byte or None) over the first `tokens` validation tokens, for any ranks and batch size.

    own: cuts a batch to this rank's part of its sequences, where several share them.
    """
    device = parallel.device_of(model)
    exact = torch.float32 if device.type == "mps" else torch.float64
    sizes = None if loader.token_bytes is None else torch.as_tensor(loader.token_bytes, device=device)
    total = torch.zeros(3, dtype=exact, device=device)  # nats, targets, bytes
    for x, y in progress(map(own, loader.eval_batches(tokens)), "validation"):
        with autocast:
            loss = model(x, y, "none")
        real = y >= 0
        text = real.sum() * 0 if sizes is None else (sizes[y.clamp(min=0)] * real).sum()
        total += torch.stack([loss.sum(dtype=exact), real.sum(), text])
    nats, targets, text = parallel.sum_over_ranks(total).tolist()
    return nats / targets, nats / math.log(2) / text if text else None


class Evaluator:
    """Runs what is due after a step; every rank calls it. `warnings` says what could not be set up."""

    def __init__(self, cfg, model, val_loader, tokenizer, autocast, own=lambda batch: batch):
        self.cfg, self.model, self.val_loader, self.autocast, self.own = cfg, model, val_loader, autocast, own
        self.warnings, self.examples, self.tokenizer = [], None, None
        if cfg.hellaswag_interval or cfg.sample_interval:
            self.tokenizer = tokenizers.load(tokenizer, cfg.vocab_size)
        if cfg.hellaswag_interval:
            try:
                examples = hellaswag.load(cfg.hellaswag_file)
                self.examples = hellaswag.prepare(examples, self.tokenizer, cfg.block_size)
            except hellaswag.Unavailable as error:
                self.warnings.append(f"no HellaSwag in this run: {error}")
            if not all(parallel.gather_objects(self.examples is not None)):  # all ranks take part in it or none
                self.warnings = self.warnings or ["no HellaSwag in this run: another rank has no file"]
                self.examples = None

    def due(self, interval, step):
        return interval and (step % interval == 0 or step == self.cfg.max_steps)

    def due_at(self, step):
        """Whether a call after `step` would do anything."""
        cfg = self.cfg
        return any(self.due(i, step) for i in (cfg.eval_interval, cfg.hellaswag_interval, cfg.sample_interval))

    def __call__(self, step, log):
        """Prints and records to `log`; returns the validation loss, None if it was not due."""
        self.model.eval()
        loss = self.validation(step, log) if self.due(self.cfg.eval_interval, step) else None
        if self.examples is not None and self.due(self.cfg.hellaswag_interval, step):
            self.hellaswag(step, log)
        if self.due(self.cfg.sample_interval, step):
            self.samples(step, log)
        self.model.train()
        return loss

    def validation(self, step, log):
        device = parallel.device_of(self.model)
        began = parallel.synchronize(device)
        loss, bpb = validate(self.model, self.val_loader, self.cfg.eval_tokens, self.autocast, self.own)
        seconds = parallel.synchronize(device) - began
        bits = "" if bpb is None else f"{bpb:.4f} bits/byte | "
        log.print(f"val {step} | loss {loss:.4f} | {bits}{seconds:.1f} s")
        log.record("val", step, loss=loss, bpb=bpb, seconds=seconds)
        return loss

    def hellaswag(self, step, log):
        device = parallel.device_of(self.model)
        with context.alone(self.model), documents.off(self.model):
            score = hellaswag.evaluate(self.model, self.examples, device, autocast=self.autocast)
        log.print(
            f"hellaswag {step} | acc_norm {score['acc_norm']:.4f} | acc {score['acc']:.4f} | "
            f"{score['n']:,} examples | {score['seconds']:.1f} s"
        )
        log.record("hellaswag", step, **score)

    def samples(self, step, log):
        cfg = self.cfg
        options = (cfg.n_samples, cfg.sample_tokens, cfg.temperature, cfg.top_k, cfg.seed)
        with self.autocast, context.alone(self.model), documents.off(self.model):
            texts = sample.texts(self.model, self.tokenizer, cfg.sample_prompt, *options)
        for text in texts:
            log.print(f"sample {step} | {text!r}")
        log.record("sample", step, texts=texts)
