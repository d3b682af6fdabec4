"""The GPU benchmark runs on the device, on tiny shapes."""

from __future__ import annotations

import pytest

from fsdp2kit.bench.gpu import bench_gpu
from fsdp2kit.distributed import World

pytestmark = pytest.mark.gpu


def test_a_dry_run_measures_memory(world: World) -> None:
    result = bench_gpu(dry_run=True)

    assert [variant["activation_checkpointing"] for variant in result["variants"]] == ["none", "full"] * 2
    assert all(0 < variant["peak_memory_gib"] < 4 for variant in result["variants"])
    assert all(variant["loss_first"] > 0 for variant in result["variants"])
