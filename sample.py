"""Generate text from a checkpoint.

    python sample.py --checkpoint=out/gpt2_124m --prompt="Once upon a time" --n_samples=4
    python sample.py --pretrained=gpt2 --prompt=FILE:story.txt --temperature=0.8 --top_k=50
    torchrun --standalone --nproc_per_node=8 sample.py --checkpoint=out/llama3_8b --n_samples=32    # 4 on each GPU
    torchrun --standalone --nproc_per_node=4 sample.py --checkpoint=out/llama3_70b --parallel=fsdp  # sharded
    python sample.py --pretrained=FOLDER --chat                                       # a conversation: a line, a reply

Prints the text as it is generated, and at the end tokens a second. The sampling is in run/sampling.py.
"""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from configurator import UserError, refuse, run, too_small


@dataclass
class Config:
    checkpoint: str | None = None  # folder of a run or of a checkpoint
    pretrained: str | None = None  # instead: Hugging Face weights, a folder or a hub name
    tokenizer: str | None = (
        None  # None: the one that the checkpoint was trained with, or beside the pretrained weights
    )
    prompt: str | None = (
        None  # text to continue, or FILE:PATH of one; None: a new line, with chat the lines of stdin
    )
    chat: bool = False  # the prompt is a message, put into the chat template of the tokenizer's folder
    n_samples: int = 4  # number of continuations
    max_new_tokens: int = 200  # tokens to generate for each
    stop: bool = True  # end where the model ends its text (eos); --no_stop goes on to max_new_tokens
    temperature: float = 0.8  # divides the logits; 0: always the most likely token
    top_k: int | None = 50  # sample among the k most likely tokens; None: among all
    cache: bool = (
        True  # keep the keys and values of earlier tokens; --no_cache: computed again for each token
    )
    seed: int = 1337  # of the first sample; the next one's is 1 higher
    device: str = "auto"  # auto, cpu, cuda, mps
    precision: Literal["auto", "fp32", "tf32", "bf16", "fp16"] = (
        "auto"  # auto: bf16 where the GPU supports it
    )
    parallel: Literal["ddp", "fsdp"] = (
        "ddp"  # what a rank holds; ddp: the whole model; fsdp: a part of each tensor
    )

    nanogpt = {"out_dir": "checkpoint", "start": "prompt", "num_samples": "n_samples", "dtype": "precision"}


def main(cfg):
    found = too_small(cfg, {"n_samples": 1, "max_new_tokens": 0, "temperature": 0, "top_k": 1, "seed": 0})
    refuse(found + [f"seed={cfg.seed} must be below 2**63"] * (cfg.seed >= 2**63))
    prompt = read_prompt(cfg.prompt)
    if cfg.chat and prompt is None and int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise UserError(
            "chat=True without a prompt reads stdin, which ranks cannot share; leave out torchrun"
        )
    from corpus import chat
    from run import sampling, trained
    from scale import parallel
    from scale.precision import autocast, pick_precision

    device = parallel.pick_device(cfg.device)
    precision, _ = pick_precision(cfg.precision, device)
    model, saved = trained.load(cfg, device, precision)
    tokenizer = trained.load_tokenizer(cfg, model, saved)
    template = chat.Template(trained.folders(cfg, tokenizer)[0], tokenizer) if cfg.chat else None
    shown = [] if template else tokenizer.encode("\n" if prompt is None else prompt)
    ids = [tokenizer.eot, *shown]
    if template and prompt is not None:
        ids = template.ids([message("user", prompt)])
    world = parallel.start(
        cfg.device, timeout_s=3600
    )  # now: a mistake above would break the others' connections
    options = cfg.max_new_tokens, cfg.temperature, cfg.top_k
    printer = sampling.Printer(model, tokenizer, cfg.stop, *options, cached=cfg.cache, quiet=not world.main)
    with autocast(precision, device):
        if template and prompt is None:
            converse(printer, template, cfg.seed)
        else:
            for first in range(0, cfg.n_samples, world.size):
                share(printer, ids, shown, cfg, first, world)
    parts = parallel.gather_objects((printer.tokens, printer.seconds))
    tokens, seconds = sum(n for n, _ in parts), max(s for _, s in parts)
    if world.main:
        print(f"{tokens:,} tokens in {seconds:.1f} s, {tokens / max(seconds, 1e-9):,.1f} tokens/s")
    parallel.stop()


def share(printer, ids, shown, cfg, first, world):
    """Samples from number `first` on, one on each rank; rank 0 prints its own as it comes, and then the others'."""
    from scale import parallel

    number = first + world.rank
    own = printer(ids, cfg.seed + number, shown) if number < cfg.n_samples else printer.attend(ids)
    for rank, text in enumerate(parallel.gather_objects(own)):
        if world.main and text is not None:
            print("-" * 80 if rank == 0 else f"{text}\n{'-' * 80}")


def read_prompt(prompt):
    if prompt is None or not prompt.startswith("FILE:"):
        return prompt
    try:
        return Path(prompt[5:]).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UserError(f"prompt={prompt}: cannot be read as UTF-8 text ({error})") from None


def converse(printer, template, seed):
    """Replies to each line of stdin, which is to end with Ctrl-D."""
    said = []
    while True:
        try:
            said.append(message("user", input("> " if sys.stdin.isatty() else "")))
        except EOFError:
            return
        said.append(message("assistant", printer(template.ids(said), seed)))


def message(role, content):
    return {"role": role, "content": content}


if __name__ == "__main__":
    run(main, Config)
