"""The profiler: the steps asked for are in the trace, one file a rank."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch

from fsdp2kit.config.schema import ProfileConfig
from fsdp2kit.overlap.trace import read_traces
from fsdp2kit.train.profiling import StepProfiler


def train(section: ProfileConfig, trace_dir: Path, *, steps: int, rank: int = 0, first_step: int = 1) -> list[int]:
    """Returns the steps after which the profiler says that it took time of its own."""
    took_time = []
    with StepProfiler(section, trace_dir=trace_dir, rank=rank, device_type="cpu", first_step=first_step) as profiler:
        for step in range(1, steps + 1):
            with torch.profiler.record_function(f"my step {step}"):
                torch.ones(4).sum()
            if profiler.step():
                took_time.append(step)
    return took_time


def traced_steps(path: Path) -> set[int]:
    with gzip.open(path, "rt") as file:
        names = {event.get("name", "") for event in json.load(file)["traceEvents"]}
    return {int(name.removeprefix("my step ")) for name in names if name.startswith("my step ")}


@pytest.mark.parametrize(
    ("start", "count", "run", "expected"),
    [(3, 2, 6, {3, 4}), (1, 1, 3, {1}), (2, 5, 3, {2, 3})],  # the last run ends amid the traced steps
)
def test_traces_the_steps_asked_for(tmp_path: Path, start: int, count: int, run: int, expected: set[int]) -> None:
    # `memory` is for CUDA; on the CPU it changes nothing.
    train(ProfileConfig(enabled=True, start_step=start, steps=count, memory=True), tmp_path / "t", steps=run, rank=3)
    assert [path.name for path in (tmp_path / "t").iterdir()] == ["rank-00003.json.gz"]
    assert traced_steps(tmp_path / "t" / "rank-00003.json.gz") == expected


@pytest.mark.parametrize(("start", "count", "expected"), [(4, 2, [2, 3, 5]), (2, 1, [1, 2]), (1, 1, [1])])
def test_says_when_it_starts_and_writes(start: int, count: int, expected: list[int], tmp_path: Path) -> None:
    section = ProfileConfig(enabled=True, start_step=start, steps=count)
    assert train(section, tmp_path, steps=6) == expected


def test_the_trace_says_which_steps_it_is_of(tmp_path: Path) -> None:
    train(ProfileConfig(enabled=True, start_step=2, steps=2), tmp_path, steps=4, first_step=101)
    (found,) = read_traces(tmp_path)
    assert [step.number for step in found.steps] == [102, 103]


@pytest.mark.parametrize("start", [1, 2, 3, 9])
@pytest.mark.parametrize("run", [0, 1, 2])
def test_a_run_that_ends_early_writes_what_it_has_and_leaves_no_profiler(start: int, run: int, tmp_path: Path) -> None:
    """Not when it ends in the profiler's warm-up either, where torch 2.11 was seen to crash."""
    train(ProfileConfig(enabled=True, start_step=start, steps=2), tmp_path / "t", steps=run)
    assert (tmp_path / "t").exists() == (run >= start - 1)
    # Whatever was left behind, the next profiler of the process works.
    train(ProfileConfig(enabled=True, start_step=3, steps=2), tmp_path / "next", steps=6)
    assert traced_steps(tmp_path / "next" / "rank-00000.json.gz") == {3, 4}


def test_disabled_does_nothing(tmp_path: Path) -> None:
    train(ProfileConfig(), tmp_path / "t", steps=6)
    assert not (tmp_path / "t").exists()


@pytest.mark.gpu
def test_memory_snapshot(tmp_path: Path) -> None:
    section = ProfileConfig(enabled=True, start_step=2, steps=1, memory=True)
    with StepProfiler(section, trace_dir=tmp_path, rank=0, device_type="cuda") as profiler:
        for _ in range(3):
            torch.ones(4, device="cuda").sum()
            profiler.step()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["memory-00000.pickle", "rank-00000.json.gz"]


@pytest.mark.parametrize(("steps", "told"), [(2, True), (3, False), (0, False), (None, False)])
def test_a_run_too_short_to_be_traced_is_told_so(
    steps: int | None, told: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    section = ProfileConfig(enabled=True, start_step=3)
    StepProfiler(section, trace_dir=tmp_path, rank=0, device_type="cpu", steps=steps)
    assert ("profile.start_step: nothing will be traced" in caplog.text) is told
