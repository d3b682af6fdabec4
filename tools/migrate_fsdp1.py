"""Translate an FSDP1 configuration to a TOML on stdout; a comment on each line names the field it came from.

fsdp2kit migrate-fsdp1 fsdp_config.json > x.toml [--world-size 8] [--model ID] [--data FILE]

Takes a JSON with the usual fields (flat, or with transformers' `fsdp_config`), or an accelerate YAML. Fields without a
counterpart are explained at the end of the TOML, unknown ones are listed there and on stderr. Batch sizes are per
device; the global one needs the world size, from the file or `--world-size`.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from fsdp2kit.console import in_one_line, show, user_path
from fsdp2kit.errors import UserError
from fsdp2kit.migrate.translate import translate


@in_one_line
def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code: 0, or 2 after a user's mistake."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=user_path, help="a JSON or YAML file")
    parser.add_argument("--world-size", type=int, help="processes of the job, if the file does not say")
    parser.add_argument("--model", help="a Hugging Face directory or hub id, if the file names none")
    parser.add_argument("--data", help="a file or hub id, if the file names none")
    options = parser.parse_args(arguments)
    toml = _redirected_to() or f"{options.config.stem}.toml"
    if options.world_size is not None and options.world_size < 1:
        raise UserError("--world-size", f"{options.world_size} is no number of processes", "give e.g. 8")
    given = {"world_size": options.world_size, "model": options.model, "data": options.data}
    found = translate(options.config, toml=toml, **given)
    show(found.toml, end="", is_data=True)
    for warning in found.warnings:
        show(f"warning: {warning}", file=sys.stderr)
    for field in found.unknown:
        show(f"unknown, not translated: {field}", file=sys.stderr)
    for key in found.needs:
        show(f"to be given, the file does not say it: {key}", file=sys.stderr)
    environment = f"WORLD_SIZE={found.world_size} LOCAL_WORLD_SIZE={found.world_size // found.nodes}"
    show(f"check it: {environment} fsdp2kit check {toml}", file=sys.stderr)
    return 0


def _redirected_to() -> str | None:
    """The file that stdout is sent to, where the system says so: the TOML names itself in its first line."""
    try:
        target = Path(f"/proc/self/fd/{sys.stdout.fileno()}").readlink()
    except (OSError, ValueError):
        return None
    return os.path.relpath(target) if target.suffix == ".toml" else None


if __name__ == "__main__":
    sys.exit(main())
