"""The worked examples of docs/experiment.md run as they stand, put into a copy of the sources."""

import re
import shutil

import pytest
import ranks
from conftest import ROOT, flags, read_log

from experiments import inside

TEXT = (ROOT / "docs/experiment.md").read_text()


def block(begins):
    """The Python code block of the page that begins with these words."""
    blocks = re.findall(r"```python\n(.*?)```", TEXT, re.S)
    (found,) = [code for code in blocks if code.startswith(begins)]
    return found


def copy_of_sources(folder):
    left_out = shutil.ignore_patterns(
        ".*", "tests", "docs", "results", "assets", "out", "data", "wandb", "__pycache__"
    )
    shutil.copytree(ROOT, folder, ignore=left_out)
    return folder


def replaced(path, old, new):
    text = path.read_text()
    assert text.count(old) == 1, f"{path.name} has this {text.count(old)} times, not once:\n{old}"
    path.write_text(text.replace(old, new))


def run(folder, words):
    """`python train.py words` of the sources in a folder -> what it prints."""
    ((code, error, said),) = ranks.call(0, inside.begun, folder, words, timeout=300)
    assert code == 0, error
    return said


@pytest.mark.slow
def test_a_task_made_on_the_fly_is_learned_and_a_run_of_it_goes_on(tmp_path):
    code = copy_of_sources(tmp_path / "code")
    assert len(block("class Reverse").strip().splitlines()) <= 25
    replaced(
        code / "train.py",
        "@dataclasses.dataclass\nclass State:",
        block("class Reverse") + "\n\n@dataclasses.dataclass\nclass State:",
    )
    replaced(code / "train.py", "loader = make_loader(cfg, world)", "loader = Reverse(cfg, world)")
    command = re.search(r"python train.py (config/test.py .*--out_dir=out/reverse)", TEXT)[
        1
    ].split()
    command += ["--n_layer=2", "--device=cpu", "--log_interval=100", "--save_interval=400"]
    out = run(code, command)
    assert "batches of Reverse" in out
    log = read_log(code / "out/reverse")
    losses = {line["step"]: line["loss"] for line in log if line["kind"] == "train"}
    assert losses[600] < 0.8 * losses[1]
    shutil.rmtree(code / "out/reverse/step_00000600")
    run(code, [*command, "--resume=auto"])
    again = {
        line["step"]: line["loss"]
        for line in read_log(code / "out/reverse")
        if line["kind"] == "train"
    }
    assert again == losses  # the later lines of steps 401 to 600


@pytest.mark.slow
def test_an_optimizer_of_ones_own(tmp_path, data_dir):
    code = copy_of_sources(tmp_path / "code")
    anchors = {
        "optim.py": 'if name != "adamw":\n',
        "settings.py": (
            '    optimizer: Literal["adamw", "adamw8bit", "muon"] = "adamw"  # see optim.py\n'
        ),
    }
    replaced(code / "optim.py", "def build(name", block("class Lion") + "\n\ndef build(name")
    chosen = block("    if name ==").strip()
    replaced(code / "optim.py", anchors["optim.py"], f"{chosen}\n    {anchors['optim.py']}")
    named = anchors["settings.py"].replace('"muon"]', '"muon", "lion"]')
    replaced(code / "settings.py", anchors["settings.py"], named)
    words = flags(data_dir, tmp_path / "run", optimizer="lion", lr=3e-4, max_skipped_steps=2)
    out = run(code, words)
    assert "a rank for weights and gradients; the rest is not estimated" in " ".join(out.split())
    shutil.rmtree(tmp_path / "run/step_00000012")
    run(code, [*words, "--resume=auto"])
    found = [
        (line["step"], line["loss"])
        for line in read_log(tmp_path / "run")
        if line["kind"] == "train"
    ]
    assert found[12:] == found[8:12]  # steps 9 to 12
