"""Loads a trained model and its tokenizer, from a checkpoint or from Hugging Face weights, for the scripts."""

import os
import sys
from pathlib import Path

from configurator import UserError, is_rank_0
from corpus import chat
from corpus import tokenizer as tokenizers
from run import checkpoint, hf, source
from scale import parallel


def load(cfg, device, precision):
    """(model, its saved settings) from cfg.checkpoint or cfg.pretrained; warns if the code has changed since.

    cfg: the settings of sample.py, hellaswag.py or the like; with parallel=fsdp the ranks join here and divide the
    model. precision: bf16 gives weights in bf16, every other one in float32. Raises UserError unless exactly one of the
    two is given.
    """
    if (cfg.checkpoint is None) == (cfg.pretrained is None):
        raise UserError("give one of --checkpoint=FOLDER and --pretrained=FOLDER_OR_HUB_NAME")
    world = join(cfg) if cfg.parallel == "fsdp" else None
    if cfg.checkpoint is None:
        tensors, shape = hf.open_hf(cfg.pretrained)
        return checkpoint.model_of(tensors, shape, device, precision, world), shape
    if (warning := source.warning(cfg.checkpoint)) and is_rank_0():
        print(f"warning: {warning}", file=sys.stderr)
    return checkpoint.load_model(cfg.checkpoint, device, precision, world)


def join(cfg):
    """The World of the ranks that are to divide a model. Raises UserError without torchrun."""
    if "RANK" not in os.environ:
        raise UserError(
            "parallel=fsdp divides the model among ranks; start it with torchrun --nproc_per_node=N"
        )
    world = parallel.start(cfg.device, timeout_s=3600)
    parallel.barrier()  # all have connected, which a rank that now ends on a mistake would have prevented
    return world


def load_tokenizer(cfg, model, saved):
    """cfg.tokenizer, or else the tokenizer of `load`'s saved settings, or GPT-2's.

    Its `ends` include the ids at which the files beside the weights or the tokenizer tell a model to stop.
    """
    name = cfg.tokenizer or getattr(saved, "tokenizer", None) or "gpt2"
    tokenizer = tokenizers.load(name, model.cfg.vocab_size)
    for folder in folders(cfg, tokenizer):
        tokenizer.ends |= chat.stop_ids(folder, tokenizer)
    return tokenizer


def folders(cfg, tokenizer):
    """The folders in which Hugging Face's files may lie: beside the tokenizer, if it is a file, and the weights."""
    beside = [tokenizer.folder] if tokenizer.folder else []
    return [*beside, hf.fetch(cfg.pretrained) if cfg.checkpoint is None else Path(cfg.checkpoint)]
