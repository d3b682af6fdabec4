"""SGLang's payloads, read by a process of its own and by SGLang's own classes; the client is in test_servers.py.

No real server of SGLang was run: it needs a device.
"""

from __future__ import annotations

import base64
import os
import pickletools
import subprocess
from pathlib import Path
from typing import Any

import pytest

from fsdp2kit.rl.sglang_server import serialize
from tests.rl.servers import WEIGHTS, bucket, decode
from tests.workers import FORKS


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


CHECK = """
import sys
from sglang.srt.utils import MultiprocessingSerializer
from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket, FlattenedTensorMetadata
found = MultiprocessingSerializer.deserialize(sys.stdin.read())
assert all(type(one) is FlattenedTensorMetadata for one in found["metadata"])
for name, tensor in FlattenedTensorBucket(**found).reconstruct_tensors():
    print(name, tensor.dtype, tensor.tolist())
"""


def test_sglangs_own_classes_read_a_payload() -> None:
    python = os.environ.get("FSDP2KIT_SGLANG_PYTHON")
    if python is None:
        pytest.skip("FSDP2KIT_SGLANG_PYTHON names no python with sglang (see docs/grpo.md)")
    sent = bucket(**WEIGHTS)
    flat = sent.data.clone()
    run = subprocess.run(
        [python, "-c", CHECK], input=serialize(flat, sent), capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stdout.splitlines()[-2:] == [f"{name} {one.dtype} {one.tolist()}" for name, one in WEIGHTS.items()]
