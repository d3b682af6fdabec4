"""The cause of a failure, in a line, from the tracebacks that the ranks of a run left in ``errors/``."""

from __future__ import annotations

import math
import os
import re
from datetime import datetime
from pathlib import Path

from fsdp2kit.files.local import open_regular

# As `fsdp2kit.job.tracebacks` begins each entry.
_HEADER = re.compile(r"^(?P<time>\d{4}-\d\d-\d\dT\S+) rank (?P<rank>\d+) on .+, .+$", re.MULTILINE)
# Entries of ranks that have not failed themselves: where they stood, or that they have lost another one.
_WAITING = ("It was here at the warning", "It waited here")
_AGREED = "error: "  # the line about the cause that the ranks agreed on
_LOST = re.compile(r"gloo/transport|Dist(Backend|Network|Store)Error|^RunFailure: rank \d+ failed")
_LARGEST = 1 << 20  # bytes of each file that are read, from its end


def cause_of_failure(errors: Path, *, since: float = 0.0, until: float = math.inf) -> str:
    """The line that the ranks agreed on, or the first error that is not the loss of another rank; "" without one.

    An error is named with its rank: ``rank 1: ValueError: …``.

    Args:
        since, until: unix seconds, between which it was written.
    """
    found = []
    for path in sorted(errors.glob("rank-*.txt")):
        try:
            with open_regular(path) as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - _LARGEST))
                text = file.read().decode("utf-8", errors="replace")
        except OSError:  # a pipe, say, that is none of the run's files
            continue
        headers = list(_HEADER.finditer(text))
        for header, after in zip(headers, [*headers[1:], None], strict=True):
            if not int(since) <= _seconds(header["time"]) < until:  # times there are whole seconds, cut off
                continue
            entry = text[header.end() : after.start() if after else None].strip()
            if entry.startswith(_AGREED):
                return entry.removeprefix(_AGREED).partition("\n")[0]
            line = _last_error(entry)
            if line and not entry.startswith(_WAITING):
                found.append((bool(_LOST.search(line)), header["time"], int(header["rank"]), line))
    _, _, rank, line = min(found, default=(False, "", 0, ""))
    return f"rank {rank}: {line}" if line else ""


def _seconds(time: str) -> float:
    """Unix seconds of an ISO time; 0 for what is none."""
    try:
        return datetime.fromisoformat(time).timestamp()
    except ValueError:
        return 0.0


def _last_error(entry: str) -> str:
    """The first line of the last exception of a traceback, without its module."""
    _, marker, tail = entry.rpartition("Traceback (most recent call last)")
    lines = [line for line in tail.splitlines()[1:] if line and not line[0].isspace()]
    if not marker or not lines:
        return ""
    kind, colon, what = lines[0].partition(":")
    return f"{kind.rpartition('.')[2]}{colon}{what}"
