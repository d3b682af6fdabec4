"""Documents: the token sequences that training sees, each at most ``seq_len`` long, with what was cut to get there."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from fsdp2kit.config.schema import ColumnsConfig, DataConfig
from fsdp2kit.data.cutting import Document, Overlong, vocabulary_overflow
from fsdp2kit.data.formats import row_format
from fsdp2kit.data.rows import load_source, name_exactly, name_rows
from fsdp2kit.data.sources import Source, find_source
from fsdp2kit.data.tokens import NO_ENDING, tokenise
from fsdp2kit.distributed import agreement, one_per_machine_first
from fsdp2kit.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

SYNTHETIC_DOCUMENTS = 65536


@dataclass(frozen=True)
class Report:
    """What became of the rows."""

    rows: int
    documents: int
    tokens: int
    supervised_tokens: int
    """Targets of the loss. A document's first token is none, whatever its mask says."""
    truncated: int
    """Rows cut at seq_len."""
    dropped: int
    """Rows left out because they are longer than seq_len."""
    split: int
    """Rows cut into several documents."""
    unsupervised: int
    """Documents left out because nothing in them would be learnt."""


@dataclass(frozen=True)
class Documents:
    """A sequence of documents; ``documents[i]`` reads one from the memory-mapped cache, or makes it."""

    lengths: np.ndarray
    """int64 [documents], in tokens."""
    fingerprint: str
    """Digest of every token id and mask bit, wherever they were read from."""
    report: Report
    largest_id: int
    """The largest token id in the data, long rows included whole."""
    read: Callable[[int], Document]
    row_digests: Callable[[], list[bytes]] | None = None
    """Digest of the row that each document is of, to find the same row twice; None for synthetic tokens."""

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Document:
        """``(ids, supervised)``: int64 [L] and bool [L]."""
        return self.read(index)


def build_documents(
    section: DataConfig,
    *,
    path: str | None,
    split: str,
    tokenizer: PreTrainedTokenizerBase | None,
    seed: int,
    vocab_size: int | None = None,
    format: str | None = None,
    columns: ColumnsConfig | None = None,
    key: str = "data.path",
) -> Documents:
    """Read, tokenise and cut the data; every rank calls this, and one on each machine fills the cache.

    A document that ``overlong = "truncate"`` cuts within the assistant's text has the end-of-turn token that the
    row itself ends with in its last place, and learns it: a model that never sees its turns end would not stop. Cut
    elsewhere it simply ends.

    Args:
        path: the data (`section.path`, or a source's, or the evaluation's); unused for the "synthetic" format.
        tokenizer: needed by all formats but "synthetic".
        seed: of the synthetic tokens; other formats do not depend on it.
        vocab_size: of the synthetic tokens. Default: the tokenizer's.
        format: instead of the section's.
        columns: instead of the section's.
        key: the TOML key that names the data, for errors.

    Raises:
        UserError: the data is missing or malformed, too long under ``overlong = "error"``, or has nothing to learn.
    """
    if section.format == "synthetic":
        size = vocab_size or (len(tokenizer) if tokenizer is not None else 0)
        return _synthetic(seq_len=section.seq_len, vocab_size=size, seed=seed)
    how = row_format(section, format=format, columns=columns)
    if path is None:
        raise UserError(key, f'is required by data.format = "{how.format}"', "name a file, folder, URL or hub id")
    if tokenizer is None:
        raise UserError("model.tokenizer", "is required by data from files", "set model.tokenizer or model.path")
    words, found = tokenizer, partial(find_source, path, split=split, key=key)
    table = one_per_machine_first(lambda: tokenise(found(), how=how, tokenizer=words, workers=section.workers))
    with agreement():
        return _cut(table, seq_len=section.seq_len, overlong=section.overlong, source=found())


def check_vocabulary(documents: Documents, vocab_size: int) -> None:
    """Check that the model's embedding has a row for every token.

    Raises:
        UserError: naming the largest token id.
    """
    if documents.largest_id >= vocab_size:
        raise vocabulary_overflow(documents.largest_id, vocab_size)


def _cut(table: Dataset, *, seq_len: int, overlong: Overlong, source: Source) -> Documents:
    """Apply the policy for rows longer than ``seq_len``. A document is a slice of a row; nothing is copied."""
    columns = table.remove_columns(["ids", "supervised", "digest"]).with_format("numpy")[:]
    lengths, targets = columns["length"].astype(np.int64), columns["targets"].astype(np.int64)
    is_long = lengths > seq_len
    if overlong == "error" and is_long.any():
        first = int(np.flatnonzero(is_long)[0])
        raise UserError(
            name_exactly(name_rows(load_source(source)[first : first + 1], [first], source)[0], source),
            f"{lengths[first]} tokens, more than data.seq_len = {seq_len} ({is_long.sum()} such rows)",
            'raise data.seq_len, or set data.overlong to "truncate", "split" or "drop"',
        )
    rows, starts, stops = _slices(lengths, seq_len=seq_len, overlong=overlong)
    endings = np.full(len(rows), NO_ENDING, dtype=np.int64)
    supervised, open_ended = _count_targets(table, rows, starts, stops, lengths, targets)
    if overlong == "truncate":
        endings[open_ended] = columns["ending"][rows[open_ended]]
    kept = np.flatnonzero(supervised > 0)
    pieces = _Pieces(rows[kept], starts[kept], stops[kept], endings[kept])
    report = Report(
        rows=len(lengths),
        documents=len(kept),
        tokens=int((pieces.stops - pieces.starts).sum()),
        supervised_tokens=int(supervised.sum()),
        truncated=int(is_long.sum()) if overlong == "truncate" else 0,
        dropped=int(is_long.sum()) if overlong == "drop" else 0,
        split=int(is_long.sum()) if overlong == "split" else 0,
        unsupervised=len(supervised) - len(kept),
    )
    if not len(kept):
        raise _nothing_to_learn(report, source.where, seq_len)
    row_digests = table.select_columns("digest")[:]["digest"]
    return Documents(
        lengths=pieces.stops - pieces.starts,
        fingerprint=_fingerprint(pieces, row_digests),
        report=report,
        largest_id=int(columns["largest_id"].max()),
        read=partial(_read, _viewed(table), pieces),
        row_digests=partial(_digests, pieces, row_digests),
    )


@dataclass(frozen=True)
class _Pieces:
    """For each document, which slice of which row it is."""

    rows: np.ndarray
    starts: np.ndarray
    stops: np.ndarray
    endings: np.ndarray
    """Token put in the last place; `NO_ENDING` leaves what is there."""


def _slices(lengths: np.ndarray, *, seq_len: int, overlong: Overlong) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """``(rows, starts, stops)``, each int64 [documents]: the slice of a row that each document is."""
    rows = np.arange(len(lengths))
    if overlong == "drop":
        rows = rows[lengths <= seq_len]
    starts = np.zeros_like(rows)
    if overlong == "split":
        pieces = np.maximum(1, -(-lengths // seq_len))
        rows = np.repeat(rows, pieces)
        starts = (np.arange(len(rows)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * seq_len
    return rows, starts, np.minimum(lengths[rows], starts + seq_len)


def _viewed(table: Dataset) -> Dataset:
    return table.select_columns(["ids", "supervised"]).with_format("numpy")


def _read(view: Dataset, pieces: _Pieces, index: int) -> Document:
    row, cut = view[int(pieces.rows[index])], slice(int(pieces.starts[index]), int(pieces.stops[index]))
    ids, supervised = row["ids"][cut].astype(np.int64), row["supervised"][cut].astype(bool)
    if pieces.endings[index] != NO_ENDING:
        ids[-1], supervised[-1] = pieces.endings[index], True
    return ids, supervised


def _digests(pieces: _Pieces, row_digests: list[bytes]) -> list[bytes]:
    return [row_digests[row] for row in pieces.rows]


def _fingerprint(pieces: _Pieces, row_digests: list[bytes]) -> str:
    where = np.stack([pieces.starts, pieces.stops, pieces.endings]).astype("<i8").tobytes()
    digest = hashlib.blake2b(where, digest_size=16)
    digest.update(b"".join(row_digests[row] for row in pieces.rows))
    return digest.hexdigest()


def _count_targets(
    table: Dataset,
    rows: np.ndarray,
    starts: np.ndarray,
    stops: np.ndarray,
    row_lengths: np.ndarray,
    row_targets: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Targets in each document, int64, and the documents cut within what is learnt (positions, ascending).

    Masks are read only where a row was cut and is partly supervised.
    """
    lengths, whole = stops - starts, row_lengths[rows]
    counts = np.where(lengths == whole, row_targets[rows], np.maximum(lengths - 1, 0))
    is_cut = stops < whole
    is_partly = row_targets[rows] < whole - 1
    open_ended = is_cut & ~is_partly
    view = table.select_columns("supervised").with_format("numpy")
    for index in np.flatnonzero((lengths < whole) & is_partly):
        mask = view[int(rows[index])]["supervised"][starts[index] : stops[index]]
        counts[index] = mask[1:].sum()
        open_ended[index] = is_cut[index] and mask[-1]
    return counts, np.flatnonzero(open_ended)


def _nothing_to_learn(report: Report, where: str, seq_len: int) -> UserError:
    if report.dropped == report.rows:
        return UserError(where, f"all {report.rows} rows are longer than data.seq_len = {seq_len}", "raise it")
    return UserError(
        where,
        f"no document holds a token to learn ({report.rows} rows)",
        'chat rows need messages with the role "assistant" within the first data.seq_len tokens, and chat templates '
        "with {% generation %} markers need them around the assistant's text",
    )


def _synthetic(*, seq_len: int, vocab_size: int, seed: int) -> Documents:
    """Uniformly random tokens in documents of seq_len / 8 to seq_len tokens, made when they are read.

    Raw bits of PCG64 are used, which numpy promises never to change; its distributions it does not.
    """
    if vocab_size < 1:
        raise UserError("data.format", '"synthetic" needs a vocabulary size', "set model.tokenizer or model.path")
    shortest = max(2, seq_len // 8)
    bits = np.random.PCG64([seed, 0]).random_raw(SYNTHETIC_DOCUMENTS)
    lengths = (shortest + bits % np.uint64(seq_len - shortest + 1)).astype(np.int64)
    text = f"synthetic {seed} {seq_len} {vocab_size} {SYNTHETIC_DOCUMENTS}"

    def read(index: int) -> Document:
        bits = np.random.PCG64([seed, 1 + index]).random_raw(int(lengths[index]))
        return (bits % np.uint64(vocab_size)).astype(np.int64), np.ones(len(bits), dtype=bool)

    tokens = int(lengths.sum())
    report = Report(SYNTHETIC_DOCUMENTS, SYNTHETIC_DOCUMENTS, tokens, tokens - SYNTHETIC_DOCUMENTS, 0, 0, 0, 0)
    fingerprint = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    return Documents(lengths, fingerprint, report, vocab_size - 1, read)
