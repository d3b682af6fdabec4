"""Global batches of data that is read in order, while training: the packer is carried along with the position.

Rows are made a window at a time: documents are read until they fill a few dozen rows, and are packed by best fit.
Rows that are not nearly full wait, as documents, for the next window. A window is a function of the position where
it begins and of what waited, so these and the number of rows already taken are all that a checkpoint needs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np
import pyarrow as pa

from fsdp2kit.config.schema import DataConfig
from fsdp2kit.console import counted
from fsdp2kit.data.chat import Tokenizer
from fsdp2kit.data.documents import Document, Tokens, check_vocabulary, cut_rows
from fsdp2kit.data.formats import row_key
from fsdp2kit.data.loader import Batch, PackedRow, Share
from fsdp2kit.data.packing import plan_packs, plan_single
from fsdp2kit.data.rows import RowReader
from fsdp2kit.data.sources import Source
from fsdp2kit.data.tokens import encode_table, iterate_blocks
from fsdp2kit.errors import UserError, tool_command

State = dict[str, Any]  # what JSON can hold
WINDOW_ROWS = 32  # documents for this many rows are packed together
_FULL = 0.98


def packed_rows(
    source: Source,
    section: DataConfig,
    tokenizer: Tokenizer,
    *,
    vocab_size: int,
    pool: ProcessPoolExecutor | None = None,
    held_out: int = 0,
    state: State | None = None,
) -> Iterator[tuple[list[Document], State]]:
    """The documents of each row of one source, without end, and the state from which the next row follows.

    Args:
        vocab_size: rows of the model's embedding.
        pool: processes that tokenise, of `start_workers`.
        held_out: rows with a `row_key` below this are left out.
        state: where to go on; None is the start.

    Raises:
        UserError: a row cannot be read or encoded, is too long under ``overlong = "error"``, or holds a token that
            the model does not have; or no row has anything to learn.
    """
    state = state or {"place": None, "carried": [], "taken": 0}
    position, taken, waiting = state["place"], state["taken"], [_from_json(one) for one in state["carried"]]
    blocks = iterate_blocks(source, section, tokenizer, position, pool=pool)
    rows_read, empty_passes, has_documents = 0, 0, False
    while True:
        start = {"place": position, "carried": [_to_json(one) for one in waiting]}
        documents, room, ended = waiting, WINDOW_ROWS * section.seq_len, False
        while room > 0 and not ended:
            block = next(blocks)
            keys = block.tokens["key"].to_numpy()
            cut = cut_rows(block.tokens, section, name=block.names.__getitem__, rows=np.flatnonzero(keys >= held_out))
            check_vocabulary(cut.largest_id, vocab_size)
            documents += [cut[index] for index in range(len(cut))]
            room -= int(cut.lengths.sum()) if section.pack else section.seq_len * len(cut)
            rows_read, has_documents = rows_read + cut.report.rows, has_documents or len(cut) > 0
            position, ended = block.position, block.position is None
        rows, waiting = _pack(documents, section, ended=ended)
        for number, row in enumerate(rows[taken:], start=taken + 1):
            yield row, {**start, "taken": number}
        taken = 0
        if ended:
            # Allow one empty pass: a resume may start near its end.
            empty_passes, has_documents = 0 if has_documents else empty_passes + 1, False
            if empty_passes == 2:
                what = f"no document holds a token to learn ({counted(rows_read, 'row')})"
                raise UserError(source.where, what, f"look at the data with {tool_command('preview')}")


def read_held_out(
    source: Source,
    section: DataConfig,
    tokenizer: Tokenizer,
    *,
    below: int,
    batch_rows: int,
) -> Tokens:
    """The first rows of a stream whose `row_key` is below ``below``: enough to fill ``batch_rows`` rows of a batch.

    Raises:
        UserError: a row cannot be read or encoded, or one pass over the stream has none of them.
    """
    names, blocks, room = [], [], batch_rows * section.seq_len
    rows = (row for row in RowReader(source) if row_key(row.parse(), section) < below)
    while room > 0 and (some := list(itertools.islice(rows, 64))):
        blocks.append(encode_table(some, section, tokenizer))
        names += [row.where for row in some]
        lengths = np.minimum(blocks[-1]["length"].to_numpy(), section.seq_len)
        room -= int(lengths.sum()) if section.pack else section.seq_len * len(lengths)
    if not blocks:
        raise UserError("eval.split", f"holds no row of {source.path} out", "give a larger share, or eval.path")
    return Tokens(pa.concat_tables(blocks), source.where, names.__getitem__)


def _pack(
    documents: list[Document], section: DataConfig, *, ended: bool
) -> tuple[list[list[Document]], list[Document]]:
    """Rows to train on now, and the documents of those that wait: the emptiest, half a window of them at most."""
    lengths = np.array([len(ids) for ids, _ in documents], dtype=np.int64)
    plan = plan_packs(lengths, seq_len=section.seq_len) if section.pack else plan_single(lengths)
    fill = np.array([lengths[plan[row]].sum() for row in range(len(plan))], dtype=np.int64)
    waits: set[int] = set()
    if section.pack and not ended:
        emptiest = np.argsort(fill, kind="stable")[: WINDOW_ROWS // 2]
        waits = {int(row) for row in emptiest if fill[row] < _FULL * section.seq_len}
    rows = [[documents[at] for at in plan[row]] for row in range(len(plan)) if row not in waits]
    return rows, [documents[at] for at in sorted(int(at) for row in waits for at in plan[row])]


class StreamLoader:
    """One data-parallel rank's view of a stream's global batches, which are made one after the other."""

    steps_per_epoch = 0
    """A stream's length is not known, so `train.steps` says when training ends."""

    def __init__(
        self,
        sources: Sequence[Callable[..., Iterator[tuple[list[Document], State]]]],
        *,
        share: Share,
        weights: Sequence[float],
        names: Sequence[str] = (),
    ) -> None:
        """
        Args:
            sources: the `packed_rows` of each, from a ``state`` on.
            weights: the shares of the mix's tokens that each source is to have; they add up to 1.
            names: of the sources of a mix.
        """
        self._sources, self.share, self._weights = sources, share, np.asarray(weights)
        self.source_names = tuple(names) if len(weights) > 1 else ()
        self.seek(0, None)

    def batch(self, index: int) -> list[Batch]:
        """This rank's micro-batches of global batch ``index``, which must follow the one before.

        Raises:
            UserError: a row cannot be read or encoded, naming it.
            ValueError: another batch than the next is asked for.
        """
        self._check_next(index)
        rows = []
        for _ in range(self.share.global_batch_size):
            # The source that is furthest behind its share of the tokens.
            behind = self._weights * (sum(self._tokens) + 1) - self._tokens
            source = int(behind.argmax())
            documents, self._states[source] = next(self._rows[source])
            self._tokens[source] += sum(len(ids) for ids, _ in documents)
            rows.append(PackedRow(documents, source))
        self._next += 1
        return self.share.batches([rows[at] for at in self.share.rows], sources=len(self._weights))

    def state(self, index: int) -> State:
        """What `seek` needs to make global batch ``index``, the next: a few integers, and the documents that wait.

        Raises:
            ValueError: it is not the next.
        """
        self._check_next(index)
        return {"tokens": list(self._tokens), "sources": list(self._states)}

    def seek(self, index: int, state: State | None) -> None:
        """Make ``index`` the next batch, from a `state` that any rank of any mesh returned; None is the start."""
        self._next, count = index, len(self._sources)
        self._tokens: list[int] = list(state["tokens"]) if state else [0] * count
        self._states: list[State | None] = list(state["sources"]) if state else [None] * count
        self._rows = [rows(state=one) for rows, one in zip(self._sources, self._states, strict=True)]

    def _check_next(self, index: int) -> None:
        if index != self._next:
            raise ValueError(f"a stream's next batch is {self._next}, not {index}; resume with `seek`")


def _to_json(document: Document) -> list[list[int]]:
    ids, supervised = document
    return [ids.tolist(), supervised.astype(int).tolist()]


def _from_json(document: list[list[int]]) -> Document:
    ids, supervised = document
    return np.asarray(ids, dtype=np.int64), np.asarray(supervised, dtype=bool)
