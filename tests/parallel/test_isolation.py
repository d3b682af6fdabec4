"""Packed documents stay apart on every mesh, and an evaluation's loss does not depend on it."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdp2kit.job import distributed
from fsdp2kit.parity.engine import RankBatches, Sharded
from fsdp2kit.parity.variants import METHODS
from fsdp2kit.train.evaluation import build_evaluation
from tests.parallel.helpers.isolation import leaks
from tests.support.cases import Case
from tests.support.models import full, make_batches
from tests.support.workers import WorkerPool


@pytest.mark.parametrize("cp", [3, *(pytest.param(each, marks=pytest.mark.slow) for each in (2, 4))])
@pytest.mark.parametrize("method", ["ring", *map(full, METHODS[::2])])
def test_no_document_sees_another(method: str, cp: int, pool: WorkerPool, models: Path) -> None:
    """23 random packings for each of nine ways to cut them: bit for bit."""
    kinds = ("smollm2", "gemma3")
    first = 100 * METHODS.index(method) + 23 * cp
    for kind, seeds in zip(kinds, (range(first, first + 12), range(first + 12, first + 23)), strict=True):
        assert pool.run(cp, leaks, models, Case(kind, 1, cp, method=method), list(seeds)) == [[]] * cp


def evaluation_loss(folder: Path, case: Case) -> tuple[float, int]:
    """Mean loss over the batches, and steps per epoch."""
    batches = make_batches()
    config = case.config(folder, steps=1, rows=4)
    sharded = Sharded(config, world=distributed.start())
    loader = RankBatches(batches, case.micro, dp_rank=sharded.mesh.dp_rank, dp_size=sharded.mesh.sizes.dp)
    evaluate = build_evaluation(config.eval, sharded.model, {"": loader}, plan=sharded.plan, mesh=sharded.mesh)
    assert evaluate is not None
    return evaluate()["eval_loss"], loader.steps_per_epoch


@pytest.mark.full
def test_the_evaluation_loss_does_not_depend_on_context_parallelism(pool: WorkerPool, models: Path) -> None:
    expected = pool.run(1, evaluation_loss, models, Case("gemma3"))[0]
    for method, (dp, cp) in zip(METHODS, ((1, 2), (1, 4), (2, 2)), strict=True):
        for loss, steps in pool.run(dp * cp, evaluation_loss, models, Case("gemma3", dp, cp, method=method)):
            assert loss == pytest.approx(expected[0], rel=1e-6)
            assert steps == expected[1]
