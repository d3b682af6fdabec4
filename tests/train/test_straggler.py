"""The slowest rank of a record, with ranks that are slow in known ways."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from fsdp2kit.parity.engine import RankBatches
from fsdp2kit.train.step import cross_entropy
from fsdp2kit.train.throughput import find_straggler
from tests.support.cases import Case, Recorder, build, run_loop
from tests.support.models import make_batches, tiny_model_dir
from tests.support.workers import WorkerPool
from tests.train.helpers import config_of

SLOW, SLEEP, STEPS = 1, 0.6, 4


def _sleep() -> None:
    if dist.get_rank() == SLOW:
        time.sleep(SLEEP)


def _burn() -> None:
    end = time.perf_counter() + SLEEP
    while dist.get_rank() == SLOW and time.perf_counter() < end:
        sum(range(1000))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    tiny_model_dir("llama3", folder)
    return folder


class Slow(RankBatches):
    """Batches that one rank reads slowly."""

    def batch(self, index: int) -> Any:
        _sleep()
        return super().batch(index)


def slow_run(folder: Path, where: str) -> dict[str, Any]:
    """The record of a run in which rank 1 is slow there."""
    config = config_of(folder, Case("llama3", 2, 1), steps=STEPS, rows=2, train={"log_every": STEPS})
    sharded = build(config)
    metrics = Recorder(sharded)
    batches = (Slow if where == "data" else RankBatches)(make_batches(STEPS, rows=2), 1, sharded.mesh.dp_rank, 2)

    def objective(model: Any, inputs: dict[str, Any]) -> Any:
        {"forward": _sleep, "burning": _burn, "data": lambda: None}[where]()
        return cross_entropy(model, inputs)

    run_loop(sharded, batches, metrics=metrics, objective=objective)
    return metrics.records[-1]


@pytest.mark.full
@pytest.mark.parametrize(("where", "share"), [("forward", "compute"), ("data", "data"), ("burning", "compute")])
def test_the_slowest_rank_is_named_with_what_it_does(pool: WorkerPool, models: Path, where: str, share: str) -> None:
    first, second = pool.run(2, slow_run, models, where)
    assert first["slowest_rank"] == second["slowest_rank"] == SLOW
    assert first["straggler_ratio"] > 1.5
    shares = {name: first[f"slowest_rank/{name}"] for name in ("data", "compute", "waiting")}
    assert sum(shares.values()) == pytest.approx(1)
    assert max(shares, key=shares.__getitem__) == share
    slept = SLEEP * STEPS / (first["step_seconds"] * STEPS)
    assert shares[share] > 0.8 * slept


def test_the_ratio_is_to_the_median_of_the_others() -> None:
    ranks = [(10.0, 1.0, 100, 50), (10.0, 6.0, 100, 10), (10.0, 1.0, 100, 80), (10.0, 1.0, 100, 70)]
    assert find_straggler(ranks) == pytest.approx(
        {
            "slowest_rank": 1,
            "straggler_ratio": 9 / 3,
            "slowest_rank/data": 0.6,
            "slowest_rank/compute": 0.3,
            "slowest_rank/waiting": 0.1,
        }
    )
    assert find_straggler(ranks[:1]) == find_straggler([*ranks, (10.0, 1.0, 79, 0)]) == {}
