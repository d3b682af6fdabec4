"""A job opens its run directory when nothing is refused any more."""

from __future__ import annotations

import json
import platform
from pathlib import Path

import pytest
import torch

from fsdp2kit.config.schema import TrainingConfig
from fsdp2kit.errors import UserError
from fsdp2kit.job import distributed
from fsdp2kit.job.distributed import agreement
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
    """How this rank leaves work that ends so on each rank."""
    try:
        with agreement():
            if (error := errors[distributed.rank()]) is not None:
                raise error
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return "went on"


STOPPED, BUG, MISTAKE = Stopped("SIGTERM"), ValueError("a bug"), UserError("a row", "is wrong", "mend it")
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
