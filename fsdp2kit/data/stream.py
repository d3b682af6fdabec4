"""Rows read in order from any place in a source, and the place after each as a few integers.

Text files are sought to the byte. Parquet, Arrow and hub datasets are read by `datasets`, which goes back to a place
by skipping within one shard.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from fsdp2kit.data.rows import name_row, quiet, read_row, unreadable
from fsdp2kit.data.sources import Source
from fsdp2kit.data.textrows import iterate_rows

Place = dict[str, Any]  # what JSON can hold


@dataclass(frozen=True)
class StreamRow:
    """One row of a stream, and what errors call it."""

    value: dict[str, Any]
    where: str


class RowStream(Protocol):
    """An iterator over rows that knows where it stands."""

    def __iter__(self) -> Iterator[StreamRow]: ...

    @property
    def place(self) -> Place:
        """The place after the row that was given last; `open_stream` goes on from it."""
        ...


@contextlib.contextmanager
def open_stream(source: Source, place: Place | None = None) -> Iterator[Iterator[StreamRow]]:
    """The rows of ``source`` in order; the file that is being read is closed at the end of the block.

    Raises:
        UserError: while reading, naming the row that is malformed.
    """
    rows = iter(row_stream(source, place))
    try:
        yield rows
    finally:
        rows.close()  # pyright: ignore[reportAttributeAccessIssue]


def row_stream(source: Source, place: Place | None = None) -> RowStream:
    """The rows of ``source`` in order, from the start or from a place that an earlier stream gave."""
    return _TextStream(source, place) if source.is_text else _TableStream(source, place)


class _TextStream:
    def __init__(self, source: Source, place: Place | None) -> None:
        self._files = source.files
        self.place: Place = place or {"file": 0, "offset": 0, "line": 0}

    def __iter__(self) -> Iterator[StreamRow]:
        first, offset, line = self.place["file"], self.place["offset"], self.place["line"]
        for number in range(first, len(self._files)):
            for row in iterate_rows(self._files[number], offset=offset, line=line):
                self.place = {"file": number, "offset": row.offset, "line": row.line}
                yield StreamRow(row.value, row.where)
            offset = line = 0


class _TableStream:
    def __init__(self, source: Source, place: Place | None) -> None:
        self._source, self._row = source, 0
        try:
            with quiet():
                self._rows = _iterable(source)
                if place is not None:
                    self._rows.load_state_dict(place["dataset"])
                    self._row = place["row"]
        except (OSError, ValueError) as error:
            raise unreadable(source, error) from error

    @property
    def place(self) -> Place:
        return {"dataset": self._rows.state_dict(), "row": self._row}

    def __iter__(self) -> Iterator[StreamRow]:
        try:
            for value in self._rows:
                where = name_row(self._source, self._row)
                self._row += 1
                yield StreamRow(read_row(value), where)
        except (OSError, ValueError) as error:
            raise unreadable(self._source, error) from error


def _iterable(source: Source) -> Any:
    import datasets

    if source.kind == "hub":
        return datasets.load_dataset(source.path, split=source.split, streaming=True)
    if source.kind == "saved":
        saved = datasets.load_from_disk(str(Path(source.path).expanduser()))
        if isinstance(saved, datasets.DatasetDict):
            if source.split not in saved:
                raise ValueError(f"there is no split {source.split!r}; it has {', '.join(map(str, saved))}")
            saved = saved[source.split]
        return saved.to_iterable_dataset()
    return datasets.load_dataset(source.kind, data_files=list(source.files), split="train", streaming=True)
