"""vLLM as the engine of real runs, where there is a real server; the client is in test_servers.py."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from fsdp2kit.job.distributed import rank
from fsdp2kit.rl.engine import Bucket, Request
from fsdp2kit.rl.server_engine import ServerEngine
from fsdp2kit.rl.vllm_server import VLLMServer
from fsdp2kit.run import load
from tests.rl.helpers.servers import bucket, server_of
from tests.support.workers import WorkerPool

ROOT = Path(__file__).resolve().parents[2]


def path_in_environment(name: str) -> Path:
    if name not in os.environ:
        pytest.skip(f"{name} does not name a path (see docs/grpo.md)")
    return Path(os.environ[name])


@contextmanager
def vllm_server(
    python: Path,
    model: Path,
    folder: Path,
    *,
    dtype: str,
    port: int,
    options: Sequence[object] = (),
    within: Sequence[str] = (),
    address: str = "127.0.0.1",
) -> Iterator[str]:
    """A server that knows this repository's plugin, as one that the package is installed beside; gives its URL.

    ``folder / "pid"`` names its process group.

    Args:
        within: begins a command that runs in another namespace, with the server's address.
    """
    metadata = folder / "fsdp2kit-0.dist-info"
    metadata.mkdir(exist_ok=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: fsdp2kit\nVersion: 0\n")
    project = (ROOT / "pyproject.toml").read_text()
    point = next(line for line in project.splitlines() if line.startswith("fsdp2kit = ") and "vllm_plugin" in line)
    (metadata / "entry_points.txt").write_text("[vllm.general_plugins]\n" + point.replace('"', "") + "\n")
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}
    environment = {**os.environ, **settings, "HF_HUB_OFFLINE": "1", "PYTHONPATH": f"{folder}:{ROOT}"}
    environment |= {"VLLM_HOST_IP": address} if within else {}
    command = [
        *within,
        python,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        model,
        "--dtype",
        dtype,
        "--port",
        port,
    ]
    command += ["--enforce-eager", "--max-model-len", 512, "--max-num-seqs", 16, "--host", address]
    command += ["--weight-transfer-config", '{"backend": "fsdp2kit"}', *options]
    with (folder / "server.log").open("w") as log:
        process = subprocess.Popen(
            list(map(str, command)), env=environment, stdout=log, stderr=log, start_new_session=True
        )
        (folder / "pid").write_text(str(process.pid))
        try:
            url = f"http://{address}:{port}"
            _wait_for(url, process, log=folder / "server.log", within=within)
            yield url
        finally:
            process.terminate()
            try:
                process.wait(timeout=60)
            except subprocess.TimeoutExpired:  # it does not listen while it starts
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def _wait_for(url: str, process: subprocess.Popen, *, log: Path, within: Sequence[str]) -> None:
    ask = f"import urllib.request as r; r.urlopen('{url}/health', timeout=5)"
    for _ in range(300):
        assert process.poll() is None, log.read_text()[-2000:]
        if subprocess.run([*within, sys.executable, "-S", "-c", ask], capture_output=True).returncode == 0:
            return
        time.sleep(1)
    raise TimeoutError(log.read_text()[-2000:])


GREEDY = ["The capital of France is", "2 + 2 =", "Water boils at"]


def write_run(folder: Path, model: Path, port: int, *, dtype: str) -> Path:
    """The TOML of five steps with rewards for short answers."""
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"Say {at}."}) + "\n" for at in range(8)))
    (folder / "reward.py").write_text(
        "def short(completions, **columns):\n    return [-len(one[0]['content']) for one in completions]\n"
    )
    toml = folder / "x.toml"
    toml.write_text(f"""
        recipe = "grpo"
        run.dir = "{folder}/run"
        model.path = "{model}"
        mesh.cp = 2
        fsdp.param_dtype = "float32"
        data = {{ path = "prompts.jsonl", seq_len = 256 }}
        rollout = {{ engine = "vllm", url = "http://127.0.0.1:{port}", n = 4, max_new_tokens = 24, dtype = "{dtype}" }}
        weight_sync.bucket_mib = 64
        reward = [{{ function = "reward.py:short" }}]
        train = {{ steps = 5, global_batch_size = 8 }}
        optimizer.lr = 1e-5
        checkpoint = {{ every = 1, keep = 9, export_hf = "never" }}
        wandb.mode = "disabled"
    """)
    return toml


def _train_and_ask(toml: str, asked: list[list[int]], out: str, overrides: Sequence[str]) -> None:
    """Run a recipe, and ask before each batch of rollouts."""
    with asking(asked, out):
        recipe, config = load(toml, overrides)
        recipe.main(config)


def asking(asked: list[list[int]], out: str) -> Any:
    """A patch: before each batch of rollouts, rank 0 writes the version and greedy answers of the server."""
    check, done = ServerEngine.require, set[int]()

    def check_and_ask(engine: ServerEngine, version: int) -> None:
        check(engine, version)
        if rank() == 0 and version not in done:
            done.add(version)
            found = engine.generate([Request(ids, (0,)) for ids in asked], max_new_tokens=12, temperature=0.0)
            server: Any = engine._present[0]
            label = server._ask("GET", "/weight_info")["weight_version"]
            with Path(out).open("a") as file:
                line = {"version": version, "label": label, "answers": [response.ids for response in found]}
                file.write(json.dumps(line) + "\n")

    return mock.patch.object(ServerEngine, "require", check_and_ask)


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


def check_cycles(folder: Path, model: Path, asked: list[list[int]], *, dtype: str, slack: float) -> None:
    """Five versions of one run, each with the greedy answers that transformers gives with its weights."""
    cycles = [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]
    assert [cycle["version"] for cycle in cycles] == [0, 1, 2, 3, 4]
    assert len({cycle["label"].partition(":")[0] for cycle in cycles}) == 1
    for cycle in cycles:
        weights = model if not cycle["version"] else export(folder, cycle["version"])
        plain: Any = AutoModelForCausalLM.from_pretrained(weights, dtype=getattr(torch, dtype)).eval()
        for ids, answer in zip(asked, cycle["answers"], strict=True):
            assert_greedy(plain, ids, answer, slack=slack)


def figures(folder: Path, *keys: str) -> list[float]:
    """Values of a run's records, in their order."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)[key] for line in lines for key in keys]


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


def export(folder: Path, step: int) -> Path:
    from fsdp2kit.checkpoint.hf import dcp_to_hf

    out = folder / f"hf-{step}"
    dcp_to_hf(folder / "run" / "checkpoints" / f"step-{step:06d}", out, dtype="float32")
    return out


@torch.no_grad()
def assert_greedy(model: Any, prompt: list[int], answer: list[int], *, slack: float) -> None:
    """Each token of the answer is the model's most likely one, or its logit is as large within rounding."""
    logits = model(input_ids=torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1].float()
    lost = logits.amax(dim=-1) - logits.gather(1, torch.tensor(answer)[:, None]).squeeze(1)
    assert lost.max() <= slack
