"""What command lines share: errors in one line, types of arguments, the pictures of ``--png``. No torch here."""

from __future__ import annotations

import argparse
import functools
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fsdp2kit.console import begin_output, runs_of, show
from fsdp2kit.errors import UserError, importing


def in_one_line(main: Callable[..., int]) -> Callable[..., int]:
    """Wrap a command line's ``main``: a `UserError` becomes one line on stderr and exit code 2.

    A reader that has seen enough (``| head``) ends it quietly. The output is prepared (`begin_output`).
    """

    @functools.wraps(main)
    def run(arguments: list[str] | None = None) -> int:
        begin_output()
        try:
            code = main(arguments)
            sys.stdout.flush()
            return code
        except UserError as problem:
            show(f"error: {problem}", file=sys.stderr)
            return 2
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what Python flushes at its end
            return 0

    return run


def user_path(text: str) -> Path:
    """A path, with ``~`` expanded: a shell leaves it in ``--out=~/x``."""
    return Path(text).expanduser()


def positive(text: str) -> int:
    """A whole number above 0."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return number


def row_numbers(text: str) -> int | list[int]:
    """Which rows to show: ``3`` is how many of the first, ``17-20,44`` are numbers from 1."""
    if text.isdecimal():
        return int(text)
    numbers: list[int] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or not 1 <= int(first) <= int(last or first):
            raise argparse.ArgumentTypeError(f"{text!r} is neither a count nor numbers such as 17-20,44")
        numbers += range(int(first), int(last or first) + 1)
    return numbers


def rows_text(numbers: Sequence[int]) -> str:
    """The text that `row_numbers` reads as these numbers, which are in order; a single one is ``17-17``."""
    is_single = len(numbers) == 1  # a number alone would be a count
    return ",".join(f"{first}-{last}" if last > first or is_single else f"{first}" for first, last in runs_of(numbers))


def new_figure(flag: str = "--png", **options: Any) -> Any:
    """An empty figure of matplotlib. If it is not installed, the `UserError` names ``flag``, which needs it."""
    with importing("matplotlib", where=flag):
        from matplotlib.figure import Figure
    return Figure(**options)


def check_replaces_its_like(flag: str, path: Path | None) -> None:
    """Refuse an output that would replace a file of another kind: a picture a PNG alone, a page an HTML page."""
    if path is None or not path.exists():
        return
    if not path.is_file():
        raise UserError(f"{flag} {path}", "is there, and is no file", "choose another")
    kind, begin = ("PNG", b"\x89png") if flag == "--png" else ("HTML page", b"<!doctype html")
    with path.open("rb") as file:
        found = file.read(len(begin)).lower()
    if found and found != begin:
        raise UserError(f"{flag} {path}", f"is there, and is no {kind}", "choose another")


def write_figure(figure: Any, path: Path) -> None:
    """Write a figure as a PNG, which may replace another PNG and no other file."""
    try:
        check_replaces_its_like("--png", path)
        figure.savefig(path, dpi=110, format="png")
    except OSError as problem:
        raise UserError(str(path), f"cannot be written ({problem.strerror})", "choose another --png") from None
