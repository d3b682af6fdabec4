"""The run directory is locked against a second job, follows no links of others, and records what was run."""

from __future__ import annotations

import json
import os
import platform
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fsdp2kit.errors import UserError
from fsdp2kit.files.redaction import without_secrets
from fsdp2kit.job import run_directory
from fsdp2kit.job.run_directory import RecordBefore, begin_start, lock_run_dir, write_record

HOLD = """
import sys, subprocess
from pathlib import Path
from fsdp2kit.job.run_directory import lock_run_dir
with lock_run_dir(Path(sys.argv[1])):
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


@pytest.mark.full
def test_a_second_job_is_refused_by_name_until_the_first_is_killed(tmp_path: Path) -> None:
    run_dir = tmp_path / "runs" / "x"
    process, child = hold(run_dir)
    try:
        with pytest.raises(UserError) as refusal, lock_run_dir(run_dir):
            pass
        assert f"run.dir: {run_dir} is in use by process {process.pid} on {platform.node()};" in str(refusal.value)
        process.send_signal(signal.SIGKILL)
        process.wait()
        with lock_run_dir(run_dir):
            assert str(os.getpid()) in (run_dir / ".lock").read_text()
    finally:
        os.kill(child, signal.SIGKILL)
        process.communicate()


def test_a_file_system_without_locks_is_said_to_be_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fcntl.lockf", fail)
    with lock_run_dir(tmp_path):
        assert "has no locks (Function not implemented)" in caplog.text


def prepare(path: Path, text: str = "recipe = 'sft'\n") -> None:
    write_record(path, config_text=text, environment={"world_size": 2})


def test_makes_the_directory_and_writes_both_files(tmp_path: Path) -> None:
    run_dir = tmp_path / "runs" / "x"
    prepare(run_dir)
    assert (run_dir / "config.toml").read_text() == "recipe = 'sft'\n"
    assert json.loads((run_dir / "environment.json").read_text()) == {"world_size": 2}
    assert sorted(path.name for path in run_dir.iterdir()) == ["config.toml", "environment.json"]


def test_a_differing_config_is_kept(tmp_path: Path) -> None:
    for text in ("a = 1\n", "a = 1\n", "a = 2\n", "a = 3\n"):
        prepare(tmp_path, text)
    assert {path.name: path.read_text() for path in tmp_path.glob("*.toml")} == {
        "config.1.toml": "a = 1\n",
        "config.2.toml": "a = 2\n",
        "config.toml": "a = 3\n",
    }


def test_a_refused_start_gives_the_run_its_record_back_with_its_history(tmp_path: Path) -> None:
    for number in (1, 2):
        write_record(tmp_path, config_text=f"a = {number}\n", environment={"start": number})
    before = RecordBefore(tmp_path)
    write_record(tmp_path, config_text="a = 3\n", environment={"start": 3})

    before.put_back(start=3)

    assert {path.name: path.read_text() for path in tmp_path.glob("*.toml")} == {
        "config.toml": "a = 2\n",
        "config.1.toml": "a = 1\n",
    }
    assert json.loads((tmp_path / "environment.json").read_text()) == {"start": 3}


@pytest.mark.parametrize("below", ["", "deeper/still"])
def test_a_file_in_the_way_is_the_users_error(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"run\.dir: .* is a file, or lies under one; choose another run\.dir"):
        prepare(tmp_path / "file" / below)
    with pytest.raises(UserError, match=r"run\.dir: .* is a file, or lies under one"):
        lock_run_dir(tmp_path / "file" / below).__enter__()


def test_a_directory_that_refuses_writing_is_the_users_error(tmp_path: Path) -> None:
    (tmp_path / "config.toml").mkdir()  # root writes through permissions, but not through this
    with pytest.raises(UserError, match=r"run\.dir: .* cannot be written to"):
        prepare(tmp_path)


def test_secrets_are_blanked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefgh")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "aws-abcdefgh")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "not-a-secret")
    monkeypatch.setenv("HF_TOKEN_PATH", "/home/me/token")
    assert without_secrets("hf_abcdefgh aws-abcdefgh") == "*** ***"
    assert without_secrets("not-a-secret /home/me/token") == "not-a-secret /home/me/token"
    assert without_secrets("https://me:pass@host/x s3://bucket/y") == "https://***@host/x s3://bucket/y"
    prepare(tmp_path, "path = 'https://hf_abcdefgh@host/x'\n")
    assert (tmp_path / "config.toml").read_text() == "path = 'https://***@host/x'\n"


@pytest.mark.parametrize(
    ("name", "second"),
    [("rank-1.txt", "rank-1.2.txt"), ("nccl-rank-1", "nccl-rank-1.2"), ("nccl-rank-1.pickle", "nccl-rank-1.2.pickle")],
)
def test_starts_are_counted_and_errors_of_the_start_before_are_kept(tmp_path: Path, name: str, second: str) -> None:
    """torchfrtrace reads every file of a prefix: a record of an earlier start would be compared with new ones."""
    assert begin_start(tmp_path) == 1
    write_record(tmp_path, config_text="", environment={"start": 1})
    for kept in ([name], sorted([name, second])):  # the second as after a start that was refused
        (tmp_path / "errors").mkdir(exist_ok=True)
        (tmp_path / "errors" / name).write_text(f"{len(kept)}")
        assert begin_start(tmp_path) == 2
        assert sorted(path.name for path in (tmp_path / "errors" / "start-1").iterdir()) == kept
        assert not (tmp_path / "errors" / name).exists()


@pytest.mark.parametrize("name", [".lock", "events.jsonl", "metrics.jsonl", "samples.jsonl"])
def test_links_that_others_put_into_a_run_directory_are_not_followed(tmp_path: Path, name: str) -> None:
    victim, run_dir = tmp_path / "victim", tmp_path / "run"
    victim.write_text("theirs")
    run_dir.mkdir()
    (run_dir / name).symlink_to(victim)
    said = rf"run\.dir: .*{re.escape(name)} cannot be written to: it is a link; remove it"
    with pytest.raises(UserError, match=said), lock_run_dir(run_dir):
        pass
    assert victim.read_text() == "theirs"


@pytest.mark.parametrize("name", [".environment.json.tmp", ".config.toml.tmp", "config.toml", "environment.json"])
def test_links_are_replaced_and_not_written_through(tmp_path: Path, name: str) -> None:
    victim, run_dir = tmp_path / "victim", tmp_path / "run"
    victim.write_text("theirs = 1")
    run_dir.mkdir()
    (run_dir / name).symlink_to(victim)
    with lock_run_dir(run_dir):
        write_record(run_dir, config_text="ours = 1\n", environment={"n": 1})
    assert victim.read_text() == "theirs = 1"
    assert (run_dir / "config.toml").read_text() == "ours = 1\n"
    assert json.loads((run_dir / "environment.json").read_text()) == {"n": 1}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", [".lock", "config.toml", "environment.json", "events.jsonl", "metrics.jsonl"])
def test_pipes_in_a_run_directory_are_not_waited_for(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(UserError, match="cannot be written to: it is no regular file"), lock_run_dir(tmp_path):
        pass


def test_a_reader_that_was_suspended_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_directory, "_READER_SECONDS", 0.2)
    (tmp_path / ".lock").touch()
    code = "import fcntl, sys; file = open(sys.argv[1]); fcntl.lockf(file, fcntl.LOCK_SH, 1, 1); print(); input()"
    reader = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / ".lock")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert reader.stdout is not None
    reader.stdout.readline()
    with lock_run_dir(tmp_path):
        assert reader.poll() is None
    reader.communicate("\n")


@pytest.mark.parametrize("text", ["{", "[]", '{"start": null}', '{"world_size": 2}', '{"start": Infinity}'])
def test_a_record_that_tells_no_start_is_that_of_none(tmp_path: Path, text: str) -> None:
    assert begin_start(tmp_path) == 1
    (tmp_path / "environment.json").write_text(text)
    assert begin_start(tmp_path) == 1


def test_what_is_about_one_start_alone_is_no_change_of_the_config() -> None:
    text = '[run]\ndir = "a"\nresume = "auto"\nseed = 3\n[train]\nsteps = 5\n'
    assert run_directory.flat_config(text) == {"run.seed": 3, "train.steps": 5}
