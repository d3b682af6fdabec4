"""What happened in a run, one object a line in ``events.jsonl``: starts, saves, warnings, how it ended. No torch here.

Each line has ``time`` (unix seconds), ``event`` (its kind), ``start`` (the number of the start, from 1), and what the
kind says. Lines are only added: also those of steps that a resumed run makes again stay.

| event | fields |
| --- | --- |
| `start` | `world_size`, `hosts`, `mesh`, `command`, `changed` in the config: ``{key: [old, new]}`` |
| `plan` | `gib`: what was planned, by the keys of ``metrics.jsonl``, such as ``memory_gib/backward`` |
| `data` | `total_steps`, and what `Data.statistics` tells |
| `resume` | `step`, where it goes on; a start without it began with step 0 |
| `warning` | `text`, `step` if one is being made: what rank 0 shows as a warning |
| `save` | `step`, `seconds`, `waited` (seconds that training stood still for it), `background`, `best`, `bytes` |
| `export` | `step`, `path`, `seconds` |
| `profile` | `step`, the first that was traced; `path` of its folder |
| `stop` | `reason`: it was asked to stop, or stopped early; `step`, unless it was asked before its first step |
| `end` | `outcome` ("done" or "stopped"); `step` and `seconds` since the start of the process if fsdp2kit's loop ran |
| `failure` | `text`, a line; `lost` if the cause is another rank |
| `refusal` | `text`, a line: a mistake of the user's that ended a start before its first step |
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fsdp2kit.files.local import load_json, open_own, open_regular
from fsdp2kit.job import status

logger = logging.getLogger(__name__)

_PACKAGE = __name__.partition(".")[0]
_MARK = "warning: "


def began(run_dir: Path) -> float | None:
    """Seconds since 1970 at which a run first started; None before its first start, or where that cannot be read."""
    try:
        with open_regular(run_dir / "events.jsonl") as file:
            return float(load_json(file.readline())["time"])
    except (OSError, ValueError, TypeError, KeyError, OverflowError):
        return None


class Events:
    """The events of one start of a run, kept until `open_in` and from then on written at once.

    Writing never fails the run: the first write that the disk refuses is a warning, later ones are silent. Any thread
    may record.

    Args:
        is_kept: False on all ranks but one, and where there is no run directory: nothing is kept.
        clean: is given each text in an event, and returns it as it may be written, without secrets.
    """

    def __init__(self, *, is_kept: bool = False, clean: Callable[[str], str] = str) -> None:
        self._clean = clean
        self.recorded: set[str] = set()
        """The kinds that were recorded."""
        self._waiting: list[dict[str, Any]] | None = [] if is_kept else None
        self._file: int | None = None
        self._start = 0
        self._lock = threading.RLock()
        self._is_torn = self._has_warned = False
        self._listener = _Listener(self) if is_kept else None
        if self._listener is not None:
            logging.getLogger(_PACKAGE).addHandler(self._listener)

    def open_in(self, run_dir: Path, *, start: int) -> None:
        """Write to ``events.jsonl`` in a run directory, first what has waited for it.

        Args:
            start: the number of this start, from 1.
        """
        path = run_dir / "events.jsonl"
        with self._lock:
            waiting, self._waiting, self._start = self._waiting or [], None, start
            try:
                self._file = open_own(path, os.O_RDWR | os.O_APPEND)
                size = os.fstat(self._file).st_size
                self._is_torn = size > 0 and os.pread(self._file, 1, size - 1) != b"\n"  # killed in mid-line
            except OSError as error:
                self._warn(error)
            for event in waiting:
                self._write(event)

    def record(self, kind: str, /, **fields: Any) -> None:
        """Record an event, now."""
        event = {"time": round(time.time(), 3), "event": kind, "start": self._start}
        event = {**event, **fields, **event}  # these three first, whatever the fields' names
        with self._lock:
            self.recorded.add(kind)
            if self._waiting is not None:
                self._waiting.append(event)
            elif self._file is not None:
                self._write(event)

    def hear(self, line: str) -> None:
        """Record a line of the console if it is a warning."""
        if line.startswith(_MARK):
            self._record_warning(line.removeprefix(_MARK))

    def close(self) -> None:
        """Record nothing from here on."""
        if self._listener is not None:
            logging.getLogger(_PACKAGE).removeHandler(self._listener)
        with self._lock:
            file, self._file, self._waiting = self._file, None, None
            if file is not None:
                os.close(file)

    def _record_warning(self, text: str) -> None:
        step = status.position().step
        self.record("warning", text=text, **({"step": step} if step else {}))

    def _write(self, event: Mapping[str, Any]) -> None:
        if self._file is None:
            return
        try:
            text = json.dumps(self._cleaned({**event, "start": self._start}), default=str)
            line = ("\n" * self._is_torn + text + "\n").encode()
            written = os.write(self._file, line)  # one call: a reader, or a kill, finds whole lines as a rule
            self._is_torn = written < len(line)
        except (OSError, ValueError, TypeError) as error:  # the disk, or fields that JSON does not have
            self._warn(error)

    def _cleaned(self, value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: self._cleaned(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._cleaned(item) for item in value]
        return self._clean(value) if isinstance(value, str) else value

    def _warn(self, error: Exception) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning("events.jsonl: not all of it can be written (%s); the run goes on", error)


class _Listener(logging.Handler):
    """Records what the package logs as a warning."""

    def __init__(self, events: Events) -> None:
        super().__init__(logging.WARNING)
        self._events = events

    def emit(self, record: logging.LogRecord) -> None:
        self._events._record_warning(record.getMessage())
        # Python prints warnings only where there is no handler at all, and this one is none of the user's.
        others = [*logging.getLogger().handlers, *logging.getLogger(_PACKAGE).handlers]
        if all(isinstance(handler, _Listener) for handler in others) and logging.lastResort is not None:
            logging.lastResort.handle(record)


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables by dotted key: ``{"train": {"steps": 3}}`` → ``{"train.steps": 3}``."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return found


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, list[Any]]:
    """What differs between two flat configs: ``{key: [before, now]}``, None where a key is not set."""
    names = dict.fromkeys([*now, *before])
    return {name: [before.get(name), now.get(name)] for name in names if before.get(name) != now.get(name)}
