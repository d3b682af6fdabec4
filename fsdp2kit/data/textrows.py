"""Rows of files that are written as text (JSON lines, JSON, CSV, plain text): each with its line and its place.

Text files are read here and not by `datasets`: Arrow would give every row the union of all rows' keys, filled with
None (tool schemas suffer), refuses rows whose types differ, and pandas takes the cells "NA" and "null" for missing.
"""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from fsdp2kit.data.sources import is_url, suffix_of
from fsdp2kit.errors import UserError

_BOM = b"\xef\xbb\xbf"
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst")


@dataclass(frozen=True)
class TextRow:
    """One row, and where the next one begins."""

    value: dict[str, Any]
    where: str
    """``file:line``, for errors."""
    offset: int
    """Where the next row begins: in bytes (uncompressed) for lines, in rows for CSV and JSON arrays."""
    line: int
    """Lines before the next row."""


def iterate_rows(file: str, *, offset: int = 0, line: int = 0) -> Iterator[TextRow]:
    """The rows of a file from a place that an earlier `TextRow` gave. Lines are found by seeking, without reading.

    Raises:
        UserError: naming the line that is malformed; or the file cannot be opened.
    """
    try:
        with _open(file) as content:
            suffix = suffix_of(file)
            if suffix in (".csv", ".tsv"):
                yield from _csv_rows(file, content, delimiter="\t" if suffix == ".tsv" else ",", skip=offset)
            elif suffix == ".json" and _is_array(content):
                yield from _array_rows(file, content, skip=offset)
            else:
                content.seek(offset)
                parse = _text_line if suffix == ".txt" else _json_line
                yield from _lines(file, content, offset=offset, line=line, parse=parse)
    except (OSError, EOFError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(file, f"cannot be read ({reason})", "check the file and its permissions") from None


def _open(file: str) -> Any:
    if is_url(file) or file.lower().endswith(_COMPRESSED):
        import fsspec

        return fsspec.open(file, "rb", compression="infer")
    return Path(file).open("rb")


def _is_array(content: BinaryIO) -> bool:
    first = content.readline().lstrip(_BOM + b" \t\r\n")
    content.seek(0)
    return first[:1] in (b"[", b"")


def _lines(file: str, content: BinaryIO, *, offset: int, line: int, parse: Any) -> Iterator[TextRow]:
    for text in content:
        offset, line = offset + len(text), line + 1
        where = f"{file}:{line}"
        value = parse(text.removeprefix(_BOM) if line == 1 else text, where)
        if value is not None:
            yield TextRow(value, where, offset, line)


def _json_line(text: bytes, where: str) -> dict[str, Any] | None:
    text = text.strip()
    return check_row(_parse(text, where), where) if text else None


def _text_line(text: bytes, where: str) -> dict[str, Any]:
    return {"text": _decode(text, where).rstrip("\r\n")}


def _array_rows(file: str, content: BinaryIO, *, skip: int) -> Iterator[TextRow]:
    data = content.read()
    rows = _parse(data, file) if data.strip() else []
    rows = rows if isinstance(rows, list) else [rows]
    for number, row in enumerate(rows[skip:], start=skip):
        where = f"{file}: row {number}"
        yield TextRow(check_row(row, where), where, number + 1, 0)


def _csv_rows(file: str, content: BinaryIO, *, delimiter: str, skip: int) -> Iterator[TextRow]:
    csv.field_size_limit(sys.maxsize)  # a cell may be a book
    text = io.TextIOWrapper(content, encoding="utf-8-sig", newline="")
    reader = csv.reader(text, delimiter=delimiter, strict=True)
    try:
        header = next(reader, [])
        line = reader.line_num
        for number, cells in enumerate(reader, start=1):
            where, line = f"{file}:{line + 1}", reader.line_num
            if not cells or number <= skip:
                continue
            if len(cells) != len(header):
                what = f"{len(cells)} cells, but the header names {len(header)} columns"
                raise UserError(where, what, "quote cells that hold the delimiter or a line break")
            yield TextRow(dict(zip(header, cells, strict=True)), where, number, line)
    except csv.Error as error:
        raise UserError(f"{file}:{reader.line_num}", f"not valid CSV ({error})", "mend that line") from None
    except UnicodeDecodeError as error:
        raise UserError(file, f"not UTF-8 ({error.reason})", "save the file as UTF-8") from None
    finally:
        text.detach()  # whoever opened the file closes it


def _parse(data: bytes, where: str) -> Any:
    try:
        value = json.loads(_decode(data, where))
    except json.JSONDecodeError as error:
        position = where if error.lineno == 1 else f"{where}:{error.lineno}"
        raise UserError(
            position, f"not valid JSON ({error.msg}, column {error.colno})", "one JSON object a line (.jsonl)"
        ) from None
    except RecursionError:
        raise UserError(where, "is nested too deep", "give flatter rows") from None
    if b"\\ud" in data or b"\\uD" in data:
        _refuse_half_characters(value, where)
    return value


def _refuse_half_characters(value: Any, where: str) -> None:
    """JSON can write half of a surrogate pair, which is no character: no tokenizer and no file takes it."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise UserError(
            where, f"holds \\u{ord(half):04x}, half of a surrogate pair and no character", "mend or drop that row"
        ) from None


def _decode(data: bytes, where: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(where, f"not UTF-8 ({error.reason} at byte {error.start})", "save the file as UTF-8") from None


def check_row(row: Any, where: str) -> dict[str, Any]:
    """The row, if it is one.

    Raises:
        UserError: it is another kind of JSON.
    """
    if not isinstance(row, dict):
        raise UserError(where, f"a row is a JSON {type(row).__name__}, not an object", 'write {"messages": […]}')
    return row
