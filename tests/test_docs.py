"""The worked examples of docs/experiment.md run as they stand, put into a copy of the sources."""

import json
import re
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT, flags, read_log
from ranks import environment

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


def run(folder, words, ranks=0):
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks else []
    command = [sys.executable, *launcher, "train.py", *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment())
    assert done.returncode == 0, done.stderr
    return done.stdout


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
    command = re.search(r"python train.py (config/test.py .*--out_dir=out/reverse)", TEXT)[1].split()
    command += ["--n_layer=2", "--device=cpu", "--log_interval=100", "--save_interval=300"]
    out = run(code, command)
    assert "batches of Reverse" in out
    log = read_log(code / "out/reverse")
    losses = {line["step"]: line["loss"] for line in log if line["kind"] == "train"}
    assert losses[600] < 0.8 * losses[1]
    shutil.rmtree(code / "out/reverse/step_00000600")
    run(code, [*command, "--resume=auto"])
    again = {line["step"]: line["loss"] for line in read_log(code / "out/reverse") if line["kind"] == "train"}
    assert again == losses  # the later lines of steps 301 to 600


def test_multiple_choice_from_a_file(tmp_path, data_dir):
    code = copy_of_sources(tmp_path / "code")
    evaluation = block("import json")
    assert len(evaluation.strip().splitlines()) <= 25
    replaced(code / "train.py", "def main(cfg):", evaluation + "\n\ndef main(cfg):")
    added = re.search(r"    (evaluations.add\(.*\))", TEXT)[1]
    anchor = "    warnings = add_evaluations(evaluations, cfg, world, val_loaders)\n"
    replaced(code / "train.py", anchor, f"{anchor}    {added}\n")
    quiz = [
        dict(question="2 + 2 =", choices=["3", "4"], answer=1),
        dict(question="a", choices=["b", "c", "dd"], answer=0),
    ]
    (code / "quiz.jsonl").write_text("".join(json.dumps(line) + "\n" for line in quiz))
    out = run(code, flags(data_dir, tmp_path / "run", eval_interval=6))
    found = [line for line in read_log(tmp_path / "run") if line["kind"] == "quiz"]
    assert [line["step"] for line in found] == [0, 12] and {line["accuracy"] for line in found} <= {0, 0.5, 1}
    assert "quiz 12 | accuracy " in out


def test_an_optimizer_of_ones_own(tmp_path, data_dir):
    code = copy_of_sources(tmp_path / "code")
    replaced(code / "optim.py", "def build(name", block("class Lion") + "\n\ndef build(name")
    line = re.search(r"    (return Lion\(.*\))", TEXT)[1]
    replaced(code / "optim.py", "return torch.optim.AdamW(groups, **options, fused=fused)", line)
    words = flags(data_dir, tmp_path / "run", lr=3e-4)
    out = run(code, words)
    assert "the states of Lion, and activations, are not estimated" in " ".join(out.split())
    shutil.rmtree(tmp_path / "run/step_00000012")
    run(code, [*words, "--resume=auto"])
    found = [(line["step"], line["loss"]) for line in read_log(tmp_path / "run") if line["kind"] == "train"]
    assert found[12:] == found[8:12]  # steps 9 to 12


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [0, 2])
def test_an_average_of_the_weights(tmp_path, data_dir, ranks):
    code, text = copy_of_sources(tmp_path / "code"), block("class Average")
    added = re.search(r"    average = Average.*?average.update\(state.model\)", TEXT, re.S)[0].split("\n\n")
    lines = [line for line in (text + "".join(added)).splitlines() if line.strip()]
    assert len(lines) <= 20
    anchors = [
        "    state = training.state\n",
        "    warnings = add_evaluations(evaluations, cfg, world, val_loaders)\n",
        "        training.update(totals, norm)\n",
    ]
    replaced(code / "train.py", "def main(cfg):", text + "\n\ndef main(cfg):")
    for anchor, lines in zip(anchors, added):
        indent = " " * 4 if anchor.startswith(" " * 8) else ""
        lines = "".join(f"{indent}{line}\n" for line in lines.splitlines())
        replaced(code / "train.py", anchor, anchor + lines)
    words = flags(data_dir, tmp_path / "run", eval_interval=4, parallel="fsdp" if ranks else "ddp")
    run(code, words, ranks)
    whole = read_log(tmp_path / "run")
    shutil.rmtree(tmp_path / "run/step_00000012")
    run(code, [*words, "--resume=auto"], ranks)
    again = read_log(tmp_path / "run")[len(whole) :]
    for kind in ("val", "average"):
        first, later = ({x["step"]: x["loss"] for x in log if x["kind"] == kind} for log in (whole, again))
        assert sorted(first) == [0, 4, 8, 12] and later == {12: first[12]}
    val, average = ([x["loss"] for x in whole if x["kind"] == kind] for kind in ("val", "average"))
    assert val[0] == average[0] and val[3] < average[3] < val[0]  # it lags behind
