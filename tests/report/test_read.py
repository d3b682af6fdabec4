"""A run directory is read as it is: running, ended, stopped, failed, killed in mid-line, older than its events."""

from __future__ import annotations

import fcntl
import json
import math
import os
import platform
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from fsdp2kit.errors import UserError
from fsdp2kit.job.start import lock_run_dir
from fsdp2kit.report.read import find_runs, read_lines, read_run
from tests.report.helpers import event, traceback, write
from tests.support.runs import run_recipe
from tests.support.workers import WorkerPool

DEMO = Path(__file__).resolve().parents[2] / "toml" / "demo"

# Holds a run directory's lock, as `lock_run_dir` of `job/run_directory.py` does, and stops in the middle of two lines.
HOLD = """
import fcntl, json, os, platform, sys
from pathlib import Path
from fsdp2kit.job.events import Events
folder = Path(sys.argv[1])
handle = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT)
fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
os.pwrite(handle, json.dumps({"pid": os.getpid(), "host": platform.node()}).encode(), 0)
events = Events(is_kept=True)
events.open_in(folder, start=1)
events.record("start", world_size=2)
for name, text in (("metrics", '{"step": 1, "loss": 2.5}\\n{"step": 2, "lo'), ("events", '{"time": 1, "eve')):
    with (folder / f"{name}.jsonl").open("a") as file:
        file.write(text)
print("here", flush=True)
sys.stdin.read()
"""


def hold(folder: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "here\n"
    return process


def is_free(lock: Path) -> bool:
    """Whether another process could lock it."""
    code = f"import fcntl, os; fcntl.lockf(os.open({str(lock)!r}, os.O_RDWR), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    return subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def test_killed_in_mid_line(tmp_path: Path) -> None:
    process = hold(tmp_path)
    try:
        run = read_run(tmp_path)
        assert (run.state, run.step) == ("running", 1)
        assert not is_free(tmp_path / ".lock")
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    run = read_run(tmp_path)
    assert run.records == [{"step": 1, "loss": 2.5}]
    assert [one["event"] for one in run.events] == ["start"]
    assert (run.state, run.message) == ("killed", "after step 1")
    assert [(start.number, start.step, start.world_size) for start in run.starts] == [(1, 0, 2)]


def test_reading_does_not_take_a_lock_away(tmp_path: Path) -> None:
    """Closing any descriptor of a file ends this process's POSIX locks on it."""
    write(tmp_path, metrics="")
    handle = os.open(tmp_path / ".lock", os.O_RDWR | os.O_CREAT)
    fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert read_run(tmp_path).state == "running"
    assert not is_free(tmp_path / ".lock")
    os.close(handle)
    assert read_run(tmp_path).state == "killed"
    assert is_free(tmp_path / ".lock")


def test_a_run_that_starts_while_its_directory_is_read_waits(tmp_path: Path) -> None:
    """It is not refused. The reader is another process, stopped while it has its lock."""
    code = f"""
import fcntl, os, sys
from fsdp2kit.report.liveness import _ASKED
fcntl.lockf(os.open({str(tmp_path / ".lock")!r}, os.O_RDONLY | os.O_CREAT), fcntl.LOCK_SH | fcntl.LOCK_NB, 1, _ASKED)
print("here", flush=True)
sys.stdin.read()
"""
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == b"here\n"
        assert not is_free(tmp_path / ".lock")
        ends = threading.Timer(0.3, reader.kill)
        ends.start()
        with lock_run_dir(tmp_path):
            assert reader.wait() == -signal.SIGKILL


def train(toml: str, folder: Path, *overrides: str) -> str:
    return run_recipe(toml, [f"run.dir='{folder}'", *overrides])


@pytest.fixture(scope="module")
def runs(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``x`` started three times, with another config each time, then refused; ``y`` of the same process."""
    folder = tmp_path_factory.mktemp("runs")
    toml = folder / "x.toml"
    toml.write_text(
        f"""
        recipe = "sft"
        model.weights = "random"
        model.tokenizer = "{DEMO / "tokenizer"}"
        model.config = {{ model_type = "llama", vocab_size = 1024, hidden_size = 32, num_hidden_layers = 1 }}
        fsdp.param_dtype = "float32"
        data = {{ path = "{DEMO / "chat.jsonl"}", seq_len = 64 }}
        train = {{ steps = 2, global_batch_size = 2 }}
        eval = {{ every = 2, steps = 1, path = "{DEMO / "heldout.jsonl"}", prompts = ["hello"], max_new_tokens = 1 }}
        checkpoint = {{ every = 2, async_save = true }}
        wandb.mode = "disabled"
        """
    )
    x, y = folder / "x", folder / "y"
    starts: list[tuple[Path, list[str]]] = [(x, []), (x, ["train.steps=4", "optimizer.lr=1e-3"])]
    starts += [(x, ["train.steps=5", "optimizer.lr=1e-3"]), (y, ["run.max_minutes=1e-6"])]
    for directory, overrides in starts:
        said = pool.run(1, train, str(toml), directory, *overrides)[0]
        assert not said.startswith("error"), said
    return folder


@pytest.mark.full
def test_a_run_with_three_starts_is_one_curve(runs: Path) -> None:
    run = read_run(runs / "x")
    assert (run.name, run.recipe, run.model) == ("x", "sft", "llama")
    assert (run.state, run.message, run.step, run.total_steps) == ("ended", "", 5, 5)
    assert [record["step"] for record in run.records] == [1, 2, 3, 4, 5]
    assert [(start.number, start.step, start.world_size) for start in run.starts] == [(1, 0, 1), (2, 2, 1), (3, 4, 1)]
    assert run.starts[0].changed == {}
    assert run.starts[1].changed["train.steps"] == [2, 4]
    assert run.starts[1].changed["optimizer.lr"][1] == 1e-3
    assert run.starts[2].changed == {"train.steps": [4, 5]}
    assert run.config["train.steps"] == 5
    assert run.mesh["cp"] == 1
    # The contract of what was there before.
    assert run.environment["start"] == 3
    assert "events" not in run.environment
    assert {record["start"] for record in run.records if "start" in record} == {1, 2, 3}


def test_events_tell_what_a_run_did(runs: Path) -> None:
    run = read_run(runs / "x")
    measured = {key for record in run.records for key in record if key.startswith("memory_gib")}
    assert measured <= set(run.planned)
    assert all(size > 0 for size in run.planned.values())
    data = run.of_kind("data")[0]
    assert data["rows"] == 600
    assert data["documents"] <= 600
    assert data["packing_efficiency"] == pytest.approx(run.records[0]["packing_efficiency"], abs=0.2)
    assert data["held_out"][""]["rows"] == 60
    saves = run.of_kind("save")
    assert [save["step"] for save in saves] == [2, 4, 5]
    assert all(save["background"] and save["seconds"] > 0 and save["waited"] >= 0 for save in saves)
    assert all(save["bytes"] > 1000 for save in saves)
    assert [one["step"] for one in run.of_kind("export")] == [2, 4, 5]
    assert [(one["step"], one["prompt"]) for one in run.samples] == [(step, "hello") for step in (2, 4, 5)]
    assert [(one["step"], one["outcome"]) for one in run.of_kind("end")] == [(2, "done"), (4, "done"), (5, "done")]
    # One write for each of these, and none for a step.
    kinds = {"start", "data", "plan", "resume", "save", "export", "end"}
    assert {one["event"] for one in run.events} == kinds


def test_a_stopped_run_says_why(runs: Path) -> None:
    run = read_run(runs / "y")
    assert (run.state, run.message) == ("stopped", "run.max_minutes")
    assert [start.number for start in run.starts] == [1]
    assert run.of_kind("end")[-1]["outcome"] == "stopped"


def test_a_refused_start_leaves_the_run_as_it_was(runs: Path, pool: WorkerPool) -> None:
    refused = runs / "refused"
    shutil.copytree(runs / "x", refused)
    before = {file.name: file.read_bytes() for file in refused.glob("config*.toml")}
    assert len(before) == 3
    said = pool.run(1, train, str(runs / "x.toml"), refused, "run.seed=7")[0]
    run = read_run(refused)
    refusal = read_lines(refused / "events.jsonl")[-1]
    assert (refusal["event"], f"error: {refusal['text']}") == ("refusal", said)
    assert "run.seed = '7'" in said
    assert run.events == read_run(runs / "x").events
    assert (run.state, run.message, run.step) == ("ended", "", 5)
    assert [start.number for start in run.starts] == [1, 2, 3]
    assert {file.name: file.read_bytes() for file in refused.glob("config*.toml")} == before
    assert run.environment == {**read_run(runs / "x").environment, "start": 4}
    pool.run(1, train, str(runs / "x.toml"), refused, "train.steps=6", "optimizer.lr=1e-3")
    run = read_run(refused)
    assert [start.number for start in run.starts] == [1, 2, 3, 5]
    assert (run.state, run.starts[-1].changed) == ("ended", {"train.steps": [5, 6]})


def test_a_first_start_that_is_refused_has_failed(runs: Path, pool: WorkerPool) -> None:
    said = pool.run(1, train, str(runs / "x.toml"), runs / "first", "data.seq_len=2", "data.overlong=error")[0]
    run = read_run(runs / "first")
    assert (run.state, f"error: {run.message}") == ("failed", said)
    assert run.config["data.seq_len"] == 2


def test_foreign_and_torn_lines_are_left_out(tmp_path: Path) -> None:
    write(
        tmp_path,
        metrics='[1]\nnull\n{"loss": 1}\n{"step": "3"}\n\n{"step": 2, "loss": NaN}\n{"step": 1, "loss": Infinity}\n'
        '{"step": 2, "loss": 4.0}\n{"step": true}\n{"step": 3, "loss": 1',
        events='{"event": "save"}\nrubbish\n' + event(3, "save") + event(2, "warning") + '{"time": 4, "event": 5}\n',
        config="recipe = ",
        environment="[]",
    )
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b"\xff\xfe\n")
    run = read_run(tmp_path)
    assert [record["step"] for record in run.records] == [1, 2]
    assert math.isinf(run.records[0]["loss"])
    assert run.latest("loss") == 4.0
    assert run.latest("eval_loss") is None
    assert [one["event"] for one in run.events] == ["warning", "save"]
    assert (run.config, run.environment, run.recipe, run.model, run.total_steps) == ({}, {}, "", "", None)
    assert (run.mesh, run.planned, run.starts) == ({}, {}, [])
    assert run.state == "killed"


@pytest.mark.parametrize("last_bytes", [1, 30, 60, 61, 62, 10**6])
def test_the_end_of_a_file_begins_with_a_whole_line(tmp_path: Path, last_bytes: int) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"step": {step:4}, "loss": 1.5}}\n' for step in range(9)))
    size = path.stat().st_size // 9
    steps = [line["step"] for line in read_lines(path, last_bytes=last_bytes)]
    assert steps == list(range(9))[max(0, 9 - last_bytes // size) :]


def test_a_stop_between_two_records_tells_its_step(tmp_path: Path) -> None:
    write(tmp_path, metrics='{"step": 5, "loss": 2.0}\n', events=event(1, "start") + event(2, "end", step=7))
    assert read_run(tmp_path).step == 7


SAVED = "checkpoints/step-000004/manifest.json"


@pytest.mark.parametrize(
    ("saved", "steps", "expected"),
    [(True, 4, ("ended", "")), (True, 9, ("stopped", "after step 4")), (False, 4, ("killed", "after step 4"))],
)
def test_a_run_of_before_there_were_events(tmp_path: Path, saved: bool, steps: int, expected: tuple[str, str]) -> None:
    records = [{"step": 1, "start": 1, "time": "2026-01-02T00:00:00.000+00:00"}, {"step": 2}, {"step": 3, "start": 2}]
    text = "".join(json.dumps(record) + "\n" for record in [*records, {"step": 4}])
    write(tmp_path, metrics=text, config=f"train.steps = {steps}")
    if saved:
        (tmp_path / SAVED).parent.mkdir(parents=True)
        (tmp_path / SAVED).touch()
    run = read_run(tmp_path)
    assert (run.state, run.message) == expected
    assert [(start.number, start.step) for start in run.starts] == [(1, 0), (2, 2)]
    assert (run.starts[0].time, run.starts[1].time) == (1767312000.0, None)


def entry(rank: int, text: str, second: int = 0) -> str:
    return f"2026-11-25T10:00:{second:02}+00:00 rank {rank} on host-{rank}, step 3, backward\n{text}\n\n"


def test_the_cause_is_the_rank_that_failed_itself(tmp_path: Path) -> None:
    write(tmp_path, metrics="", events=event(1, "start") + event(2, "failure", text="RuntimeError: gloo", lost=True))
    assert read_run(tmp_path).message == "RuntimeError: gloo"
    errors = tmp_path / "errors"
    errors.mkdir()
    lost = traceback("RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed")
    (errors / "rank-0.txt").write_text(entry(0, lost, 1))
    assert "Connection closed" in read_run(tmp_path).message
    (errors / "rank-1.txt").write_text(
        entry(1, "It was here at the warning:\n" + traceback("ValueError: no"), 2)
        + entry(1, traceback("own.errors.BadRow: row 7: is empty"), 3)
    )
    assert (read_run(tmp_path).state, read_run(tmp_path).message) == ("failed", "rank 1: BadRow: row 7: is empty")
    # The line that the ranks agreed on, as the console shows it.
    (errors / "rank-0.txt").write_text(entry(0, lost, 1) + entry(0, "error: rank 1 was killed; look there", 9))
    assert read_run(tmp_path).message == "rank 1 was killed; look there"


def test_a_lock_of_another_host_is_judged_by_the_newest_line(tmp_path: Path) -> None:
    lock = json.dumps({"pid": 1, "host": "elsewhere"})
    write(tmp_path, metrics='{"step": 1}\n', lock=lock)
    assert read_run(tmp_path).state == "running"
    os.utime(tmp_path / "metrics.jsonl", (1e9, 1e9))
    assert read_run(tmp_path).state == "killed"
    write(tmp_path, metrics='{"step": 1}\n', lock=json.dumps({"pid": 1, "host": platform.node()}))
    assert read_run(tmp_path).state == "killed"


def test_runs_are_found_the_newest_first(tmp_path: Path) -> None:
    for age, name in enumerate(("new", "deep/er/one", "old")):
        run = write(tmp_path / "runs" / name, metrics="")
        os.utime(run / "metrics.jsonl", (2e9 - age, 2e9 - age))
    write(tmp_path / "runs" / "new" / "checkpoints", metrics="")
    write(tmp_path / "runs" / "fresh", config="", environment="{}")  # it has just begun
    (tmp_path / "runs" / "loop").symlink_to(tmp_path / "runs")
    (tmp_path / "runs" / "hf").mkdir()
    (tmp_path / "runs" / "file").touch()
    found = [path.relative_to(tmp_path / "runs").as_posix() for path in find_runs(tmp_path / "runs")]
    assert [name for name in found if not name.startswith("loop")] == ["new", "deep/er/one", "old", "fresh"]
    assert find_runs(tmp_path / "runs" / "new") == [tmp_path / "runs" / "new"]
    assert find_runs(tmp_path / "none") == []


def test_another_directory_is_the_users_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no metrics\.jsonl and no events\.jsonl; name a run directory"):
        read_run(tmp_path)
    with pytest.raises(UserError, match="is no directory"):
        read_run(tmp_path / "none")
    (write(tmp_path, metrics="") / "events.jsonl").mkdir()
    with pytest.raises(UserError, match=r"events\.jsonl: cannot be read \(Is a directory\)"):
        read_run(tmp_path)
