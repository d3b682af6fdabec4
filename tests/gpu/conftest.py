"""Fixtures for tests on one CUDA device, in this process: a world of one, with gloo and NCCL."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from fsdp2kit.job import distributed
from fsdp2kit.job.distributed import World


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """The process group of a job of one process, started as a run starts it."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    yield distributed.start()
    distributed.stop()


@pytest.fixture(autouse=True)
def _full_precision() -> None:
    """TF32 would hide a mistake of 1e-4 in what is compared to 1e-5."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
