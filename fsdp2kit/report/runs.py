"""The runs of a folder side by side: `rows_of` reads them, `table_of` shows them."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdp2kit.console import visible
from fsdp2kit.errors import UserError
from fsdp2kit.report.read import RunRecord, find_runs, read_run

if TYPE_CHECKING:
    from rich.table import Table

_LAST_BYTES = 1 << 20  # of metrics.jsonl: about a thousand records, where the last evaluation is
_STYLES = {"running": "green", "failed": "red", "killed": "red", "unreadable": "red", "stopped": "yellow"}


@dataclass(frozen=True)
class RunRow:
    """A run in a line; None where it does not tell."""

    name: str
    """Its path within the folder."""
    recipe: str
    model: str
    mesh: dict[str, int]
    world_size: int | None
    step: int
    total_steps: int | None
    loss: float | None
    eval_loss: float | None
    tokens_per_second: float | None
    state: str
    """As `RunRecord.state`, or "unreadable"."""
    message: str
    seen: float | None
    """When it last wrote a line, in unix seconds."""


def rows_of(folder: str | Path, *, last: int | None = None) -> list[RunRow]:
    """A row for each run in a folder, the newest first.

    Args:
        last: read no more than so many, the newest; None: all.

    Raises:
        UserError: there is none.
    """
    folder = Path(folder)
    found = find_runs(folder)
    if not found:
        what = "has no runs in it" if folder.is_dir() else "is no directory"
        raise UserError(str(folder), what, "name a directory with run directories: fsdp2kit runs DIR")
    return [_row(path, folder) for path in found[:last]]


def table_of(rows: list[RunRow]) -> Table:
    """The rows as a table for rich."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("run", "recipe", "model", "mesh"):
        table.add_column(name, overflow="fold")
    for name in ("step", "loss", "eval_loss", "tokens/s", "seen"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("state", overflow="fold")
    for row in rows:
        state = Text(row.state, style=_STYLES.get(row.state, ""))
        if row.message:
            state.append(visible(f": {row.message}"))
        cells = [row.name, row.recipe, _short(row.model), _mesh(row), _steps(row)]
        cells += [_number(row.loss, ".4f"), _number(row.eval_loss, ".4f"), _number(row.tokens_per_second, ",.0f")]
        shown = [Text(visible(cell)) for cell in cells]
        table.add_row(*shown, Text(_ago(row.seen)), state)
    return table


def _row(path: Path, folder: Path) -> RunRow:
    name = path.name if path == folder else str(path.relative_to(folder))
    try:
        run = read_run(path, last_bytes=_LAST_BYTES)
    except UserError as problem:
        return RunRow(name, "", "", {}, None, 0, None, None, None, None, "unreadable", problem.what, None)
    return RunRow(
        name=name,
        recipe=run.recipe,
        model=run.model,
        mesh=run.mesh,
        world_size=_world_size(run),
        step=run.step,
        total_steps=run.total_steps,
        loss=_figure(run, "loss"),
        eval_loss=_figure(run, "eval_loss"),
        tokens_per_second=_figure(run, "tokens_per_second"),
        state=run.state,
        message=run.message,
        seen=run.seen,
    )


def _world_size(run: RunRecord) -> int | None:
    size = run.environment.get("world_size")
    return size if isinstance(size, int) else None


def _short(model: str) -> str:
    """The last part of a path; a hub id as it is."""
    return Path(model).name if model.startswith(("/", "~", ".")) else model


def _mesh(row: RunRow) -> str:
    """The dimensions that are not 1: ``dp_shard 4 cp 2``; else the number of ranks."""
    parts = [f"{name} {size}" for name, size in row.mesh.items() if size != 1]
    return " ".join(parts) or (f"{row.world_size} rank" if row.world_size == 1 else "")


def _steps(row: RunRow) -> str:
    # A run that is resumed with fewer steps than it has made is over.
    total = "?" if row.total_steps is None else max(row.step, row.total_steps)
    return f"{row.step}/{total}"


def _figure(run: RunRecord, key: str) -> float | None:
    """The newest value of a metric, if it is a number that JSON has."""
    value: Any = run.latest(key)
    return value if isinstance(value, (int, float)) and math.isfinite(value) else None


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _ago(seen: float | None) -> str:
    """How long ago: ``12 s``, ``3 min``, ``2 h``, ``5 d``."""
    if not seen:
        return ""
    seconds = max(0.0, time.time() - seen)
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds // size:.0f} {unit}"
    return f"{seconds:.0f} s"
