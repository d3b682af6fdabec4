"""Packs → global batches of a stream, which is read in order while training.

Packs are made a window at a time: documents are read until they fill a few dozen packs. Packs that are not nearly full
wait, as documents, for the next window. A window depends only on the position where it begins and on the documents
that waited. So a checkpoint saves these, and the number of packs already taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np

from fsdp2kit.config.schema import DataConfig
from fsdp2kit.console import counted
from fsdp2kit.data.documents import Document, check_vocabulary, cut_rows
from fsdp2kit.data.loader import Batch, Pack, Share
from fsdp2kit.data.packing import furthest_behind, plan_packs, plan_single
from fsdp2kit.data.sources import Location
from fsdp2kit.data.tables import iterate_blocks
from fsdp2kit.data.template import Tokenizer
from fsdp2kit.errors import UserError

State = dict[str, Any]  # what JSON can hold
WINDOW_PACKS = 32  # documents that fill so many packs are packed together
_FULL = 0.98  # a pack this full does not wait


def iterate_packs(
    location: Location,
    section: DataConfig,
    *,
    tokenizer: Tokenizer,
    vocab_size: int,
    pool: ProcessPoolExecutor | None = None,
    held_out: int = 0,
    state: State | None = None,
) -> Iterator[tuple[list[Document], State]]:
    """The documents of each pack of one source, without end, and the state from which the next pack follows.

    Args:
        vocab_size: rows of the model's embedding.
        pool: `start_workers`'s processes.
        held_out: rows with a `row_key` below this are left out.
        state: where to continue; None is the start.
    """
    state = state or {"place": None, "carried": [], "taken": 0}
    position = state["place"]
    taken = state["taken"]
    waiting = [_from_json(one) for one in state["carried"]]
    blocks = iterate_blocks(location, section, tokenizer, position, pool=pool)
    rows_read = 0
    empty_passes = 0
    has_documents = False
    while True:
        start = {"place": position, "carried": [_to_json(one) for one in waiting]}
        documents = waiting
        room = WINDOW_PACKS * section.seq_len
        ended = False
        while room > 0 and not ended:
            block = next(blocks)
            keys = block.tokens["key"].to_numpy()
            cut = cut_rows(block.tokens, section, name=block.names.__getitem__, lines=np.flatnonzero(keys >= held_out))
            check_vocabulary(cut.largest_id, vocab_size)
            documents += [cut[index] for index in range(len(cut))]
            room -= int(cut.lengths.sum()) if section.pack else section.seq_len * len(cut)
            rows_read += cut.report.rows
            has_documents = has_documents or len(cut) > 0
            position = block.position
            ended = block.position is None
        packs, waiting = _pack(documents, section, ended=ended)
        for number, pack in enumerate(packs[taken:], start=taken + 1):
            yield pack, {**start, "taken": number}
        taken = 0
        if ended:
            # One pass may be empty: a resume may begin near its end.
            empty_passes = 0 if has_documents else empty_passes + 1
            has_documents = False
            if empty_passes == 2:
                what = f"no document holds a token to learn ({counted(rows_read, 'row')})"
                raise UserError(location.where, what, "look at the data with fsdp2kit preview")


def _pack(
    documents: list[Document], section: DataConfig, *, ended: bool
) -> tuple[list[list[Document]], list[Document]]:
    """The packs to train on now, and the documents of those that wait: the emptiest, at most half a window."""
    lengths = np.array([len(ids) for ids, _ in documents], dtype=np.int64)
    plan = plan_packs(lengths, seq_len=section.seq_len) if section.pack else plan_single(lengths)
    fill = np.array([lengths[plan[pack]].sum() for pack in range(len(plan))], dtype=np.int64)
    waits: set[int] = set()
    if section.pack and not ended:
        emptiest = np.argsort(fill, kind="stable")[: WINDOW_PACKS // 2]
        waits = {int(pack) for pack in emptiest if fill[pack] < _FULL * section.seq_len}
    packs = [[documents[at] for at in plan[pack]] for pack in range(len(plan)) if pack not in waits]
    return packs, [documents[at] for at in sorted(int(at) for pack in waits for at in plan[pack])]


class StreamLoader:
    """One data-parallel rank's share of a stream's global batches, which are made in order."""

    steps_per_epoch = 0
    """A stream's length is unknown, so `train.steps` decides when training ends."""

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
            sources: for each source, a function from ``state`` to its `iterate_packs`.
            weights: each source's share of the mix's tokens; their sum is 1.
            names: of the sources of a mix.
        """
        self._sources = sources
        self.share = share
        self._weights = np.asarray(weights)
        self.source_names = tuple(names) if len(weights) > 1 else ()
        self.seek(0, None)

    def batch(self, index: int) -> list[Batch]:
        """This rank's micro-batches of global batch ``index``, which must follow the one before."""
        self._check_next(index)
        packs = []
        for _ in range(self.share.global_batch_size):
            source = furthest_behind(self._weights, self._tokens)
            documents, self._states[source] = next(self._packs[source])
            self._tokens[source] += sum(len(ids) for ids, _ in documents)
            packs.append(Pack(documents, source))
        self._next += 1
        return self.share.batches([packs[at] for at in self.share.packs], sources=len(self._weights), index=index)

    def state(self, index: int) -> State:
        """What `seek` needs to continue with global batch ``index``, which must be the next.

        It is a few integers, and the documents that wait.
        """
        self._check_next(index)
        return {"tokens": list(self._tokens), "sources": list(self._states)}

    def seek(self, index: int, state: State | None) -> None:
        """Make ``index`` the next batch, from the `state` of any rank of any mesh; None is the start."""
        self._next = index
        count = len(self._sources)
        self._tokens: list[int] = list(state["tokens"]) if state else [0] * count
        self._states: list[State | None] = list(state["sources"]) if state else [None] * count
        self._packs = [packs(state=one) for packs, one in zip(self._sources, self._states, strict=True)]

    def _check_next(self, index: int) -> None:
        if index != self._next:
            raise ValueError(f"a stream's next batch is {self._next}, not {index}; resume with `seek`")


def _to_json(document: Document) -> list[list[int]]:
    ids, supervised = document
    return [ids.tolist(), supervised.astype(int).tolist()]


def _from_json(document: list[list[int]]) -> Document:
    ids, supervised = document
    return np.asarray(ids, dtype=np.int64), np.asarray(supervised, dtype=bool)
