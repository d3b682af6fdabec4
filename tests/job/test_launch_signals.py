"""The Slurm and ssh files, run with stand-ins for the cluster: how a run ends, and whether it is requeued."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from fsdp2kit.config import TrainingConfig
from fsdp2kit.config.local_paths import shared_directories
from tests.job.helpers import ENDS, TRAINS, install
from tools import launch

JOB = {"SLURM_JOB_ID": "12345", "SLURM_JOB_NUM_NODES": "3"}
TASK = {**JOB, "SLURM_ARRAY_JOB_ID": "12345", "SLURM_ARRAY_TASK_ID": "7"}


@contextlib.contextmanager
def started(
    kind: str, folder: Path, *, rank: str, job: dict[str, str]
) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """The filled-in file as a process, which is killed at the end of the block, and the notes of the stand-ins."""
    toml = folder / "x.toml"  # a path of this test's own: the ssh file signals processes by it
    options = launch._parse([kind, str(toml), "run.dir=a b", "--nodes", "3", "--gpus-per-node", "4"])
    (folder / "job").write_text(launch.fill(options))
    environment = install(folder / "bin", rank=rank, job=job)
    # A shell cannot trap what it was started with as ignored, and tests in the background of a script ignore SIGINT.
    with subprocess.Popen(
        ["bash", "job"],
        cwd=folder,
        env=environment,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as script:
        try:
            yield script, folder / "bin" / "said"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(script.pid, signal.SIGKILL)


def lines(said: Path, word: str) -> list[str]:
    found = said.read_text().splitlines() if said.exists() else []
    return [line.partition(" ")[2] for line in found if line.split()[0] == word]


def wait_for(said: Path, word: str, *, count: int = 1) -> None:
    deadline = time.monotonic() + 60
    while len(lines(said, word)) < count:
        assert time.monotonic() < deadline, said.read_text()
        time.sleep(0.02)


def test_a_job_starts_a_torchrun_that_meets_the_others_on_the_first_node(tmp_path: Path) -> None:
    with started("slurm", tmp_path, rank=ENDS.format(code=0), job=JOB) as (script, said):
        assert script.wait(60) == 0
    [words] = map(json.loads, lines(said, "torchrun"))
    options = dict(zip(words[0:-4:2], words[1:-4:2], strict=True))
    assert (options["--nnodes"], options["--nproc-per-node"]) == ("3", "4")
    assert options["--rdzv-endpoint"] == f"{socket.gethostname()}:22345"
    assert words[-4:] == ["-m", "fsdp2kit.run", str(tmp_path / "x.toml"), "run.dir=a b"]
    assert lines(said, "scontrol") == [], "the run is over"


@pytest.mark.parametrize(
    ("rank", "job", "sends", "code", "requeued"),
    [
        pytest.param(ENDS.format(code=3), JOB, False, 1, [], id="fails"),
        pytest.param(TRAINS.format(code=0), JOB, True, 0, ["requeue 12345"], id="saves", marks=pytest.mark.full),
        pytest.param(TRAINS.format(code=0), TASK, True, 0, ["requeue 12345_7"], id="saves in an array"),
        pytest.param(TRAINS.format(code=3), JOB, True, 1, [], id="fails to save", marks=pytest.mark.full),
    ],
)
def test_only_a_job_that_was_asked_to_stop_and_saved_is_requeued(
    rank: str, job: dict[str, str], sends: bool, code: int, requeued: list[str], tmp_path: Path
) -> None:
    with started("slurm", tmp_path, rank=rank, job=job) as (script, said):
        wait_for(said, "torchrun")
        if sends:  # at once, when the rank is still starting
            os.kill(script.pid, signal.SIGUSR1)  # to the batch shell alone, as --signal=B:USR1 does
        assert script.wait(60) == code
    assert lines(said, "scontrol") == requeued


def test_skypilot_starts_a_torchrun_that_meets_the_others_on_the_first_node(tmp_path: Path) -> None:
    options = launch._parse(["skypilot", "x.toml", "run.dir=a b", "--nodes", "3", "--gpus-per-node", "4"])
    task = yaml.safe_load(launch.fill(options))
    node = {"SKYPILOT_NUM_NODES": "3", "SKYPILOT_NODE_RANK": "0", "SKYPILOT_NODE_IPS": "10.0.0.5\n10.0.0.6\n10.0.0.7"}
    job = {**task["envs"], **node, "SKYPILOT_TASK_ID": "sky-1"}
    environment = install(tmp_path / "bin", rank=ENDS.format(code=0), job=job)
    subprocess.run(["bash", "-c", task["run"]], env=environment, timeout=60, check=True)
    [words] = map(json.loads, lines(tmp_path / "bin" / "said", "torchrun"))
    options = dict(zip(words[0:-6:2], words[1:-6:2], strict=True))
    assert (options["--nnodes"], options["--nproc-per-node"], options["--rdzv-conf"]) == ("3", "4", "is_host=1")
    assert options["--rdzv-endpoint"] == "10.0.0.5:29500"
    assert words[-6:-2] == ["-m", "fsdp2kit.run", "x.toml", "run.dir=a b"]
    stores = dict(word.removeprefix("checkpoint.").split("=") for word in words[-2:])
    config = TrainingConfig.model_validate({"recipe": "x", "checkpoint": stores})
    assert shared_directories(config) == {}, "its nodes share no disk"


@pytest.mark.skipif(shutil.which("pkill") is None, reason="needs pkill")
def test_ctrl_c_reaches_the_ranks_of_all_hosts(tmp_path: Path) -> None:
    with started("ssh", tmp_path, rank=TRAINS.format(code=0), job={}) as (script, said):
        wait_for(said, "trains", count=3)
        os.killpg(script.pid, signal.SIGINT)
        assert script.wait(60) == 0
    assert sorted(lines(said, "ssh")) == sorted(["host1", "host2", "host3"] * 2)
    for words in map(json.loads, lines(said, "torchrun")):
        assert "host1:29500" in words
        assert words[-4:] == ["-m", "fsdp2kit.run", str(tmp_path / "x.toml"), "run.dir=a b"]
