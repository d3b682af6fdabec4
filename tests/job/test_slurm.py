"""The filled-in file under a real Slurm of two nodes, which this test starts on this machine."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest

from fsdp2kit.checkpoint.manifest import verify
from tests.support.runs import run_recipe
from tests.support.short_run import TOML
from tests.support.workers import WorkerPool
from tools import launch

ROOT = Path(__file__).resolve().parents[2]
SBIN = f"{os.environ['PATH']}:/usr/sbin"
NEEDED = ("munged", "slurmctld", "slurmd", "sbatch")
STEPS = 150

# Nothing of the system's is used: no cgroups, no accounting, no key in /etc.
CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/linear
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=1
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=1
PartitionName=all Nodes=ALL Default=YES State=UP
"""


def wait_for(true: Callable[[], bool], what: str, *, seconds: float = 240) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, what
        time.sleep(0.2)


@pytest.fixture
def slurm() -> Iterator[Callable[..., str]]:
    """A command of a Slurm whose two nodes are this machine: its standard output."""
    missing = [name for name in NEEDED if shutil.which(name, path=SBIN) is None]
    if missing or os.getuid():
        pytest.skip(f"needs {' and '.join(missing) or 'root'}: apt-get install slurm-wlm munge, and root")
    with ExitStack() as stack:
        # Not pytest's folder: a socket's path is short.
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="slurm-")))
        with ExitStack() as probes:
            found = [probes.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(3)]
            ports = [probe.getsockname()[1] for probe in found]
        (folder / "slurm.conf").write_text(CONFIG.format(host=socket.gethostname(), ports=ports, folder=folder))
        (folder / "key").write_bytes(os.urandom(128))
        (folder / "key").chmod(0o600)
        environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"), "OMP_NUM_THREADS": "1"}
        environment |= {"PATH": f"{Path(sys.executable).parent}:{SBIN}", "PYTHONPATH": str(ROOT)}

        def start(*command: str) -> None:
            log = stack.enter_context((folder / "daemons.out").open("a"))
            daemon = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
            stack.callback(daemon.wait, 60)
            stack.callback(daemon.terminate)

        def run(*command: str) -> str:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
            assert done.returncode == 0, f"{command}: {done.stdout} {done.stderr}"
            return done.stdout

        files = {"key-file": "key", "socket": "munge", "pid-file": "munged.pid", "seed-file": "seed"}
        start("munged", "--foreground", "--force", *(f"--{flag}={folder / name}" for flag, name in files.items()))
        wait_for((folder / "munge").exists, "munged has no socket", seconds=20)
        start("slurmctld", "-D")
        for node in ("n1", "n2"):
            start("slurmd", "-D", "-N", node)
        wait_for(lambda: ready(environment) == ["idle", "idle"], "Slurm's nodes are not idle", seconds=60)
        stack.callback(run, "scancel", "--full", "--signal=KILL", "--me")
        yield run


def ready(environment: dict[str, str]) -> list[str]:
    """The states of the nodes; empty until the controller answers."""
    command = ["sinfo", "--noheader", "--Node", "--format=%T"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60).stdout.split()


def steps(run_dir: Path) -> list[SimpleNamespace]:
    path = run_dir / "metrics.jsonl"
    return [SimpleNamespace(**json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.slow
def test_a_job_that_is_asked_to_stop_is_requeued_and_ends_as_if_it_had_not_been(
    tmp_path: Path, slurm: Callable[..., str], pool: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text(TOML)
    options = ["run.toml", f"train.steps={STEPS}", "checkpoint.every=0"]
    pool.run(1, run_recipe, "run.toml", [*options[1:], f"run.dir={tmp_path / 'straight'}"])

    arguments = ["slurm", *options, "run.dir=run", "--nodes", "2", "--ranks-per-node", "1", "--time", "10"]
    assert launch.main([*arguments, "--out", "job"]) == 0
    job = slurm("sbatch", "--parsable", "--output=log", "job").strip()

    def shows(text: str) -> bool:
        return text in slurm("scontrol", "show", "job", job)

    wait_for(lambda: len(steps(Path("run"))) >= 5 or shows("JobState=FAILED"), "no step is done")
    slurm("scancel", "--batch", "--signal=USR1", job)
    wait_for(lambda: shows("Restarts=1") and shows("Reason=BeginTime"), "the job is not requeued")
    log = Path("log").read_text()
    done = len(steps(Path("run")))
    assert f"asked to stop (SIGUSR1) after step {done}" in log
    assert f"whole: step {done}," in verify(Path(f"run/checkpoints/step-{done:06d}"))

    slurm("scontrol", "update", f"JobId={job}", "StartTime=now")  # Slurm would wait for two minutes
    wait_for(lambda: shows("JobState=COMPLETED"), "the job does not end")
    assert shows("Restarts=1"), "a run that is over is not requeued"
    assert f"resumed from step {done}" in Path("log").read_text()
    found = steps(Path("run"))
    assert [each.step for each in found] == list(range(1, STEPS + 1))
    expected = [each.loss for each in steps(Path("straight"))]
    assert [each.loss for each in found[:50]] == pytest.approx(expected[:50], rel=1e-4)
