"""Which documents share a row, and how the rows of several sources alternate: decided once, from the lengths alone."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class PackPlan:
    """``plan[i]`` holds the documents of row ``i``; every document is in exactly one row."""

    documents: np.ndarray
    """int64 [documents]: indices of documents, row after row."""
    borders: np.ndarray
    """int64 [rows + 1]: row ``i`` is ``documents[borders[i] : borders[i + 1]]``."""

    def __len__(self) -> int:
        return len(self.borders) - 1

    def __getitem__(self, row: int) -> np.ndarray:
        return self.documents[self.borders[row] : self.borders[row + 1]]


def plan_packs(
    lengths: np.ndarray, *, seq_len: int, window: int = 1024, advance: Callable[[int], object] = lambda count: None
) -> PackPlan:
    """Pack whole documents into rows of ``seq_len`` tokens: best fit, longest first within a window.

    Each document goes to the open row that it fills best. Documents are taken ``window`` at a time, so that a row
    mixes neighbours only, and at most ``window`` rows stay open. Rows are numbered by their first document.

    Args:
        lengths: integers [documents], each from 1 to ``seq_len``.
        advance: called with the number of documents of each window that was packed.

    Raises:
        ValueError: a length is outside that range, which the caller's policy for long documents should rule out.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    if len(lengths) and not (lengths.min() >= 1 and lengths.max() <= seq_len):
        raise ValueError(f"lengths from {lengths.min()} to {lengths.max()}; expected 1 to seq_len = {seq_len}")
    row_of = np.empty(len(lengths), dtype=np.int64)
    # Room and row in one integer, room × shift + row: one sorted list is searched, and ties go to the oldest row.
    shift = 1 + len(lengths)
    open_rows: list[int] = []
    rows = 0
    for start in range(0, len(lengths), window):
        part = lengths[start : start + window]
        order = np.argsort(-part, kind="stable")
        placed = []
        for length in part[order].tolist():
            fit = bisect_left(open_rows, length * shift)
            if fit < len(open_rows):
                room, row = divmod(open_rows.pop(fit), shift)
            else:
                room, row = seq_len, rows
                rows += 1
            if room > length:
                insort(open_rows, (room - length) * shift + row)
            placed.append(row)
        row_of[start + order] = placed
        del open_rows[:-window]  # the fullest
        advance(len(part))
    return _plan(row_of, rows)


def plan_single(lengths: np.ndarray) -> PackPlan:
    """One document a row, in the given order."""
    return _plan(np.arange(len(lengths), dtype=np.int64), len(lengths))


def _plan(row_of: np.ndarray, rows: int) -> PackPlan:
    """Renumber the rows by their first document and list each one's documents in their order."""
    first = np.full(rows, len(row_of), dtype=np.int64)
    np.minimum.at(first, row_of, np.arange(len(row_of)))
    number = np.empty(rows, dtype=np.int64)
    number[np.argsort(first, kind="stable")] = np.arange(rows)
    row_of = number[row_of]
    borders = np.concatenate([[0], np.cumsum(np.bincount(row_of, minlength=rows))]).astype(np.int64)
    return PackPlan(np.argsort(row_of, kind="stable").astype(np.int64), borders)


@dataclass(frozen=True)
class Mix:
    """The order of one pass over all sources: position ``p`` takes the ``turns[p]``-th row of ``sources[p]``."""

    sources: np.ndarray
    """int64 [rows]."""
    turns: np.ndarray
    """int64 [rows], counting up from 0 within each source."""
    counts: np.ndarray
    """int64 [sources]: rows that a pass takes of each."""

    def __len__(self) -> int:
        return len(self.sources)


def plan_mix(counts: Sequence[int]) -> Mix:
    """Spread each source's rows evenly over a pass, so that every stretch of it has nearly the shares of the whole.

    Args:
        counts: rows of each source in a pass.
    """
    sources = np.repeat(np.arange(len(counts)), counts)
    turns = np.concatenate([np.arange(count) for count in counts])
    order = np.argsort((turns + 0.5) / np.asarray(counts)[sources], kind="stable")
    return Mix(sources[order], turns[order], np.asarray(counts, dtype=np.int64))


def shares(weights: Sequence[float], *, temperature: float) -> np.ndarray:
    """weight^(1 / temperature), normalised: float64 [sources]."""
    # Logarithms: token counts to a high power would overflow.
    logs = np.log(np.asarray(weights, dtype=np.float64)) / temperature
    raised = np.exp(logs - logs.max())
    return raised / raised.sum()


def source_epochs(
    tokens: Sequence[int],
    *,
    weights: Sequence[float | None],
    epochs: Sequence[float | None],
    temperature: float,
) -> np.ndarray:
    """How often one pass over the mix goes through each source, float64 [sources].

    A pass has as many tokens as all sources together, unless epochs say otherwise.

    Args:
        tokens: of each source.
        weights: share of the tokens, relative; None is the source's own number of tokens.
        epochs: given for all sources or for none.
    """
    if all(one is not None for one in epochs):
        return np.asarray(epochs, dtype=np.float64)
    wanted = [count if weight is None else weight for count, weight in zip(tokens, weights, strict=True)]
    return shares(wanted, temperature=temperature) * sum(tokens) / np.asarray(tokens)
