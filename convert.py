"""Checkpoints from and to Hugging Face weights; files of many ranks merged.

    python convert.py --from_hf=gpt2 --out=out/gpt2     # a hub name or a folder
    python convert.py --checkpoint=out/a --to_hf=out/hf # for transformers
    python convert.py --checkpoint=out/a --to_hf=out/hf --check
    python convert.py --checkpoint=out/a --out=out/b    # files of many ranks

docs/checkpoints.md lists the models. --check compares the logits of an export
in transformers with those of the checkpoint.
"""

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from configurator import run, without_effect
from system.errors import UserError, refuse, warn


@dataclass
class Config:
    from_hf: str | None = None  # Hugging Face weights to read: a folder or a hub name
    out: str | None = None  # where the checkpoint goes, with from_hf or checkpoint
    checkpoint: str | None = None  # folder of a run or of a checkpoint, to export or to merge
    to_hf: str | None = None  # where the Hugging Face folder goes, with checkpoint
    dtype: Literal["float32", "bfloat16"] = "float32"  # of the exported weights
    tokenizer: str | None = None  # of the export: a name or a file; None: the checkpoint's
    check: bool = False  # of the export: its logits in transformers; both models in memory


def main(cfg):
    ways = {"from_hf out": import_hf, "checkpoint to_hf": export, "checkpoint out": merge}
    given = [name for name in ("from_hf", "checkpoint", "out", "to_hf") if getattr(cfg, name)]
    convert = ways.get(" ".join(given))
    if convert is None:
        raise UserError(
            "give --from_hf=NAME and --out=FOLDER, or --checkpoint with --out or --to_hf"
        )
    if convert != export:
        refuse(without_effect(cfg, ["dtype", "tokenizer", "check"], "needs --to_hf"))
    out = Path(cfg.out or cfg.to_hf)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} is not an empty folder; nothing was written, try another name")
    convert(cfg)


def import_hf(cfg):
    """Hugging Face weights -> a checkpoint of weights alone."""
    from run import checkpoint, hf

    saved = hf.open_hf(cfg.from_hf)
    tensors = {"model": saved.tensors}
    wrote = checkpoint.save_merged(cfg.out, 0, tensors, {"config": vars(saved.shape)})
    print(f"wrote {wrote}; go on with --checkpoint or --init_from={shlex.quote(cfg.out)}")


def export(cfg):
    """A checkpoint -> a Hugging Face folder."""
    from corpus import tokenizer as tokenizers
    from run import checkpoint, hf

    saved = checkpoint.open_model(cfg.checkpoint)
    name = cfg.tokenizer or saved.tokenizer
    tokenizer = None
    if name:
        tokenizer = tokenizers.load(name, saved.shape.vocab_size)
    else:
        warn("the weights name no tokenizer, so that none is written; see --tokenizer")
    wrote = hf.save_hf(saved.shape, saved.tensors, cfg.to_hf, cfg.dtype, tokenizer)
    print(f"wrote {wrote} in {cfg.dtype}")
    if cfg.check:
        compare(wrote, saved, cfg.dtype)


def compare(folder, saved, dtype):
    """Compares logits of an export and its SavedModel, in float32 on a row of ids.

    Raises UserError if they differ by over 1e-3 of their standard deviation, from bfloat16 by 0.03:
    its rounding makes up to 0.01.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from run import checkpoint

    own = checkpoint.model_of(saved, torch.device("cpu"))
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    T = min(saved.shape.block_size, 4096)
    ids = torch.arange(T)[None] % saved.shape.vocab_size
    with torch.no_grad():
        expected = own.logits(ids)
        error = ((theirs(ids).logits - expected).std() / expected.std()).item()
    if not error < (1e-3 if dtype == "float32" else 0.03):
        raise UserError(
            f"{folder}: transformers' logits differ by {error:.1%} of their deviation; does "
            "model.py compute something else than that class?"
        )
    print(f"its logits in transformers are those of the checkpoint (within {error:.0e})")


def merge(cfg):
    """A checkpoint of many ranks -> one file for each group."""
    from run import checkpoint

    folder, tensors, state = checkpoint.open_whole(cfg.checkpoint)
    if carried := checkpoint.carried_tokenizer(folder):
        state["config"]["tokenizer"] = carried
    wrote = checkpoint.save_merged(cfg.out, state["step"], tensors, state)
    print(f"wrote {wrote}; go on with --resume={shlex.quote(cfg.out)}")


if __name__ == "__main__":
    run(main, Config)
