"""What the host was doing when it issued something: the phase of the step, the FSDP unit, FSDP's own work or not.

All of it is read from ranges that torch itself records (FSDP2's ``FSDP::…``, autograd's, the optimizer's), so a trace
of any FSDP2 loop will do; ours alone are those of FSDP's collectives over gloo.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

from fsdp2kit.overlap.events import BACKWARD, FORWARD, NO_UNIT, OPTIMIZER, OTHER, ROOT, Event, Labels, Place

# FSDPParamGroup._with_fqn: "FSDP::all_gather (model.layers.3) [pg=8]"; a prefetch: "FSDP::backward_prefetch for UNIT".
# The root's name is empty.
_RANGE = re.compile(r"FSDP::(\w+)(?: for (.*?)| \((.*?)\))?(?: \[pg=\d+\])?$")
# Ranges of FSDPState; they name no unit, whichever it is.
_UNNAMED = {"root_pre_forward", "inputs_to_device", "cast_forward_inputs", "cast_forward_outputs"}
_UNNAMED |= {"root_post_backward_callback"}


class _Range(NamedTuple):
    name: str
    unit: str | None
    event: Event


class Host:
    """Looks up a thread and a time.

    Args:
        events: the trace's host events: operators and annotations.
    """

    def __init__(self, events: Sequence[Event]) -> None:
        ranges = [found for event in events if (found := _fsdp_range(event))]
        self.phases = _phases(events, ranges)
        self._units = _units(ranges)
        by_thread: dict[Any, list[_Range]] = defaultdict(list)
        for found in ranges:
            by_thread[found.event.thread].append(found)
        self._ranges = {thread: _innermost(found) for thread, found in by_thread.items()}

    def place(self, thread: Any, time: int) -> Place:
        """Where the program was at that time, seen from that thread."""
        inner = self._ranges[thread].at(time) if thread in self._ranges else None
        unit = inner.unit if inner is not None and inner.unit is not None else self._units.at(time)
        return Place(self.phases.at(time), unit, inner is not None)


def _fsdp_range(event: Event) -> _Range | None:
    match = _RANGE.match(event.name) if event.name.startswith("FSDP::") else None
    if match is None:
        return None
    name, target, unit = match.groups()
    return _Range(name, None if name in _UNNAMED else (unit or target or ROOT), event)


def _phases(events: Sequence[Event], ranges: Sequence[_Range]) -> Labels[str]:
    """Forward from the root's pre-forward on, backward from autograd's first node to FSDP's last callback."""
    changes: list[tuple[int, str]] = []
    for found in ranges:
        if found.name == "root_pre_forward":
            changes.append((found.event.start, FORWARD))
        elif found.name == "root_post_backward_callback":
            changes.append((found.event.end, OTHER))
    for event in events:
        if event.name.startswith("Optimizer."):  # Optimizer.step#AdamW.step, Optimizer.zero_grad#AdamW.zero_grad
            changes += [(event.start, OPTIMIZER), (event.end, OTHER)]
    nodes = sorted(event.start for event in events if event.name.startswith("autograd::engine::evaluate_function"))
    outline = Labels(changes, OTHER)
    # Only the first node after a forward begins a backward; later ones change nothing.
    begun: set[int] = set()
    for start in nodes:
        if outline.at(start) != FORWARD:
            continue
        forward = bisect_right(outline.times, start)
        if forward not in begun:
            begun.add(forward)
            changes.append((start, BACKWARD))
    return Labels(changes, OTHER)


def _units(ranges: Sequence[_Range]) -> Labels[str]:
    """The unit whose turn it is: from its pre-forward to its post-forward, from its pre-backward to its reshard."""
    turns: list[tuple[int, int, str | None]] = []
    for found in ranges:
        if found.name in ("root_pre_forward", "root_post_backward_callback"):
            at = found.event.start if found.name == "root_pre_forward" else found.event.end
            turns.append((at, 0, None))  # whatever was left open is over
        elif found.name in ("pre_forward", "pre_backward"):
            turns.append((found.event.start, 1, found.unit))
        elif found.name in ("post_forward", "post_backward_reshard"):
            turns.append((found.event.end, -1, found.unit))
    open_units: list[str] = []
    changes: list[tuple[int, str]] = []
    for time, change, unit in sorted(turns, key=lambda turn: turn[0]):
        if unit is None:
            open_units.clear()
        elif change > 0:
            open_units.append(unit)
        elif unit in open_units:
            # Not always the innermost: the next unit's pre-backward may come before this one's reshard.
            del open_units[len(open_units) - 1 - open_units[::-1].index(unit)]
        changes.append((time, open_units[-1] if open_units else NO_UNIT))
    return Labels(changes, NO_UNIT)


def _innermost(ranges: list[_Range]) -> Labels[_Range | None]:
    """The innermost range at any time of one thread, whose ranges are nested."""
    changes: list[tuple[int, _Range | None]] = []
    stack: list[_Range] = []
    for found in sorted(ranges, key=lambda found: (found.event.start, -found.event.end)):
        while stack and stack[-1].event.end <= found.event.start:
            ended = stack.pop()
            changes.append((ended.event.end, stack[-1] if stack else None))
        stack.append(found)
        changes.append((found.event.start, found))
    while stack:
        ended = stack.pop()
        changes.append((ended.event.end, stack[-1] if stack else None))
    return Labels(changes, None)
