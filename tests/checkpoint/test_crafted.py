"""Crafted checkpoints and export records: refused or passed over in a line; nothing outside is read or deleted."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from upath import UPath

from fsdp2kit.checkpoint.__main__ import main
from fsdp2kit.checkpoint.adapter import RECORD
from fsdp2kit.checkpoint.export_directory import ExportDirectory
from fsdp2kit.checkpoint.export_plan import ExportDtype, ExportPlan
from fsdp2kit.checkpoint.hf import ensure_export
from fsdp2kit.checkpoint.manifest import MANIFEST, read_manifest
from fsdp2kit.checkpoint.reader import SafeReader
from fsdp2kit.errors import UserError
from fsdp2kit.files.remote import to_path
from tests.checkpoint.helpers import checkpoints_of, progress_at, saved_alone

PASSWD = Path("/etc/passwd")


def change(path: Path, **values: Any) -> None:
    """Change fields of a manifest."""
    manifest = path / MANIFEST
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), **values}))


def name_file(path: Path, name: str, *, size: int = 0, sha256: str = hashlib.sha256().hexdigest()) -> None:
    """Name one more file in a manifest."""
    files = json.loads((path / MANIFEST).read_text())["files"]
    change(path, files={**files, name: {"size": size, "sha256": sha256}})


def link_to_zero(path: Path) -> None:
    (path / "zero").symlink_to("/dev/zero")
    name_file(path, "zero")


def put_pipe(path: Path) -> None:
    os.mkfifo(path / "pipe")
    name_file(path, "pipe")


def name_passwd(path: Path) -> None:
    digest = hashlib.sha256(PASSWD.read_bytes()).hexdigest()
    name_file(path, str(PASSWD), size=PASSWD.stat().st_size, sha256=digest)


def name_outside(path: Path) -> None:
    (path.parent / "x").write_bytes(b"")
    name_file(path, "../x")


CRAFTED: dict[str, Callable[[Path], Any]] = {
    "device": lambda path: name_file(path, "/dev/zero"),
    "link to a device": link_to_zero,
    "pipe": put_pipe,
    "absolute": name_passwd,
    "outside": name_outside,
    "NUL": lambda path: name_file(path, "a\0b"),
    "escape": lambda path: name_file(path, "a\x1b[31m"),
    "directory": lambda path: name_file(path, "hf"),
    "negative size": lambda path: name_file(path, ".metadata", size=-1),
    "no digest": lambda path: name_file(path, ".metadata", sha256="x"),
    "nested": lambda path: (path / MANIFEST).write_text("[" * 100_000),
    "nested inside": lambda path: change(path, environment={"x": json.loads("[" * 300 + "]" * 300)}),
    "a list": lambda path: (path / MANIFEST).write_text("[]"),
    "format alone": lambda path: (path / MANIFEST).write_text('{"format": 1}'),
    "files of other things": lambda path: change(path, files={"a": {}}),
    "files as a list": lambda path: change(path, files=[{}]),
    "step": lambda path: change(path, step="3"),
    "long integer": lambda path: (path / MANIFEST).write_text('{"format": 1, "step": ' + "9" * 5000 + "}"),
    "progress": lambda path: change(path, progress={**read_manifest(path).progress, "step": []}),
    "identity": lambda path: change(path, identity={"model": 3}),
    "environment": lambda path: change(path, environment={"contents": {"data": 3}}),
    "mesh": lambda path: change(path, environment={"mesh": [3]}),
    "kept": lambda path: change(path, kept_in_float32=["x"]),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    saved_alone(folder, 1, 2)
    return folder


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", CRAFTED)
def test_a_crafted_manifest_is_refused_and_passed_over(
    saved: Path, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(saved / "checkpoints", tmp_path / "checkpoints", symlinks=True)
    newest = tmp_path / "checkpoints" / "step-000002"
    CRAFTED[kind](newest)
    assert main(["verify", str(newest)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert len(said.err.splitlines()) == 1
    assert "\x1b" not in said.err
    assert checkpoints_of(tmp_path).resolve("auto") == newest.with_name("step-000001")


@pytest.mark.timeout(20)
def test_a_pipe_in_the_manifests_place_is_not_waited_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / MANIFEST)
    assert main(["verify", str(tmp_path)]) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_no_more_is_read_than_the_manifest_says(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that grows after its size was looked at is not followed."""
    path = tmp_path / "step"
    shutil.copytree(saved / "checkpoints" / "step-000002", path)
    with (path / ".metadata").open("ab") as file:
        file.write(b"more")
    monkeypatch.setattr("fsdp2kit.checkpoint.manifest.check_sizes", lambda *_: None)
    assert main(["verify", str(path)]) == 0


@pytest.mark.timeout(20)
def test_a_pipe_among_the_weights_is_not_waited_for(saved: Path, tmp_path: Path) -> None:
    path = tmp_path / "step"
    shutil.copytree(saved / "checkpoints" / "step-000002", path)
    (path / "__0_0.distcp").unlink()
    os.mkfifo(path / "__0_0.distcp")
    with pytest.raises(UserError, match=r"names __0_0\.distcp, which is not a file of the checkpoint"):
        SafeReader(path).stored_tensors()
    (path / ".metadata").unlink()
    os.mkfifo(path / ".metadata")
    with pytest.raises(UserError, match=r"\.metadata: cannot be read"):
        SafeReader(path).stored_tensors()


OUTSIDE = [
    "/bucket/other/x",
    "memory://bucket/other/x",
    "../other/x",
    "a/../../other/x",
    "a//../x",
    "\\x",
    "/",
    "",
    "..",
]


def test_a_crafted_record_deletes_nothing_of_others(tmp_path: Path) -> None:
    other: Any = UPath("memory://bucket/other/x")
    other.parent.mkdir(parents=True, exist_ok=True)
    other.write_text("theirs")
    out: Any = UPath("memory://bucket/hf")
    out.mkdir(parents=True, exist_ok=True)
    (out / "stale.json").write_text("ours")
    names = [*OUTSIDE, "stale.json", 3, {}, None, ["a"]]
    (out / RECORD).write_text(json.dumps({"files": names, "digests": dict.fromkeys(OUTSIDE, "x")}))
    directory = ExportDirectory(to_path("memory://bucket/hf"))
    (tmp_path / "config.json").write_text("{}")
    plan = ExportPlan(tmp_path, ExportDtype("float32"), {})
    directory.begin(plan)
    directory.publish(plan)
    assert other.read_text() == "theirs"
    assert sorted(path.name for path in out.iterdir()) == [RECORD, "config.json"]
    assert json.loads((out / RECORD).read_text())["files"] == ["config.json"]


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "record", ["[" * 100_000, '{"files": [{}]}', '{"files": 3}', "3", '{"files": [], "digests": 3}']
)
def test_a_record_that_is_none_is_no_record(tmp_path: Path, record: str) -> None:
    out = tmp_path / "hf"
    out.mkdir()
    (out / RECORD).write_text(record)
    (out / "mine.txt").write_text("x")
    with pytest.raises(UserError, match=r"holds mine\.txt, which no export of fsdp2kit wrote there"):
        ExportDirectory(out).check_replaceable()


@pytest.mark.timeout(60)
def test_a_pipe_for_a_record_is_not_waited_for(tmp_path: Path) -> None:
    out = tmp_path / "hf"
    out.mkdir()
    os.mkfifo(out / RECORD)
    assert ExportDirectory(out).record() == {}
    assert not ExportDirectory(out).changed()


def test_neither_manifest_nor_record_has_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefgh")
    where = "memory://user:pa55w0rd@bucket/run"
    checkpoints = checkpoints_of(tmp_path, dir=where)
    checkpoints.identity["model.weights"] = f"{where}/x hf_abcdefgh"
    checkpoints.environment["command"] = "fsdp2kit run --api-key abcd1234"
    path = checkpoints.save(progress_at(1))
    checkpoints.finish()
    manifest: Any = path / MANIFEST
    # The same run goes on from it.
    assert checkpoints_of(tmp_path, dir=where).resolve("auto") == path
    checkpoints.restore(path)
    ensure_export(path, out=tmp_path / "hf", dtype="float32")
    for text in (manifest.read_text(), (tmp_path / "hf" / RECORD).read_text()):
        assert "pa55w0rd" not in text
        assert "hf_abcdefgh" not in text
        assert "abcd1234" not in text
