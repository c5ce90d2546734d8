"""Checkpoints from and to Hugging Face weights (safetensors; which models: docs/checkpoints.md); files of ranks merged.

    python convert.py --from_hf=gpt2 --out=out/gpt2                 # a hub name or a folder -> a checkpoint
    python convert.py --checkpoint=out/gpt2_124m --to_hf=out/hf     # -> a folder for transformers, with the tokenizer
    python convert.py --checkpoint=out/llama3_8b --out=out/merged   # files of many ranks -> one file for all weights

An export is compared with transformers, where that is installed: both models get random tokens, and their logits must
be equal up to rounding. They are not if model.py was edited to compute something else than transformers' class.
A merge holds one group of tensors in memory at a time, 8 bytes a parameter for AdamW's states; an export 5 GB.
"""

import importlib.util
import shlex
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from configurator import UserError, refuse, run, without_effect

MOST = 2_000_000_000  # parameters of an export that is verified: two copies in float32 take 16 GB
LIMIT = (
    1e-4  # difference of logits that is rounding, relative to their spread: float32 leaves about 1e-6 to 1e-5
)
ROUNDED = (
    2e-2  # the same in bfloat16 with norms folded into the weights, which round apart: 5e-4 to 2e-3 is left
)


@dataclass
class Config:
    from_hf: str | None = None  # Hugging Face weights to read: a folder or a hub name
    out: str | None = None  # where the checkpoint goes, with from_hf or checkpoint
    checkpoint: str | None = None  # folder of a run or of a checkpoint, to export or to merge
    to_hf: str | None = None  # where the Hugging Face folder goes, with checkpoint
    dtype: Literal["float32", "bfloat16"] = "float32"  # of the exported weights
    tokenizer: str | None = (
        None  # of the export: its name or file; None: the one that the checkpoint was trained with
    )
    verify: bool = True  # compare the export's logits with model.py's on random tokens (needs transformers)


def main(cfg):
    given = tuple(name for name in ("from_hf", "out", "checkpoint", "to_hf") if getattr(cfg, name))
    actions = {
        ("from_hf", "out"): import_hf,
        ("checkpoint", "to_hf"): export_hf,
        ("out", "checkpoint"): merge,
    }
    if given not in actions:
        raise UserError(
            "give --from_hf=NAME or --checkpoint=FOLDER, and --out=FOLDER; or --checkpoint and --to_hf=FOLDER"
        )
    if not cfg.to_hf:
        why = (
            "cannot change a checkpoint; for an export give --checkpoint and --to_hf=FOLDER, else go without"
        )
        refuse(without_effect(cfg, ("dtype", "tokenizer", "verify"), why))
    actions[given](cfg)


def import_hf(cfg):
    """Hugging Face weights -> a checkpoint of weights alone."""
    refuse_used(cfg.out)
    from run import checkpoint, hf

    model, shape = hf.load_hf(cfg.from_hf)
    wrote, out = checkpoint.save_model(cfg.out, model, shape), shlex.quote(cfg.out)
    print(f"wrote {wrote}; go on with --checkpoint or --init_from={out}")


def export_hf(cfg):
    """A checkpoint -> a Hugging Face folder, which is removed again if transformers computes other logits from it."""
    import torch

    from model import on_meta
    from run import checkpoint, hf, source

    if warning := source.warning(cfg.checkpoint):
        print(f"warning: {warning}", file=sys.stderr)
    tensors, shape, saved = checkpoint.open_model(cfg.checkpoint)
    model, dtype = on_meta(shape), getattr(torch, cfg.dtype)
    path = hf.save_hf(model, cfg.to_hf, dtype, tensors=tensors, tokenizer=tokenizer_of(cfg, shape, saved))
    checked = (
        verify(path, model, tensors, dtype) if cfg.verify else "not compared with transformers (verify=False)"
    )
    print(f"wrote {path} in {cfg.dtype}, {checked}")


def tokenizer_of(cfg, shape, saved):
    """The Tokenizer of the export; None, with a warning, where the one that the checkpoint names cannot be loaded."""
    from corpus import tokenizer as tokenizers

    name = cfg.tokenizer or saved.tokenizer or ("gpt2" if shape.vocab_size == 50257 else None)
    try:
        return name and tokenizers.load(name, shape.vocab_size)
    except UserError as error:
        if cfg.tokenizer:
            raise
        print(
            f"warning: no tokenizer in the export: {error}; to add it: --tokenizer=NAME_OR_FILE",
            file=sys.stderr,
        )


def merge(cfg):
    """A checkpoint that many ranks wrote -> the same with one file for each group of tensors."""
    refuse_used(cfg.out)
    from run import checkpoint

    folder = checkpoint.find(cfg.checkpoint)
    tensors, state = checkpoint.open_folder(folder)
    if carried := checkpoint.carried_tokenizer(folder):
        state["config"]["tokenizer"] = str(carried)
    wrote = checkpoint.save(cfg.out, state["step"], tensors, state)
    print(f"wrote {wrote}; go on with --resume={shlex.quote(cfg.out)}")


def refuse_used(out):
    if Path(out).exists() and (not Path(out).is_dir() or any(Path(out).iterdir())):
        what = "not empty" if Path(out).is_dir() else "not a folder"
        raise UserError(f"out={out} is {what}; nothing was written, try another name")


def verify(path, model, tensors, dtype):
    """Compares the export at `path` with model.py on random tokens, in float32 on the CPU; returns the result in words.

    model: on meta; tensors: its weights, which are rounded to dtype as in the export. Raises UserError, and removes the
    folder, if the logits differ by more than rounding.
    """
    count = sum(p.numel() for p in model.parameters())
    if count > MOST:
        return (
            f"not compared with transformers: {count / 1e9:.1f}B parameters are more than {MOST / 1e9:.0f}B"
        )
    if importlib.util.find_spec("transformers") is None:
        return "not compared with transformers, which is not installed (pip install transformers)"
    difference, spread = largest_difference(path, model.cfg, tensors, dtype)
    limit = LIMIT if dtype.itemsize == 4 or not model.cfg.embed_norm else ROUNDED
    if difference <= limit * spread:
        return f"and transformers computes the same logits from it: largest difference {difference:.1e}"
    shutil.rmtree(path)
    raise UserError(
        f"transformers computes other logits from the export: they differ by up to {difference:.2g}, with a spread of "
        f"{spread:.2g}; model.py likely computes something else than this architecture. {path} was removed; "
        "--no_verify keeps it"
    )


def largest_difference(path, cfg, tensors, dtype):
    """(largest difference of the two models' logits, largest distance of a logit from its row's mean)."""
    import torch
    import transformers

    from model import build
    from run import checkpoint

    ours = build(cfg, torch.device("cpu"))
    checkpoint.load_model_tensors(ours, tensors)
    for parameter in ours.parameters():
        parameter.data = parameter.data.to(dtype).float()
    transformers.utils.logging.disable_progress_bar()
    try:
        theirs = transformers.AutoModelForCausalLM.from_pretrained(path).float().eval()
    except Exception as error:  # its type depends on the version
        raise UserError(
            f"{path} was written, but transformers cannot load it ({type(error).__name__}: {error})"
        ) from None
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, cfg.vocab_size, (2, min(cfg.block_size, 128)), generator=generator)
    with torch.no_grad():
        own, other = ours.eval().logits(ids), theirs(ids).logits.float()
    spread = (own - own.mean(-1, keepdim=True)).abs().max()
    return (own - other).abs().nan_to_num(torch.inf).max().item(), spread.item()


if __name__ == "__main__":
    run(main, Config)
