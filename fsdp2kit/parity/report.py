"""The table that the gate prints."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.table import Table

from fsdp2kit.parity.check import COMPARED, Row

_STYLES = {"ok": "green", "miss": "bold red", "refused": "yellow"}


def print_table(rows: list[Row]) -> None:
    """Print every variant with its relative differences, in units that its bounds put them in, and a summary."""
    table = Table(title="Parity with one process of plain transformers (relative differences)")
    for name in ("dp", "cp", "method", "micro", "strategy", "checkpointing", "dtype", *COMPARED, "verdict"):
        table.add_column(name, justify="right" if name in COMPARED else "left", no_wrap=True)
    for row in rows:
        numbers = [_cell(row, name) for name in COMPARED]
        verdict = f"[{_STYLES[row.verdict]}]{row.verdict}[/]"
        table.add_row(*(str(value) for value in row.variant.as_row().values()), *numbers, verdict)
    console = Console(width=None if sys.stdout.isatty() else 180)
    console.print(table)
    for row in rows:
        if row.note:
            words = ", ".join(str(value) for value in row.variant.as_row().values())
            console.print(f"[{_STYLES[row.verdict]}]{row.verdict}[/] {words}: {row.note}", highlight=False)
    counts = {verdict: sum(row.verdict == verdict for row in rows) for verdict in _STYLES}
    console.print(", ".join(f"{count} {verdict}" for verdict, count in counts.items()), highlight=False)


def _cell(row: Row, name: str) -> str:
    if name not in row.differences:
        return ""
    difference, bound = row.differences[name], row.bounds[name]
    style = "" if difference <= bound else "[bold red]"
    return f"{style}{difference:.1e}{'[/]' if style else ''} ≤ {bound:.0e}"
