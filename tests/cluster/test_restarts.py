"""torchrun on two hosts starts the ranks of both again, also where one host was lost and came back."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster.helpers import Hosts
from tests.cluster.test_two_hosts import Outcome, run_on_one_host
from tests.job.helpers import steps_done
from tests.support.short_run import TOML, outcome
from tests.support.workers import WorkerPool

OPTIONS = ("mesh.cp=2", "train.steps=60", "checkpoint.every=5", "run.timeout_minutes=0.5")


@pytest.fixture(scope="module")
def single(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """Numbers and weights of the same four ranks on one host."""
    return run_on_one_host(pool, tmp_path_factory.mktemp("single"), *OPTIONS)


def starts(run_dir: Path) -> list[int]:
    """The starts of a run by number, as its metrics have them."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line["start"] for line in lines if "start" in line]


class Cluster:
    """A torchrun on each host, with one rendezvous."""

    def __init__(self, hosts: Hosts, *, nodes: str, **variables: str) -> None:
        self.variables = variables
        self.hosts, self.run_dir, self.toml = hosts, hosts.folder / "run", hosts.folder / "run.toml"
        self.toml.write_text(TOML)
        self.launch = [f"--nnodes={nodes}", "--nproc-per-node=2", "--max-restarts=2"]
        self.launch += ["--rdzv-backend=c10d", f"--rdzv-endpoint={hosts[0].address}:29400", "--rdzv-id=x"]
        self.agents = [self.start(0), self.start(1)]

    def start(self, index: int) -> subprocess.Popen:
        arguments = (str(self.toml), *OPTIONS, f"run.dir={self.run_dir}")
        return self.hosts.start_torchrun(index, self.launch, *arguments, **self.variables)

    def wait_for(self, condition: Callable[[], bool], *, seconds: float = 300) -> None:
        deadline = time.monotonic() + seconds
        while not condition() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert condition(), self.hosts.logs()

    def train_to(self, step: int) -> None:
        self.wait_for(lambda: steps_done(self.run_dir) >= step or self.agents[0].poll() is not None)
        assert steps_done(self.run_dir) >= step, self.hosts.logs()

    def ranks(self, index: int) -> list[int]:
        found = [(pid, Path(f"/proc/{pid}/cmdline").read_bytes()) for pid in self.hosts[index].pids()]
        return [pid for pid, command in found if b"fsdp2kit.run" in command and b"distributed.run" not in command]

    def codes(self) -> list[int | None]:
        self.wait_for(lambda: all(agent.poll() is not None for agent in self.agents))
        return [agent.poll() for agent in self.agents]


@pytest.mark.slow
def test_a_rank_is_killed(hosts: Hosts, single: Outcome) -> None:
    cluster = Cluster(hosts, nodes="2")
    cluster.train_to(8)
    os.kill(cluster.ranks(1)[0], signal.SIGKILL)
    assert cluster.codes() == [0, 0], hosts.logs()
    assert "resumed from step" in hosts.logs()
    assert starts(cluster.run_dir) == [1, 2]
    assert outcome(cluster.run_dir) == single


@pytest.mark.slow
def test_a_host_is_lost_and_comes_back(hosts: Hosts, single: Outcome) -> None:
    """A new torchrun joins no rendezvous whose store ranks share: it waits for an address that was told once."""
    cluster = Cluster(hosts, nodes="2", TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    cluster.train_to(8)
    hosts.kill_host(1)
    cluster.agents[1].wait()
    hosts.mend_link()
    cluster.agents[1] = cluster.start(1)
    assert cluster.codes() == [0, 0], hosts.logs()
    assert starts(cluster.run_dir) == [1, 2]
    assert outcome(cluster.run_dir) == single


@pytest.mark.slow
def test_a_host_is_lost_for_ever(hosts: Hosts, single: Outcome) -> None:
    """With --nnodes 1:2 the run goes on with what is left."""
    cluster = Cluster(hosts, nodes="1:2")
    cluster.train_to(8)
    hosts.kill_host(1)
    cluster.agents.pop().wait()
    assert cluster.codes() == [0], hosts.logs()
    assert starts(cluster.run_dir) == [1, 2]
    for found, expected in zip(outcome(cluster.run_dir)[0], single[0], strict=True):
        assert found == pytest.approx(expected, rel=1e-5)
