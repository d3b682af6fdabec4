"""The metrics of a run as curves: `MetricColumns` collects records, `thinned` makes a long curve short."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from fsdp2kit.report.read import seconds_of

MOST_POINTS = 4000
"""Points of one curve of a page."""
PAGE_POINTS = 190_000
"""Points of all curves of a page, which keep it below 3 MB."""
_NOT_CURVES = ("step", "time", "start", "tokens_total", "slowest_rank")


class MetricColumns:
    """A run's records by metric. Records are added in the order of their steps, all at once or as they come."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.tokens: list[int] = []
        """Supervised tokens so far, by record."""
        self.hours: list[float] = []
        """Hours that the run has worked, by record: what passes between a stop and the next start is left out."""
        self.values: dict[str, tuple[list[int], list[float]]] = {}
        """Steps and values of each metric, where it has a finite one."""
        self._time: float | None = None

    def add(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Append records; one whose step is not after those before it is left out."""
        for record in records:
            step = record.get("step")
            if type(step) is not int or (self.steps and step <= self.steps[-1]):
                continue
            self._add_time(record)
            self.steps.append(step)
            total = record.get("tokens_total")
            self.tokens.append(total if isinstance(total, int) else self.tokens[-1] if self.tokens else 0)
            left_out = {*_NOT_CURVES, "eval_loss"} if "eval_reward" in record else _NOT_CURVES  # it is −eval_reward
            for key, value in {**record, **_step_split(record)}.items():
                is_number = type(value) in (int, float) and math.isfinite(value)
                if key in left_out or not is_number:
                    continue
                steps, values = self.values.setdefault(key, ([], []))
                steps.append(step)
                values.append(value)

    def latest(self, key: str) -> float | None:
        """The newest value of a metric; None without one."""
        return self.values[key][1][-1] if key in self.values else None

    def _add_time(self, record: Mapping[str, Any]) -> None:
        begins = isinstance(record.get("start"), int)
        now = seconds_of(record.get("time"))
        passed = _number(record.get("step_seconds"))
        if begins:
            passed = _number(record.get("seconds_to_first_step")) or passed
        if now is not None and self._time is not None and now >= self._time:
            passed = min(now - self._time, passed) if begins else now - self._time
        self._time = now
        self.hours.append((self.hours[-1] if self.hours else 0.0) + passed / 3600)


def thinned(steps: list[int], values: list[float], *, most: int) -> dict[str, Any]:
    """A curve of at most ``most`` numbers, as JSON: steps ``x`` and values ``y``.

    A longer curve keeps the smallest and the largest value of each of its parts, and its first and last point. It has
    also ``mx`` and ``my``, the mean of each part.
    """
    if len(steps) <= most:
        return {"x": differences(steps), "y": short(values)}
    parts = max(1, most // 3)
    borders = np.linspace(1, len(steps) - 1, parts + 1).astype(int)  # the first and the last point stay as they are
    x = np.asarray(steps)
    y = np.asarray(values, dtype=np.float64)
    keep = {0, len(steps) - 1}
    for begin, end in itertools.pairwise(borders.tolist()):
        part = y[begin:end]
        keep |= {int(begin + part.argmin()), int(begin + part.argmax())}
    kept = sorted(keep)
    counts = np.diff(borders)
    means = np.add.reduceat(y, borders[:-1])
    means[-1] -= y[-1]  # reduceat's last part runs to the end
    middles = x[borders[:-1] + counts // 2]
    return {
        "x": differences(x[kept].tolist()),
        "y": short(y[kept].tolist()),
        "mx": differences(middles.tolist()),
        "my": short((means / counts).tolist()),
    }


def differences(steps: list[int]) -> list[int]:
    """The first number, and how much larger each one is than the one before: shorter than the numbers."""
    return [now - before for before, now in zip([0, *steps], steps, strict=False)]


def short(values: Iterable[float]) -> list[float]:
    """Numbers with five significant digits."""
    return [value if type(value) is int else float(f"{value:.5g}") for value in values]


def _step_split(record: Mapping[str, Any]) -> dict[str, float]:
    """``split/…``: seconds of a step in which ranks wait for data, compute, exchange, and wait for the slowest one.

    Compute and exchange are those of the slowest rank, which waits for none. The others wait as long as it works more
    than their median does. Records without a look at the ranks have none but ``split/data``.
    """
    seconds = record.get("step_seconds")
    data = record.get("data_seconds")
    found: dict[str, float] = {}
    if isinstance(data, (int, float)):
        found["split/data"] = data
    shares = [record.get(f"slowest_rank/{name}") for name in ("data", "compute", "waiting")]
    ratio = record.get("straggler_ratio")
    if isinstance(seconds, (int, float)) and all(isinstance(share, (int, float)) for share in shares):
        own_data, compute, waiting = (float(share) for share in shares if share is not None)
        found |= {"split/compute": compute * seconds, "split/exchange": waiting * seconds}
        if isinstance(ratio, (int, float)) and ratio > 0:
            found["split/others_wait"] = max(0.0, (own_data + compute) * seconds * (1 - 1 / ratio))
    return found


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else 0.0
