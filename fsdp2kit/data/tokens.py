"""Rows to token ids and masks: for a stream a block at a time, for data that is read whole once, into an Arrow file.

The file is named by content, tokenizer, template, format and the code that reads them, and by nothing else: another
``seq_len`` or another policy for long documents reads the same one, an edited file does not.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import json
import os
import signal
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import numpy as np
import pyarrow as pa

from fsdp2kit.config.data_schema import DataConfig
from fsdp2kit.console import progress_bar
from fsdp2kit.data.cache import cached_file
from fsdp2kit.data.chat import Tokenizer
from fsdp2kit.data.formats import encode_rows, row_key, rows_together
from fsdp2kit.data.rows import Position, Row, RowReader, estimate_rows, hub_content
from fsdp2kit.data.sources import Source

# Raise it with a change to the tokens of rows that were right before: streams of runs under way are then refused.
_ENCODING = 2
NO_ENDING = -1
_STREAM_BLOCK, _TABLE_BLOCK = 64, 256  # rows that are tokenised in one call
_WORTH_WORKERS = 4096  # rows
_MOST_WORKERS = 16
_WATCH_SECONDS = 0.5
_FORK: Literal["fork", "spawn"] = "fork" if sys.platform == "linux" else "spawn"

_SCHEMA = pa.schema(
    {
        "ids": pa.list_(pa.int32()),
        "supervised": pa.list_(pa.bool_()),
        "length": pa.int64(),
        "targets": pa.int64(),
        "ending": pa.int64(),
        "largest_id": pa.int64(),
        "digest": pa.binary(),
        "key": pa.uint64(),
    }
)


@dataclass(frozen=True)
class Block:
    """Some rows of a source, tokenised."""

    tokens: pa.Table
    """The columns of `tokenise`."""
    names: list[str]
    """What errors call the rows."""
    position: Position | None
    """The position after them; None at the end of a pass, in a block without rows."""


def tokenise(source: Source, section: DataConfig, tokenizer: Tokenizer) -> pa.Table:
    """One row of tokens for each row of the data, memory-mapped.

    Columns: ``ids`` (list of int32), ``supervised`` (list of bool), ``length`` (int64), ``targets`` (int64:
    supervised tokens, the first token never being a target), ``ending`` (int64: the special token that the last
    supervised token is, which ends a turn or a text; −1 where it is none), ``largest_id`` (int64), ``digest`` (16
    bytes over ids and mask), ``key`` (uint64: `row_key`). A row with two answers is two rows, the better one first.

    Raises:
        UserError: the data cannot be read, or a row does not have the columns and types of its format.
    """
    file = _cache_file(source.digest() or hub_content(source), section, tokenizer)
    if not file.is_file():
        file.parent.mkdir(parents=True, exist_ok=True)
        # Moved there when it is whole: another process, of this machine or another, sees all of it or nothing.
        beside = file.with_suffix(f".{uuid.uuid4().hex}.partial")
        try:
            with pa.OSFile(str(beside), "wb") as sink, pa.ipc.new_stream(sink, _SCHEMA) as out:
                blocks = _one_pass(source, section, tokenizer)
                # Taken before the bar's thread runs: the first block starts the workers, which are forks.
                first = next(blocks)
                with progress_bar(f"tokenising {Path(source.path).name}", unit="rows") as bar:
                    for block in itertools.chain([first], blocks):
                        out.write_table(block.tokens)
                        bar.advance(len(block.names))
                        bar.total = estimate_rows(source, block.position, int(bar.done))
            beside.replace(file)
        finally:
            beside.unlink(missing_ok=True)
    return pa.ipc.open_stream(pa.memory_map(str(file))).read_all()


def is_tokenised(source: Source, section: DataConfig, tokenizer: Tokenizer) -> bool:
    """Whether the cache has the tokens of files on this machine."""
    content = source.digest()
    return content is not None and _cache_file(content, section, tokenizer).is_file()


def _cache_file(content: str, section: DataConfig, tokenizer: Tokenizer) -> Path:
    return cached_file(f"{cache_key(content, section, tokenizer)}.{_code_digest()}.arrow")


@functools.cache
def _code_digest() -> str:
    """Of the code that makes tokens of rows: what another version of it stored is not used."""
    digest = hashlib.blake2b(digest_size=4)
    for name in ("chat.py", "columns.py", "formats.py", "rows.py", "template.py", "tokens.py"):
        digest.update(Path(__file__).with_name(name).read_bytes())
    return digest.hexdigest()


def iterate_blocks(
    source: Source,
    section: DataConfig,
    tokenizer: Tokenizer,
    position: Position | None = None,
    *,
    pool: ProcessPoolExecutor | None = None,
) -> Iterator[Block]:
    """Blocks of a stream from a position on, pass after pass, without end.

    Args:
        pool: processes that tokenise, of `start_workers`; the blocks do not depend on them. None does it here, when a
            block is wanted.

    Raises:
        UserError: a row cannot be read or encoded, naming it; or a pass has no row.
    """

    def passes() -> Iterator[tuple[list[Row], Position | None]]:
        yield from _read_blocks(RowReader(source, position), _STREAM_BLOCK)
        while True:
            yield [], None
            yield from _read_blocks(RowReader(source), _STREAM_BLOCK)

    return _encode_blocks(passes(), section, tokenizer, pool=pool, ahead=4, follows=position is not None)


def start_workers(
    count: int, tokenizer: Tokenizer, *, method: Literal["fork", "spawn"] = "spawn"
) -> ProcessPoolExecutor | None:
    """Processes that tokenise; None for none.

    Args:
        method: "fork" starts them at once, but also copies locks of threads and a CUDA context: for a short time only.
    """
    if not count:
        return None
    arguments = tokenizer, os.getpid()
    return ProcessPoolExecutor(count, get_context(method), initializer=_start_worker, initargs=arguments)


def cache_key(content: str, section: DataConfig, tokenizer: Tokenizer) -> str:
    """Digest of everything that the tokens of some content depend on."""
    import transformers

    if tokenizer.is_fast:
        # What the last call left behind, and ours override.
        tokenizer.backend_tokenizer.no_truncation()
        tokenizer.backend_tokenizer.no_padding()
        state = tokenizer.backend_tokenizer.to_str()
    else:
        state = tokenizer.get_vocab()
    parts = [
        _ENCODING,
        content,
        section.format,
        section.columns.model_dump(exclude_none=True),
        section.train_on,
        *([section.wrap] if section.wrap != "none" else []),  # streams of earlier versions are known by this digest
        transformers.__version__,
        type(tokenizer).__name__,
        state,
        tokenizer.special_tokens_map,
        None if section.format in ("text", "tokens") else tokenizer.chat_template,
    ]
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def special_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """Ids of the tokens that may end a turn or a text."""
    ids = {at for at, token in tokenizer.added_tokens_decoder.items() if token.special}
    return frozenset(ids | ({tokenizer.eos_token_id} if isinstance(tokenizer.eos_token_id, int) else set()))


def ending_of(ids: np.ndarray, supervised: np.ndarray, special: frozenset[int]) -> int:
    """The special token that the last supervised token is; `NO_ENDING` where it is none."""
    targets = np.flatnonzero(supervised)
    last = int(ids[targets[-1]]) if len(targets) else NO_ENDING
    return last if last in special else NO_ENDING


def _one_pass(source: Source, section: DataConfig, tokenizer: Tokenizer) -> Iterator[Block]:
    """All blocks of a source, tokenised by as many processes as were asked for."""
    blocks, workers = _read_blocks(RowReader(source, download=True), _TABLE_BLOCK), section.workers
    if workers == "auto":
        first = list(itertools.islice(blocks, _WORTH_WORKERS // _TABLE_BLOCK))
        blocks = itertools.chain(first, blocks)
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        is_worth_it = cores > 1 and len(first) * _TABLE_BLOCK == _WORTH_WORKERS
        workers = min(cores, _MOST_WORKERS) if is_worth_it else 0
    # Forked processes warn of the threads that the tokenizer had unless they are told to start none.
    alone = mock.patch.dict(os.environ, {"TOKENIZERS_PARALLELISM": "false"}) if workers else contextlib.nullcontext()
    with alone, start_workers(workers, tokenizer, method=_FORK) or contextlib.nullcontext() as pool:
        yield from _encode_blocks(blocks, section, tokenizer, pool=pool, ahead=2 * workers)


def _read_blocks(reader: RowReader, size: int) -> Iterator[tuple[list[Row], Position]]:
    rows = iter(reader)
    while block := list(itertools.islice(rows, size)):
        yield block, reader.position


def _encode_blocks(
    blocks: Iterable[tuple[list[Row], Position | None]],
    section: DataConfig,
    tokenizer: Tokenizer,
    *,
    pool: ProcessPoolExecutor | None,
    ahead: int,
    follows: bool = False,
) -> Iterator[Block]:
    """The blocks in their order, with up to ``ahead`` more of them in the hands of the pool.

    Args:
        follows: whether rows before them were encoded.
    """
    waiting: deque[tuple[Future[pa.Table], list[str], Position | None]] = deque()
    for rows, position in blocks:
        names = [row.where for row in rows]
        if pool is None:
            yield Block(encode_table(rows, section, tokenizer, follows=follows), names, position)
        else:
            waiting.append((pool.submit(encode_table, rows, section, follows=follows), names, position))
        follows = True
        if len(waiting) > ahead:
            tokens, names, position = waiting.popleft()
            yield Block(tokens.result(), names, position)
    for tokens, names, position in waiting:
        yield Block(tokens.result(), names, position)


_of_worker: Tokenizer | None = None  # a worker process gets it once


def _start_worker(tokenizer: Tokenizer, parent: int) -> None:
    global _of_worker
    _of_worker = tokenizer
    threading.Thread(target=_leave_with, args=(parent,), daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends Ctrl-C here, too; the run still wants its rows


def _leave_with(parent: int) -> None:
    """End this process soon after the rank that started it is gone.

    A rank that was killed cannot tell its workers to end, and they wait for rows on a pipe that each of them keeps
    open for the others.
    """
    while os.getppid() == parent:
        time.sleep(_WATCH_SECONDS)
    os._exit(1)


def encode_table(
    rows: Sequence[Row], section: DataConfig, tokenizer: Tokenizer | None = None, *, follows: bool = False
) -> pa.Table:
    """The columns of some rows; in a worker process with the tokenizer that it keeps. See `encode_rows`."""
    tokenizer = tokenizer if tokenizer is not None else _of_worker
    assert tokenizer is not None, "a worker's initializer ran"
    special = special_ids(tokenizer)
    rows = [Row(row.parse(), row.where) for row in rows]
    keys = [row_key(row.parse(), section) for row in rows for _ in range(rows_together(section))]
    encoded = encode_rows(rows, section, tokenizer, follows=follows)
    columns = [_columns(*one, key, special) for one, key in zip(encoded, keys, strict=True)]
    return pa.Table.from_pylist(columns, schema=_SCHEMA)


def _columns(ids: Sequence[int], supervised: Sequence[bool], key: int, special: frozenset[int]) -> dict[str, Any]:
    tokens, mask = np.asarray(ids, dtype=np.int32), np.asarray(supervised, dtype=bool)
    return {
        "ids": tokens,
        "supervised": mask,
        "length": len(tokens),
        "targets": int(mask[1:].sum()),
        "ending": ending_of(tokens, mask, special),
        "largest_id": int(tokens.max(initial=-1)),
        "digest": hashlib.blake2b(tokens.astype("<i4").tobytes() + mask.tobytes(), digest_size=16).digest(),
        "key": key,
    }
