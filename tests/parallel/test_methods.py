"""Ulysses, ring and allgather train as one process of plain transformers does, and documents stay apart under each."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from fsdp2kit import distributed
from fsdp2kit.config.schema import CompileConfig
from fsdp2kit.parity.engine import DealtOut, Sharded
from fsdp2kit.parity.reference import Curves, Rows, errors, plain_loop
from fsdp2kit.parity.variants import METHODS, pairs_of
from fsdp2kit.train.evaluation import build_evaluation
from tests.parallel.jobs import Case, by_world_size
from tests.parallel.test_segments import positions_of
from tests.reference import LENGTH, VOCABULARY, beyond, full, make_batches, plain_batches, tiny_model_dir
from tests.workers import WorkerPool

WINDOWED = ("mistral", "gemma3", "qwen3_windowed")
KINDS = ("llama3", "smollm2", "qwen3", "qwen3_moe", *WINDOWED)
OPTIONS = (KINDS, METHODS, (2, 3), (False, True), (False, True))


def _case(row: tuple) -> Case:
    kind, method, cp, pack, checkpointing = row
    return Case(kind, 1, cp, 2, method=method, pack=pack, checkpointing=checkpointing)


ROWS = list(pairs_of(*OPTIONS))
PAIRS = [_case(row) for row in ROWS]
# Every method with every mask on two data-parallel ranks as well, and accumulated, replicated, not resharded.
PAIRS += [
    Case(kind, 2, 2, 1, (("strategy", strategy),), dp_replicate=replicate, method=method)
    for (method, kind), (strategy, replicate) in zip(
        itertools.product(METHODS, ("gemma3", "smollm2")),
        itertools.cycle((("shard_grad_op", "auto"), ("hybrid_shard", 2), ("no_shard", "auto"))),
        strict=False,
    )
]
# Each method once.
DEFAULT = [
    Case("llama3", 1, 2, 2, method="ulysses"),
    Case("qwen3", 1, 2, 2, method="ring", checkpointing=True),
    Case("smollm2", 1, 2, 2, method="allgather", checkpointing=True),
]
OTHERS = [case for case in PAIRS if case not in DEFAULT]
PRODUCT = [
    case for row in itertools.product(KINDS, METHODS, (2, 3, 4), *OPTIONS[3:]) if (case := _case(row)) not in PAIRS
]


def test_every_two_options_meet() -> None:
    for first, second in itertools.combinations(range(len(OPTIONS)), 2):
        met = {(row[first], row[second]) for row in ROWS}
        assert met == set(itertools.product(OPTIONS[first], OPTIONS[second]))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for kind in KINDS:
        tiny_model_dir(kind, folder)
    return folder


@pytest.fixture(scope="module")
def outcome(pool: WorkerPool, models: Path) -> Callable[[Case], Curves]:
    """Curves of a case; the first one of a world size runs all that share it."""
    return by_world_size(pool, models, DEFAULT, OTHERS, PRODUCT, steps=3)


@pytest.fixture(scope="module")
def reference(models: Path) -> Callable[[str, bool], tuple[Curves, dict[str, float]]]:
    """The plain loop's curves, and its own spread over micro-batch sizes."""
    known: dict[tuple[str, bool], tuple[Curves, dict[str, float]]] = {}

    def get(kind: str, pack: bool) -> tuple[Curves, dict[str, float]]:
        if (kind, pack) not in known:
            batches = make_batches(3) if pack else plain_batches(3)
            plain, other = (plain_loop(models / kind, batches, micro_batch_size=n, lr=1e-3) for n in (4, 1))
            known[kind, pack] = plain, errors(other, plain)
        return known[kind, pack]

    return get


def _compare(case: Case, outcome: Callable, reference: Callable) -> None:
    plain, control = reference(case.kind, case.pack)
    differences = errors(outcome(case), plain)
    print(case, differences, "control", control)
    assert not beyond(differences, control)


@pytest.mark.parametrize("case", [*DEFAULT, *map(full, OTHERS)], ids=str)
def test_methods_equal_the_plain_loop(case: Case, outcome: Callable, reference: Callable) -> None:
    _compare(case, outcome, reference)


@pytest.mark.slow
@pytest.mark.parametrize("case", PRODUCT, ids=str)
def test_the_whole_product_equals_the_plain_loop(case: Case, outcome: Callable, reference: Callable) -> None:
    _compare(case, outcome, reference)


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


def compiled(folder: Path, case: Case) -> tuple[Curves, int]:
    """Curves with every layer compiled (traced and differentiated as ever, but not lowered), and how many were."""
    compiled_layers: list[str] = []
    original = torch.nn.Module.compile

    def traced(self: torch.nn.Module, **options: object) -> None:
        compiled_layers.append(type(self).__name__)
        original(self, backend="aot_eager", fullgraph=True, **options)

    torch.nn.Module.compile = traced
    torch.compiler.reset()
    try:
        values = case.config(folder, steps=3, rows=4).model_copy(update={"compile": CompileConfig(enabled=True)})
        return Sharded(values, world=distributed.start()).curves(make_batches(3)), len(compiled_layers)
    finally:
        torch.nn.Module.compile = original


@pytest.mark.full
@pytest.mark.parametrize("method", ["ring", *(pytest.param(each, marks=pytest.mark.slow) for each in METHODS[::2])])
def test_compiled_layers_are_one_graph_and_equal_the_plain_loop(method: str, pool: WorkerPool, models: Path) -> None:
    plain = plain_loop(models / "gemma3", make_batches(3), micro_batch_size=4, lr=1e-3)
    case = Case("gemma3", 1, 2, 2, method=method, checkpointing=method == "ring")
    found, layers = pool.run(2, compiled, models, case)[0]
    assert layers == 2
    assert not beyond(errors(found, plain), errors(plain, plain))
