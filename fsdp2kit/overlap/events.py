"""What a trace is turned into: the same words for CUDA and CPU."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Generic, NamedTuple, TypeVar

from fsdp2kit.overlap.intervals import Interval

FORWARD, BACKWARD, OPTIMIZER, OTHER = "forward", "backward", "optimizer", "other"
ROOT = "(root)"
"""The unit of everything that no layer's unit holds."""
NO_UNIT = ""
"""Outside FSDP."""

T = TypeVar("T")


class Event(NamedTuple):
    """A complete event of a Chrome trace ("ph": "X"); times in nanoseconds."""

    name: str
    category: str
    thread: Any
    start: int
    end: int
    args: dict[str, Any]


class Labels(Generic[T]):
    """What holds at a time: each change holds until the next.

    Args:
        changes: (time, what holds from then on), in any order; of equal times the last one given counts.
        before: what holds before the first.
    """

    def __init__(self, changes: Iterable[tuple[int, T]], before: T) -> None:
        ordered = sorted(changes, key=lambda change: change[0])
        self.times = [time for time, _ in ordered]
        self.values = [before, *(value for _, value in ordered)]

    def at(self, time: int) -> T:
        return self.values[bisect_right(self.times, time)]

    def during(self, window: Interval) -> list[tuple[Interval, T]]:
        """The stretches within a window, each with what holds in it."""
        borders = [window[0], *(time for time in self.times if window[0] < time < window[1]), window[1]]
        return [((start, end), self.at(start)) for start, end in pairwise(borders)]


class Place(NamedTuple):
    """Where in the program something was issued."""

    phase: str
    unit: str
    is_fsdp: bool
    """Whether FSDP itself issued it (copies and casts around a collective)."""


class Work(NamedTuple):
    """A stretch of computing."""

    start: int
    end: int
    place: Place


@dataclass(frozen=True)
class Collective:
    """One collective on one rank."""

    kind: str
    """all_gather, reduce_scatter, all_reduce, all_to_all, send, recv …"""
    start: int
    end: int
    """While it runs: the kernel's time on CUDA; on a CPU that on gloo's thread, or the call's, where it has none."""
    place: Place
    issued: int
    """When the host issued it."""
    setup: Interval = (0, 0)
    """On a CPU, the call itself, which copies buffers; (0, 0) on CUDA."""
    group: str = ""
    """The ranks it runs over, where the trace says so."""

    @property
    def intervals(self) -> list[Interval]:
        return [self.setup, (self.start, self.end)]

    def moving(self, transfer: int | None) -> list[Interval]:
        """`intervals` without the waiting for a slower rank, which comes first; None: unknown, and all is transfer."""
        wait = 0 if transfer is None else self.end - self.start - transfer
        return [self.setup, (self.start + wait, self.end)]


@dataclass(frozen=True)
class Step:
    """A traced step on the host: from one ``profiler.step()`` to the next."""

    number: int
    start: int
    end: int
    is_complete: bool
    """Whether the optimizer ran in it (a trace may end amid a step)."""

    @property
    def window(self) -> Interval:
        return (self.start, self.end)


@dataclass(frozen=True)
class RankTrace:
    """One rank's trace."""

    rank: int
    world_size: int
    device: str
    """"cuda" or "cpu"."""
    steps: list[Step]
    work: list[Work]
    collectives: list[Collective]
    phases: Labels[str]
    host_copies: list[Interval] = field(default_factory=list)
    """Copies between host and device on CUDA; neither compute nor communication."""


_KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "barrier", "send_recv")
_SIMPLE_KINDS = ("send", "recv", "gather", "scatter", "reduce")


def collective_kind(name: str) -> str | None:
    """The kind that an operator, a kernel or c10d's "Collective name" means; None: no collective.

    ``c10d::_allgather_base_``, ``ncclDevKernel_AllGather_RING_LL`` and ``all_gather_single`` are all "all_gather".
    """
    plain = re.sub(r"[^a-z]", "", name.lower().split("(")[0])
    for kind in (*_KINDS, *_SIMPLE_KINDS):
        if kind.replace("_", "") in plain:
            return kind
    return None
