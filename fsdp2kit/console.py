"""Everything that is printed: lines, tables, errors, and progress bars for long work.

In a run, only the main rank prints what `say` is given. In a terminal the bars stand below the lines. Elsewhere (a log
file, a pipe) a bar is a line on stderr every ten seconds, because stdout may be a tool's JSON.

Texts come from data, files and errors of others. So `show` and `say` print control characters as ``\\x1b``, hide
secrets, and replace what the stream's encoding lacks; tables go through `rich_console`. `begin_output`, which each
command calls first, does the same for what Python itself prints: uncaught errors, warnings of `logging`, ``--help``.

Below them stands what command lines share: errors in one line (`in_one_line`), types of arguments, pictures. No torch
here.
"""

from __future__ import annotations

import argparse
import codecs
import contextlib
import functools
import io
import logging
import os
import re
import shutil
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO, cast

from fsdp2kit.errors import UserError, importing
from fsdp2kit.files.redaction import without_secrets

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderHook, RichCast
    from rich.segment import Segment

LINE_SECONDS = 10.0
_FIRST_SECONDS, _PAINT_SECONDS = 0.5, 0.25  # in a terminal; work that ends sooner gets no bar

# A failed write (a closed pipe, a full disk) must not end a run.
_LOST = OSError, ValueError

# What a terminal may obey: C0 without tab and line feed, DEL, C1, and the overrides of the writing direction.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")

# Signs of our own lines, for streams that lack them.
_PLAIN = str.maketrans(
    {
        **dict.fromkeys("–—−─╌━", "-"),
        **dict.fromkeys("█▉▊▋▌▍▎▏░▒▓", "#"),
        **dict.fromkeys("│┃", "|"),
        **dict.fromkeys("╭╮╯╰┌┐└┘├┤┬┴┼", "+"),
        **dict.fromkeys("“”„", '"'),
        **dict.fromkeys("‘’", "'"),
        **{"…": "...", "·": "-", "•": "*", "→": "->", "←": "<-", "×": "x", "÷": "/", "±": "+-", "≤": "<=", "≥": ">="},
        **{"≠": "!=", "≈": "~", "↵": "|", "²": "^2", "√": "sqrt ", "Σ": "sum ", "µ": "u", "\u00a0": " "},
    }
)
_ERRORS = "fsdp2kit.console"


def _replace_unknown(error: UnicodeError) -> tuple[str, int]:
    r"""An error handler of codecs: a plain sign for one of ours, ``\u4e2d`` for any other character."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start : error.end].translate(_PLAIN)
    return text.encode("ascii", errors="backslashreplace").decode("ascii"), error.end


codecs.register_error(_ERRORS, _replace_unknown)


def visible(text: str) -> str:
    r"""A text with its control characters shown, ``\x1b``; line feeds and tabs stay."""
    return _CONTROL.sub(lambda found: _escaped(found[0]), text)


def _escaped(character: str) -> str:
    number = ord(character)
    return f"\\x{number:02x}" if number < 256 else f"\\u{number:04x}"


def begin_output() -> None:
    """Prepare this process's output; each command calls it first. A second call does nothing.

    Characters that stdout or stderr cannot encode are replaced. Uncaught errors, and warnings that no handler of
    `logging` takes, are printed as `show` prints.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=_ERRORS)
    # What the user has set, e.g. a debugger's, stays.
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _print_uncaught
    if threading.excepthook is threading.__excepthook__:
        threading.excepthook = _print_uncaught_of_thread
    if type(logging.lastResort) is not _LastResort:
        logging.lastResort = _LastResort(logging.WARNING)


class _LastResort(logging.Handler):
    """Prints the message alone on stderr, as Python's own handler of last resort does."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            show(self.format(record), file=sys.stderr)
        except Exception:
            self.handleError(record)


def _print_uncaught(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None, *, begin: str = ""
) -> None:
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
        return
    show(begin + "".join(traceback.format_exception(kind, error, trace)), end="", file=sys.stderr)


def _print_uncaught_of_thread(found: threading.ExceptHookArgs) -> None:
    if found.exc_value is None or issubclass(found.exc_type, SystemExit):
        return
    name = found.thread.name if found.thread is not None else "?"
    _print_uncaught(found.exc_type, found.exc_value, found.exc_traceback, begin=f"Exception in thread {name}:\n")


def show(
    *values: object,
    sep: str = " ",
    end: str = "\n",
    file: TextIO | None = None,
    flush: bool = False,
    is_data: bool = False,
) -> None:
    """As `print`, for texts from anywhere: control characters are shown and secrets hidden. On every rank.

    Args:
        file: default: stdout, as it is now.
        is_data: the user's own data, in which nothing is hidden.
    """
    stream = sys.stdout if file is None else file
    if stream is None:
        return
    text = sep.join(map(str, values))
    text = visible(text if is_data else without_secrets(text))
    print(_encodable(text, stream), end=end, file=stream, flush=flush)


def rich_console(**options: Any) -> Console:
    """A console of rich for tables, in which control characters of the texts are shown.

    Args:
        options: those of `rich.console.Console`.
    """
    from rich.console import Console

    console = Console(**options)
    console.push_render_hook(cast("RenderHook", _Visible()))
    return console


class _Visible:
    """A hook of rich: what is printed is made `visible`, after its layout and before its colours."""

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        return [_VisibleRenderable(one) for one in renderables]


class _VisibleRenderable:
    def __init__(self, inner: ConsoleRenderable | RichCast) -> None:
        self._inner = inner

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        for segment in console.render(self._inner, options):
            yield segment if segment.control else segment._replace(text=visible(segment.text))


def _encodable(text: str, stream: TextIO) -> str:
    """A text that the stream can encode, whatever its own handling of errors."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    try:
        return text.encode(encoding, errors=_ERRORS).decode(encoding)
    except (LookupError, UnicodeError):  # an encoding that Python does not know
        return text


def say(*lines: str) -> None:
    """Print lines on the main rank, above the bars if there are any."""
    if lines and _is_main():
        _SCREEN.print(without_secrets("\n".join(lines)))
        for line in lines:
            for hear in [*_SCREEN.listeners]:
                hear(line)


def say_here(line: str) -> None:
    """Print a line on this rank, whichever it is. `heard_by` does not get it. Any thread may call it."""
    _SCREEN.print(line)


@contextlib.contextmanager
def heard_by(hear: Callable[[str], object]) -> Iterator[None]:
    """Call ``hear`` with each line that `say` prints within the block, on the main rank."""
    _SCREEN.listeners.append(hear)
    try:
        yield
    finally:
        _SCREEN.listeners.remove(hear)


@contextlib.contextmanager
def progress_bar(what: str, *, unit: str = "bytes", total: float | None = None) -> Iterator[Bar]:
    """A bar with rate and remaining time for the work in the block.

    with progress_bar("verifying", total=size) as bar:
        for block in blocks:
            bar.advance(len(block))

    Args:
        what: a word or two, e.g. "reading weights".
        unit: what is counted; "bytes" are shown as kB, MB, …
        total: the number of units; None if unknown.
    """
    bar = Bar(what, unit=unit, total=total)
    if not _is_main():
        yield bar
        return
    over = threading.Event()
    # A thread, so that lines come even while a single unit takes long.
    ticker = threading.Thread(target=_show_until, args=(over, bar), name="fsdp2kit-progress", daemon=True)
    ticker.start()
    is_done = False
    try:
        yield bar
        is_done = True
    finally:
        over.set()
        ticker.join()
        _SCREEN.remove(bar)
        if is_done and bar.is_shown:
            _SCREEN.print(bar.summary(), aside=True)


class Bar:
    """The state of some work; see `progress_bar`."""

    def __init__(self, what: str, *, unit: str, total: float | None) -> None:
        self.what, self.unit, self.total = what, unit, total
        self.done = 0.0
        self.is_shown = False
        """Whether it was ever shown."""
        self._start = time.monotonic()

    def advance(self, amount: float) -> None:
        """Add the units done since the last call."""
        self.done += amount

    def __str__(self) -> str:
        """``verifying: 1.2 GB of 16.1 GB, 800.0 MB/s, 0:00:18 left``."""
        seconds = max(time.monotonic() - self._start, 1e-3)
        total = f" of {self._amount(self.total)}" if self.total else ""
        text = f"{self.what}: {self._amount(self.done)}{total}, {self._amount(self.done / seconds)}/s"
        if self.total and self.done:
            text += f", {_clock(seconds * max(0.0, self.total / self.done - 1))} left"
        return text

    def summary(self) -> str:
        """The line printed at its end."""
        return f"{self.what}: {self._amount(self.done)} in {_clock(time.monotonic() - self._start)}"

    def _amount(self, number: float) -> str:
        return size_text(number) if self.unit == "bytes" else f"{number:,.0f} {self.unit}"


class Line:
    """A line for each state of a long process; in a terminal also a bar below, with the newest state."""

    def paint(self, parts: Sequence[str], *, done: float, total: float) -> None:
        """Print a state's parts, the most important first.

        In a terminal a line break never splits a part. The bar shows as many parts as fit beside it.
        """
        if not _SCREEN.is_terminal:
            say("  ".join(parts))
            return
        say(*in_lines(parts, _SCREEN.width))
        bar = _SCREEN.bar_width
        _SCREEN.paint(self, in_lines(parts, _SCREEN.width - (bar and bar + 1))[0], done=done, total=total)

    def close(self) -> None:
        """Leave the bar as it is, and the cursor below it."""
        _SCREEN.remove(self, keep=True)


def in_lines(parts: Sequence[str], width: int) -> list[str]:
    """Parts, separated by two spaces, in lines of at most ``width`` columns. A longer part has a line of its own.

    Every line but the first is indented by two spaces.
    """
    lines = [""]
    for part in parts:
        longer = f"{lines[-1]}  {part}" if lines[-1] else part
        if lines[-1] and len(longer) > width:
            longer = f"  {part}"
            lines.append("")
        lines[-1] = longer
    return lines


def size_text(number: float) -> str:
    """Bytes as text: ``16.1 GB``, where 1 GB is 10^9 bytes."""
    from rich.filesize import decimal

    return decimal(int(number))


def runs_of(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """The first and last number of each run of neighbours; ``numbers`` are in order: ``[1, 2, 3, 7]`` → 1–3, 7–7."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1] = runs[-1][0], number
        else:
            runs.append((number, number))
    return runs


def counted(number: int, noun: str) -> str:
    """A number with its noun: ``1 rank``, ``2,000 ranks``, ``4 micro-batches``."""
    plural = f"{noun}es" if noun.endswith(("ch", "s", "x")) else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"


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


TRUST_CODE = "read that code, and if you trust it give --trust-remote-code"
"""What to do about a model that runs code of its own, for errors."""


def add_trust_remote_code(parser: argparse.ArgumentParser) -> None:
    """The flag of commands that load a model: what ``model.trust_remote_code`` is in a TOML."""
    text = "run the model repository's own Python code; leave it off unless you have read that code"
    parser.add_argument("--trust-remote-code", action="store_true", help=text)


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


class _Screen:
    """The terminal. rich shows one group of bars at a time, so all bars are in one group."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._bars: Any = None
        self._tasks: dict[object, Any] = {}
        self.listeners: list[Callable[[str], object]] = []

    @property
    def is_terminal(self) -> bool:
        return sys.stdout is not None and sys.stdout.isatty() and os.environ.get("TERM", "") not in ("", "dumb")

    @property
    def width(self) -> int:
        """Columns of the terminal."""
        return shutil.get_terminal_size().columns

    @property
    def bar_width(self) -> int:
        """Columns of a bar; 0 if the terminal is too narrow for a bar beside its text."""
        return 20 if self.width >= 100 else 10 if self.width >= 80 else 0

    def print(self, text: str, *, aside: bool = False) -> None:
        """Print text; with ``aside`` on stderr, unless stdout is a terminal."""
        with self._lock, contextlib.suppress(*_LOST):
            if self._bars is None:
                show(text, flush=True, file=sys.stderr if aside and not self.is_terminal else sys.stdout, is_data=True)
            else:
                self._bars.console.print(self._shown(text), markup=False, highlight=False, soft_wrap=True)

    def _shown(self, text: str) -> str:
        return _encodable(visible(text), sys.stdout)

    def paint(self, key: object, text: str, *, done: float, total: float | None) -> None:
        """Show a bar, or update it."""
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        text = self._shown(text)
        with self._lock, contextlib.suppress(*_LOST):
            if self._bars is None:
                columns: list[Any] = [TextColumn("{task.description}", markup=False)]
                if self.bar_width:
                    columns.insert(0, BarColumn(bar_width=self.bar_width))
                self._bars = Progress(*columns, console=Console(), auto_refresh=False)
            if key not in self._tasks:
                self._tasks[key] = self._bars.add_task(text, total=total, completed=done)
            self._bars.update(self._tasks[key], completed=done, total=total, description=text)
            self._bars.start()  # does nothing a second time
            self._bars.refresh()

    def remove(self, key: object, *, keep: bool = False) -> None:
        """Remove a bar; with ``keep`` leave it above the next lines."""
        with self._lock, contextlib.suppress(*_LOST):
            task = self._tasks.pop(key, None)
            if task is None:
                return
            if not keep:
                self._bars.remove_task(task)
                self._bars.refresh()
            if not self._tasks:
                bars, self._bars = self._bars, None
                bars.stop()


_SCREEN = _Screen()


def _show_until(over: threading.Event, bar: Bar) -> None:
    in_terminal = _SCREEN.is_terminal
    pause, later = (_FIRST_SECONDS, _PAINT_SECONDS) if in_terminal else (LINE_SECONDS, LINE_SECONDS)
    while not over.wait(pause):
        pause, bar.is_shown = later, True
        if in_terminal:
            _SCREEN.paint(bar, str(bar), done=bar.done, total=bar.total)
        else:
            _SCREEN.print(str(bar), aside=True)


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


def _is_main() -> bool:
    # As `distributed.is_main_process`, without importing torch.
    return os.environ.get("RANK", "0").strip() == "0"
