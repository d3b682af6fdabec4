"""``python -m fsdp2kit.checkpoint verify DIR``: exit code 0 and one line if DIR is whole, 2 and one line if not."""

from __future__ import annotations

import argparse
import sys

from fsdp2kit.checkpoint.manifest import verify
from fsdp2kit.checkpoint.store import to_path
from fsdp2kit.console import in_one_line, show


@in_one_line
def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m fsdp2kit.checkpoint", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("verify", help="check the manifest, the sizes and the checksums of a checkpoint")
    command.add_argument("checkpoint", type=str, metavar="DIR", help="e.g. runs/x/checkpoints/step-000200")
    options = parser.parse_args(arguments)
    show(verify(to_path(options.checkpoint)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
