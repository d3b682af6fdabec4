"""How a process of ours ends: all that `sys.exit` does, without the teardown in which gloo's threads may abort it."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest

from fsdp2kit.data.tables import start_workers
from fsdp2kit.job import process
from tests.support.models import full
from tests.support.workers import FORKS, start_command

ROOT = Path(__file__).resolve().parents[2]

ENDING = """
import atexit, sys, threading, time

class Torn:
    def __del__(self):
        print("torn down")

torn = Torn()
torn.itself = torn
atexit.register(print, "atexit")
threading.Thread(target=lambda: (time.sleep(0.3), print("thread"))).start()
print("main", end=" ")
print("error", file=sys.stderr)
{end}
"""


@pytest.mark.full
@pytest.mark.parametrize(
    ("end", "words"),
    [
        ("sys.exit(3)", "main thread atexit torn down"),
        ("from fsdp2kit.job.process import end_process; end_process(3)", "main thread atexit"),
    ],
)
def test_it_ends_as_exit_does_but_for_the_teardown(end: str, words: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ENDING.format(end=end)], capture_output=True, text=True, timeout=60, check=False
    )

    assert done.returncode == 3
    assert done.stdout.split() == words.split()
    assert done.stderr == "error\n"


@pytest.mark.full
def test_an_idle_pool_of_threads_is_not_waited_for() -> None:
    code = """
from concurrent.futures import ThreadPoolExecutor
from fsdp2kit.job.process import end_process
pool = ThreadPoolExecutor(1)
pool.submit(print, "worked").result()
end_process(3)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False)

    assert (done.returncode, done.stdout) == (3, "worked\n")


@pytest.mark.full
def test_a_reader_that_has_left_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    code = "from fsdp2kit.job.process import end_process\nprint('x')\nend_process(0)"
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        env=buffered,
        check=False,
    )
    os.close(writer)

    assert (done.returncode, done.stderr) == (0, "")


KEYS = ("eval.every=0", "mesh.cp=1", "train.steps=3", "checkpoint.export_hf=never")


def test_a_run_outlives_a_console_on_a_full_disk(tmp_path: Path) -> None:
    toml, complained = str(ROOT / "toml/demo_cp2.toml"), tmp_path / "stderr"
    overrides = [*KEYS, f"run.dir={tmp_path}/run"]
    process = start_command("fsdp2kit.run", toml, *overrides, stdout=Path("/dev/full"), stderr=complained)
    process.join(120)

    assert (process.exitcode, complained.read_text(encoding="utf-8")) == (0, "")
    assert len((tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()) == 3
    assert any((tmp_path / "run" / "checkpoints").iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("stdout", ["> /dev/full", ">&-", "| head -n 1"])
def test_a_run_outlives_its_console(stdout: str, tmp_path: Path) -> None:
    run = f"-m fsdp2kit.run {ROOT}/toml/demo_cp2.toml {' '.join(KEYS)} run.dir={tmp_path}/run"
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {sys.executable} {run} {stdout}"],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        check=False,
    )

    assert (done.returncode, done.stderr) == (0, "")
    assert len((tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()) == 3
    assert any((tmp_path / "run" / "checkpoints").iterdir())


def _keep_workers(connection: Any, method: Literal["fork", "spawn"]) -> None:
    """A rank with two workers, of which one is at work; it says which processes they are."""
    pool = start_workers(2, None, method=method)  # type: ignore[arg-type]
    pool.submit(time.sleep, 600)
    pool.submit(time.sleep, 0.1).result()
    connection.send([child.pid for child in multiprocessing.active_children()])
    time.sleep(600)


def _is_running(pid: int) -> bool:
    """Whether a process exists and is not just waiting for somebody to ask how it ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("method", ["fork", full("spawn")])
def test_workers_end_with_a_rank_that_is_killed(method: str) -> None:
    ours, theirs = FORKS.Pipe()
    rank = FORKS.Process(target=_keep_workers, args=(theirs, method))
    rank.start()
    assert ours.poll(120)
    workers = ours.recv()
    assert len(workers) == 2
    assert all(map(_is_running, workers))
    rank.kill()
    rank.join()
    deadline = time.monotonic() + 20
    while any(map(_is_running, workers)):
        assert time.monotonic() < deadline, "a worker outlives its rank"
        time.sleep(0.05)


def test_a_second_run_of_a_process_counts_from_its_own_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock of the test's own. Without the system's boot clock, the first run counts from our import."""
    now = process._IMPORTED + 50.0
    monkeypatch.setattr(process, "_has_begun", False)
    monkeypatch.setattr(process, "_counts_from", None)
    monkeypatch.setattr(process, "time", SimpleNamespace(monotonic=lambda: now))
    process.begin_job()
    assert process.seconds_alive() == pytest.approx(50.0)
    process.begin_job()
    now += 3.0
    assert process.seconds_alive() == pytest.approx(3.0)
