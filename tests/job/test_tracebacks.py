"""Tracebacks in a run directory have no secrets."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdp2kit.job import tracebacks


def test_tracebacks_have_no_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefgh")
    tracebacks.keep_in(tmp_path / "errors")
    try:
        assert tracebacks.write_traceback("RuntimeError: 401 for https://me:pw55@host/x with hf_abcdefgh\udcff\x1b[2J")
        (tmp_path / "errors" / "rank-1.txt").symlink_to(tmp_path / "victim")
        monkeypatch.setenv("RANK", "1")
        assert not tracebacks.write_traceback("x")
    finally:
        tracebacks.keep_nowhere()
    text = (tmp_path / "errors" / "rank-0.txt").read_text()
    assert "https://***@host/x with ***\\udcff\\x1b[2J" in text
    assert not (tmp_path / "victim").exists()


def test_each_rank_appends_to_a_file_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not tracebacks.write_traceback("of a run without a directory")
    assert tracebacks.path_of(3) == "errors/rank-3.txt"
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setattr(tracebacks, "_folder", tmp_path / "deep" / "errors")
    for text in ("first", "second"):
        assert tracebacks.write_traceback(text)
    assert tracebacks.path_of(3) == str(tmp_path / "deep" / "errors" / "rank-3.txt")
    lines = Path(tracebacks.path_of(3)).read_text().splitlines()
    assert lines[1::2] == ["first", "second"]
    assert " rank 3 on " in lines[2]
