"""The faults that a run must survive, and the table of what became of their tests: docs/reliability.md.

A test belongs to rows by `@pytest.mark.fault(23, 54)`; `./test.sh --faults` runs these and writes the table.
"""

import datetime
import os
import re
from pathlib import Path

import torch

ROWS = """
a shard is one byte short | one line before the first step: file, expected and actual bytes; code 3
a shard is one byte long | the same
a shard's magic is wrong | the same, with a hint at nanoGPT's files
a shard's version is wrong, or it is Llama 3's | the line says uint16 or uint32
a header counts no tokens, or more than the file has | one line, code 3
a token is not below the vocabulary's size | file and index; all ranks end
a bit of a shard is flipped | `--dry_run` finds it
an empty data folder | the pattern that was tried and the command that makes data
fewer tokens than a global batch | tokens needed and there, and the setting to lower
no validation split | refused at the start, or `--eval_interval=0`
other shards at a resume | refused, unless `--allow_data_change`
a batch that does not divide | the rule and the nearest values
an unknown setting | code 2 and a suggestion
a value of another type | code 2, setting and type; `--lr=1` is a float
`--key value`, `a=b=c`, a bare flag | read, or a line that says how to write it
no such config file | the path and the recipes
a config file with a syntax error | file and line, code 2
values out of range | all of them at once
a resume with another model shape | each field that differs; nothing is written
a resume on more or fewer ranks | the same batches, losses equal up to rounding, a warning about random states
kill -9 while a checkpoint is written | the newest is whole; a resumed run equals an uninterrupted one
kill -9 while a checkpoint is removed | no folder is left that looks whole
the newest checkpoint is damaged | a warning, the one before it is taken, nothing is removed
the disk is full under a checkpoint | older ones stay, no leftovers, one line with bytes needed and free
the disk is full under a shard | no partial shard; the same command goes on
a signal in a step | all ranks stop after it, one checkpoint, 128 + number; resumed bit for bit
SIGTERM in an evaluation | saved at once; the evaluation is repeated after the resume
a second signal | ends at once, no checkpoint is torn
a rank raises or dies | the others end, and say which it was
a rank hangs | all end after timeout_s (NCCL: 10 s later); the rank's stacks, with its rank and step
a gradient that is not finite | all ranks skip the step or stop together; weights unchanged
a spike of the loss | a warning with the checkpoint before it
wandb is absent or cannot connect | one warning; the run goes on
a resumed run goes back in wandb | the same id and steps
the hub cannot be reached | bounded retries, one line, finished shards stay
kill -9 of fineweb.py | a rerun ends with the bytes of a clean run
a worker of the tokenizer dies | no hang; there are no worker processes: threads of one process encode
odd documents: empty, special tokens, lone surrogates, 10 MB | read as documented
a pickle instead of weights or shards | refused and not run
a bad line in HellaSwag's file, a missing file, no network | line or file is named; without network it goes on
the compiler fails | one line that names `--compile=False`
no memory on the GPU | one line with a smaller batch_size; no rank waits
the port is in use | one line with `--standalone`
two runs in one folder | the second is refused
a new run in a used folder | refused without `--resume` or `--overwrite`
a folder that cannot be written | refused before training
an error after DDP has wrapped the model, 20 times | every rank is gone within 5 s of the error line
an error on another rank than 0 | told once, with its rank
torchrun is killed and its ranks live | a second run is refused; the ranks leave
`--overwrite` on a living run | refused
fineweb.py killed between the last shard and the manifest | a rerun ends with the bytes of a clean run
a damaged checkpoint among the last | the whole one stays until another one takes its place
a record names `../x`, an absolute path or a link | refused; nothing outside the folder is read or removed
manifests, states and headers of another structure | one line, the checkpoint before where there is one
token_bytes.npy is damaged | its digest tells
signals in a step, compilation, evaluation, HellaSwag, save | one checkpoint; a second signal ends at once
SIGTERM with save_interval=0 | the last line says that nothing was saved
weights that are not finite are due to be saved | neither saved nor resumed into
lines of a text file that hold no text | file and line; `--skip_bad_documents` leaves them out and counts them
a rank is killed under `--max-restarts`, 20 times | the run resumes and ends
the disk is full under log.jsonl, wandb fails without a word | one warning, or one line and a code
a checkpoint on another machine | it has its tokenizer with it
a resume with another schedule | says what changes, and from which rate to which
folders with `[`, spaces, a slash at the end, links | they work; printed commands are quoted
NaN, infinity and numbers of 4,000 digits as settings | refused in one line
""".strip().splitlines()
ABOUT = """
What can go wrong with a run, what must hold then, and the tests that repeat it, with the number that passed.
`./test.sh --faults` runs them and wrote this table on {date} with {cores} CPU cores and {gpu}. Among them
are 18,200 mutations of files, 210 kills at random moments, and rows 47 and 60 twenty times each.

Where there are two GPUs, `tests/test_nccl.py` repeats rows 29, 30, 42, 47, 48 and 60 over NCCL; elsewhere
they run over gloo alone, and the test raises row 42's error itself.

[operations.md](operations.md) and [checkpoints.md](checkpoints.md) say how to live with it.
"""


class Table:
    """A plugin of pytest that collects the outcomes of the tests with a row, and writes the table."""

    def __init__(self, path):
        self.path, self.found = Path(path), {}

    def pytest_runtest_logreport(self, report):
        """The worst outcome of a test's phases; a row's parametrized tests count together."""
        if report.when != "call" and report.passed:
            return
        name = re.sub(r"\[.*", "", report.nodeid)
        for row in (value for key, value in report.user_properties if key == "fault"):
            self.found.setdefault(row, {}).setdefault(name, []).append(report.outcome)

    def pytest_sessionfinish(self, session):
        if hasattr(session.config, "workerinput") or session.config.option.collectonly:
            return
        lines = [self.line(row, *text.split(" | ")) for row, text in enumerate(ROWS, 1)]
        gpu = "a GPU" if torch.cuda.is_available() else "no GPU"
        about = ABOUT.format(date=datetime.date.today(), cores=os.cpu_count(), gpu=gpu)
        head = "| row | fault | what must hold | verdict | tests |\n| --- | --- | --- | --- | --- |\n"
        self.path.write_text(f"# Reliability\n{about}\n{head}" + "".join(lines))

    def line(self, row, fault, rule):
        tests = self.found.get(row, {})
        outcomes = [outcome for of in tests.values() for outcome in of]
        bad = "failed" in outcomes
        passed = outcomes.count("passed")
        verdict = "**fails**" if bad else f"holds ({passed})" if passed else "not run here"
        names = ", ".join(f"`{name.partition('::')[2]}`" for name in sorted(tests))
        return f"| {row} | {fault} | {rule} | {verdict} | {names} |\n"
