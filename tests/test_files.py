"""Files that are replaced whole or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest
from upath import UPath

from fsdp2kit.files import replace_file


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "record.json"
    replace_file(path, "new ü")
    assert path.read_bytes() == "new ü".encode()
    replace_file(path, b"\x00\x01")
    assert path.read_bytes() == b"\x00\x01"
    assert [one.name for one in tmp_path.iterdir()] == ["record.json"]

    def crash(self: Path, target: Path) -> Path:
        assert self.read_bytes() == b"third", "what is renamed is whole"
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(Path, "replace", crash)
    with pytest.raises(OSError, match="Input/output"):
        replace_file(path, "third")
    assert path.read_bytes() == b"\x00\x01"


def test_an_object_store_is_written_to_directly() -> None:
    path = cast(Path, UPath("memory://files/record.json"))
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, "stored")
    assert path.read_text() == "stored"
    assert [one.name for one in path.parent.iterdir()] == ["record.json"]
