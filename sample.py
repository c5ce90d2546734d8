"""Generate text from a checkpoint.

    python sample.py --checkpoint=out/gpt2_124m --prompt="Once upon a time"
    python sample.py --pretrained=gpt2 --prompt="$(cat story.txt)" --top_k=50
    torchrun --standalone --nproc_per_node=8 sample.py --checkpoint=out/a \\
        --n_samples=32
    python sample.py --pretrained=FOLDER --chat  # a conversation, line by line

Prints the text as it is generated, then tokens a second. The sampling is in
run/sampling.py.
"""

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
    n_samples: int = 4  # number of continuations; with chat one reply
    max_new_tokens: int = 200  # tokens to generate for each
    temperature: float = 0.8  # divides the logits; 0: always the most likely token
    top_k: int | None = 50  # sample among the k most likely tokens; None: among all
    seed: int = 1337  # of the first sample; +1 for each next one

    # nanoGPT's names, and what is meant here
    others_names = {"start": "prompt", "out_dir": "checkpoint", "num_samples": "n_samples"}


def main(cfg):
    least = {"n_samples": 1, "max_new_tokens": 0, "temperature": 0, "top_k": 1, "seed": 0}
    refuse(too_small(cfg, least))
    if cfg.chat and this_rank().size > 1:
        raise UserError("chat=True is a conversation on one rank: start it without torchrun")
    from corpus import chat
    from run import sampling, trained
    from scale import parallel

    world, model, tokenizer, autocast = trained.load(cfg)
    if cfg.chat:
        template = chat.Template(trained.folders(cfg, tokenizer)[0], tokenizer)
    with autocast:
        cache = sampling.make_cache(model, tokenizer.eot)  # for all texts

        def continued(ids, seed):
            options = cfg.max_new_tokens, cfg.temperature, cfg.top_k, seed, cache
            return sampling.continued(model, tokenizer, ids, *options)

        if cfg.chat:
            converse(cfg, tokenizer, template, continued)
        else:
            print_samples(cfg, tokenizer, world, continued)
    parallel.stop()


def print_samples(cfg, tokenizer, world, continued):
    """Each rank makes a sample; rank 0 prints its own as it comes, then the others'."""
    from scale import parallel

    shown = tokenizer.encode(cfg.prompt or "\n")
    ids = [tokenizer.eot, *shown]  # behind the separator of documents, as in training
    began = time.perf_counter()
    tokens = 0
    for first in range(0, cfg.n_samples, world.size):
        own = write(tokenizer, shown, continued(ids, cfg.seed + first + world.rank))
        rows = parallel.gather_objects(own)[: cfg.n_samples - first]
        tokens += sum(map(len, rows))
        say("-" * 80)
        for row in rows[1:]:
            say(tokenizer.decode(shown + row), "-" * 80, sep="\n")
    seconds = time.perf_counter() - began
    say(f"{tokens:,} tokens in {seconds:.1f} s, {tokens / seconds:,.1f} tokens/s")


def write(tokenizer, shown, ids):
    """Says the text of the list `shown` and of further ids as they come; returns these, a list.

    An incomplete character waits for its rest, until the end.
    """
    new = []
    printed = ""
    for i in ids:
        new.append(i)
        text = tokenizer.decode(shown + new)
        if not text.endswith("\ufffd"):
            say(text[len(printed) :], end="")
            printed = text
    say(tokenizer.decode(shown + new)[len(printed) :])
    return new


def converse(cfg, tokenizer, template, continued):
    """Replies to the prompt, or to each line of stdin."""
    lines = [cfg.prompt]
    if cfg.prompt is None:
        say("Each line is a message; Ctrl-D ends.")
        lines = sys.stdin
    messages = []
    for line in lines:
        messages.append(dict(role="user", content=line.removesuffix("\n")))
        new = write(tokenizer, [], continued(template.ids(messages), cfg.seed))
        messages.append(dict(role="assistant", content=tokenizer.decode(new)))


if __name__ == "__main__":
    run(main, Config)
