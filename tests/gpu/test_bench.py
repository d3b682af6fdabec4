"""The GPU benchmark runs on the device, on tiny shapes."""

from __future__ import annotations

import pytest

from fsdp2kit.job.distributed import World
from tools.benchmarks.gpu import bench_gpu

pytestmark = pytest.mark.gpu


def test_a_dry_run_measures_memory(world: World) -> None:
    *_, result = bench_gpu(world, groups=("small", "3b", "moe"), dry_run=True)

    assert "bfloat16, compiled" in [row["variant"] for row in result["rows"]]
    for row in (row for row in result["rows"] if "error" not in row):
        assert 0 < row["allocated_bytes"] <= row["reserved_bytes"] < 4 * 2**30
        assert row["losses"][0] > 0
        assert row["step"]["median"] > 0


def test_a_profile_sees_the_devices_kernels(world: World) -> None:
    *_, result = bench_gpu(world, groups=("small",), dry_run=True, profile=True)
    found = result["rows"][0]

    assert found["matmul"] > 0
    assert found["optimizer"] > 0
    assert 0 <= found["idle"] < 1
    assert {kernel["kind"] for kernel in found["kernels"]} == {"copies", "elementwise and others"}
