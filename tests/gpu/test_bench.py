"""The GPU benchmark runs on the device, on tiny shapes."""

from __future__ import annotations

import pytest

from fsdp2kit.bench.gpu import Options, bench_gpu
from fsdp2kit.distributed import World

pytestmark = pytest.mark.gpu


def test_a_dry_run_measures_memory(world: World) -> None:
    result = bench_gpu(Options(groups=("small", "3b"), dry_run=True))

    recomputed = [row["recomputes"] for row in result["rows"] if "Trainer" not in row["variant"]]
    assert recomputed[:2] == ["none", "full"]
    assert "bfloat16, compiled" in [row["variant"] for row in result["rows"]]
    for row in result["rows"]:
        assert 0 < row["allocated_bytes"] <= row["reserved_bytes"] < 4 * 2**30
        assert row["losses"][0] > 0
        assert row["step"]["median"] > 0


def test_a_profile_sees_the_devices_kernels(world: World) -> None:
    (found, *_) = bench_gpu(Options(groups=("small",), dry_run=True, profile=True))["rows"]

    assert found["matmul"] > 0
    assert found["optimizer"] > 0
    assert 0 <= found["idle"] < 1
