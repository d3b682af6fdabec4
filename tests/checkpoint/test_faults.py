"""Full disks, disks that turn read-only, deleted directories: what is told, and that nothing complete is damaged."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fsdp2kit.checkpoint import checkpoints as module
from fsdp2kit.checkpoint.hf import dcp_to_hf
from fsdp2kit.checkpoint.manifest import verify
from fsdp2kit.errors import RunFailure, UserError
from tests.checkpoint import helpers
from tests.checkpoint.helpers import flip, names, saved_alone, truncate
from tests.support.models import full
from tests.support.short_run import TOML
from tests.support.workers import WorkerPool, ending, start_ranks


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 640 KiB."""
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=640k", "tmpfs", str(tmp_path)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a tmpfs: {mounted.stderr.decode().strip()}")
    yield tmp_path
    subprocess.run(["umount", "-l", str(tmp_path)], check=True)


@pytest.mark.parametrize("is_async", [False, True])
def test_a_full_disk_damages_nothing(pool: WorkerPool, small_disk: Path, is_async: bool) -> None:
    results = pool.run(2, helpers.save_on_full_disk, small_disk, is_async=is_async)
    assert "(its disk is full)" in results[0][0]
    for message, first, left in results:
        assert "step-000002: the checkpoint was not saved" in message
        assert "whole: step 1" in first
        assert left == ["step-000001"]


def test_an_export_onto_a_full_disk_leaves_nothing_but_the_checkpoint(pool: WorkerPool, small_disk: Path) -> None:
    for message, left in pool.run(2, helpers.export_on_full_disk, small_disk):
        assert "hf: was not exported: " in message
        assert "start the run again: it exports" in message
        assert left == ["checkpoints", "filler"]


def test_a_manifest_that_one_rank_cannot_read_ends_the_export_on_all(pool: WorkerPool, tmp_path: Path) -> None:
    for failure, then in pool.run(2, helpers.export_of_unreadable_manifest, tmp_path):
        assert "hf: was not exported: " in failure
        assert "Input/output error" in failure
        assert then == "exported"


@pytest.mark.parametrize("is_async", [full("false"), "true"])
def test_a_run_whose_disk_fills_ends_in_one_line(small_disk: Path, tmp_path_factory: Any, is_async: str) -> None:
    """Two ranks; there is room for two checkpoints, and a third is due."""
    folder = tmp_path_factory.mktemp("logs")
    (folder / "run.toml").write_text(TOML)
    options = ["checkpoint.every=1", "checkpoint.keep=9", "checkpoint.export_hf=never", "train.steps=100000"]
    options += [f"run.dir={small_disk}/run", f"checkpoint.async_save={is_async}"]
    subprocess.run(["mount", "-o", "remount,size=4m", str(small_disk)], check=True)
    ranks, logs = start_ranks(2, folder, "fsdp2kit.run", str(folder / "run.toml"), *options)
    with ending(ranks):
        for rank in ranks:
            rank.join(120)
        codes = [rank.exitcode for rank in ranks]
    said = logs[0].read_text()
    assert codes == [1, 1], said
    assert "run.dir: the disk may become full: " in said
    assert "Traceback" not in said
    assert logs[1].read_text() == ""
    [error] = [line for line in said.splitlines() if line.startswith("error: ")]
    assert re.search(r"the checkpoint was not saved: .* \(its disk is full\); .*resumes from step-\d+$", error)
    kept = sorted((small_disk / "run" / "checkpoints").iterdir())
    assert kept
    for path in kept:
        assert "whole" in verify(path)


def test_a_disk_that_turns_read_only_damages_nothing(small_disk: Path) -> None:
    checkpoints, path = saved_alone(small_disk, 1)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(RunFailure, match=r"step-000002: .* Read-only file system: .*; .* resumes from step-000001"):
        checkpoints.save(helpers.progress_at(2))
    assert "whole" in verify(path)
    with pytest.raises(UserError, match=r"run\.dir: .*checkpoints cannot be written \(Read-only file system, EROFS\)"):
        helpers.checkpoints_of(small_disk)


def test_checkpoints_deleted_between_two_saves_are_missed_aloud(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints, path = saved_alone(tmp_path, 1)
    shutil.rmtree(tmp_path)
    path = checkpoints.save(helpers.progress_at(2))
    assert f"{path.parent}: was deleted during the run" in caplog.text
    assert "whole" in verify(path)


@pytest.mark.parametrize("level", ["the new checkpoint", "all of them"])
def test_a_directory_deleted_during_a_save_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, level: str
) -> None:
    checkpoints, path = saved_alone(tmp_path, 1)
    gone = path.with_name(".tmp-step-000002") if level == "the new checkpoint" else path.parent
    original = module.record_files

    def delete_first(*arguments):
        shutil.rmtree(gone)
        return original(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(module, "record_files", delete_first)
        with pytest.raises(RunFailure, match=r"step-000002: .*No such file or directory: '.*tmp-step-000002.*; free"):
            checkpoints.save(helpers.progress_at(2))
    resumed = helpers.checkpoints_of(tmp_path)
    if level == "the new checkpoint":
        assert "whole" in verify(path)
        assert resumed.resolve("auto") == path
    else:
        assert resumed.resolve("auto") is None
    assert "whole" in verify(resumed.save(helpers.progress_at(2)))


@pytest.mark.parametrize("damage", [flip, truncate, lambda path: (path / "__0_0.distcp").unlink()])
def test_a_damaged_checkpoint_is_not_exported(tmp_path: Path, damage) -> None:
    _, path = saved_alone(tmp_path, 1)
    damage(path)
    with pytest.raises(UserError, match=r"__0_0\.distcp: (does not have the checksum|has \d+ bytes|is missing)"):
        dcp_to_hf(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert names(tmp_path) == ["step-000001"]
