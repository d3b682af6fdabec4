"""What happened in a run is written at once, once, into that run's file, and never stops it."""

from __future__ import annotations

import errno
import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from fsdp2kit.console import heard_by, say
from fsdp2kit.job import status
from fsdp2kit.job.events import Events, began, changes, flat

logger = logging.getLogger("fsdp2kit.somewhere")


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


def test_what_came_before_the_directory_is_written_first(tmp_path: Path) -> None:
    events = Events(is_kept=True)
    events.record("data", rows=3)
    assert not list(tmp_path.iterdir())
    events.open_in(tmp_path, start=2)
    events.record("stop", step=5, time="never", start=9)  # such names are ours
    found = lines(tmp_path)  # before it is closed
    events.close()
    events.record("end")
    assert lines(tmp_path) == found
    assert [(one["event"], one["start"]) for one in found] == [("data", 2), ("stop", 2)]
    assert (found[0]["rows"], found[1]["step"]) == (3, 5)
    assert found[0]["time"] <= found[1]["time"]


def test_two_runs_in_a_process_have_a_file_each(tmp_path: Path) -> None:
    package = logging.getLogger("fsdp2kit")
    handlers = list(package.handlers)
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        events = Events(is_kept=True)
        events.open_in(tmp_path / name, start=1)
        with heard_by(events.hear):
            logger.warning("%s is warned", name)
            say(f"warning: {name} is told", "a line that is no warning")
        events.close()
    say("warning: to nobody")
    logger.warning("to nobody")
    assert package.handlers == handlers
    for name in ("first", "second"):
        texts = [(one["event"], one["text"]) for one in lines(tmp_path / name)]
        assert texts == [("warning", f"{name} is warned"), ("warning", f"{name} is told")]


def test_warnings_are_still_printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Python prints warnings by itself only while the logger has no handler."""
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    events = Events(is_kept=True)
    logger.warning("look out")
    events.close()
    assert capsys.readouterr().err == "look out\n"


def test_a_full_disk_is_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(handle: int, line: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("fsdp2kit.job.events.os.write", refuse)
    events = Events(is_kept=True)
    events.open_in(tmp_path, start=1)
    for step in (1, 2):
        events.record("save", step=step)
    events.close()
    assert len(caplog.records) == 1
    assert "No space left on device" in caplog.text
    assert "the run goes on" in caplog.text


def test_a_directory_that_is_gone_does_not_stop_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    events = Events(is_kept=True)
    events.open_in(tmp_path / "gone", start=1)
    events.record("end")
    events.close()
    assert len(caplog.records) == 1


def test_a_line_that_a_kill_cut_off_does_not_spoil_the_next(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text('{"time": 1, "event": "start"}\n{"time": 2, "ev')
    events = Events(is_kept=True)
    events.open_in(tmp_path, start=2)
    events.record("start")
    events.close()
    text = (tmp_path / "events.jsonl").read_text().splitlines()
    assert text[1] == '{"time": 2, "ev'
    assert json.loads(text[2])["start"] == 2


def test_lines_are_cleaned_and_take_any_value(tmp_path: Path) -> None:
    secret = 'se"cr\\ét'  # JSON writes it in another way
    events = Events(is_kept=True, clean=lambda text: text.replace(secret, "***"))
    events.open_in(tmp_path, start=1)
    events.record("start", command=f"my {secret}", changed={"run.dir": ["x", secret]}, path=Path("x"))
    events.close()
    assert lines(tmp_path)[0]["command"] == "my ***"
    assert lines(tmp_path)[0]["changed"] == {"run.dir": ["x", "***"]}
    assert lines(tmp_path)[0]["path"] == "x"


def test_other_ranks_keep_nothing(tmp_path: Path) -> None:
    handlers = list(logging.getLogger("fsdp2kit").handlers)
    events = Events()
    events.record("end")
    events.close()
    assert logging.getLogger("fsdp2kit").handlers == handlers
    assert not list(tmp_path.iterdir())


def test_changes_name_dotted_keys() -> None:
    before, now = flat({"a": {"b": 1, "c": [1]}, "d": 2}), flat({"a": {"b": 1, "c": [2]}, "e": 3})
    assert changes(before, now) == {"a.c": [[1], [2]], "e": [None, 3], "d": [2, None]}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"time": 5.5}\n{"time": 7}\n', 5.5),
        (None, None),
        ("", None),
        ('{"ti', None),
        ("[5]\n", None),
        ('{"time": null}\n', None),
        ('{"event": "start"}\n', None),
    ],
)
def test_when_a_run_first_started(tmp_path: Path, text: str | None, expected: float | None) -> None:
    if text is not None:
        (tmp_path / "events.jsonl").write_text(text)
    assert began(tmp_path) == expected


def test_a_line_that_the_disk_cut_off_does_not_spoil_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events, write = Events(is_kept=True), os.write
    events.open_in(tmp_path, start=1)
    with monkeypatch.context() as patch:
        patch.setattr("fsdp2kit.job.events.os.write", lambda file, line: write(file, line[:9]))
        events.record("save", step=1)
    for step in (2, 3):
        events.record("save", step=step)
    events.close()
    _, *whole = (tmp_path / "events.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in whole] == [2, 3]


def test_a_warning_names_the_step_that_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events = Events(is_kept=True)
    for step in (0, 4):
        monkeypatch.setattr(status, "_now", status.Position(1, step))
        events.hear("warning: look")
    events.open_in(tmp_path, start=1)
    events.close()
    assert [one.get("step") for one in lines(tmp_path)] == [None, 4]
