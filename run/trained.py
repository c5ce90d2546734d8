"""Loads a trained model and its tokenizer, from a checkpoint or from Hugging Face weights, for the scripts."""

import sys

from configurator import UserError
from corpus import tokenizer as tokenizers
from run import checkpoint, hf, source


def load(cfg, device):
    """(model, its saved settings) from cfg.checkpoint or cfg.pretrained; warns if the code has changed since.

    cfg: the settings of sample.py, hellaswag.py or the like. Raises UserError unless exactly one of the two is given.
    """
    if (cfg.checkpoint is None) == (cfg.pretrained is None):
        raise UserError("give one of --checkpoint=FOLDER and --pretrained=FOLDER_OR_HUB_NAME")
    if cfg.checkpoint is None:
        return hf.load_hf(cfg.pretrained, device)
    if warning := source.warning(cfg.checkpoint):
        print(f"warning: {warning}", file=sys.stderr)
    return checkpoint.load_model(cfg.checkpoint, device)


def load_tokenizer(cfg, model, saved):
    """cfg.tokenizer, or else the tokenizer of `load`'s saved settings, or GPT-2's."""
    name = cfg.tokenizer or getattr(saved, "tokenizer", None) or "gpt2"
    return tokenizers.load(name, model.cfg.vocab_size)
