"""Generate text from a checkpoint.

    python sample.py --checkpoint=out/gpt2_124m --prompt="Once upon a time" --n_samples=4
    python sample.py --pretrained=gpt2 --temperature=0.8 --top_k=50

The sampling is in run/generate.py. `main` imports torch, which takes seconds, so that --help and a mistake in a setting
answer at once.
"""

from dataclasses import dataclass
from typing import Literal

from configurator import refuse, run, too_small


@dataclass
class Config:
    checkpoint: str | None = None  # folder of a run or of a checkpoint
    pretrained: str | None = None  # instead: Hugging Face weights, a folder or a hub name
    tokenizer: str | None = None  # None: the tokenizer that the checkpoint was trained with, gpt2 for pretrained
    prompt: str = "\n"  # text to continue
    n_samples: int = 4  # number of continuations
    max_new_tokens: int = 200  # tokens to generate for each
    temperature: float = 0.8  # divides the logits; 0: always the most likely token
    top_k: int | None = 50  # sample among the k most likely tokens; None: among all
    seed: int = 1337  # of the sampling
    device: str = "auto"  # auto, cpu, cuda, mps
    precision: Literal["auto", "fp32", "tf32", "bf16", "fp16"] = "auto"  # auto: bf16 where the GPU supports it

    nanogpt = {"out_dir": "checkpoint", "start": "prompt", "num_samples": "n_samples", "dtype": "precision"}


def main(cfg):
    found = too_small(cfg, {"n_samples": 1, "max_new_tokens": 0, "temperature": 0, "top_k": 1, "seed": 0})
    refuse(found + [f"seed={cfg.seed} must be below 2**63"] * (cfg.seed >= 2**63))
    from run import generate, trained
    from scale import parallel

    device = parallel.pick_device(cfg.device)
    precision, _ = parallel.pick_precision(cfg.precision, device)
    model, saved = trained.load(cfg, device)
    tokenizer = trained.load_tokenizer(cfg, model, saved)
    with parallel.autocast(precision, device):
        options = (cfg.n_samples, cfg.max_new_tokens, cfg.temperature, cfg.top_k, cfg.seed)
        for text in generate.texts(model.eval(), tokenizer, cfg.prompt, *options):
            print(text + "\n" + "-" * 80)


if __name__ == "__main__":
    run(main, Config)
