"""Two jobs in one run directory: the second is refused, whoever the first is, until the first is gone."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fsdp2kit.errors import UserError
from fsdp2kit.train.claim import claim_run_dir

HOLD = """
import sys, subprocess
from pathlib import Path
from fsdp2kit.train.claim import claim_run_dir
with claim_run_dir(Path(sys.argv[1]), is_main=True):
    child = subprocess.Popen(["sleep", "60"])  # as data workers may outlive a killed rank
    print(child.pid, flush=True)
    sys.stdin.read()
"""


def hold(path: Path) -> tuple[subprocess.Popen[str], int]:
    """A process that has the directory, and the process id of its child."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, int(process.stdout.readline())


def test_a_second_job_is_refused_by_name_until_the_first_is_killed(tmp_path: Path) -> None:
    run_dir = tmp_path / "runs" / "x"
    process, child = hold(run_dir)
    try:
        with pytest.raises(UserError) as refusal:
            claim_run_dir(run_dir, is_main=True)
        assert f"run.dir: {run_dir} is in use by process {process.pid} on {platform.node()};" in str(refusal.value)
        claim_run_dir(run_dir, is_main=False)  # ranks other than 0 have no say
        process.send_signal(signal.SIGKILL)
        process.wait()
        with claim_run_dir(run_dir, is_main=True):
            assert str(os.getpid()) in (run_dir / ".lock").read_text()
    finally:
        os.kill(child, signal.SIGKILL)
        process.communicate()


def test_it_is_let_go_at_the_end(tmp_path: Path) -> None:
    with claim_run_dir(tmp_path, is_main=True):
        pass
    process, child = hold(tmp_path)
    os.kill(child, signal.SIGKILL)
    process.communicate()


def test_a_file_system_without_locks_is_said_to_be_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fcntl.lockf", fail)
    with claim_run_dir(tmp_path, is_main=True):
        assert "has no locks (Function not implemented)" in caplog.text


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"run\.dir: .* is a file, or lies under one"):
        claim_run_dir(tmp_path / "file" / "run", is_main=True)
