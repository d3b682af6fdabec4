"""The GPU benchmark runs on the device, on tiny shapes."""

from __future__ import annotations

import pytest

from fsdp2kit.bench.gpu import Options, bench_gpu
from fsdp2kit.distributed import World

pytestmark = pytest.mark.gpu


def test_a_dry_run_measures_memory(world: World) -> None:
    result = bench_gpu(Options(groups=("small", "3b"), dry_run=True))

    recomputed = [one["activation_checkpointing"] for one in result["variants"] if "Trainer" not in one["variant"]]
    assert recomputed[:2] == ["none", "full"]
    assert "bfloat16, compiled" in [variant["variant"] for variant in result["variants"]]
    for variant in result["variants"]:
        assert 0 < variant["memory"]["allocated_gib"] <= variant["memory"]["reserved_gib"] < 4
        assert variant["losses"][0] > 0
        assert variant["step"]["median_seconds"] > 0


def test_a_profile_sees_the_devices_kernels(world: World) -> None:
    (found, *_) = bench_gpu(Options(groups=("small",), dry_run=True, profile=True))["variants"]

    assert found["shares"]["matmul"] > 0
    assert found["shares"]["optimizer"] > 0
    assert 0 <= found["idle"] < 1
