"""The page as a file: self-contained, safe whatever a run says, and never written over another's file."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fsdp2kit.errors import UserError
from fsdp2kit.report.page import build_page, write_page
from fsdp2kit.report.read import read_run
from tests.report.helpers import EVENTS, EVIL, write_run
from tools import report

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose texts all try to become code of the page."""
    folder = tmp_path_factory.mktemp("runs") / 'x<img src=x onerror="1">&'
    config = f"[train]\nsteps = 50\n[wandb]\nnotes = {json.dumps(EVIL)}\n"
    return write_run(folder, events=EVENTS, config=config, also={f"mine<b>{EVIL[:9]}": 1.0})


def test_text_of_a_run_is_never_markup(run: Path) -> None:
    text = build_page([read_run(run)])
    assert "<img" not in text
    assert text.count("</script>") == text.count("<script") == 3
    assert re.search(r"<title>x&lt;img src=x onerror=&quot;1&quot;&gt;&amp; ·", text)
    found = re.search(r'<script type="application/json" id="payload">(.*?)</script>', text, re.DOTALL)
    assert found
    payload = json.loads(found.group(1))
    assert payload["runs"][0]["samples"][0]["answer"] == f"4 {EVIL}"
    assert payload["runs"][0]["warnings"][0]["text"].endswith(EVIL)
    assert any(EVIL in row for one in payload["tables"] for row in one["rows"])


def test_odd_values_do_not_prevent_a_page(tmp_path: Path) -> None:
    """A plan that is not a number, half of a character, and events that were damaged."""
    odd: list[dict[str, Any]] = [
        {"event": "plan", "gib": {"memory_gib": float("nan")}},
        {"event": "save", "step": 2, "seconds": float("inf"), "waited": 0.0},
        {"event": "warning", "text": "half \ud83d"},
        {"event": "start", "changed": {"a": 1, "b": [1, 2]}},
        {"event": "start", "time": 1e300},
        {"event": "end", "start": [1]},
    ]
    text = build_page([read_run(write_run(tmp_path / "x", events=odd))])
    found = re.search(r'<script type="application/json" id="payload">(.*?)</script>', text, re.DOTALL)
    assert found
    [run] = json.loads(found.group(1).encode())["runs"]
    assert run["warnings"][0]["text"] == "half \ud83d"


def test_it_is_one_file_that_asks_no_network(run: Path) -> None:
    text = build_page([read_run(run)])
    assert not re.findall(r"<(?:link|script|img|iframe)[^>]*(?:src|href)=[\"'](?!data:)", text)
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)
    assert policy
    assert "default-src 'none'" in policy.group(1)
    assert "connect-src 'none'" in policy.group(1)
    assert "unsafe" not in policy.group(1)


def test_only_its_own_pages_are_replaced(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "page.html"
    assert report.main([str(run), "--out", str(out)]) == 0
    assert report.main([str(run), "--out", str(out)]) == 0
    out.write_text("notes of mine", encoding="utf-8")
    assert report.main([str(run), "--out", str(out)]) == 2
    assert out.read_text(encoding="utf-8") == "notes of mine"
    assert re.fullmatch(r"error: \S+page.html: is there, .*--force\n", capsys.readouterr().err)
    assert report.main([str(run), "--out", str(out), "--force"]) == 0
    assert out.stat().st_size > 50_000


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names")
def test_a_pipe_is_not_waited_for(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert report.main([str(run), "--out", str(tmp_path / "pipe"), "--force"]) == 2
    assert "is there, and is no file" in capsys.readouterr().err


def test_a_name_that_is_no_text_gives_a_page(run: Path, tmp_path: Path) -> None:
    strange = shutil.copytree(run, tmp_path / os.fsdecode(b"caf\xe9"))
    assert report.main([str(strange), "--out", str(tmp_path / "page.html")]) == 0
    assert b"caf\xe9" in (tmp_path / "page.html").read_bytes()


def test_mistakes_are_one_line(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    for arguments, said in (
        ([str(tmp_path / "none")], "is no directory"),
        ([str(tmp_path / "empty")], "has no metrics.jsonl"),
        ([str(run), "--out", str(tmp_path / "none" / "page.html")], "cannot be written"),
        ([str(run), "--out", str(tmp_path)], "is there, and is no file"),
        ([str(run), "--follow", "--out", "x.html"], "leave out"),
        ([str(run), "--port", "1"], "is for --follow"),
        ([str(run), "--follow", "--port", "70000"], "cannot be used"),
    ):
        assert report.main(arguments) == 2
        shown = capsys.readouterr().err
        assert shown.startswith("error: ")
        assert shown.count("\n") == 1
        assert said in shown


def test_without_out_a_page_lies_in_the_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [str(write_run(tmp_path / name, steps=2)) for name in "ab"]
    monkeypatch.chdir(tmp_path)
    assert report.main(runs[:1]) == 0
    assert (tmp_path / "a" / "report.html").is_file()
    assert report.main(runs) == 0
    assert (tmp_path / "report.html").is_file()


def test_a_picture_has_four_curves(run: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "curves.png"
    assert report.main([str(run), "--out", str(tmp_path / "page.html"), "--png", str(out)]) == 0
    assert out.read_bytes().startswith(b"\x89PNG")


def test_a_page_that_cannot_be_read_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "page.html").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="was not written by this command"):
        write_page("new", tmp_path / "page.html")


def test_the_tool_imports_neither_torch_nor_a_server_of_others() -> None:
    code = "import sys, tools.report; print({'torch', 'transformers', 'matplotlib'} & sys.modules.keys() or 'none')"
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "none"
