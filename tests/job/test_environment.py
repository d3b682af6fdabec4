"""What is needed to repeat a run is JSON, without secrets."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from fsdp2kit.job.environment import describe_environment
from fsdp2kit.job.run_directory import write_record


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


def test_a_repository_is_modified_by_a_changed_file_and_not_by_a_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    (tmp_path / "x.py").write_text("a = 1\n")
    for command in (["init", "-q"], ["add", "x.py"], ["commit", "-q", "-m", "x"]):
        subprocess.run([*git, *command], cwd=tmp_path, check=True)
    monkeypatch.chdir(tmp_path)
    for name, modified in (("run.log", False), ("x.py", True)):
        (tmp_path / name).write_text("a = 2\n")
        assert describe_environment(world_size=1, mesh={})["git"]["modified"] is modified
