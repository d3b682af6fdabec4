"""Seconds and peak memory of what a step does besides training."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from fsdp2kit.job import status
from fsdp2kit.job.distributed import reduce_numbers
from fsdp2kit.train.metrics import Metrics

_PHASES = ("sync", "sleep", "generate", "wake_up", "wait", "reward", "evaluate")


class Phases:
    """Measures the phases of a step; what makes rollouts, and what evaluates, share one of these."""

    def __init__(self, metrics: Metrics) -> None:
        self._memory = metrics.throughput.memory
        self.seconds: dict[str, float] = {}
        """Seconds of this step, by phase."""

    def begin_step(self) -> None:
        """Count seconds from 0 on."""
        self.seconds = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Measure what this encloses."""
        start = time.perf_counter()
        self._memory.end(None)
        status.enter(name)
        yield
        self._memory.end(name)
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    @contextmanager
    def as_one(self, name: str) -> Iterator[None]:
        """Count the seconds of what this encloses as those of one phase; of the phases in it, only memory counts."""
        before = self.seconds.copy()
        start = time.perf_counter()
        yield
        self.seconds = {**before, name: time.perf_counter() - start}

    def figures(self) -> dict[str, float]:
        """``seconds/PHASE`` and ``memory_gib/PHASE`` of the step, the largest of any rank, no zeros. Collective."""
        mine = {f"seconds/{name}": self.seconds.get(name, 0.0) for name in _PHASES}
        mine |= {f"memory_gib/{name}": self._memory.phases.get(name, 0) / 2**30 for name in _PHASES}
        largest = reduce_numbers(list(mine.values()), dist.ReduceOp.MAX)
        return {name: value for name, value in zip(mine, largest, strict=True) if value}
