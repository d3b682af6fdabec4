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
