"""Attention sinks (gpt-oss) and chunked attention (Llama 4): training is that of plain transformers, document by
document, and packed documents do not see each other.

One table has the options and their values; a covering array of it has every two values that go together.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fsdp2kit.parity.reference import Curves, errors, plain_loop
from fsdp2kit.parity.variants import METHODS
from tests.parallel.helpers.covering import Row, Table
from tests.parallel.helpers.isolation import leaks
from tests.support.cases import Case, run_cases
from tests.support.models import beyond, full, make_batches, plain_batches, tiny_model_dir
from tests.support.workers import WorkerPool

KINDS = ("gpt_oss", "llama4", "granite_swa")
OPTIONS: dict[str, tuple[Any, ...]] = {
    "kind": KINDS,
    "mesh": ((1, 1), (2, 1), (1, 2), (2, 2), (1, 4)),  # dp, cp
    "method": ("auto", *METHODS),
    "attention": ("auto", "eager"),
    "checkpointing": (False, "full", "selective"),
    "micro": (1, 2),
    "pack": (True, False),
}


def fits(row: Row) -> bool:
    """Whether the values of a row go together, as far as it has them."""
    cp = row.get("mesh", (1, None))[1]
    return not (
        (cp == 1 and row.get("method", "auto") != "auto")
        or (cp not in (1, None) and row.get("method") == "auto")
        or (row.get("attention") == "eager" and row.get("method") in ("ring", "allgather"))
        # refused: its experts add their biases in place to products that would be kept
        or (row.get("kind") == "gpt_oss" and row.get("checkpointing") == "selective")
    )


def _case(row: Row) -> Case:
    (dp, cp), names = row["mesh"], ("kind", "method", "attention", "checkpointing", "micro", "pack")
    return Case(dp=dp, cp=cp, **{name: row[name] for name in names})


ROWS = Table(OPTIONS, fits).covering()
DEFAULT = [Case("gpt_oss", 1, 2, 2, attention="auto"), Case("llama4", 1, 2, 2, attention="auto", method="ring")]
OTHERS = [case for case in map(_case, ROWS) if case not in DEFAULT]
FULL = [next(case for case in OTHERS if case.kind == kind and case.cp == 4) for kind in KINDS]
SLOW = [case for case in OTHERS if case not in FULL]


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model of each kind."""
    folder = tmp_path_factory.mktemp("families")
    for kind in (*KINDS, "gpt_oss_whole"):
        tiny_model_dir(kind, folder)
    return folder


@pytest.fixture(scope="module")
def reference(families: Path) -> Callable[[Case], Curves]:
    """The curves of transformers in a plain loop over single documents."""
    known: dict[tuple[str, bool], Curves] = {}

    def get(case: Case) -> Curves:
        key = case.kind, case.pack
        if key not in known:
            batches = make_batches() if case.pack else plain_batches()
            known[key] = plain_loop(families / case.kind, batches, micro_batch_size=4, lr=1e-3, alone=True)
        return known[key]

    return get


def _compare(cases: list[Case], pool: WorkerPool, families: Path, reference: Callable[[Case], Curves]) -> None:
    misses = []
    for world in sorted({case.world for case in cases}):
        mine = [case for case in cases if case.world == world]
        for case, found in zip(mine, pool.run(world, run_cases, families, mine, timeout=3600)[0], strict=True):
            exact = reference(case)
            sinks = [name for name in exact.gradients if name.endswith("sinks")]
            assert bool(sinks) == (case.kind != "llama4")
            assert all(abs(exact.gradients[name]).min() > 0 for name in sinks)
            differences = errors(found, exact)
            print(case, differences)
            if beyond(differences, dict.fromkeys(differences, 0.0)):
                misses.append(f"{case}: {differences}")
    assert not misses, "\n".join(misses)


@pytest.mark.full
def test_training_equals_the_plain_loop(pool: WorkerPool, families: Path, reference: Any) -> None:
    _compare(DEFAULT, pool, families, reference)


@pytest.mark.full
def test_each_family_equals_the_plain_loop(pool: WorkerPool, families: Path, reference: Any) -> None:
    _compare(FULL, pool, families, reference)


@pytest.mark.slow
def test_every_two_options_equal_the_plain_loop(pool: WorkerPool, families: Path, reference: Any) -> None:
    _compare(SLOW, pool, families, reference)


@pytest.mark.parametrize("kind", [full("gpt_oss_whole"), full("llama4")])
@pytest.mark.parametrize("method", METHODS)
def test_no_document_sees_another(kind: str, method: str, pool: WorkerPool, families: Path) -> None:
    """Bit for bit, over random packings."""
    case = Case(kind, 1, 2, attention="auto", method=method)
    assert pool.run(2, leaks, families, case, list(range(12))) == [[]] * 2
