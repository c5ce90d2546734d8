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
    """A plugin of pytest that writes the outcomes of the tests with a row into the table."""

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
        machine = f"{os.cpu_count()} CPU cores and {'a' if torch.cuda.is_available() else 'no'} GPU"
        told = f"on {datetime.date.today()} with {machine}"
        text = re.sub(
            r"on \d+-\d+-\d+ with \d+ CPU cores and (a|no) GPU", told, self.path.read_text()
        )
        self.path.write_text(re.sub(r"(?m)^(\| (\d+) \|[^|]*\|[^|]*\|).*", self.line, text))

    def line(self, row):
        """A row of the table, as matched: number and words stay, verdict and tests are new."""
        tests = self.found.get(int(row[2]), {})
        outcomes = [outcome for of in tests.values() for outcome in of]
        passed = outcomes.count("passed")
        verdict = f"holds ({passed})" if passed else "not run here"
        verdict = "**fails**" if "failed" in outcomes else verdict
        names = ", ".join(f"`{name.partition('::')[2]}`" for name in sorted(tests))
        return f"{row[1]} {verdict} | {names} |"
