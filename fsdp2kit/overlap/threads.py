"""A CPU trace: operators on the training threads, gloo's collectives beside them.

A collective begins with a call on a training thread (``c10d::_allgather_base_``), which copies buffers and queues it,
and runs on a thread of gloo's (``gloo:all_gather``). Nothing links the two but their order: gloo takes them in turn.
Sends and receives run on no thread of their own; their range lasts until somebody has waited for them. FSDP's own
collectives over gloo (``fsdp2kit::all_gather``) are made of these, and last as long as the call.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from fsdp2kit.overlap.events import Collective, Event, Work, collective_kind
from fsdp2kit.overlap.host import Host

_GLOO = "gloo:"
_MADE_OF_MESSAGES = ("fsdp2kit::all_gather", "fsdp2kit::reduce_scatter")
_CALLS = ("c10d::", "_c10d_functional::", "c10d_functional::", *_MADE_OF_MESSAGES)
# Nodes of the autograd graph and profiler marks hold operators and are none.
_NOT_OPERATORS = ("autograd::", "torch::autograd::", "profiler::", "FSDP::", *_CALLS)
_COMPILED = "## Call CompiledFxGraph"  # generated code runs here, and records no operators


def read_threads(events: Sequence[Event], host: Host, *, main: Any) -> tuple[list[Work], list[Collective]]:
    """What the training threads computed, and the collectives.

    Args:
        main: the thread that runs the loop; those that autograd runs on count as well, and no others (a thread that
            reads data or writes a checkpoint is beside the step).
    """
    training = {main} | {event.thread for event in events if event.name.startswith("autograd::engine::")}
    by_thread: dict[Any, list[Event]] = defaultdict(list)
    calls: list[Event] = []
    runs: list[Event] = []
    for event in events:
        if event.name.startswith(_GLOO):
            runs.append(event)
        elif event.thread in training and event.category in ("cpu_op", "user_annotation"):
            by_thread[event.thread].append(event)
            if event.name.startswith((_CALLS[0], *_MADE_OF_MESSAGES)) and collective_kind(event.name):
                calls.append(event)
    calls, runs = _without_their_messages(calls, runs)
    work = [part for thread in by_thread.values() for part in _computing(thread, host)]
    return work, _collectives(calls, runs, host)


def _computing(events: list[Event], host: Host) -> Iterator[Work]:
    """The stretches of one thread in which an operator is at work, and not within the call of a collective.

    The innermost event decides. One that holds others is only at work itself where it is torch's own: the rest of a
    Python operator (a ring's, say) is Python, and waiting.
    """
    events = sorted(events, key=lambda event: (event.start, -event.end))
    parents = _parents(events)
    holds_others = Counter(parents)
    within_call = [False] * len(events)
    works = [False] * len(events)
    for number, event in enumerate(events):
        parent = parents[number]
        within_call[number] = event.name.startswith(_CALLS) or (parent >= 0 and within_call[parent])
        works[number] = not within_call[number] and _is_at_work(event.name, holds_others=number in holds_others)
    stretch: tuple[int, int] | None = None
    place = None
    for start, end, number in _innermost(events, parents):
        if not works[number]:
            continue
        here = host.place(events[number].thread, start)
        if stretch is not None and place == here and stretch[1] == start:
            stretch = (stretch[0], end)
            continue
        if stretch is not None and place is not None:
            yield Work(*stretch, place)
        stretch, place = (start, end), here
    if stretch is not None and place is not None:
        yield Work(*stretch, place)


def _is_at_work(name: str, *, holds_others: bool) -> bool:
    if name.startswith(_COMPILED):
        return True
    is_operator = "::" in name and not name.startswith(_NOT_OPERATORS)
    return is_operator and (name.startswith("aten::") or not holds_others)


def _parents(events: Sequence[Event]) -> list[int]:
    """For each event, sorted by start, the number of the one that holds it; −1: none."""
    parents, stack = [], []
    for number, event in enumerate(events):
        while stack and events[stack[-1]].end <= event.start:
            stack.pop()
        parents.append(stack[-1] if stack else -1)
        stack.append(number)
    return parents


def _innermost(events: Sequence[Event], parents: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Stretches (start, end, number of the innermost event) of nested events, in order."""
    stack: list[int] = []
    at = 0

    def until(time: int) -> Iterator[tuple[int, int, int]]:
        nonlocal at
        while stack:
            end = min(events[stack[-1]].end, time)
            if at < end:
                yield at, end, stack[-1]
                at = end
            if events[stack[-1]].end > time:
                return
            stack.pop()

    for number, event in enumerate(events):
        yield from until(event.start)
        at = max(at, event.start)
        stack.append(number)
    if events:
        yield from until(max(event.end for event in events))


def _without_their_messages(calls: list[Event], runs: list[Event]) -> tuple[list[Event], list[Event]]:
    """The calls and runs that are not parts of a collective made of messages."""
    made: dict[Any, list[Event]] = defaultdict(list)  # by thread, on which their messages are marked as well
    for call in sorted(calls, key=lambda call: call.start):
        if call.name in _MADE_OF_MESSAGES:
            made[call.thread].append(call)

    def is_part(event: Event) -> bool:
        around = made[event.thread]
        at = bisect_right(around, event.start, key=lambda call: call.start) - 1
        return at >= 0 and event.start < around[at].end and event.name not in _MADE_OF_MESSAGES

    return [call for call in calls if not is_part(call)], [run for run in runs if not is_part(run)]


def _collectives(calls: list[Event], runs: list[Event], host: Host) -> list[Collective]:
    """Each call with its run: of one kind, the first with the first.

    A run whose call came before the trace is left out; a call without a run is the call alone.
    """
    queues: dict[str, list[Event]] = defaultdict(list)
    for run in sorted(runs, key=lambda run: run.start):
        queues[collective_kind(run.name) or run.name].append(run)
    collectives = []
    for call in sorted(calls, key=lambda call: call.start):
        kind = collective_kind(call.name)
        assert kind is not None, "a call was chosen by its kind"
        place = host.place(call.thread, call.start)
        if call.name in _MADE_OF_MESSAGES:
            collectives.append(Collective(kind, call.start, call.end, place, issued=call.start))
            continue
        # gloo's reduce-scatter is an all-reduce, of which each rank keeps its part.
        queue = queues["all_reduce" if kind == "reduce_scatter" and kind not in queues else kind]
        while queue and queue[0].start < call.start:
            queue.pop(0)
        run = queue.pop(0) if queue else None
        start, end = (run.start, run.end) if run else (call.end, call.end)
        collectives.append(Collective(kind, start, end, place, issued=call.start, setup=(call.start, call.end)))
    return collectives
