"""lm-evaluation-harness for a checkpoint, an edited model's too: its own command, lm_eval run.

    python -m measure.harness --model_args=checkpoint=out/a --tasks=hellaswag,piqa
    python -m measure.harness --model_args=checkpoint=out/a,bos=True \\
        --tasks=gsm8k --num_fewshot=5 --output_path=gsm8k.json
    torchrun --standalone --nproc_per_node=8 -m measure.harness \\
        --model_args=checkpoint=out/a --tasks=mmlu

Nothing is exported. Needs `pip install lm_eval==0.4.13`; --help lists the harness's options, and
Settings in measure/language_model.py what --model_args takes.
"""

import os
import sys

from system import errors
from system.errors import UserError, is_rank_0

TESTED = "0.4.13"


def main(words):
    """Runs `lm_eval run` with the words of its command line; rank 0 alone prints and writes."""
    try:
        from lm_eval.__main__ import cli_evaluate

        from measure import language_model  # noqa: F401  which gives it the model "checkpoint"
    except ModuleNotFoundError as error:
        raise UserError(
            f"there is no package {error.name}: pip install lm_eval=={TESTED}"
        ) from None
    from scale import parallel

    if not is_rank_0():
        sys.stdout = open(os.devnull, "w")
        words = [word for word in words if not word.startswith("--output_path=")]
    sys.argv[1:] = ["run", "--model=checkpoint", *words]
    cli_evaluate()
    parallel.stop()


if __name__ == "__main__":
    errors.run(main, sys.argv[1:])
