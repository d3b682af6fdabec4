"""Several ranks over NCCL on one device.

NCCL refuses two ranks of one host on one device. Here each rank is a host of its own (``NCCL_HOSTID``), so they talk
over TCP, as ranks on several machines do: slowly, but by the same calls.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file

from fsdp2kit.parity.variants import METHODS
from tests.gpu.test_first import MIXTURE, ROOT, TOMLS
from tests.job.helpers import steps_done

pytestmark = pytest.mark.gpu

SYNTHETIC = str(TOMLS / "pretrain_synthetic.toml")
SMALL = ["train.global_batch_size=4", "data.seq_len=256", "run.timeout_minutes=2", "checkpoint.export_dtype=float32"]
HOST = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}


@contextlib.contextmanager
def job(size: int, folder: Path, module: str, *arguments: str) -> Iterator[tuple[list[subprocess.Popen], list[Path]]]:
    """Each rank's process, killed at the end of the block, and the path of its output."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    shared = {**os.environ, **HOST, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(size)}
    paths = [folder / f"rank-{rank}.log" for rank in range(size)]
    ranks = []
    try:
        for rank, path in enumerate(paths):  # CUDA does not work in forks of a process that has used it
            command = [sys.executable, "-m", module, *arguments]
            own = {"RANK": str(rank), "NCCL_HOSTID": f"host-{rank}"}
            with path.open("w") as log:
                ranks.append(subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT, env=shared | own))
        yield ranks, paths
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def finish(size: int, folder: Path, module: str, *arguments: str) -> str:
    """What rank 0 said in a job that ended well."""
    deadline = time.monotonic() + 250
    with job(size, folder, module, *arguments) as (ranks, paths):
        while any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline:
            time.sleep(0.1)
        codes = [rank.poll() for rank in ranks]
    said = [path.read_text(encoding="utf-8") for path in paths]
    assert codes == [0] * size, (codes, *said)
    return said[0]


def train(size: int, folder: Path, *overrides: str) -> list[dict[str, float]]:
    """The records of a run on random tokens."""
    folder.mkdir(exist_ok=True)
    finish(size, folder, "fsdp2kit.run", SYNTHETIC, *SMALL, f"run.dir={folder / 'run'}", *overrides)
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("size", [2, 4])
def test_training_is_that_of_plain_transformers(tmp_path: Path, size: int) -> None:
    said = finish(size, tmp_path, "tools.parity", SYNTHETIC, "run.timeout_minutes=3", "--json")

    rows = json.loads(said.splitlines()[-1])
    assert {row["verdict"] for row in rows} == {"ok"}, rows
    assert {(row["method"], row["dtype"]) for row in rows if row["cp"] > 1} == {
        (method, dtype) for method in METHODS for dtype in ("float32", "bfloat16")
    }


@pytest.mark.parametrize("mesh", [[], ["mesh.cp=2"], [*MIXTURE, "mesh.ep=2"]], ids=["dp", "cp", "ep"])
def test_a_run_goes_on_from_an_asynchronous_save_as_one_process_trains(tmp_path: Path, mesh: list[str]) -> None:
    options = ["fsdp.param_dtype=float32", "checkpoint.every=2", "lr_schedule.name=constant", *mesh]
    alone = train(1, tmp_path / "alone", *[each for each in options if not each.startswith("mesh.")], "train.steps=4")

    train(2, tmp_path / "ranks", *options, "train.steps=2")
    resumed = train(2, tmp_path / "ranks", *options, "train.steps=4")

    assert [row["step"] for row in resumed] == [row["step"] for row in alone] == [1, 2, 3, 4]
    assert [row["loss"] for row in resumed] == pytest.approx([row["loss"] for row in alone], rel=1e-5)
    found, expected = (load_file(tmp_path / name / "run" / "hf" / "model.safetensors") for name in ("ranks", "alone"))
    assert found.keys() == expected.keys()
    assert all((found[name] - expected[name]).norm() <= 1e-4 * expected[name].norm() for name in expected)


@pytest.mark.parametrize(
    "options", [["optimizer.name=muon"], ["fsdp.offload=params"], ["fsdp.offload=optimizer"]], ids=str
)
def test_the_first_losses_are_those_of_one_process(tmp_path: Path, options: list[str]) -> None:
    options = [*options, "fsdp.param_dtype=float32", "train.steps=3", "checkpoint.export_hf=never"]
    alone, ranks = (train(size, tmp_path / str(size), *options) for size in (1, 2))
    assert [row["loss"] for row in ranks] == pytest.approx([row["loss"] for row in alone], rel=1e-5)
    assert [row["grad_norm"] for row in ranks] == pytest.approx([row["grad_norm"] for row in alone], rel=1e-4)


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_lost_rank_ends_the_other_and_is_named(tmp_path: Path, sent: signal.Signals) -> None:
    """NCCL notices a closed connection at once, and a rank that stands still after the time-out, here 24 s."""
    run_dir = tmp_path / "run"
    endless = ["train.steps=100000", f"run.dir={run_dir}", "checkpoint.every=0"]
    if sent == signal.SIGSTOP:
        endless.append("run.timeout_minutes=0.4")
    with job(2, tmp_path, "fsdp2kit.run", SYNTHETIC, *SMALL, *endless) as (ranks, paths):
        deadline = time.monotonic() + 120
        while steps_done(run_dir) < 2 and time.monotonic() < deadline:
            time.sleep(0.2)
        ranks[1].send_signal(sent)
        code = ranks[0].wait(timeout=80)
    said = paths[0].read_text(encoding="utf-8")
    errors = [line for line in said.splitlines() if line.startswith("error: ")]
    assert (code, len(errors)) == (1, 1), said
    assert re.search(r"rank 1 on \S+.* gives no sign of life since the report from step", errors[0]), errors[0]
