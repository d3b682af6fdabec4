"""Everything that a page shows, as JSON: runs with their curves, the sections of charts, tables, samples, warnings."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from typing import Any

from fsdp2kit.report.charts import sections_for
from fsdp2kit.report.curves import MOST_POINTS, PAGE_POINTS, MetricColumns, differences, short, thinned
from fsdp2kit.report.ends import ends_of
from fsdp2kit.report.read import RunRecord
from fsdp2kit.report.tables import change_table, config_tables, environment_tables, key_table

_MOST_ROWS = 200
"""Warnings, samples and saves of a run on a page: the newest."""
_LONGEST_TEXT = 4000


def build_payload(
    runs: Sequence[RunRecord], columns: Sequence[MetricColumns] | None = None, *, after: Sequence[int] | None = None
) -> dict[str, Any]:
    """What the page's script draws.

    Args:
        columns: the curves of each run; None: those of its ``records``.
        after: curves begin after this step of each run, and are whole; None: they are all there, thinned.
    """
    if columns is None:
        columns = [MetricColumns() for _ in runs]
        for one, run in zip(columns, runs, strict=True):
            one.add(run.records)
    names = labels([run.directory for run in runs])
    keys = {key for one in columns for key in one.values}
    planned = {key for run in runs for key in run.planned}
    sections = sections_for(keys, planned, splits=len(runs) > 1)
    shown = {line["key"] for section in sections for chart in section["charts"] for line in chart["lines"]}
    count = sum(len(shown & one.values.keys()) for one in columns)
    most = max(300, min(MOST_POINTS, PAGE_POINTS // max(1, count)))
    begins = after or [0] * len(runs)
    return {
        "written": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "is_whole": after is None,
        "runs": [
            {**_head(run, one, name), **_curves(one, begin, keys=shown, most=most)}
            for run, one, name, begin in zip(runs, columns, names, begins, strict=True)
        ],
        "sections": sections,
        "tables": _tables(runs, names),
    }


def labels(directories: Sequence[Path]) -> list[str]:
    """The shortest ends of paths that tell the directories apart."""
    parts = [directory.absolute().parts for directory in directories]
    for length in range(1, max(map(len, parts), default=0)):
        names = ["/".join(one[-length:]) for one in parts]
        if len(set(names)) == len(names):
            return names
    return [str(directory) for directory in directories]


def _curves(columns: MetricColumns, after: int, *, keys: Collection[str], most: int) -> dict[str, Any]:
    """Curves by metric after a step; steps that several of them share are written once, in ``xs``."""
    xs: dict[tuple[int, ...], int] = {}

    def shared(steps: list[int]) -> int:
        return xs.setdefault(tuple(steps), len(xs))

    curves = {}
    for key, (steps, values) in columns.values.items():
        first = bisect_right(steps, after)
        if key in keys and first < len(steps):
            curve = thinned(steps[first:], values[first:], most=most)
            curves[key] = {name: shared(list_) if name.endswith("x") else list_ for name, list_ in curve.items()}
    first = bisect_right(columns.steps, after)
    end = len(columns.steps)
    rows = [*range(first, end - 1, max(1, (end - first) // most)), *range(end - 1, end)][: end - first]
    axes = {
        "step": differences([columns.steps[row] for row in rows]),
        "tokens": differences([columns.tokens[row] for row in rows]),
        "hours": [round(columns.hours[row], 5) for row in rows],
    }
    return {"axes": axes, "curves": curves, "xs": [list(steps) for steps in xs]}


def _head(run: RunRecord, columns: MetricColumns, name: str) -> dict[str, Any]:
    """What the page's top says of a run, and its marks."""
    saves = [event for event in run.of_kind("save") if isinstance(event.get("step"), int)]
    starts = sorted({start.step for start in run.starts[1:]})
    return {
        "name": name,
        "directory": str(run.directory),
        "recipe": run.recipe,
        "model": run.model,
        "state": run.state,
        "message": run.message,
        "step": columns.steps[-1] if columns.steps else run.step,
        "total_steps": run.total_steps,
        "figures": _figures(columns, saves),
        "plan": {key: short([gib])[0] for key, gib in run.planned.items() if isinstance(gib, (int, float))},
        "starts": starts,
        "saves": sorted({save["step"] for save in saves}),
        "warnings": [
            {"step": event.get("step"), "text": _cut(event.get("text"))}
            for event in run.of_kind("warning")[-_MOST_ROWS:]
        ],
        "samples": _samples(run),
    }


def _figures(columns: MetricColumns, saves: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    """Label, value and form of the numbers that are looked at first."""

    def of(key: str, reduce: Any) -> float | None:
        return reduce(columns.values[key][1]) if key in columns.values else None

    waited = sum(save["waited"] for save in saves if isinstance(save.get("waited"), (int, float)))
    rows = [
        ("loss", columns.latest("loss"), ""),
        ("held-out loss", columns.latest("eval_loss"), ""),
        ("lowest", of("eval_loss", min), ""),
        ("reward", columns.latest("reward"), ""),
        ("held-out reward", columns.latest("eval_reward"), ""),
        ("accuracy", columns.latest("accuracy"), "share"),
        ("tokens/s (median)", of("tokens_per_second", median), "count"),
        ("MFU (median)", of("mfu", median), "share"),
        ("step (median)", of("step_seconds", median), "seconds"),
        ("peak memory", of("memory_gib", max), "GiB"),
        ("tokens", columns.tokens[-1] if columns.tokens else None, "count"),
        ("epochs", columns.latest("epoch"), ""),
        ("to the first step", columns.latest("seconds_to_first_step"), "seconds"),
        ("of that, compiling", columns.latest("compile_seconds"), "seconds"),
        ("worked", columns.hours[-1] * 3600 if columns.hours else None, "seconds"),
        ("waited for saves", waited if saves else None, "seconds"),
    ]
    return [[label, short([value])[0], form] for label, value, form in rows if value is not None]


def _samples(run: RunRecord) -> list[dict[str, Any]]:
    found = []
    for event in run.samples[-_MOST_ROWS:]:
        prompt = event.get("prompt")
        if isinstance(prompt, list):
            messages = [one for one in prompt if isinstance(one, Mapping)]
            prompt = "\n".join(f"{one.get('role')}: {one.get('content')}" for one in messages)
        known = ("time", "event", "start", "step", "prompt", "answer")
        also = {name: _cut(value) for name, value in event.items() if name not in known}
        step = event.get("step")
        found.append({"step": step, "prompt": _cut(prompt), "answer": _cut(event.get("answer")), "also": also})
    return found


def _tables(runs: Sequence[RunRecord], names: Sequence[str]) -> list[dict[str, Any]]:
    found = [_starts_table(run, name, several=len(runs) > 1) for run, name in zip(runs, names, strict=True)]
    found += [_saves_table(run, name, several=len(runs) > 1) for run, name in zip(runs, names, strict=True)]
    found.append(key_table("Data", names, [_data(run) for run in runs]))
    found += config_tables(names, [run.config for run in runs])
    found += environment_tables(names, [run.environment for run in runs])
    return [table for table in found if table["rows"]]


def _data(run: RunRecord) -> dict[str, Any]:
    event = (run.of_kind("data") or [{}])[-1]
    return {key: value for key, value in event.items() if key not in ("time", "event", "start")}


def _starts_table(run: RunRecord, name: str, *, several: bool) -> dict[str, Any]:
    return change_table(run.starts, ends_of(run), title="Starts" + f" of {name}" * several)


def _saves_table(run: RunRecord, name: str, *, several: bool) -> dict[str, Any]:
    saves = run.of_kind("save")[-_MOST_ROWS:]
    rows = []
    for event in saves:
        size = event.get("bytes")
        large = isinstance(size, (int, float)) and size >= 1e9
        size = (
            "" if not isinstance(size, (int, float)) else f"{size / 1e9:.3g} GB" if large else f"{size / 1e6:.3g} MB"
        )
        kind = ", ".join(word for word in ("background", "best") if event.get(word))
        rows.append([event.get("step"), _of(event, "seconds"), _of(event, "waited"), size, kind])
    for event in run.of_kind("export"):
        rows.append([event.get("step"), _of(event, "seconds"), "", "", f"export to {event.get('path', '')}"])
    for event in run.of_kind("profile"):
        rows.append([event.get("step"), "", "", "", f"profile in {event.get('path', '')}"])
    rows.sort(key=lambda row: row[0] if isinstance(row[0], int) else 0)
    head = ["step", "seconds", "training waited, s", "size", ""]
    return {"title": "Saves" + f" of {name}" * several, "head": head, "rows": rows, "is_open": len(rows) <= 12}


def _of(event: Mapping[str, Any], key: str) -> Any:
    value = event.get(key)
    return float(f"{value:.3g}") if isinstance(value, (int, float)) else ""


def _cut(value: Any) -> str:
    text = value if isinstance(value, str) else "" if value is None else json.dumps(value, default=str)
    return text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]}…"
