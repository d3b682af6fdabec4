"""A job: its run directory is locked against a second one, and records what was run, without secrets."""

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
import torch

from fsdp2kit.config.schema import TrainingConfig
from fsdp2kit.errors import UserError
from fsdp2kit.files.redaction import without_secrets
from fsdp2kit.job import distributed, tracebacks
from fsdp2kit.job.start import begin_start, describe_environment, lock_run_dir, start_job, write_record
from tests.support.workers import WorkerPool

HOLD = """
import sys, subprocess
from pathlib import Path
from fsdp2kit.job.start import lock_run_dir
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


def test_environment_is_json_and_says_what_ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "x"]):
        subprocess.run([*git, *command], cwd=tmp_path, check=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefgh")
    monkeypatch.setattr("sys.orig_argv", ["python", "-m", "fsdp2kit.run", "x.toml", "model.path=hf_abcdefgh"])
    found = describe_environment(world_size=4, mesh={"dp": 2, "cp": 2})
    found = json.loads(json.dumps(found))
    assert found["command"] == "python -m fsdp2kit.run x.toml 'model.path=***'"
    assert set(found["versions"]) >= {"fsdp2kit", "python", "torch", "transformers", "datasets"}
    assert found["devices"]
    assert (found["world_size"], found["mesh"]) == (4, {"dp": 2, "cp": 2})
    assert found["git"]["modified"] is False
    assert len(found["git"]["commit"]) == 40


@pytest.mark.parametrize("path", [None, ""])
def test_without_git_or_a_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str | None) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    if path is not None:
        monkeypatch.setenv("PATH", path)
    assert describe_environment(world_size=1, mesh={})["git"] is None


def open_and_record(folder: Path, deterministic: bool) -> tuple[bool, bool]:
    """Whether this rank finds a run directory before the job opens it, and whether that is locked then."""
    run = {"dir": str(folder / "run"), "deterministic": deterministic}
    values = {"recipe": "x", "model": {"path": "m"}, "train": {"steps": 1}, "run": run}
    with start_job(TrainingConfig.model_validate(values)) as job:
        assert torch.are_deterministic_algorithms_enabled() is deterministic
        torch.use_deterministic_algorithms(False)
        before = (folder / "run").exists()
        job.open_run_dir()
        locked = False
        if not job.is_main:  # a process never locks itself out
            try:
                with lock_run_dir(folder / "run"):
                    pass
            except UserError:
                locked = True
        distributed.agree()
    return before, locked


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_job_opens_its_run_directory_when_nothing_is_refused_any_more(
    deterministic: bool, pool: WorkerPool, tmp_path: Path
) -> None:
    found = pool.run(2, open_and_record, tmp_path, deterministic)
    assert found[0] == (False, False)
    assert found[1][1], "rank 0 has the lock"
    assert {"config.toml", "environment.json", ".lock"} <= {path.name for path in (tmp_path / "run").iterdir()}
    assert json.loads((tmp_path / "run" / "environment.json").read_text())["hosts"] == {platform.node(): "0-1"}
    with lock_run_dir(tmp_path / "run"):  # let go at the job's end
        pass


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


def test_secrets_of_the_command_and_the_environment_are_blanked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = ["python", "-m", "fsdp2kit.run", "x.toml", "rollout.url=http://user:pw@host:8000", "--api-key", "k1234567"]
    monkeypatch.setattr("sys.orig_argv", argv)
    found = describe_environment(world_size=1, mesh={"dp": 1})
    contents = {"data": {"digest": "https://h/x?X-Amz-Signature=abcd", "rows": 3}}
    write_record(tmp_path, config_text="", environment={**found, "contents": contents})
    text = (tmp_path / "environment.json").read_text()
    assert "pw@" not in text
    assert "k1234567" not in text
    assert "Signature=***" in text


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
