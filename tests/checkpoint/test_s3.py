"""Checkpoints and exports in a real S3, over HTTP: moto's server, which a test starts; ranks reach it with s3fs."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from upath import UPath

from fsdp2kit.checkpoint.__main__ import main
from fsdp2kit.checkpoint.hf import dcp_to_hf
from fsdp2kit.files.remote import on_disk, to_path
from tests.checkpoint import helpers
from tests.checkpoint.helpers import assert_same, saved_alone, tool
from tests.support.hosts import start_hosts
from tests.support.models import slow
from tests.support.workers import WorkerPool, ending

_MISSING = [name for name in ("moto", "flask", "flask_cors", "s3fs") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(bool(_MISSING), reason=f"not installed: {', '.join(_MISSING)}"),
    # of botocore and moto
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning"),
]


@pytest.fixture(scope="module")
def account() -> Iterator[dict[str, str]]:
    """A server; the environment variables that make it a process's S3."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    logging.getLogger("werkzeug").setLevel(logging.WARNING)  # a line for each request
    server.start()
    host, port = server.get_host_and_port()
    yield {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "someone",
        "AWS_SECRET_ACCESS_KEY": "any-secret",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    server.stop()


@pytest.fixture
def url(account: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A new bucket, for this process, too."""
    for name, value in account.items():
        monkeypatch.setenv(name, value)
    bucket = re.sub(r"[^a-z0-9]+", "-", f"b-{tmp_path.parent.name}-{tmp_path.name}".lower())[-60:].strip("-")
    fsspec.filesystem("s3").mkdir(bucket)
    return f"s3://{bucket}"


def names(url: str) -> list[str]:
    fsspec.filesystem("s3").invalidate_cache()  # other processes write there
    return sorted(path.name for path in UPath(url).iterdir())


@pytest.mark.parametrize("is_async", [slow(False), True])
def test_saved_kept_checked_and_converted(tmp_path: Path, url: str, is_async: bool) -> None:
    _, path = saved_alone(tmp_path, 1, 2, 3, 4, keep=1, keep_every=2, async_save=is_async, dir=f"{url}/run")
    assert names(f"{url}/run") == ["step-000002", "step-000004"]
    assert main(["verify", f"{url}/run/step-000004"]) == 0
    model = helpers.tiny_llama(seed=1)
    optimizer = helpers.adamw(model)
    resumed = helpers.checkpoints_of(tmp_path, model, optimizer, dir=f"{url}/run")
    assert resumed.restore(path) == helpers.progress_at(4)
    reference = helpers.tiny_llama()
    assert_same(helpers.full_state(model, optimizer), helpers.full_state(reference, helpers.adamw(reference)))
    dcp_to_hf(path, tmp_path / "out", dtype="float32")
    assert tool("dcp_to_hf").main([str(path), f"{url}/hf", "--dtype", "float32", "--verify"]) == 0
    assert (to_path(f"{url}/hf") / "model.safetensors").read_bytes() == (
        tmp_path / "out" / "model.safetensors"
    ).read_bytes()
    content = bytearray((path / "__0_0.distcp").read_bytes())
    content[-1] ^= 1
    (path / "__0_0.distcp").write_bytes(bytes(content))
    assert main(["verify", f"{url}/run/step-000004"]) == 2


def save_and_export(folder: Path, url: str, environment: dict[str, str], is_async: bool) -> Any:
    os.environ.update(environment)
    section = {"dir": f"{url}/run", "export_dir": f"{url}/model", "async_save": is_async}
    model = helpers.sharded(helpers.tiny_llama())
    optimizer = helpers.adamw(model)
    with helpers.checkpoints_of(folder / "local", model, optimizer, **section) as checkpoints:
        checkpoints.save(helpers.progress_at(1))
        helpers.train(model, optimizer, range(2))
        path = checkpoints.save(helpers.progress_at(2), is_over=True)
    for most in (4_000, 12_000):  # several files from every rank; the second export replaces the first
        dcp_to_hf(path, f"{url}/several", dtype="float32", max_shard_bytes=most)
    return helpers.full_state(model, optimizer)


@pytest.mark.parametrize("is_async", [False, slow(True)])
def test_ranks_save_and_export_and_another_mesh_resumes(
    pool: WorkerPool, tmp_path: Path, url: str, account: dict[str, str], is_async: bool
) -> None:
    saved, *_ = pool.run(4, save_and_export, tmp_path, url, account, is_async)
    fsspec.filesystem("s3").invalidate_cache()
    model = helpers.tiny_llama(seed=1)
    optimizer = helpers.adamw(model)
    resumed = helpers.checkpoints_of(tmp_path, model, optimizer, dir=f"{url}/run")
    assert resumed.restore(resumed.resolve("auto") or Path()) == helpers.progress_at(2)
    assert_same(helpers.full_state(model, optimizer), saved)
    assert not (tmp_path / "local" / "hf").exists()
    with on_disk(to_path(f"{url}/model")) as folder:
        assert helpers.exported_step(folder) == 2
        AutoModelForCausalLM.from_pretrained(folder)
    with on_disk(to_path(f"{url}/several")) as folder:
        files = sorted(folder.glob("*.safetensors"))
        assert [file.name for file in files] == [
            f"model-{n + 1:05}-of-{len(files):05}.safetensors" for n in range(len(files))
        ]
        assert len(files) > 1
        loaded = AutoModelForCausalLM.from_pretrained(folder)
    for name, parameter in loaded.named_parameters():
        assert (parameter.detach().numpy() == saved[name]).all(), name


DEMO = ["fsdp2kit.run", "toml/demo_cp2.toml", "train.steps=6", "checkpoint.every=2", "eval.every=0", "mesh.cp=1"]
DEMO += ["train.micro_batch_size=4"]


def command(host: Path, url: str, *overrides: str) -> list[str]:
    """The demo on a host whose disk is a folder of its own."""
    kept = [f"checkpoint.dir={url}/run", f"checkpoint.export_dir={url}/hf"]
    return [*DEMO, f"run.dir={host}/run", *kept, *overrides]


def ended(logs: Path, commands: list[list[str]], environment: dict[str, str]) -> str:
    """What rank 0 said of a run that ended well."""
    ranks, paths = start_hosts(logs, commands, **environment)
    with ending(ranks):
        for rank in ranks:
            rank.join(240)
        said = [path.read_text() for path in paths]
        assert [rank.exitcode for rank in ranks] == [0] * len(ranks), said
    return said[0]


def steps_of(host: Path) -> dict[int, float]:
    lines = map(json.loads, (host / "run" / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines}


def exported(url: str) -> dict[str, Any]:
    fsspec.filesystem("s3").invalidate_cache()
    with on_disk(to_path(f"{url}/hf")) as folder:
        return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("is_async", ["true", slow("false")])
def test_two_hosts_without_a_shared_disk_are_killed_in_a_save_change_places_and_go_on(
    tmp_path: Path, url: str, account: dict[str, str], is_async: str
) -> None:
    a, b, whole = tmp_path / "a", tmp_path / "b", tmp_path / "whole"
    background = f"checkpoint.async_save={is_async}"
    ranks, paths = start_hosts(tmp_path / "killed", [command(host, url, background) for host in (a, b)], **account)
    s3, begun = fsspec.filesystem("s3"), f"{url}/run/step-000004/.begun"
    with ending(ranks):
        deadline = time.monotonic() + 120
        while s3.invalidate_cache() or not s3.exists(begun):
            assert time.monotonic() < deadline, [path.read_text() for path in paths]
            assert all(rank.is_alive() for rank in ranks), [path.read_text() for path in paths]
            time.sleep(0.02)
        for rank in ranks:
            os.kill(rank.pid, signal.SIGKILL)
    s3.invalidate_cache()
    assert not s3.exists(f"{url}/run/step-000004/manifest.json"), "killed in the save"
    said = ended(tmp_path / "resumed", [command(host, url, background) for host in (b, a)], account)
    assert "resumed from step 2; changed since: nothing" in said
    assert f"{b}/run/metrics.jsonl has no steps 1 to 2; " in said
    assert names(f"{url}/run") == ["step-000004", "step-000006"]
    assert main(["verify", f"{url}/run/step-000006"]) == 0
    alone = [*DEMO, f"run.dir={whole}/run", "checkpoint.every=0", f"checkpoint.export_dir={tmp_path}/hf"]
    ended(tmp_path / "whole-logs", [[*alone], [*alone]], account)
    expected = steps_of(whole)
    assert steps_of(b) == {step: expected[step] for step in range(3, 7)}
    assert steps_of(a).items() >= {step: expected[step] for step in (1, 2)}.items()
    helpers.assert_equal(exported(url), load_file(tmp_path / "hf" / "model.safetensors"))
