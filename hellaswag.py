"""HellaSwag (https://arxiv.org/abs/1905.07830): which of four endings does the model find most likely?

    python hellaswag.py --checkpoint=out/gpt2_124m
    python hellaswag.py --pretrained=gpt2 --file=hellaswag_val.jsonl
    torchrun --standalone --nproc_per_node=8 hellaswag.py --checkpoint=out/llama3_8b     # each GPU scores a part
    torchrun --standalone --nproc_per_node=4 hellaswag.py --checkpoint=out/llama3_70b --parallel=fsdp    # sharded

acc takes the ending with the lowest summed loss, acc_norm the ending with the lowest mean loss per token, as other
GPT-2 reproductions do (GPT-2 124M: 0.2859 and 0.2955); lm-eval's divides by characters instead. Chance is 0.25.
run/multiple_choice.py reads the file and computes the score.
"""

from dataclasses import dataclass
from typing import Literal

from configurator import refuse, run, too_small


@dataclass
class Config:
    checkpoint: str | None = None  # folder of a run or of a checkpoint
    pretrained: str | None = None  # instead: Hugging Face weights, a folder or a hub name
    tokenizer: str | None = (
        None  # None: the one that the checkpoint was trained with, or beside the pretrained weights
    )
    file: str | None = None  # a local hellaswag_val.jsonl; None: downloaded once into ~/.cache/hellaswag
    limit: int | None = None  # number of examples, from the first on; None: all 10,042
    batch_tokens: int | None = None  # tokens per forward pass; None: 65,536 on a GPU, 1,024 on a CPU
    device: str = "auto"  # auto, cpu, cuda, mps
    precision: Literal["auto", "fp32", "tf32", "bf16", "fp16"] = (
        "auto"  # auto: bf16 where the GPU supports it
    )
    parallel: Literal["ddp", "fsdp"] = (
        "ddp"  # what a rank holds; ddp: the whole model; fsdp: a part of each tensor
    )


def main(cfg):
    refuse(too_small(cfg, {"limit": 1, "batch_tokens": 1}))
    from run import multiple_choice, trained
    from scale import parallel
    from scale.precision import autocast, pick_precision

    device = parallel.pick_device(cfg.device)
    precision, _ = pick_precision(cfg.precision, device)
    model, saved = trained.load(cfg, device, precision)
    tokenizer = trained.load_tokenizer(cfg, model, saved)
    examples = multiple_choice.load(cfg.file)[: cfg.limit]
    prepared = multiple_choice.prepare(examples, tokenizer, model.cfg.block_size)
    world = parallel.start(
        cfg.device, timeout_s=3600
    )  # now: a mistake above would break the others' connections
    score = multiple_choice.evaluate(model.eval(), prepared, device, cfg.batch_tokens, autocast(precision, device))
    if world.main:
        print(multiple_choice.in_words(score))
    parallel.stop()


if __name__ == "__main__":
    run(main, Config)
