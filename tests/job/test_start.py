"""A job opens its run directory when nothing is refused any more."""

from __future__ import annotations

import contextlib
import json
import platform
import resource
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp2kit.config.schema import TrainingConfig
from fsdp2kit.errors import RunFailure, UserError
from fsdp2kit.job import distributed, start, status
from fsdp2kit.job.distributed import agreement
from fsdp2kit.job.events import Events
from fsdp2kit.job.run_directory import lock_run_dir
from fsdp2kit.job.start import start_job
from fsdp2kit.job.stop import Stopped
from tests.support.workers import WorkerPool


def open_and_record(folder: Path, deterministic: bool) -> tuple[bool, bool]:
    """Whether this rank finds a run directory before the job opens it, and whether that is locked then."""
    run = {"dir": str(folder / "run"), "deterministic": deterministic}
    values = {"recipe": "x", "model": {"path": "m"}, "train": {"steps": 1}, "run": run}
    with start_job(TrainingConfig.model_validate(values)) as job:
        assert torch.are_deterministic_algorithms_enabled() is deterministic
        torch.use_deterministic_algorithms(False)
        before = (folder / "run").exists()
        job.open_run_dir()
        locked = False
        if not job.is_main:  # a process never locks itself out
            try:
                with lock_run_dir(folder / "run"):
                    pass
            except UserError:
                locked = True
        distributed.agree()
    return before, locked


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_job_opens_its_run_directory_when_nothing_is_refused_any_more(
    deterministic: bool, pool: WorkerPool, tmp_path: Path
) -> None:
    found = pool.run(2, open_and_record, tmp_path, deterministic)
    assert found[0] == (False, False)
    assert found[1][1], "rank 0 has the lock"
    assert {"config.toml", "environment.json", ".lock"} <= {path.name for path in (tmp_path / "run").iterdir()}
    assert json.loads((tmp_path / "run" / "environment.json").read_text())["hosts"] == {platform.node(): "0-1"}
    with lock_run_dir(tmp_path / "run"):  # let go at the job's end
        pass


def outcome(errors: list[BaseException | None]) -> str:
    """Raise this rank's error, if it has one, inside an agreement; return what the rank leaves with."""
    try:
        with agreement():
            if (error := errors[distributed.rank()]) is not None:
                raise error
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return "went on"


STOPPED = Stopped("SIGTERM")
BUG = ValueError("a bug")
MISTAKE = UserError("a row", "is wrong", "mend it")
RANKS_LEAVE = {
    "nothing": ([None, None], ["went on"] * 2),
    "a request": ([None, STOPPED], ["Stopped: SIGTERM"] * 2),
    "a request and a bug": ([STOPPED, BUG], ["RunFailure: rank 1 failed: ValueError: a bug", "ValueError: a bug"]),
    "a request and a mistake": ([STOPPED, MISTAKE], ["UserError: a row: is wrong; mend it"] * 2),
    "a bug and a mistake": ([BUG, MISTAKE], ["UserError: a row: is wrong; mend it"] * 2),
}


@pytest.mark.parametrize("case", RANKS_LEAVE)
def test_ranks_leave_with_the_worst_that_any_has(case: str, pool: WorkerPool) -> None:
    errors, expected = RANKS_LEAVE[case]
    assert pool.run(2, outcome, errors) == expected


@pytest.mark.parametrize(
    ("error", "step", "expected"),
    [
        (UserError("x", "is wrong", "mend it"), 0, [{"event": "refusal", "text": "x: is wrong; mend it"}]),
        (UserError("x", "is wrong", "mend it"), 3, [{"event": "failure", "text": "x: is wrong; mend it"}]),
        (RunFailure("no space\nmore"), 3, [{"event": "failure", "text": "no space"}]),
        (KeyboardInterrupt(), 0, [{"event": "failure", "text": "KeyboardInterrupt"}]),
        (ValueError("a bug"), 0, [{"event": "failure", "text": "ValueError: a bug"}]),
        (
            RuntimeError("gloo/transport"),
            3,
            [{"event": "failure", "text": "RuntimeError: gloo/transport", "lost": True}],
        ),
        (Stopped("SIGTERM"), 0, [{"event": "stop", "reason": None}, {"event": "end", "outcome": "stopped"}]),
        (None, 3, [{"event": "end", "outcome": "done"}]),
    ],
    ids=str,
)
def test_how_a_start_ended_is_recorded(
    error: BaseException | None, step: int, expected: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status, "_now", status.Position(1, step))
    events = Events(is_kept=True)
    events.open_in(tmp_path, start=1)
    with contextlib.suppress(BaseException), start._recording(events):
        if error is not None:
            raise error
    found = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [{key: one[key] for key in one if key not in ("time", "start")} for one in found] == expected


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, (0, 1, 0, 1)),
        ({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}, (5, 8, 1, 4)),
        ({"RANK": "7", "WORLD_SIZE": "8", "LOCAL_RANK": "7"}, (7, 8, 7, 8)),
        ({"RANK": "8", "WORLD_SIZE": "8"}, "RANK: '8' is not one of the 8 ranks"),
        ({"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "LOCAL_RANK": "4"}, "LOCAL_RANK: '4' is not one of the 4"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE: '0' is not a number of processes"),
        ({"WORLD_SIZE": "2", "RANK": "-1"}, "RANK: '-1' is not one of the 2 ranks"),
    ],
)
def test_the_environment_names_a_possible_rank(
    variables: dict[str, str], expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if isinstance(expected, tuple):
        assert distributed.ranks_from_environment() == expected
        assert distributed.is_main_process() is (expected[0] == 0)
        return
    with pytest.raises(UserError, match=f"environment variable {expected}"):
        distributed.ranks_from_environment()
    assert distributed.is_main_process(), "a process that cannot tell says what is wrong"


@pytest.mark.parametrize(
    ("ranks", "soft", "hard", "expected"),
    [
        (8, 1024, 4096, None),
        (256, 1024, 4096, (2048, 4096)),
        (1024, 1024, 4096, (4096, 4096)),
        (1024, 1024, resource.RLIM_INFINITY, (6656, resource.RLIM_INFINITY)),
        (1024, resource.RLIM_INFINITY, resource.RLIM_INFINITY, None),
    ],
)
def test_many_ranks_may_open_more_files(
    ranks: int, soft: int, hard: int, expected: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[tuple[int, int]] = []
    monkeypatch.setattr("resource.getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr("resource.setrlimit", lambda _, limits: found.append(limits))
    distributed.allow_connections(ranks)
    assert found == ([] if expected is None else [expected])
