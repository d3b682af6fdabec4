"""List runs: their steps, losses and speed, and whether they are running, ended, stopped, failed or killed.

fsdp2kit runs [runs] [--last 10] [--json]

It only reads, also beside runs that are going on, and imports no torch.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from fsdp2kit.console import in_one_line, positive, rich_console, show, user_path
from fsdp2kit.report.runs import rows_of, table_of


@in_one_line
def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code: 0, or 2 after a user's mistake."""
    parser = argparse.ArgumentParser(prog="fsdp2kit runs", description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=user_path, default=Path("runs"), metavar="DIR", help="default: runs")
    parser.add_argument("--last", type=positive, metavar="N", help="only the N runs that wrote a line last")
    parser.add_argument("--json", action="store_true", help="print a JSON array, the newest run first, instead")
    options = parser.parse_args(arguments)
    rows = rows_of(options.folder, last=options.last)
    if options.json:
        show(json.dumps([asdict(row) for row in rows], indent=2), is_data=True)
        return 0
    # A pipe has no width; rich would break lines at 80 columns.
    console = rich_console() if sys.stdout.isatty() else rich_console(width=200)
    console.print(table_of(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
