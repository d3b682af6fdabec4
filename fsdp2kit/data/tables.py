"""Tables of tokens: the rows of a set, tokenised once into an Arrow file, or block by block for a stream.

The name of the Arrow file depends on content, tokenizer, template, format and the code that reads them, and on nothing
else: an edited data file gives another one, another ``seq_len`` or ``overlong`` does not.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import json
import os
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal, NamedTuple
from unittest import mock

import numpy as np
import pyarrow as pa

from fsdp2kit.config.schema import DataConfig
from fsdp2kit.console import progress_bar
from fsdp2kit.data.cache import DEFAULT, Cache, filling
from fsdp2kit.data.columns import row_key
from fsdp2kit.data.findings import Findings
from fsdp2kit.data.formats.table import FORMATS
from fsdp2kit.data.formatter import formatter_digest
from fsdp2kit.data.rows import Position, Row, RowReader, blocks_of, estimate_rows, hub_content
from fsdp2kit.data.sources import Location, locate
from fsdp2kit.data.template import Tokenizer, day_of, writes_date
from fsdp2kit.data.tokens import encode_documents, ending_of
from fsdp2kit.errors import UserError
from fsdp2kit.job import stop
from fsdp2kit.job.distributed import one_per_machine_first
from fsdp2kit.model import tokenizer as tokenizer_module
from fsdp2kit.model.tokenizer import ends_answers, special_ids, stop_tokens

# Raise this number when rows that were right get other tokens: runs on streams that have begun are then refused.
_ENCODING = 2
_FINDINGS = b"fsdp2kit"  # the key of `Findings` in a table's metadata
# The files whose code turns rows into tokens, beside the formats'.
_CODE = (
    "rows.py",
    "json_texts.py",
    "formatter.py",
    "names.py",
    "fields.py",
    "columns.py",
    "messages.py",
    "conversation.py",
    "unread.py",
    "findings.py",
    "template.py",
    "bounds.py",
    "fitting.py",
    "special.py",
    "rendered.py",
    "tokens.py",
    "tables.py",
)
_STREAM_BLOCK = 64  # rows of a stream that are tokenised in one call
_TABLE_BLOCK = 256  # the same, of a table
_WORTH_WORKERS = 4096  # rows from which on worker processes save time
_MOST_WORKERS = 16
_WATCH_SECONDS = 0.5
_FORK: Literal["fork", "spawn"] = "fork" if sys.platform == "linux" else "spawn"

# A table of tokens has a line for each document of a row: each answer, and each document that a row of tokens packs.
_SCHEMA = pa.schema(
    {
        "ids": pa.list_(pa.int32()),
        "supervised": pa.list_(pa.bool_()),
        "length": pa.int64(),
        "targets": pa.int64(),  # supervised tokens; the first token is never a target
        "ending": pa.int64(),  # the last supervised token if it is special, as one that ends a turn; else `NO_ENDING`
        "largest_id": pa.int64(),
        "digest": pa.binary(),  # 16 bytes, of ids and mask
        "key": pa.uint64(),  # `row_key`
        "is_first": pa.bool_(),  # of its row's lines
    }
)


class TokenTable(NamedTuple):
    """The tokens of a set of rows, and the names of these in errors."""

    table: pa.Table
    """The columns of `_SCHEMA`."""
    where: str
    """Names the set."""
    name: Callable[[int], str]
    """Names the row of a line of the table."""
    findings: Findings = Findings()
    """What was noticed of the rows."""

    def name_of_row(self, number: int) -> str:
        """Names a row by its number, from 0."""
        return self.name(int(np.searchsorted(_rows_of_lines(self.table), number)))


@dataclass(frozen=True)
class Block:
    """Some neighbouring rows, tokenised."""

    tokens: pa.Table
    """The columns of `_SCHEMA`."""
    names: list[str]
    """Names of each line's row in errors."""
    rows: int
    position: Position | None
    """The position after them; None at the end of a pass, in a block without rows."""


def encode_table(
    rows: Sequence[Row], section: DataConfig, tokenizer: Tokenizer | None = None, *, follows: bool = False
) -> pa.Table:
    """The lines of a table of tokens for some rows, see `encode_documents`, and in its metadata what was noticed.

    Args:
        tokenizer: None in a worker process, which has its own.
    """
    tokenizer = tokenizer if tokenizer is not None else _of_worker
    assert tokenizer is not None, "a worker's initializer ran"
    special = special_ids(tokenizer)
    findings = Findings()
    rows = [Row(row.parse(), row.where) for row in rows]
    encoded = encode_documents(rows, section, tokenizer, follows=follows, findings=findings)
    lines = []
    for row, documents in zip(rows, encoded, strict=True):
        key = row_key(row.parse(), section)
        for number, document in enumerate(documents):
            lines.append({**_columns(*document, key, special), "is_first": number == 0})
    table = pa.Table.from_pylist(lines, schema=_SCHEMA)
    return table.replace_schema_metadata({_FINDINGS: findings.to_json()})


def findings_of(table: pa.Table) -> Findings:
    """What was noticed of the rows of an `encode_table`."""
    return Findings.from_json(table.schema.metadata[_FINDINGS])


def names_of_lines(table: pa.Table, names: Sequence[str]) -> list[str]:
    """The name of each line's row, of a table of rows with these names."""
    rows: list[int] = _rows_of_lines(table).tolist()
    return [names[row] for row in rows]


def _rows_of_lines(table: pa.Table) -> np.ndarray:
    """The number of each line's row, from 0: int64 [lines]."""
    return np.cumsum(table["is_first"].to_numpy()) - 1


def _columns(ids: Sequence[int], supervised: Sequence[bool], key: int, special: frozenset[int]) -> dict[str, Any]:
    tokens = np.asarray(ids, dtype=np.int32)
    mask = np.asarray(supervised, dtype=bool)
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


def read_tokens(
    section: DataConfig, *, tokenizer: Tokenizer | None, key: str = "data.path", cache: Cache = DEFAULT
) -> TokenTable:
    """Read and tokenise a set of rows, or map its tokens from the cache. Collective.

    One rank on each machine fills the cache.

    Args:
        section: with the set's own path, split, format and columns.
        key: the TOML key that names the set, for errors.
    """
    words = require_tokenizer(tokenizer)

    def read() -> tuple[Location, pa.Table]:
        location = locate(section, key, cache=cache)
        return location, tokenise(location, section, words)

    location, table = one_per_machine_first(read)

    def name(line: int) -> str:
        row = int(_rows_of_lines(table)[line])
        return next(itertools.islice(RowReader(location, download=True), row, None)).where

    return TokenTable(table, location.where, name, findings_of(table))


def require_tokenizer(tokenizer: Tokenizer | None) -> Tokenizer:
    """The tokenizer; a `UserError` without one."""
    if tokenizer is None:
        raise UserError("model.tokenizer", "is required by data from files", "set model.tokenizer or model.path")
    return tokenizer


def tokenise(location: Location, section: DataConfig, tokenizer: Tokenizer) -> pa.Table:
    """The tokens of all rows, memory-mapped from the cache, which is filled first if need be."""
    file = _cache_file(location.digest() or hub_content(location), location, section, tokenizer)
    if not file.is_file():
        file.parent.mkdir(parents=True, exist_ok=True)
        # The file is renamed when it is complete, so other processes see all of it or nothing.
        unique = uuid.uuid4().hex
        beside = file.with_suffix(f".{unique}.tmp")
        findings = Findings()
        noted = file.with_suffix(f".{unique}.json.tmp")
        try:
            with filling(file.parent), pa.OSFile(str(beside), "wb") as sink, pa.ipc.new_stream(sink, _SCHEMA) as out:
                blocks = _one_pass(location, section, tokenizer)
                # The first block forks the workers, so it is made before the bar starts a thread.
                first = next(blocks)
                with progress_bar(f"tokenising {Path(location.path).name}", unit="rows") as bar:
                    for block in itertools.chain([first], blocks):
                        out.write_table(block.tokens)
                        findings.add(findings_of(block.tokens))
                        bar.advance(block.rows)
                        bar.total = estimate_rows(location, block.position, int(bar.done))
                noted.write_text(findings.to_json(), encoding="utf-8")
            noted.replace(_findings_file(file))  # first: tokens without it would be read without what was noticed
            beside.replace(file)
        finally:
            beside.unlink(missing_ok=True)
            noted.unlink(missing_ok=True)
    found = pa.ipc.open_stream(pa.memory_map(str(file))).read_all()
    return found.replace_schema_metadata({_FINDINGS: _read_findings(file)})


def _findings_file(file: Path) -> Path:
    return file.with_suffix(".json")


def _read_findings(file: Path) -> str:
    """What was noticed of the rows of a file of tokens; nothing where that was removed from the cache."""
    with contextlib.suppress(OSError, ValueError):
        return Findings.from_json(_findings_file(file).read_bytes()).to_json()
    return Findings().to_json()


def is_tokenised(location: Location, section: DataConfig, tokenizer: Tokenizer) -> bool:
    """Whether the cache has the tokens of files on this machine."""
    content = location.digest()
    return content is not None and _cache_file(content, location, section, tokenizer).is_file()


def _cache_file(content: str, location: Location, section: DataConfig, tokenizer: Tokenizer) -> Path:
    return location.cache.file(f"{cache_key(content, section, tokenizer)}.{_code_digest()}.arrow")


@functools.cache
def _code_digest() -> str:
    """Digest of the code that turns rows into tokens: tokens of another version are not used."""
    folder = Path(__file__).parent
    files = [*(folder / name for name in _CODE), *sorted(folder.glob("formats/*.py")), Path(tokenizer_module.__file__)]
    digest = hashlib.blake2b(digest_size=4)
    for path in files:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def iterate_blocks(
    location: Location,
    section: DataConfig,
    tokenizer: Tokenizer,
    position: Position | None = None,
    *,
    pool: ProcessPoolExecutor | None = None,
) -> Iterator[Block]:
    """A stream's blocks from a position on, pass after pass, without end.

    Args:
        pool: `start_workers`'s processes; the blocks do not depend on them. None tokenises here, block by block.
    """

    def passes() -> Iterator[tuple[list[Row], Position | None]]:
        yield from _read_blocks(RowReader(location, position), _STREAM_BLOCK)
        while True:
            yield [], None
            yield from _read_blocks(RowReader(location), _STREAM_BLOCK)

    return _encode_blocks(passes(), section, tokenizer, pool=pool, ahead=4, follows=position is not None)


def start_workers(
    count: int, tokenizer: Tokenizer, *, method: Literal["fork", "spawn"] = "spawn"
) -> ProcessPoolExecutor | None:
    """Processes that tokenise; None if ``count`` is 0.

    Args:
        method: "fork" starts them at once, but copies threads' locks and a CUDA context, so they must end soon.
    """
    if not count:
        return None
    arguments = tokenizer, os.getpid()
    return ProcessPoolExecutor(count, get_context(method), initializer=_start_worker, initargs=arguments)


def cache_key(content: str, section: DataConfig, tokenizer: Tokenizer) -> str:
    """Digest of everything that the tokens of a content depend on."""
    import transformers

    if tokenizer.is_fast:
        # Remove what earlier calls have left; our calls set their own.
        tokenizer.backend_tokenizer.no_truncation()
        tokenizer.backend_tokenizer.no_padding()
        state = tokenizer.backend_tokenizer.to_str()
    else:
        state = tokenizer.get_vocab()
    asks_template = FORMATS[section.format].asks_template
    parts = [
        _ENCODING,
        content,
        section.format,
        section.columns.model_dump(exclude_none=True),
        section.train_on,
        *([section.wrap] if section.wrap != "none" else []),  # earlier streams are identified without it
        transformers.__version__,
        type(tokenizer).__name__,
        state,
        tokenizer.special_tokens_map,
        tokenizer.chat_template if asks_template else None,
    ]
    # Where the template ends answers itself, other stop tokens change nothing.
    if asks_template and tokenizer.chat_template and not ends_answers(tokenizer):
        parts.append(stop_tokens(tokenizer))
    if asks_template and writes_date(tokenizer):
        parts.append(str(day_of(tokenizer)))
    if section.formatter is not None:
        parts.append(formatter_digest(section.formatter))
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _one_pass(location: Location, section: DataConfig, tokenizer: Tokenizer) -> Iterator[Block]:
    """The blocks of all rows, tokenised by ``data.workers`` processes."""
    blocks = _read_blocks(RowReader(location, download=True), _TABLE_BLOCK)
    workers = section.workers
    if workers == "auto":
        first = list(itertools.islice(blocks, _WORTH_WORKERS // _TABLE_BLOCK))
        blocks = itertools.chain(first, blocks)
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        is_worth_it = cores > 1 and len(first) * _TABLE_BLOCK == _WORTH_WORKERS
        workers = min(cores, _MOST_WORKERS) if is_worth_it else 0
    # Forked processes must start no tokenizer threads, or they warn of those of this process.
    alone = mock.patch.dict(os.environ, {"TOKENIZERS_PARALLELISM": "false"}) if workers else contextlib.nullcontext()
    with alone, start_workers(workers, tokenizer, method=_FORK) or contextlib.nullcontext() as pool:
        yield from _encode_blocks(blocks, section, tokenizer, pool=pool, ahead=2 * workers)


def _read_blocks(reader: RowReader, size: int) -> Iterator[tuple[list[Row], Position]]:
    for block in blocks_of(reader, size):
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
    """The blocks, tokenised, in their order; up to ``ahead`` more of them are with the pool.

    Args:
        follows: whether rows before them were encoded.
    """
    waiting: deque[tuple[Future[pa.Table], list[str], Position | None]] = deque()
    for rows, position in blocks:
        names = [row.where for row in rows]
        if pool is None:
            yield _block(encode_table(rows, section, tokenizer, follows=follows), names, position)
        else:
            waiting.append((pool.submit(encode_table, rows, section, follows=follows), names, position))
        follows = True
        if len(waiting) > ahead:
            tokens, names, position = waiting.popleft()
            yield _block(tokens.result(), names, position)
    for tokens, names, position in waiting:
        yield _block(tokens.result(), names, position)


def _block(tokens: pa.Table, names: Sequence[str], position: Position | None) -> Block:
    return Block(tokens, names_of_lines(tokens, names), len(names), position)


_of_worker: Tokenizer | None = None  # a worker process's own, set when it starts


def _start_worker(tokenizer: Tokenizer, parent: int) -> None:
    global _of_worker
    _of_worker = tokenizer
    threading.Thread(target=_leave_with, args=(parent,), daemon=True).start()
    stop.be_a_worker()


def _leave_with(parent: int) -> None:
    """End this process soon after the rank that started it has ended.

    A killed rank cannot end its workers. They would wait for rows on a pipe, which each of them keeps open for the
    others.
    """
    while os.getppid() == parent:
        time.sleep(_WATCH_SECONDS)
    os._exit(1)
