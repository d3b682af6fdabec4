"""The start checks what the hosts of a job must share or have alike. Ranks play hosts with disks of their own."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import Field

from fsdp2kit.checkpoint.identity import check_alike
from fsdp2kit.config.local_paths import input_paths, shared_directories
from fsdp2kit.config.schema import Section, TrainingConfig
from fsdp2kit.config.section import InputPath
from fsdp2kit.errors import UserError
from fsdp2kit.job import distributed, hosts
from fsdp2kit.job.distributed import agreement
from fsdp2kit.job.hosts import check_hosts
from tests.support.workers import WorkerPool


class JudgeConfig(Section):
    """A section of a stranger's recipe."""

    rubrics: list[InputPath] = Field(default=[])
    note: str = ""


class Config(TrainingConfig):
    judge: JudgeConfig = JudgeConfig()


def config_of(disk: Path, **values: Any) -> Config:
    """A config with its run directory on a host's disk."""
    values = {"recipe": "x", "run": {"dir": str(disk / "runs/x")}, "train": {"steps": 1}, **values}
    return Config.model_validate({"model": {"path": "owner/name"}, **values})


Case = Callable[[Path, int, pytest.MonkeyPatch], Config]


def shared(folder: Path, rank: int, patch: pytest.MonkeyPatch) -> Config:
    (folder / "rows.jsonl").write_text("{}")
    return config_of(folder, data={"path": str(folder / "rows.jsonl")})


def copies(folder: Path, rank: int, patch: pytest.MonkeyPatch) -> Config:
    """Inputs lie on disks of their own, equal; hidden files are no part of them."""
    model = folder / f"disk{rank}" / "model"
    (model / "sub").mkdir(parents=True)
    (model / "sub" / "weights").write_bytes(bytes(200_000))
    (model / ".cache").write_text(str(rank))
    return config_of(folder, model={"path": str(model)}, judge={"rubrics": [str(model)]})


def only_on_host(here: int) -> Case:
    def case(folder: Path, rank: int, patch: pytest.MonkeyPatch) -> Config:
        path = folder / f"disk{rank}" / "rows.jsonl"
        path.parent.mkdir()
        if rank == here:
            path.write_text("{}")
        return config_of(folder, data={"sources": [{"path": str(path)}]})

    return case


def other_contents(folder: Path, rank: int, patch: pytest.MonkeyPatch) -> Config:
    """The last byte differs, in one of two files of a stranger's section."""
    rubric = folder / f"disk{rank}"
    rubric.mkdir()
    (rubric / "a.txt").write_text("a")
    (rubric / "b.txt").write_bytes(bytes(100_000) + bytes([rank]))
    return config_of(folder, judge={"rubrics": ["owner/hub", str(rubric)]})


def more_bytes(folder: Path, rank: int, patch: pytest.MonkeyPatch) -> Config:
    """Files of a pattern."""
    disk = folder / f"disk{rank}"
    disk.mkdir()
    for name in ("1.jsonl", "2.jsonl"):
        (disk / name).write_text("{}" * (rank + 1))
    return config_of(folder, eval={"path": str(disk / "*.jsonl")})


def other_settings(folder: Path, rank: int, patch: pytest.MonkeyPatch) -> Config:
    return config_of(folder, judge={"note": f"n{rank}"})


def other_places(folder: Path, rank: int, patch: pytest.MonkeyPatch) -> Config:
    """One host keeps checkpoints in the run directory, the other elsewhere."""
    return config_of(folder, checkpoint={"dir": str(folder)} if rank else {})


def other_sets(folder: Path, rank: int, patch: pytest.MonkeyPatch) -> Config:
    """Only one host's TOML has held-out rows."""
    return config_of(folder, eval={"path": str(folder)} if rank else {})


def other_torch(folder: Path, rank: int, patch: pytest.MonkeyPatch) -> Config:
    found = hosts.versions()
    patch.setattr(hosts, "versions", lambda: {**found, "torch": f"2.{rank}"})
    return config_of(folder)


def not_shared(**checkpoint: str) -> Case:
    def case(folder: Path, rank: int, patch: pytest.MonkeyPatch) -> Config:
        disk = folder / f"disk{rank}"
        disk.mkdir(exist_ok=True)
        return config_of(disk, checkpoint=checkpoint)

    return case


def shown_late(folder: Path, rank: int, patch: pytest.MonkeyPatch) -> Config:
    """The second host sees the disk after half a second, as over NFS."""
    (folder / "disk0").mkdir(exist_ok=True)
    if rank == 1:
        threading.Timer(0.5, lambda: (folder / "disk1").symlink_to(folder / "disk0")).start()
    return config_of(folder / f"disk{rank}")


URL = {"dir": "s3://bucket/run"}
NOT_SHARED = "is not shared: what a writes there is not seen on b; put it on a disk that all hosts share, or use URLs"
COPY = "copy it to every host, or put it on a disk that all of them share"
CASES: dict[str, tuple[Case, str | None]] = {
    "shared": (shared, None),
    "copies": (copies, None),
    "late": (shown_late, None),
    "on a": (
        only_on_host(0),
        f"data.sources.0.path: F/disk0/rows.jsonl is on a, but F/disk1/rows.jsonl is not on b; {COPY}",
    ),
    "on b": (
        only_on_host(1),
        f"data.sources.0.path: F/disk1/rows.jsonl is on b, but F/disk0/rows.jsonl is not on a; {COPY}",
    ),
    "contents": (
        other_contents,
        f"judge.rubrics.1: F/disk0 is not the same on a and on b (F/disk1): b.txt has other contents; {COPY}",
    ),
    "bytes": (
        more_bytes,
        f"eval.path: F/disk0/*.jsonl is not the same on a and on b (F/disk1/*.jsonl): 1.jsonl has 2 bytes on a "
        f"and 4 on b; {COPY}",
    ),
    "settings": (
        other_settings,
        'judge.note: "n0" on a and "n1" on b; start every host with the same TOML and overrides',
    ),
    "places": (other_places, "checkpoint.dir: not set on a and a local path on b; start every host with the same"),
    "sets": (other_sets, "eval.path: not set on a and a local path on b; start every host with the same"),
    "torch": (other_torch, "torch: 2.0 on a and 2.1 on b; install the same version on every host"),
    "run.dir": (not_shared(), f"run.dir: F/disk1/runs/x {NOT_SHARED}"),
    "url": (not_shared(**URL, export_dir="s3://bucket/hf"), None),
    "url, no export": (not_shared(**URL, export_hf="never"), None),
    "export": (not_shared(**URL), f"checkpoint.export_dir: F/disk1/runs/x {NOT_SHARED}"),
}


def as_host(work: Callable[[pytest.MonkeyPatch], Any]) -> Any:
    """`work` on two ranks as if they were on the hosts a and b."""
    rank = distributed.rank()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("GROUP_RANK", str(rank))
            patch.setattr("platform.node", lambda: "ab"[rank])
            return work(patch)
    finally:
        distributed.start()  # on one host again


def refusals(folder: Path) -> dict[str, tuple[str, float]]:
    """What `check_hosts` says in each case, and the seconds that it took."""

    def work(_: object) -> dict[str, tuple[str, float]]:
        world, found = distributed.start(), {}
        for name, (case, _) in CASES.items():
            place = folder / name.replace(".", "")
            place.mkdir(exist_ok=True)
            said, began = "", time.monotonic()
            with pytest.MonkeyPatch.context() as patch:
                try:
                    check_hosts(case(place, world.rank, patch), world, seconds=60.0 if name == "late" else 0.3)
                except UserError as error:
                    said = str(error).replace(str(place), "F")
            found[name] = said, time.monotonic() - began
        return found

    return as_host(work)


def test_hosts_that_differ_are_refused(pool: WorkerPool, tmp_path: Path) -> None:
    for found in pool.run(2, refusals, tmp_path):
        for name, (_, expected) in CASES.items():
            said, seconds = found[name]
            assert said.startswith(expected) if expected else not said, f"{name}: {said}"
            assert seconds < (30 if name == "late" else 4)
    assert not list(tmp_path.rglob(".fsdp2kit-start-*"))
    assert not list(tmp_path.rglob("runs")), "a refused start leaves nothing"


def test_one_host_has_nothing_to_compare(pool: WorkerPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = distributed.World(0, 2, 0, 2, distributed.torch.device("cpu"), ("a", "a"))
    monkeypatch.setattr(hosts, "_facts", lambda *_: pytest.fail("looked"))
    check_hosts(config_of(tmp_path), world)


def errors_of_ranks() -> list[str]:
    """What all ranks are told of an error on both hosts, on the first and on the second."""

    def work(_: object) -> list[str]:
        world, said = distributed.start(), []
        for failing in ((0, 1), (0,), (1,)):
            try:
                with agreement():
                    if world.rank in failing:
                        raise UserError("x.toml", "no such file", "check it")
            except UserError as error:
                said.append(str(error))
        return said

    return as_host(work)


def test_an_error_on_another_host_than_rank_0s_names_it(pool: WorkerPool) -> None:
    plain = "x.toml: no such file; check it"
    assert pool.run(2, errors_of_ranks) == [[plain, plain, "x.toml: no such file (on host b); check it"]] * 2


def test_paths_are_found_by_their_types(tmp_path: Path) -> None:
    config = config_of(tmp_path, judge={"rubrics": ["r", "s3://b/r"], "note": "/n"}, run={"dir": "/d", "resume": "/c"})
    assert input_paths(config) == {
        "run.resume": "/c",
        "model.path": "owner/name",
        "judge.rubrics.0": "r",
    }


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({}, {"run.dir": "/d"}),
        ({"dir": "/c"}, {"checkpoint.dir": "/c", "checkpoint.export_dir": "/d"}),
        ({"dir": "file:///c", "export_dir": "/c/hf"}, {"checkpoint.dir": "/c"}),
        ({"dir": "s3://c", "export_dir": "/e/hf"}, {"checkpoint.export_dir": "/e"}),
        ({"dir": "s3://c", "export_dir": "s3://e"}, {}),
    ],
)
def test_directories_that_all_hosts_write_to(section: dict[str, str], expected: dict[str, str]) -> None:
    config = config_of(Path(), run={"dir": "/d"}, checkpoint=section)
    assert {key: str(path) for key, path in shared_directories(config).items()} == expected


def test_a_folder_of_too_many_files_is_only_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(5):
        (tmp_path / str(number)).touch()
    assert len(hosts.look(str(tmp_path), math.inf).files) == 5
    monkeypatch.setattr(hosts, "_FILES", 4)
    assert hosts.look(str(tmp_path), math.inf) == hosts.Look(str(tmp_path), True)
    assert not hosts.look(f"{tmp_path}{os.sep}none", math.inf).there


def error_of_other_data() -> str:
    def work(_: object) -> str:
        distributed.start()
        check_alike({"model": "m", "data": "d"})
        with pytest.raises(UserError) as refused:
            check_alike({"model": "m", "data": f"d{distributed.rank()}"})
        return str(refused.value)

    return as_host(work)


def test_ranks_that_have_read_other_data_are_refused(pool: WorkerPool) -> None:
    todo = "see that all ranks read the same files, and one revision of a hub id"
    assert pool.run(2, error_of_other_data) == [f"data: d0 on rank 0 (a), and d1 on rank 1 (b); {todo}"] * 2


def test_a_changed_source_file_is_another_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "__init__.py").write_text("a = 1\n")
    package = SimpleNamespace(__file__=str(tmp_path / "__init__.py"), __version__="1")
    monkeypatch.setattr(hosts, "fsdp2kit", package)
    before = hosts.versions()["fsdp2kit"]
    (tmp_path / "__init__.py").write_text("a = 2\n")
    assert hosts.versions()["fsdp2kit"] != before


def test_a_large_file_is_told_by_its_end(tmp_path: Path) -> None:
    for name, end in (("one", b"a"), ("other", b"b")):
        (tmp_path / name).write_bytes(bytes(300_000) + end)
    one, other = (hosts.look(str(tmp_path / name), math.inf).files for name in ("one", "other"))
    assert one != other


def test_a_middle_file_is_told_by_its_size_and_some_by_their_contents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of five files two are read; hidden ones and Python's caches are no part of a folder, others below it are."""
    monkeypatch.setattr(hosts, "_FILES_READ", 2)
    for name in ("a", "b", "sub/c", "sub/d", "sub/e", ".x", "__pycache__/y"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"12345")
    found = hosts.look(str(tmp_path), math.inf).files
    assert list(found) == ["a", "b", "sub/c", "sub/d", "sub/e"]
    assert [len(one.split()) for one in found.values()] == [3, 2, 2, 3, 2]
    assert hosts.look(str(tmp_path / "sub" / "*"), math.inf).files.keys() == {"c", "d", "e"}
    assert hosts.look(str(tmp_path / "*" / "[ce]"), math.inf).files.keys() == {"c", "e"}
    assert hosts.look(str(tmp_path), -math.inf) == hosts.Look(str(tmp_path), True)


def facts(host: str, **files: str) -> hosts.HostFacts:
    look = hosts.Look("/in", True, files)
    return hosts.HostFacts(host, {"torch": "2"}, {"train.steps": "1"}, {"data.path": look}, {})


@pytest.mark.parametrize(
    ("main", "ours", "says"),
    [
        ({"x": "3 bytes", "y": "4 bytes"}, {"x": "3 bytes"}, "y is only on a"),
        ({"x": "3 bytes"}, {"x": "3 bytes", "y": "4 bytes"}, "y is only on b"),
        ({"x": "3 bytes"}, {"x": "4 bytes"}, "x has 3 bytes on a and 4 on b"),
        ({"x": "3 bytes d1"}, {"x": "3 bytes d2"}, "x has other contents"),
        ({}, {"x": "3 bytes"}, None),
        ({"x": "3 bytes"}, {}, None),
    ],
)
def test_how_an_input_differs(main: dict[str, str], ours: dict[str, str], says: str | None) -> None:
    """What was not looked at on one of the hosts is not compared."""
    if says is None:
        return hosts._compare(facts("b", **ours), facts("a", **main))
    with pytest.raises(UserError, match=rf"^data\.path: /in is not the same on a and on b: {says}; copy it"):
        hosts._compare(facts("b", **ours), facts("a", **main))
