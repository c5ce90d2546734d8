"""Checkpoints from and to Hugging Face weights (which: docs/checkpoints.md); files of ranks merged.

    python convert.py --from_hf=gpt2 --out=out/gpt2                 # a hub name or a folder -> a checkpoint
    python convert.py --checkpoint=out/gpt2_124m --to_hf=out/hf     # -> a folder for transformers
    python convert.py --checkpoint=out/llama3_8b --out=out/merged   # files of many ranks -> one file

An export is compared with transformers, where that is installed: logits of random tokens must be equal up to
rounding. They are not if model.py was edited to compute something else than transformers' class. In memory, a
merge has a group of tensors at a time, 8 bytes a parameter for AdamW's states; an export 5 GB.
"""

import importlib.util
import shlex
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from configurator import UserError, refuse, run, without_effect

MOST = 2_000_000_000  # parameters of an export that is compared: two copies in float32 take 16 GB
# differences of logits that are rounding, over their spread: float32 leaves 1e-6 to 1e-5, and bfloat16, where
# embed_norm is folded into the weights and rounded there, 5e-4 to 2e-3
LIMITS = {"float32": 1e-4, "bfloat16": 2e-2}


@dataclass
class Config:
    from_hf: str | None = None  # Hugging Face weights to read: a folder or a hub name
    out: str | None = None  # where the checkpoint goes, with from_hf or checkpoint
    checkpoint: str | None = None  # folder of a run or of a checkpoint, to export or to merge
    to_hf: str | None = None  # where the Hugging Face folder goes, with checkpoint
    dtype: Literal["float32", "bfloat16"] = "float32"  # of the exported weights
    tokenizer: str | None = None  # of the export: a name or a file; None: the checkpoint's
    verify: bool = True  # compare the export's logits with model.py's on random tokens (needs transformers)


def main(cfg):
    given = tuple(name for name in ("from_hf", "out", "checkpoint", "to_hf") if getattr(cfg, name))
    actions = {("from_hf", "out"): import_hf, ("checkpoint", "to_hf"): export_hf}
    actions |= {("out", "checkpoint"): merge}
    if given not in actions:
        raise UserError(
            "give --from_hf=NAME or --checkpoint=FOLDER, and --out=FOLDER or (export) --to_hf=FOLDER"
        )
    if not cfg.to_hf:
        why = "cannot change a checkpoint; leave it out, or export with --checkpoint and --to_hf=FOLDER"
        refuse(without_effect(cfg, ("dtype", "tokenizer", "verify"), why))
        if (out := Path(cfg.out)).exists() and not (out.is_dir() and not any(out.iterdir())):
            raise UserError(f"out={out} is not an empty folder; nothing was written, try another name")
    actions[given](cfg)


def import_hf(cfg):
    """Hugging Face weights -> a checkpoint of weights alone."""
    import torch

    from run import checkpoint, hf

    tensors, shape = hf.open_hf(cfg.from_hf)
    wrote = checkpoint.save_model(cfg.out, checkpoint.model_of(tensors, shape, torch.device("cpu")), shape)
    print(f"wrote {wrote}; go on with --checkpoint or --init_from={shlex.quote(cfg.out)}")


def export_hf(cfg):
    """A checkpoint -> a Hugging Face folder, removed again if transformers computes other logits from it."""
    from corpus import tokenizer as tokenizers
    from model import on_meta
    from run import checkpoint, hf, source

    if warning := source.warning(cfg.checkpoint):
        print(f"warning: {warning}", file=sys.stderr)
    tensors, shape, saved = checkpoint.open_model(cfg.checkpoint)
    name = cfg.tokenizer or saved.tokenizer or ("gpt2" if shape.vocab_size == 50257 else None)
    tokenizer = name and tokenizers.load(name, shape.vocab_size)
    path = hf.save_hf(on_meta(shape), cfg.to_hf, cfg.dtype, tensors=tensors, tokenizer=tokenizer)
    print(f"wrote {path} in {cfg.dtype}, {verify(cfg, path, shape, tensors)}")


def merge(cfg):
    """A checkpoint that many ranks wrote -> the same with one file for each group of tensors."""
    from run import checkpoint

    folder = checkpoint.find(cfg.checkpoint)
    tensors, state = checkpoint.open_folder(folder)
    if carried := checkpoint.carried_tokenizer(folder):
        state["config"]["tokenizer"] = str(carried)
    wrote = checkpoint.save(cfg.out, state["step"], tensors, state)
    print(f"wrote {wrote}; go on with --resume={shlex.quote(cfg.out)}")


def verify(cfg, path, shape, tensors):
    """Compares the export at `path` with model.py, in float32 on the CPU; returns the result in words.

    Raises UserError, and removes the folder, if the logits of random tokens differ by more than rounding.
    """
    import torch

    from model import build
    from run import checkpoint

    absent = importlib.util.find_spec("transformers") is None
    large = sum(tensor.shape.numel() for tensor in tensors.values()) > MOST
    if absent or large or not cfg.verify:
        why = f"more than {MOST / 1e9:.0f}B parameters" if large else "verify=False"
        return f"not compared with transformers ({'pip install transformers' if absent else why})"
    import transformers

    ours = build(shape, torch.device("cpu")).eval()
    checkpoint.load_model_tensors(ours, tensors)
    for parameter in ours.parameters():  # rounded as in the export
        parameter.data = parameter.data.to(getattr(torch, cfg.dtype)).float()
    transformers.utils.logging.disable_progress_bar()
    try:
        theirs = transformers.AutoModelForCausalLM.from_pretrained(path).float().eval()
    except Exception as error:  # its type depends on the version
        raise UserError(f"{path}: transformers cannot load it ({type(error).__name__}: {error})") from None
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(shape.vocab_size, (2, min(shape.block_size, 128)), generator=draw)
    with torch.no_grad():
        own, other = ours.logits(ids), theirs(ids).logits.float()
    spread = (own - own.mean(-1, keepdim=True)).abs().max().item()
    difference = (own - other).abs().nan_to_num(torch.inf).max().item()
    limit = LIMITS[cfg.dtype if shape.embed_norm else "float32"]
    if difference <= limit * spread:
        return f"and transformers computes the same logits from it: largest difference {difference:.1e}"
    shutil.rmtree(path)
    found = f"they differ by up to {difference:.2g}, with a spread of {spread:.2g}"
    why = "model.py likely computes something else"
    raise UserError(
        f"transformers computes other logits: {found}; {why}. {path} was removed; --no_verify keeps it"
    )


if __name__ == "__main__":
    run(main, Config)
