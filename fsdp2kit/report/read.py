"""A run directory as one object: `read_run`. It only reads, also beside a run that is going on or was killed."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import tomli

from fsdp2kit.errors import UserError
from fsdp2kit.files.local import open_regular, read_regular, read_text
from fsdp2kit.files.redaction import cleaned, without_secrets
from fsdp2kit.job.events import flat
from fsdp2kit.report.liveness import is_locked
from fsdp2kit.report.tracebacks import cause_of_failure

State = Literal["running", "ended", "stopped", "failed", "killed"]

METRICS, EVENTS = "metrics.jsonl", "events.jsonl"
_LATEST = 1e11  # unix seconds
_SAMPLE_BYTES = 1 << 18  # of samples.jsonl: its end
_DEPTH = 3  # folders of runs within folders of runs
_LONG_INTEGER = re.compile(rb"\d{19}")  # more than 64 bits
_SILENT_SECONDS = 300.0  # a run of another host whose lock is not seen here, and that has written nothing since


@dataclass(frozen=True)
class Start:
    """One start of a run."""

    number: int
    """From 1."""
    time: float | None
    """Unix seconds; of a run without ``events.jsonl``, when its first record was written."""
    step: int
    """The step that it resumed from, or 0."""
    world_size: int | None = None
    changed: dict[str, list[Any]] = field(default_factory=dict)
    """What the config has that the start before had not: ``{"optimizer.lr": [0.001, 0.0005]}``; None is "unset"."""


@dataclass(frozen=True)
class RunRecord:
    """What a run directory tells; see `read_run`. Whatever a directory lacks is empty."""

    directory: Path
    config: dict[str, Any]
    """``config.toml`` by dotted key: ``{"train.steps": 120}``. Lists, such as ``data.sources``, stay lists."""
    environment: dict[str, Any]
    """``environment.json``, of the last start."""
    records: list[dict[str, Any]]
    """``metrics.jsonl`` by step, one record a step."""
    events: list[dict[str, Any]]
    """``events.jsonl`` by time (`fsdp2kit.job.events` has the kinds), without refused starts; empty for older runs."""
    samples: list[dict[str, Any]]
    """The newest of ``samples.jsonl``: ``step``, ``prompt``, ``answer``, …"""
    starts: list[Start]
    state: State
    message: str
    """A line: how it failed, why it stopped, where it was when it was killed; "" of others."""
    seen: float
    """When the run last wrote a line, in unix seconds."""

    @property
    def name(self) -> str:
        return self.directory.name or str(self.directory)

    @property
    def recipe(self) -> str:
        """The recipe's name; for a ``.py`` file its name without the suffix."""
        return Path(str(self.config.get("recipe", ""))).stem

    @property
    def model(self) -> str:
        """``model.path``, or the model type of a model without one."""
        return str(self.config.get("model.path") or self.config.get("model.config.model_type") or "")

    @property
    def mesh(self) -> dict[str, int]:
        """Size of each mesh dimension."""
        found = self.environment.get("mesh")
        return found if isinstance(found, dict) else {}

    @property
    def step(self) -> int:
        """Steps done, as far as a record or an event tells."""
        told = [event["step"] for event in self.of_kind("end") if isinstance(event.get("step"), int)]
        logged = [record["step"] for record in self.records[-1:]] + [start.step for start in self.starts[-1:]]
        return max([*logged, *told[-1:], 0])

    @property
    def total_steps(self) -> int | None:
        """Steps of the whole run; None under ``train.epochs`` where no event tells."""
        told = [event["total_steps"] for event in self.of_kind("data") if type(event.get("total_steps")) is int]
        return told[-1] if told else _steps_of(self.config)

    @property
    def planned(self) -> dict[str, float]:
        """GiB that were planned, by the keys of ``metrics.jsonl`` (``memory_gib``, ``memory_gib/backward``)."""
        plans = [plan["gib"] for plan in self.of_kind("plan") if isinstance(plan.get("gib"), dict)]
        return plans[-1] if plans else {}

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        """The events of a kind, by time."""
        return [event for event in self.events if event["event"] == kind]

    def latest(self, key: str) -> Any:
        """The newest value of a metric that is not null; None without one."""
        return next((record[key] for record in reversed(self.records) if record.get(key) is not None), None)


def read_run(path: str | Path, *, last_bytes: int | None = None) -> RunRecord:
    """Read a run directory, whatever state it is in; lines that are not complete are left out.

    Secrets that older versions wrote are left out as well, but for those in samples, which are data.

    Args:
        last_bytes: read no more than so many bytes from the end of ``metrics.jsonl``; None: all of it.

    Raises:
        UserError: this is no run directory, or it cannot be read.
    """
    directory = Path(path)
    if not is_run(directory):
        what = f"has no {METRICS} and no {EVENTS}" if directory.is_dir() else "is no directory"
        raise UserError(str(path), what, "name a run directory, such as runs/x")
    try:
        records = _by_step(read_lines(directory / METRICS, last_bytes=last_bytes))
        events = cleaned(_without_refused(_by_time(read_lines(directory / EVENTS))))
        samples = read_lines(directory / "samples.jsonl", last_bytes=_SAMPLE_BYTES)
        config = cleaned(_toml(directory / "config.toml"))
        environment = cleaned(_json(directory / "environment.json"))
        seen = _last_change(directory)
        starts = _starts(events, records)
        state, message = _state(directory, config, records, events, seen=seen)
        if state == "killed" and not records and starts and starts[-1].step:
            message = f"after step {starts[-1].step}"
    except OSError as error:
        why = error.strerror or str(error)
        raise UserError(str(error.filename or path), f"cannot be read ({why})", "see that you may read it") from None
    message = without_secrets(message)
    return RunRecord(directory, config, environment, records, events, samples, starts, state, message, seen)


def is_run(directory: Path) -> bool:
    """Whether this is a run directory."""
    return any(os.path.isfile(directory / name) for name in (METRICS, EVENTS)) or all(  # noqa: PTH113 (never raises)
        os.path.isfile(directory / name)  # noqa: PTH113
        for name in ("config.toml", "environment.json")
    )


def find_runs(folder: str | Path) -> list[Path]:
    """The run directories in a folder and the folders in it, or the folder itself if it is one; the newest first."""
    found = list(_find(Path(folder), _DEPTH))
    return sorted(found, key=lambda run: (-_last_change(run), str(run)))


def read_lines(path: Path, *, last_bytes: int | None = None) -> list[dict[str, Any]]:
    """The objects of a file with one a line, of the end of it if that is asked for; [] without a file.

    Lines that are no objects, such as one that was being written when the run was killed, are left out. NaN and
    Infinity are read. An integer of more than 64 bits becomes a float.

    Raises:
        OSError: it is no regular file, or it cannot be read.
    """
    try:
        with open_regular(path) as file:
            if last_bytes is not None and (size := file.seek(0, os.SEEK_END)) > last_bytes:
                file.seek(size - last_bytes - 1)
                file.readline()  # the line that the border cuts; all of it, if the border is its end
            else:
                file.seek(0)
            lines = file.read().split(b"\n")
    except FileNotFoundError:
        return []
    return [found for line in lines if (found := parse_line(line)) is not None]


def _find(folder: Path, depth: int) -> Iterator[Path]:
    if is_run(folder):
        yield folder
        return
    if depth:
        try:
            inside = [entry.path for entry in os.scandir(folder) if not entry.name.startswith(".") and entry.is_dir()]
        except OSError:  # not ours to read
            return
        for path in inside:
            yield from _find(Path(path), depth - 1)


def parse_line(text: bytes) -> dict[str, Any] | None:
    """The object in a line of JSON, as `read_lines` has it; None if there is none."""
    parse_integer = _integer if _LONG_INTEGER.search(text) else None
    try:
        found = json.loads(text, parse_int=parse_integer)
    except (ValueError, RecursionError):  # cut off, not JSON, or not UTF-8
        return None
    return found if isinstance(found, dict) else None


def _integer(digits: str) -> int | float:
    """An integer of 64 bits; a longer one as a float, which may be infinite: nobody counts so far."""
    return int(digits) if len(digits) < 19 else float(digits)


def _by_step(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One record a step, the one that was written last."""
    found = {record["step"]: record for record in records if type(record.get("step")) is int}
    return [found[step] for step in sorted(found)]


def _by_time(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(filter(_is_event, events), key=lambda event: event["time"])


def _without_refused(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The events of a run without those of refused starts, which changed nothing; all, if every start was refused."""
    refused = {event["start"] for event in events if event["event"] == "refusal"}
    return [event for event in events if event["start"] not in refused] or events


def _is_event(found: dict[str, Any]) -> bool:
    """Whether a line is an event as `fsdp2kit.job.events` writes it, and not damaged."""
    time, start = found.get("time"), found.get("start")
    is_time = isinstance(time, (int, float)) and 0 <= time < _LATEST
    return isinstance(found.get("event"), str) and is_time and type(start) is int


def _toml(path: Path) -> dict[str, Any]:
    try:
        return flat(tomli.loads(read_text(path)))
    except (FileNotFoundError, ValueError, RecursionError):  # not there, or not (yet) what it should be
        return {}


def _json(path: Path) -> dict[str, Any]:
    try:
        return parse_line(read_regular(path)) or {}
    except FileNotFoundError:
        return {}


def _last_change(directory: Path) -> float:
    """When a line was last written, or else when the directory was last changed."""
    times = []
    for name in (METRICS, EVENTS, "environment.json", "."):
        try:
            times.append((directory / name).stat().st_mtime)
        except OSError:
            continue
    return max(times[:-1] or times or [0.0])


def _starts(events: list[dict[str, Any]], records: list[dict[str, Any]]) -> list[Start]:
    """From the events; from the first record of each start for starts that have none."""
    found: dict[int, Start] = {}
    before = 0
    for record in records:
        if isinstance(number := record.get("start"), int):
            found[number] = Start(number, seconds_of(record.get("time")), before)
        before = record["step"]
    resumed = {event["start"]: event.get("step", 0) for event in events if event["event"] == "resume"}
    for event in events:
        if event["event"] == "start":
            number = event["start"]
            step, changed = resumed.get(number, 0), event.get("changed")
            pairs = changed.items() if isinstance(changed, dict) else ()
            changed = {key: pair for key, pair in pairs if isinstance(pair, list) and len(pair) == 2}
            found[number] = Start(number, event["time"], step, event.get("world_size"), changed)
    return [found[number] for number in sorted(found)]


def seconds_of(text: Any) -> float | None:
    """A record's ``time`` in unix seconds; None if it has none."""
    try:
        return datetime.fromisoformat(str(text).replace("Z", "+00:00")).timestamp()
    except (ValueError, OverflowError, OSError):  # no time, or one that the system cannot count
        return None


def _state(
    directory: Path,
    config: dict[str, Any],
    records: list[dict[str, Any]],
    events: list[dict[str, Any]],
    *,
    seen: float,
) -> tuple[State, str]:
    """What the run is doing, or how its last start ended, and a line about it."""
    locked = is_locked(directory / ".lock")
    step = records[-1]["step"] if records else 0
    if locked is True:
        return "running", ""
    newest = max((event["start"] for event in events), default=None)
    last = {event["event"]: event for event in events if event["start"] == newest}
    if failure := last.get("failure") or last.get("refusal"):
        others = cause_of_failure(directory / "errors") if failure.get("lost") else ""
        return "failed", others or str(failure.get("text", ""))
    if end := last.get("end"):
        reason = str(last["stop"].get("reason", "")) if "stop" in last else ""
        return ("stopped" if end.get("outcome") == "stopped" else "ended"), reason
    if locked is None and time.time() - seen < _SILENT_SECONDS:
        return "running", ""
    if cause := cause_of_failure(directory / "errors"):
        return "failed", cause
    if not events and (saved := _last_saved(directory)) is not None and saved >= step:
        # Before there were events; every run that ends by itself saves its last step.
        total = _steps_of(config)
        is_done = total is None or saved >= total
        return ("ended", "") if is_done else ("stopped", f"after step {saved}")
    return "killed", f"after step {step}" if step else "before its first step"


def _steps_of(config: dict[str, Any]) -> int | None:
    """``train.steps`` of a config; None without."""
    steps = config.get("train.steps")
    return steps if type(steps) is int else None


def _last_saved(directory: Path) -> int | None:
    """The step of the newest complete checkpoint."""
    manifests = (directory / "checkpoints").glob("step-*/manifest.json")
    steps = [int(digits) for path in manifests if (digits := path.parent.name.removeprefix("step-")).isdecimal()]
    return max(steps, default=None)
