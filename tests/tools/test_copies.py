"""The bench of copies counts one copy of gradients less for each reduction over one rank."""

from __future__ import annotations

import pytest

from tests.support.workers import WorkerPool
from tests.tools.helpers import last_result
from tools.benchmarks.copies import bench_copies


@pytest.mark.full
def test_each_reduction_saves_a_float32_copy(pool: WorkerPool) -> None:
    (result,) = pool.run(1, last_result, bench_copies)
    saved = [row["FSDP2's own"] - row["fsdp2kit"] for row in result["rows"]]
    assert saved == pytest.approx([8, 8, 32, 8], rel=0.01), "4 bytes read and 4 written, in float32"
    # A parameter: 4 + 2 bytes to cast it and 2 + 2 to lay it out, once; its gradient: 2 + 4 bytes.
    assert result["rows"][1]["fsdp2kit"] == pytest.approx(16, rel=0.01)
