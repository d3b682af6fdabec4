"""Two hosts have the numbers of one; what differs between them is refused; a lost host costs no checkpoint."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.helpers import Hold, Hosts, Job
from tests.support.chaos import complete_steps
from tests.support.models import full, slow
from tests.support.runs import run_recipe
from tests.support.short_run import TOML, outcome
from tests.support.workers import WorkerPool

OPTIONS = ("mesh.cp=2", "checkpoint.keep=5")
SHORT = "run.timeout_minutes=0.1"

FORWARD = "fsdp2kit.train.step:cross_entropy"
CLIP = "fsdp2kit.train.loop:clip_gradients"
WRITE = "fsdp2kit.checkpoint.checkpoints:save_tensors"
COMPLETE = "fsdp2kit.checkpoint.checkpoints:Checkpoints.complete"
PUBLISH = "fsdp2kit.checkpoint.store:CheckpointStore.publish"
COLLECT = "fsdp2kit.checkpoint.background:BackgroundSave.collect"
EXPORT = "fsdp2kit.checkpoint.run_export:export_checkpoint"
ASYNC = "checkpoint.async_save=true"

Outcome = tuple[list[tuple[float, ...]], str]


@pytest.fixture(scope="module")
def single(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """Numbers and weights of the same four ranks on one host."""
    return run_on_one_host(pool, tmp_path_factory.mktemp("single"), *OPTIONS)


def run_on_one_host(pool: WorkerPool, folder: Path, *options: str) -> Outcome:
    (folder / "run.toml").write_text(TOML)
    pool.run(4, run_recipe, str(folder / "run.toml"), [*options, f"run.dir={folder / 'run'}"])
    return outcome(folder / "run")


def start(hosts: Hosts, *options: str, **how: Any) -> Job:
    """Start a run on two ranks of each host."""
    toml = hosts.folder / "run.toml"
    toml.write_text(TOML)
    return hosts.start(str(toml), *OPTIONS, f"run.dir={hosts.folder / 'run'}", *options, **how)


def start_until(hosts: Hosts, hold: Hold, *options: str) -> Job:
    """Start a run and return when a rank waits where it is held."""
    job = start(hosts, SHORT, *options, hold=hold)
    deadline = time.monotonic() + 120
    while not hold.mark.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert hold.mark.exists(), job.said()
    return job


def assert_says(job: Job, *lines: str) -> None:
    """The ranks print these errors, given as regular expressions, in the order of ranks; and no traceback."""
    said = job.said()
    found = [line for line in said.splitlines() if line.startswith("error: ")]
    assert len(found) == len(lines), said
    for line, pattern in zip(found, lines, strict=True):
        assert re.match(f"error: {pattern}", line), line
    assert "Traceback" not in said


def assert_goes_on(hosts: Hosts, single: Outcome) -> None:
    """The same command again takes up the newest checkpoint, and ends as the run that nothing hit."""
    newest = max(complete_steps(hosts.folder / "run"))
    job = start(hosts)
    assert job.codes(seconds=120) == [0] * 4, job.said()
    assert f"resumed from step {newest}" in job.said(0)
    assert outcome(hosts.folder / "run") == single


@pytest.mark.full
def test_two_hosts_have_the_numbers_of_one(hosts: Hosts, single: Outcome) -> None:
    """dp across the hosts, cp within each."""
    job = start(hosts)
    assert job.codes(seconds=120) == [0] * 4, job.said()
    numbers, _ = outcome(hosts.folder / "run")
    assert len(numbers) == len(single[0])
    for found, expected in zip(numbers, single[0], strict=True):
        assert found == pytest.approx(expected, rel=1e-6)


def with_own_transformers(folder: str, host: int) -> None:
    """On the second host, the first ``transformers`` on the path has another version."""
    if host == 1:
        sys.path.insert(0, folder)


def with_own_cache(folder: str, host: int) -> None:
    import datasets

    datasets.config.HF_DATASETS_CACHE = folder


def not_shared(hosts: Hosts) -> tuple[str, Callable[[int], object] | None]:
    (hosts.folder / "run").mkdir()
    hosts[1].mount_small(hosts.folder / "run", size="100m")
    return r"run\.dir: \S+/run is not shared: what host-a writes there is not seen on host-b; ", None


def other_version(hosts: Hosts) -> tuple[str, Callable[[int], object] | None]:
    package = hosts.folder / "site" / "transformers-4.0.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 4.0\n")
    said = r"transformers: \S+ on host-a and 4\.0 on host-b; install the same version on every host"
    return said, partial(with_own_transformers, str(package.parent))


def full_cache(hosts: Hosts) -> tuple[str, Callable[[int], object] | None]:
    cache = hosts.folder / "cache"
    cache.mkdir()
    hosts[1].mount_small(cache, size="16k")
    said = r"the cache \S+: No space left on device \(on host host-b\); free space there, or set HF_HOME"
    return said, partial(with_own_cache, str(cache))


@pytest.mark.full
@pytest.mark.parametrize("case", [not_shared, other_version, full_cache])
def test_what_one_host_has_not_is_refused_in_one_line(
    hosts: Hosts, case: Callable[[Hosts], tuple[str, Callable[[int], object] | None]]
) -> None:
    line, prepare = case(hosts)
    job = start(hosts, prepare=prepare)
    assert job.codes(seconds=60) == [2] * 4, job.said()
    assert_says(job, line)
    if case is not full_cache:  # which is written to after the run directory is opened
        assert not list((hosts.folder / "run").glob("*"))


@pytest.mark.slow
def test_disks_that_are_not_shared_are_refused_within_fifteen_seconds(hosts: Hosts) -> None:
    """This measures seconds, so it needs a machine that does nothing else. The test above asks what is said."""
    not_shared(hosts)
    began = time.monotonic()
    job = start(hosts)
    assert job.codes(seconds=60) == [2] * 4, job.said()
    assert time.monotonic() - began < 15


SAYS = {
    "host-a": ".*: ranks 2 and 3 on host-b give no sign of life since",
    "host-b": ".*: rank 0 on host-a, to which all ranks report, does not answer; ",
}


@pytest.mark.parametrize(
    ("lost", "hold", "whole", "options"),
    [
        full("cable", (3, CLIP, 5), 4, ()),
        slow("host-b", (3, COMPLETE, 2), 2, ()),
        slow("cable", (3, COMPLETE, 2), 2, ()),
        slow("cable", (0, PUBLISH, 2), 4, ()),
        slow("cable", (0, EXPORT, 1), 6, ()),
        slow("cable", (3, COMPLETE, 2), 2, (ASYNC,)),
        slow("cable", (2, WRITE, 2), 2, (ASYNC,)),
        slow("cable", (3, COLLECT, 2), 2, (ASYNC,)),
        slow("host-b", (3, CLIP, 5), 4, ()),
        slow("host-a", (3, CLIP, 5), 4, ()),
        slow("host-a", (3, COMPLETE, 2), 2, ()),
    ],
)
def test_a_cut_cable_and_a_lost_host_cost_no_checkpoint(
    hosts: Hosts, single: Outcome, lost: str, hold: tuple[int, str, int], whole: int, options: tuple[str, ...]
) -> None:
    """In a step and in a save: each host that is left names the other in one line, and the run goes on to its end."""
    held = Hold(*hold, hosts.folder / "held")
    job = start_until(hosts, held, *options)
    if lost == "cable":
        hosts.cut_link()
    else:
        hosts.kill_host(0 if lost == "host-a" else 1)
    held.mark.unlink()
    codes, of_ranks = job.codes(seconds=90), ("host-a", "host-a", "host-b", "host-b")
    assert codes == [-9 if lost == host else 1 for host in of_ranks], job.said()
    assert_says(job, *(SAYS[host] for host in ("host-a", "host-b") if lost != host))
    for rank, host in enumerate(of_ranks):
        if lost != host:
            assert "Traceback" in (hosts.folder / "run" / "errors" / f"rank-{rank}.txt").read_text()
    assert max(complete_steps(hosts.folder / "run")) == whole
    hosts.mend_link()
    assert_goes_on(hosts, single)


@pytest.mark.parametrize("options", [full(()), slow((ASYNC,))])
def test_the_disk_of_one_host_is_full(hosts: Hosts, single: Outcome, options: tuple[str, ...]) -> None:
    """Where host-b writes the second checkpoint there is no room."""
    held = Hold(0, WRITE, 2, hosts.folder / "held")
    job = start_until(hosts, held, *options)
    hosts[1].mount_small(hosts.folder / "run" / "checkpoints" / ".tmp-step-000004", size="64k")
    held.mark.unlink()
    assert job.codes(seconds=60) == [1] * 4, job.said()
    cause = "rank 2 on host-b: OSError: .*No space left on device; .* it resumes from step-000002"
    assert_says(job, rf"\S+step-000004: the checkpoint was not saved: {cause}")
    assert complete_steps(hosts.folder / "run") == [2]
    assert_goes_on(hosts, single)


@pytest.mark.parametrize("how", [slow("asleep"), slow("stopped")])
def test_a_rank_that_sleeps_for_ever_is_named(hosts: Hosts, single: Outcome, how: str) -> None:
    """The others wait in a collective. It is ended, too, unless it is stopped: only its launcher can end it then."""
    held = Hold(3, CLIP, 5, hosts.folder / "held")
    job = start_until(hosts, held)
    if how == "stopped":
        os.kill(job.ranks[3].pid, signal.SIGSTOP)
    assert Job(job.ranks[:3], job.logs).codes(seconds=60) == [1] * 3, job.said()
    assert job.codes(seconds=15)[3] == (None if how == "stopped" else 1)
    says = {"asleep": r"is still in step 5, backward, at \S+ in held, and has not come within run"}
    line = f".*: rank 3 on host-b {says.get(how, 'gives no sign of life since')}"
    assert_says(job, line, line)
    hosts[1].end()
    held.mark.unlink()
    assert_goes_on(hosts, single)
