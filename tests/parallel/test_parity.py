"""The parity gate: on every mesh and with every option, training is that of plain transformers in one process.

One table has the options and their values. Its rows are a covering array: every two values that go together meet in
some row, whatever the options are. The default tests take a few rows in which each value stands once.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fsdp2kit.parity.reference import Curves, Rows, errors, plain_loop
from fsdp2kit.parity.variants import METHODS, STRATEGIES
from fsdp2kit.torch_compat import SHARDS_INTEGERS
from tests.parallel.conftest import ADAPTED
from tests.parallel.helpers.covering import Row, Table, each_value
from tests.support.cases import Case, run_cases
from tests.support.models import (
    ADAPTERS,
    add_adapter,
    assert_as_exact_as_plain_bfloat16,
    beyond,
    full,
    make_batches,
    plain_batches,
)
from tests.support.workers import WorkerPool

WINDOWED = ("mistral", "gemma3", "qwen3_windowed")
FAMILIES = {"mistral": "Mistral", "gemma3": "Gemma3", "qwen3": "Qwen3", "qwen3_windowed": "Qwen3"}
OPTIONS: dict[str, tuple[Any, ...]] = {
    "kind": (*ADAPTED, *WINDOWED),
    "mesh": ((1, 1), (2, 1), (1, 2), (2, 2), (1, 3), (4, 1)),  # dp, cp
    "method": ("auto", *METHODS),
    "strategy": STRATEGIES,
    "unit": ("layer", "size", "root", "nested"),
    "prefetch": ((0, 1), (0, 0), (1, 2), (3, 3)),  # in forward, in backward
    "reduce_every_micro_batch": ("auto", False),
    "reshard_after_forward": (None, True, False),
    "checkpointing": (False, "full", "selective"),
    "micro": (1, 2),
    "pack": (True, False),
    "adapter": (None, *ADAPTERS),
    "quantize": ("none", "nf4") if SHARDS_INTEGERS else ("none",),
}


def fits(row: Row) -> bool:
    """Whether the values of a row go together, as far as it has them."""

    def are(first: str, of_first: Callable[[Any], bool], second: str, of_second: Callable[[Any], bool]) -> bool:
        return first in row and second in row and of_first(row[first]) and of_second(row[second])

    return not (
        are("mesh", lambda mesh: mesh[1] == 1, "method", lambda method: method != "auto")
        or are("mesh", lambda mesh: mesh[1] > 1, "method", lambda method: method == "auto")
        or are("mesh", lambda mesh: mesh[0] % 2 == 1, "strategy", lambda name: name.startswith("hybrid"))
        or are("adapter", bool, "kind", lambda kind: kind not in ADAPTED)
        or are("quantize", lambda name: name == "nf4", "adapter", lambda adapter: adapter is None)
        or are("quantize", lambda name: name == "nf4", "kind", lambda kind: kind not in ADAPTED[:3])
        or are("unit", lambda unit: unit == "nested", "kind", lambda kind: kind == "qwen3_moe")
    )


def _case(row: Row) -> Case:
    family = FAMILIES.get(row["kind"], "Llama")
    units: dict[str, tuple[tuple[str, Any], ...]] = {
        "layer": (),
        "size": (("unit", "size"), ("min_params", 2_000)),
        "root": (("unit", "root"),),
        "nested": (("unit_classes", [f"{family}MLP"]), ("class_dtypes", {f"{family}RMSNorm": "float32"})),
    }
    (dp, cp), (forward, backward) = row["mesh"], row["prefetch"]
    fsdp = (
        ("strategy", row["strategy"]),
        *units[row["unit"]],
        ("forward_prefetch", forward),
        ("backward_prefetch", backward),
        *((key, row[key]) for key in ("reduce_every_micro_batch", "reshard_after_forward") if row[key] is not None),
    )
    same = {key: row[key] for key in ("kind", "method", "checkpointing", "micro", "pack", "adapter", "quantize")}
    replicate = 2 if row["strategy"].startswith("hybrid") else "auto"
    return Case(dp=dp, cp=cp, fsdp=fsdp, dp_replicate=replicate, **same)


TABLE = Table(OPTIONS, fits)
ROWS = TABLE.covering()
BF16 = (("param_dtype", "bfloat16"),)
RING_COMPILED = Case("gemma3", 1, 2, 2, method="ring", checkpointing="full", compiled=True)
NESTED = (("unit_classes", ["LlamaMLP"]), ("class_dtypes", {"LlamaRMSNorm": "float32"}))
ONCE = (("reduce_every_micro_batch", False),)
HYBRID = (("strategy", "hybrid_shard"),)
DEFAULT = [*map(_case, each_value(ROWS, but="kind")), Case("smollm2", 1, 2, 1, BF16)]
FULL = [case for case in map(_case, ROWS) if case not in DEFAULT] + [
    # What a head and its experts do besides; masks that the model makes itself; some ranks of the mesh resharded to.
    Case("mixtral", 2, 2, 2),
    Case("granite", 1, 3, 2),
    Case("cohere", 2, 2, 2),
    Case("gemma3", 1, 3, 1, attention="eager"),
    Case("qwen3", 4, 1, 1, (("reshard_after_forward", 2),)),
    Case("qwen3_moe", 2, 1, 2, (("unit", "root"),), adapter="dora"),
    Case("llama3", 1, 3, 2, BF16),
    RING_COMPILED,
    Case(
        "smollm2",
        2,
        2,
        1,
        (("strategy", "shard_grad_op"), ("backward_prefetch", 0)),
        checkpointing="full",
        compiled=True,
    ),
]


@cache
def slow_cases() -> list[Case]:
    """Rows at random, compiled layers, and more in bfloat16."""
    return [
        *(_case(row) for row in TABLE.sample(400, seed=int(os.environ.get("FSDP2KIT_SEED", "0")))),
        *(Case("gemma3", 1, 2, 2, method=method, compiled=True) for method in ("ulysses", "allgather")),
        Case("llama3", 4, 1, 1, (*NESTED, *ONCE), checkpointing="full", compiled=True),
        Case("llama3", 4, 1, 1, (("forward_prefetch", 1), *ONCE), checkpointing="selective", compiled=True),
        Case("llama3", 2, 2, 1, (*HYBRID, ("unit", "root"), *ONCE), dp_replicate=2, compiled=True),
        *(Case(kind, dp, cp, micro, BF16) for kind, dp, cp, micro in (("smollm2", 1, 3, 2), ("llama3", 2, 2, 1))),
        Case("qwen3", 2, 2, 1, attention="eager"),
        Case("smollm2", 2, 2, 1, BF16),
        *(Case(kind, dp, cp, micro, BF16) for kind, dp, cp, micro in (("smollm2", 1, 1, 2), ("qwen3", 2, 1, 1))),
    ]


def test_every_two_values_meet_that_go_together() -> None:
    met = set().union(*map(TABLE.pairs_in, ROWS))
    for first, second in itertools.combinations(OPTIONS, 2):
        for one, other in itertools.product(OPTIONS[first], OPTIONS[second]):
            pair = (first, one, second, other)
            assert (pair in met) == fits({first: one, second: other}), pair


@pytest.fixture(scope="module")
def outcome(pool: WorkerPool, models: Path) -> Callable[[Case], Curves]:
    """Curves of a case; the first of a tier and a world size runs all that share them."""
    known: dict[str, Curves | AssertionError] = {}

    def run(case: Case) -> None:
        tier = DEFAULT if case in DEFAULT else FULL if case in FULL else slow_cases()
        cases = [other for other in tier if other.world == case.world]
        try:
            results = pool.run(case.world, run_cases, models, cases, timeout=3600)
        except AssertionError as failure:
            known.update({str(other): failure for other in cases})
            return
        for of_other_rank in results[1:]:
            assert [r.loss for r in of_other_rank] == [r.loss for r in results[0]], "ranks log different losses"
        known.update(zip(map(str, cases), results[0], strict=True))

    def get(case: Case) -> Curves:
        if str(case) not in known:
            run(case)
        found = known[str(case)]
        if isinstance(found, AssertionError):
            raise found
        return found

    return get


@pytest.fixture(scope="module")
def reference(models: Path) -> Callable[[Case, torch.dtype], tuple[Curves, dict[str, float]]]:
    """The curves of transformers (and peft) in a plain loop, and their own spread over micro-batch sizes."""
    known: dict[tuple, tuple[Curves, dict[str, float]]] = {}

    def run(case: Case, micro_batch_size: int, dtype: torch.dtype) -> Curves:
        trained: list[str] = []

        def prepare(model: Any) -> None:
            if case.adapter is not None:
                add_adapter(model, models / f"{case.kind}-{case.adapter}", quantize=case.quantize)
            trained.extend(name for name, parameter in model.named_parameters() if parameter.requires_grad)

        batches = make_batches() if case.pack else plain_batches()
        loop = partial(plain_loop, models / case.kind, batches, lr=1e-3, dtype=dtype, prepare=prepare)
        curves = loop(micro_batch_size=micro_batch_size)
        return Curves({name: curves.gradients[name] for name in trained}, curves.loss, curves.grad_norm, curves.lr)

    def get(case: Case, dtype: torch.dtype) -> tuple[Curves, dict[str, float]]:
        key = case.kind, case.pack, case.adapter, case.quantize, dtype
        if key not in known:
            plain = run(case, 4, dtype)
            spread = [errors(run(case, size, dtype), plain) for size in (1, 2)]
            known[key] = plain, {name: max(each[name] for each in spread) for name in spread[0]}
        return known[key]

    return get


@pytest.mark.parametrize("case", [*DEFAULT, *map(full, FULL)], ids=str)
def test_training_equals_the_plain_loop(case: Case, outcome: Callable, reference: Callable) -> None:
    _compare(case, outcome(case), reference)


@pytest.mark.slow
def test_rows_at_random_equal_the_plain_loop(outcome: Callable, reference: Callable) -> None:
    """Others with every ``FSDP2KIT_SEED``."""
    misses = []
    for case in slow_cases():
        try:
            _compare(case, outcome(case), reference)
        except AssertionError as miss:
            misses.append(f"{case}: {miss}")
    assert not misses, "\n".join(misses)


def _compare(case: Case, found: Curves, reference: Callable) -> None:
    exact, control = reference(case, torch.float32)
    assert max(control.values()) < 1e-5, "the reference itself must be sharp"
    assert min(exact.grad_norm) > 0.5, "clipping must take part"
    assert found.lr == pytest.approx(exact.lr, rel=1e-12)
    assert found.gradients.keys() == exact.gradients.keys()
    differences = errors(found, exact)
    if dict(case.fsdp).get("param_dtype") == "bfloat16":
        assert_as_exact_as_plain_bfloat16(differences, errors(reference(case, torch.bfloat16)[0], exact))
        return
    print(case, differences, "control", control)
    assert not beyond(differences, control)
    if case.adapter is not None:
        assert min(np.abs(gradient).max() for gradient in found.gradients.values()) > 0


def _from_environment(name: str) -> Path:
    if name not in os.environ:
        pytest.skip(f"{name} does not name a path (see docs: how to fetch it)")
    return Path(os.environ[name])


@pytest.fixture(scope="module")
def on_chats(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Rows], Curves, dict[str, float]]:
    """A folder with SmolLM2 in it as "real", batches of packed conversations, the plain loop's curves and spread."""
    model, chats = _from_environment("FSDP2KIT_SMOLLM2"), _from_environment("FSDP2KIT_CHAT")
    folder = tmp_path_factory.mktemp("smollm2")
    (folder / "real").symlink_to(model)
    batches = _chat_batches(model, chats)
    plain, other = (plain_loop(model, batches, micro_batch_size=size, lr=2e-5) for size in (4, 1))
    return folder, batches, plain, errors(other, plain)


@pytest.mark.slow
@pytest.mark.parametrize(("dp", "cp"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_smollm2_on_chats_equals_the_plain_loop(dp: int, cp: int, pool: WorkerPool, on_chats: Any) -> None:
    folder, batches, plain, control = on_chats
    case = Case("real", dp, cp, 1, lr=2e-5)
    differences = errors(pool.run(case.world, run_cases, folder, [case], batches)[0][0], plain)
    print(case, differences, "control", control)
    assert not beyond(differences, control)


def _chat_batches(model: Path, chats: Path) -> list[Rows]:
    """Five global batches of packed conversations, by our own loader (whose tests are elsewhere)."""
    from transformers import AutoTokenizer

    from fsdp2kit.config.schema import ChatDataConfig
    from fsdp2kit.data.documents import build_documents
    from fsdp2kit.data.loader import Share, build_loader

    tokenizer = AutoTokenizer.from_pretrained(model)
    section = ChatDataConfig(path=str(chats), seq_len=128)
    documents = build_documents(section, tokenizer=tokenizer)
    loader = build_loader([documents], share=Share(128, 4, 4), pack=True, shuffle=True, seed=0)
    batches = [loader.batch(index)[0] for index in range(5)]
    return [Rows(batch.input_ids, batch.labels, batch.position_ids) for batch in batches]
