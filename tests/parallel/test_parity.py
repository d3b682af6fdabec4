"""The parity gate: every mesh and option trains as a plain single-process transformers + AdamW loop does."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp2kit.parity.reference import Curves, Rows, errors, plain_loop, worst_relative
from fsdp2kit.parity.variants import pairs_of
from tests.parallel.jobs import Case, losses_by_document, run_case, run_cases
from tests.reference import LENGTH, TINY, VOCABULARY, beyond, full, make_batches, tiny_model_dir
from tests.workers import WorkerPool

MAIN = ("smollm2", "qwen3", "llama3")
OTHERS = tuple(kind for kind in TINY if kind not in MAIN)
MESHES = ((1, 1), (2, 1), (1, 2), (2, 2), (1, 3))
BF16 = (("param_dtype", "bfloat16"),)


def _cases() -> Iterator[Case]:
    for kind, (dp, cp), micro in pairs_of(MAIN, MESHES, (1, 2)):
        yield Case(kind, dp, cp, micro)
    for kind, (dp, cp) in zip(OTHERS, itertools.cycle(((2, 2), (1, 3))), strict=False):
        yield Case(kind, dp, cp, 2)
    yield Case("qwen3", 2, 2, 1, attention="eager")
    yield Case("gemma3", 1, 3, 1, attention="eager")
    yield Case("qwen3", 4, 1, 1, (("reshard_after_forward", 2),))


EXACT = list(_cases())
THOROUGH = [
    case
    for kind, (dp, cp), micro in [
        *itertools.product(MAIN, MESHES, (1, 2)),
        *itertools.product(OTHERS, ((2, 2), (1, 3)), (1,)),
    ]
    if (case := Case(kind, dp, cp, micro)) not in EXACT
]
# Each mesh and main model once.
DEFAULT = [
    case
    for case in EXACT
    if str(case)
    in ("smollm2-dp1-cp1-micro1", "qwen3-dp2-cp1-micro1", "llama3-dp1-cp2-micro1", "smollm2-dp2-cp2-micro1")
]
OTHERS = [case for case in EXACT if case not in DEFAULT]
HALF = [Case("smollm2", 2, 2, 1, BF16), Case("llama3", 1, 3, 2, BF16)]
THOROUGH_HALF = [Case("smollm2", 1, 3, 2, BF16), Case("llama3", 2, 2, 1, BF16)]
THOROUGH_HALF += [Case("smollm2", 1, 1, 2, BF16), Case("qwen3", 2, 1, 1, BF16)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with every tiny model."""
    folder = tmp_path_factory.mktemp("models")
    for kind in TINY:
        tiny_model_dir(kind, folder)
    return folder


@pytest.fixture(scope="module")
def outcome(pool: WorkerPool, models: Path) -> Callable[[Case], Curves]:
    """Curves of a case; the first one of a world size runs all that share it."""
    known: dict[Case, Curves] = {}

    def get(case: Case) -> Curves:
        if case not in known:
            group = next(
                group for group in ([*DEFAULT, HALF[0]], [*OTHERS, HALF[1]], THOROUGH, THOROUGH_HALF) if case in group
            )
            cases = [other for other in group if other.world == case.world]
            results = pool.run(case.world, run_cases, models, cases)
            for of_other_rank in results[1:]:
                assert [r.loss for r in of_other_rank] == [r.loss for r in results[0]], "ranks log different losses"
            known.update(zip(cases, results[0], strict=True))
        return known[case]

    return get


@pytest.fixture(scope="module")
def reference(models: Path) -> Callable[[str, torch.dtype], tuple[Curves, dict[str, float]]]:
    """The plain loop's curves for a kind and dtype, and its own spread over micro-batch sizes."""
    known: dict[tuple[str, torch.dtype], tuple[Curves, dict[str, float]]] = {}

    def get(kind: str, dtype: torch.dtype) -> tuple[Curves, dict[str, float]]:
        if (kind, dtype) not in known:
            plain, one, two = (
                plain_loop(models / kind, make_batches(), micro_batch_size=size, lr=1e-3, dtype=dtype)
                for size in (4, 1, 2)
            )
            spread = [errors(other, plain) for other in (one, two)]
            known[kind, dtype] = plain, {name: max(each[name] for each in spread) for name in spread[0]}
        return known[kind, dtype]

    return get


@pytest.mark.parametrize(
    "case",
    [*DEFAULT, *map(full, OTHERS), *(pytest.param(case, marks=pytest.mark.slow) for case in THOROUGH)],
    ids=str,
)
def test_float32_equals_the_plain_loop(case: Case, outcome: Callable, reference: Callable) -> None:
    plain, control = reference(case.kind, torch.float32)
    assert max(control.values()) < 1e-5, "the reference itself must be sharp"
    assert min(plain.grad_norm) > 0.5, "clipping must take part"
    found = outcome(case)
    assert found.lr == pytest.approx(plain.lr, rel=1e-12)
    differences = errors(found, plain)
    print(case, differences, "control", control)
    assert not beyond(differences, control)


@pytest.mark.parametrize(
    "case", [HALF[0], full(HALF[1]), *(pytest.param(case, marks=pytest.mark.slow) for case in THOROUGH_HALF)], ids=str
)
def test_bfloat16_is_as_exact_as_the_plain_loop_in_bfloat16(
    case: Case, outcome: Callable, reference: Callable
) -> None:
    """Two roundings of the same numbers are as far from each other as each is from the truth, which is known here.

    The plain loop with another micro-batch size rounds most things alike, which makes that spread too strict a
    control: our head adds gradients up in float32, for one, and is no less exact for it.
    """
    exact, _ = reference(case.kind, torch.float32)
    plain, control = reference(case.kind, torch.bfloat16)
    found, expected = errors(outcome(case), exact), errors(plain, exact)
    print(case, "to float32", found, "plain", expected, "to plain", errors(outcome(case), plain), "control", control)
    assert found["gradients"] > 1e-3, "the computation was not in bfloat16 at all"
    assert found["gradients"] < 1.5 * expected["gradients"]
    assert not beyond(found, expected)


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


@pytest.mark.gpu
@pytest.mark.parametrize("kind", MAIN)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_gpu_equals_the_plain_loop_on_it(kind: str, dtype: str, models: Path) -> None:
    from fsdp2kit import distributed

    compute = getattr(torch, dtype)
    plain, one, two = (
        plain_loop(models / kind, make_batches(), micro_batch_size=size, lr=1e-3, dtype=compute, device="cuda")
        for size in (4, 1, 2)
    )
    spread = [errors(other, plain) for other in (one, two)]
    control = {name: max(each[name] for each in spread) for name in spread[0]}
    try:
        found = run_case(models, Case(kind, 1, 1, 2, (("param_dtype", dtype),)), make_batches())
    finally:
        distributed.stop()
    assert not beyond(errors(found, plain), control)
