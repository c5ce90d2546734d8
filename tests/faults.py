"""Fills in the table of docs/reliability.md, whose rows are the faults that a run must survive.

A test belongs to rows by `@pytest.mark.fault(23, 54)`; `./test.sh --faults` runs these tests and
writes verdicts.
"""

import datetime
import os
import re
from pathlib import Path

import torch


class Table:
    """A plugin of pytest that writes into each row how many of its tests passed."""

    def __init__(self, path):
        self.path = Path(path)
        self.outcomes = {}  # of each row's tests

    def pytest_runtest_logreport(self, report):
        if report.when != "call" and report.passed:
            return
        for name, row in report.user_properties:
            if name == "fault":
                self.outcomes.setdefault(row, []).append(report.outcome)

    def pytest_sessionfinish(self, session):
        if hasattr(session.config, "workerinput") or session.config.option.collectonly:
            return
        machine = f"{os.cpu_count()} CPU cores and {'a' if torch.cuda.is_available() else 'no'} GPU"
        told = f"on {datetime.date.today()} with {machine}"
        text = re.sub(
            r"on \d+-\d+-\d+ with \d+ CPU cores and (a|no) GPU", told, self.path.read_text()
        )
        lines = []
        for line in text.splitlines(keepends=True):
            row = re.match(r"\| (\d+) \|", line)
            if row:
                line = f"{line.rpartition(' | ')[0]} | {self.verdict(int(row[1]))} |\n"
            lines.append(line)
        self.path.write_text("".join(lines))

    def verdict(self, row):
        outcomes = self.outcomes.get(row, [])
        if "failed" in outcomes:
            return "**fails**"
        passed = outcomes.count("passed")
        return str(passed) if passed else "not run here"
