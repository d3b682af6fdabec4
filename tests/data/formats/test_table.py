"""The table of formats has each format that a TOML may name, and says what the config says of it."""

from __future__ import annotations

from pathlib import Path

from fsdp2kit.config.data_formats import ASKED, COLUMNS, USED_BY
from fsdp2kit.data import tables
from fsdp2kit.data.formats import table
from fsdp2kit.data.formats.table import FORMATS


def test_every_format_of_rows_with_something_to_learn_is_read() -> None:
    assert {*FORMATS} == {*COLUMNS} - {*ASKED, "synthetic"}


def test_wrap_is_used_by_the_formats_that_wrap() -> None:
    assert {name for name, one in FORMATS.items() if one.wraps is not None} == {*USED_BY["wrap"]}
    assert all(one.wraps in COLUMNS[name] for name, one in FORMATS.items() if one.wraps is not None)


def test_tokens_are_made_anew_when_the_code_of_a_format_changes(monkeypatch) -> None:
    """Cached tokens are named by a digest of the code."""
    before = tables._code_digest.__wrapped__()
    read = Path.read_bytes
    for format in sorted(Path(table.__file__).parent.glob("*.py")):
        edited = lambda path, format=format: read(path) + b"#" * (path == format)  # noqa: E731
        monkeypatch.setattr(Path, "read_bytes", edited)
        assert tables._code_digest.__wrapped__() != before, format
