"""Traces that no profiler wrote end in a line, or are passed over."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from fsdp2kit.errors import UserError
from fsdp2kit.overlap.trace import read_trace, read_traces

EVENT = {"ph": "X", "ts": 1.0, "dur": 2.0, "name": "Optimizer.step#x", "cat": "cpu_op", "tid": 1}


@pytest.mark.parametrize(
    "content",
    [
        {"traceEvents": [{**EVENT, "ts": float("inf")}]},
        {"traceEvents": [{**EVENT, "ts": 10**400}]},
        {"traceEvents": [{**EVENT, "dur": []}]},
        {"traceEvents": [EVENT], "distributedInfo": {"rank": "x"}},
        {"traceEvents": [EVENT], "distributedInfo": {"world_size": {}}},
        {"traceEvents": [EVENT], "fsdp2kit": {"first_step": [1]}},
        {"traceEvents": {}},
        [],
    ],
)
def test_a_trace_of_other_types_is_refused(tmp_path: Path, content: Any) -> None:
    (tmp_path / "rank0.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"rank0\.json: has "):
        read_trace(tmp_path / "rank0.json")


@pytest.mark.timeout(20)
def test_deep_traces_and_pipes_are_refused(tmp_path: Path) -> None:
    (tmp_path / "rank0.json").write_text('{"traceEvents": ' + "[" * 20_000)
    with pytest.raises(UserError, match="is no whole JSON"):
        read_traces(tmp_path)
    (tmp_path / "rank0.json").unlink()
    os.mkfifo(tmp_path / "rank0.json")
    with pytest.raises(UserError, match="cannot be read"):
        read_traces(tmp_path)


def test_arguments_that_are_none_are_passed_over(tmp_path: Path) -> None:
    content = {"traceEvents": [{**EVENT, "args": [3]}, {**EVENT, "args": "x"}, 3, None], "distributedInfo": []}
    (tmp_path / "rank3.json").write_text(json.dumps(content))
    assert read_trace(tmp_path / "rank3.json").rank == 3
