"""Generate text from a checkpoint.

python sample.py --checkpoint=out/gpt2_124m --prompt="Once upon a time" --n_samples=4
python sample.py --pretrained=gpt2 --temperature=0.8 --top_k=50
"""

import itertools
from dataclasses import dataclass
from typing import Literal

import torch

import checkpoint
import parallel
import tokenizer as tokenizers
from configurator import UserError, refuse, run, too_small


@dataclass
class Config:
    checkpoint: str | None = None  # a run's or a checkpoint's folder
    pretrained: str | None = None  # instead: Hugging Face weights, a folder or a hub name
    tokenizer: str | None = None  # None: the one that the checkpoint was trained with (gpt2 for pretrained)
    prompt: str = "\n"  # text to continue
    n_samples: int = 4  # continuations
    max_new_tokens: int = 200  # tokens to add
    temperature: float = 0.8  # divides the logits; 0: always the likeliest token
    top_k: int | None = 50  # sample among the k likeliest; None: among all
    seed: int = 1337  # of the sampling
    device: str = "auto"  # auto, cpu, cuda, mps
    precision: Literal["auto", "fp32", "tf32", "bf16", "fp16"] = "auto"  # auto: bf16 where the GPU has it


@torch.no_grad()
def generate(model, ids, max_new_tokens, temperature=1.0, top_k=None, seed=0):
    """Continues each row of ids (B, T) int64 by max_new_tokens; returns (B, T + max_new_tokens).

    The window keeps one width throughout (what is right of the present is masked by causality), so that a compiled
    model sees a single shape; beyond block_size the context is the last block_size tokens. Seeded apart from training.
    """
    generator = torch.Generator(ids.device).manual_seed(seed)
    B, T = ids.shape
    total = T + max_new_tokens
    width = min(model.cfg.block_size, -(-total // 64) * 64)
    buffer = torch.zeros(B, max(total, width), dtype=torch.long, device=ids.device)
    buffer[:, :T] = ids
    for end in range(T, total):
        begin = max(0, end - width)
        at = torch.tensor([end - begin - 1], device=ids.device)
        logits = model.logits(buffer[:, begin : begin + width], at)[:, 0]  # (B, V)
        buffer[:, end] = pick(logits, temperature, top_k, generator)
    return buffer[:, :total]


def pick(logits, temperature, top_k, generator):
    """One id a row from logits (B, V)."""
    if temperature == 0:
        return logits.argmax(-1)
    logits = logits / temperature
    if top_k is not None:
        logits, ids = logits.topk(min(top_k, logits.size(-1)))
        return ids.gather(1, torch.multinomial(logits.softmax(-1), 1, generator=generator)).squeeze(1)
    return torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(1)


def texts(model, tokenizer, prompt, n, max_new_tokens, temperature, top_k, seed):
    """n continuations of `prompt` as strings, the prompt included; each ends where its document does."""
    device = parallel.device_of(model)
    ids = torch.tensor([[tokenizer.eot, *tokenizer.encode(prompt)]] * n, device=device)
    rows = generate(model, ids, max_new_tokens, temperature, top_k, seed)[:, 1:].tolist()
    return [tokenizer.decode(itertools.takewhile(lambda i: i not in tokenizer.ends, row)) for row in rows]


def load(cfg, device):
    """(model, its saved settings) from cfg.checkpoint or cfg.pretrained."""
    if (cfg.checkpoint is None) == (cfg.pretrained is None):
        raise UserError("give one of --checkpoint=FOLDER and --pretrained=FOLDER_OR_HUB_NAME")
    if cfg.checkpoint is not None:
        return checkpoint.load_model(cfg.checkpoint, device)
    import convert

    return convert.load_hf(cfg.pretrained, device)


def load_tokenizer(cfg, model, saved):
    """cfg.tokenizer, or the one that the model of `load` was trained with; GPT-2's where nobody says."""
    name = cfg.tokenizer or getattr(saved, "tokenizer", None) or "gpt2"
    return tokenizers.load(name, model.cfg.vocab_size)


def main(cfg):
    found = too_small(cfg, {"n_samples": 1, "max_new_tokens": 0, "temperature": 0, "top_k": 1, "seed": 0})
    refuse(found + [f"seed={cfg.seed} must be below 2**63"] * (cfg.seed >= 2**63))
    device = parallel.pick_device(cfg.device)
    precision, _ = parallel.pick_precision(cfg.precision, device)
    model, saved = load(cfg, device)
    tokenizer = load_tokenizer(cfg, model, saved)
    with parallel.autocast(precision, device):
        options = (cfg.n_samples, cfg.max_new_tokens, cfg.temperature, cfg.top_k, cfg.seed)
        for text in texts(model.eval(), tokenizer, cfg.prompt, *options):
            print(text + "\n" + "-" * 80)


if __name__ == "__main__":
    run(main, Config)
