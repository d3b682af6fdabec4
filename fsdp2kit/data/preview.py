"""What the model will see of the data: its first packs, statistics, warnings, and other lengths to choose from."""

from __future__ import annotations

import contextlib
import itertools
import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fsdp2kit.config.data_formats import ASKED
from fsdp2kit.data.build import build_data, read_beginning
from fsdp2kit.data.documents import SAMPLE, Counts, count_copies, overlong_share
from fsdp2kit.data.loader import Loader, Part
from fsdp2kit.data.rows import first_rows
from fsdp2kit.data.sources import training_sets
from fsdp2kit.data.template import Tokenizer
from fsdp2kit.errors import UserError
from fsdp2kit.model.hf_config import load_hf_config
from fsdp2kit.model.inspect import beyond_positions
from fsdp2kit.model.tokenizer import build_tokenizer, check_same_tokens, special_ids, tokens_beyond

STREAM_ROWS = 5000
_load = partial(build_data, vocab_size=2**31)  # a vocabulary that is too small is a warning here, no error
_BINS = 10
_PERCENTILES = (50, 75, 90, 95, 99, 100)
_SHORTEST_CHOICE = 1024


@dataclass(frozen=True, kw_only=True)
class Statistics(Counts):
    """Figures of one source: its rows, and the lengths and packs of its documents."""

    supervised_share: float
    """Supervised tokens over tokens."""
    overlong_share: float
    """Rows longer than seq_len over rows: the truncation rate under ``overlong = "truncate"``."""
    duplicates: int
    """Documents whose row has the same tokens as an earlier one."""
    shortest: int
    median: int
    longest: int
    histogram: list[tuple[int, int, int]]
    """``(from, to, documents)`` by length in tokens; the last bin includes its end."""
    packs_per_epoch: int
    """Packs."""
    packing_efficiency: float
    """Tokens over positions in the packs."""
    row_lengths: dict[str, int]
    """Percentiles of the rows' lengths in tokens, before the cut: ``{"p50": …, …, "p100": …}``."""


@dataclass(frozen=True)
class Choice:
    """The same data at another seq_len."""

    seq_len: int
    rows_longer: int
    """Rows with more tokens than that."""
    tokens_lost: int
    """Tokens that are cut off or left out."""
    lost_share: float
    packs_per_epoch: int
    """Packs."""
    packing_efficiency: float
    steps_per_epoch: int


@dataclass(frozen=True)
class Piece:
    """Neighbouring tokens of one kind, as text."""

    text: str
    tokens: int
    supervised: bool
    special: bool


@dataclass(frozen=True)
class Preview:
    """Everything that `fsdp2kit preview` shows."""

    title: str
    pack_numbers: list[int]
    """The numbers of the packs that are shown, in the order of training, from 1."""
    packs: list[list[list[Piece]]]
    """These packs, each a list of documents, each a list of pieces."""
    padding: list[int]
    """Tokens of padding in each of them."""
    statistics: dict[str, Statistics]
    """By source; under "" without a mix."""
    warnings: list[str]
    notes: list[str]
    """What was done with the rows: columns that are not read, …"""
    packs_per_epoch: int
    """Packs."""
    tokens_per_epoch: int
    steps_per_epoch: int
    seq_len: int
    global_batch_size: int
    choices: list[Choice]
    """The same data at other lengths."""


def preview_data(config: Any, *, rows: int | Sequence[int], title: str) -> Preview:
    """The preview of a config's training data. A stream is represented by its first `STREAM_ROWS` rows.

    Nothing is downloaded but the data.

    Args:
        rows: how many packs to show, or the numbers of these in the order of training, from 1.

    Raises:
        UserError: the tokenizer is not on this machine, or the data cannot be read.
    """
    if config.data.format in ("synthetic", *ASKED):
        raise UserError("data.format", f"{config.data.format!r} has no documents to show", "preview data with answers")
    tokenizer = build_tokenizer(config.model, local_files_only=True)
    asked = config
    positions = None
    try:
        hf_config = load_hf_config(config.model, local_files_only=True)
        vocab_size = hf_config.get_text_config().vocab_size
        positions = beyond_positions(hf_config, seq_len=config.data.seq_len)
    except UserError:  # the model is not on this machine
        vocab_size = len(tokenizer)
    vocab_size = max([vocab_size, *(token + 1 for token in tokens_beyond(tokenizer, vocab_size))])
    with tempfile.TemporaryDirectory() as folder:
        if config.data.streaming:
            config = _beginning_of(config, Path(folder))
            title = f"{title} · its first {STREAM_ROWS:,} rows"
        shown = {"overlong": "truncate"} if asked.data.overlong == "error" else {}
        train = {"micro_batch_size": 1, "steps": 1, "epochs": None}
        config = _changed(config, train=train, eval={"every": 0}, data=shown)
        data = _load(config, tokenizer=tokenizer)
        loader = data.loader
        assert isinstance(loader, Loader), "a stream's beginning is read whole"
        warnings = [*data.warnings]
        notes = [*data.notes]
        if asked.data.streaming:  # findings are those of the rows in the stream
            copied = {text for part in loader.parts for text in (*part.documents.warnings, *part.documents.notes)}
            sets = training_sets(asked.data)
            beginnings = [read_beginning(one, tokenizer, count=SAMPLE) for one in sets]
            warnings = [text for one in beginnings for text in one.warnings]
            warnings += [text for text in data.warnings if text not in copied]
            notes = [text for one in beginnings for text in one.notes]
        warnings += [positions] if positions else []
        warnings += _find_refusals(asked, loader)
        return build_preview(
            loader,
            tokenizer=tokenizer,
            vocab_size=vocab_size,
            rows=rows,
            title=title,
            choices=compare_lengths(config, loader, tokenizer=tokenizer),
            warnings=warnings,
            notes=notes,
        )


def _find_refusals(config: Any, loader: Loader) -> list[str]:
    """What a run of the config would refuse, although the preview shows it."""
    found = []
    too_long = sum(part.documents.report.truncated for part in loader.parts)
    if config.data.overlong == "error" and too_long:
        found.append(f'{too_long:,} rows are longer than seq_len, and data.overlong = "error" refuses them')
    try:
        if "other_tokenizer" not in config.preflight.allow:
            check_same_tokens(config.model)
        if not config.data.streaming:
            config.lr_schedule.warmup(config.train.total_steps(loader.steps_per_epoch))
    except UserError as problem:
        found.append(f"this would be refused: {problem}")
    return found


def build_preview(
    loader: Loader,
    *,
    tokenizer: Tokenizer,
    vocab_size: int,
    rows: int | Sequence[int],
    title: str,
    choices: Sequence[Choice] = (),
    warnings: Sequence[str] = (),
    notes: Sequence[str] = (),
) -> Preview:
    """The preview of a loader: some of its packs, statistics and warnings.

    Args:
        rows: how many of the first, or their numbers in the order of training, from 1.
        choices: the result of `compare_lengths`.
        warnings: those of the data.
        notes: those of the data.
    """
    numbers = range(1, 1 + min(rows, loader.packs_per_epoch)) if isinstance(rows, int) else rows
    shown = [loader.row(number) for number in numbers]
    statistics = {part.name: compute_statistics(part, seq_len=loader.share.seq_len) for part in loader.parts}
    found = list(warnings)
    for part in loader.parts:
        if part.documents.largest_id >= vocab_size:
            what = f"token id {part.documents.largest_id:,} is beyond the model's vocabulary of {vocab_size:,}"
            found.append(f"{f'{part.name}: ' if part.name else ''}{what}: training refuses it")
    return Preview(
        title=title,
        pack_numbers=list(numbers),
        packs=[[list(pieces_of(*document, tokenizer)) for document in pack.documents] for pack in shown],
        padding=[loader.share.seq_len - sum(len(ids) for ids, _ in pack.documents) for pack in shown],
        statistics=statistics,
        warnings=found,
        notes=list(notes),
        packs_per_epoch=loader.packs_per_epoch,
        tokens_per_epoch=loader.tokens_per_epoch,
        steps_per_epoch=loader.steps_per_epoch,
        seq_len=loader.share.seq_len,
        global_batch_size=loader.share.global_batch_size,
        choices=list(choices),
    )


def compute_statistics(part: Part, *, seq_len: int) -> Statistics:
    """The figures of one source's documents and packs."""
    documents = part.documents
    report = part.documents.report
    lengths = documents.lengths
    rows = lengths if documents.row_lengths is None else documents.row_lengths
    counts, edges = np.histogram(lengths, bins=min(_BINS, int(np.ptp(lengths)) + 1))
    borders = [round(edge) for edge in edges.tolist()]
    return Statistics(
        **asdict(report),
        supervised_share=report.supervised_tokens / report.tokens,
        overlong_share=overlong_share(documents),
        duplicates=count_copies(documents),
        shortest=int(lengths.min()),
        median=int(np.median(lengths)),
        longest=int(lengths.max()),
        histogram=list(zip(borders, borders[1:], counts.tolist(), strict=False)),
        packs_per_epoch=len(part.plan),
        packing_efficiency=float(lengths.sum()) / (len(part.plan) * seq_len),
        row_lengths={f"p{at}": int(np.percentile(rows, at, method="inverted_cdf")) for at in _PERCENTILES},
    )


def compare_lengths(config: Any, loader: Loader, *, tokenizer: Tokenizer) -> list[Choice]:
    """Cut and pack the data of ``loader`` at its own seq_len and at 1,024, 2,048, … tokens, until no row is too long.

    Lengths at which nothing is left to learn are left out.
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
            packs_per_epoch=one.packs_per_epoch,
            packing_efficiency=one.packing_efficiency,
            steps_per_epoch=one.steps_per_epoch,
        )
        for one, some, tokens in zip(loaders, reports, kept, strict=True)
    ]


def pieces_of(ids: np.ndarray, supervised: np.ndarray, tokenizer: Tokenizer) -> Iterator[Piece]:
    """A document as runs of tokens of one kind, special tokens one by one. Together they read as the text.

    A document's first token is never learnt: no token before it predicts it.
    """
    special = special_ids(tokenizer)

    def kind(at: int) -> tuple[int, bool]:
        return at if int(ids[at]) in special else -1, at > 0 and bool(supervised[at])

    for (alone, learnt), run in itertools.groupby(range(len(ids)), key=kind):
        tokens = ids[list(run)].tolist()
        yield Piece(str(tokenizer.decode(tokens, skip_special_tokens=False)), len(tokens), learnt, alone >= 0)


def _beginning_of(config: Any, folder: Path) -> Any:
    """The config with a stream's first rows, copied to files, as data that is read whole."""

    def copied(section: Any, name: str, configuration: str) -> dict[str, str | None]:
        file = folder / f"{name}.jsonl"
        rows = first_rows(section, "data.path", STREAM_ROWS)
        file.write_text("".join(json.dumps(row.parse(), default=str) + "\n" for row in rows), encoding="utf-8")
        return {"path": str(file), "split": "train", "formatter": None, configuration: None}

    data = config.data
    sources = [
        one.model_copy(update=copied(one, str(number), "config_name")) for number, one in enumerate(data.sources)
    ]
    own = copied(data, "data", "name") if data.path is not None else {}
    return _changed(config, data={"streaming": False, "sources": sources, **own})


def _changed(config: Any, **sections: dict[str, Any]) -> Any:
    """The config with other values in some of its sections."""
    changed = {name: getattr(config, name).model_copy(update=values) for name, values in sections.items()}
    return config.model_copy(update=changed)
