"""torchrun and signals, launched as the README says: a complete checkpoint of the step, and nobody left behind."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fsdp2kit.checkpoint.manifest import verify
from tests.job.helpers import alive, children, steps_done
from tests.support.short_run import TOML
from tests.support.workers import ending, start_ranks

ROOT = Path(__file__).resolve().parents[2]
HANDLED = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"


def test_a_signal_to_the_ranks_leaves_a_complete_checkpoint(tmp_path: Path) -> None:
    toml, run_dir = tmp_path / "run.toml", tmp_path / "run"
    toml.write_text(TOML)
    options = ["train.steps=1000000", f"run.dir={run_dir}", "checkpoint.every=0", "checkpoint.async_save=true"]
    ranks, logs = start_ranks(2, tmp_path, "fsdp2kit.run", str(toml), *options)
    with ending(ranks):
        deadline = time.monotonic() + 240
        while steps_done(run_dir) < 3 and ranks[0].is_alive() and time.monotonic() < deadline:
            time.sleep(0.05)
        for rank in ranks:
            os.kill(rank.pid, signal.SIGTERM)
        for rank in ranks:
            rank.join(90)
        codes = [rank.exitcode for rank in ranks]
    said, done = logs[0].read_text(), steps_done(run_dir)
    assert codes == [0, 0], said
    assert f"asked to stop (SIGTERM) after step {done}" in said
    assert f"whole: step {done}," in verify(run_dir / "checkpoints" / f"step-{done:06d}")


@pytest.mark.full
@pytest.mark.parametrize(
    ("number", "to", "code"),
    [
        (signal.SIGTERM, "torchrun", 1),  # what schedulers send; torchrun passes it on, and itself exits 1
        pytest.param(signal.SIGINT, "torchrun", 1, marks=pytest.mark.slow),  # Ctrl-C
        pytest.param(signal.SIGUSR1, "torchrun", 1, marks=pytest.mark.slow),  # Slurm's warning
        pytest.param(signal.SIGUSR1, "ranks", 0, marks=pytest.mark.slow),
    ],
)
def test_a_signal_leaves_a_complete_checkpoint(tmp_path: Path, number: signal.Signals, to: str, code: int) -> None:
    toml, run_dir = tmp_path / "run.toml", tmp_path / "run"
    toml.write_text(TOML)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    options = ["train.steps=1000000", f"run.dir={run_dir}", "checkpoint.every=0", "checkpoint.async_save=true"]
    command = [*torchrun, "--signals-to-handle", HANDLED, "-m", "fsdp2kit.run", str(toml), *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with (tmp_path / "log").open("w+") as log:
        agent = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=log, stderr=log)
        deadline = time.monotonic() + 240
        while steps_done(run_dir) < 3 and agent.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        ranks = [pid for pid in children(agent.pid) if b"fsdp2kit.run" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        said = (tmp_path / "log").read_text()
        assert len(ranks) == 2, said
        for pid in ranks if to == "ranks" else [agent.pid]:
            os.kill(pid, number)
        assert agent.wait(120) == code, (tmp_path / "log").read_text()
    said = (tmp_path / "log").read_text()
    done = steps_done(run_dir)
    assert f"asked to stop ({number.name}) after step {done}" in said
    assert [path.name for path in (run_dir / "checkpoints").iterdir()] == [f"step-{done:06d}"]
    assert f"whole: step {done}," in verify(run_dir / "checkpoints" / f"step-{done:06d}")
    assert "exitcode" not in said.replace("exitcode  : 0", ""), "every rank exited with 0"
    assert not any(alive(pid) for pid in ranks)


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)])
def test_a_rank_that_is_lost_ends_the_others(tmp_path: Path, number: signal.Signals) -> None:
    """Inside a step, whose collectives run on the groups of a mesh of two dimensions."""
    toml, run_dir = tmp_path / "run.toml", tmp_path / "run"
    toml.write_text(TOML)
    options = ["train.steps=1000000", f"run.dir={run_dir}", "checkpoint.every=0", "run.timeout_minutes=0.15"]
    options += ["fsdp.strategy=hybrid_shard", "mesh.dp_replicate=2", "train.global_batch_size=4"]
    ranks, logs = start_ranks(4, tmp_path, "fsdp2kit.run", str(toml), *options)
    with ending(ranks):
        deadline = time.monotonic() + 240
        while steps_done(run_dir) < 3 and ranks[0].is_alive() and time.monotonic() < deadline:
            time.sleep(0.05)
        os.kill(ranks[1].pid, number)
        for rank in (0, 2, 3):
            ranks[rank].join(90)
        codes = [ranks[rank].exitcode for rank in (0, 2, 3)]
    assert codes == [1, 1, 1], logs[0].read_text()
    said = "".join(logs[rank].read_text() for rank in (0, 2, 3))
    assert said.count("error: ") == said.count(f": rank 1 on {platform.node()} gives no sign of life since ") == 1, (
        said
    )
    assert "Traceback" not in said
