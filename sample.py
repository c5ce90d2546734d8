"""Generate text from a checkpoint.

    python sample.py --checkpoint=out/gpt2_124m --prompt="Once upon a time"
    python sample.py --pretrained=gpt2 --prompt="$(cat story.txt)" --top_k=50
    torchrun --standalone --nproc_per_node=8 sample.py --checkpoint=out/a \\
        --n_samples=32
    python sample.py --pretrained=FOLDER --chat  # a conversation, line by line

Prints the text as it is generated, then tokens a second. The sampling is in
run/sampling.py.
"""

import contextlib
import sys
import time
from dataclasses import dataclass

from configurator import run, too_small
from settings import TrainedConfig
from system.errors import UserError, refuse, say, this_rank


@dataclass
class Config(TrainedConfig):
    prompt: str | None = None  # text; None: a new line, with chat the lines of stdin
    chat: bool = False  # the prompt is a message, put into the tokenizer's chat template
    n_samples: int = 4  # number of continuations
    max_new_tokens: int = 200  # tokens to generate for each
    bos: bool = True  # the documents' separator precedes the prompt, as in training; not with chat
    stop: bool = True  # end where the model ends its text (eos); --no_stop: at max_new_tokens
    temperature: float = 0.8  # divides the logits; 0: always the most likely token
    top_k: int | None = 50  # sample among the k most likely tokens; None: among all
    cache: bool = True  # keep keys and values of earlier tokens; --no_cache: compute them anew
    seed: int = 1337  # of the first sample; +1 for each next one

    # nanoGPT's names, and what is meant here
    others_names = {"start": "prompt", "out_dir": "checkpoint", "num_samples": "n_samples"}


def main(cfg):
    least = {"n_samples": 1, "max_new_tokens": 0, "temperature": 0, "top_k": 1, "seed": 0}
    refuse(too_small(cfg, least))
    talk = cfg.chat and cfg.prompt is None
    if talk and this_rank().size > 1:
        raise UserError("chat=True without a prompt reads stdin, which ranks cannot share")
    from corpus import chat
    from run import sampling, trained
    from scale import parallel

    world, model, tokenizer, autocast = trained.load(cfg)
    if cfg.chat:
        template = chat.Template(trained.folders(cfg, tokenizer)[0], tokenizer)
    with autocast:
        printer = sampling.Printer(model, tokenizer, cfg)
        if talk:
            converse(printer, template)
        elif cfg.chat:
            ids = template.ids([dict(role="user", content=cfg.prompt)])
            print_samples(printer, ids, [], world)
        else:
            shown = tokenizer.encode(cfg.prompt or "\n")
            ids = [tokenizer.eot, *shown] if cfg.bos else shown
            print_samples(printer, ids, shown, world)
    parallel.stop()


def print_samples(printer, ids, shown, world):
    """Each rank makes a sample; rank 0 prints its own as it comes, then the others'."""
    from scale import parallel

    cfg = printer.cfg
    began = time.perf_counter()
    tokens = 0
    for first in range(0, cfg.n_samples, world.size):
        own = printer(ids, cfg.seed + first + world.rank, shown)
        rows = parallel.gather_objects(own)[: cfg.n_samples - first]
        tokens += sum(map(len, rows))
        if world.main:
            say("-" * 80)
            for row in rows[1:]:
                say(printer.tokenizer.decode(shown + row), "-" * 80, sep="\n")
    seconds = time.perf_counter() - began
    if world.main:
        say(f"{tokens:,} tokens in {seconds:.1f} s, {tokens / seconds:,.1f} tokens/s")


def converse(printer, template):
    """Replies to each line of stdin, until Ctrl-D."""
    messages = []
    sign = "> " if sys.stdin.isatty() else ""
    with contextlib.suppress(EOFError):
        while True:
            messages.append(dict(role="user", content=input(sign)))
            new = printer(template.ids(messages), printer.cfg.seed)
            messages.append(dict(role="assistant", content=printer.tokenizer.decode(new)))


if __name__ == "__main__":
    run(main, Config)
