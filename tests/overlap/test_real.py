"""A real trace of the real loop on gloo: FSDP2's own rules say what is in it, the metrics how long it took."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from fsdp2kit.config.schema import ProfileConfig
from fsdp2kit.overlap.report import build_report
from fsdp2kit.overlap.trace import read_traces
from fsdp2kit.parity.engine import RankBatches
from fsdp2kit.train import profiling
from tests.support.cases import Case, Recorder, build, run_loop
from tests.support.models import make_batches, tiny_model_dir
from tests.support.workers import WorkerPool

RANKS, ROWS, STEPS, LENGTH = 2, 8, 5, 256
MICRO_BATCHES = ROWS // RANKS
SLOW = 3.0
UNITS = {"(root)", "lm_head", "model.embed_tokens", "model.layers.0", "model.layers.1"}

pytestmark = pytest.mark.full


def run(models: Path, case: Case, trace_dir: Path | None) -> list[dict[str, Any]]:
    """Train five steps through the real loop and trace two, if at all; every rank returns the metrics records."""
    config = case.config(models, steps=STEPS, rows=ROWS)
    if trace_dir is not None:
        profile = ProfileConfig(enabled=True, start_step=3, steps=2)
        place = config.run.model_copy(update={"dir": str(trace_dir.parent)})
        config = config.model_copy(update={"profile": profile, "run": place})
    sharded = build(config)
    metrics = Recorder(sharded)
    loader = RankBatches(make_batches(STEPS, rows=ROWS, length=LENGTH), 1, dp_rank=sharded.mesh.dp_rank, dp_size=RANKS)
    run_loop(sharded, loader, metrics=metrics)
    dist.barrier()
    return metrics.records


class SlowProfiler:
    """Takes three seconds of its own after the second step."""

    def __init__(self, *, tells: bool) -> None:
        self._calls, self._tells = itertools.count(1), tells

    def __enter__(self) -> SlowProfiler:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def next_window(self) -> None:
        return None

    def step(self, asked: None) -> bool:
        if next(self._calls) != 2:
            return False
        time.sleep(SLOW)
        return self._tells


def run_beside_a_slow_profiler(models: Path, case: Case, *, tells: bool) -> list[float]:
    """Seconds of each step, where the profiler takes three of its own after the second."""
    original = profiling.StepProfiler
    profiling.StepProfiler = lambda *_, **__: SlowProfiler(tells=tells)
    try:
        return [record["step_seconds"] for record in run(models, case, None)]
    finally:
        profiling.StepProfiler = original


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    tiny_model_dir("llama3", folder)
    return folder


@pytest.fixture(scope="module")
def run_dir(
    pool: WorkerPool, models: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[dict[str, Any]]]:
    """A traced run, and its records."""
    trace_dir = tmp_path_factory.mktemp("run") / "trace"
    records = pool.run(RANKS, run, models, Case("llama3", RANKS, seq_len=LENGTH), trace_dir)
    return trace_dir, records[0]


def test_the_steps_are_those_asked_for_and_add_up_to_what_was_measured(
    run_dir: tuple[Path, list[dict[str, Any]]],
) -> None:
    trace_dir, records = run_dir
    report = build_report(trace_dir)
    assert [step.number for step in report.steps] == [3, 4]
    assert all(step.is_complete for step in report.steps)
    assert (report.device, report.world_size, report.missing_ranks) == ("cpu", RANKS, [])
    for split in (split for step in report.steps for split in step.ranks.values()):
        assert split.compute_only + split.overlapped + split.exposed + split.idle == split.duration
        assert split.compute_only
        for rows in (split.collectives, split.units):
            assert sum(rows.values()) == pytest.approx(split.exposed, rel=1e-9)
        # gloo is waited for where it is called: what overlaps is a trifle.
        assert split.overlapped < 0.1 * split.communication
        assert split.waiting is not None
        assert 0 <= split.waiting <= split.exposed
    measured = sum(record["step_seconds"] for record in records if record["step"] in (3, 4))
    # Writing the trace and starting the profiler is in no step's time. 5 % as the report promises, and a busy machine.
    assert sum(step.ranks[0].duration for step in report.steps) / 1e9 == pytest.approx(measured, rel=0.05, abs=0.01)


def test_every_collective_is_found_with_its_unit(run_dir: tuple[Path, list[dict[str, Any]]]) -> None:
    for trace in read_traces(run_dir[0]):
        assert {phase for _, (phase, _) in trace.turns} == {"forward", "backward", "optimizer", "other"}
        for step in trace.steps:
            issued = [one for one in trace.collectives if step.start <= one.issued < step.end]
            inside = [one for one in issued if one.scope.phase != "other"]
            assert {one.scope.unit for one in inside} == UNITS
            assert Counter((one.kind, one.scope.phase) for one in inside) == {
                ("all_gather", "forward"): len(UNITS) * MICRO_BATCHES,
                # What forward has freed and backward reads: not the root, nor the head, whose backward comes at once,
                # nor the embedding, whose backward does without.
                ("all_gather", "backward"): (len(UNITS) - 3) * MICRO_BATCHES,
                ("reduce_scatter", "backward"): len(UNITS) * MICRO_BATCHES,
            }


@pytest.mark.parametrize("tells", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_writing_a_trace_is_in_no_steps_time(tells: bool, pool: WorkerPool, models: Path) -> None:
    case = Case("llama3", RANKS, seq_len=LENGTH)
    for seconds in pool.run(RANKS, run_beside_a_slow_profiler, models, case, tells=tells):
        assert (seconds[2] < SLOW) is tells  # told of it, the loop's clock starts anew
