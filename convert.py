"""A checkpoint as Hugging Face weights, or the files of many ranks merged.

    python convert.py --checkpoint=out/a --to_hf=out/hf # for transformers
    python convert.py --checkpoint=out/a --to_hf=out/hf --check
    python convert.py --checkpoint=out/a --out=out/b    # merged

docs/checkpoints.md lists the models. --check compares the logits of the export
in transformers with those of the checkpoint. Hugging Face weights are read as
they are: by --init_from=hf:NAME of train.py, by --pretrained of other scripts.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from configurator import run, without_effect
from system.errors import UserError, refuse, warn


@dataclass
class Config:
    checkpoint: str | None = None  # folder of a run or of a checkpoint
    to_hf: str | None = None  # where the Hugging Face folder goes
    out: str | None = None  # where the merged checkpoint goes
    dtype: Literal["float32", "bfloat16"] = "float32"  # of the exported weights
    tokenizer: str | None = None  # of the export: a name or a file; None: the checkpoint's
    check: bool = False  # of the export: its logits in transformers; both models in memory


def main(cfg):
    if not cfg.checkpoint or bool(cfg.to_hf) == bool(cfg.out):
        raise UserError("give --checkpoint=FOLDER, and --to_hf=FOLDER or --out=FOLDER")
    out = Path(cfg.to_hf or cfg.out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} is not an empty folder; nothing was written, try another name")
    if cfg.to_hf:
        export(cfg)
    else:
        refuse(without_effect(cfg, ["dtype", "tokenizer", "check"], "needs --to_hf"))
        merge(cfg)


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
    else:
        print("its logits were not compared with the checkpoint's: --check does that")


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
    """A checkpoint in files of many ranks -> one with a single file of weights, one of states."""
    from run import checkpoint, source

    folder, tensors, state = checkpoint.open_whole(cfg.checkpoint)
    warn(source.warning(folder))  # the merged one has the code of now beside it
    if carried := checkpoint.carried_tokenizer(folder):
        state["config"]["tokenizer"] = carried
    print(f"wrote {checkpoint.save_merged(cfg.out, tensors, state)}")


if __name__ == "__main__":
    run(main, Config)
