"""What ``--check`` tries of a run's places: that they can be written, and that the run in them is this one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from fsdp2kit.checkpoint.identity import changed_settings, settings_identity
from fsdp2kit.checkpoint.offline import try_places
from fsdp2kit.config import TrainingConfig, dump_toml
from fsdp2kit.errors import UserError
from tests.checkpoint import helpers
from tests.checkpoint.helpers import checkpoints_of


def config_of(run_dir: Path | str, **sections: Any) -> TrainingConfig:
    run = {"dir": str(run_dir), **sections.pop("run", {})}
    return TrainingConfig.model_validate({"recipe": "test", "run": run, **sections})


def files_of(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*"))


def saved_run(run_dir: Path) -> Path:
    """A run with a checkpoint of step 3; returns that."""
    config = config_of(run_dir, checkpoint={"export_dtype": "bfloat16"})
    run_dir.mkdir()
    (run_dir / "config.toml").write_text(dump_toml(config))
    identity = {"model": "m", "data": "d", **settings_identity(config)}
    return checkpoints_of(run_dir, identity=identity).save(helpers.progress_at(3))


def test_a_new_run_directory_is_tried_and_nothing_is_left(tmp_path: Path) -> None:
    assert try_places(config_of(tmp_path / "runs" / "x")) == [
        "run.dir can be written, and has no checkpoint: a start begins with step 0"
    ]
    assert files_of(tmp_path) == []


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"run": {"dir": "/proc/x/y"}}, r"^run\.dir: /proc/x/y cannot be written to \(/proc: .+\); choose another"),
        ({"checkpoint": {"dir": "/proc/x"}}, r"^checkpoint\.dir: /proc/x cannot be written to"),
        ({"checkpoint": {"export_dir": "/proc/x/hf"}}, r"^checkpoint\.export_dir: /proc/x cannot be written to"),
        ({"run": {"dir": "FILE/x"}}, r"^run\.dir: .*FILE/x is a file, or lies under one; choose another run\.dir"),
        ({"checkpoint": {"export_dir": "MINE"}}, r"MINE: holds notes\.txt, which no export of fsdp2kit wrote there"),
    ],
)
def test_a_place_that_cannot_be_used_is_refused(
    sections: dict[str, Any], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("FILE").touch()
    Path("MINE").mkdir()
    Path("MINE/notes.txt").touch()
    before = files_of(tmp_path)
    with pytest.raises(UserError, match=says):
        try_places(config_of("runs/x", **sections))
    assert files_of(tmp_path) == before


def test_the_run_that_is_there_is_named(tmp_path: Path) -> None:
    saved_run(tmp_path / "x")
    before = files_of(tmp_path)
    (line,) = try_places(config_of(tmp_path / "x", checkpoint={"export_dtype": "bfloat16"}))
    assert line == "run.dir holds a run: a start resumes from step 3; changed since: nothing"
    values = {"optimizer": {"lr": 0.5}, "checkpoint": {"export_dtype": "bfloat16"}}
    (line,) = try_places(config_of(tmp_path / "x", **values))
    assert line.endswith("changed since: optimizer.lr 2e-05 → 0.5")
    same = {"export_dtype": "bfloat16"}
    (line,) = try_places(config_of(tmp_path / "x", checkpoint=same, run={"max_minutes": 5}))
    assert line.endswith("changed since: run.max_minutes unset → 5.0")
    (line,) = try_places(config_of(tmp_path / "x", run={"resume": "never", "seed": 7}))
    assert "a start begins with step 0" in line
    assert files_of(tmp_path) == before


@pytest.mark.parametrize("values", [{"run": {"seed": 7}}, {"data": {"format": "chat", "limit": 5}}])
def test_another_run_that_is_there_is_refused(values: dict[str, Any], tmp_path: Path) -> None:
    ((section, ((key, value), *_)),) = [(name, [*reversed(one.items())]) for name, one in values.items()]
    saved_run(tmp_path / "x")
    what = f"was made with {section}.{key} = .*, and this run has {section}.{key} = '{value}'; undo that, or choose"
    with pytest.raises(UserError, match=what):
        try_places(config_of(tmp_path / "x", **values))


def test_a_limit_that_was_taken_out_is_another_run(tmp_path: Path) -> None:
    identity = settings_identity(config_of(tmp_path / "x", data={"limit": 5}))
    checkpoints_of(tmp_path / "x", identity=identity).save(helpers.progress_at(3))
    with pytest.raises(UserError, match=r"was made with data\.limit = '5', and this run has data\.limit = None"):
        try_places(config_of(tmp_path / "x"))


def test_a_damaged_checkpoint_is_passed_over_as_a_start_does(tmp_path: Path) -> None:
    saved_run(tmp_path / "x")
    damaged = tmp_path / "x" / "checkpoints" / "step-000009"
    damaged.mkdir()
    (damaged / "manifest.json").write_text("{")
    assert "resumes from step 3" in try_places(config_of(tmp_path / "x"))[0]


def test_settings_that_differ_have_both_values(tmp_path: Path) -> None:
    config = config_of(tmp_path / "x", model={"path": "other"}, checkpoint={"export_dtype": "bfloat16"})
    assert changed_settings(saved_run(tmp_path / "x"), config) == {"model.path": [None, "other"]}
    config = config_of(tmp_path / "x", data={"path": "https://me:secret@h/x"}, checkpoint={"export_dtype": "bfloat16"})
    assert changed_settings(tmp_path / "x/checkpoints/step-000003", config) == {"data.path": [None, "https://***@h/x"]}


def test_a_config_that_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    """A pipe in the place of a checkpoint's config.toml, and one that is nested too deep."""
    config = TrainingConfig.model_validate({"recipe": "none"})
    os.mkfifo(tmp_path / "config.toml")
    assert changed_settings(tmp_path, config) == {}
    (tmp_path / "config.toml").unlink()
    (tmp_path / "config.toml").write_text("a = " + "[" * 5000 + "]" * 5000)
    assert changed_settings(tmp_path, config) == {}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("optimizer.name", "muon"),
        ("run.seed", 7),
        ("data.seq_len", 64),
        ("data.pack", False),
        ("data.shuffle", False),
        ("train.global_batch_size", 48),
    ],
)
def test_each_setting_that_decides_about_the_batches_is_of_the_run(key: str, value: Any, tmp_path: Path) -> None:
    section, _, name = key.partition(".")
    plain = settings_identity(config_of(tmp_path))
    changed = settings_identity(config_of(tmp_path, **{section: {name: value}}))
    assert {one for one in plain.keys() | changed.keys() if plain.get(one) != changed.get(one)} == {key}
    assert changed[key] == str(value).lower()


def test_an_end_that_is_moved_is_the_same_run(tmp_path: Path) -> None:
    others = {"train": {"steps": 5, "micro_batch_size": 2}, "optimizer": {"lr": 0.5}, "eval": {"every": 3}}
    assert settings_identity(config_of(tmp_path, **others)) == settings_identity(config_of(tmp_path))
