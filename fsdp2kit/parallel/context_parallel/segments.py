"""What a rank's queries may see, as rectangles: the sparse form of a causal, packed, windowed attention mask.

A query sees the keys of its own document that are not after it and, with a sliding window of w tokens, less than w
before it; where attention is chunked, its chunk counts as its document. Between a rank's stretch of queries and one
of keys, each document leaves at most one rectangle, cut by at most two diagonals:

    keys →      k0          k1
           q0   ███████░░░░░        a segment: queries q0 … q1, keys k0 … k1
                ████████░░░░        right: how far past its own diagonal a query still sees (causality)
           q1   ░████████░░░        left: how far before it (the window)

`left` and `right` count as in flash attention: query i of n sees the keys j of m with
i + m − n − left ≤ j ≤ i + m − n + right; −1 is no bound. What is in no segment is never computed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fsdp2kit.parallel.context_parallel.layout import Method, chunks_of

_MIN_LINES = 64
_TOKENS_PER_LINE = 16
"""A table has one line per so many tokens, and at least so many lines."""


class Segment(NamedTuple):
    """Queries and keys that meet. Query indices are local to this rank, key indices to the block of keys at hand."""

    step: int
    """The number of the block of keys: a ring's step; 0 for this rank's own keys, or for all keys at once."""
    row: int
    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    left: int
    right: int

    def queries_of(self, tensor: Tensor) -> Tensor:
        """``[1, H, n, …]`` of ``[B, H, s, …]``: a view."""
        return tensor[self.row : self.row + 1, :, self.q_start : self.q_stop]

    def keys_of(self, tensor: Tensor) -> Tensor:
        """``[1, G, n, …]`` of ``[B, G, m, …]``: a view."""
        return tensor[self.row : self.row + 1, :, self.k_start : self.k_stop]

    @property
    def is_full(self) -> bool:
        """Whether every query sees every key."""
        return self.left < 0 and self.right < 0

    @property
    def is_causal_square(self) -> bool:
        """Whether query i of n sees keys 0 … i of n."""
        return self.left < 0 and self.right == 0 and self.q_stop - self.q_start == self.k_stop - self.k_start


@dataclass(frozen=True)
class SegmentTables:
    """The segments of a micro-batch's layers, handed through the model to its attention.

    An object, not a bare dict: FSDP leaves it on the host, where it is read.
    """

    by_window: dict[int | None, Tensor]
    chunked: Tensor | None = None
    """The table of the layers that see documents in chunks; None: the model has no such layers."""
    chunked_layers: frozenset[int] = frozenset()
    """Their numbers: nothing that such a layer hands to its attention tells it from others."""

    def of(self, window: int | None, *, layer: int | None = None) -> Tensor:
        """The `plan_segments` table for a layer with that sliding window, or with none.

        Args:
            layer: its number; None: not known, and it sees whole documents.
        """
        if self.chunked is not None and layer in self.chunked_layers:
            return self.chunked
        if window not in self.by_window:
            known = ", ".join(map(str, self.by_window))
            raise ValueError(f"a layer's sliding window is {window}, but the batch was made for {known}")
        return self.by_window[window]


def document_starts(position_ids: Tensor) -> list[list[int]]:
    """Where documents begin in each row, and the row's length: positions ``[B, S]`` restart at 0 in each.

    A row that does not begin at 0 begins a document all the same.
    """
    length = position_ids.shape[1]
    rows = []
    for row in position_ids.cpu():
        starts = (row == 0).nonzero().squeeze(1).tolist()
        rows.append([*([] if starts[:1] == [0] else [0]), *starts, length])
    return rows


def cut_documents(starts: Sequence[Sequence[int]], chunk: int) -> list[list[int]]:
    """`document_starts` with every document cut into chunks of ``chunk`` tokens, the last of them shorter.

    Chunked attention (Llama 4) is that of the chunks as documents of their own: a token sees its chunk's tokens only.
    """
    return [
        [*(at for start, stop in itertools.pairwise(row) for at in range(start, stop, chunk)), row[-1]]
        for row in starts
    ]


def plan_segments(
    starts: Sequence[Sequence[int]], *, method: Method | None, rank: int, cp: int, window: int | None
) -> Tensor:
    """Everything that this rank's queries see, step by step.

    Args:
        starts: per row, where documents begin and the row's length (`document_starts`).
        method: "ring" or "allgather", which bring the keys; None: all keys and queries are here.
        window: how many tokens a query sees, itself included; None: its whole document.

    Returns:
        ``[N, 8]`` int64 on the host, one `Segment` per line and then empty lines. N depends on the number and length
        of the rows and not on their documents, unless these have fewer than 16 tokens on average: a compiled layer
        is compiled once more for every new N.
    """
    found = []
    for row, borders in enumerate(starts):
        length = borders[-1]
        queries = chunks_of(rank, cp=cp, length=length, method=method)
        for step in range(cp if method == "ring" else 1):
            # A ring brings the keys of the rank before, then of the one before that; otherwise all are here.
            keys = chunks_of((rank - step) % cp, cp=cp, length=length, method="ring" if method == "ring" else None)
            found += _join([Segment(step, row, *shape) for shape in _rectangles(queries, keys, borders, window)])
    tokens = sum(borders[-1] for borders in starts)
    lines = max(_MIN_LINES, math.ceil(tokens / _TOKENS_PER_LINE))
    while lines < len(found):
        lines *= 2
    table = torch.zeros((lines, len(Segment._fields)), dtype=torch.int64)
    table[: len(found)] = torch.tensor(found, dtype=torch.int64)
    return table


def read_segments(table: Tensor) -> list[Segment]:
    """The lines of `plan_segments`' table that are not empty."""
    in_use = table[:, Segment._fields.index("q_stop")] > 0
    return [Segment(*line) for line in table[in_use].tolist()]


def _rectangles(
    queries: list[range], keys: list[range], borders: Sequence[int], window: int | None
) -> Iterator[tuple[int, int, int, int, int, int]]:
    """Every document's rectangle between every chunk of queries and of keys: a `Segment` from ``q_start`` on."""
    q_offset = 0
    for q_chunk in queries:
        k_offset = 0
        for k_chunk in keys:
            for start, stop in itertools.pairwise(borders):
                if stop <= q_chunk.start or start >= q_chunk.stop or stop <= k_chunk.start or start >= k_chunk.stop:
                    continue
                document = range(start, stop)
                seen = _visible(_overlap(q_chunk, document), _overlap(k_chunk, document), window)
                if seen:
                    q0, q1, k0, k1, left, right = seen
                    # from indices in the sequence to indices in what is held
                    q_move = q_offset - q_chunk.start
                    k_move = k_offset - k_chunk.start
                    yield q0 + q_move, q1 + q_move, k0 + k_move, k1 + k_move, left, right
            k_offset += len(k_chunk)
        q_offset += len(q_chunk)


def _overlap(first: range, second: range) -> range:
    return range(max(first.start, second.start), min(first.stop, second.stop))


def _visible(queries: range, keys: range, window: int | None) -> tuple[int, int, int, int, int, int] | None:
    """The part of one document's queries and keys that meets, by indices in the sequence, with its bounds; or None."""
    k0 = keys.start
    k1 = min(keys.stop, queries.stop)
    q0 = max(queries.start, k0)
    q1 = queries.stop
    if window is not None:
        k0 = max(k0, q0 - window + 1)
        q1 = min(q1, k1 - 1 + window)
    if q0 >= q1 or k0 >= k1:
        return None
    ahead = q1 - k1
    right = ahead if k1 - 1 > q0 else -1
    left = window - 1 - ahead if window is not None and q1 - 1 - k0 >= window else -1
    return q0, q1, k0, k1, left, right


def _join(segments: list[Segment]) -> list[Segment]:
    """Join neighbouring rectangles where the result is one rectangle, for fewer and larger kernel calls."""
    joined = _fold(sorted(segments, key=lambda s: (s.q_start, s.q_stop, s.k_start)), _join_keys)
    return _fold(sorted(joined, key=lambda s: (s.k_start, s.q_start)), _join_queries)


def _fold(segments: Iterable[Segment], join: Callable[[Segment, Segment], Segment | None]) -> list[Segment]:
    result: list[Segment] = []
    for segment in segments:
        together = join(result[-1], segment) if result else None
        if together:
            result[-1] = together
        else:
            result.append(segment)
    return result


def _join_keys(first: Segment, second: Segment) -> Segment | None:
    """One segment over the keys of both, where both have the same queries and no diagonal runs between them."""
    same_queries = (first.q_start, first.q_stop) == (second.q_start, second.q_stop)
    if same_queries and first.k_stop == second.k_start and first.is_full and second.left < 0:
        return second._replace(k_start=first.k_start)
    return None


def _join_queries(first: Segment, second: Segment) -> Segment | None:
    """One segment over the queries of both, where both see all of the same keys or share a causal diagonal."""
    if first.q_stop != second.q_start or first.k_start != second.k_start or first.left >= 0 or second.left >= 0:
        return None
    both_full = first.is_full and second.is_full and first.k_stop == second.k_stop
    one_diagonal = first.right == second.right == 0 and first.k_stop - first.q_stop == second.k_stop - second.q_stop
    return second._replace(q_start=first.q_start) if both_full or one_diagonal else None
