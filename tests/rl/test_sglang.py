"""SGLang's payloads, read by a process of its own and by SGLang's own classes; the client is in test_servers.py.

No real server of SGLang was run: it needs a device.
"""

from __future__ import annotations

import base64
import json
import os
import pickletools
import subprocess
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from fsdp2kit.config.sections.weight_sync import WeightSyncConfig
from fsdp2kit.rl.engines.sglang_server import serialize
from tests.rl.helpers.servers import WEIGHTS, SGLangStandIn, bucket, decode, engine_of, serving
from tests.support.workers import FORKS


def _read(connection: Any) -> None:
    for payload in iter(connection.recv, None):
        connection.send({name: tensor.tolist() for name, tensor in decode(payload).items()})


def test_a_process_of_its_own_reads_a_payload_and_nothing_is_left() -> None:
    shared = f"torch_{os.getpid()}_*"
    before = set(Path("/dev/shm").glob(shared))
    ours, theirs = FORKS.Pipe()
    reader = FORKS.Process(target=_read, args=(theirs,), daemon=True)
    reader.start()
    sent = bucket(**WEIGHTS)
    for _ in range(2):
        flat = sent.data.clone()
        for payload in [serialize(flat, sent) for _ in range(2)]:
            ours.send(payload)
            assert ours.recv() == {name: tensor.tolist() for name, tensor in WEIGHTS.items()}
        del flat
    ours.send(None)
    reader.join()
    assert set(Path("/dev/shm").glob(shared)) <= before
    assert not sent.data.is_shared()
    opcodes = pickletools.genops(base64.b64decode(payload))
    assert "sglang.srt.weight_sync.tensor_bucket FlattenedTensorMetadata" in {argument for _, argument, _ in opcodes}


@pytest.fixture(scope="module")
def sglang() -> str:
    python = os.environ.get("FSDP2KIT_SGLANG_PYTHON")
    if python is None:
        pytest.skip("FSDP2KIT_SGLANG_PYTHON names no python with sglang (see docs/dev/checks.md)")
    return python


CHECK = """
import sys
from sglang.srt.utils import MultiprocessingSerializer
from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket, FlattenedTensorMetadata
found = MultiprocessingSerializer.deserialize(sys.stdin.read())
assert all(type(one) is FlattenedTensorMetadata for one in found["metadata"])
for name, tensor in FlattenedTensorBucket(**found).reconstruct_tensors():
    print(name, tensor.dtype, tensor.tolist())
"""


def test_sglangs_own_classes_read_a_payload(sglang: str) -> None:
    sent = bucket(**WEIGHTS)
    flat = sent.data.clone()
    run = subprocess.run(
        [sglang, "-c", CHECK], input=serialize(flat, sent), capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stdout.splitlines()[-2:] == [f"{name} {one.dtype} {one.tolist()}" for name, one in WEIGHTS.items()]


# What a worker of SGLang does with the routes of an update group. The class that has it cannot be imported without a
# device: its methods are read from its file.
WORKER = """
import ast, importlib.util, json, logging, pathlib, sys, types
import torch
from sglang.srt.utils import init_custom_process_group
from sglang.srt.utils.network import NetworkAddress
rank, size, meeting = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
[folder] = importlib.util.find_spec("sglang").submodule_search_locations
file = pathlib.Path(folder, "srt/model_executor/model_runner_components/weight_updater.py")
nodes = ast.walk(ast.parse(file.read_text()))
[found] = [one for one in nodes if isinstance(one, ast.ClassDef) and one.name == "WeightUpdater"]
names = {"init_weights_update_group", "destroy_weights_update_group", "receive_weights_from_distributed"}
found.body = [one for one in found.body if isinstance(one, ast.FunctionDef) and one.name in names]
assert len(found.body) == 3
found.decorator_list = []
values = dict(globals(), logger=logging.getLogger())
exec("from __future__ import annotations\\n" + ast.unparse(found), values)
updater = values["WeightUpdater"]()
updater.tp_rank, updater.device, updater._model_update_group = rank, "cpu", {}
torch.distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size)
print("ready", flush=True)
for line in sys.stdin:
    name, options = json.loads(line)
    result = getattr(updater, name)(**options)
    if isinstance(result, list):
        result = True, {key: [str(one.dtype), one.tolist()] for key, one in result}
    print(json.dumps(result), flush=True)
"""


class ServerWithItsOwnWorkers(SGLangStandIn):
    """The stand-in, with SGLang's own code where weights come by network."""

    def __init__(self, workers: list[subprocess.Popen[str]]) -> None:
        super().__init__()
        self.workers, self.received = workers, list[dict[str, Any]]()

    def act_by_network(self, route: str, body: dict[str, Any]) -> None:
        name = route.replace("update_weights", "receive_weights")
        body.pop("flush_cache", None)  # the routes' own
        for worker in self.workers:
            assert worker.stdin
            worker.stdin.write(json.dumps([name, body]) + "\n")
            worker.stdin.flush()
        answers = [json.loads(worker.stdout.readline()) for worker in self.workers if worker.stdout]
        for success, found in answers:
            if not success:
                raise RuntimeError(found)
        if name.startswith("receive"):
            self.received += [found for _, found in answers]


def test_sglangs_own_workers_receive_weights_by_network(sglang: str, tmp_path: Path) -> None:
    with ExitStack() as stack:
        command = [sglang, "-c", WORKER]
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        workers: list[Any] = []
        for rank in range(2):
            worker = subprocess.Popen([*command, str(rank), "2", str(tmp_path / "meeting")], **pipes)
            workers.append(stack.enter_context(worker))
            stack.callback(worker.kill)
        for worker in workers:
            assert worker.stdout.readline() == "ready\n"
        server = stack.enter_context(serving(ServerWithItsOwnWorkers(workers)))
        engine = engine_of(server, weight_sync=WeightSyncConfig(transport="network"))
        for version in (1, 2):
            server.received = []
            engine.begin_update(version)
            engine.load_weights(bucket(**WEIGHTS))
            engine.finish_update(version)
            sent = {name: [str(one.dtype), one.tolist()] for name, one in WEIGHTS.items()}
            assert server.received == [sent, sent]
            assert server.version == f"a1:{version}"
