"""vLLM as the engine of real runs, where there is a real server; the client is in test_servers.py."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from fsdp2kit.job.distributed import rank
from fsdp2kit.rl.engines.engine import Bucket
from fsdp2kit.rl.engines.server_engine import ServerEngine
from fsdp2kit.rl.engines.vllm_server import VLLMServer
from fsdp2kit.run import load
from tests.rl.helpers.servers import bucket, server_of
from tests.rl.helpers.vllm import (
    GREEDY,
    asking,
    check_cycles,
    figures,
    free_port,
    path_in_environment,
    vllm_server,
    write_run,
)
from tests.support.workers import WorkerPool


def _train_and_ask(toml: str, asked: list[list[int]], out: str, overrides: Sequence[str]) -> None:
    """Run a recipe, and ask before each batch of rollouts."""
    with asking(asked, out):
        recipe, config = load(toml, overrides)
        recipe.main(config)


@pytest.mark.timeout(1800)
# In bfloat16 the server and transformers differ by some roundings of a logit (1/16 each, between 8 and 16) before any
# update, and the trainer computes in float32.
# A server on a CPU is told to sleep, and is paused until it is awake, but keeps its memory.
@pytest.mark.parametrize(
    ("dtype", "sleeps", "slack", "mean", "most"),
    [("float32", False, 1e-4, 1e-4, 1e-4), ("bfloat16", True, 0.5, 0.15, 1.0)],
)
def test_five_cycles_with_a_real_server(
    dtype: str, sleeps: bool, slack: float, mean: float, most: float, pool: WorkerPool, tmp_path: Path
) -> None:
    python, model = path_in_environment("FSDP2KIT_VLLM_PYTHON"), path_in_environment("FSDP2KIT_SMOLLM2")
    tokenizer = AutoTokenizer.from_pretrained(model)
    asked = [tokenizer(text).input_ids for text in GREEDY]
    port = free_port()
    toml = write_run(tmp_path, model, port, dtype=dtype)
    with vllm_server(python, model, tmp_path, dtype=dtype, port=port) as url:
        break_off_an_update(url, model)
        overrides = [f"rollout.sleep={str(sleeps).lower()}"]
        pool.run(2, _train_and_ask, str(toml), asked, str(tmp_path / "answers.jsonl"), overrides)
    check_cycles(tmp_path, model, asked, dtype=dtype, slack=slack)
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    gaps = [record["log_prob_gap_max"] for record in records]
    assert len(gaps) == 5
    assert 0 < max(gaps) <= most
    assert max(record["log_prob_gap"] for record in records) <= mean


def _train(toml: str, overrides: Sequence[str], pid: str = "") -> None:
    """Run a recipe; when the first bucket of the third weights has arrived, kill all processes of the server."""
    begin, send = VLLMServer.begin_update, VLLMServer.load_weights
    begun: list[int] = []

    def begin_and_count(engine: VLLMServer, version: int) -> None:
        begun.append(version)
        begin(engine, version)

    def send_and_kill(engine: VLLMServer, sent: Bucket) -> None:
        send(engine, sent)
        if pid and engine._is_main and len(begun) == 3:
            with contextlib.suppress(ProcessLookupError):  # at the second bucket
                os.killpg(int(Path(pid).read_text()), signal.SIGKILL)

    with mock.patch.multiple(VLLMServer, begin_update=begin_and_count, load_weights=send_and_kill):
        recipe, config = load(toml, list(overrides))
        recipe.main(config)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("ahead", [0, 1])
def test_a_real_server_that_is_killed_between_buckets(ahead: int, pool: WorkerPool, tmp_path: Path) -> None:
    python, model = path_in_environment("FSDP2KIT_VLLM_PYTHON"), path_in_environment("FSDP2KIT_SMOLLM2")
    port = free_port()
    toml, options = write_run(tmp_path, model, port, dtype="float32"), [f"rollout.ahead={ahead}"]

    keys = ("reward", "grad_norm")  # rewards depend on every token that was sampled
    said = r"RunFailure: vLLM server .*: (broke off in|does not answer)"
    with (
        vllm_server(python, model, tmp_path, dtype="float32", port=port),
        pytest.raises(AssertionError, match=said),
    ):
        pool.run(2, _train, str(toml), options, str(tmp_path / "pid"))
    before = figures(tmp_path / "run", *keys)
    assert 0 < len(before) < 10
    with vllm_server(python, model, tmp_path, dtype="float32", port=port):
        pool.run(2, _train, str(toml), options)
        pool.run(2, _train, str(toml), [*options, f"run.dir={tmp_path}/straight"])
    resumed = figures(tmp_path / "run", *keys)
    assert resumed[: len(before)] == before
    assert resumed == pytest.approx(figures(tmp_path / "straight", *keys), rel=1e-3)


def _train_and_kill(toml: str, overrides: Sequence[str], pid: str) -> None:
    """Run a recipe, and kill all processes of a server while it answers with the third weights."""
    check = ServerEngine.require

    def check_and_kill(engine: ServerEngine, version: int) -> None:
        check(engine, version)
        if rank() == 0 and version == 2:
            threading.Timer(0.3, os.killpg, (int(Path(pid).read_text()), signal.SIGKILL)).start()

    with mock.patch.object(ServerEngine, "require", check_and_kill):
        recipe, config = load(toml, list(overrides))
        recipe.main(config)


@pytest.mark.timeout(1800)
def test_two_real_servers_one_of_which_is_killed(pool: WorkerPool, tmp_path: Path) -> None:
    python, model = path_in_environment("FSDP2KIT_VLLM_PYTHON"), path_in_environment("FSDP2KIT_SMOLLM2")
    ports = [free_port(), free_port()]
    toml = write_run(tmp_path, model, ports[0], dtype="float32")
    with ExitStack() as stack:
        for port in ports:
            folder = tmp_path / str(port)
            folder.mkdir()
            stack.enter_context(vllm_server(python, model, folder, dtype="float32", port=port))
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        pool.run(2, _train_and_kill, str(toml), [f"rollout.url={urls}"], str(tmp_path / str(ports[1]) / "pid"))
        pool.run(2, _train, str(toml), [f"run.dir={tmp_path}/one"])
    two, one = (figures(tmp_path / name, "reward", "grad_norm") for name in ("run", "one"))
    said = (tmp_path / "run" / "events.jsonl").read_text()
    assert said.count("left out until it takes weights again; its requests go to 1 other") == 1
    assert len(two) == 10
    assert two == pytest.approx(one, rel=1e-3)


def break_off_an_update(url: str, model: Path) -> None:
    """Send some layers' queries, as noise, and nothing more: what a trainer that is killed leaves behind."""
    broken = server_of(url, kind=VLLMServer)
    broken.begin_update(1)
    tensors = load_file(model / "model.safetensors")
    broken.load_weights(
        bucket(**{name: torch.randn_like(one) for name, one in tensors.items() if name.endswith("q_proj.weight")})
    )
    broken._client.close()
