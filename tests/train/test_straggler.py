"""The slowest rank of a record, with ranks that are slow in known ways."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdp2kit.model.flops import ModelFlops
from fsdp2kit.parity.engine import RankBatches
from fsdp2kit.train.step import cross_entropy
from fsdp2kit.train.throughput import Throughput, find_straggler
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


@pytest.fixture
def throughput(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Throughput]:
    """Counts on the first of two ranks. A second passes whenever it looks at its clock; the other rank works more."""
    seconds = itertools.count()

    def gather(mine: list[float]) -> list[list[float]]:
        assert len(mine) == 9
        return [mine, [2 * mine[0], mine[1] + 1.5, *mine[2:-1], 0.0]]

    monkeypatch.setattr("fsdp2kit.train.throughput.time", SimpleNamespace(perf_counter=lambda: float(next(seconds))))
    monkeypatch.setattr("fsdp2kit.train.throughput.gather_numbers", gather)
    monkeypatch.setattr("fsdp2kit.train.throughput.status", SimpleNamespace(take_looks=lambda: (50, 25)))
    return partial(Throughput, ModelFlops(3, 2), device=torch.device("cpu"), world_size=2)


def test_the_slowest_rank_is_named_once_there_are_enough_looks(throughput: Callable[..., Throughput]) -> None:
    counts, found = throughput(), []
    for _ in range(4):
        counts.add(10, 5, 7, 0.5)
        found.append(counts.record())
    assert ["slowest_rank" in record for record in found] == [False, True, False, True]
    assert (found[1]["slowest_rank"], found[1]["straggler_ratio"]) == (1, 2.0)
    assert found[1] == found[3] | {"memory_gib": found[1]["memory_gib"]}


def test_a_record_is_of_the_steps_since_the_last_and_the_first_tells_of_the_start(
    throughput: Callable[..., Throughput],
) -> None:
    counts = throughput(start=3)
    counts.add(1000, 1000, 1000, 9.0)
    counts.restart()  # as after an evaluation
    for tokens in (10, 30):
        counts.add(tokens, tokens // 2, 7, 0.5)
    counts.first_step()
    first = counts.record()
    assert (first["tokens_per_second"], first["supervised_tokens_per_second"]) == (40.0, 20.0)
    assert (first["step_seconds"], first["data_seconds"]) == (0.5, 1.25)
    assert first["tflops_per_device"] * 1e12 == pytest.approx((6 * 3 * 40 + 3 * 2 * 14 / 2) / 2)
    assert (first["start"], first["seconds_to_first_step"] > 0) == (3, True)
    counts.add(10, 5, 7, 0.5)
    second = counts.record()
    assert second["tokens_per_second"] == 10.0
    assert not {"start", "seconds_to_first_step"} & second.keys()
