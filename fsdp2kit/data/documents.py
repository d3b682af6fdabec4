"""Documents: the token sequences that training sees, each at most ``seq_len`` long, with what was cut to get there."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from fsdp2kit.config.schema import DataConfig, Overlong
from fsdp2kit.console import counted
from fsdp2kit.data.chat import Tokenizer
from fsdp2kit.data.formats import rows_together
from fsdp2kit.data.rows import RowReader
from fsdp2kit.data.sources import Source, find_source
from fsdp2kit.data.tokens import NO_ENDING, tokenise
from fsdp2kit.distributed import agreement, one_per_machine_first
from fsdp2kit.errors import UserError

Document = tuple[np.ndarray, np.ndarray]  # token ids int64 [L], supervised bool [L]
SYNTHETIC_DOCUMENTS = 65536
_ENDINGS_OF = 64  # documents


@dataclass(frozen=True)
class Report:
    """What became of the rows."""

    rows: int
    documents: int
    tokens: int
    supervised_tokens: int
    """Targets of the loss. A document's first token is none, whatever its mask says."""
    truncated: int = 0
    """Rows cut at seq_len."""
    dropped: int = 0
    """Rows left out because they are longer than seq_len."""
    split: int = 0
    """Rows cut into several documents."""
    unsupervised: int = 0
    """Documents left out because nothing in them is supervised."""
    without_end: int = 0
    """Answers of pairs that stop at the cut, without an end-of-turn token."""

    @property
    def overlong(self) -> int:
        """Rows longer than seq_len."""
        return self.truncated + self.dropped + self.split

    def __str__(self) -> str:
        lost = [("truncated", self.truncated), ("dropped", self.dropped), ("split", self.split)]
        lost += [("without a target", self.unsupervised), ("answers cut, with no end of turn", self.without_end)]
        notes = "".join(f", {count:,} {what}" for what, count in lost if count)
        return (
            f"{counted(self.documents, 'document')} of {counted(self.rows, 'row')}{notes}; {self.tokens:,} tokens, "
            f"{self.supervised_tokens / self.tokens:.0%} supervised"
        )


@dataclass(frozen=True)
class Documents:
    """A sequence of documents; ``documents[i]`` reads one from the memory-mapped tokens, or makes it."""

    lengths: np.ndarray
    """int64 [documents], in tokens."""
    fingerprint: str
    """Digest of every token id and mask bit, wherever they were read from."""
    report: Report
    largest_id: int
    """The largest token id in the data, long rows included whole."""
    read: Callable[[int], Document]
    row_digests: np.ndarray | None = None
    """V16 [documents]: digest of the row that each is of, to find the same row twice; None for synthetic tokens."""
    row_lengths: np.ndarray | None = None
    """int64 [rows]: tokens of each row before it was cut; None for synthetic tokens."""
    together: int = 1
    """This many neighbours share a row of the batch: 2 for the two answers of a preference."""
    endings: frozenset[int] = frozenset()
    """Special tokens that the rows of the first documents end in."""

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Document:
        """``(ids, supervised)``: int64 [L] and bool [L]."""
        return self.read(index)


class Tokens(NamedTuple):
    """The tokens of some rows, and what errors call these."""

    table: pa.Table
    """The columns of `tokenise`."""
    where: str
    name: Callable[[int], str]
    """From the number of a row of the table."""


def read_tokens(section: DataConfig, *, tokenizer: Tokenizer | None, key: str = "data.path") -> Tokens:
    """Read and tokenise the data, or map what the cache has of it; for the arguments and errors see `build_documents`.

    Every rank calls this, and one on each machine fills the cache.
    """
    words = require_tokenizer(tokenizer)

    def read() -> tuple[Source, pa.Table]:
        source = find_source(section, key)
        return source, tokenise(source, section, words)

    source, table = one_per_machine_first(read)

    def name(number: int) -> str:
        row = number // rows_together(section)
        return next(itertools.islice(RowReader(source, download=True), row, None)).where

    return Tokens(table, source.where, name)


def build_documents(
    section: DataConfig,
    *,
    tokenizer: Tokenizer | None,
    seed: int = 0,
    vocab_size: int | None = None,
    key: str = "data.path",
    tokens: Tokens | None = None,
    rows: np.ndarray | None = None,
) -> Documents:
    """Read, tokenise and cut the data; every rank calls this, and one on each machine fills the cache.

    Args:
        section: with the data's own path, split, format and columns; `sources` are not read.
        tokenizer: needed by all formats but "synthetic".
        seed: of the synthetic tokens; other formats do not depend on it.
        vocab_size: rows of the model's embedding. Default: the tokenizer's size.
        key: the TOML key that names the data, for errors.
        tokens: what `read_tokens` returned, where that was called already.
        rows: int64, which rows of them; None: all.

    Raises:
        UserError: the data is missing or malformed, too long under ``overlong = "error"``, has nothing to learn, or
            holds a token beyond the vocabulary.
    """
    vocab_size = (len(tokenizer) if tokenizer is not None else 0) if vocab_size is None else vocab_size
    if section.format == "synthetic":
        return _synthetic(seq_len=section.seq_len, vocab_size=vocab_size, seed=seed)
    table, where, name = tokens or read_tokens(section, tokenizer=tokenizer, key=key)
    with agreement():
        documents = cut_rows(table, section, name=name, rows=rows)
        if not documents.report.documents:
            raise _nothing_to_learn(documents.report, where, section.seq_len)
        check_vocabulary(documents.largest_id, vocab_size)
        return documents


def require_tokenizer(tokenizer: Tokenizer | None) -> Tokenizer:
    """The tokenizer, or a `UserError` if there is none."""
    if tokenizer is None:
        raise UserError("model.tokenizer", "is required by data from files", "set model.tokenizer or model.path")
    return tokenizer


def check_vocabulary(largest: int, vocab_size: int) -> None:
    """Check that the model's embedding has a row for every token.

    Raises:
        UserError: naming the largest token id.
    """
    if largest >= vocab_size:
        what = f"the data holds token id {largest}, but the model's vocabulary has {vocab_size}"
        todo = "use the model's own tokenizer, or a model.config.vocab_size that covers it"
        raise UserError("model.tokenizer", what, todo)


def cut_rows(
    tokens: pa.Table, section: DataConfig, *, name: Callable[[int], str], rows: np.ndarray | None = None
) -> Documents:
    """The documents that rows become under the policy for rows longer than ``seq_len``: those with something to learn.

    A document that "truncate" cuts within the assistant's text has the end-of-turn token that the row itself ends with
    in its last position, and learns it: a model that never sees its turns end would not stop. Cut elsewhere it simply
    ends. So do the two answers of a preference, whose probabilities are compared: no one ended an answer at the cut.
    Both answers of a pair are kept, or neither.

    Args:
        tokens: with the columns of `tokenise`: all rows, or a block of a stream.
        name: what an error calls a row.
        rows: int64, which of them; None: all.

    Raises:
        UserError: a row is too long under ``overlong = "error"``.
    """
    seq_len, overlong, together = section.seq_len, section.overlong, rows_together(section)
    row_lengths = tokens["length"].to_numpy()
    chosen = np.arange(len(row_lengths)) if rows is None else rows
    row_lengths = row_lengths[chosen]
    room, is_long = _room(row_lengths, seq_len=seq_len, together=together)
    long = int(is_long.sum()) // together
    if overlong == "error" and long:
        first = int(np.flatnonzero(is_long)[0])
        count = row_lengths[first : first + together].sum()
        raise _too_long(name(int(chosen[first])), count, seq_len, f"{long} such rows of {len(is_long) // together}")
    numbers, starts, stops = _slices(row_lengths, room, is_long, overlong=overlong)
    rows = chosen[numbers]
    targets, is_open = _targets(tokens, rows, starts, stops)
    row_endings, endings = tokens["ending"].to_numpy()[rows], np.full(len(rows), NO_ENDING, dtype=np.int64)
    if overlong == "truncate" and together == 1:
        endings[is_open] = row_endings[is_open]
    kept = np.flatnonzero(np.repeat((targets > 0).reshape(-1, together).all(1), together))
    rows, starts, stops, endings = rows[kept], starts[kept], stops[kept], endings[kept]
    digests = np.frombuffer(b"".join(tokens["digest"].to_pylist()), dtype="V16")[rows]
    cuts = np.stack([starts, stops, endings]).astype("<i8").tobytes()
    report = Report(
        rows=len(row_lengths) // together,
        documents=len(kept),
        tokens=int((stops - starts).sum()),
        supervised_tokens=int(targets[kept].sum()),
        truncated=long if overlong == "truncate" else 0,
        dropped=long if overlong == "drop" else 0,
        split=long if overlong == "split" else 0,
        unsupervised=len(targets) - len(kept),
        without_end=int(is_open[kept].sum()) if together > 1 else 0,
    )

    def read(index: int) -> Document:
        where = rows[index], starts[index], stops[index]
        ids, supervised = _slice(tokens["ids"], *where).astype(np.int64), _slice(tokens["supervised"], *where)
        if endings[index] != NO_ENDING:
            supervised = supervised.copy()
            ids[-1], supervised[-1] = endings[index], True
        return ids, supervised

    return Documents(
        lengths=stops - starts,
        fingerprint=hashlib.blake2b(cuts + digests.tobytes(), digest_size=16).hexdigest(),
        report=report,
        largest_id=int(tokens["largest_id"].to_numpy().max(initial=-1)),
        read=read,
        row_digests=digests,
        row_lengths=row_lengths,
        together=together,
        endings=frozenset(row_endings[kept][:_ENDINGS_OF].tolist()) - {NO_ENDING},
    )


def _targets(
    tokens: pa.Table, rows: np.ndarray, starts: np.ndarray, stops: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Targets in each slice of a row, int64 [documents], and whether it breaks off in supervised text, bool."""
    lengths, targets = tokens["length"].to_numpy()[rows], tokens["targets"].to_numpy()[rows]
    is_cut, is_open, is_all_supervised = stops - starts < lengths, stops < lengths, targets == lengths - 1
    targets = np.where(is_cut, stops - starts - 1, targets)
    # Masks are read only where a row was cut and is partly supervised.
    for index in np.flatnonzero(is_cut & ~is_all_supervised):
        mask = _slice(tokens["supervised"], rows[index], starts[index], stops[index])
        targets[index] = mask[1:].sum()
        is_open[index] &= mask[-1]
    return targets, is_open


def _slice(lists: pa.ChunkedArray, row: int, start: int, stop: int) -> np.ndarray:
    """Some of the values of one row of a column of lists."""
    return lists[int(row)].values[int(start) : int(stop)].to_numpy(zero_copy_only=False)


def _room(lengths: np.ndarray, *, seq_len: int, together: int) -> tuple[np.ndarray, np.ndarray]:
    """How many tokens each row may have, int64 [rows], and whether it, or its pair, has more than that, bool [rows].

    Of a pair that is too long, the shorter row keeps up to half of ``seq_len``, and the longer one has the rest.
    """
    if together == 1:
        return np.full(len(lengths), seq_len), lengths > seq_len
    pairs = lengths.reshape(-1, 2)
    is_long = np.repeat(pairs.sum(1) > seq_len, 2)
    return np.where(is_long, np.maximum(seq_len // 2, seq_len - pairs[:, ::-1].flatten()), seq_len), is_long


def _slices(
    lengths: np.ndarray, room: np.ndarray, is_long: np.ndarray, *, overlong: Overlong
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """``(rows, starts, stops)``, each int64 [documents]: the slice of a row that each document is."""
    rows = np.arange(len(lengths))
    if overlong == "drop":
        rows = rows[~is_long]
    starts = np.zeros_like(rows)
    if overlong == "split":
        pieces = np.maximum(1, -(-lengths // room))
        rows = np.repeat(rows, pieces)
        starts = (np.arange(len(rows)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * room[rows]
    return rows, starts, np.minimum(lengths[rows], starts + room[rows])


def _too_long(where: str, count: int, seq_len: int, how_many: str) -> UserError:
    what = f"{count} tokens, more than data.seq_len = {seq_len} ({how_many})"
    return UserError(where, what, 'raise data.seq_len, or set data.overlong to "truncate", "split" or "drop"')


def _nothing_to_learn(report: Report, where: str, seq_len: int) -> UserError:
    if report.dropped == report.rows:
        return UserError(where, f"all {report.rows} rows are longer than data.seq_len = {seq_len}", "raise it")
    if report.truncated == report.rows:
        what = f"all {report.rows} rows are cut at data.seq_len = {seq_len} before their first token to learn"
        return UserError(where, what, "raise it")
    what = f"no document holds a token to learn ({counted(report.rows, 'row')})"
    todo = (
        'chat rows need messages with the role "assistant" within the first data.seq_len tokens, and chat templates '
        "with {% generation %} markers need them around the assistant's text"
    )
    return UserError(where, what, todo)


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
    report = Report(SYNTHETIC_DOCUMENTS, SYNTHETIC_DOCUMENTS, tokens, tokens - SYNTHETIC_DOCUMENTS)
    fingerprint = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    return Documents(lengths, fingerprint, report, vocab_size - 1, read)
