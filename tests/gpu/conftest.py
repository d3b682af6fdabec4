"""Fixtures for tests on one CUDA device, in this process: a world of one, with gloo and NCCL."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fsdp2kit import distributed
from fsdp2kit.distributed import World


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """The process group of a job of one process, started as a run starts it."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    yield distributed.start()
    distributed.stop()
