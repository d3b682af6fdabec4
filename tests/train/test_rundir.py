"""The run directory: config.toml and environment.json, nothing lost, no secrets."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from fsdp2kit.errors import UserError
from fsdp2kit.train.rundir import describe_environment, prepare_run_dir, without_secrets


def prepare(path: Path, text: str = "recipe = 'sft'\n", *, is_main: bool = True) -> None:
    prepare_run_dir(path, config_text=text, environment={"world_size": 2}, is_main=is_main)


def test_makes_the_directory_and_writes_both_files(tmp_path: Path) -> None:
    run_dir = tmp_path / "runs" / "x"
    prepare(run_dir)
    assert (run_dir / "config.toml").read_text() == "recipe = 'sft'\n"
    assert json.loads((run_dir / "environment.json").read_text()) == {"world_size": 2}
    assert sorted(path.name for path in run_dir.iterdir()) == ["config.toml", "environment.json"]


def test_other_ranks_touch_nothing(tmp_path: Path) -> None:
    prepare(tmp_path / "x", is_main=False)
    assert not (tmp_path / "x").exists()


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
    with pytest.raises(UserError, match=r"run\.dir: .* is a file.*; choose another run\.dir"):
        prepare(tmp_path / "file" / below)


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
    found = describe_environment(world_size=4, mesh={"dp": 2, "cp": 2}, dtype_ledger={"storage": "float32"})
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
    assert describe_environment(world_size=1, mesh={}, dtype_ledger={})["git"] is None
