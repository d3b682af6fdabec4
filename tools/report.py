"""One HTML page of a run, or of several over each other: curves, speed, memory, saves, configs, samples.

fsdp2kit report runs/x [runs/y ...] [--out page.html] [--png curves.png]
fsdp2kit report runs/x --follow [--port 8700]
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path

from fsdp2kit.console import in_one_line, show, user_path
from fsdp2kit.errors import UserError, pip_install
from fsdp2kit.report.page import build_page, write_page
from fsdp2kit.report.picture import write_picture
from fsdp2kit.report.read import read_run
from fsdp2kit.report.serve import PORT, build_server


@in_one_line
def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code: 0, or 2 after a user's mistake."""
    parser = argparse.ArgumentParser(prog="fsdp2kit report", description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=user_path, metavar="RUN", help="a run directory")
    parser.add_argument(
        "--out", type=user_path, metavar="FILE", help="the page (report.html, of a single run in its directory)"
    )
    parser.add_argument("--force", action="store_true", help="replace FILE, whatever it is")
    parser.add_argument(
        "--png", type=user_path, metavar="FILE", help=f"the four main curves as well ({pip_install('matplotlib')})"
    )
    parser.add_argument("--follow", action="store_true", help="serve the page on 127.0.0.1 and show new steps")
    parser.add_argument("--port", type=int, metavar="N", help=f"of --follow ({PORT}); 0: any that is free")
    options = parser.parse_args(arguments)
    runs = list(dict.fromkeys(options.runs))
    if options.follow:
        if options.out or options.png or options.force:
            raise UserError("--follow", "serves a page and writes none", "leave out --out, --png and --force")
        return follow(runs, port=PORT if options.port is None else options.port)
    if options.port is not None:
        raise UserError("--port", "is for --follow", "add --follow, or leave it out")
    records = [read_run(run) for run in runs]
    out = options.out or (runs[0] if len(runs) == 1 else Path()) / "report.html"
    write_page(build_page(records), out, force=options.force)
    show(f"wrote {out}")
    if options.png is not None:
        write_picture(records, options.png)
        show(f"wrote {options.png}")
    return 0


def follow(runs: list[Path], *, port: int) -> int:
    """Serve the page until Ctrl-C."""
    with contextlib.suppress(KeyboardInterrupt), build_server(runs, port=port) as server:
        show(f"{server.url} shows new steps as they come; Ctrl-C ends it", flush=True)
        server.serve_forever()
    return 0


if __name__ == "__main__":
    sys.exit(main())
