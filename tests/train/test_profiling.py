"""The profiler: the steps planned or asked for are in the trace, one file a rank."""

from __future__ import annotations

import gzip
import json
import os
import signal
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdp2kit.config.schema import ProfileConfig, RunConfig
from fsdp2kit.job.profile_request import ProfileRequest, noting_sigusr2
from fsdp2kit.overlap.report import build_report
from fsdp2kit.overlap.trace import read_traces
from fsdp2kit.parity.engine import RankBatches
from fsdp2kit.train.profiling import StepProfiler
from tests.support.cases import Case, Recorder, build, run_loop
from tests.support.models import make_batches, tiny_model_dir
from tests.support.workers import WorkerPool


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


# Asked for


def train_asked(
    section: ProfileConfig, trace_dir: Path, *, steps: int, asks: Collection[int], first_step: int = 1
) -> dict[str, set[int]]:
    """The traced steps by folder, where a request comes before each of these steps and waits until it can be met."""
    waits, options = False, {"rank": 0, "device_type": "cpu", "steps": steps, "first_step": first_step}
    with StepProfiler(section, trace_dir=trace_dir, **options) as profiler:
        for step in range(1, steps + 1):
            window = profiler.next_window()
            waits = waits or step in asks
            asked, waits = (window, False) if waits and window else (None, waits)
            with torch.profiler.record_function(f"my step {step}"):
                torch.ones(4).sum()
            profiler.step(asked)
    return {str(file.parent.relative_to(trace_dir)): traced_steps(file) for file in sorted(trace_dir.rglob("*.gz"))}


@pytest.mark.parametrize(
    ("asks", "start", "found"),
    [
        ({2}, None, {"step-000004": {4, 5}}),  # it warms up in step 3
        ({1, 3}, None, {"step-000003": {3, 4}, "step-000007": {7, 8}}),  # the second waits for the first to be over
        ({6}, None, {"step-000008": {8}}),  # the run ends amid it
        ({7}, None, {"step-000008": {8}}),  # no step is left to warm up
        ({8}, None, {}),  # there is no step to come
        ({1}, 6, {".": {6, 7}, "step-000003": {3, 4}}),  # before the planned ones, which it leaves whole
        ({2}, 5, {".": {5, 6}, "step-000008": {8}}),  # it would cut them: it waits
    ],
)
def test_a_window_that_is_asked_for(
    asks: set[int], start: int | None, found: dict[str, set[int]], tmp_path: Path
) -> None:
    section = ProfileConfig(enabled=start is not None, start_step=start or 3, steps=2)
    assert train_asked(section, tmp_path, steps=8, asks=asks) == found


def test_a_window_is_named_by_the_runs_own_step(tmp_path: Path) -> None:
    assert train_asked(ProfileConfig(steps=1), tmp_path, steps=4, asks={1}, first_step=101) == {"step-000103": {3}}
    (found,) = read_traces(tmp_path)  # the newest of the folder
    assert [step.number for step in found.steps] == [103]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir("smollm2", tmp_path_factory.mktemp("models")).parent


def ask_while_training(folder: Path, run_dir: Path) -> list[str]:
    """Train six steps and return what is said. A file asks for a profile after step 1, a signal during it."""
    case = Case("smollm2", 2)
    config = case.config(folder, steps=7, rows=2)
    config = config.model_copy(update={"run": RunConfig(dir=str(run_dir)), "profile": ProfileConfig(steps=1)})
    sharded = build(config)

    def ask(record: dict[str, Any]) -> None:
        if record["step"] == 1 and dist.get_rank() == 0:
            run_dir.mkdir()
            (run_dir / "profile-now").touch()
        if record["step"] == 3 and dist.get_rank() == 1:
            assert not (run_dir / "profile-now").exists(), "it was taken before this step"
            os.kill(os.getpid(), signal.SIGUSR2)

    metrics = Recorder(sharded, on_log=ask)
    run_loop(sharded, RankBatches(make_batches(7, rows=2), 1, sharded.mesh.dp_rank, 2), metrics=metrics)
    assert signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL
    dist.barrier()
    return metrics.messages


@pytest.mark.full
def test_all_ranks_trace_the_same_steps_when_one_is_asked(pool: WorkerPool, models: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    said, _ = pool.run(2, ask_while_training, models, run_dir)
    trace = run_dir / "trace"
    # The file is noticed before step 2, and step 3 warms up. The signal waits for the window to be over.
    assert [line for line in said if "profile" in line] == [
        f"asked for a profile: steps {step} to {step} are traced into {trace / f'step-00000{step}'}" for step in (4, 7)
    ]
    assert sorted(str(file.relative_to(trace)) for file in trace.rglob("*.gz")) == [
        f"step-00000{step}/rank-0000{rank}.json.gz" for step in (4, 7) for rank in (0, 1)
    ]
    for step in (4, 7):
        found = read_traces(trace / f"step-00000{step}")
        assert [(one.rank, [step.number for step in one.steps]) for one in found] == [(0, [step]), (1, [step])]
    report = build_report(run_dir)
    assert ([step.number for step in report.steps], report.missing_ranks) == ([7], [])


def test_a_signal_before_training_waits_for_it(tmp_path: Path) -> None:
    with noting_sigusr2():  # as the command line does
        signal.raise_signal(signal.SIGUSR2)
        with noting_sigusr2() as noted:  # as the training loop does
            request = ProfileRequest(noted, file=None, message=print)
            assert request.is_asked
            request.take()
            assert not request.is_asked
    assert signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL


def test_a_file_that_cannot_be_removed_asks_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    with noting_sigusr2() as noted:
        request = ProfileRequest(noted, file=tmp_path / "profile-now", message=said.append)
        assert not request.is_asked
        (tmp_path / "profile-now").mkdir()  # unlink refuses a directory
        assert request.is_asked
        request.take()
        assert not request.is_asked
    assert [line.partition(" (")[0] for line in said] == [f"{tmp_path / 'profile-now'}: cannot be removed"]


def test_a_trace_that_cannot_be_written_ends_no_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "t").write_text("a file where the folder should be")
    assert train(ProfileConfig(enabled=True, start_step=2, steps=1), tmp_path / "t", steps=4) == [1, 2]
    (line,) = caplog.messages
    assert line.startswith(f"{tmp_path / 't' / 'rank-00000.json.gz'}: cannot be written (")
