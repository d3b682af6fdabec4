"""Global batches of data that is read in order, while training: the packer is carried along with the position.

Rows are made a window at a time: documents are read until they fill a few dozen rows, and are packed by best fit.
Rows that are not nearly full wait, as documents, for the next window. A window is a function of the position where
it begins and of what waited, so these and the number of rows already taken are all that a checkpoint needs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from fsdp2kit.data.documents import Document, Overlong, check_vocabulary, cut_rows, largest_id, read_piece
from fsdp2kit.data.loader import Batch, PackedRow, Share
from fsdp2kit.data.packing import plan_packs, plan_single
from fsdp2kit.data.rows import Position
from fsdp2kit.data.tokens import Block
from fsdp2kit.errors import UserError

State = dict[str, Any]  # what JSON can hold
WINDOW_ROWS = 32  # documents for this many rows are packed together
_FULL = 0.98
_STATES = 16  # how many batches back a state can be asked for: more than are ever made ahead


class PackedStream:
    """One source's rows, packed; see the module."""

    def __init__(
        self,
        blocks: Callable[[Position | None], Iterator[Block]],
        *,
        seq_len: int,
        pack: bool,
        overlong: Overlong,
        vocab_size: int,
        where: str,
        state: State | None = None,
    ) -> None:
        """
        Args:
            blocks: the endless blocks from a position on, as `iterate_blocks` gives them.
            vocab_size: rows of the model's embedding.
            where: what errors call the data.
            state: what `state` returned.
        """
        state = state or {"place": None, "carried": [], "taken": 0}
        self._seq_len, self._pack = seq_len, pack
        self._overlong: Overlong = overlong
        self._vocab_size, self._where = vocab_size, where
        self._position, self._carried = state["place"], [_from_json(one) for one in state["carried"]]
        self._blocks = blocks(self._position)
        self._rows: deque[list[Document]] = deque()
        self._start: State = {}
        self._taken = self._rows_read = self._empty_passes = 0
        self._has_documents = False
        self._fill_window()
        for _ in range(state["taken"]):
            self._rows.popleft()
        self._taken = state["taken"]

    def next_row(self) -> list[Document]:
        """The documents of the next row.

        Raises:
            UserError: a row cannot be read or encoded, is too long under ``overlong = "error"``, or holds a token that
                the model does not have; or no row has anything to learn.
        """
        while not self._rows:
            self._fill_window()
        self._taken += 1
        return self._rows.popleft()

    def state(self) -> State:
        """Where this stands, for a stream that goes on from here."""
        return {**self._start, "taken": self._taken}

    def _fill_window(self) -> None:
        self._start = {"place": self._position, "carried": [_to_json(one) for one in self._carried]}
        self._taken = 0
        documents, room, ended = list(self._carried), WINDOW_ROWS * self._seq_len, False
        while room > 0 and not ended:
            block = next(self._blocks)
            found = self._cut(block)
            documents += found
            room -= sum(len(ids) for ids, _ in found) if self._pack else self._seq_len * len(found)
            self._position, ended = block.position, block.position is None
        self._rows, self._carried = self._packed(documents, ended=ended)
        if ended:
            # Allow one empty pass: a resume may start near its end.
            self._empty_passes = 0 if self._has_documents else self._empty_passes + 1
            self._has_documents = False
            if self._empty_passes == 2:
                what = f"no document holds a token to learn ({self._rows_read} rows)"
                raise UserError(self._where, what, "look at the data with tools/preview.py")

    def _cut(self, block: Block) -> list[Document]:
        check_vocabulary(largest_id(block.tokens), self._vocab_size)
        pieces, report = cut_rows(
            block.tokens, seq_len=self._seq_len, overlong=self._overlong, name=block.names.__getitem__
        )
        self._rows_read += report.rows
        self._has_documents |= report.documents > 0
        return [read_piece(block.tokens, pieces, index) for index in range(len(pieces))]

    def _packed(self, documents: list[Document], *, ended: bool) -> tuple[deque[list[Document]], list[Document]]:
        """Rows to train on now, and the documents of those that wait: the emptiest, half a window of them at most."""
        lengths = np.array([len(ids) for ids, _ in documents], dtype=np.int64)
        plan = plan_packs(lengths, seq_len=self._seq_len) if self._pack else plan_single(lengths)
        fill = np.array([lengths[plan[row]].sum() for row in range(len(plan))], dtype=np.int64)
        waits: set[int] = set()
        if self._pack and not ended:
            emptiest = np.argsort(fill, kind="stable")[: WINDOW_ROWS // 2]
            waits = {int(row) for row in emptiest if fill[row] < _FULL * self._seq_len}
        rows = deque([documents[at] for at in plan[row]] for row in range(len(plan)) if row not in waits)
        waiting = sorted(int(at) for row in waits for at in plan[row])
        return rows, [documents[at] for at in waiting]


class StreamLoader:
    """One data-parallel rank's view of a stream's global batches, which are made one after the other."""

    def __init__(
        self,
        open_sources: Callable[[Sequence[State | None]], Sequence[PackedStream]],
        *,
        share: Share,
        weights: Sequence[float],
        names: Sequence[str] = (),
    ) -> None:
        """
        Args:
            open_sources: opens the sources of the mix, each at a state.
            weights: the shares of the mix's tokens that each source is to have; they add up to 1.
            names: of the sources of a mix.
        """
        self._open, self._share, self._weights = open_sources, share, np.asarray(weights)
        self.source_names = tuple(names) if len(weights) > 1 else ()
        self._streams: Sequence[PackedStream] = ()  # opened when they are first needed
        self._tokens = [0] * len(weights)
        self._next = 0
        self._states: dict[int, State] = {}  # of the last batches, by the index of the batch that follows

    @property
    def steps_per_epoch(self) -> int:
        """0: a stream's length is not known, so `train.steps` says when training ends."""
        return 0

    @property
    def seq_len(self) -> int:
        return self._share.seq_len

    def batch(self, index: int) -> list[Batch]:
        """This rank's micro-batches of global batch ``index``, which must follow the one before.

        Raises:
            UserError: a row cannot be read or encoded, naming it.
            ValueError: another batch than the next is asked for.
        """
        if index != self._next:
            raise ValueError(f"a stream's next batch is {self._next}, not {index}; resume with `seek`")
        self._remember()
        rows = []
        for _ in range(self._share.global_batch_size):
            # The source that is furthest behind its share of the tokens.
            behind = self._weights * (sum(self._tokens) + 1) - self._tokens
            source = int(behind.argmax())
            documents = self._streams[source].next_row()
            self._tokens[source] += sum(len(ids) for ids, _ in documents)
            rows.append(PackedRow(documents, source))
        self._next += 1
        return self._share.batches([rows[at] for at in self._share.rows])

    def state(self, index: int) -> State:
        """What `seek` needs to make global batch ``index`` next: a few integers, and the documents that wait.

        Raises:
            ValueError: the batch is not among the last that were made, nor the next.
        """
        if index == self._next:
            self._remember()
        if index not in self._states:
            raise ValueError(f"the state before batch {index} is no longer known")
        return self._states[index]

    def seek(self, index: int, state: State | None) -> None:
        """Make ``index`` the next batch, from a `state` that any rank of any mesh returned; None is the start."""
        self._next = index
        self._tokens = list(state["tokens"]) if state else [0] * len(self._weights)
        self._streams = self._open(state["sources"] if state else [None] * len(self._weights))
        self._states.clear()

    def _remember(self) -> None:
        if not self._streams:
            self.seek(self._next, None)
        streams = [stream.state() for stream in self._streams]
        self._states[self._next] = {"tokens": list(self._tokens), "sources": streams}
        self._states.pop(self._next - _STATES, None)


def _to_json(document: Document) -> list[list[int]]:
    ids, supervised = document
    return [ids.tolist(), supervised.astype(int).tolist()]


def _from_json(document: list[list[int]]) -> Document:
    ids, supervised = document
    return np.asarray(ids, dtype=np.int64), np.asarray(supervised, dtype=bool)
