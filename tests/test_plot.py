"""plot.py: how a log is read, where its points lie, and that pictures and pages are drawn."""

import dataclasses
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
import torch
from conftest import ROOT

import plot
from configurator import UserError
from run import history
from run.logger import Logger
from scale.parallel import World
from settings import Config


def write(folder, lines, tail=""):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + tail)
    return folder


def training(steps, **changes):
    base = {
        "kind": "train",
        "lr": 1e-3,
        "norm": 1.0,
        "dt_ms": 10.0,
        "tok_per_s": 1e5,
        "mfu": None,
        "tokens": 10,
    }
    return [{**base, "step": s, "loss": 10 / s**0.3, **changes} for s in steps]


def test_the_later_of_two_lines_counts_and_a_torn_one_is_left_out(tmp_path):
    run = write(tmp_path, training([1, 2, 3]) + training([2, 3, 4], loss=5.0), '{"kind": "train", "st')
    steps, loss = history.series(history.read(run), "train", "loss")
    assert steps.tolist() == [1, 2, 3, 4] and loss.tolist() == [10.0, 5.0, 5.0, 5.0]


def test_smoothing_is_a_centred_mean():
    assert history.smooth([1.0, 2.0, 6.0, 0.0], 3) == pytest.approx([1.5, 3.0, 8 / 3, 3.0])
    assert history.smooth([3.0] * 500) == pytest.approx([3.0] * 500)


def test_draws_the_small_logs_of_the_repository():
    """They are files, not folders, without the times of steps."""
    logs = [str(path) for path in sorted((ROOT / "results/modern").glob("*.jsonl"))]
    assert len(logs) > 1
    runs = plot.load(logs)
    assert [run.name for run in runs] == [Path(log).stem for log in logs]
    with plot.drawing(runs, "tokens", "loss") as figure:
        labels = [line.get_label() for line in figure.axes[0].lines]
    assert {run.name for run in runs} <= {label.partition(":")[0] for label in labels}
    with pytest.raises(UserError, match="try --x=steps"), plot.drawing(runs, "seconds", "loss"):
        pass
    timed = next(run for run in runs if "step_ms" in run.start)
    assert timed.place(np.array([0, 100]), "seconds") == pytest.approx([0, timed.start["step_ms"] / 10])


@pytest.mark.parametrize("with_hellaswag", [True, False])
def test_draws_several_runs(tmp_path, with_hellaswag):
    val = [{"kind": "val", "step": s, "loss": 10 / s**0.3, "bpb": None} for s in (10, 20)]
    score = [{"kind": "hellaswag", "step": 20, "acc": 0.26, "acc_norm": 0.27}] * with_hellaswag
    runs = [write(tmp_path / name, training(range(1, 31)) + val + score) for name in "ab"]
    plot.draw(runs, tmp_path / "c.png", {"name": "other", "points": {"10": 5.0, "20": 4.0}})
    image = matplotlib.image.imread(tmp_path / "c.png")
    assert 900 <= image.shape[1] <= 1200
    for color in ("#2563eb", "#dc2626"):  # each run's own
        rgb = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255
        assert (np.abs(image[..., :3] - rgb).max(-1) < 0.02).sum() > 50


def test_missing_empty_and_foreign_logs(tmp_path):
    with pytest.raises(UserError, match="No such file"):
        history.read(tmp_path / "none")
    with pytest.raises(UserError, match="nothing to draw"):
        history.read(write(tmp_path / "empty", []))
    with pytest.raises(UserError, match="log.jsonl:1: not a line"):
        history.read(write(tmp_path / "foreign", ["text", *training([1])]))


def test_a_diverged_run_is_drawn_up_to_its_last_finite_loss(tmp_path):
    nan = float("nan")
    run = write(tmp_path, training(range(1, 30)) + training([30], loss=nan, norm=float("inf")))
    steps, loss = history.series(history.read(run), "train", "loss")
    assert steps[-1] == 29 and np.isfinite(history.smooth(loss)).all()
    plot.draw([run], tmp_path / "c.png")
    with pytest.raises(UserError, match="no finite training or validation loss"):
        history.read(write(tmp_path / "all", training([1, 2], loss=nan)))


def test_runs_of_the_same_name_stay_apart(tmp_path):
    assert plot.labels(["out/a/", "out/b"]) == ["a", "b"]
    assert plot.labels(["x/run", "y/run", "z"]) == ["x/run", "y/run", "z"]


def run_of(folder, **settings):
    """A run as the logger records it: 20 steps of 100 tokens in 0.5 s each, validated at 0, 10 and 20."""
    cfg = dataclasses.replace(
        Config(out_dir=str(folder), batch_tokens=100, max_steps=20, tokenizer="gpt2"), **settings
    )
    log = Logger(World(0, 1, torch.device("cpu")), 20, log_interval=1, batch_tokens=100, max_skipped=0)
    folder.mkdir(parents=True, exist_ok=True)
    log.open(folder, dataclasses.asdict(cfg))
    log.start(0, 0, [("parameters", "3 <b>")], {}, (1e6, None))
    log.seconds = 0.5
    for step in range(21):
        if step:
            log._line(step, 1e-3, 9 / step**0.3, 1.0)
        if step % 10 == 0:
            log.record("val", step, loss=10 / (step + 1) ** 0.3, bpb=4 / (step + 1) ** 0.3, seconds=1.0)
            log.record("sample", step, texts=[f"after {step} <script>", "x"])
    log.close(20, False)
    return folder


def lines(folders, **axes):
    """{label: (x, y)} of the panel of losses."""
    runs = plot.load(folders)
    with plot.drawing(runs, axes.get("x", "steps"), plot.choose_y(runs, axes.get("y", "auto"))) as figure:
        limits = [figure.axes[0].get_xlim(), figure.axes[0].get_ylim()]
        return {line.get_label(): line.get_data() for line in figure.axes[0].lines}, limits


@pytest.mark.parametrize("x, end", [("steps", 20), ("tokens", 2000), ("seconds", 10), ("flops", 2e9)])
def test_validation_starts_at_step_0_within_the_panel_on_every_axis(tmp_path, x, end):
    found, ((left, right), (low, high)) = lines([run_of(tmp_path / "a")], x=x)
    at, loss = found[f"a: {10 / 21**0.3:.3f}"]
    assert at == pytest.approx([0, end / 2, end]) and loss == pytest.approx([10, 10 / 11**0.3, 10 / 21**0.3])
    assert left < 0 and end < right and low < loss[-1] and 10 < high
    assert found["_a, training"][0] == pytest.approx(np.arange(1, 21) * end / 20)


@pytest.mark.parametrize("count", [12, 14])
def test_a_legend_names_the_lowest_of_many_runs(tmp_path, count):
    loss = {f"run_{i}": 3 + (i * 5 % count) / 100 for i in range(count)}  # each another one
    runs = plot.load(
        [write(tmp_path / name, training([1]) + training([2], loss=loss[name])) for name in loss]
    )
    with plot.drawing(runs, "steps", "loss") as figure:
        legend = figure.axes[0].get_legend()
        names = [text.get_text() for text in legend.get_texts()]
        assert names == [name for name in loss if loss[name] < 3.115]
        assert legend.get_title().get_text() == ("" if count == 12 else "the 12 lowest of 14")


def test_a_log_without_what_the_axis_needs(tmp_path):
    old = write(tmp_path / "old", training([1, 2]))
    with pytest.raises(UserError, match="old: its log does not hold what x=flops needs"):
        plot.draw([old], tmp_path / "c.png", x="flops")
    with pytest.raises(UserError, match="no bits per byte in the log of old"):
        plot.draw([old], tmp_path / "c.png", y="bpb")
    with pytest.raises(UserError, match="--x=tokens"):
        plot.draw([old], tmp_path / "c.png", {"name": "other", "points": {"10": 5.0}}, x="tokens")


def test_bits_per_byte_where_the_tokenizers_differ(tmp_path):
    a, b, c = run_of(tmp_path / "a"), run_of(tmp_path / "b"), run_of(tmp_path / "c", tokenizer="bytes")
    assert "a: 4.012" in lines([a, b])[0] and "a: 1.605" in lines([a, c])[0]
    assert lines([a, c])[0]["_c, training"][1] == pytest.approx(0.4 * 9 / np.arange(1, 21) ** 0.3)
    assert "a: 1.605" in lines([a, b], y="bpb")[0] and "a: 4.012" in lines([a, c], y="loss")[0]


def test_a_page_holds_everything_and_asks_the_network_for_nothing(tmp_path):
    folders = [run_of(tmp_path / "a"), run_of(tmp_path / "b", lr=1e-3, tokenizer="bytes")]
    plot.main(plot.Config(html=True), folders)
    text = (tmp_path / "a" / "curves.html").read_text()
    page = HTMLParser()
    rows, cells = {}, []
    page.handle_data = lambda words: cells.append(words)
    page.handle_endtag = lambda tag: (
        (rows.setdefault(cells[0], cells[1:]), cells.clear()) if tag == "tr" else None
    )
    page.handle_starttag = lambda tag, _: cells.clear() if tag == "tr" else None
    page.feed(text)
    assert (
        rows["lr"] == ["0.0006", "0.001"] and rows["tokenizer"] == ["gpt2", "bytes"] and "n_layer" not in rows
    )
    assert rows["parameters"] == ["3 <b>"] * 2 and rows["device"][0].startswith("1 x cpu, torch ")
    assert rows["step 20"] == ["after 20 <script>\n\nx"] * 2 and rows["bits per byte"] == ["1.6047"] * 2
    assert rows["tokens a second, median"] == ["200"] * 2
    assert text.count("<svg") == 4 and "<!--" not in re.sub(r"<svg.*?</svg>", "", text, flags=re.DOTALL)
    assert not re.search(r"(src|href)=.(?!#)|@import|url\((?!#)|fetch\(", text)
    readings = json.loads(re.search(r"readings = (.*)", text)[1])
    assert [len(panels) for panels in readings] == [5] * 4
    named = {curve["name"]: curve for curve in readings[1][0]["curves"]}
    assert named["b: 1.605"]["x"] == [0, 1000, 2000] and named["b: 1.605"]["y"][0] == 4


@pytest.mark.parametrize(
    "text", [None, "[1]", "{", '{"name": "a", "points": {}}', '{"name": "a", "points": {"x": 1}}']
)
def test_a_bad_reference_is_one_line(tmp_path, text):
    write(tmp_path, training([1, 2]))
    if text is not None:
        (tmp_path / "r.json").write_text(text)
    with pytest.raises(UserError, match="r.json(: No such file|: expected| is damaged)"):
        plot.main(plot.Config(reference=str(tmp_path / "r.json")), [str(tmp_path)])


def test_a_picture_that_cannot_be_written(tmp_path):
    run = write(tmp_path, training([1, 2]))
    with pytest.raises(UserError, match="cannot write the picture"):
        plot.draw([run], tmp_path / "none" / "c.png")


def test_command_line(tmp_path, capsys):
    write(tmp_path / "run", training([1, 2, 3]))
    plot.main(plot.Config(), [str(tmp_path / "run")])
    assert (
        tmp_path / "run" / "curves.png"
    ).stat().st_size > 10_000 and "curves.png" in capsys.readouterr().out


def test_settings_that_a_fit_cannot_use_are_refused():
    with pytest.raises(UserError, match="x=tokens and html=True cannot change the picture of --fit"):
        plot.main(plot.Config(fit=True, html=True, x="tokens"), ["a"])


def test_as_a_script(tmp_path):
    write(tmp_path / "run", training([1, 2, 3]))
    for words, code, said in [
        (["--out", f"{tmp_path}/c.svg", f"{tmp_path}/run", "--x", "seconds"], 0, f"drawn: {tmp_path}/c.svg"),
        (["--out=c.png"], 2, "error: give the folder of a run"),
        ([f"{tmp_path}/run", "--refrence=r.json"], 2, "did you mean reference?"),
    ]:
        done = subprocess.run([sys.executable, "plot.py", *words], cwd=ROOT, capture_output=True, text=True)
        assert (
            done.returncode == code and said in done.stdout + done.stderr and "Traceback" not in done.stderr
        )
    assert (tmp_path / "c.svg").exists()
