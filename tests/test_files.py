"""Files that are replaced whole or not at all."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import cast

import datasets
import pytest
from huggingface_hub import constants
from upath import UPath

from fsdp2kit.files import replace_file, todo_of_cache


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


def test_a_cache_that_cannot_be_written_is_told_from_other_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "home" / "hub"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "data")

    def todo(number: int, path: str) -> str | None:
        outer = ValueError("the library's own")
        outer.__cause__ = OSError(number, "of the system", str(tmp_path / path))
        return todo_of_cache(outer)

    assert todo(errno.EROFS, "home/hub/models--a--b") == "set HF_HOME to a folder that can be written"
    assert todo(errno.EACCES, "") == "set HF_HOME to a folder that can be written"
    assert todo(errno.EACCES, "data/csv") == "set HF_DATASETS_CACHE to a folder that can be written"
    assert todo(errno.ENOENT, "home/hub/models--a--b/config.json") is None
    assert todo(errno.EACCES, "elsewhere") is None
