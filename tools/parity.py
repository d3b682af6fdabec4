"""Does your TOML train on these ranks as plain transformers does in one process?

torchrun --nproc-per-node 4 -m fsdp2kit parity toml/x.toml [section.key=value ...] [--full] [--json]

A scaled-down copy of the TOML's model (`--full`: the model itself) trains five steps on packed synthetic rows, for
every pair of: dp × cp, context-parallel method, micro-batch size, sharding strategy, activation checkpointing. Loss,
gradient norm, every parameter's gradient and a packed document's logits are compared with a plain loop. The exit code
is 1 after a miss, or if everything is refused.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.table import Table

# Set before transformers is imported: nothing here waits for a hub, or draws progress bars.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

from fsdp2kit.console import begin_output, rich_console, show
from fsdp2kit.errors import UserError
from fsdp2kit.job.distributed import end_process
from fsdp2kit.run import load_and_start, parse_with_overrides

if TYPE_CHECKING:
    from fsdp2kit.parity.check import Row

STYLES = {"ok": "green", "miss": "bold red", "refused": "yellow"}


def main(arguments: list[str] | None = None) -> int:
    """Compare, print the table, and return the exit code: 0, 1 after a miss, 2 after a user's mistake."""
    begin_output()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("toml", help="the run to compare")
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    parser.add_argument("--full", action="store_true", help="the model and sequence length as they are")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parse_with_overrides(parser, arguments)

    from fsdp2kit.job import distributed
    from fsdp2kit.parity.check import check_parity

    try:
        _, config, world = load_and_start(options.toml, options.overrides)
        rows = check_parity(config, world=world, full=options.full)
    except UserError as problem:
        distributed.leave(problem)
    if world.is_main:
        if options.json:
            show(json.dumps([columns(row) for row in rows]), is_data=True)
        else:
            print_table(rows)
    distributed.stop()
    verdicts = {row.verdict for row in rows}
    return 1 if "miss" in verdicts or "ok" not in verdicts else 0


def columns(row: Row) -> dict[str, Any]:
    """A variant's row as plain values, the variant's fields first."""
    fields = asdict(row)
    return {**fields.pop("variant"), **fields}


def print_table(rows: list[Row]) -> None:
    """Print every variant with its relative differences and their bounds, then the notes and a summary."""
    from fsdp2kit.parity.check import COMPARED

    table = Table(title="Parity with one process of plain transformers (relative differences)")
    for name in ("dp", "cp", "method", "micro", "strategy", "checkpointing", "dtype", *COMPARED, "verdict"):
        table.add_column(name, justify="right" if name in COMPARED else "left", no_wrap=True)
    notes = []
    for row in rows:
        variant = [str(value) for value in asdict(row.variant).values()]
        verdict = f"[{STYLES[row.verdict]}]{row.verdict}[/]"
        table.add_row(*variant, *(_cell(row, name) for name in COMPARED), verdict)
        if row.note:
            notes.append(f"{verdict} {', '.join(variant)}: {escape(row.note)}")
    console = rich_console(width=None if sys.stdout.isatty() else 180)
    console.print(table)
    counts = [f"{sum(row.verdict == verdict for row in rows)} {verdict}" for verdict in STYLES]
    for line in (*notes, ", ".join(counts)):
        console.print(line, highlight=False)


def _cell(row: Row, name: str) -> str:
    if name not in row.differences:
        return ""
    difference, bound = row.differences[name], row.bounds[name]
    number = f"{difference:.1e}" if difference <= bound else f"[bold red]{difference:.1e}[/]"
    return f"{number} ≤ {bound:.0e}"


if __name__ == "__main__":
    end_process(main())
