"""How and when each start of a run ended, from what it left."""

from __future__ import annotations

import json
from datetime import datetime, timezone
from pathlib import Path

from fsdp2kit.report.ends import End, ends_of
from fsdp2kit.report.read import read_run
from tests.report.helpers import event, traceback, write

T = 1_767_312_000  # 2026-01-02


def entry(rank: int, second: int, text: str) -> str:
    """As `fsdp2kit.job.tracebacks` writes it."""
    now = datetime.fromtimestamp(T + second, timezone.utc).isoformat(timespec="seconds")
    return f"{now} rank {rank} on host, step 3, backward\n{text}\n\n"


def metric(step: int, second: int, **more: int) -> str:
    time = datetime.fromtimestamp(T + second, timezone.utc).isoformat(timespec="milliseconds")
    return json.dumps({"step": step, "time": time, **more}) + "\n"


def test_every_start_has_an_end(tmp_path: Path) -> None:
    """In this order: stopped, failed with a line, killed, killed at once, failed on another rank, done."""
    events = [event(T + 1, "start"), event(T + 9, "stop", step=2), event(T + 10, "end", step=2, outcome="stopped")]
    events += [event(T + 20, "start", 2), event(T + 20, "resume", 2, step=2), event(T + 25, "failure", 2, text="Oops")]
    events += [event(T + 30, "start", 3), event(T + 30, "resume", 3, step=2), event(T + 35, "save", 3, step=4)]
    events += [event(T + 40, "start", 4)]
    events += [event(T + 50, "start", 5), event(T + 55, "failure", 5, text="rank 1 is lost", lost=True)]
    events += [event(T + 60, "start", 6), event(T + 69, "end", 6, step=9, outcome="done")]
    records = [metric(1, 5, start=1), metric(2, 9), metric(3, 33, start=3), metric(4, 34)]
    write(tmp_path, metrics="".join(records), events="".join(events))
    (tmp_path / "errors").mkdir()
    (tmp_path / "errors" / "rank-1.txt").write_text(entry(1, 54, traceback("ValueError: no")))
    assert ends_of(read_run(tmp_path)) == {
        1: End("stopped at step 2", T + 10),
        2: End("failed: Oops", T + 25),
        3: End("killed after step 4", T + 35),
        4: End("killed before its first step", T + 40),
        5: End("failed: rank 1: ValueError: no", T + 55),
        6: End("done at step 9", T + 69),
    }


def test_an_earlier_start_without_a_line_has_failed_if_it_left_a_traceback(tmp_path: Path) -> None:
    events = event(T + 1, "start") + event(T + 20, "start", 2) + event(T + 29, "end", 2, step=1, outcome="done")
    write(tmp_path, metrics=metric(1, 25), events=events)
    (tmp_path / "errors").mkdir()
    (tmp_path / "errors" / "rank-0.txt").write_text(entry(0, 1, traceback("ValueError: no")))
    assert ends_of(read_run(tmp_path))[1] == End("failed: rank 0: ValueError: no", T + 1)


def test_the_newest_start_ends_as_the_run_does(tmp_path: Path) -> None:
    write(tmp_path, metrics=metric(1, 5) + metric(7, 6), events=event(T + 1, "start"))
    run = read_run(tmp_path)
    assert ends_of(run) == {1: End("killed after step 7", run.seen)}
    # Written to just now, by a host that is not here.
    write(tmp_path, lock=json.dumps({"pid": 1, "host": "elsewhere"}))
    assert ends_of(read_run(tmp_path)) == {1: End("running", None)}
    write(tmp_path, events=event(T + 1, "start") + event(T + 2, "stop", reason="SIGTERM"))
    assert ends_of(read_run(tmp_path)) == {1: End("running, asked to stop (SIGTERM)", None)}
