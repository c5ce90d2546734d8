"""run/pulse.py: a run that prints nothing for a while says what it is doing."""

import re
import time

import pytest
from conftest import train_here

from corpus.loader import TokenLoader
from run import pulse, watch


@pytest.fixture
def clock(monkeypatch):
    """A list of one number: the time in seconds."""
    now = [0.0]
    monkeypatch.setattr(pulse.time, "monotonic", lambda: now[0])
    return now


def lines(found, clock, until):
    """[(second, line)] of a Pulse that is asked every half second."""
    said = []
    while clock[0] < until:
        clock[0] += 0.5
        if line := found.line("step 1 (compiling)"):
            said.append((clock[0], line))
    return said


def test_lines_come_after_ten_seconds_and_then_more_rarely(clock):
    found = pulse.Pulse()
    said = lines(found, clock, 100)
    assert [at for at, _ in said] == [10, 20, 40, 80]
    assert said[0][1] == "working      step 1 (compiling); 10.0s since the last line"
    found.spoke()
    assert [at for at, _ in lines(found, clock, 115)] == [110]


def test_steps_as_slow_as_the_last_one_are_no_reason(clock):
    found = pulse.Pulse()
    found.spoke(step_s=30)
    assert [at for at, _ in lines(found, clock, 200)] == [90, 180]
    found.spoke()
    assert not lines(found, clock, 285)


def test_the_part_and_what_is_left_are_named(clock):
    found = pulse.Pulse()
    found.item("micro-step", 1, 8)
    assert (
        lines(found, clock, 10)[0][1] == "working      step 1, micro-step 1 of 8; 10.0s since the last line"
    )
    found.item("micro-step", 2, 8)
    [(_, line)] = lines(found, clock, 20)
    assert line == "working      step 1, micro-step 2 of 8; 20.0s since the last line, at least 1m00s more"
    found.item("validation", 3, 8, shown=True)  # by a bar
    assert not lines(found, clock, 100)
    found.clear()
    assert "step 1 (compiling);" in lines(found, clock, 101)[0][1]


def test_a_slow_step_and_a_slow_validation_say_where_they_are(data_dir, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(pulse, "FIRST", 0.1)
    monkeypatch.setattr(pulse, "MOST", 0.1)  # also where a slow start has had lines of its own
    monkeypatch.setattr(watch, "POLL", 0.1)
    take, rows = TokenLoader.next, TokenLoader.eval_batches

    def slow(loader):
        time.sleep(0.4)
        return take(loader)

    monkeypatch.setattr(TokenLoader, "next", slow)
    monkeypatch.setattr(TokenLoader, "eval_batches", lambda *_: map(lambda b: time.sleep(0.4) or b, rows(*_)))
    settings = dict(max_steps=1, batch_tokens=384, eval_interval=1, eval_tokens=256, save_interval=0)
    train_here(data_dir, tmp_path / "run", **settings)
    said = capsys.readouterr().out
    assert re.search(r"^working +step 0, validation \d of 2; ", said, re.MULTILINE), said
    assert re.search(r"^working +step 1, micro-step \d of 3; ", said, re.MULTILINE), said
    assert (
        said.index("settings") < said.index("validation") < said.index("val 0 |") < said.index("micro-step 2")
    )
