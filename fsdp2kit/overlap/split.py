"""One step of one rank, split so that it adds up:

    step = compute only + overlapped + exposed communication + idle

on whole nanoseconds, hence exactly. "Communication" is the time in which a collective runs on this rank, "compute" the
time in which it computes, "exposed" communication without compute, "idle" neither (the host is busy elsewhere, or, on
CUDA, behind).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from fsdp2kit.overlap.events import Collective, Interval
from fsdp2kit.overlap.trace import RankTrace, Step

K = TypeVar("K", bound=Hashable)
MS = 1e6
"""Nanoseconds in a millisecond."""
TIMES = ("duration", "compute_only", "overlapped", "exposed", "idle", "waiting")
"""The fields of a `Split` that are times."""


class Grid:
    """A window cut into cells wherever an interval begins or ends: a set of instants is then one boolean a cell.

    Args:
        window: intervals are clipped to it.
        intervals: all that will be counted.
    """

    def __init__(self, window: Interval, intervals: Iterable[Interval]) -> None:
        self._window = window
        self._borders = np.unique(np.array([window, *intervals], dtype=np.int64).clip(*window))
        self.lengths = np.diff(self._borders)
        """Each cell's length in nanoseconds."""

    def count(self, intervals: Iterable[Interval]) -> NDArray[np.int64]:
        """How many of the intervals hold each cell; empty ones hold none."""
        times = np.array([*intervals], dtype=np.int64).reshape(-1, 2).clip(*self._window)
        spans = np.searchsorted(self._borders, np.maximum.accumulate(times, axis=1))
        begins, ends = (np.bincount(column, minlength=len(self._borders)) for column in spans.T)
        return (begins - ends).cumsum()[:-1]

    def total(self, cells: NDArray[np.bool_]) -> int:
        """How long the cells are together, in nanoseconds."""
        return int(self.lengths[cells].sum())

    def stretches(self, cells: NDArray[np.bool_]) -> list[Interval]:
        """The cells as intervals; neighbours are one."""
        edges = self._borders[np.flatnonzero(np.diff(cells, prepend=False, append=False))]
        return [(start, end) for start, end in edges.reshape(-1, 2).tolist()]


class Activity:
    """What a rank did in each cell of a step."""

    def __init__(self, trace: RankTrace, step: Step) -> None:
        begin = step.start
        end = step.end
        self.collectives = [
            one for one in trace.collectives if any(max(begin, a) < min(end, b) for a, b in one.intervals)
        ]
        """Those that run in the step."""
        runs = [interval for one in self.collectives for interval in one.intervals]
        moving = [interval for one in self.collectives for interval in one.moving]
        self.grid = Grid((begin, end), [*trace.work, *runs, *moving])
        self.computing = self.grid.count(trace.work) > 0
        self.running = self.grid.count(runs)
        """How many collectives run."""
        self.communicating = self.running > 0
        self.exposed = self.communicating & ~self.computing
        self.moving = self.grid.count(moving) > 0
        """A collective runs and is not known to wait."""

    def exposed_by(self, key: Callable[[Collective], K]) -> dict[K, float]:
        """Exposed nanoseconds by what `key` says of a collective.

        An instant that n collectives share counts 1/n for each, so that the rows add up.
        """
        share = np.where(self.exposed, self.grid.lengths / np.maximum(self.running, 1), 0.0)
        intervals: dict[K, list[Interval]] = defaultdict(list)
        for one in self.collectives:
            intervals[key(one)] += one.intervals
        return {name: float(self.grid.count(those) @ share) for name, those in intervals.items()}


@dataclass(frozen=True)
class Split:
    """One step of one rank, or the mean of several; times in nanoseconds, whole ones where it is one step."""

    duration: float
    compute_only: float
    overlapped: float
    exposed: float
    idle: float
    waiting: float | None
    """The part of `exposed` in which all running collectives waited for a slower rank; None: unknown."""
    collectives: dict[tuple[str, str], float]
    """Exposed time by kind of collective and phase."""
    units: dict[str, float]
    """Exposed time by unit."""

    @property
    def compute(self) -> float:
        return self.compute_only + self.overlapped

    @property
    def communication(self) -> float:
        return self.overlapped + self.exposed

    @property
    def overlap(self) -> float | None:
        """The overlapped share of communication (HTA's overlap); None without communication."""
        return self.overlapped / self.communication if self.communication else None


def split_step(trace: RankTrace, step: Step) -> Split:
    """Split one step of one rank."""
    seen = Activity(trace, step)
    total = seen.grid.total
    is_waiting_known = any(one.transfer is not None for one in seen.collectives)
    return Split(
        duration=step.end - step.start,
        compute_only=total(seen.computing & ~seen.communicating),
        overlapped=total(seen.computing & seen.communicating),
        exposed=total(seen.exposed),
        idle=total(~seen.computing & ~seen.communicating),
        waiting=total(seen.exposed & ~seen.moving) if is_waiting_known else None,
        collectives=seen.exposed_by(lambda one: (one.kind, one.scope.phase)),
        units=seen.exposed_by(lambda one: one.scope.unit),
    )


def mean_of(splits: Sequence[Split]) -> Split:
    """The mean of one or more splits; an unknown time does not count, and a row that a split lacks counts as 0.

    Rows with most exposed time come first.
    """
    means: dict[str, Any] = {}
    for name in TIMES:
        known = [value for split in splits if (value := getattr(split, name)) is not None]
        means[name] = sum(known) / len(known) if known else None
    for name in ("collectives", "units"):
        sums: dict[Any, float] = defaultdict(float)
        for split in splits:
            for key, exposed in getattr(split, name).items():
                sums[key] += exposed / len(splits)
        means[name] = dict(sorted(sums.items(), key=lambda item: -item[1]))
    return Split(**means)
