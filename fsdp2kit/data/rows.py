"""The rows of a set, in order and from any position, for data that is read whole and for streams alike.

JSON lines, JSON arrays, CSV and plain text are read here. Arrow would give every row the union of all rows' keys,
filled with None, which harms tool schemas; it refuses rows whose types differ; and pandas takes the cells "NA" and
"null" for missing. `datasets` reads everything else. It goes back to a position by skipping rows within one shard.
"""

from __future__ import annotations

import bz2
import contextlib
import csv
import functools
import io
import itertools
import json
import lzma
import re
import sys
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq

from fsdp2kit.config.schema import DataConfig
from fsdp2kit.config.sections.data import DataPathConfig
from fsdp2kit.data.cache import DEFAULT, Cache
from fsdp2kit.data.formatter import formatted
from fsdp2kit.data.json_texts import KeyTwice, load_json, row_with_key_twice
from fsdp2kit.data.sources import (
    COMPRESSED,
    Location,
    first_line,
    locate,
    no_configuration,
    quiet,
    several_configurations,
    suffix_of,
)
from fsdp2kit.errors import UserError
from fsdp2kit.files.local import todo_of_cache
from fsdp2kit.files.remote import is_url

Position = dict[str, Any]  # what JSON can hold
_BLOCK_BYTES = 16 << 20  # of a block that is not one large row
_STORED_BYTES = 64 << 10  # that are read of a compressed file at once
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Row:
    """One row, and its name in errors: ``file:line`` where lines are known."""

    content: dict[str, Any] | bytes
    """Columns by name, or a line of JSON that `parse` reads."""
    where: str
    formatter: str | None = None
    """``path.py:function`` or ``module:function`` of what makes the row."""

    def parse(self) -> dict[str, Any]:
        """The row's columns, or those that the formatter makes of them."""
        if isinstance(self.content, dict):
            columns = self.content
        else:
            columns = _as_row(_parse_json(self.content, self.where), self.where)
        return columns if self.formatter is None else formatted(self.formatter, columns, self.where)


class RowReader:
    """An iterable over the rows of a set that knows its position.

    Args:
        position: the `position` of another reader of the set; None is the start.
        download: keep a local copy of what is remote, instead of reading it over the network.
    """

    def __init__(self, location: Location, position: Position | None = None, *, download: bool = False) -> None:
        self._location = location
        self._download = download
        self._is_start = position is None
        self._at = position or {"file": 0, "offset": 0, "line": 0}
        self._table: Any = None

    @property
    def position(self) -> Position:
        """The position after the last row that was read."""
        return self._at if self._table is None else {**self._at, "dataset": self._table.state_dict()}

    def __iter__(self) -> Generator[Row, None, None]:
        location = self._location
        start = self._at
        first, stop = _bounds(location, download=self._download)
        count = start.get("count", 0)
        is_empty = self._is_start
        skip = max(0, first - count)
        files = () if stop <= first else (location.path,) if location.kind in ("saved", "hub") else location.files
        for number, file in enumerate(files[start["file"] :], start=start["file"]):
            at = start if number == start["file"] else {"offset": 0, "line": 0}
            read = _text_rows if location.is_text else self._table_rows
            for row, offset, line in read(file, at):
                if count >= stop:
                    return
                count += 1
                self._at = {"file": number, "offset": offset, "line": line, "count": count}
                if skip:
                    skip -= 1
                else:
                    is_empty = False
                    yield row if location.formatter is None else replace(row, formatter=location.formatter)
        if is_empty:
            raise UserError(location.where, "there are no rows", "give data with at least one row")

    def _table_rows(self, file: str, start: Position) -> Iterator[tuple[Row, int, int]]:
        with _readable(self._location):
            if self._location.kind == "parquet" and not is_url(file) and not pq.read_metadata(file).num_rows:
                return  # `datasets` refuses it
            self._table = _open_table(self._location, file, download=self._download)
            if "dataset" in start:
                self._table.load_state_dict(start["dataset"])
            for number, columns in enumerate(self._table, start=start["offset"]):
                # Arrow fills in None for missing keys.
                yield Row(without_none(columns), f"{file}: row {number}"), number + 1, 0


def blocks_of(rows: Iterable[Row], count: int) -> Iterator[list[Row]]:
    """Neighbouring rows, at most ``count`` together and few that are large: a block is held in memory.

    When a block is given, no row after it was read.
    """
    block = []
    size = 0
    for row in rows:
        block.append(row)
        size += _size(row.content)
        if len(block) == count or size > _BLOCK_BYTES:
            yield block
            block = []
            size = 0
    if block:
        yield block


def _size(content: Any) -> int:
    """Bytes of texts and numbers in a value, roughly."""
    if isinstance(content, (str, bytes)):
        return len(content)
    if isinstance(content, Mapping):
        return sum(map(_size, content.values()))
    if isinstance(content, list) and content:
        return sum(map(_size, content)) if isinstance(content[0], (str, dict, list)) else 8 * len(content)
    return 8


def first_rows(
    section: DataConfig | DataPathConfig, key: str, count: int, *, download: bool = False, cache: Cache = DEFAULT
) -> list[Row]:
    """The first ``count`` rows of a set; for ``download`` see `RowReader`."""
    with contextlib.closing(iter(RowReader(locate(section, key, cache=cache), download=download))) as rows:
        return list(itertools.islice(rows, count))


def _bounds(location: Location, *, download: bool) -> tuple[int, float]:
    """The numbers of the first row to read and of the one after the last."""
    first = 0
    stop = float("inf")
    if location.split != location.split_name and location.kind != "hub":  # `datasets` slices the hub's itself
        import datasets

        whole = replace(location, split=location.split_name, limit=None)
        number = sum(1 for _ in RowReader(whole, download=download))
        words = "rows" + location.split[len(location.split_name) :]
        [part] = datasets.ReadInstruction.from_spec(words).to_absolute({"rows": number})
        first = part.from_
        stop = part.to
    return first, stop if location.limit is None else min(stop, first + location.limit)


def hub_content(location: Location) -> str:
    """What identifies a hub dataset's rows: its files in the cache, named by revision, configuration and split."""
    import datasets

    with _readable(location), quiet():
        rows = datasets.load_dataset(location.path, location.name, split=location.split)
    content = [len(rows), [file["filename"] for file in rows.cache_files]]
    return json.dumps([*content, location.limit] if location.limit else content)


def estimate_rows(location: Location, position: Position | None, rows: int) -> float | None:
    """How many rows a set has, estimated from the position after its first ``rows``; None if that is impossible.

    Exact for parquet, whose files hold the number.
    """
    sizes = _sizes(location)
    if sizes is None or position is None:
        return None
    if location.kind == "parquet":
        return sum(sizes)
    return rows * sum(sizes) / (sum(sizes[: position["file"]]) + position["offset"])


@functools.lru_cache(maxsize=8)
def _sizes(location: Location) -> tuple[int, ...] | None:
    """The rows of each parquet file, or the bytes of each file of lines; None for other or remote files."""
    if not location.files or any(map(is_url, location.files)):
        return None
    if location.kind == "parquet":
        return tuple(pq.read_metadata(file).num_rows for file in location.files)
    has_lines = all(file.lower().endswith((".jsonl", ".ndjson", ".txt")) for file in location.files)
    return tuple(Path(file).stat().st_size for file in location.files) if has_lines else None


@contextlib.contextmanager
def _readable(location: Location) -> Iterator[None]:
    """Turn exceptions of `datasets` into errors that name the set."""
    import datasets

    try:
        yield
    except (OSError, ValueError, datasets.exceptions.DatasetGenerationError) as error:
        if location.kind == "hub":
            _check_configuration(error, location)
        reason = error.__cause__ if isinstance(error, datasets.exceptions.DatasetGenerationError) else None
        what = f"cannot be read as {location.kind} ({first_line(reason or error)})"
        todo = todo_of_cache(error) or "check the path, the split and the file"
        raise UserError(location.where, what, todo) from error


def _check_configuration(error: Exception, location: Location) -> None:
    """Raise the error of a configuration that is not named, or is not there, if that is what `datasets` says."""
    text = str(error)
    listed = re.search(r"(?:available configs|Available|in the cache): ?\[(.*?)\]", text)
    names = re.findall(r"'([^']*)'", listed[1]) if listed else []
    if cached := re.search(r"There are multiple .* configurations in the cache: (.*)", text):
        names = cached[1].split(", ")
    if names and location.name is None:
        raise several_configurations(location.where, names, name_key=location.name_key) from None
    if names and location.name not in names:
        where = location.where
        raise no_configuration(where, str(location.name), names, name_key=location.name_key) from None


@quiet()
def _open_table(location: Location, file: str, *, download: bool) -> Any:
    """A `datasets.IterableDataset` of one file, of a saved dataset or of a hub dataset."""
    import datasets

    if location.kind == "hub":
        cache = str(location.cache.for_hub())
        options: Any = {"split": location.split, "streaming": not download, "cache_dir": cache}
        found = datasets.load_dataset(location.path, location.name, **options)
        return found.to_iterable_dataset() if download else found
    if location.kind == "saved":
        saved = datasets.load_from_disk(location.path)
        if isinstance(saved, datasets.Dataset):
            saved = datasets.DatasetDict({"train": saved})
        if location.split_name not in saved:
            raise ValueError(f"there is no split {location.split_name!r}; it has {', '.join(map(str, saved))}")
        return saved[location.split_name].to_iterable_dataset()
    if download and is_url(file):
        # Make a local copy, anew when the file changes: `datasets` itself refuses URLs when offline.
        storage = str(location.cache.writable() / "fsdp2kit" / "files")
        cache = {"cache_storage": storage, "check_files": True}
        file = str(fsspec.open_local(f"filecache::{file}", filecache=cache))
    cache = str(location.cache.writable())
    return datasets.load_dataset(location.kind, data_files=file, split="train", streaming=True, cache_dir=cache)


def without_none(value: Any) -> Any:
    """A value without the None values, at any depth, that Arrow fills in for missing keys."""
    if isinstance(value, Mapping):
        return {key: without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_none(item) for item in value]
    return value


def _text_rows(file: str, start: Position) -> Iterator[tuple[Row, int, int]]:
    """The rows of a text file from a position on, each with the offset and the line after it.

    The offset counts uncompressed bytes in files of lines, and rows in CSV and JSON arrays.
    """
    try:
        with _open_file(file) as content:
            suffix = suffix_of(file)
            if suffix in (".csv", ".tsv"):
                yield from _csv_rows(file, content, delimiter="\t" if suffix == ".tsv" else ",", skip=start["offset"])
            elif suffix == ".json" and _is_array(content):
                yield from _array_rows(file, content, skip=start["offset"])
            else:
                content.seek(start["offset"])
                yield from _lines(file, content, start["offset"], start["line"], is_json=suffix != ".txt")
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise UserError(file, f"cannot be read ({first_line(error)})", "check the file and its permissions") from None


def _open_file(file: str) -> Any:
    if open_stream := _STREAMS.get(PurePosixPath(file.lower()).suffix):
        return io.BufferedReader(_Decompressed(file, open_stream))
    if is_url(file) or file.lower().endswith(COMPRESSED):
        return fsspec.open(file, "rb", compression="infer")
    return Path(file).open("rb")


class _Concatenated:
    """The content of an xz or bz2 file: one compressed stream, or several, with zeros between and behind them.

    Python's own `LZMAFile` and `BZ2File` end without an error at bytes that begin no stream.

    Args:
        stored: the compressed bytes.
        decompressor: makes one for a stream.
    """

    def __init__(self, stored: BinaryIO, decompressor: Callable[[], lzma.LZMADecompressor | bz2.BZ2Decompressor]):
        self._stored = stored
        self._decompressor = decompressor
        self._current = decompressor()

    def read(self, count: int) -> bytes:
        """At most ``count`` bytes, at least one of them before the end."""
        data = b""
        while not data:
            if self._current.eof:
                behind = self._behind()
                if not behind:
                    return b""
                self._current = self._decompressor()
                try:
                    data = self._current.decompress(behind, count)
                except (OSError, lzma.LZMAError):
                    raise OSError("bytes behind a compressed stream are not compressed") from None
            else:
                more = self._stored.read(_STORED_BYTES) if self._current.needs_input else b""
                if self._current.needs_input and not more:
                    raise EOFError("the file ends within a compressed stream")
                data = self._current.decompress(more, count)
        return data

    def _behind(self) -> bytes:
        """The first bytes behind the current stream that are not zero; none at the end of the file."""
        behind = self._current.unused_data.lstrip(b"\0")
        while not behind and (more := self._stored.read(_STORED_BYTES)):
            behind = more.lstrip(b"\0")
        return behind


# Of zstd, fsspec's own needs a further package, which has no lines.
_STREAMS: Mapping[str, Callable[[BinaryIO], Any]] = {
    ".zst": lambda stored: pa.CompressedInputStream(pa.PythonFile(stored, mode="r"), "zstd"),
    ".xz": lambda stored: _Concatenated(stored, lzma.LZMADecompressor),
    ".bz2": lambda stored: _Concatenated(stored, bz2.BZ2Decompressor),
}
"""What decompresses a file's bytes, by its suffix. `read(count)` gives all streams, one behind the other."""


class _Decompressed(io.RawIOBase):
    """What is in a compressed file or URL, in all of its streams, as it is decompressed. Going back starts anew.

    Args:
        open_stream: one of `_STREAMS`.
    """

    def __init__(self, file: str, open_stream: Callable[[BinaryIO], Any]) -> None:
        self._file = file
        self._open_stream = open_stream
        self._begin()

    def _begin(self) -> None:
        self._stored: Any = fsspec.open(self._file, "rb").open()
        self._stream = self._open_stream(self._stored)
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._stream.read(len(buffer))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if whence == io.SEEK_END:
            raise io.UnsupportedOperation("the length is not known")
        wanted = offset + (self._at if whence == io.SEEK_CUR else 0)
        if wanted < self._at:
            self._stored.close()
            self._begin()
        while self._at < wanted and (data := self._stream.read(min(1 << 20, wanted - self._at))):
            self._at += len(data)
        return self._at

    def close(self) -> None:
        if not self.closed:
            self._stored.close()
        super().close()


def _is_array(content: BinaryIO) -> bool:
    first = content.readline().lstrip(_BOM + b" \t\r\n")
    content.seek(0)
    return first[:1] in (b"[", b"")


def _lines(file: str, content: BinaryIO, offset: int, line: int, *, is_json: bool) -> Iterator[tuple[Row, int, int]]:
    for text in content:
        offset += len(text)
        line += 1
        where = f"{file}:{line}"
        if not is_json:
            yield Row({"text": _decode(text, where).rstrip("\r\n")}, where), offset, line
        elif (text.removeprefix(_BOM) if line == 1 else text).strip():
            yield Row(text.strip(), where), offset, line


def _array_rows(file: str, content: BinaryIO, *, skip: int) -> Iterator[tuple[Row, int, int]]:
    data = content.read()
    try:
        rows = _parse_json(data, file) if data.strip() else []
    except KeyTwice as error:
        number = row_with_key_twice(_decode(data, file))
        raise UserError(f"{file}: row {number}", error.what, error.todo) from None
    rows = rows if isinstance(rows, list) else [rows]
    for number, row in enumerate(rows[skip:], start=skip):
        where = f"{file}: row {number}"
        yield Row(_as_row(row, where), where), number + 1, 0


def _csv_rows(file: str, content: BinaryIO, *, delimiter: str, skip: int) -> Iterator[tuple[Row, int, int]]:
    csv.field_size_limit(sys.maxsize)  # a cell may be a book
    text = io.TextIOWrapper(content, encoding="utf-8-sig", newline="")
    reader = csv.reader(text, delimiter=delimiter, strict=True)
    try:
        header = next(reader, [])
        if twice := [name for name in header if header.count(name) > 1]:
            raise UserError(f"{file}:1", f"the header names {twice[0]!r} twice", "give each column a name of its own")
        line = reader.line_num
        for number, cells in enumerate(reader, start=1):
            where = f"{file}:{line + 1}"
            line = reader.line_num
            if not cells or number <= skip:
                continue
            if len(cells) != len(header):
                what = f"{len(cells)} cells, but the header names {len(header)} columns"
                raise UserError(where, what, "quote cells that hold the delimiter or a line break")
            yield Row(dict(zip(header, cells, strict=True)), where), number, line
    except csv.Error as error:
        raise UserError(f"{file}:{reader.line_num}", f"not valid CSV ({error})", "mend that line") from None
    except UnicodeDecodeError as error:
        raise UserError(file, f"not UTF-8 ({error.reason})", "save the file as UTF-8") from None
    finally:
        text.detach()  # the caller closes the file


def _parse_json(data: bytes, where: str) -> Any:
    try:
        return load_json(_decode(data, where), where)
    except json.JSONDecodeError as error:
        position = where if error.lineno == 1 else f"{where}:{error.lineno}"
        what = f"not valid JSON ({error.msg}, column {error.colno})"
        raise UserError(position, what, "one JSON object a line (.jsonl)") from None


def _decode(data: bytes, where: str) -> str:
    try:
        return data.removeprefix(_BOM).decode()
    except UnicodeDecodeError as error:
        raise UserError(where, f"not UTF-8 ({error.reason} at byte {error.start})", "save the file as UTF-8") from None


def _as_row(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UserError(where, f"a row is a JSON {type(value).__name__}, not an object", 'write {"messages": […]}')
    return value
