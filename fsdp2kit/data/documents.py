"""Documents: the token sequences that training sees, each at most ``seq_len`` long, with what was cut to get there."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from fsdp2kit.config.schema import ChatDataConfig, TextDataConfig
from fsdp2kit.data.tokens import name_source_row, tokenise
from fsdp2kit.distributed import agreement, one_per_machine_first
from fsdp2kit.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

Overlong = Literal["truncate", "drop", "split", "error"]
Document = tuple[np.ndarray, np.ndarray]  # token ids int64 [L], supervised bool [L]

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

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Document:
        """``(ids, supervised)``: int64 [L] and bool [L]."""
        return self.read(index)


def build_documents(
    section: ChatDataConfig | TextDataConfig,
    *,
    path: str | None,
    split: str,
    tokenizer: PreTrainedTokenizerBase | None,
    seed: int,
    vocab_size: int | None = None,
) -> Documents:
    """Read, tokenise and cut the data; every rank calls this, and one on each machine fills the cache.

    A truncated conversation ends where it is cut: no end-of-turn token is put there, or the model would learn to
    stop in mid-sentence.

    Args:
        path: the data (`section.path`, or the evaluation's); unused for the "synthetic" format.
        tokenizer: needed by all formats but "synthetic".
        seed: of the synthetic tokens; other formats do not depend on it.
        vocab_size: of the synthetic tokens. Default: the tokenizer's.

    Raises:
        UserError: the data is missing or malformed, too long under ``overlong = "error"``, or has nothing to learn.
    """
    if section.format == "synthetic":
        size = vocab_size or (len(tokenizer) if tokenizer is not None else 0)
        return _synthetic(seq_len=section.seq_len, vocab_size=size, seed=seed)
    if path is None:
        raise UserError(
            "data.path", f'is required by data.format = "{section.format}"', "name a file, folder or hub id"
        )
    if tokenizer is None:
        raise UserError("model.tokenizer", "is required by data from files", "set model.tokenizer or model.path")
    source, format, words = path, section.format, tokenizer
    table = one_per_machine_first(lambda: tokenise(source, split=split, format=format, tokenizer=words))
    with agreement():
        return _cut(table, seq_len=section.seq_len, overlong=section.overlong, path=path, split=split)


def check_vocabulary(documents: Documents, vocab_size: int) -> None:
    """Check that the model's embedding has a row for every token.

    Raises:
        UserError: naming the largest token id.
    """
    if documents.largest_id >= vocab_size:
        raise UserError(
            "model.tokenizer",
            f"the data holds token id {documents.largest_id}, but the model's vocabulary has {vocab_size}",
            "use the model's own tokenizer, or a model.config.vocab_size that covers it",
        )


def _cut(table: Dataset, *, seq_len: int, overlong: Overlong, path: str, split: str) -> Documents:
    """Apply the policy for rows longer than ``seq_len``. A document is a slice of a row; nothing is copied."""
    columns = table.remove_columns(["ids", "supervised", "digest"]).with_format("numpy")[:]
    lengths, targets = columns["length"].astype(np.int64), columns["targets"].astype(np.int64)
    is_long = lengths > seq_len
    if overlong == "error" and is_long.any():
        first = int(np.flatnonzero(is_long)[0])
        raise UserError(
            name_source_row(path, split=split, index=first),
            f"{lengths[first]} tokens, more than data.seq_len = {seq_len} ({is_long.sum()} such rows)",
            'raise data.seq_len, or set data.overlong to "truncate", "split" or "drop"',
        )
    rows, starts, stops = _slices(lengths, seq_len=seq_len, overlong=overlong)
    read = _reader(table, rows, starts, stops)
    supervised = _count_targets(read, lengths[rows], targets[rows], stops - starts)
    kept = np.flatnonzero(supervised > 0)
    rows, starts, stops = rows[kept], starts[kept], stops[kept]
    report = Report(
        rows=len(lengths),
        documents=len(kept),
        tokens=int((stops - starts).sum()),
        supervised_tokens=int(supervised.sum()),
        truncated=int(is_long.sum()) if overlong == "truncate" else 0,
        dropped=int(is_long.sum()) if overlong == "drop" else 0,
        split=int(is_long.sum()) if overlong == "split" else 0,
        unsupervised=len(supervised) - len(kept),
    )
    if not len(kept):
        raise _nothing_to_learn(report, path, seq_len)
    digest = hashlib.blake2b(np.stack([starts, stops]).astype("<i8").tobytes(), digest_size=16)
    row_digests = table.select_columns("digest")[:]["digest"]
    digest.update(b"".join(row_digests[row] for row in rows))
    return Documents(
        lengths=stops - starts,
        fingerprint=digest.hexdigest(),
        report=report,
        largest_id=int(columns["largest_id"].max()),
        read=_reader(table, rows, starts, stops),
    )


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


def _reader(table: Dataset, rows: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> Callable[[int], Document]:
    view = table.select_columns(["ids", "supervised"]).with_format("numpy")

    def read(index: int) -> Document:
        row, cut = view[int(rows[index])], slice(int(starts[index]), int(stops[index]))
        return row["ids"][cut].astype(np.int64), row["supervised"][cut].astype(bool)

    return read


def _count_targets(
    read: Callable[[int], Document], row_lengths: np.ndarray, row_targets: np.ndarray, lengths: np.ndarray
) -> np.ndarray:
    """Targets in each document, int64; masks are read only where a row was cut and is partly supervised."""
    counts = np.where(lengths == row_lengths, row_targets, np.maximum(lengths - 1, 0))
    for index in np.flatnonzero((lengths < row_lengths) & (row_targets < row_lengths - 1)):
        counts[index] = read(int(index))[1][1:].sum()
    return counts


def _nothing_to_learn(report: Report, path: str, seq_len: int) -> UserError:
    if report.dropped == report.rows:
        return UserError(
            f"data.path: {path}", f"all {report.rows} rows are longer than data.seq_len = {seq_len}", "raise it"
        )
    return UserError(
        f"data.path: {path}",
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
