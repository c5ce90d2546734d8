"""The worked examples of docs/experiment.md run as they stand, put into a copy of the sources."""

import contextlib
import io
import re
import shutil

import pytest
import ranks
from conftest import ROOT, flags, read_log
from test_experiments import copy_of

from experiments import inside

TEXT = (ROOT / "docs/experiment.md").read_text()


def block(begins):
    """The Python code block of the page that begins with these words."""
    blocks = re.findall(r"```python\n(.*?)```", TEXT, re.S)
    (found,) = [code for code in blocks if code.startswith(begins)]
    return found


def replaced(path, old, new):
    text = path.read_text()
    assert text.count(old) == 1, f"{path.name} has this {text.count(old)} times, not once:\n{old}"
    path.write_text(text.replace(old, new))


def begun(folder, words):
    """For ranks.call: (code, error, stdout) of `python train.py words` in a folder of sources."""
    inside.use(folder)
    with contextlib.redirect_stdout(io.StringIO()) as said:
        code, error = inside.run(words)
    return code, error, said.getvalue()


def run(folder, words, out):
    """(what a run prints, [(step, loss)] in its log)"""
    [(code, error, said)] = ranks.call(0, begun, folder, words, timeout=300)
    assert code == 0, error
    lines = [line for line in read_log(out) if line["kind"] == "train"]
    return said, [(line["step"], line["loss"]) for line in lines]


@pytest.mark.slow
def test_a_task_made_on_the_fly_is_learned_and_a_run_of_it_goes_on(tmp_path):
    code = copy_of(ROOT, tmp_path / "code")
    place = "@dataclasses.dataclass\nclass State:"
    replaced(code / "train.py", place, f"{block('class Reverse')}\n\n{place}")
    replaced(code / "train.py", "loader = make_loader(cfg, world)", "loader = Reverse(cfg, world)")
    [command] = re.findall(r"python train.py (config/test.py .*--out_dir=out/reverse)", TEXT)
    words = [*command.split(), "--n_layer=2", "--device=cpu", "--log_interval=100"]
    words += ["--max_steps=200", "--save_interval=100"]
    said, losses = run(code, words, code / "out/reverse")
    assert losses[199][1] < 0.8 * losses[0][1]
    shutil.rmtree(code / "out/reverse/step_00000200")
    _, again = run(code, [*words, "--resume=auto"], code / "out/reverse")
    assert again[200:] == losses[100:]


@pytest.mark.slow
def test_an_optimizer_of_ones_own(tmp_path, data_dir):
    code = copy_of(ROOT, tmp_path / "code")
    replaced(code / "optim.py", "def build(name", block("class Lion") + "\n\ndef build(name")
    place = 'if name != "adamw":\n'
    chosen = block("    if name ==").strip()
    replaced(code / "optim.py", place, f"{chosen}\n    {place}")
    replaced(code / "settings.py", '"adamw8bit", "muon"]', '"adamw8bit", "muon", "lion"]')
    words = flags(data_dir, tmp_path / "run", optimizer="lion", lr=3e-4)
    run(code, words, tmp_path / "run")
    shutil.rmtree(tmp_path / "run/step_00000012")
    _, found = run(code, [*words, "--resume=auto"], tmp_path / "run")
    assert found[12:] == found[8:12]  # steps 9 to 12
