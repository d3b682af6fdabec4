"""A real vLLM server, runs that use it, and what it is asked."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import AutoModelForCausalLM

from fsdp2kit.job.distributed import rank
from fsdp2kit.rl.engines.engine import Request
from fsdp2kit.rl.engines.server_engine import ServerEngine
from tests.support.runs import run_recipe
from tests.support.workers import ROOT, WorkerPool


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


def tune(pool: WorkerPool, folder: Path, model: Path, *options: str) -> None:
    """Six steps on two ranks; the export is ``folder/run/hf``."""
    rows = [{"prompt": text, "completion": " a b c d e f."} for text in GREEDY]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    toml = folder / "x.toml"
    toml.write_text(f"""
        recipe = "sft"
        run.dir = "{folder}/run"
        model.path = "{model}"
        fsdp.param_dtype = "float32"
        data = {{ path = "rows.jsonl", format = "prompt_completion", seq_len = 128, pack = false }}
        train = {{ steps = 6, global_batch_size = 2 }}
        checkpoint = {{ every = 6 }}
        wandb.mode = "disabled"
    """)
    said = pool.run(2, run_recipe, str(toml), list(options))[0]
    assert not said.startswith("error"), said


def greedy(url: str, name: str, ids: list[int]) -> list[int]:
    body = {"model": name, "prompt": ids, "max_tokens": 16, "temperature": 0.0, "return_token_ids": True}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)["choices"][0]["token_ids"]
