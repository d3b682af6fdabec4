"""Show what the model will see: tokens, masks, packing, statistics, warnings.

python tools/preview.py toml/x.toml [section.key=value ...] [--html FILE] [--json] [--rows 3] [--tokens 80]
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
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

from fsdp2kit.command_line import in_one_line, user_path
from fsdp2kit.config.data_checks import check_data
from fsdp2kit.console import counted
from fsdp2kit.data.build import build_data, find_system_twice
from fsdp2kit.data.documents import Report
from fsdp2kit.data.loader import Loader, Part
from fsdp2kit.data.rows import first_rows
from fsdp2kit.data.sources import training_sets
from fsdp2kit.data.tokens import NO_ENDING, ending_of, special_ids
from fsdp2kit.errors import UserError
from fsdp2kit.model.hf_config import load_hf_config
from fsdp2kit.model.inspect import beyond_positions
from fsdp2kit.model.tokenizer import build_tokenizer, new_tokens
from fsdp2kit.run import load, parse_with_overrides

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

STREAM_ROWS = 5000
_load = partial(build_data, vocab_size=2**31)  # a vocabulary that is too small is shown as a warning
SAMPLE = 2000  # documents, or rows, that are read for what lengths alone do not tell
WIDTH = 110  # characters a line, where there is no terminal
# By whether a token is special, and whether it is learnt.
_LEGEND = {
    (False, True): ("learnt", "#000000 on green3"),
    (False, False): ("read, not learnt", "grey62"),
    (True, True): ("special token, learnt", "bold #000000 on gold1"),
    (True, False): ("special token, read", "bold gold3"),
}
_MOST_PIECES, _BINS = 60, 10
_PERCENTILES, _SHORTEST_CHOICE = (50, 75, 90, 95, 99, 100), 1024


@in_one_line
def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code: 0, or 2 after a user's mistake."""
    options = _parse(arguments)
    preview = _preview(options)
    if options.json:
        print(json.dumps(asdict(preview), ensure_ascii=False))
    elif options.html is not None:
        page = Console(file=io.StringIO(), record=True, width=WIDTH, force_terminal=True, color_system="truecolor")
        print_preview(preview, page, most_tokens=options.tokens)
        try:
            page.save_html(str(options.html), theme=MONOKAI)
        except OSError as error:
            what = f"cannot be written ({error.strerror})"
            raise UserError(f"--html {options.html}", what, "give a file in a folder that is there") from None
        print(f"wrote {options.html}")
    else:
        print_preview(preview, Console(width=None if sys.stdout.isatty() else WIDTH), most_tokens=options.tokens)
    return 0


@dataclass(frozen=True, kw_only=True)
class Statistics(Report):
    """Figures of one source: what became of its rows, and how long and how well packed its documents are."""

    supervised_share: float
    """Supervised tokens over tokens."""
    overlong_share: float
    """Rows longer than seq_len over rows: the truncation rate under ``overlong = "truncate"``."""
    duplicates: int
    """Documents whose row was there before, token for token."""
    shortest: int
    median: int
    longest: int
    histogram: list[tuple[int, int, int]]
    """``(from, to, documents)`` by length in tokens; the last bin includes its end."""
    packed_rows: int
    packing_efficiency: float
    """Tokens over positions in the packed rows."""
    row_lengths: dict[str, int]
    """Percentiles of the rows' tokens before they are cut: ``{"p50": …, …, "p100": …}``."""


@dataclass(frozen=True)
class Choice:
    """What another seq_len would make of the same data."""

    seq_len: int
    rows_longer: int
    """Rows with more tokens than that."""
    tokens_lost: int
    """Tokens that are cut off or left out."""
    lost_share: float
    packed_rows: int
    packing_efficiency: float
    steps_per_epoch: int


def compute_statistics(part: Part, *, seq_len: int) -> Statistics:
    """Count one source's documents and packs."""
    documents, report = part.documents, part.documents.report
    lengths = documents.lengths
    rows = lengths if documents.row_lengths is None else documents.row_lengths
    counts, edges = np.histogram(lengths, bins=min(_BINS, int(np.ptp(lengths)) + 1))
    borders = [round(edge) for edge in edges.tolist()]
    digests = documents.row_digests.tolist() if documents.row_digests is not None else []
    return Statistics(
        **asdict(report),
        supervised_share=report.supervised_tokens / report.tokens,
        overlong_share=report.overlong / report.rows,
        duplicates=0 if report.split else len(digests) - len(set(digests)),
        shortest=int(lengths.min()),
        median=int(np.median(lengths)),
        longest=int(lengths.max()),
        histogram=list(zip(borders, borders[1:], counts.tolist(), strict=False)),
        packed_rows=len(part.plan),
        packing_efficiency=float(lengths.sum()) / (len(part.plan) * seq_len),
        row_lengths={f"p{at}": int(np.percentile(rows, at, method="inverted_cdf")) for at in _PERCENTILES},
    )


def compare_lengths(config: Any, loader: Loader, *, tokenizer: PreTrainedTokenizerBase) -> list[Choice]:
    """Cut and pack the data of ``loader`` to its own seq_len and to 1,024, 2,048, … tokens, until no row is too long.

    A length at which nothing is left to learn is left out.
    """
    lengths = [part.documents.row_lengths for part in loader.parts]
    longest = max(int(one.max()) for one in lengths if one is not None)
    powers = range(max(0, int(longest - 1) // _SHORTEST_CHOICE).bit_length() + 1)
    loaders = []
    for seq_len in sorted({loader.share.seq_len, *(_SHORTEST_CHOICE << power for power in powers)}):
        with contextlib.suppress(UserError):
            loaders.append(_load(_changed(config, data={"seq_len": seq_len}), tokenizer=tokenizer).loader)
    reports = [[part.documents.report for part in one.parts] for one in loaders]
    kept = [sum(report.tokens for report in some) for some in reports]
    total = max(kept)
    return [
        Choice(
            seq_len=one.share.seq_len,
            rows_longer=sum(report.overlong for report in some),
            tokens_lost=total - tokens,
            lost_share=1 - tokens / total,
            packed_rows=one.rows_per_epoch,
            packing_efficiency=one.packing_efficiency,
            steps_per_epoch=one.steps_per_epoch,
        )
        for one, some, tokens in zip(loaders, reports, kept, strict=True)
    ]


def find_warnings(
    part: Part, statistics: Statistics, *, tokenizer: PreTrainedTokenizerBase, vocab_size: int
) -> list[str]:
    """What a person should look at before training; the first `SAMPLE` documents are read for it."""
    documents, special, bos = part.documents, special_ids(tokenizer), tokenizer.bos_token_id
    read = [documents[index] for index in range(min(SAMPLE, len(documents)))]
    open_ended = sum(ending_of(ids, supervised, special) == NO_ENDING for ids, supervised in read)
    twice = sum(bos is not None and len(ids) > 1 and ids[0] == ids[1] == bos for ids, _ in read)
    of, largest, share = f"of {len(read):,} documents", documents.largest_id, statistics.supervised_share
    checks = {
        f"{open_ended:,} {of} teach no end-of-turn or end-of-text token as their last: the model may not learn to "
        "stop (split documents, cut ones, or a template without such a token)": open_ended,
        f"{twice:,} {of} begin with the BOS token twice: the text or the template adds it as well": twice,
        f"token id {largest:,} is beyond the model's vocabulary of {vocab_size:,}: training refuses it": largest
        >= vocab_size,
        f"{statistics.unsupervised:,} rows hold nothing to learn and are left out: there is no assistant turn, or it "
        "begins after seq_len tokens": statistics.unsupervised,
        f"{statistics.overlong_share:.0%} of the rows are longer than seq_len": statistics.overlong_share > 0.05,
        f"{statistics.duplicates:,} documents are copies of earlier ones": statistics.duplicates,
        f"only {share:.1%} of the tokens are learnt": share < 0.05,
    }
    return [text for text, is_found in checks.items() if is_found]


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
    global_batch_size: int
    choices: list[Choice]
    """The same data at other lengths."""


def build_preview(
    loader: Loader,
    *,
    tokenizer: PreTrainedTokenizerBase,
    vocab_size: int,
    packs: int,
    title: str,
    choices: Sequence[Choice] = (),
    warnings: Sequence[str] = (),
) -> Preview:
    """Look at a loader: its first ``packs`` rows in the order of training, and everything that can be counted.

    Args:
        choices: of `compare_lengths`.
        warnings: that were found elsewhere.
    """
    rows = [loader.row(0, index) for index in range(min(packs, loader.rows_per_epoch))]
    statistics = {part.name: compute_statistics(part, seq_len=loader.share.seq_len) for part in loader.parts}
    found = list(warnings)
    for part in loader.parts:
        texts = find_warnings(part, statistics[part.name], tokenizer=tokenizer, vocab_size=vocab_size)
        found += [f"{part.name}: {text}" if part.name else text for text in texts]
    return Preview(
        title=title,
        packs=[[list(pieces_of(*document, tokenizer)) for document in row.documents] for row in rows],
        padding=[loader.share.seq_len - sum(len(ids) for ids, _ in row.documents) for row in rows],
        statistics=statistics,
        warnings=found,
        rows_per_epoch=loader.rows_per_epoch,
        tokens_per_epoch=loader.tokens_per_epoch,
        steps_per_epoch=loader.steps_per_epoch,
        seq_len=loader.share.seq_len,
        global_batch_size=loader.share.global_batch_size,
        choices=list(choices),
    )


def pieces_of(ids: np.ndarray, supervised: np.ndarray, tokenizer: PreTrainedTokenizerBase) -> Iterator[Piece]:
    """A document as runs of tokens that are alike; special tokens one by one. Together they read as the text.

    A document's first token has no token before it that could predict it, so it is never learnt.
    """
    special = special_ids(tokenizer)

    def kind(at: int) -> tuple[int, bool]:
        return at if int(ids[at]) in special else -1, at > 0 and bool(supervised[at])

    for (alone, learnt), run in itertools.groupby(range(len(ids)), key=kind):
        tokens = ids[list(run)].tolist()
        yield Piece(str(tokenizer.decode(tokens, skip_special_tokens=False)), len(tokens), learnt, alone >= 0)


def print_preview(preview: Preview, console: Console, *, most_tokens: int) -> None:
    """Print the page from top to bottom.

    Args:
        most_tokens: of a longer run of tokens, its beginning and its end are shown.
    """
    legend = [Text(name, style=style) for name, style in _LEGEND.values()]
    console.print(Rule(Text(preview.title, style="bold")), Text("  ").join([*legend, Text("↵ a line break")]))
    for number, (documents, padding) in enumerate(zip(preview.packs, preview.padding, strict=True), start=1):
        body: list[RenderableType] = []
        for at, pieces in enumerate(documents, start=1):
            total, learnt = sum(one.tokens for one in pieces), sum(one.tokens for one in pieces if one.learnt)
            body += [_border(f"document {at}: {total:,} tokens, {learnt:,} learnt"), _document(pieces, most_tokens)]
        if padding:
            body.append(_border(f"padding: {padding:,} tokens"))
        title = f"row {number}: {counted(len(documents), 'document')} in {preview.seq_len:,} tokens"
        console.print(Panel(Group(*body), title=title, title_align="left", border_style="cyan"))
    for name, statistics in preview.statistics.items():
        console.print(_table(preview, name, statistics), _histogram(statistics))
    if preview.choices:
        console.print(_choices(preview))
    if preview.warnings:
        found = Text("\n").join(Text(f"• {text}") for text in preview.warnings)
        console.print(Panel(found, title="look at this", title_align="left", border_style="bold red"))
    else:
        console.print(Text("Nothing suspicious was found.", style="green3"))


def _border(label: str) -> Rule:
    return Rule(Text(label), style="cyan", align="left", characters="╌")


def _document(pieces: list[Piece], most_tokens: int) -> Text:
    """Pieces of at most ``most_tokens``, and of very many the first and the last."""
    text, half = Text(overflow="fold"), _MOST_PIECES // 2
    for number, piece in enumerate(pieces):
        if half <= number < len(pieces) - half:
            if number == half:
                text.append("\n[…]\n", style="bold cyan")
            continue
        shown = piece.text
        if piece.tokens > most_tokens:
            size = max(1, len(shown) * most_tokens // piece.tokens // 2)
            left_out = f" […{piece.tokens - most_tokens:,} tokens…] "
            shown = shown[:size].rstrip() + left_out + shown[-size:].lstrip()
        text.append(shown.replace("\n", "↵\n"), style=_LEGEND[piece.special, piece.learnt][1])
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


def _preview(options: argparse.Namespace) -> Preview:
    _, config = load(options.toml, options.overrides)
    check_data(config)
    if config.data.format in ("synthetic", "prompts"):  # responses to prompts are documents, and those are sampled
        raise UserError("data.format", f"{config.data.format!r} has no documents to show", "preview data with answers")
    tokenizer, asked, positions = build_tokenizer(config.model, local_files_only=True), config, None
    try:
        hf_config = load_hf_config(config.model, local_files_only=True)
        vocab_size = hf_config.get_text_config().vocab_size
        positions = beyond_positions(hf_config, seq_len=config.data.seq_len)
    except UserError:  # the tokenizer is here and the model is not
        vocab_size = len(tokenizer)
    vocab_size = max(vocab_size, *(token + 1 for token in new_tokens(tokenizer)), 0)
    title = f"{options.toml} · {config.data.format} · {config.data.path or f'{len(config.data.sources)} sources'}"
    with tempfile.TemporaryDirectory() as folder:
        if config.data.streaming:
            config, title = _beginning_of(config, Path(folder)), f"{title} · its first {STREAM_ROWS:,} rows"
        shown = {"overlong": "truncate"} if asked.data.overlong == "error" else {}
        train = {"micro_batch_size": 1, "steps": 1, "epochs": None}
        config = _changed(config, train=train, eval={"every": 0}, data=shown)
        data = _load(config, tokenizer=tokenizer)
        systems = find_system_twice(training_sets(asked.data), tokenizer, count=SAMPLE)
        warnings = [*data.warnings, *systems, *([positions] if positions else [])]
        loader = data.loader
        assert isinstance(loader, Loader), "a stream's beginning was made data that is read whole"
        too_long = sum(part.documents.report.truncated for part in loader.parts)
        if asked.data.overlong == "error" and too_long:
            warnings.append(f'{too_long:,} rows are longer than seq_len, and data.overlong = "error" refuses them')
        if not asked.data.streaming:
            try:
                asked.lr_schedule.warmup(asked.train.total_steps(loader.steps_per_epoch))
            except UserError as problem:
                warnings.append(f"this would be refused: {problem}")
        return build_preview(
            loader,
            tokenizer=tokenizer,
            vocab_size=vocab_size,
            packs=options.rows,
            title=title,
            choices=compare_lengths(config, loader, tokenizer=tokenizer),
            warnings=warnings,
        )


def _beginning_of(config: Any, folder: Path) -> Any:
    """The config with a stream's first rows, copied to a file, as data that is read whole."""

    def copied(section: Any, name: str) -> dict[str, str]:
        file, rows = folder / f"{name}.jsonl", first_rows(section, "data.path", STREAM_ROWS)
        file.write_text("".join(json.dumps(row.parse(), default=str) + "\n" for row in rows), encoding="utf-8")
        return {"path": str(file), "split": "train"}

    data = config.data
    sources = [one.model_copy(update=copied(one, str(number))) for number, one in enumerate(data.sources)]
    own = copied(data, "data") if data.path is not None else {}
    return _changed(config, data={"streaming": False, "sources": sources, **own})


def _changed(config: Any, **sections: dict[str, Any]) -> Any:
    """The config with other values in some of its sections."""
    changed = {name: getattr(config, name).model_copy(update=values) for name, values in sections.items()}
    return config.model_copy(update=changed)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="preview", description=__doc__.splitlines()[0])
    parser.add_argument("toml", help="path of a TOML, or the name of one that comes with fsdp2kit")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--html", type=user_path, metavar="FILE", help="write a page instead")
    parser.add_argument("--json", action="store_true", help="print everything as one JSON object instead")
    parser.add_argument("--rows", type=int, default=2, help="rows of the batch that are shown (2)")
    parser.add_argument("--tokens", type=int, default=80, help="tokens of one speaker that are shown at most (80)")
    return parse_with_overrides(parser, arguments)


if __name__ == "__main__":
    sys.exit(main())
