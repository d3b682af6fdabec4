"""The bench of updates times each AdamW, and says whether the compiled one was used."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.support.models import needs_torchao
from tests.support.workers import WorkerPool
from tests.tools.helpers import last_result
from tools.benchmarks.update import bench_update


def updates(*, compiler: Any, dtype: str = "float32") -> dict[str, Any]:
    with patch.object(torch, "compile", compiler):
        return last_result(bench_update, params=1e-4, rounds=2, dtype=dtype)


def as_written(function: Any, **_: Any) -> Any:
    return function


def fails(*_: Any, **__: Any) -> Any:
    def call(*_: Any) -> None:
        raise RuntimeError("no compiler")

    return call


@pytest.mark.full
@needs_torchao
def test_each_adamw_is_timed(pool: WorkerPool) -> None:
    (result,) = pool.run(1, updates, compiler=as_written)
    assert [row["name"] for row in result["rows"]] == ["adamw_bf16, compiled", "adamw_bf16", "adamw", "adamw_8bit"]
    assert all(row["seconds"]["median"] > 0 and len(row["seconds"]["all"]) == 2 for row in result["rows"])
    assert result["checks"] == {"compiled_update_was_used": True}


@pytest.mark.full
def test_a_fallback_makes_the_comparison_void(pool: WorkerPool) -> None:
    (result,) = pool.run(1, updates, compiler=fails, dtype="bfloat16")
    assert result["checks"] == {"compiled_update_was_used": False}
    assert "no compiler" in result["notes"][-1]
