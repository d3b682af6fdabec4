"""Families of today, with every value of every option beside every other: a gate that takes minutes a family.

Other tests here hold the pairs of these values, and run in every build.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from fsdp2kit.parity.reference import errors
from fsdp2kit.parity.variants import METHODS
from fsdp2kit.weights.experts import expert_count
from tests.parallel.helpers.alone import documents_alone
from tests.parallel.helpers.isolation import leaks
from tests.support.cases import Case, run_cases
from tests.support.models import PACKED_RECURRENT, beyond, tiny_config, tiny_model_dir
from tests.support.workers import WorkerPool

KINDS = (*PACKED_RECURRENT, "gpt_oss", "llama4", "deepseek_v3", "glm4", "gemma3n")


def cases(kind: str) -> list[Case]:
    """All combinations of method and cp, recomputation, micro-batch and packing that are not refused."""
    cut = [("auto", 1), *itertools.product(METHODS, (2, 4))]
    # gpt-oss's experts add their biases in place to products that selective recomputation would keep: refused.
    modes = [False, "full", *(["selective"] if kind != "gpt_oss" else [])]
    return [
        Case(kind, 1, cp, micro, method=method, checkpointing=mode, pack=pack, attention="auto", lr=3e-4)
        for (method, cp), mode, micro, pack in itertools.product(cut, modes, (1, 2), (True, False))
    ]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", KINDS)
def test_every_combination_trains_as_each_document_alone(kind: str, pool: WorkerPool, tmp_path: Path) -> None:
    tiny_model_dir(kind, tmp_path)
    reference, misses, worst = documents_alone(tmp_path), [], 0.0
    for world in (1, 2, 4):
        mine = [case for case in cases(kind) if case.world == world]
        for case, found in zip(mine, pool.run(world, run_cases, tmp_path, mine, timeout=3600)[0], strict=True):
            exact, control = reference(case)
            assert found.gradients.keys() == exact.gradients.keys()
            assert max(control.values()) < 4e-5, "the reference itself must be sharp"
            differences = errors(found, exact)
            worst = max(worst, *differences.values())
            if beyond(differences, control):
                misses.append(f"{case}: {differences}, control {control}")
    print(kind, len(cases(kind)), "cases, at most", worst)
    assert not misses, "\n".join(misses)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("cp", [1, 2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_no_document_sees_another(kind: str, cp: int, pool: WorkerPool, tmp_path: Path) -> None:
    """Bit for bit, over 200 random packings; under cp a method takes every third of them.

    Every token visits every expert. Otherwise one document's routes decide how many tokens an expert multiplies at
    once, and a product rounds differently at another size.
    """
    experts = expert_count(tiny_config(kind).get_text_config())
    tiny_model_dir(kind, tmp_path, **({"num_experts_per_tok": experts} if experts else {}))
    methods = METHODS if cp > 1 else ("auto",)
    for first, method in enumerate(methods):
        case, seeds = Case(kind, 1, cp, method=method, attention="auto"), list(range(first, 200, len(methods)))
        assert pool.run(cp, leaks, tmp_path, case, seeds, timeout=3600) == [[]] * cp, method
