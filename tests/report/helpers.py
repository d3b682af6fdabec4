"""Run directories for tests of the report: records as a run writes them, without a run."""

from __future__ import annotations

import json
import math
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

EVIL = "</script><img src=x onerror=\"document.title='owned'\"><!--&amp;\u2028"


def record(step: int, *, start: int | None = None, lr: float = 1e-3, tokens: int = 500, **more: Any) -> dict[str, Any]:
    """One line of metrics.jsonl."""
    loss = 1 + 6 * math.exp(-step / 300) + 0.1 * math.sin(step * 1.7)
    seconds = step * 2 + (0 if start is None or start == 1 else 36_000)
    written = datetime(2026, 11, 25, 10, tzinfo=timezone.utc) + timedelta(seconds=seconds)
    found = {
        "step": step, "epoch": step / 100, "loss": loss, "grad_norm": 2 / (1 + step / 50), "lr": lr, "tokens": tokens,
        "input_tokens": 4 * tokens, "packing_efficiency": 0.95, "tokens_total": tokens * step,
        "tokens_per_second": 2000.0 + step % 7, "supervised_tokens_per_second": 500.0 + step % 5,
        "tflops_per_device": 0.5, "mfu": 0.4 + step % 3 / 100, "memory_gib": 10.5, "memory_gib/forward": 9.0,
        "memory_gib/backward": 10.5, "memory_gib/optimizer": 8.0, "step_seconds": 2.0, "data_seconds": 0.01,
        "slowest_rank": 1, "straggler_ratio": 1.25, "slowest_rank/data": 0.005, "slowest_rank/compute": 0.8,
        "slowest_rank/waiting": 0.195, "time": written.isoformat(),
    }  # fmt: skip
    if start is not None:
        found |= {"start": start, "seconds_to_first_step": 30.0}
    return {**found, **more}


def write_run(
    directory: Path,
    *,
    steps: int = 50,
    evaluates: int = 10,
    config: str = "[train]\nsteps = 50\n",
    events: list[dict[str, Any]] | None = None,
    also: dict[str, float] | None = None,
    **options: Any,
) -> Path:
    """A run directory with so many logged steps.

    Args:
        evaluates: an ``eval_loss`` every so many steps; 0: never.
        also: further metrics of every record.
    """
    directory.mkdir(parents=True)
    with (directory / "metrics.jsonl").open("w", encoding="utf-8") as file:
        for step in range(1, steps + 1):
            found = record(step, start=1 if step == 1 else None, **{**(also or {}), **options})
            if evaluates and step % evaluates == 0:
                found["eval_loss"] = found["loss"] + 0.2
            file.write(json.dumps(found) + "\n")
    (directory / "config.toml").write_text(f'recipe = "sft"\n{config}', encoding="utf-8")
    environment = {
        "versions": {"torch": "2.13"},
        "mesh": {"cp": 1},
        "dtype_ledger": {"storage": "float32"},
        "start": 1,
    }
    (directory / "environment.json").write_text(json.dumps(environment), encoding="utf-8")
    if events is not None:
        lines = [
            json.dumps({"time": 1.76e9 + place, "start": 1, **event}) + "\n" for place, event in enumerate(events)
        ]
        (directory / "events.jsonl").write_text("".join(lines), encoding="utf-8")
        sample = {"step": 20, "prompt": "What is 2 + 2?", "answer": f"4 {EVIL}", "reward": 1.0}
        (directory / "samples.jsonl").write_text(json.dumps(sample) + "\n", encoding="utf-8")
    return directory


EVENTS: list[dict[str, Any]] = [
    {"event": "start", "world_size": 8, "changed": {}},
    {"event": "plan", "gib": {"memory_gib": 11.0, "memory_gib/forward": 9.1, "memory_gib/backward": 11.0}},
    {"event": "data", "total_steps": 50, "rows": 1200, "sources": {"chat": 800}},
    {"event": "warning", "text": f"a row was cut {EVIL}", "step": 3},
    {"event": "warning", "text": f"a row was cut {EVIL}", "step": 7},
    {"event": "save", "step": 20, "seconds": 3.5, "waited": 0.25, "bytes": 4_000_000_000, "background": True},
    {"event": "stop", "step": 20, "reason": "SIGTERM"},
    {"event": "end", "step": 20, "outcome": "stopped", "seconds": 90.0},
    {"event": "start", "start": 2, "world_size": 4, "changed": {"optimizer.lr": [0.001, 0.0005]}},
    {"event": "resume", "start": 2, "step": 20},
    {"event": "end", "start": 2, "step": 50, "outcome": "done", "seconds": 90.0},
]
"""A run that was stopped at step 20 and resumed with another rate; texts try to leave their place in the page."""


def write(folder: Path, **files: str) -> Path:
    """Files of a run directory: ``metrics``, ``events``, ``config``, ``environment``, ``lock``."""
    names = {"metrics": "metrics.jsonl", "events": "events.jsonl", "config": "config.toml"}
    names |= {"environment": "environment.json", "lock": ".lock"}
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / names[name]).write_text(text)
    return folder


def event(time: float, kind: str, start: int = 1, **fields: Any) -> str:
    return json.dumps({"time": time, "event": kind, "start": start, **fields}) + "\n"


def traceback(line: str) -> str:
    return f'Traceback (most recent call last):\n  File "x.py", line 1, in main\n    fail()\n{line}\nmore of it'
