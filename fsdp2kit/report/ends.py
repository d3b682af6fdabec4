"""How and when each start of a run ended: it finished, was stopped, failed, or was killed without a word."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from fsdp2kit.report.read import RunRecord, Start, seconds_of
from fsdp2kit.report.tracebacks import cause_of_failure


@dataclass(frozen=True)
class End:
    """The end of a start."""

    text: str
    """A line: ``done at step 50``, ``failed: …``, ``killed after step 12``, ``running``."""
    time: float | None
    """Unix seconds; of a start that was killed, when it last wrote a line. None: it goes on, or nothing tells."""


def ends_of(run: RunRecord) -> dict[int, End]:
    """The end of each start, by the start's number."""
    found: dict[int, End] = {}
    for start, later in zip_longest(run.starts, run.starts[1:]):
        events = [event for event in run.events if event["start"] == start.number]
        said = _said(run, start, later, events)
        if said is None:
            said = _of_newest(run) if later is None else _of_earlier(run, start, later, events)
        found[start.number] = said
    return found


def _said(run: RunRecord, start: Start, later: Start | None, events: list[dict[str, Any]]) -> End | None:
    """What the start's own events say; None if they say nothing."""
    last = {event["event"]: event for event in events}
    if failure := last.get("failure") or last.get("refusal"):
        cause = _cause(run, start, later) if failure.get("lost") else ""
        return End(f"failed: {cause or failure.get('text') or 'without a line'}", failure["time"])
    if end := last.get("end"):
        return End(f"{end.get('outcome', 'ended')}{_at(end.get('step'))}", end["time"])
    return None


def _of_newest(run: RunRecord) -> End:
    """The end of the newest start, of which only the run's state tells."""
    if run.state == "running":
        stops = [event for event in run.of_kind("stop") if event["start"] == run.starts[-1].number]
        return End(f"running, asked to stop ({stops[-1].get('reason', '')})" if stops else "running", None)
    if run.state == "killed":
        return End(f"killed {run.message}", run.seen)
    return End(f"{run.state}: {run.message}" if run.message else run.state, run.seen)


def _of_earlier(run: RunRecord, start: Start, later: Start, events: list[dict[str, Any]]) -> End:
    """The end of a start that said nothing before another one followed."""
    records = [record for record in run.records if start.step < record["step"] <= later.step]
    steps = [one["step"] for one in (*records, *events) if isinstance(one.get("step"), int)]
    times = [event["time"] for event in events]
    times += [time for record in records if (time := seconds_of(record.get("time"))) is not None]
    time = max(times, default=None)
    if cause := _cause(run, start, later):
        return End(f"failed: {cause}", time)
    where = f"after step {max(steps)}" if steps and max(steps) else "before its first step"
    return End(f"killed {where}", time)


def _cause(run: RunRecord, start: Start, later: Start | None) -> str:
    """The line about the cause in ``errors/``, between this start and the next."""
    until = math.inf if later is None or later.time is None else later.time
    return cause_of_failure(run.directory / "errors", since=start.time or 0.0, until=until)


def _at(step: Any) -> str:
    return f" at step {step}" if isinstance(step, int) else ""
