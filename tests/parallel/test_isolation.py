"""Packed documents stay apart on every mesh, and an evaluation's loss does not depend on it."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from fsdp2kit import distributed
from fsdp2kit.parity.engine import DealtOut, Sharded
from fsdp2kit.parity.reference import Rows, worst_relative
from fsdp2kit.parity.variants import METHODS
from fsdp2kit.train.evaluation import build_evaluation
from tests.parallel.jobs import Case, losses_by_document
from tests.parallel.test_segments import positions_of
from tests.reference import LENGTH, VOCABULARY, full, make_batches, tiny_model_dir
from tests.workers import WorkerPool


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for kind in ("smollm2", "mistral", "gemma3"):
        tiny_model_dir(kind, folder)
    return folder


def _documents(*lengths: int, seed: int = 0, length: int = LENGTH) -> Rows:
    """One row of fully supervised documents and padding; document k's tokens depend on k and ``seed`` alone."""
    ids, positions = torch.zeros(1, length, dtype=torch.int64), torch.zeros(1, length, dtype=torch.int64)
    labels, start = torch.full((1, length), -100), 0
    for number, size in enumerate(lengths):
        tokens = torch.randint(VOCABULARY, (size,), generator=torch.Generator().manual_seed(100 * seed + number))
        ids[0, start : start + size] = tokens
        labels[0, start : start + size - 1] = tokens[1:]
        positions[0, start : start + size] = torch.arange(size)
        start += size
    positions[0, start:] = torch.arange(length - start)
    return Rows(ids, labels, positions)


@pytest.mark.parametrize("kind", ["smollm2", full("mistral"), full("gemma3")])
def test_packed_documents_do_not_see_each_other(kind: str, pool: WorkerPool, models: Path) -> None:
    sizes = (5, 22, 9, 7)  # the second crosses the border of cp = 2 at 24, and is longer than the window
    pack = _documents(*sizes)
    starts = [sum(sizes[:k]) for k in range(len(sizes))]
    alone = []
    for start, size in zip(starts, sizes, strict=True):
        one = _documents(size)
        one.input_ids[0, :size] = pack.input_ids[0, start : start + size]
        one.labels[0, : size - 1] = pack.input_ids[0, start + 1 : start + size]
        alone.append(one)
    perturbed = Rows(pack.input_ids.clone(), pack.labels, pack.position_ids)
    perturbed.input_ids[0, starts[1] : starts[2]] = (pack.input_ids[0, starts[1] : starts[2]] + 1) % VOCABULARY
    for cp in (1, 2):
        losses = pool.run(cp, losses_by_document, models, Case(kind, 1, cp), [pack, perturbed, *alone])[0]
        packed, changed, by_itself = losses[0], losses[1], [each[0] for each in losses[2:]]
        assert worst_relative(packed[: len(sizes)], by_itself) < 1e-6
        assert [packed[k] == changed[k] for k in range(len(sizes))] == [True, False, True, True]


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
