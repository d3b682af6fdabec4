"""What the model will see, for a person: coloured tokens of the first packs, figures, warnings."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from fsdp2kit.data.batch import Row
from fsdp2kit.data.loader import Loader
from fsdp2kit.data.statistics import Statistics, compute_statistics, find_warnings
from fsdp2kit.data.tokens import special_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LEARNT, READ, SPECIAL_LEARNT, SPECIAL_READ = "#000000 on green3", "grey62", "bold #000000 on gold1", "bold gold3"
_STYLES = {(True, True): SPECIAL_LEARNT, (True, False): SPECIAL_READ, (False, True): LEARNT, (False, False): READ}
_BAR = 40
_MOST_PIECES = 60


@dataclass(frozen=True)
class Piece:
    """Neighbouring tokens of one kind, as text."""

    text: str
    tokens: int
    learnt: bool
    special: bool


@dataclass(frozen=True)
class Preview:
    """Everything that is shown."""

    title: str
    packs: list[list[list[Piece]]]
    """The first packs, each a list of documents, each a list of pieces."""
    padding: list[int]
    """Tokens of padding in each of them."""
    statistics: dict[str, Statistics]
    """By source; of a single one under ""."""
    warnings: list[str]
    rows_per_epoch: int
    tokens_per_epoch: int
    steps_per_epoch: int
    seq_len: int

    def as_json(self) -> dict[str, Any]:
        """The same as nested plain values."""
        return asdict(self)


def build_preview(
    loader: Loader, *, tokenizer: PreTrainedTokenizerBase, vocab_size: int, packs: int, title: str
) -> Preview:
    """Look at a loader: its first ``packs`` rows in the order of training, and everything that can be counted."""
    rows = [row for row in _first_rows(loader, packs) if row.documents]
    statistics = {part.name: compute_statistics(part, seq_len=loader.seq_len) for part in loader.parts}
    warnings = []
    for part in loader.parts:
        found = find_warnings(part, statistics[part.name], tokenizer=tokenizer, vocab_size=vocab_size)
        warnings += [f"{part.name}: {text}" if part.name else text for text in found]
    return Preview(
        title=title,
        packs=[[list(pieces_of(*document, tokenizer)) for document in row.documents] for row in rows],
        padding=[loader.seq_len - sum(len(ids) for ids, _ in row.documents) for row in rows],
        statistics=statistics,
        warnings=warnings,
        rows_per_epoch=loader.rows_per_epoch,
        tokens_per_epoch=loader.tokens_per_epoch,
        steps_per_epoch=loader.steps_per_epoch,
        seq_len=loader.seq_len,
    )


def pieces_of(ids: np.ndarray, supervised: np.ndarray, tokenizer: PreTrainedTokenizerBase) -> Iterator[Piece]:
    """A document as runs of tokens that are alike; special tokens one by one. Together they read as the text.

    A document's first token has no token before it that could predict it, so it is never learnt.
    """
    special = special_ids(tokenizer)
    start = 0
    for stop in range(1, len(ids) + 1):
        kinds = [(at > 0 and bool(supervised[at]), int(ids[at]) in special) for at in (start, min(stop, len(ids) - 1))]
        if stop < len(ids) and kinds[0] == kinds[1] and not kinds[0][1]:
            continue
        learnt, is_special = kinds[0]
        text = tokenizer.decode(ids[start:stop].tolist(), skip_special_tokens=False)
        yield Piece(str(text), stop - start, learnt, is_special)
        start = stop


def render(preview: Preview, *, width: int, most_tokens: int) -> Console:
    """A recorded console on which the preview is printed; `Console.export_text`, `.export_html` and so on read it.

    Args:
        width: characters a line.
        most_tokens: of a longer run of tokens, its beginning and its end are shown.
    """
    console = Console(file=io.StringIO(), record=True, width=width, force_terminal=True, color_system="truecolor")
    for part in renderables(preview, most_tokens=most_tokens):
        console.print(part)
    return console


def renderables(preview: Preview, *, most_tokens: int) -> Iterator[RenderableType]:
    """The parts of the page, from top to bottom."""
    yield Rule(Text(preview.title, style="bold"))
    yield Text.assemble(
        ("learnt", LEARNT),
        "  ",
        ("read, not learnt", READ),
        "  ",
        ("special token, learnt", SPECIAL_LEARNT),
        "  ",
        ("special token, read", SPECIAL_READ),
        "  ↵ a line break",
    )
    for number, documents in enumerate(preview.packs):
        yield Panel(
            Group(*_pack(documents, preview.padding[number], most_tokens)),
            title=f"row {number + 1}: {len(documents)} documents in {preview.seq_len:,} tokens",
            title_align="left",
            border_style="cyan",
        )
    for name, statistics in preview.statistics.items():
        yield _table(preview, name, statistics)
        yield _histogram(statistics)
    if preview.warnings:
        body = Text("\n").join(Text(f"• {text}") for text in preview.warnings)
        yield Panel(body, title="look at this", title_align="left", border_style="bold red")
    else:
        yield Text("Nothing suspicious was found.", style="green3")


def _first_rows(loader: Loader, count: int) -> Sequence[Row]:
    return [loader.row(0, position) for position in range(min(count, loader.rows_per_epoch))]


def _pack(documents: list[list[Piece]], padding: int, most_tokens: int) -> Iterator[RenderableType]:
    for number, pieces in enumerate(documents):
        total, learnt = sum(one.tokens for one in pieces), sum(one.tokens for one in pieces if one.learnt)
        label = f"document {number + 1}: {total:,} tokens, {learnt:,} learnt"
        yield Rule(Text(label), style="cyan", align="left", characters="╌")
        yield _document(pieces, most_tokens)
    if padding:
        yield Rule(Text(f"padding: {padding:,} tokens"), style="grey42", align="left", characters="╌")


def _document(pieces: list[Piece], most_tokens: int) -> Text:
    text = Text(overflow="fold")
    for piece in _shortened(pieces, most_tokens):
        if piece is None:
            text.append("\n[…]\n", style="bold cyan")
            continue
        text.append(piece.text.replace("\n", "↵\n"), style=_STYLES[piece.special, piece.learnt])
    text.rstrip()
    return text


def _shortened(pieces: list[Piece], most_tokens: int) -> Iterator[Piece | None]:
    """Pieces of at most ``most_tokens``, and of very many the first and the last; None stands for those between."""
    half = _MOST_PIECES // 2
    shown: list[Piece | None] = list(pieces)
    if len(pieces) > _MOST_PIECES:
        shown[half:-half] = [None]
    for piece in shown:
        if piece is None or piece.tokens <= most_tokens:
            yield piece
            continue
        size = max(1, len(piece.text) * most_tokens // piece.tokens // 2)
        left_out = f" […{piece.tokens - most_tokens:,} tokens…] "
        yield replace(piece, text=piece.text[:size].rstrip() + left_out + piece.text[-size:].lstrip())


def _table(preview: Preview, name: str, one: Statistics) -> Table:
    table = Table(title=f"the data{f': {name}' if name else ''}", title_justify="left", title_style="bold", box=None)
    for _ in range(2):
        table.add_column(style="cyan")
        table.add_column(justify="right")
    lost = {"truncated": one.truncated, "dropped": one.dropped, "split": one.split}
    cut = ", ".join(f"{count:,} {what}" for what, count in lost.items() if count) or "none"
    table.add_row("rows", f"{one.rows:,}", "longer than seq_len", f"{cut} ({one.overlong_share:.1%})")
    table.add_row("documents", f"{one.documents:,}", "rows without a target", f"{one.unsupervised:,}")
    table.add_row("tokens", f"{one.tokens:,}", "copies of earlier ones", f"{one.duplicates:,}")
    learnt = f"{one.supervised_tokens:,} ({one.supervised_share:.1%})"
    table.add_row("learnt", learnt, "rows of the batch", f"{one.packed_rows:,}")
    lengths = f"{one.shortest:,} – {one.median:,} – {one.longest:,}"
    table.add_row("shortest – median – longest", lengths, "tokens in them", f"{one.packing_efficiency:.1%}")
    steps, tokens = f"{preview.steps_per_epoch:,}", f"{preview.tokens_per_epoch:,}"
    table.add_row("steps an epoch", steps, "tokens an epoch", tokens)
    return table


def _histogram(one: Statistics) -> Table:
    table = Table(title="documents by length in tokens", title_justify="left", title_style="bold", box=None)
    table.add_column(justify="right", style="cyan")
    table.add_column()
    table.add_column(justify="right")
    most = max(count for _, _, count in one.histogram)
    for start, stop, count in one.histogram:
        bar = "█" * round(_BAR * count / most) or "▏" * bool(count)
        table.add_row(f"{start:,} – {stop:,}", Text(bar, style="cyan"), f"{count:,}")
    return table
