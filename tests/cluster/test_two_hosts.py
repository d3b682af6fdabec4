"""Two hosts: the numbers of one, and what a run does when the cable or a host is lost."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fsdp2kit.checkpoint.manifest import verify
from tests.checkpoint.chaos import complete_steps
from tests.checkpoint.test_chaos import TOML, outcome
from tests.cluster.hosts import Hold, Hosts, Job, two_hosts
from tests.runs import run_recipe
from tests.test_signals import steps_done
from tests.workers import WorkerPool

OPTIONS = ("mesh.cp=2", "checkpoint.keep=5", "train.global_batch_size=4")


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    with two_hosts(tmp_path) as hosts:
        yield hosts


@pytest.fixture(scope="module")
def single(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[list, str]:
    """Numbers and weights of the same four ranks on one host."""
    folder = tmp_path_factory.mktemp("single")
    (folder / "run.toml").write_text(TOML)
    pool.run(4, run_recipe, str(folder / "run.toml"), [*OPTIONS, f"run.dir={folder / 'run'}"])
    return outcome(folder / "run")


def start(hosts: Hosts, *options: str, **how: object) -> Job:
    toml = hosts.folder / "run.toml"
    toml.write_text(TOML)
    return hosts.start(str(toml), *OPTIONS, f"run.dir={hosts.folder / 'run'}", *options, **how)


def wait_for(condition: Callable[[], bool], job: Job, *, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert condition(), job.everything()


def test_two_hosts_have_the_numbers_of_one(hosts: Hosts, single: tuple[list, str]) -> None:
    began = time.monotonic()
    job = start(hosts)
    assert job.codes(seconds=120) == [0] * 4, job.everything()
    print("took", time.monotonic() - began)
    numbers, weights = outcome(hosts.folder / "run")
    print(numbers == single[0], weights == single[1])
    for found, expected in zip(numbers, single[0], strict=True):
        assert found == pytest.approx(expected, rel=1e-6)


SHORT = "run.timeout_minutes=0.15"
MID_STEP = "fsdp2kit.train.loop:clip_gradients"
MID_WRITE = "fsdp2kit.checkpoint.checkpoints:save_tensors"
MID_SAVE = "fsdp2kit.checkpoint.checkpoints:Checkpoints.complete"


def is_rank(pid: int) -> bool:
    found = Path(f"/proc/{pid}/cmdline").read_bytes()
    return b"fsdp2kit.run" in found and b"torch.distributed.run" not in found


def assert_ends_as(hosts: Hosts, single: tuple[list, str], *options: str) -> None:
    """The same command again: it takes up the newest checkpoint, and ends as the run that nothing hit."""
    newest = max(complete_steps(hosts.folder / "run"))
    job = start(hosts, *options)
    assert job.codes(seconds=120) == [0] * 4, job.everything()
    assert f"resumed from step {newest}" in job.said(0)
    assert outcome(hosts.folder / "run") == single


@pytest.mark.full
@pytest.mark.parametrize(
    ("function", "occurrence", "whole"), [(MID_STEP, 5, [2, 4]), (MID_SAVE, 2, [2])], ids=["step", "save"]
)
@pytest.mark.parametrize("how", ["cable", "host"])
def test_what_is_cut(
    hosts: Hosts, single: tuple[list, str], function: str, occurrence: int, whole: list[int], how: str
) -> None:
    """Both hosts end within the time-out, no complete checkpoint is lost, and the run goes on to the same end."""
    mark = hosts.folder / "held"
    job = start(hosts, SHORT, hold=Hold(3, function, occurrence, mark))
    wait_for(mark.exists, job)
    began = time.monotonic()
    hosts.cut_link() if how == "cable" else hosts.kill_host(1)
    mark.unlink()
    codes = job.codes(seconds=60)
    print(f"ended after {time.monotonic() - began:.1f} s", job.everything())
    assert codes == ([1] * 4 if how == "cable" else [1, 1, -9, -9]), job.everything()
    assert sorted(complete_steps(hosts.folder / "run")) == whole
    hosts.mend_link()
    assert_ends_as(hosts, single)


@pytest.mark.full
@pytest.mark.parametrize("save", ["false", "true"])
def test_the_disk_of_one_host_is_full(hosts: Hosts, single: tuple[list, str], save: str) -> None:
    """Where host-b writes the second checkpoint there is no room."""
    mark = hosts.folder / "held"
    job = start(hosts, SHORT, f"checkpoint.async_save={save}", hold=Hold(0, MID_WRITE, 2, mark))
    wait_for(mark.exists, job)
    written = hosts.folder / "run" / "checkpoints" / ".tmp-step-000004"
    hosts[1].mount_small(written, size="64k")
    mark.unlink()
    codes = job.codes(seconds=60)
    print(job.everything())
    assert codes == [1] * 4
    assert complete_steps(hosts.folder / "run") == [2]
    assert_ends_as(hosts, single)


@pytest.mark.full
@pytest.mark.parametrize("how", ["stopped", "asleep"])
def test_a_rank_sleeps_for_ever(hosts: Hosts, single: tuple[list, str], how: str) -> None:
    mark = hosts.folder / "held"
    job = start(hosts, SHORT, hold=Hold(3, MID_STEP, 5, mark))
    wait_for(mark.exists, job)
    if how == "stopped":
        os.kill(job.ranks[3].pid, signal.SIGSTOP)
    began = time.monotonic()
    job.ranks = job.ranks[:3]
    codes = job.codes(seconds=60)
    print(f"ended after {time.monotonic() - began:.1f} s", job.everything())
    assert codes == [1] * 3
    hosts[1].end()
    mark.unlink()
    assert_ends_as(hosts, single)
