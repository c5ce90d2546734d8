"""The examples of hellaswag_easy.yaml, a task for lm-evaluation-harness."""

import sys
from pathlib import Path

import datasets

sys.path.append(str(Path(__file__).resolve().parents[1]))

import hellaswag


def documents(dataset):
    """A datasets.Dataset of HellaSwag's examples -> the same in hellaswag.py's easy form."""
    return datasets.Dataset.from_list(
        hellaswag.easy([example | {"label": int(example["label"])} for example in dataset])
    )
