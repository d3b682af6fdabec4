"""How every bench measures and reports: sides in turns, one statistic, one kind of result.

A bench is a function of the world and its options. It returns a dictionary ready for JSON: ``rows`` (dictionaries, the
lines of one table), and as needed ``notes`` (lines below the table), ``checks`` (by name, whether it holds; one that
fails makes the comparison void) and ``bars`` (what `draw` draws). `measure` adds what was measured, and where.
"""

from __future__ import annotations

import ctypes
import gc
import importlib.util
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist

from fsdp2kit.console import show
from fsdp2kit.job import distributed
from fsdp2kit.job.distributed import World, gather_objects, is_main_process
from fsdp2kit.job.start import describe_environment


def measure(bench: Callable[..., Any], *, max_minutes: float = np.inf, **options: Any) -> Iterator[dict[str, Any]]:
    """The result of a bench with these options and its provenance. A bench of several parts gives the result so far.

    Args:
        max_minutes: start no further part after this long.
    """
    world, began = distributed.start(timeout_minutes=60), time.monotonic()
    name = bench.__name__.removeprefix("bench_")
    # A figure must be quoted with command, versions, devices, git state and the machine's load.
    environment = describe_environment(world_size=world.size, mesh={})
    devices = sorted({device for rank in gather_objects(environment["devices"]) for device in rank})
    provenance = {**environment, "devices": devices, "load_average": round(os.getloadavg()[0], 2)}
    about = {"benchmark": name, "options": options, "provenance": provenance}
    found = bench(world, **options)
    for result in found if isinstance(found, Iterator) else [found]:
        is_over = any(gather_objects(time.monotonic() - began > 60 * max_minutes))
        notes = [f"stopped after {max_minutes:g} minutes: what is missing was not begun"] if is_over else []
        yield {**about, **result, "notes": [*result.get("notes", []), *notes]}
        if is_over:
            break


class Side(Protocol):
    """One of the sides of a comparison. Every rank calls each method."""

    def build(self) -> None:
        """What it keeps from step to step, on the device. Libraries that only this side needs are imported before."""

    def prepare(self) -> None:
        """What of the next step does not count: the clock has not started."""

    def step(self) -> None:
        """What is measured."""

    def outcome(self) -> Any:
        """What that step did, when the clock has stopped."""

    def describe(self) -> str:
        """What was really run, in words."""
        return ""

    def stop(self) -> None:
        """End it."""


class Task(Side):
    """A function as a side, which keeps nothing. Each step runs in an ``around()`` of its own, which is not timed."""

    def __init__(
        self, work: Callable[[], object], around: Callable[[], AbstractContextManager[Any]] = nullcontext
    ) -> None:
        self._work, self._around = work, around

    def prepare(self) -> None:
        give_back_memory()
        self._open = self._around()
        self._open.__enter__()

    def step(self) -> None:
        self._work()

    def outcome(self) -> None:
        self._open.__exit__(None, None, None)


def run_sides(
    sides: Mapping[str, Side], *, rounds: int, warmup: int, world: World, memory_of: torch.device | None = None
) -> dict[str, dict[str, Any]]:
    """Build each side and make ``warmup`` steps with it, while the others are idle; then ``rounds`` steps in turns.

    Peak memory is taken in the first steps, above what the process had before the side was built. What a process needs
    once (buffers of the backend) counts for the first side. Collective.

    Args:
        memory_of: the device whose memory counts; None: the world's.

    Returns:
        For each side: ``ran``, its own description; ``seconds`` and ``cpu_seconds`` of each round, of the slowest rank
        (CPU seconds are of all the process's threads: other programs hardly change them, waiting does not count);
        ``first_step_seconds``; ``peak_bytes`` of the largest rank, None if the system does not tell; and the
        ``outcomes`` of all steps.
    """
    costs: dict[str, list[list[float]]] = {name: [] for name in sides}
    outcomes: dict[str, list[Any]] = {name: [] for name in sides}
    peaks: dict[str, int | None] = {}

    def step(name: str) -> None:
        sides[name].prepare()
        ranks = gather_objects(timed(sides[name].step, device=world.device))
        costs[name].append([max(values) for values in zip(*ranks, strict=True)])
        outcomes[name].append(sides[name].outcome())

    try:
        for name, side in sides.items():
            with PeakMemory(memory_of or world.device) as memory:
                side.build()
                memory.forget()  # what only building needed
                take_turns([name], step, warmup)
            peaks[name] = memory.peak
        take_turns(sides, step, rounds)
    finally:
        for side in sides.values():
            side.stop()
    found = {}
    for name, side in sides.items():
        seconds, cpu_seconds = map(list, zip(*costs[name], strict=True))
        memories = gather_objects(peaks[name])
        found[name] = {
            "ran": side.describe(),
            "seconds": seconds[warmup:],
            "cpu_seconds": cpu_seconds[warmup:],
            "first_step_seconds": seconds[0],
            "peak_bytes": None if None in memories else max(memories),
            "outcomes": outcomes[name],
        }
    return found


def timed(work: Callable[[], object], *, device: torch.device) -> tuple[float, float]:
    """Seconds and CPU seconds of ``work``, from a barrier until the device is idle. Collective."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    if distributed.world_size() > 1:
        dist.barrier()
    started, cpu_started = time.perf_counter(), time.process_time()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started, time.process_time() - cpu_started


def take_turns(names: Iterable[str], step: Callable[[str], object], rounds: int) -> None:
    """Call ``step`` with each name in every round; the order is reversed from one round to the next.

    So other work of the machine slows all sides alike.
    """
    order = list(names)
    for number in range(1, rounds + 1):
        for name in order:
            step(name)
        order.reverse()
        if number % 10 == 0 and is_main_process():
            show(f"{number} of {rounds} rounds", file=sys.stderr, flush=True)


def task_rows(found: Mapping[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each side: its seconds and peak memory, and how many times as fast the first side is."""
    rows = []
    first, ours = next(iter(found.items()))
    for name, figures in found.items():
        row: dict[str, Any] = {"name": name, **{key: spread(figures[key]) for key in ("seconds", "cpu_seconds")}}
        if name != first:
            row[f"{first}_is_faster"] = speed(ours["seconds"], figures["seconds"])
            row["by_cpu_time"] = speed(ours["cpu_seconds"], figures["cpu_seconds"])
        rows.append({**row, "peak_bytes": figures["peak_bytes"]})
    return rows


def speed(
    ours: Sequence[float], theirs: Sequence[float], *, work: tuple[Sequence[float], Sequence[float]] | None = None
) -> dict[str, float]:
    """How many times as fast as theirs ours is: the median over rounds of the durations' ratio, with a 95 % interval.

    The two durations of a round were measured one right after the other, so a busy machine slowed both. If each side's
    median were taken first, a machine that is busy half of the time could invert the ratio. The interval is a
    percentile bootstrap over rounds.

    Args:
        ours: seconds; the i-th was measured beside the i-th of ``theirs``.
        theirs: the other side's.
        work: the work that each side did, ours first. The ratio is then one of mean work per time.
    """
    ratios = np.asarray(theirs) / np.asarray(ours)
    done, theirs_done = (np.asarray(side) for side in work or ((1.0,) * len(ratios),) * 2)
    draws = np.random.default_rng(0).integers(0, len(ratios), size=(10_000, len(ratios)))

    def figure(chosen: Any) -> Any:
        return np.median(ratios[chosen], axis=-1) * done[chosen].mean(axis=-1) / theirs_done[chosen].mean(axis=-1)

    low, high = np.percentile(figure(draws), [2.5, 97.5])
    return {"ratio": float(figure(np.arange(len(ratios)))), "low": float(low), "high": float(high)}


def spread(seconds: Sequence[float]) -> dict[str, Any]:
    """Median, quartiles and all of some durations."""
    low, middle, high = np.percentile(seconds, [25, 50, 75])
    return {"median": float(middle), "p25": float(low), "p75": float(high), "all": list(seconds)}


class PeakMemory:
    """``with PeakMemory(device) as memory:``, then ``memory.peak``: bytes above those at the start of the block.

    On CUDA the allocator counts. On a CPU it is the process's private memory (``RssAnon``; None except on Linux),
    which a thread samples about every millisecond. Pages of a mapped file that are only read do not count: the kernel
    can drop them at any time.
    """

    def __init__(self, device: torch.device) -> None:
        self.peak: int | None = None
        self._device, self._done, self._lock = device, threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> PeakMemory:
        self.forget()
        self._before = self._now()
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._done.set()
        self._thread.join()
        highest = max(self._highest, self._now())
        if self._device.type == "cuda":
            highest = torch.cuda.max_memory_allocated(self._device)
        self.peak = highest - self._before if highest else None

    def forget(self) -> None:
        """Forget the peak so far; what there was at the start of the block stays."""
        give_back_memory()
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        with self._lock:  # a sample begun before would bring the forgotten peak back
            self._highest = self._now()

    def _now(self) -> int:
        if self._device.type == "cuda":
            return torch.cuda.memory_allocated(self._device)
        if not sys.platform.startswith("linux"):
            return 0
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
        return 1024 * int(status.partition("RssAnon:")[2].split()[0])

    def _sample(self) -> None:
        while self._device.type == "cpu" and not self._done.wait(0.001):
            with self._lock:
                self._highest = max(self._highest, self._now())


def give_back_memory() -> None:
    """Return freed memory to the system, so that a measurement does not start with what an earlier one left."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)


def missing_packages(*names: str) -> list[str]:
    """The packages among these that are not installed."""
    return [name for name in names if importlib.util.find_spec(name) is None]
