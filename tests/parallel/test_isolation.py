"""Packed documents stay apart on every mesh, and an evaluation's loss does not depend on it."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from fsdp2kit.job import distributed
from fsdp2kit.parity.engine import DealtOut, Sharded
from fsdp2kit.parity.reference import Rows
from fsdp2kit.parity.variants import METHODS
from fsdp2kit.train.evaluation import build_evaluation
from tests.parallel.test_segments import positions_of
from tests.support.cases import Case
from tests.support.models import LENGTH, VOCABULARY, full, make_batches
from tests.support.workers import WorkerPool


def _packing(seed: int) -> tuple[Tensor, int]:
    """Positions ``[1, S]`` of a random packing of at least two documents, and one of their numbers."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 9))
    cuts = sorted(rng.choice(np.arange(1, LENGTH), size=count, replace=False).tolist())
    borders = [0, *cuts, LENGTH]
    positions = positions_of([stop - start for start, stop in itertools.pairwise(borders)])[None]
    return positions, int(rng.integers(0, count + 1))


def leaks(folder: Path, case: Case, seeds: list[int]) -> list[int]:
    """Seeds of packings in which changing one document changed another's logits, or not its own."""
    sharded = Sharded(case.config(folder, steps=1, rows=1), world=distributed.start())
    found = []
    for seed in seeds:
        positions, changed = _packing(seed)
        ids = torch.randint(VOCABULARY, (1, LENGTH), generator=torch.Generator().manual_seed(seed))
        document = (positions == 0).cumsum(1) - 1 == changed
        other_ids = torch.where(document, (ids + 1) % VOCABULARY, ids)
        before, after = (
            sharded.forward(Rows(each, each, positions), document=range(LENGTH))[0] for each in (ids, other_ids)
        )
        same = (before == after).all(axis=1)
        if not same[~document[0].numpy()].all() or same[document[0].numpy()].any():
            found.append(seed)
    return found


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
    dealt = DealtOut(batches, case.micro, dp_rank=sharded.mesh.dp_rank, dp_size=sharded.mesh.sizes.dp)
    evaluate = build_evaluation(config.eval, sharded.model, {"": dealt}, plan=sharded.plan, mesh=sharded.mesh)
    assert evaluate is not None
    return evaluate()["eval_loss"], dealt.steps_per_epoch


@pytest.mark.full
def test_the_evaluation_loss_does_not_depend_on_context_parallelism(pool: WorkerPool, models: Path) -> None:
    expected = pool.run(1, evaluation_loss, models, Case("gemma3"))[0]
    for method, (dp, cp) in zip(METHODS, ((1, 2), (1, 4), (2, 2)), strict=True):
        for loss, steps in pool.run(dp * cp, evaluation_loss, models, Case("gemma3", dp, cp, method=method)):
            assert loss == pytest.approx(expected[0], rel=1e-6)
            assert steps == expected[1]
