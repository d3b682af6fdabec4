"""If the cache cannot be written, another folder replaces it; without any such folder, the error is one line."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest
from huggingface_hub import constants

from fsdp2kit.config.schema import ModelConfig
from fsdp2kit.data import cache
from fsdp2kit.data.cache import Cache
from fsdp2kit.errors import UserError
from fsdp2kit.model.assets import find_hf_dir
from fsdp2kit.model.hf_config import load_hf_config
from fsdp2kit.model.tokenizer import build_tokenizer
from fsdp2kit.run import main as run_main
from tests.support.models import full, slow

ROOT = Path(__file__).resolve().parents[2]
DEMO = str(ROOT / "toml" / "demo_cp2.toml")
SHORT = ("mesh.cp=1", "train.steps=1", "eval.every=0", "checkpoint.export_hf=never")


@pytest.fixture
def unwritable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache in which nothing can be made, not by root either: below a file."""
    (tmp_path / "home").touch()
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "home" / "datasets")
    cache._replacement.cache_clear()
    yield tmp_path / "home" / "datasets"
    cache._replacement.cache_clear()


def test_a_folder_of_temporary_files_stands_in_and_then_the_run_directory(
    unwritable: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cache.tempfile, "tempdir", str(tmp_path))
    folder = tmp_path / f"fsdp2kit-{os.getuid()}"
    run_dir = tmp_path / "run"
    assert Cache(run_dir).file("x.arrow") == folder / "fsdp2kit" / "x.arrow", "there is no run directory"
    assert Cache().for_hub() == folder
    [said] = capsys.readouterr().err.splitlines()
    assert said.startswith(f"the cache {unwritable} cannot be written (Not a directory): {folder} is used; set HF_")
    run_dir.mkdir()
    assert Cache(run_dir).file("x.arrow") == run_dir / "cache" / "fsdp2kit" / "x.arrow"


def test_a_read_only_cache_that_others_have_filled_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled = tmp_path / "fsdp2kit" / "x.arrow"
    filled.parent.mkdir()
    filled.touch()
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    monkeypatch.setattr(cache, "_refusal", lambda folder: "Read-only file system")
    assert Cache().file("x.arrow") == filled
    assert Cache().for_hub() == tmp_path


def test_no_folder_at_all_is_one_line(unwritable: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")

    monkeypatch.setattr(cache.tempfile, "gettempdir", none)
    with pytest.raises(UserError, match=r"the cache .* cannot be written \(Not a directory\); set HF_HOME"):
        Cache().writable()


def test_a_check_needs_no_cache(
    unwritable: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cache.tempfile, "tempdir", str(tmp_path))
    assert run_main([DEMO, "--check", "mesh.cp=1"]) == 0
    said = capsys.readouterr()
    assert "an epoch:" in said.out
    assert said.err.count("cannot be written") == 1


@pytest.mark.parametrize("options", [slow(("--check", "mesh.cp=1")), full(("run.dir={folder}/run", *SHORT))])
def test_a_run_and_a_check_need_no_home(tmp_path: Path, options: tuple[str, ...]) -> None:
    (tmp_path / "home").touch()
    (tmp_path / "tmp").mkdir()
    home = str(tmp_path / "home" / "of-nobody")
    environment = {"HOME": home, "HF_HOME": home, "HF_DATASETS_CACHE": f"{home}/datasets", "TMPDIR": f"{tmp_path}/tmp"}
    options = tuple(option.format(folder=tmp_path) for option in options)
    command = ["-m", "fsdp2kit.run", DEMO, *options]
    done = _run_fresh(command, environment)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert f"the cache {home}/datasets cannot be written" in done.stderr
    kept = tmp_path / "run" / "cache" if "--check" not in options else tmp_path / "tmp"
    assert list(kept.rglob("*.arrow"))


def _run_fresh(arguments: list[str], variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """A new interpreter: `datasets` reads the environment when it is imported."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240, check=False)


@pytest.mark.parametrize(
    "fetch",
    [
        load_hf_config,
        lambda section: find_hf_dir(section.path, key="model.path", with_weights=True),
        build_tokenizer,
    ],
    ids=["config", "weights", "tokenizer"],
)
def test_a_download_into_a_cache_that_cannot_be_written_names_it(
    fetch: Callable[[ModelConfig], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any, **settings: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system", f"{constants.HF_HUB_CACHE}/models--someone--something")

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", refuse)
    monkeypatch.setattr("transformers.PreTrainedConfig.get_config_dict", refuse)
    with pytest.raises(UserError, match=r"Read-only file system.*; set HF_HOME to a folder that can be written"):
        fetch(ModelConfig(path="someone/something"))


@pytest.mark.skipif(os.getuid() != 0, reason="gives a folder to another user")
def test_another_users_folder_of_temporary_files_is_not_used(
    unwritable: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache.tempfile, "tempdir", str(tmp_path))
    folder = tmp_path / f"fsdp2kit-{os.getuid()}"
    folder.mkdir()
    os.chown(folder, 65534, 65534)
    with pytest.raises(UserError, match="set HF_HOME"):
        Cache().writable()
