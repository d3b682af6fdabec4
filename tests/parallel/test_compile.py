"""Every layer class is compiled once for training, whatever documents its rows hold."""

from __future__ import annotations

import itertools
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path

import pytest
import torch

from fsdp2kit.job import distributed
from fsdp2kit.parity.engine import RankBatches, Sharded
from fsdp2kit.parity.reference import Rows
from fsdp2kit.parity.variants import METHODS
from fsdp2kit.train.evaluation import Evaluation, generate
from tests.support.cases import Case, counted_compilations
from tests.support.models import LENGTH, VOCABULARY
from tests.support.workers import WorkerPool

PACKS = [(1, 2), (LENGTH,), (2, *[1] * LENGTH), (7, 13), (2,), (LENGTH - 1, 1), (1, LENGTH - 1), (3,), (5, 1, 1)]
"""Lengths of a row's documents, repeated to its end."""


def packed_row(lengths: tuple[int, ...]) -> Rows:
    """One row of `LENGTH` random tokens, all supervised but each document's last."""
    documents = [torch.arange(length) for length in islice(cycle(lengths), LENGTH)]
    positions = torch.cat(documents)[:LENGTH]
    ids = torch.randint(0, VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(sum(lengths)))
    ends = torch.cat([positions[1:] == 0, torch.tensor([True])])
    return Rows(*(each[None] for each in (ids, ids.roll(-1).masked_fill(ends, -100), positions)))


def phases(folder: Path, case: Case) -> list[int]:
    """Compilations so far after training, evaluation, answers of growing length, and training again."""
    config = replace(case, compiled=True).config(folder, steps=len(PACKS), rows=1)
    rows, found = [packed_row(lengths) for lengths in PACKS], []
    with counted_compilations() as compilations:
        sharded = Sharded(config, world=distributed.start())
        sharded.curves(rows)
        found.append(len(compilations))
        held_out = {"": RankBatches(rows, 1)}
        Evaluation(config.eval, sharded.model, held_out, [], plan=sharded.plan, mesh=sharded.mesh, tokenizer=None)()
        found.append(len(compilations))
        prompt = list(range(63))
        for length in (63, 127, 190, 255):
            generate(
                sharded.model,
                (prompt * 5)[:length],
                max_new_tokens=2,
                stops=(),
                plan=sharded.plan,
                mesh=sharded.mesh,
            )
        found.append(len(compilations))
        sharded.curves(rows)
        found.append(len(compilations))
    return found


CASES = [Case("llama3", attention="varlen", checkpointing="full")]
THOROUGH = [
    *(
        Case("llama3", attention=attention, checkpointing=mode)
        for attention, mode in itertools.product(("sdpa", "varlen"), (False, "full", "selective"))
    ),
    *(Case("smollm2", cp=2, method=method) for method in METHODS),
]
THOROUGH = [pytest.param(case, marks=pytest.mark.slow) for case in THOROUGH if case not in CASES]


@pytest.mark.full
@pytest.mark.parametrize("case", [*CASES, *THOROUGH], ids=str)
def test_a_layer_class_is_compiled_once_for_training(case: Case, pool: WorkerPool, models: Path) -> None:
    first = 2 if torch.__version__.startswith("2.11.") and case.checkpointing else 1  # 2.11 compiles it once more
    for found in pool.run(case.world, phases, models, case):
        # and once for evaluation, which keeps nothing for backward, and once for rows of any other length
        assert found == [first, first + 1, first + 2, first + 2]


@pytest.mark.slow
def test_windowed_layers_are_another_class(pool: WorkerPool, models: Path) -> None:
    assert pool.run(1, phases, models, Case("gemma3", attention="varlen")) == [[2, 4, 6, 6]]
