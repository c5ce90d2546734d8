"""Scores of lm-evaluation-harness for a checkpoint, an edited model's too.

    python -m measure.harness --checkpoint=out/a --tasks=hellaswag,arc_easy
    python -m measure.harness --checkpoint=out/a --tasks=gsm8k --num_fewshot=5
    torchrun --standalone --nproc_per_node=8 -m measure.harness \\
        --checkpoint=out/a --tasks=mmlu

Nothing is exported. Needs `pip install lm_eval==0.4.13`; tasks and their data
come from the hub, but for those of measure/*.yaml and of --include_path. The
model answers through measure/language_model.py.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from configurator import run, without_folder
from settings import TrainedConfig
from system.errors import UserError, refuse, say
from system.files import write_atomic

TESTED = "0.4.13"


@dataclass
class Config(TrainedConfig):
    tasks: str = "hellaswag"  # names of tasks and groups, with commas between
    num_fewshot: int | None = None  # examples before each question; None: as many as the task has
    limit: int | None = None  # number of examples of each task, from the first on; None: all
    include_path: str | None = None  # a folder with tasks of your own
    gen_kwargs: str | None = None  # of tasks that generate: max_gen_toks=128,do_sample=True
    batch_tokens: int = 4096  # tokens per forward pass
    bos: bool = False  # the separator of documents precedes each text, as in training
    seed: int = 1337  # of texts that are sampled
    out: str | None = None  # write all that the harness reports to this file, as JSON


def main(cfg):
    refuse(without_folder(cfg, ["out"]))
    try:
        from lm_eval import simple_evaluate
        from lm_eval.tasks import TaskManager
        from lm_eval.utils import handle_non_serializable, make_table

        from measure.language_model import LanguageModel
    except ModuleNotFoundError as error:
        raise UserError(
            f"there is no package {error.name}: pip install lm_eval=={TESTED}"
        ) from None
    from run import trained
    from scale import parallel

    folders = [Path(__file__).parent]
    if cfg.include_path:
        folders.append(cfg.include_path)
    manager = TaskManager(include_path=folders)
    tasks = [name.strip() for name in cfg.tasks.split(",")]
    unknown = ", ".join(name for name in tasks if name not in manager.all_tasks)
    if unknown:
        raise UserError(f"tasks={cfg.tasks}: the harness has no {unknown}; `lm_eval ls tasks`")
    world, *loaded = trained.load(cfg)
    # each rank hands all requests to its model, which divides them and returns all answers
    report = simple_evaluate(
        LanguageModel(*loaded, cfg.batch_tokens, cfg.bos, cfg.seed),
        tasks=tasks,
        task_manager=manager,
        num_fewshot=cfg.num_fewshot,
        limit=cfg.limit,
        gen_kwargs=cfg.gen_kwargs,
        log_samples=False,
    )
    if world.main:
        for column in ("results", "groups"):
            if report.get(column):
                say(make_table(report, column))
        if cfg.out:
            write_atomic(cfg.out, json.dumps(report, default=handle_non_serializable, indent=1))
    parallel.stop()


if __name__ == "__main__":
    run(main, Config)
