"""Every FSDP control together with every other: none changes what one process of plain transformers learns."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fsdp2kit import distributed
from fsdp2kit.config.schema import CompileConfig
from fsdp2kit.parity.engine import Sharded
from fsdp2kit.parity.reference import Curves, errors, plain_loop
from fsdp2kit.parity.variants import STRATEGIES, pairs_of
from tests.parallel.jobs import Case
from tests.reference import beyond, full, make_batches, tiny_model_dir
from tests.workers import WorkerPool

KINDS = ("llama3", "smollm2")
UNITS = {
    "layer": (),
    "size": (("unit", "size"), ("min_params", 2_000)),
    "root": (("unit", "root"),),
    "nested": (("unit_classes", ["LlamaMLP"]), ("class_dtypes", {"LlamaRMSNorm": "float32"})),
}
PREFETCH = ((0, 1), (0, 0), (1, 2), (3, 3))
CHECKPOINTING = (False, "full", "selective")
OPTIONS = (STRATEGIES, tuple(UNITS), PREFETCH, ("auto", False), CHECKPOINTING, (1, 2), (1, 2), (None, True, False))


def _case(row: tuple, kind: str) -> Case:
    strategy, unit, (forward, backward), reduce_every, checkpointing, micro, cp, reshard = row
    fsdp = (
        ("strategy", strategy),
        *UNITS[unit],
        ("forward_prefetch", forward),
        ("backward_prefetch", backward),
        ("reduce_every_micro_batch", reduce_every),
        *([] if reshard is None else [("reshard_after_forward", reshard)]),
    )
    replicate = 2 if strategy.startswith("hybrid") else "auto"
    return Case(kind, 4 // cp, cp, micro, fsdp, dp_replicate=replicate, checkpointing=checkpointing)


ROWS = list(pairs_of(*OPTIONS))
PAIRS = [_case(row, kind) for kind, row in zip(itertools.cycle(KINDS), ROWS, strict=False)]
# Sharded, accumulated and checkpointed; replicated whole; hybrid.
DEFAULT, OTHERS = [PAIRS[1], *PAIRS[3:5]], [PAIRS[0], PAIRS[2], *PAIRS[5:]]
# Compiled, with each way of checkpointing.
COMPILED = [_case(("shard_grad_op", "layer", (0, 0), True, "full", 1, 2, None), "smollm2")]
COMPILED_SLOW = [
    _case(("full_shard", "nested", (0, 1), False, "selective", 1, 1, None), "llama3"),
    _case(("full_shard", "layer", (1, 2), False, "selective", 1, 1, None), "llama3"),
    _case(("hybrid_shard", "root", (0, 1), False, False, 2, 1, None), "llama3"),
]
SLOW = [pytest.param(case, marks=pytest.mark.slow) for case in COMPILED_SLOW]


def run_controls(folder: Path, cases: list[Case], compiled: bool) -> list[tuple[Curves, int]]:
    """Curves of each case, and how many layers were compiled: traced and differentiated, but not lowered."""
    original = torch.nn.Module.compile
    layers: list[str] = []

    def traced(self: torch.nn.Module, **options: object) -> None:
        layers.append(type(self).__name__)
        original(self, backend="aot_eager", **options)

    torch.nn.Module.compile = traced
    try:
        found = []
        for case in cases:
            torch.compiler.reset()
            gc.collect()  # an earlier case's models may not go while Dynamo iterates over FSDP's weak references
            layers.clear()
            batches = make_batches(3)
            config = case.config(folder, steps=len(batches), rows=len(batches[0].input_ids))
            config = config.model_copy(update={"compile": CompileConfig(enabled=compiled)})
            try:
                found.append((Sharded(config, world=distributed.start()).curves(batches), len(layers)))
            except Exception as error:
                raise RuntimeError(f"in case {case}") from error
        return found
    finally:
        torch.nn.Module.compile = original


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for kind in KINDS:
        tiny_model_dir(kind, folder)
    return folder


@pytest.fixture(scope="module")
def outcome(pool: WorkerPool, models: Path) -> Callable[[Case, bool], tuple[Curves, int]]:
    """Curves of a case; the first asked for runs all of its list."""
    known: dict[tuple[str, bool], tuple[Curves, int]] = {}

    def get(case: Case, compiled: bool = False) -> tuple[Curves, int]:
        if (str(case), compiled) not in known:
            cases = next(group for group in (DEFAULT, OTHERS, COMPILED, COMPILED_SLOW) if case in group)
            found = pool.run(4, run_controls, models, cases, compiled, timeout=3600)[0]
            known.update({(str(each), compiled): curves for each, curves in zip(cases, found, strict=True)})
        return known[str(case), compiled]

    return get


@pytest.fixture(scope="module")
def reference(models: Path) -> Callable[[str], tuple[Curves, dict[str, float]]]:
    """The plain loop's curves, and its own spread over micro-batch sizes."""
    known: dict[str, tuple[Curves, dict[str, float]]] = {}

    def get(kind: str) -> tuple[Curves, dict[str, float]]:
        if kind not in known:
            plain, other = (plain_loop(models / kind, make_batches(3), micro_batch_size=n, lr=1e-3) for n in (4, 1))
            known[kind] = plain, errors(other, plain)
        return known[kind]

    return get


def _compare(case: Case, found: Curves, reference: Callable) -> None:
    plain, control = reference(case.kind)
    differences = errors(found, plain)
    print(case, differences, "control", control)
    assert not beyond(differences, control)


def test_every_two_options_meet() -> None:
    for first, second in itertools.combinations(range(len(OPTIONS)), 2):
        met = {(str(row[first]), str(row[second])) for row in ROWS}
        assert len(met) == len(OPTIONS[first]) * len(OPTIONS[second])


@pytest.mark.parametrize("case", [*DEFAULT, *map(full, OTHERS)], ids=str)
def test_controls_equal_the_plain_loop(case: Case, outcome: Callable, reference: Callable) -> None:
    _compare(case, outcome(case)[0], reference)


@pytest.mark.full
@pytest.mark.parametrize("case", [*COMPILED, *SLOW], ids=str)
def test_compiled_layers_equal_the_plain_loop(case: Case, outcome: Callable, reference: Callable) -> None:
    curves, layers = outcome(case, True)
    assert layers == 2
    _compare(case, curves, reference)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_whole_product_equals_the_plain_loop(
    strategy: str, pool: WorkerPool, models: Path, reference: Callable
) -> None:
    """384 combinations of the other options, as the strategy reshards."""
    rows = itertools.product((strategy,), *OPTIONS[1:-1], (None,))
    cases = [_case(row, kind) for kind, row in zip(itertools.cycle(KINDS), rows, strict=False)]
    found = pool.run(4, run_controls, models, cases, False, timeout=3600)[0]
    for case, (curves, _) in zip(cases, found, strict=True):
        _compare(case, curves, reference)
