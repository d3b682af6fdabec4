"""One step of one rank, split so that it adds up:

    step = compute only + overlapped + exposed communication + idle

on whole nanoseconds, hence exactly. "Communication" is the time in which a collective runs on this rank, "compute" the
time in which it computes, "exposed" communication without compute, "idle" neither (the host is busy elsewhere, or, on
CUDA, behind).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fsdp2kit.overlap.events import Collective, Interval, Work
from fsdp2kit.overlap.trace import RankTrace, Step

MS = 1e6
"""Nanoseconds in a millisecond."""
TIMES = ("duration", "compute_only", "overlapped", "exposed", "idle", "waiting", "host_copies")
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
        """Of each cell, in nanoseconds."""

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
        self.window = begin, end = step.start, step.end
        self.work = [part for part in trace.work if part.start < end and part.end > begin]
        self.collectives = [
            one
            for one in trace.collectives
            if begin <= one.issued < end or any(max(begin, a) < min(end, b) for a, b in one.intervals)
        ]
        """Those that run or were issued in the step."""
        runs, moving = _intervals(self.collectives), [part for one in self.collectives for part in one.moving]
        self.grid = Grid(self.window, [*_intervals(self.work), *runs, *moving, *trace.host_copies])
        self.computing = self.grid.count(_intervals(self.work)) > 0
        self.running = self.grid.count(runs)
        """How many collectives run."""
        self.communicating = self.running > 0
        self.exposed = self.communicating & ~self.computing
        self.moving = self.grid.count(moving) > 0
        """A collective runs and is not known to wait."""
        self.host_copying = self.grid.count(trace.host_copies) > 0


def _intervals(parts: Iterable[Work | Collective]) -> list[Interval]:
    return [interval for part in parts for interval in part.intervals]


@dataclass(frozen=True)
class Figures:
    """One kind of collective, or one unit, in one phase; times in nanoseconds."""

    count: float
    """Collectives that were issued in this step."""
    compute: float
    """A unit's; 0 for a kind of collective."""
    communication: float
    """While at least one of its collectives ran."""
    exposed: float
    """Without compute beside them; an instant that several share is divided, so that the rows add up."""
    waiting: float | None
    """Of its collectives' lengths, what was waiting for the slowest rank; None: unknown."""


Table = dict[tuple[str, str], Figures]
"""By kind of collective or unit, and by phase."""


@dataclass(frozen=True)
class Split:
    """One step of one rank, or the mean of several; times in nanoseconds, whole ones where it is one step."""

    duration: float
    compute_only: float
    overlapped: float
    exposed: float
    idle: float
    waiting: float | None
    """Of `exposed`, while every collective that ran was waiting for a slower rank; None: unknown."""
    host_copies: float
    """Of `idle`, while the device copied from or to the host."""
    collectives: Table
    units: Table

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
    idle = ~seen.computing & ~seen.communicating
    is_waiting_known = any(one.transfer is not None for one in seen.collectives)
    return Split(
        duration=step.end - step.start,
        compute_only=total(seen.computing & ~seen.communicating),
        overlapped=total(seen.computing & seen.communicating),
        exposed=total(seen.exposed),
        idle=total(idle),
        waiting=total(seen.exposed & ~seen.moving) if is_waiting_known else None,
        host_copies=total(seen.host_copying & idle),
        collectives=_table(seen, seen.collectives, lambda one: one.kind),
        units=_table(seen, [*seen.work, *seen.collectives], lambda part: part.scope.unit),
    )


def _table(seen: Activity, parts: Iterable[Work | Collective], name_of: Callable[[Any], str]) -> Table:
    by_key: dict[tuple[str, str], list[Work | Collective]] = defaultdict(list)
    for part in parts:
        by_key[name_of(part), part.scope.phase].append(part)
    return {key: _figures(seen, those) for key, those in by_key.items()}


def _figures(seen: Activity, parts: Sequence[Work | Collective]) -> Figures:
    """Work and collectives that have one name and one phase."""
    grid, (begin, end) = seen.grid, seen.window
    collectives = [part for part in parts if isinstance(part, Collective)]
    running = grid.count(_intervals(collectives))
    # An instant in which n collectives are exposed counts 1/n for each of them.
    share = np.where(seen.exposed, grid.lengths / np.maximum(seen.running, 1), 0.0)
    waits = [one.end - one.start - one.transfer for one in collectives if one.transfer is not None]
    return Figures(
        count=sum(begin <= one.issued < end for one in collectives),
        compute=grid.total(grid.count(_intervals(part for part in parts if isinstance(part, Work))) > 0),
        communication=grid.total(running > 0),
        exposed=float(running @ share),
        waiting=sum(waits) if waits else None,
    )


def mean_of(splits: Sequence[Split]) -> Split:
    """The mean of one or more splits. Figures that a split lacks count as 0; an unknown time does not count.

    Those with most exposed time come first.
    """
    means: dict[str, Any] = {name: _mean(splits, name) for name in TIMES}
    for name in ("collectives", "units"):
        tables: list[Table] = [getattr(split, name) for split in splits]
        rows = {}
        for key in dict.fromkeys(key for table in tables for key in table):
            found = [table[key] for table in tables if key in table]
            rows[key] = Figures(**{field: _mean(found, field, of=len(tables)) for field in vars(found[0])})
        means[name] = dict(sorted(rows.items(), key=lambda item: -item[1].exposed))
    return Split(**means)


def _mean(found: Sequence[object], name: str, *, of: int | None = None) -> Any:
    """The mean of a field's known values: their sum divided by `of`, or by their number; None: none is known."""
    known = [value for one in found if (value := getattr(one, name)) is not None]
    return sum(known) / (of or len(known)) if known else None
