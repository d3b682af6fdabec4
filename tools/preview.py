"""Show what the model will see: tokens, masks, packing, statistics, warnings.

fsdp2kit preview toml/x.toml [section.key=value ...] [--html FILE] [--json] [--rows 17-20,44] [--tokens 80]
"""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
from dataclasses import asdict

from rich.bar import Bar
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.rule import Rule
from rich.table import Table
from rich.terminal_theme import MONOKAI
from rich.text import Text

# Set before transformers is imported: a preview never waits for a hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

from fsdp2kit.config.data_checks import check_data
from fsdp2kit.console import (
    check_replaces_its_like,
    counted,
    in_one_line,
    rich_console,
    row_numbers,
    show,
    user_path,
    visible,
)
from fsdp2kit.data.preview import Piece, Preview, Statistics, preview_data
from fsdp2kit.errors import UserError
from fsdp2kit.files.redaction import without_secrets
from fsdp2kit.run import load, parse_with_overrides

WIDTH = 110  # characters a line, where there is no terminal
# By whether a token is special, and whether it is learnt.
_LEGEND = {
    (False, True): ("learnt", "#000000 on green3"),
    (False, False): ("read, not learnt", "grey62"),
    (True, True): ("special token, learnt", "bold #000000 on gold1"),
    (True, False): ("special token, read", "bold gold3"),
}
_MOST_PIECES = 60
# What stands around learnt text where there is no colour: the first pair that no text has, and the console can show.
_MARKS = (("«", "»"), ("⟦", "⟧"), ("[[", "]]"), ("{{{", "}}}"), ("[learnt:", ":learnt]"))


@in_one_line
def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code: 0, or 2 after a user's mistake."""
    options = _parse(arguments)
    check_replaces_its_like("--html", options.html)
    _, config = load(options.toml, options.overrides)
    check_data(config)
    path = config.data.path or f"{len(config.data.sources)} sources"
    title = without_secrets(f"{options.toml} · {config.data.format} · {path}")
    preview = preview_data(config, rows=options.rows, title=title)
    if options.json:
        show(json.dumps(asdict(preview)), is_data=True)
    elif options.html is not None:
        page = rich_console(
            file=io.StringIO(), record=True, width=WIDTH, force_terminal=True, color_system="truecolor"
        )
        print_preview(preview, page, most_tokens=options.tokens)
        try:
            page.save_html(str(options.html), theme=MONOKAI)
        except OSError as error:
            what = f"cannot be written ({error.strerror})"
            raise UserError(f"--html {options.html}", what, "give a file in a folder that is there") from None
        show(f"wrote {options.html}")
    else:
        print_preview(preview, rich_console(width=None if sys.stdout.isatty() else WIDTH), most_tokens=options.tokens)
    return 0


def print_preview(preview: Preview, console: Console, *, most_tokens: int) -> None:
    """Print the page from top to bottom.

    Args:
        most_tokens: of a longer run of tokens, its beginning and its end are shown.
    """
    marks = _marks(preview, console)
    legend = _legend(marks)
    console.print(Rule(Text(visible(preview.title), style="bold")), Text("  ").join([*legend, Text("↵ a line break")]))
    for number, documents, padding in zip(preview.pack_numbers, preview.packs, preview.padding, strict=True):
        body: list[RenderableType] = []
        for at, pieces in enumerate(documents, start=1):
            total = sum(one.tokens for one in pieces)
            learnt = sum(one.tokens for one in pieces if one.supervised)
            body += [
                _border(f"document {at}: {total:,} tokens, {learnt:,} learnt"),
                _document(pieces, most_tokens, marks),
            ]
        if padding:
            body.append(_border(f"padding: {padding:,} tokens"))
        title = f"pack {number}: {counted(len(documents), 'document')} in {preview.seq_len:,} tokens"
        console.print(Panel(Group(*body), title=title, title_align="left", border_style="cyan"))
    for name, statistics in preview.statistics.items():
        console.print(_table(preview, name, statistics), _histogram(statistics))
    if preview.choices:
        console.print(_choices(preview))
    for text in preview.notes:
        console.print(Text(text, style="dim"))
    if preview.warnings:
        found = Text("\n").join(Text(f"• {visible(without_secrets(text))}") for text in preview.warnings)
        console.print(Panel(found, title="look at this", title_align="left", border_style="bold red"))
    else:
        console.print(Text("Nothing suspicious was found.", style="green3"))


def _border(label: str) -> Rule:
    return Rule(Text(label), style="cyan", align="left", characters="╌")


def _marks(preview: Preview, console: Console) -> tuple[str, str] | None:
    """What stands around learnt text; None where its colour says so."""
    if console.color_system is not None and not console.no_color:
        return None
    texts = [piece.text for documents in preview.packs for pieces in documents for piece in pieces]
    for marks in _MARKS:
        try:
            "".join(marks).encode(console.encoding)
        except UnicodeEncodeError:
            continue
        if not any(mark in text for text in texts for mark in marks):
            return marks
    return _MARKS[-1]


def _legend(marks: tuple[str, str] | None) -> list[Text]:
    if marks is None:
        return [Text(name, style=style) for name, style in _LEGEND.values()]
    return [Text(f"{marks[0]}learnt{marks[1]}"), Text("unmarked: read, not learnt")]


def _document(pieces: list[Piece], most_tokens: int, marks: tuple[str, str] | None) -> Text:
    """Pieces of at most ``most_tokens``, and of very many the first and the last; neighbours share their marks."""
    text = Text(overflow="fold")
    half = _MOST_PIECES // 2
    is_open = False

    def mark(is_learnt: bool) -> None:
        nonlocal is_open
        if marks is None or is_learnt == is_open:
            return
        if is_open and text.plain.endswith("\n"):  # a mark stands before the end of a line
            text.right_crop(1)
            text.append(f"{marks[1]}\n")
        else:
            text.append(marks[int(is_open)])
        is_open = is_learnt

    for number, piece in enumerate(pieces):
        if half <= number < len(pieces) - half:
            if number == half:
                mark(False)
                text.append("\n[…]\n", style="bold cyan")
            continue
        mark(piece.supervised)
        shown = piece.text
        if piece.tokens > most_tokens:
            size = max(1, len(shown) * most_tokens // piece.tokens // 2)
            left_out = f" […{piece.tokens - most_tokens:,} tokens…] "
            shown = shown[:size].rstrip() + left_out + shown[-size:].lstrip()
        text.append(visible(shown).replace("\n", "↵\n"), style=_LEGEND[piece.special, piece.supervised][1])
    mark(False)
    text.rstrip()
    return text


def _titled(title: str) -> Table:
    return Table(title=title, title_justify="left", title_style="bold", box=None)


def _table(preview: Preview, name: str, one: Statistics) -> Table:
    epoch = {"steps an epoch": preview.steps_per_epoch, "tokens an epoch": preview.tokens_per_epoch}
    before = {f"row length before cutting, {key}": value for key, value in one.row_lengths.items()}
    figures = {**asdict(one), **before, **epoch}
    del figures["histogram"], figures["row_lengths"]
    table = _titled(f"the data{f': {name}' if name else ''}")
    for key, value in figures.items():
        table.add_row(Text(key.replace("_", " "), style="cyan"), Text(_shown(value), justify="right"))
    return table


def _histogram(one: Statistics) -> Table:
    table = _titled("documents by length in tokens")
    most = max(count for _, _, count in one.histogram)
    for start, stop, count in one.histogram:
        bar = Bar(most, 0, count, width=40, color="cyan")
        table.add_row(Text(f"{start:,} – {stop:,}", style="cyan", justify="right"), bar, f"{count:,}")
    return table


def _choices(preview: Preview) -> Table:
    table = _titled(f"other lengths, in batches of {preview.global_batch_size:,}")
    for name in asdict(preview.choices[0]):
        table.add_column(Text(name.replace("_", " "), style="cyan"), justify="right")
    for one in preview.choices:
        style = "bold" if one.seq_len == preview.seq_len else ""
        table.add_row(*map(_shown, asdict(one).values()), style=style)
    return table


def _shown(value: float) -> str:
    return f"{value:.1%}" if isinstance(value, float) else f"{value:,}"


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="fsdp2kit preview", description=__doc__.splitlines()[0])
    parser.add_argument("toml", help="path of a TOML, or the name of one that comes with fsdp2kit")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--html", type=user_path, metavar="FILE", help="write a page instead")
    parser.add_argument("--json", action="store_true", help="print everything as one JSON object instead")
    what = "packs that are shown: how many (2), or which in the order of training, such as 17-20,44"
    parser.add_argument("--rows", type=row_numbers, default="2", metavar="ROWS", help=what)
    parser.add_argument("--tokens", type=int, default=80, help="tokens of one speaker that are shown at most (80)")
    return parse_with_overrides(parser, arguments)


if __name__ == "__main__":
    sys.exit(main())
