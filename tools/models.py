"""Which types of models can be packed, cut over ranks, adapted: decided by what checks every run, on small copies.

fsdp2kit models                        # a table of the families that people train now; a minute
fsdp2kit models --all                  # of all decoders that transformers has; minutes
fsdp2kit models TYPE …                 # these model types, with the reasons
fsdp2kit models --write docs/models.md # the table, below the first lines of that file
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from fsdp2kit.command_line import in_one_line, user_path
from fsdp2kit.console import show
from fsdp2kit.models_table import FAMILIES, MARK, decoder_types, row_of, table


@in_one_line
def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code: 0, or 2 after a user's mistake."""
    options = _parse(arguments)
    for model_type in options.types:
        row = row_of(model_type)
        cells = {"not built": row} if isinstance(row, str) else row
        show(f"{model_type}:", *(f"  {column}: {cell}" for column, cell in cells.items()), sep="\n")
    model_types = decoder_types() if options.all else FAMILIES
    if options.write is not None:
        text = Path(options.write).read_text(encoding="utf-8")
        Path(options.write).write_text(text[: text.index(MARK)] + MARK + table(model_types), encoding="utf-8")
    elif not options.types:
        show(table(model_types), end="")
    return 0


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="fsdp2kit models", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("types", nargs="*", metavar="TYPE", help="transformers' model_type; default: a table")
    parser.add_argument("--all", action="store_true", help="all decoders that transformers has")
    parser.add_argument(
        "--write", type=user_path, metavar="FILE", help=f"write the table below the line {MARK.strip()}"
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
