"""What command lines share: errors in one line, types of arguments, the pictures of ``--png``. No torch here."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fsdp2kit.errors import UserError, importing


def in_one_line(main: Callable[..., int]) -> Callable[..., int]:
    """Wrap a command line's ``main``: a `UserError` becomes one line on stderr and exit code 2."""

    @functools.wraps(main)
    def run(arguments: list[str] | None = None) -> int:
        try:
            return main(arguments)
        except UserError as problem:
            print(f"error: {problem}", file=sys.stderr)
            return 2

    return run


def user_path(text: str) -> Path:
    """A path, with ``~`` expanded: a shell leaves it in ``--out=~/x``."""
    return Path(text).expanduser()


def positive(text: str) -> int:
    """A whole number above 0."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return number


def new_figure(flag: str = "--png", **options: Any) -> Any:
    """An empty figure of matplotlib. If it is not installed, the `UserError` names ``flag``, which needs it."""
    with importing("matplotlib", where=flag):
        from matplotlib.figure import Figure
    return Figure(**options)


def write_figure(figure: Any, path: Path) -> None:
    """Write a figure as a PNG."""
    try:
        figure.savefig(path, dpi=110, format="png")
    except OSError as problem:
        raise UserError(str(path), f"cannot be written ({problem.strerror})", "choose another --png") from None
