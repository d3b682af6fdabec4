"""Room on the disk: what is refused and what is warned of at the start, against the bytes of real checkpoints."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fsdp2kit.checkpoint import space
from fsdp2kit.checkpoint.space import check_room, storage_failure
from fsdp2kit.checkpoint.store import CheckpointStore
from fsdp2kit.config.schema import TrainConfig, TrainingConfig
from fsdp2kit.console import size_text
from fsdp2kit.errors import StorageFailure, UserError
from fsdp2kit.optim.build import build_optimizer
from tests.checkpoint import helpers
from tests.support.models import full

STEPS = 100


def config_of(*, name: str = "adamw", steps: int = STEPS, **section: Any) -> TrainingConfig:
    values = {"checkpoint": section, "optimizer": {"name": name}, "train": {"steps": steps}}
    return TrainingConfig.model_validate({"recipe": "test", **values})


def tensor_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.glob("*.distcp"))


@pytest.fixture
def room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """`check_room` of a tiny model on a disk with so many bytes free."""

    def check(
        free: int, *, make_room: Callable[[], object] = lambda: None, out: Path = tmp_path / "hf", **settings: Any
    ) -> list[str]:
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
        store = CheckpointStore(tmp_path / "checkpoints")
        store.root.mkdir(exist_ok=True)
        model = helpers.tiny_llama(hidden=256)
        return check_room(config_of(**settings), model, store, out, export_dtype=torch.bfloat16, make_room=make_room)

    return check


@pytest.mark.parametrize("name", ["adamw", full("muon")])
def test_the_size_is_that_of_a_real_checkpoint(tmp_path: Path, room: Callable[..., list[str]], name: str) -> None:
    model = helpers.tiny_llama(hidden=256)
    optimizer = build_optimizer(config_of(name=name).optimizer, model)
    one = tensor_bytes(helpers.checkpoints_of(tmp_path / "real", model, optimizer).save(helpers.progress_at(1)))
    with pytest.raises(UserError, match=r"run\.dir: a checkpoint takes .* and .*checkpoints has .* free; free space"):
        room(int(one * 0.8), name=name)
    assert len(room(one, name=name)) == 1
    assert room(4 * one, name=name) == []


def test_what_is_kept_counts(tmp_path: Path, room: Callable[..., list[str]]) -> None:
    """Two that are kept and the one being written; with what is there already, fewer are to come."""
    model = helpers.tiny_llama(hidden=256)
    path = helpers.checkpoints_of(tmp_path, model).save(helpers.progress_at(1))
    one = tensor_bytes(path)
    shutil.rmtree(tmp_path / "checkpoints")
    options = {"every": 10, "export_hf": "never"}
    [warning] = room(2 * one, **options)
    assert warning.startswith("run.dir: the disk may become full: 3 more checkpoints of ")
    assert room(3 * one, **options) == []
    assert room(2 * one, keep=1, **options) == []
    assert room(one, steps=5, **options) == [], "only the one at the end is written"
    (tmp_path / "hf").mkdir()  # an earlier export stays until the new one is whole beside it
    [warning] = room(3 * one, every=10)
    assert " and an export of " in warning
    helpers.checkpoints_of(tmp_path, model).save(helpers.progress_at(1))
    assert room(2 * one, **options) == []


def test_where_nothing_is_exported_no_folder_is_looked_for(tmp_path: Path, room: Callable[..., list[str]]) -> None:
    assert room(10**9, out=tmp_path / "missing" / "hf", export_hf="never") == []


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), True),
        (PermissionError(errno.EACCES, "Permission denied"), True),
        (FileNotFoundError(errno.ENOENT, "No such file or directory"), False),
        (ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"), False),
        (OSError("of a library"), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_bug_is_no_failure_of_a_disk(tmp_path: Path, error: OSError, is_one: bool) -> None:
    failure = RuntimeError("the save failed")
    failure.__cause__ = error
    raised = storage_failure("x: was not saved", failure, tmp_path, "mend that", group=None)
    assert isinstance(raised, StorageFailure) is is_one


def test_what_is_being_deleted_is_waited_for(room: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    def delete() -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=10**9))

    assert room(0, make_room=delete) == []


def test_a_start_frees_what_a_killed_save_left(tmp_path: Path) -> None:
    """It would take room beside the next save, which deletes it only afterwards."""
    left = tmp_path / "checkpoints" / ".tmp-step-000003"
    left.mkdir(parents=True)
    (left / "__0_0.distcp").write_bytes(bytes(1000))
    checkpoints = helpers.checkpoints_of(tmp_path)
    assert checkpoints.resolve("auto") is None
    checkpoints.finish_sweep()
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_a_refused_start_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    model = helpers.tiny_llama()
    checkpoints = helpers.checkpoints_of(tmp_path, model, dir=str(tmp_path / "elsewhere"))
    checkpoints.config = config_of(dir=str(tmp_path / "elsewhere"))
    with pytest.raises(UserError, match=r"checkpoint\.dir: .*has 1\.0 kB free; .* choose another checkpoint\.dir$"):
        checkpoints.start()
    checkpoints.config = config_of(steps=0)
    assert checkpoints._check_room() == [], "nothing is saved, so nothing has to fit"


def test_a_run_over_its_epochs_is_not_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is started again only to export, and only its data know that it is over."""
    model = helpers.tiny_llama()
    helpers.checkpoints_of(tmp_path, model).save(helpers.progress_at(3))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    checkpoints = helpers.checkpoints_of(tmp_path, model)
    checkpoints.config = config_of().model_copy(update={"train": TrainConfig(epochs=2)})
    checkpoints.total_steps = 4
    with pytest.raises(UserError, match="a checkpoint takes"):
        checkpoints.start()
    checkpoints.total_steps = 3
    assert checkpoints.start() == helpers.progress_at(3)


def test_an_export_counts_on_its_own_disk(
    tmp_path: Path, room: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside the checkpoints, it needs room with them; elsewhere, on that disk alone."""
    model = helpers.tiny_llama(hidden=256)
    export = 2 * sum(parameter.numel() for parameter in model.parameters())
    both = 2 * 6 * export  # one is kept, and one written: float32 weights and both moments of AdamW
    options = {"every": 0, "keep": 1}
    assert room(both + export + 10_000, **options) == []
    [warning] = room(both + export - 10_000, **options)
    assert f"and an export of {size_text(export)} may be written to " in warning
    monkeypatch.setattr(space, "on_one_disk", lambda *_: False)
    assert room(both + export - 10_000, **options) == []
    monkeypatch.setattr(space, "free_bytes", lambda place: export - 1 if place == tmp_path else 10**12)
    [warning] = room(0, **options)
    assert warning.startswith(f"checkpoint.export_dir: the export takes {size_text(export)}, and {tmp_path} has ")
    assert room(0, export_hf="never", **options) == []


def test_a_disk_is_full_below_a_mebibyte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for free, expected in ((2**20 - 1, True), (2**20, False), (None, False)):
        monkeypatch.setattr(space, "free_bytes", lambda _, free=free: free)
        assert space.is_full(tmp_path) is expected
