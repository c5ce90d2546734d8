"""Loads a trained model and its tokenizer for scripts: a checkpoint or Hugging Face weights."""

from pathlib import Path

from corpus import chat
from corpus import tokenizer as tokenizers
from run import checkpoint, hf
from scale import documents, parallel
from scale.precision import autocast, pick_ops, pick_precision
from system.errors import UserError, launched, warn


def load(cfg, mask_documents=False):
    """(World, model, tokenizer, autocast) for a script's settings; its ranks join here.

    mask_documents: with the document mask, if the model was trained with it.
    """
    if (cfg.checkpoint is None) == (cfg.pretrained is None):
        raise UserError("give one of --checkpoint=FOLDER and --pretrained=FOLDER_OR_HUB_NAME")
    world = parallel.start(cfg.device, timeout_s=3600)
    # waits until all have connected: then a rank that ends on a mistake below breaks no connection
    parallel.barrier()
    precision, _ = pick_precision(cfg.precision, world.device)
    pick_ops("auto", world.device, precision)
    model, saved = load_model(cfg, world, precision)
    name = cfg.tokenizer or saved.tokenizer
    if not name:
        warn("the weights name no tokenizer: taking GPT-2's; see --tokenizer")
    tokenizer = tokenizers.load(name or "gpt2", model.cfg.vocab_size)
    for folder in folders(cfg, tokenizer):
        tokenizer.ends |= chat.stop_ids(folder, tokenizer)
    if mask_documents and saved.document_mask:
        documents.apply(model, tokenizer.eot)
    return world, model, tokenizer, autocast(precision, world.device)


def load_model(cfg, world, precision):
    """(model, the checkpoint.SavedModel that it was made of).

    The weights are in bf16 for that precision, else in float32.
    """
    if cfg.checkpoint is None:
        saved = hf.open_hf(cfg.pretrained)
    else:
        saved = checkpoint.open_model(cfg.checkpoint)
    among = world if cfg.parallel == "fsdp" and launched() else None
    return checkpoint.model_of(saved, world.device, precision, among), saved


def folders(cfg, tokenizer):
    """Where Hugging Face's files may lie: beside the tokenizer's file, if any, and the weights."""
    weights = hf.fetch(cfg.pretrained) if cfg.checkpoint is None else Path(cfg.checkpoint)
    return [tokenizer.folder, weights] if tokenizer.folder else [weights]
