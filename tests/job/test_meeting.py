"""torchrun that is killed, and torchrun that starts its ranks again."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import fsdp2kit
from fsdp2kit.checkpoint.manifest import verify
from fsdp2kit.errors import RunFailure
from fsdp2kit.job import meeting
from tests.job.helpers import alive, children, steps_done
from tests.support.models import full
from tests.support.runs import run_recipe
from tests.support.short_run import TOML
from tests.support.workers import FORKS, ROOT, WorkerPool, _be_command

MINUTE = timedelta(minutes=1)


@pytest.fixture
def agent_store(monkeypatch: pytest.MonkeyPatch) -> dist.TCPStore:
    """torchrun's store, named to the ranks of this process as torchrun names it."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    return store


@pytest.mark.parametrize("former", ["none", "dead", "alive"])
def test_ranks_that_are_started_again_share_nothing_with_those_before(agent_store: dist.TCPStore, former: str) -> None:
    """Also where rank 1 comes first and finds rank 0 of the attempt before, which may be dying yet."""
    before: Any = None
    with ThreadPoolExecutor(4) as threads:
        if former != "none":
            earlier = [threads.submit(meeting._store_of_attempt, rank, MINUTE) for rank in (0, 1)]
            before, _ = [found.result(60) for found in earlier]
            before.set("0/address", "of the attempt before")
        if former == "dead":
            before = None
            earlier.clear()
        second = threads.submit(meeting._store_of_attempt, 1, MINUTE)
        time.sleep(0.5)
        assert not second.done()
        first = threads.submit(meeting._store_of_attempt, 0, MINUTE).result(60)
        first.set("0/address", "of this attempt")
        assert second.result(60).get("0/address") == b"of this attempt"


def test_a_former_rank_0_may_die_between_a_connection_and_a_look(
    agent_store: dist.TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Dying:
        def check(self, _: list[str]) -> bool:
            raise dist.DistNetworkError("recvValue failed: Connection reset by peer")

    connect, former = meeting._connect, [Dying()]
    monkeypatch.setattr(meeting, "_connect", lambda *where: former.pop() if former else connect(*where))
    with ThreadPoolExecutor(1) as threads:
        first = meeting._store_of_attempt(0, MINUTE)
        first.set("0/address", "of this attempt")
        second = threads.submit(meeting._store_of_attempt, 1, MINUTE)
        assert second.result(60).get("0/address") == b"of this attempt"
    assert not former


def test_a_meeting_has_an_end(agent_store: dist.TCPStore) -> None:
    with pytest.raises(RunFailure, match=r"rank 1 of 2 did not meet .*localhost:\d+ \(run.timeout_minutes = 0.005\)"):
        meeting.meet("gloo", rank=1, size=2, timeout=timedelta(minutes=0.005))


def test_a_meeting_that_torchrun_has_left_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", str(port))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    with pytest.raises(RunFailure, match=r"did not meet the others at localhost.*refused"):
        meeting.meet("gloo", rank=0, size=2, timeout=MINUTE)


def _be_launcher(connection: Any, log: Path, variables: dict[str, str], arguments: tuple[str, ...]) -> None:
    """What torchrun is to a rank: its parent. It says which process the rank is."""
    if (rank := os.fork()) == 0:
        fsdp2kit.PARENT = os.getppid()  # as a fresh interpreter finds it
        _be_command("fsdp2kit.run", arguments, variables, str(log), str(log))
    connection.send(rank)
    os.waitpid(rank, 0)


def outlive(tmp_path: Path, ready: Callable[[], bool], variables: dict[str, str], *options: str) -> tuple[int, str]:
    """Start a rank, kill its parent when it is ready: the process, given ten seconds to end, and what it said."""
    toml, log, (ours, theirs) = tmp_path / "run.toml", tmp_path / "log", FORKS.Pipe()
    toml.write_text(TOML)
    arguments = (str(toml), f"run.dir={tmp_path / 'run'}", "checkpoint.every=0", *options)
    launcher = FORKS.Process(target=_be_launcher, args=(theirs, log, variables, arguments))
    launcher.start()
    rank = ours.recv()
    deadline = time.monotonic() + 120
    while not ready() and alive(rank) and time.monotonic() < deadline:
        time.sleep(0.02)
    launcher.kill()
    launcher.join()
    deadline = time.monotonic() + 60
    while alive(rank) and time.monotonic() < deadline:
        time.sleep(0.02)
    return rank, log.read_text()


def end(pid: int) -> None:
    if alive(pid):
        os.kill(pid, signal.SIGKILL)


UNDER_TORCHRUN = {"TORCHELASTIC_RUN_ID": "none"}
ENDLESS = "train.steps=1000000"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_rank_saves_and_ends_when_torchrun_is_killed(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    rank, said = outlive(tmp_path, lambda: steps_done(run_dir) >= 3, UNDER_TORCHRUN, ENDLESS)
    try:
        assert not alive(rank), said
        done = steps_done(run_dir)
        assert f"asked to stop (torchrun has ended) after step {done}" in said
        assert f"whole: step {done}," in verify(run_dir / "checkpoints" / f"step-{done:06d}")
    finally:
        end(rank)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_rank_that_waits_for_others_ends_when_torchrun_is_killed(tmp_path: Path) -> None:
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # as if of another host's torchrun
    variables = {**UNDER_TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "localhost"}
    variables |= {"MASTER_PORT": str(store.port), "WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}
    rank, said = outlive(tmp_path, lambda: store.check(["fsdp2kit/store"]), variables)
    try:
        assert not alive(rank), said
        assert "error: torchrun: process" in said
        assert "has ended before training began; start the run again" in said
    finally:
        end(rank)


@pytest.mark.full
@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_run_without_torchrun_outlives_what_started_it(tmp_path: Path) -> None:
    """A shell, srun or nohup may end first."""
    run_dir = tmp_path / "run"
    rank, said = outlive(tmp_path, lambda: steps_done(run_dir) >= 1, {}, "train.steps=30")
    try:
        assert not alive(rank), said
        assert "done: step 30 of 30" in said
    finally:
        end(rank)


def start_torchrun(folder: Path, *arguments: str, launch: tuple[str, ...] = ("--standalone",)) -> subprocess.Popen:
    """torchrun, and its ranks, in a process group of their own; what they say is in ``folder/log``."""
    (folder / "run.toml").write_text(TOML)
    command = [sys.executable, "-m", "torch.distributed.run", *launch, "-m", "fsdp2kit.run", str(folder / "run.toml")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with (folder / "log").open("a") as log:
        return subprocess.Popen(
            [*command, *arguments], cwd=folder, env=environment, stdout=log, stderr=log, start_new_session=True
        )


def wait_for(condition: Callable[[], bool], *, seconds: float = 240) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def ranks_of(agent: subprocess.Popen) -> list[int]:
    return [pid for pid in children(agent.pid) if b"fsdp2kit.run" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def losses(run_dir: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.full
def test_a_killed_torchrun_leaves_a_complete_checkpoint(tmp_path: Path) -> None:
    """Two ranks, whose collectives go on without torchrun's store."""
    run_dir = tmp_path / "run"
    options = (ENDLESS, f"run.dir={run_dir}", "checkpoint.every=0", "checkpoint.async_save=true")
    agent = start_torchrun(tmp_path, *options, launch=("--standalone", "--nproc-per-node", "2"))
    ranks: list[int] = []
    try:
        assert wait_for(lambda: steps_done(run_dir) >= 3 or agent.poll() is not None), (tmp_path / "log").read_text()
        ranks = ranks_of(agent)
        agent.kill()
        agent.wait()
        assert wait_for(lambda: not any(map(alive, ranks)), seconds=120)
        done, said = steps_done(run_dir), (tmp_path / "log").read_text()
        assert f"asked to stop (torchrun has ended) after step {done}" in said
        assert "Error" not in said
        assert f"whole: step {done}," in verify(run_dir / "checkpoints" / f"step-{done:06d}")
    finally:
        for pid in [agent.pid, *ranks]:
            end(pid)


RESTARTED = ("train.steps=40", "checkpoint.every=5")


@pytest.fixture(scope="module")
def straight(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of a run that nobody kills."""
    folder = tmp_path_factory.mktemp("straight")
    (folder / "run.toml").write_text(TOML)
    pool.run(1, run_recipe, str(folder / "run.toml"), [*RESTARTED, f"run.dir={folder / 'run'}"])
    return losses(folder / "run")


HOSTS = {
    "standalone": [("--standalone", "--nproc-per-node", "2")],
    "c10d": [("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:{port}", "--rdzv-id", "x")] * 2,
    "static": [
        ("--nnodes", "2", "--node-rank", node, "--master-addr", "localhost", "--master-port", "{port}")
        for node in ("0", "1")
    ],
}


@pytest.mark.parametrize(
    ("hosts", "killed"),
    [
        full("c10d", 0),
        pytest.param("standalone", 1, marks=pytest.mark.slow),
        pytest.param("standalone", 0, marks=pytest.mark.slow),
        pytest.param("c10d", 1, marks=pytest.mark.slow),
        pytest.param("static", 0, marks=pytest.mark.slow),
        pytest.param("static", 1, marks=pytest.mark.slow),
    ],
)
def test_ranks_that_torchrun_starts_again_end_as_if_none_had_been_killed(
    tmp_path: Path, straight: list[float], hosts: str, killed: int
) -> None:
    """One torchrun with two ranks, or two, as on two hosts, with one each."""
    agents: list[subprocess.Popen] = []
    try:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = str(probe.getsockname()[1])
        for launch in HOSTS[hosts]:
            launch = ("--max-restarts", "2", *(part.replace("{port}", port) for part in launch))
            agents.append(start_torchrun(tmp_path, *RESTARTED, f"run.dir={tmp_path}/run", launch=launch))
        assert wait_for(lambda: steps_done(tmp_path / "run") >= 8)
        [target] = [
            pid
            for agent in agents
            for pid in ranks_of(agent)
            if f"\0RANK={killed}\0".encode() in b"\0" + Path(f"/proc/{pid}/environ").read_bytes()
        ]
        os.kill(target, signal.SIGKILL)
        assert wait_for(lambda: all(agent.poll() is not None for agent in agents)), (tmp_path / "log").read_text()
    finally:
        for agent in agents:
            for pid in [agent.pid, *ranks_of(agent)]:
                end(pid)
    said = (tmp_path / "log").read_text()
    assert "resumed from step 5" in said or "resumed from step 10" in said
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [record["start"] for record in records if "start" in record] == [1, 2]
    assert [path.name for path in (tmp_path / "run" / "errors").rglob("*.txt")] == [f"rank-{1 - killed}.txt"]
    assert (tmp_path / "run" / "errors" / "start-1").is_dir()
    assert "Traceback" not in said.partition("resumed from step")[0].partition("torch/distributed/elastic")[0]
    assert losses(tmp_path / "run") == pytest.approx(straight, rel=1e-5)
