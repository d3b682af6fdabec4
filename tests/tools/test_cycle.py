"""tools/cycle.py: the mean cycle of a run with rollouts, from its records."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tools import cycle

FIRST = {"loss": 1.0, "step": 1, "step_seconds": 90.0, "data_seconds": 30.0, "seconds/sync": 8.0, "reward": 0.1}
STEPS = [
    FIRST,
    {**FIRST, "step": 2, "step_seconds": 9.0, "data_seconds": 3.0, "seconds/sync": 1.0, "seconds/generate": 2.0},
    {**FIRST, "step": 3, "step_seconds": 5.0, "data_seconds": 1.0, "seconds/sync": 3.0, "eval_reward": 0.5},
]


def write_run(folder: Path, records: Sequence[Mapping[str, Any]]) -> Path:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def test_the_mean_cycle_leaves_out_the_first_step() -> None:
    seconds, memory = cycle.cycle_of(
        [{**FIRST, "memory_gib/backward": 9.0}, *({**step, "memory_gib/forward": 2.0} for step in STEPS[1:])]
    )
    assert seconds == {"sync": 2.0, "generate": 1.0, "train": 5.0}
    assert list(seconds) == [name for name in cycle.COLORS if name in seconds]
    assert memory == {"sync": 0.0, "generate": 0.0, "train": 2.0}


def test_of_a_single_step_there_is_nothing_to_leave_out() -> None:
    assert cycle.cycle_of([FIRST])[0] == {"sync": 8.0, "train": 60.0}


def test_it_prints_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "cycle.png"
    assert cycle.main([str(write_run(tmp_path, STEPS)), "--png", str(out)]) == 0
    assert out.read_bytes().startswith(b"\x89PNG")
    assert [line.split()[:2] for line in capsys.readouterr().out.splitlines()] == [
        ["sync", "2.000"], ["generate", "1.000"], ["train", "5.000"],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("metrics", "said"),
    [
        ("", "has no step with rollouts"),
        ('{"step": 1, "loss": 2.0, "step_seconds": 1.0}\n', "has no step with rollouts"),
        (None, "has no metrics.jsonl"),
        ('{"step": 1, "lo', "cannot be read"),
    ],
)
def test_mistakes_are_one_line(
    metrics: str | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if metrics is not None:
        (tmp_path / "metrics.jsonl").write_text(metrics)
    assert cycle.main([str(tmp_path), "--png", str(tmp_path / "x.png")]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_a_missing_folder_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cycle.main([str(tmp_path / "none"), "--png", str(tmp_path / "x.png")]) == 2
    assert "no such directory" in capsys.readouterr().err
    assert cycle.main([str(write_run(tmp_path, STEPS)), "--png", str(tmp_path / "none" / "x.png")]) == 2
    assert "cannot be written" in capsys.readouterr().err
