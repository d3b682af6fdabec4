"""Times a training loop on one device: any loop that can be built and makes a step on a given batch."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from fsdp2kit.bench.figures import summary
from fsdp2kit.bench.synthetic import SyntheticBatches
from fsdp2kit.bench.trainer import Trainer, build_trainer
from fsdp2kit.config import TrainingConfig
from fsdp2kit.data.batch import Batch
from fsdp2kit.distributed import World
from fsdp2kit.parallel.mesh import build_mesh
from fsdp2kit.train.flops import ModelFlops, device_peak_flops, flops_per_batch


class Loop(Protocol):
    """One side of a measurement."""

    def build(self) -> None:
        """Model and optimizer, on the device."""

    def step(self, batch: Sequence[Batch], /) -> float:
        """One optimizer step on the micro-batches of a global batch; returns its loss."""
        ...

    def stop(self) -> None:
        """End it."""


class OurLoop:
    """fsdp2kit's own: `train`, a step at a time, as a recipe runs it."""

    steps_per_epoch = 1_000_000

    def __init__(self, config: TrainingConfig, *, world: World) -> None:
        self._config, self._world = config, world
        self._batch: Sequence[Batch] = ()
        self._trainer: Trainer | None = None

    def build(self) -> None:
        """Build all that a recipe builds around the data."""
        mesh = build_mesh(self._config.mesh, self._config.fsdp, world=self._world)
        self._trainer = build_trainer(self._config, world=self._world, mesh=mesh, batches=self, metrics_path=None)

    def batch(self, index: int, /) -> Sequence[Batch]:
        """What the loop reads, as its loader: whatever was handed to `step`."""
        return self._batch

    def step(self, batch: Sequence[Batch], /) -> float:
        """Read the batch, train on it, and log."""
        assert self._trainer is not None, "build it first"
        self._batch = batch
        return self._trainer.run(1)[0]["loss"]

    def stop(self) -> None:
        """Nothing runs between steps."""


def measure(loop: Loop, batches: SyntheticBatches, counts: ModelFlops, *, device: torch.device) -> dict[str, Any]:
    """Build ``loop``, and time its steps.

    Durations are from the end of one step to the end of the next, on the device's own clock where it has one, so
    that the host may run ahead as it does in training.

    Args:
        counts: of the model, for FLOP/s and MFU.

    Returns:
        Seconds of building, of the first step (which compiles, and allocates the optimizer's state) and of a step
        (median and quartiles), tokens/s, TFLOP/s, MFU (None: unknown), peak memory of the steps (None on a CPU, whose
        process has had others before), and the losses.
    """
    workload = batches.workload
    given = [batches.batch(index) for index in range(workload.steps)]
    forget_memory(device)
    started = time.perf_counter()
    loop.build()
    _synchronize(device)
    built = time.perf_counter()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    losses = [loop.step(given[0])]
    _synchronize(device)
    first = time.perf_counter()
    losses += [loop.step(batch) for batch in given[1 : workload.warmup]]
    _synchronize(device)
    clock = _Clock(device)
    for batch in given[workload.warmup :]:
        losses.append(loop.step(batch))
        clock.tick()
    seconds = clock.durations()
    flops = [_flops(counts, batch) for batch in given[workload.warmup :]]
    peak, rate = device_peak_flops(device), float(np.sum(flops) / np.sum(seconds))
    return {
        "build_seconds": built - started,
        "first_step_seconds": first - built,
        "step": summary(seconds),
        "seconds": seconds,
        "tokens_per_second": workload.tokens * len(seconds) / float(np.sum(seconds)),
        "tflops": rate / 1e12,
        "mfu": None if peak is None else rate / peak,
        "memory": _memory(device),
        "losses": losses,
    }


def forget_memory(device: torch.device) -> None:
    """Give back what an earlier measurement left."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def trace(loop: Loop, batches: SyntheticBatches, *, device: torch.device, steps: int, out: Path) -> None:
    """Write a torch profiler trace of ``steps`` steps of a loop that is built, after two more that are not traced."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)

    def write(profiler: torch.profiler.profile) -> None:
        profiler.export_chrome_trace(str(out))

    schedule = torch.profiler.schedule(wait=1, warmup=1, active=steps, repeat=1)
    with torch.profiler.profile(activities=activities, schedule=schedule, on_trace_ready=write) as profiler:
        for index in range(steps + 2):
            loop.step(batches.batch(index))
            _synchronize(device)  # so that a step's kernels are in its window
            profiler.step()


class _Clock:
    """The ends of steps: events on the device, or the host's clock on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._now: Callable[[], Any] = _record_event if device.type == "cuda" else time.perf_counter
        self._ends = [self._now()]

    def tick(self) -> None:
        self._ends.append(self._now())

    def durations(self) -> list[float]:
        """Seconds of each step; waits for the device."""
        pairs = list(zip(self._ends, self._ends[1:], strict=False))
        if not isinstance(self._ends[0], torch.cuda.Event):
            return [end - start for start, end in pairs]
        self._ends[-1].synchronize()
        return [start.elapsed_time(end) / 1e3 for start, end in pairs]


def _record_event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _flops(counts: ModelFlops, batch: Sequence[Batch]) -> float:
    tokens = sum(micro.input_tokens for micro in batch)
    return flops_per_batch(counts, tokens=tokens, attention_pairs=sum(micro.attention_pairs for micro in batch))


def _memory(device: torch.device) -> dict[str, float] | None:
    if device.type != "cuda":
        return None
    return {
        "allocated_gib": torch.cuda.max_memory_allocated(device) / 2**30,
        "reserved_gib": torch.cuda.max_memory_reserved(device) / 2**30,
    }


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
