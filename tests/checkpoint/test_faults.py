"""Full disks, disks that turn read-only, deleted directories: what is told, and that nothing complete is damaged."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from fsdp2kit.checkpoint import manager as checkpoint_manager
from fsdp2kit.checkpoint.hf import dcp_to_hf
from fsdp2kit.checkpoint.manifest import verify
from fsdp2kit.errors import RunFailure, UserError
from tests.checkpoint import jobs
from tests.checkpoint.test_manager import flip, names, saved_alone, truncate
from tests.workers import WorkerPool


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
    results = pool.run(2, jobs.save_on_full_disk, small_disk, is_async=is_async)
    assert "(its disk is full)" in results[0][0]
    for message, first, left in results:
        assert "step-000002: the checkpoint was not saved" in message
        assert "whole: step 1" in first
        assert left == ["step-000001"]


def test_a_disk_that_turns_read_only_damages_nothing(small_disk: Path) -> None:
    manager, path = saved_alone(small_disk, 1)
    model = jobs.tiny_llama()
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(RunFailure, match=r"step-000002: .* Read-only file system: .*; .* resumes from step-000001"):
        manager.save(model, jobs.adamw(model), jobs.progress_at(2))
    assert "whole" in verify(path)
    with pytest.raises(UserError, match=r"run\.dir: .*checkpoints cannot be written \(Read-only file system, EROFS\)"):
        jobs.manager_of(small_disk)


def test_checkpoints_deleted_between_two_saves_are_missed_aloud(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manager, path = saved_alone(tmp_path, 1)
    shutil.rmtree(tmp_path)
    model = jobs.tiny_llama()
    path = manager.save(model, jobs.adamw(model), jobs.progress_at(2))
    assert f"{path.parent}: was deleted during the run" in caplog.text
    assert "whole" in verify(path)


@pytest.mark.parametrize("level", ["the new checkpoint", "all of them"])
def test_a_directory_deleted_during_a_save_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, level: str
) -> None:
    manager, path = saved_alone(tmp_path, 1)
    gone = path.with_name(".tmp-step-000002") if level == "the new checkpoint" else path.parent
    original = checkpoint_manager.record_files

    def delete_first(*arguments):
        shutil.rmtree(gone)
        return original(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_manager, "record_files", delete_first)
        model = jobs.tiny_llama()
        with pytest.raises(RunFailure, match=r"step-000002: .*No such file or directory: '.*tmp-step-000002.*; free"):
            manager.save(model, jobs.adamw(model), jobs.progress_at(2))
    resumed = jobs.manager_of(tmp_path)
    if level == "the new checkpoint":
        assert "whole" in verify(path)
        assert resumed.resolve("auto") == path
    else:
        assert resumed.resolve("auto") is None
    assert "whole" in verify(resumed.save(model, jobs.adamw(model), jobs.progress_at(2)))


@pytest.mark.parametrize("damage", [flip, truncate, lambda path: (path / "__0_0.distcp").unlink()])
def test_a_damaged_checkpoint_is_not_exported(tmp_path: Path, damage) -> None:
    _, path = saved_alone(tmp_path, 1)
    damage(path)
    with pytest.raises(UserError, match=r"__0_0\.distcp: (does not have the checksum|has \d+ bytes|is missing)"):
        dcp_to_hf(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert names(tmp_path) == ["step-000001"]
