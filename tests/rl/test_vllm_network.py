"""A real vLLM server on another host than the trainer: weights by gloo, the cable cut, the server killed."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.cluster.helpers import Hold, Hosts, Job, _be_rank, two_hosts
from tests.rl.helpers.vllm import GREEDY, asking, check_cycles, figures, path_in_environment, vllm_server, write_run
from tests.support.workers import FORKS

PORT = 8321
# The trainer's own ranks talk over the loopback device, and the weights' group finds the cable by itself.
VARIABLES = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29517"}


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    path_in_environment("FSDP2KIT_VLLM_PYTHON")
    with two_hosts(tmp_path) as hosts:
        yield hosts


def train(
    hosts: Hosts, name: str, *options: str, hold: Hold | None = None, prepare: Callable[[int], object] | None = None
) -> Job:
    """Start the trainer's two ranks on the first host."""
    ranks, logs = [], []
    for rank in range(2):
        log = hosts.folder / f"{name}-rank-{rank}.log"
        variables = {**VARIABLES, "RANK": str(rank), "LOCAL_RANK": str(rank), "GLOO_SOCKET_IFNAME": "lo"}
        held = hold if rank == 0 else None
        arguments = (str(hosts.folder / "x.toml"), f"rollout.url=http://{hosts[1].address}:{PORT}", *options)
        process = FORKS.Process(
            target=_be_rank, args=(hosts[0].process.pid, held, prepare, 0, arguments, variables, str(log))
        )
        process.start()
        hosts[0].ranks.append(process)
        ranks.append(process)
        logs.append(log)
    return Job(ranks, logs)


def ask(asked: list[list[int]], out: str, _: int) -> None:
    asking(asked, out).start()


def served(hosts: Hosts, model: Path) -> AbstractContextManager[str]:
    """A server on the second host."""
    python = path_in_environment("FSDP2KIT_VLLM_PYTHON")
    where: Any = {"within": hosts[1].command(), "address": hosts[1].address, "port": PORT}
    return vllm_server(python, model, hosts.folder, dtype="float32", **where)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mesh", ["mesh.cp=1", "mesh.cp=2"])
def test_five_cycles_over_the_network_as_through_memory(mesh: str, hosts: Hosts) -> None:
    model, folder = path_in_environment("FSDP2KIT_SMOLLM2"), hosts.folder
    asked = [AutoTokenizer.from_pretrained(model)(text).input_ids for text in GREEDY]
    write_run(folder, model, PORT, dtype="float32")
    other = folder / "memory"
    other.mkdir()
    with served(hosts, model):
        short = [mesh, "rollout.max_new_tokens=8"]
        job = train(hosts, "network", *short, prepare=partial(ask, asked, str(folder / "answers.jsonl")))
        assert job.codes(seconds=600) == [0, 0], job.said()
        options = [*short, "weight_sync.transport=memory", f"run.dir={other}/run", "checkpoint.every=5"]
        job = train(hosts, "memory", *options, prepare=partial(ask, asked, str(other / "answers.jsonl")))
        assert job.codes(seconds=600) == [0, 0], job.said()
    check_cycles(folder, model, asked, dtype="float32", slack=1e-4)
    answers = [
        [json.loads(line)["answers"] for line in (place / "answers.jsonl").read_text().splitlines()]
        for place in (folder, other)
    ]
    assert answers[0] == answers[1]
    keys = ("reward", "grad_norm")
    assert figures(folder / "run", *keys) == pytest.approx(figures(other / "run", *keys), rel=1e-3, abs=1e-6)
    gap = max(figures(folder / "run", "log_prob_gap_max"))
    assert 0 < gap <= 1e-4
    # Advantages add up to 0, so what is left of the loss is the gap between the engine's log-probabilities and ours.
    assert figures(folder / "run", "loss") == pytest.approx(figures(other / "run", "loss"), rel=1e-3, abs=gap)
    assert figures(folder / "run", "rollout/weight_version") == [0, 1, 2, 3, 4]
    assert "compared" in (folder / "server.log").read_text()


def wait_for(mark: Path, job: Job) -> None:
    for _ in range(20_000):
        if mark.exists():
            return
        assert any(rank.is_alive() for rank in job.ranks), job.said()
        time.sleep(0.05)
    raise TimeoutError(job.said())


@pytest.mark.timeout(1800)
def test_the_cable_is_cut_in_a_broadcast_and_then_the_server_killed(hosts: Hosts) -> None:
    model, folder = path_in_environment("FSDP2KIT_SMOLLM2"), hosts.folder
    write_run(folder, model, PORT, dtype="float32")
    mark = folder / "mark"
    options = ["run.timeout_minutes=1"]

    def broken(name: str, occurrence: int, fault: Callable[[], object]) -> tuple[str, float]:
        """Hold rank 0 in a broadcast while the server waits for the bucket; rank 0's output, and the seconds."""
        hold = Hold(0, "fsdp2kit.rl.network_transport:Link.broadcast", occurrence, mark)
        job = train(hosts, name, *options, hold=hold)
        wait_for(mark, job)
        time.sleep(1)
        fault()
        begun = time.monotonic()
        mark.unlink()
        assert job.codes(seconds=120) == [1, 1], job.said()
        return job.said(0), time.monotonic() - begun

    with served(hosts, model):
        said, seconds = broken("cut", 22, hosts.cut_link)
        assert f"vLLM server http://{hosts[1].address}:{PORT}: the way of the weights to it broke" in said
        assert seconds < 60
        before = figures(folder / "run", "reward")
        assert 0 < len(before) < 5
        hosts.mend_link()
        kill = partial(os.killpg, int((folder / "pid").read_text()), signal.SIGKILL)
        said, seconds = broken("killed", 13, kill)
        assert f"vLLM server http://{hosts[1].address}:{PORT}: " in said
        assert seconds < 60
        between = figures(folder / "run", "reward")
        assert between[: len(before)] == before
        assert len(between) < 5
    with served(hosts, model):
        for name, more in (("again", []), ("straight", [f"run.dir={folder}/straight", "checkpoint.every=5"])):
            job = train(hosts, name, *options, *more)
            assert job.codes(seconds=600) == [0, 0], job.said()
    keys = ("reward", "grad_norm")
    assert figures(folder / "run", "rollout/weight_version") == [0, 1, 2, 3, 4]
    assert figures(folder / "run", *keys) == pytest.approx(figures(folder / "straight", *keys), rel=1e-3)
