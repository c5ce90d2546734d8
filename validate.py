"""Loss and bits per byte of a model on held-out text, with standard errors.

    python validate.py data/books data/wiki --checkpoint=out/a
    python validate.py data/books --checkpoint=out/a --against=out/b # and a - b
    torchrun --standalone --nproc_per_node=8 validate.py data/books \\
        --pretrained=FOLDER_OR_HUB_NAME

Reads the validation shards that fineweb.py wrote, folder by folder. A standard
error says how far other such documents would move the figure. Two models find
the same documents hard, so that their difference has a smaller one.
"""

from dataclasses import dataclass, replace

import numpy as np

from configurator import run, too_small
from settings import TrainedConfig
from system.errors import UserError, refuse, say


@dataclass
class Config(TrainedConfig):
    words = ()  # folders with validation shards
    against: str | None = None  # folder of another run or checkpoint, with the same tokenizer
    tokens: int = 1_048_576  # of each folder, from its first validation token on
    batch_size: int = 16  # rows in a forward, each as long as the first model's context


def main(cfg):
    refuse(too_small(cfg, {"tokens": 1, "batch_size": 1}))
    if not cfg.words:
        raise UserError(
            "name folders with validation shards: validate.py data/books --checkpoint=out/books"
        )
    from run import evaluate
    from scale import parallel

    measured, T = measure(cfg, cfg.words)
    others = {}
    if cfg.against:
        other = replace(cfg, checkpoint=cfg.against, pretrained=None)
        others, _ = measure(other, cfg.words, T)
    for folder, (table, documents) in measured.items():
        size = f"{int(table[1].sum()):,} tokens, {len(set(documents)):,} documents"
        words = evaluate.in_words(evaluate.loss_of_table(table, documents))
        lines = [f"{folder} | {size} | {words}"]
        if others:
            table[0] -= others[folder][0][0]
            words = evaluate.in_words(evaluate.loss_of_table(table, documents))
            lines.append(f"{folder} | less {cfg.against}'s | {words}")
        say(*lines, sep="\n")
    parallel.stop()


def measure(cfg, words, T=None):
    """({folder: (table, documents)}, T) of a model on rows of T tokens.

    T: None: as many as it has context. table, documents: see run.evaluate.score_rows.
    """
    from corpus.loader import DataError, TokenLoader
    from run import evaluate, trained

    # as the run's own validation, which has its document mask
    world, model, tokenizer, autocast = trained.load(cfg, mask_documents=True)
    shape = model.cfg
    T = T or shape.block_size
    measured = {}
    for folder in words:
        loader = TokenLoader(
            folder,
            "val",
            B=cfg.batch_size,
            T=T,
            rank=world.rank,
            world=world.size,
            vocab_size=shape.vocab_size,
            device=world.device,
        )
        sizes = loader.token_bytes
        if sizes is not None and not np.array_equal(sizes, tokenizer.token_bytes()):
            raise DataError(
                f"{folder} has the tokenizer {loader.tokenizer}, the model {tokenizer.name}"
            )
        tokens = max(T, cfg.tokens)
        with autocast:
            measured[folder] = evaluate.score_rows(model, loader, tokens)
        loader.close()
    return measured, T


if __name__ == "__main__":
    run(main, Config)
