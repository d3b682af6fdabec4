"""Answers given while training are those of plain transformers' greedy generation, on every mesh and method."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fsdp2kit import distributed
from fsdp2kit.parity.engine import Sharded
from fsdp2kit.parity.reference import load_plain
from fsdp2kit.train.evaluation import generate
from tests.parallel.jobs import Case
from tests.reference import tiny_model_dir
from tests.workers import WorkerPool

PROMPT, NEW = [5, 17, 99, 3, 42], 70  # answers longer than the block of 64 by which rows grow
CASES = [
    Case("llama3"),
    Case("llama3", 2, 1),
    Case("llama3", 1, 2, method="ulysses"),
    Case("llama3", 2, 2, method="ring"),
    Case("llama3", 1, 3, method="allgather"),
]


def answer(folder: Path, case: Case) -> list[int]:
    sharded = Sharded(case.config(folder, steps=1, rows=4), world=distributed.start())
    return generate(
        sharded.model,
        PROMPT,
        max_new_tokens=NEW,
        stops=(),
        plan=sharded.plan,
        mesh=sharded.mesh,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir("llama3", tmp_path_factory.mktemp("model")).parent


@pytest.mark.parametrize("case", CASES, ids=str)
def test_answers_are_those_of_plain_generation(case: Case, folder: Path, pool: WorkerPool) -> None:
    plain = load_plain(folder / "llama3").eval()
    tokens = plain.generate(torch.tensor([PROMPT]), max_new_tokens=NEW, do_sample=False)[0, len(PROMPT) :].tolist()
    assert len(set(tokens)) > 5, "an answer of a few tokens over and over would prove little"
    assert pool.run(case.world, answer, folder, case) == [tokens] * case.world
