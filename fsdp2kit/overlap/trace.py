"""Read the traces that ``[profile]`` writes, or any other that torch's profiler wrote of an FSDP2 run."""

from __future__ import annotations

import gzip
import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp2kit.errors import UserError
from fsdp2kit.files.local import load_json, open_regular
from fsdp2kit.overlap.events import (
    DEVICE_CATEGORIES,
    Collective,
    Event,
    Host,
    Interval,
    read_kernels,
    read_threads,
)

_STEP = re.compile(r"ProfilerStep#(\d+)$")
_AGAIN = "profile the steps again (profile.enabled = true), and let the run end by itself"
# Collectives that no rank leaves before every rank has come.
_MEETINGS = {"all_gather", "reduce_scatter", "all_reduce", "all_to_all", "barrier"}


@dataclass(frozen=True)
class Step:
    """A traced step on the host: from one ``profiler.step()`` to the next."""

    number: int
    start: int
    end: int
    is_complete: bool
    """Whether the optimizer ran in it (a trace may end amid a step)."""


@dataclass(frozen=True)
class RankTrace:
    """One rank's trace."""

    rank: int
    world_size: int
    device: str
    """"cuda" or "cpu"."""
    steps: list[Step]
    work: list[Interval]
    """Stretches of computing."""
    collectives: list[Collective]
    """In the order in which they were issued."""
    turns: list[tuple[int, tuple[str, str]]]
    """Phase and unit of the host from a time on."""


def read_traces(path: str | Path) -> list[RankTrace]:
    """Every rank's trace, by rank; their collectives' `transfer` is filled in where it can be known.

    Args:
        path: a run directory, its ``trace`` directory (without traces of its own: the newest ``step-N`` in it), one
            of those, or one rank's file.

    Raises:
        UserError: there is no trace, one is damaged, or two are of the same rank.
    """
    path = Path(path)
    folder = path / "trace" if (path / "trace").is_dir() else path
    found = _files_in(folder)
    if not found and (asked := [*folder.glob("step-*")]):
        folder = max(asked, key=lambda one: one.stat().st_mtime)
        found = _files_in(folder)
    if not found and not path.is_file():
        what = "holds no trace (*.json, *.json.gz)" if folder.is_dir() else "does not exist"
        raise UserError(str(path), what, "run with profile.enabled = true and pass RUN_DIR/trace")
    files: dict[int, Path] = {}
    traces = []
    for file in found or [path]:
        trace = read_trace(file)
        if trace.rank in files:
            other = files[trace.rank].name
            raise UserError(str(file), f"is of rank {trace.rank}, and so is {other}", "keep one run's traces apart")
        files[trace.rank] = file
        traces.append(trace)
    _match_collectives(traces)
    return sorted(traces, key=lambda trace: trace.rank)


def _files_in(folder: Path) -> list[Path]:
    found = sorted([*folder.glob("*.json"), *folder.glob("*.json.gz")])
    return [file for file in found if file.name != "environment.json"]  # a run's, which lies beside its trace


def read_trace(path: Path) -> RankTrace:
    """One rank's trace."""
    content = _load(path)
    events = _events(content["traceEvents"], path)
    host = Host([event for event in events if event.category in ("cpu_op", "user_annotation")])
    first_step = _number_in(content, "fsdp2kit", "first_step", 0, path)
    steps, main = _steps(events, first=first_step)
    named = re.search(r"(\d+)", path.name)
    is_cuda = any(event.category in DEVICE_CATEGORIES for event in events)
    work, collectives = read_kernels(events, host) if is_cuda else read_threads(events, host, main=main)
    return RankTrace(
        rank=_number_in(content, "distributedInfo", "rank", int(named.group(1)) if named else 0, path),
        world_size=_number_in(content, "distributedInfo", "world_size", 1, path),
        device="cuda" if is_cuda else "cpu",
        steps=steps,
        work=work,
        collectives=collectives,
        turns=host.turns,
    )


def _number_in(content: dict[str, Any], table: str, name: str, default: int, path: Path) -> int:
    """A whole number in a table of the trace, which may lack either."""
    values = content.get(table)
    found = values.get(name, default) if isinstance(values, dict) else default
    if type(found) is not int:
        raise UserError(str(path), f"has {table}.{name} = {str(found)[:80]!r}, not a number", _AGAIN)
    return found


def _load(path: Path) -> dict[str, Any]:
    try:
        with open_regular(path) as raw, gzip.open(raw, "rb") if path.suffix == ".gz" else raw as file:
            content = load_json(file.read())
    except (EOFError, zlib.error, gzip.BadGzipFile) as problem:
        raise UserError(str(path), f"is cut off or damaged ({problem})", _AGAIN) from None
    except ValueError as problem:
        raise UserError(str(path), f"is no whole JSON ({problem})", _AGAIN) from None
    except OSError as problem:
        raise UserError(str(path), f"cannot be read ({problem.strerror})", "check the path") from None
    if not isinstance(content, dict) or not isinstance(content.get("traceEvents"), list):
        raise UserError(str(path), 'has no "traceEvents"', "pass a trace that torch's profiler wrote")
    return content


def _events(raw: list[Any], path: Path) -> list[Event]:
    """The complete events, in nanoseconds."""
    events = []
    for entry in raw:
        if not isinstance(entry, dict) or entry.get("ph") != "X":
            continue
        try:
            start = round(float(entry["ts"]) * 1000)
            end = start + round(float(entry["dur"]) * 1000)
        except (KeyError, TypeError, ValueError, OverflowError):
            raise UserError(str(path), f"has an event without a time ({str(entry)[:80]})", _AGAIN) from None
        name, category = str(entry.get("name", "")), str(entry.get("cat", ""))
        args = entry.get("args")
        events.append(Event(name, category, entry.get("tid"), start, end, args if isinstance(args, dict) else {}))
    return events


def _steps(events: Sequence[Event], *, first: int) -> tuple[list[Step], Any]:
    """The steps and the thread that they are on; without marks of steps, the whole trace is one.

    Args:
        first: the training step that the profiler calls #0.
    """
    marks = [event for event in events if event.category == "user_annotation" and _STEP.match(event.name)]
    marks.sort(key=lambda mark: mark.start)
    ends = [event.end for event in events if event.name.startswith("Optimizer.step#")]
    steps = [
        Step(
            first + int(mark.name.removeprefix("ProfilerStep#")),
            mark.start,
            mark.end,
            is_complete=not ends or any(mark.start < end <= mark.end for end in ends),
        )
        for mark in marks
    ]
    if steps:
        return steps, marks[0].thread
    active = [event for event in events if event.category in ("cpu_op", *DEVICE_CATEGORIES)]
    if not active:
        return [], None
    ((busiest, _),) = Counter(event.thread for event in active).most_common(1)
    whole = Step(first, min(event.start for event in active), max(event.end for event in active), is_complete=True)
    return [whole], busiest


def _match_collectives(traces: Sequence[RankTrace]) -> None:
    """Tell transfer from waiting: find the same collective on every rank and fill in its `transfer`.

    A rank that comes early to a collective waits in it for the slowest rank, whose own collective is the shortest: its
    length is the transfer. Only lengths are compared, not clocks. All ranks issue collectives in one order, so the
    n-th of a kind, group and step is the same on all. `transfer` stays None if a rank's trace is missing or has
    another number of them, or if the kind (a send, a broadcast) ends on one rank before another.
    """
    sequences: dict[tuple[str, str, int], dict[int, list[Collective]]] = defaultdict(lambda: defaultdict(list))
    for trace in traces:
        for one in trace.collectives:
            numbers = [step.number for step in trace.steps if step.start <= one.issued < step.end]
            if numbers and one.kind in _MEETINGS:
                sequences[one.group, one.kind, numbers[-1]][trace.rank].append(one)
    world_size = max((trace.world_size for trace in traces), default=1)
    for (group, _, _), by_rank in sequences.items():
        # NCCL's traces name the ranks of a group ("[0, 1]"); gloo's do not, and all are meant.
        named = re.fullmatch(r"\[[\d, ]+\]", group)
        ranks = set(map(int, re.findall(r"\d+", group))) if named else set(range(world_size))
        if by_rank.keys() != ranks or len({len(sequence) for sequence in by_rank.values()}) > 1:
            continue
        for same in zip(*by_rank.values(), strict=True):
            transfer = min(one.end - one.start for one in same)
            for one in same:
                one.transfer = transfer
