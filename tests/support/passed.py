"""Tests that passed in one run are left out of the next one: CI runs the default tier once, not twice."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest


class WritePassed:
    """A plugin that writes the names of tests that passed, one a line. Skipped tests are not among them.

    With `pytest -n` it belongs to the process that collects the workers' reports.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", encoding="utf-8")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Called once for each phase of each test."""
        if report.when == "call" and report.passed:
            self._file.write(f"{report.nodeid}\n")

    def pytest_unconfigure(self) -> None:
        """Called once, at the end of the run."""
        self._file.close()


def split_passed(items: Sequence[pytest.Item], path: Path) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """The tests that are not named in the file, and those that are."""
    names = set(path.read_text(encoding="utf-8").splitlines())
    others = [item for item in items if item.nodeid not in names]
    passed = [item for item in items if item.nodeid in names]
    return others, passed
