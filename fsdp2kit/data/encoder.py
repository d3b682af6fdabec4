"""Blocks of a stream's rows to token ids and masks: here, or ahead of time in worker processes, in the same order."""

from __future__ import annotations

import itertools
import signal
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import TYPE_CHECKING

from fsdp2kit.data.formats import RowFormat, encode_rows
from fsdp2kit.data.masks import Encoded
from fsdp2kit.data.rows import name_exactly
from fsdp2kit.data.sources import Source
from fsdp2kit.data.stream import Place, StreamRow, row_stream
from fsdp2kit.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BLOCK = 64  # rows that are tokenised in one call


@dataclass(frozen=True)
class Block:
    """Some rows of a stream, encoded."""

    rows: list[Encoded]
    names: list[str]
    place: Place | None
    """The place after them; None at the end of a pass, after which the stream begins anew."""


def iterate_blocks(
    source: Source,
    how: RowFormat,
    tokenizer: PreTrainedTokenizerBase,
    *,
    place: Place | None = None,
    pool: ProcessPoolExecutor | None = None,
    ahead: int = 4,
) -> Iterator[Block]:
    """Blocks from a place on, pass after pass, without end. A pass ends with a block whose ``place`` is None.

    Args:
        pool: processes that encode; the blocks do not depend on them. None encodes here, when a block is wanted.
        ahead: blocks that are read and given to the pool beyond the one that is wanted.

    Raises:
        UserError: a row cannot be read or encoded, naming it; or a pass has no row.
    """
    waiting: deque[tuple[Future[list[Encoded]], list[str], Place | None]] = deque()
    for rows, after in _read_blocks(source, place):
        names = [row.where for row in rows]
        if pool is None:
            yield Block(_encode(rows, source, how, tokenizer), names, after)
            continue
        waiting.append((pool.submit(_encode_in_worker, rows, source, how), names, after))
        while len(waiting) > ahead:
            encoded, names, after = waiting.popleft()
            yield Block(encoded.result(), names, after)


def start_workers(count: int, tokenizer: PreTrainedTokenizerBase) -> ProcessPoolExecutor | None:
    """Processes for `iterate_blocks`; None for none. Started afresh: a fork would copy threads' locks and CUDA."""
    if not count:
        return None
    return ProcessPoolExecutor(count, get_context("spawn"), initializer=_keep_tokenizer, initargs=(tokenizer,))


def _read_blocks(source: Source, place: Place | None) -> Iterator[tuple[list[StreamRow], Place | None]]:
    while True:
        stream = row_stream(source, place)
        rows, seen = iter(stream), place is not None
        while block := list(itertools.islice(rows, BLOCK)):
            seen = True
            yield block, stream.place
        if not seen:
            raise UserError(source.where, "there are no rows", "give data with at least one row")
        yield [], None
        place = None


_tokenizer: PreTrainedTokenizerBase | None = None  # of a worker process, which gets it once


def _keep_tokenizer(tokenizer: PreTrainedTokenizerBase) -> None:
    global _tokenizer
    _tokenizer = tokenizer
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends Ctrl-C here, too; the run still wants its rows


def _encode_in_worker(rows: list[StreamRow], source: Source, how: RowFormat) -> list[Encoded]:
    assert _tokenizer is not None, "the pool's initializer ran"
    return _encode(rows, source, how, _tokenizer)


def _encode(
    rows: list[StreamRow], source: Source, how: RowFormat, tokenizer: PreTrainedTokenizerBase
) -> list[Encoded]:
    try:
        return encode_rows([row.value for row in rows], [row.where for row in rows], how, tokenizer)
    except UserError as error:
        raise UserError(name_exactly(error.where, source), error.what, error.todo) from None
