"""What a trace's events mean: stretches of computing, and collectives with the part of the program that issued them.

Ranges that torch itself records (FSDP2's ``FSDP::…``, autograd's, the optimizer's) say where the program was, so a
trace of any FSDP2 loop will do. `read_kernels` reads CUDA's events, `read_threads` a CPU's; both return `Findings`.
"""

from __future__ import annotations

import re
import sys
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar

Interval = tuple[int, int]
"""Start and end in nanoseconds, the end excluded."""

FORWARD = "forward"
BACKWARD = "backward"
OPTIMIZER = "optimizer"
OTHER = "other"
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


class Scope(NamedTuple):
    """The part of the program that issued something."""

    phase: str
    unit: str


@dataclass
class Collective:
    """One collective on one rank."""

    kind: str
    """all_gather, reduce_scatter, all_reduce, all_to_all, send, recv …"""
    start: int
    end: int
    """When it runs: the kernel's time on CUDA, the time on gloo's thread on a CPU (the call's, if it has none)."""
    scope: Scope
    issued: int
    """When the host issued it."""
    setup: Interval = (0, 0)
    """On a CPU, the call itself, which copies buffers; (0, 0) on CUDA."""
    group: str = ""
    """The ranks it runs over, where the trace says so."""
    transfer: int | None = None
    """Its length without the waiting for a slower rank; None: unknown."""

    @property
    def intervals(self) -> list[Interval]:
        """The call and the run, without an instant that is in both."""
        return [self.setup, (max(self.start, self.setup[1]), self.end)]

    @property
    def moving(self) -> list[Interval]:
        """`intervals` without the waiting, which comes first; all of them where it is unknown."""
        begin = self.start if self.transfer is None else self.end - self.transfer
        return [self.setup, (begin, self.end)]


Findings = tuple[list[Interval], list[Collective]]
"""Stretches of computing, and collectives in the order in which they were issued."""


def value_at(changes: Sequence[tuple[int, T]], time: int) -> T:
    """What holds at a time, given sorted pairs of a time and what holds from then on; the first is before all else."""
    return changes[bisect_right(changes, time, key=itemgetter(0)) - 1][1]


def by_nesting(event: Event) -> tuple[int, int]:
    """Sorts a thread's events so that each comes before those that it holds."""
    return event.start, -event.end


def innermost(events: Sequence[Event]) -> list[tuple[int, int | None]]:
    """The times at which another event of a thread becomes the innermost, with its index; None: no event runs.

    Args:
        events: of one thread, sorted `by_nesting`.
    """
    changes: list[tuple[int, int | None]] = [(-1, None)]
    stack: list[int] = []
    for index, time in [*((index, event.start) for index, event in enumerate(events)), (-1, sys.maxsize)]:
        while stack and (end := events[stack[-1]].end) <= time:
            while stack and events[stack[-1]].end <= end:
                stack.pop()
            changes.append((end, stack[-1] if stack else None))
        stack.append(index)
        changes.append((time, index))
    return changes[:-1]


# FSDPParamGroup._with_fqn: "FSDP::all_gather (model.layers.3) [pg=8]"; a prefetch: "FSDP::backward_prefetch for UNIT".
# The root's name is empty.
_RANGE = re.compile(r"FSDP::(\w+)(?: for (.*?)| \((.*?)\))?(?: \[pg=\d+\])?$")
# Ranges of FSDPState do not name their unit.
_UNNAMED = {"root_pre_forward", "root_post_backward_callback"}
_UNNAMED |= {"inputs_to_device", "cast_forward_inputs", "cast_forward_outputs"}


class HostTimeline:
    """Where in the program the host was.

    Args:
        events: the trace's host events: operators and annotations.
    """

    def __init__(self, events: Iterable[Event]) -> None:
        marks = [mark for event in events if (mark := _mark(event))]
        self.turns = _turns(marks)
        """Phase and unit from a time on."""
        by_thread: dict[Any, list[Event]] = defaultdict(list)
        for mark in sorted(marks, key=by_nesting):
            if mark.name not in ("optimizer", "autograd"):
                by_thread[mark.thread].append(mark)
        self._ranges = {thread: (ranges, innermost(ranges)) for thread, ranges in by_thread.items()}

    def scope(self, thread: Any, time: int) -> Scope:
        """Phase and unit of a thread at a time."""
        phase, unit = value_at(self.turns, time)
        ranges, changes = self._ranges.get(thread, ([], [(-1, None)]))
        inner = value_at(changes, time)
        named = None if inner is None else ranges[inner].args["unit"]
        return Scope(phase, unit if named is None else named)


def _mark(event: Event) -> Event | None:
    """An event that says where the program is, by its bare name; a range of FSDP2's has its unit in `args`."""
    if event.name.startswith("Optimizer."):  # Optimizer.step#AdamW.step, Optimizer.zero_grad#AdamW.zero_grad
        return event._replace(name="optimizer", args={})
    if event.name.startswith("autograd::engine::evaluate_function"):
        return event._replace(name="autograd", args={})
    match = _RANGE.match(event.name)
    if match is None:
        return None
    name, target, unit = match.groups()
    return event._replace(name=name, args={"unit": None if name in _UNNAMED else (unit or target or ROOT)})


def _turns(marks: Iterable[Event]) -> list[tuple[int, tuple[str, str]]]:
    """The phase and the unit whose turn it is, from each time on.

    Forward is from the root's pre-forward on, backward from autograd's first node to FSDP's last callback. A unit's
    turn is from its pre-forward to its post-forward, and from its pre-backward to its reshard.
    """
    edges = [edge for mark in marks for edge in ((mark.start, "begin", mark), (mark.end, "end", mark))]
    phase = OTHER
    running: list[str] = []  # units, the newest first
    turns = [(-1, (phase, NO_UNIT))]
    for time, edge, mark in sorted(edges, key=lambda edge: edge[0]):
        unit = mark.args.get("unit", NO_UNIT)
        match edge, mark.name:
            case "begin", "root_pre_forward":
                phase = FORWARD  # whatever was left open is over
                running = []
            case "end", "root_post_backward_callback":
                phase = OTHER
                running = []
            case "begin", "pre_forward" | "pre_backward":
                running.insert(0, unit)
            case "end", "post_forward" | "post_backward_reshard" if unit in running:
                # Not always the newest: the next unit's pre-backward may come before this one's reshard.
                running.remove(unit)
            case "begin", "autograd" if phase == FORWARD:
                phase = BACKWARD
            case _, "optimizer":
                phase = OPTIMIZER if edge == "begin" else OTHER
            case _:
                continue
        turns.append((time, (phase, running[0] if running else NO_UNIT)))
    return turns


_KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "barrier", "send_recv")
_KINDS += ("send", "recv", "gather", "scatter", "reduce")  # parts of the names above


def collective_kind(name: str) -> str | None:
    """The kind that an operator, a kernel or c10d's "Collective name" means; None: no collective.

    ``c10d::_allgather_base_``, ``ncclDevKernel_AllGather_RING_LL`` and ``all_gather_single`` are all "all_gather".
    """
    plain = re.sub(r"[^a-z]", "", name.lower().split("(")[0])
    return next((kind for kind in _KINDS if kind.replace("_", "") in plain), None)


DEVICE_CATEGORIES = {"kernel", "gpu_memcpy", "gpu_memset"}
# NCCL's and RCCL's kernels, and those that move data between devices without them.
_COMMUNICATION = re.compile(r"nccl|rccl|nvshmem|deep_ep|multimem_|(?:one|two)_shot_all_reduce", re.IGNORECASE)


def read_kernels(events: Sequence[Event], host: HostTimeline) -> Findings:
    """What ran on the device.

    A kernel that does not communicate computes, and so does a copy within the device. A copy from or to the host is
    neither.
    """
    launches = {
        event.args["correlation"]: event
        for event in events
        if event.category in ("cuda_runtime", "cuda_driver") and "correlation" in event.args
    }
    work: list[Interval] = []
    collectives: list[Collective] = []
    for event in events:
        if event.category not in DEVICE_CATEGORIES or event.name.startswith(("Memcpy HtoD", "Memcpy DtoH")):
            continue
        if kind := _communication(event):
            launch = launches.get(event.args.get("correlation"), event)  # a replayed graph's kernels have none
            scope = host.scope(launch.thread, launch.start)
            group = str(event.args.get("Process Group Ranks", "") or event.args.get("Process Group Name", ""))
            collectives.append(Collective(kind, event.start, event.end, scope, issued=launch.start, group=group))
        else:
            work.append((event.start, event.end))
    return work, sorted(collectives, key=lambda one: (one.issued, one.start))


def _communication(event: Event) -> str | None:
    """The kind of collective that a kernel is; None: it computes."""
    if name := event.args.get("Collective name"):
        return collective_kind(str(name)) or str(name)
    if event.name.startswith("Memcpy PtoP"):
        return "peer_copy"
    if event.category == "kernel" and _COMMUNICATION.search(event.name.split("(")[0]):
        return collective_kind(event.name) or "collective"
    return None


_CALLS = ("c10d::", "_c10d_functional::", "c10d_functional::")
# Nodes of the autograd graph and profiler marks hold operators and are none.
_NOT_OPERATORS = ("autograd::", "torch::autograd::", "profiler::", "FSDP::", *_CALLS)
_COMPILED = "## Call CompiledFxGraph"  # generated code runs here, and records no operators


def read_threads(events: Sequence[Event], host: HostTimeline, *, main: Any) -> Findings:
    """What the training threads computed, and gloo's collectives beside them.

    Args:
        main: the thread that runs the loop; those that autograd runs on count as well, and no others (a thread that
            reads data or writes a checkpoint is beside the step).
    """
    training = {main} | {event.thread for event in events if event.name.startswith("autograd::engine::")}
    by_thread: dict[Any, list[Event]] = defaultdict(list)
    calls: list[Event] = []
    runs: list[Event] = []
    for event in sorted(events, key=by_nesting):
        if event.name.startswith("gloo:"):
            runs.append(event)
        elif event.thread in training and event.category in ("cpu_op", "user_annotation"):
            by_thread[event.thread].append(event)
            if event.name.startswith("c10d::") and collective_kind(event.name):
                calls.append(event)
    work = [part for thread in by_thread.values() for part in _computing(thread)]
    return work, _gloo_collectives(calls, runs, host)


def _computing(events: Sequence[Event]) -> Iterator[Interval]:
    """The stretches of one thread in which an operator is at work, outside the calls of collectives.

    The innermost event decides. An operator that holds others is at work between them only if it is torch's own:
    between the operators that a Python operator (a ring's, say) calls, Python runs or waits.
    """
    works: list[bool] = []
    call_end = 0
    for index, event in enumerate(events):
        if event.name.startswith(_CALLS):
            call_end = max(call_end, event.end)
        holds_others = index + 1 < len(events) and events[index + 1].start < event.end
        is_operator = "::" in event.name and not event.name.startswith(_NOT_OPERATORS)
        is_at_work = is_operator and (event.name.startswith("aten::") or not holds_others)
        works.append(event.start >= call_end and (is_at_work or event.name.startswith(_COMPILED)))
    for (start, index), (end, _) in pairwise(innermost(events)):
        if index is not None and works[index] and start < end:
            yield start, end


def _gloo_collectives(calls: Iterable[Event], runs: Iterable[Event], host: HostTimeline) -> list[Collective]:
    """Each call (``c10d::_allgather_base_``) with its run on a thread of gloo's (``gloo:all_gather``).

    Only their order links the two, since gloo takes calls in turn: the first call of a kind has the first run of that
    kind after it. A run whose call came before the trace is left out; a call without a run is the call alone. Sends
    and receives have no thread; their run lasts until the program has waited for them.

    Args:
        calls: in order, as are `runs`.
    """
    queues: dict[str, list[Event]] = defaultdict(list)
    for run in runs:
        queues[collective_kind(run.name) or run.name].append(run)
    collectives = []
    for call in calls:
        kind = collective_kind(call.name) or call.name
        # gloo's reduce-scatter is an all-reduce, of which each rank keeps its part.
        queue = queues["all_reduce" if kind == "reduce_scatter" and kind not in queues else kind]
        while queue and queue[0].start < call.start:
            queue.pop(0)
        start, end = (queue[0].start, queue.pop(0).end) if queue else (call.end, call.end)
        scope = host.scope(call.thread, call.start)
        setup = (call.start, call.end)
        collectives.append(Collective(kind, start, end, scope, issued=call.start, setup=setup))
    return collectives
