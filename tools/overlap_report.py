"""Report how much communication is exposed in the traces of a run, and what to try next.

fsdp2kit overlap-report runs/x/trace [--png FILE [--step N]] [--units 10] [--json]
"""

from __future__ import annotations

import argparse
import json
import sys

from fsdp2kit.console import in_one_line, rich_console, show, user_path
from fsdp2kit.errors import UserError, pip_install


@in_one_line
def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code: 0, or 2 after a user's mistake."""
    parser = argparse.ArgumentParser(prog="overlap_report", description=__doc__.splitlines()[0])
    parser.add_argument("path", type=user_path, help="a run directory, its trace directory, or one rank's trace")
    parser.add_argument(
        "--png", type=user_path, metavar="FILE", help=f"draw a timeline as well ({pip_install('matplotlib')})"
    )
    parser.add_argument("--step", type=int, metavar="N", help="the step that --png draws (the first complete one)")
    parser.add_argument("--units", type=int, default=10, metavar="N", help="units that are named (10)")
    parser.add_argument("--json", action="store_true", help="print everything as one JSON object instead")
    options = parser.parse_args(arguments)
    from fsdp2kit.overlap.display import draw_timeline, renderables
    from fsdp2kit.overlap.report import build_report
    from fsdp2kit.overlap.trace import read_traces

    if options.units < 0:
        raise UserError("--units", f"{options.units} is negative", "give 0 or more")
    if options.step is not None and options.png is None:
        what = "says which step --png draws, and there is no --png"
        raise UserError("--step", what, "give --png FILE, or leave it out")
    traces = read_traces(options.path)
    report = build_report(options.path, traces)
    if options.png is not None:
        numbers = [step.number for step in report.steps]
        complete = [step.number for step in report.steps if step.is_complete]
        step = options.step if options.step is not None else (complete or numbers)[0]
        if step not in numbers:
            raise UserError("--step", f"{step} was not traced", f"one of {', '.join(map(str, numbers))}")
        draw_timeline(traces, step=step, out=options.png, title=f"{options.path} · step {step}")
    if options.json:
        show(json.dumps(report.as_json()), is_data=True)
        return 0
    console = rich_console(width=None if sys.stdout.isatty() else 120)
    for part in renderables(report, most_units=options.units):
        console.print(part)
    if options.png is not None:
        show(f"wrote {options.png}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
