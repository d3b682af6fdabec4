"""CI's second run leaves out what passed in its first, and nothing else."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.passed import WritePassed, split_passed


def report(name: str, *, when: str = "call", outcome: str = "passed") -> Any:
    return pytest.TestReport(name, (name, 0, name), {}, outcome, None, when)  # type: ignore[arg-type]


def test_only_what_passed_is_left_out(tmp_path: Path) -> None:
    plugin = WritePassed(tmp_path / "passed")
    plugin.pytest_runtest_logreport(report("a.py::good[é x]"))
    plugin.pytest_runtest_logreport(report("a.py::bad", outcome="failed"))
    for name in ("a.py::bad", "a.py::skipped"):  # the set-up of a test passes before it fails or is skipped
        plugin.pytest_runtest_logreport(report(name, when="setup"))
    plugin.pytest_runtest_logreport(report("a.py::skipped", outcome="skipped"))
    plugin.pytest_unconfigure()
    items: Any = [SimpleNamespace(nodeid=f"a.py::{name}") for name in ("good[é x]", "good", "bad", "skipped", "full")]
    others, passed = split_passed(items, tmp_path / "passed")
    assert [item.nodeid for item in passed] == ["a.py::good[é x]"]
    assert [item.nodeid for item in others] == ["a.py::good", "a.py::bad", "a.py::skipped", "a.py::full"]
