"""Metrics: one call, three places; and what a resume does to metrics.jsonl."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import re
from datetime import datetime, timedelta, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fsdp2kit.errors import StorageFailure
from fsdp2kit.train.metrics import Console, Metrics, format_record, move_aside
from tests.train.helpers import build

NO_THROUGHPUT: Any = None  # for metrics that count no steps


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write(path: Path, steps: range, *, tail: str = "") -> None:
    path.write_text("".join(json.dumps({"step": step, "loss": 1.0 / step}) + "\n" for step in steps) + tail)


def steps_in(path: Path) -> list[int]:
    return [record["step"] for record in read(path)]


def test_one_object_a_line_is_on_disk_at_once(tmp_path: Path) -> None:
    metrics, began = build(tmp_path), datetime.now(timezone.utc) - timedelta(milliseconds=1)
    metrics.log({"step": 1, "loss": 2.5, "mfu": None})
    metrics.log({"step": 2, "loss": torch.tensor(2.25), "tokens": 7})
    records = read(tmp_path / "metrics.jsonl")
    times = [datetime.fromisoformat(record.pop("time")) for record in records]
    assert began <= times[0] <= times[1] <= datetime.now(timezone.utc)
    assert records == [
        {"step": 1, "loss": 2.5, "mfu": None},
        {"step": 2, "loss": 2.25, "tokens": 7},
    ]
    metrics.close(ok=True)
    metrics.close(ok=True)


@pytest.mark.parametrize("fails", [False, True])
def test_the_end_of_a_job_closes_and_passes_on_how_it_went(
    tmp_path: Path, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Recorder:
        id = None
        closed: tuple[bool, ...] = ()

        def close(self, ok: bool) -> None:
            self.closed += (ok,)

    recorder = Recorder()
    monkeypatch.setattr("fsdp2kit.train.trackers.start_wandb", lambda *_, **__: recorder)
    closing = contextlib.ExitStack()
    with contextlib.suppress(KeyError), closing:
        build(tmp_path, closing=closing)
        if fails:
            raise KeyError
    assert recorder.closed == (not fails,)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, torch.tensor(math.nan)])
def test_a_number_that_json_lacks_is_null(tmp_path: Path, value: object) -> None:
    metrics = build(tmp_path)
    metrics.log({"step": 1, "loss": value})
    metrics.close(ok=False)

    def refuse(constant: str) -> None:
        raise AssertionError(f"bare {constant}")

    text = (tmp_path / "metrics.jsonl").read_text()
    record = json.loads(text, parse_constant=refuse)
    assert (record["step"], record["loss"]) == (1, None)


def test_answers_are_kept_and_shown_as_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tables: list[Any] = []
    wandb: Any = SimpleNamespace(log_samples=lambda step, samples: tables.append(samples))
    metrics = Metrics(NO_THROUGHPUT, trackers=[wandb], path=tmp_path / "metrics.jsonl", console=Console(1))
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Wet?"}]
    text = "system: Be brief.\nuser: Wet?"
    metrics.log_samples(3, [{"prompt": messages, "answer": "Yes.\nAnd rain."}, {"prompt": "And?", "answer": ""}])
    assert capsys.readouterr().out == f"> {text}\nYes.\nAnd rain.\n> And?\n(an empty answer)\n"
    assert read(tmp_path / "samples.jsonl") == [
        {"step": 3, "prompt": messages, "answer": "Yes.\nAnd rain."},
        {"step": 3, "prompt": "And?", "answer": ""},
    ]
    assert tables == [[{"prompt": text, "answer": "Yes.\nAnd rain."}, {"prompt": "And?", "answer": ""}]]


def test_no_answers_leave_no_trace(tmp_path: Path) -> None:
    class Fragile:
        id = None

        def log_samples(self, step: int, samples: list) -> None:
            raise AssertionError("there is nothing to log")

    metrics = Metrics(NO_THROUGHPUT, trackers=[Fragile()], path=tmp_path / "metrics.jsonl")  # type: ignore[arg-type]
    metrics.log_samples(1, [])
    assert not (tmp_path / "samples.jsonl").exists()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
def test_a_full_disk_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = build(tmp_path)
    monkeypatch.setattr("fsdp2kit.train.metrics.open_own", lambda path, flags: os.open("/dev/full", flags))
    with pytest.raises(
        StorageFailure, match=r"metrics\.jsonl: cannot be written \(No space left on device\)"
    ) as failure:
        metrics.log({"step": 1, "loss": 2.5})
    assert failure.value.alone, "no other rank writes this file"


def test_other_ranks_do_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metrics = build(tmp_path / "missing", is_main=False, wandb_id="kept")
    metrics.log({"step": 1, "loss": 1.0})
    metrics.message("hello")
    metrics.close(ok=True)
    assert metrics.wandb_id == "kept"
    assert capsys.readouterr().out == ""
    assert list(tmp_path.iterdir()) == []


def test_plain_console_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metrics = build(tmp_path)
    metrics.message("hello")
    metrics.log({"step": 12, "loss": 2.34567, "step_seconds": 2.0})
    metrics.close(ok=True)
    assert capsys.readouterr().out == "hello\nstep  12/100  loss 2.3457  eta 0:02:56\n"


def test_a_full_line() -> None:
    record = {
        "step": 12,
        "epoch": 0.256,
        "loss": 2.3456,
        "grad_norm": 1.234,
        "lr": 1e-5,
        "tokens_per_second": 1234.4,
        "accuracy": 0.98764,
        "mfu": 0.41,
        "memory_gib": 1.23,
    }

    def line(record: dict[str, Any], *also: str) -> str:
        return "  ".join(format_record(record, total_steps=100, eta_seconds=80, also=also))

    begin = "step  12/100  loss 2.3456  tokens/s   1,234  eta 0:01:20  "
    assert line(record, "accuracy") == f"{begin}accuracy 0.9876  grad_norm 1.234  lr 1.00e-05"
    assert line(record) == f"{begin}grad_norm 1.234  lr 1.00e-05  mfu 41.0%"
    assert line({**record, "mfu": None}) == f"{begin}grad_norm 1.234  lr 1.00e-05  memory 1.2 GiB"
    evaluated = {**record, "margin": 2.0, "eval_loss": 2.5, "eval_accuracy": 0.5, "eval_margin": 1.0}
    assert line(evaluated, "reward", "accuracy", "margin") == (
        f"{begin}eval_loss 2.5000  accuracy 0.9876  eval_accuracy 0.5"
    )
    few = {"step": 12, "loss": 2.3456, "margin": 2.0, "accuracy": 0.5, "epoch": 0.256}
    assert line(few, "accuracy", "margin") == (
        "step  12/100  loss 2.3456  eta 0:01:20  accuracy 0.5  margin 2  epoch 0.26"
    )
    assert format_record({"step": 1, "loss": math.nan, "mfu": None}, total_steps=9, eta_seconds=None) == [
        "step 1/9",
        "loss nan",
    ]
    assert format_record({"step": 1}, total_steps=10**20, eta_seconds=1e20) == [f"step {1:>21}/{10**20}"]


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_terminal_shows_what_matters_and_keeps_earlier_steps(
    width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(width))
    metrics = build(tmp_path)
    rest = {"epoch": 0.25, "grad_norm": 1.25, "lr": 1e-5, "tokens_per_second": 123456.0, "memory_gib": 70.1}
    for step in (1, 2, 3):
        metrics.log({"step": step, "loss": 2.5, "step_seconds": 20.0, "eval_loss": 2.25, **rest})
    metrics.close(ok=True)
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.getvalue()).replace("\r", "\n").splitlines()
    assert max(map(len, lines)) <= width
    assert not [line for line in lines if "…" in line], "no part is cut"
    for step in (1, 2, 3):
        [at, *bars] = [at for at, line in enumerate(lines) if f"step   {step}/100" in line]
        assert lines[at].startswith("step"), "its own line"
        whole = " ".join(lines[at : at + 3])
        assert all(word in whole for word in ("eval_loss 2.2500", "grad_norm 1.250", "lr 1.00e-05"))
        [bar] = {lines[bar].strip() for bar in bars}
        assert all(word in bar for word in ("loss 2.5000", "tokens/s 123,456", "eta 0:"))


def test_progress_line_on_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "160")
    metrics = build(tmp_path)
    for step in (1, 2):
        metrics.log({"step": step, "loss": 2.5, "step_seconds": 1.0})
    metrics.message("[saved] a checkpoint")
    metrics.close(ok=True)
    shown = terminal.getvalue()
    assert "step   2/100  loss 2.5000" in shown
    assert "[saved] a checkpoint" in shown  # brackets are text, not markup
    assert shown.count("\x1b[?25l") == shown.count("\x1b[?25h") == 1  # the cursor is hidden, and given back


def test_resume_moves_later_lines_aside(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, range(1, 131))
    metrics = build(tmp_path, resume_step=120)
    metrics.log({"step": 121, "loss": 0.5})
    metrics.close(ok=True)
    assert steps_in(path) == list(range(1, 122))
    assert steps_in(tmp_path / "metrics.after-step-000120.jsonl") == list(range(121, 131))


def test_a_step_whose_evaluation_was_left_has_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is logged once that is done; a start that was killed after it leaves its line behind."""
    path = tmp_path / "metrics.jsonl"
    write(path, range(1, 120))
    for _ in range(2):
        metrics = build(tmp_path, resume_step=120, unevaluated={"step": 120})
        metrics.log({"step": 120, "eval_loss": 0.5}, is_completed=True)
        metrics.close(ok=True)
        assert steps_in(path) == list(range(1, 121))
    assert steps_in(tmp_path / "metrics.after-step-000119.jsonl") == [120]
    assert "has no steps" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("logged", "says"), [(0, "has no steps 1 to 120"), (100, "has no steps 101 to 120"), (120, "")]
)
def test_steps_that_were_logged_elsewhere_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], logged: int, says: str
) -> None:
    write(tmp_path / "metrics.jsonl", range(1, logged + 1))
    build(tmp_path, resume_step=120).close(ok=True)
    assert (says in capsys.readouterr().out) if says else "has no steps" not in capsys.readouterr().out


def test_resuming_at_the_same_step_again_overwrites_nothing(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for attempt in range(3):
        write(path, range(1, 123 + attempt))
        move_aside(path, resume_step=120)
    assert steps_in(tmp_path / "metrics.after-step-000120.jsonl") == [121, 122]
    assert steps_in(tmp_path / "metrics.after-step-000120.2.jsonl") == [121, 122, 123]
    assert steps_in(tmp_path / "metrics.after-step-000120.3.jsonl") == [121, 122, 123, 124]


def test_a_whole_last_line_without_its_newline_stays_whole(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, range(1, 3), tail='{"step": 3}')
    metrics = build(tmp_path, resume_step=3)
    metrics.log({"step": 4})
    metrics.close(ok=True)
    assert steps_in(path) == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("kept", "moved"),
    [
        ([b'{"step": 1}\n', b'{"step": 5}\n'], [b'{"step": 6, "lo']),
        ([b'{"step": 1}\n'], [b"my note\n", b"\xff\xfe\n", b"[1]\n", b'{"note": 2}\n', b'{"step": 9}\n']),
        ([], [b'{"step": 0, "eval_loss": 3.0}\n', b'{"step": 1}\n']),
    ],
    ids=["torn", "anything", "a fresh start"],
)
def test_no_line_is_lost_whatever_it_holds(tmp_path: Path, kept: list[bytes], moved: list[bytes]) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"".join(kept + moved))
    aside = move_aside(path, resume_step=5 if kept else 0)
    assert aside is not None
    assert (path.read_bytes(), aside.read_bytes()) == (b"".join(kept), b"".join(moved))


def test_nothing_to_move_leaves_the_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert move_aside(path, resume_step=7) is None
    write(path, range(1, 6))
    before = path.stat()
    assert move_aside(path, resume_step=5) is None
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert list(tmp_path.iterdir()) == [path]


def test_a_record_that_was_completed_before_is_not_completed_again(tmp_path: Path) -> None:
    """What completes it may know nothing of it any more: it is of the start before."""
    metrics = Metrics(SimpleNamespace(), path=tmp_path / "metrics.jsonl")  # type: ignore[arg-type]
    metrics.sources.append(lambda record: {"gap": 1.0})
    completed = metrics.completed({"step": 1})
    metrics.sources.clear()
    metrics.sources.append(lambda record: {"gap": record["missing"]})
    metrics.log({**completed, "eval_loss": 2.0}, is_completed=True)
    [record] = read(tmp_path / "metrics.jsonl")
    assert (record["gap"], record["eval_loss"]) == (1.0, 2.0)


def test_the_rest_of_a_run_is_estimated_without_its_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a resume, too: the first record is of step 11. A run of a recipe's own may go on past its steps."""
    now = 1000.0
    monkeypatch.setattr("fsdp2kit.train.metrics.time", SimpleNamespace(monotonic=lambda: now))
    console = Console(20)
    assert console._seconds_left({"step": 11, "step_seconds": 2.0}) == 18.0
    now += 12.0
    assert console._seconds_left({"step": 14, "step_seconds": 2.0}) == 24.0
    assert console._seconds_left({"step": 23, "step_seconds": 2.0}) == 0.0
    assert Console(20)._seconds_left({"step": 11}) is None


def test_what_sources_add_is_written_and_shown_but_for_groups(tmp_path: Path) -> None:
    shown: list[list[str]] = []
    console: Any = SimpleNamespace(log=lambda record, also: shown.append(also))
    metrics = Metrics(NO_THROUGHPUT, console=console, path=tmp_path / "metrics.jsonl")
    metrics.shown = ["reward"]
    metrics.sources += [lambda record: {"gap": record["loss"] + 1, "moe/load": 2.0}, lambda _: {"loss": 9.0}]
    metrics.log({"step": 1, "loss": torch.tensor(0.5)})
    [record] = read(tmp_path / "metrics.jsonl")
    assert {key: record[key] for key in ("step", "loss", "gap", "moe/load")} == {
        "step": 1, "loss": 9.0, "gap": 1.5, "moe/load": 2.0,
    }  # fmt: skip
    assert shown == [["gap", "reward"]]
