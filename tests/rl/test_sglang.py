"""SGLang as the engine: the client against a server that fails in many ways, and its payloads by SGLang's own classes.

No real server of SGLang was run: it needs a device.
"""

from __future__ import annotations

import base64
import io
import os
import pickle
import pickletools
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fsdp2kit.config.rl_schema import RolloutConfig
from fsdp2kit.errors import RunFailure, UserError
from fsdp2kit.rl import server_engine
from fsdp2kit.rl.engine import Request
from fsdp2kit.rl.sglang_engine import SGLangEngine, serialize
from tests.reference import full
from tests.rl import servers
from tests.rl.servers import OPTIONS, WEIGHTS, bucket, check_responses, check_weights, update
from tests.workers import FORKS

# What SafeUnpickler of sglang 0.5.23 lets through, of that a payload needs.
ALLOWED = {
    ("sglang.srt.weight_sync.tensor_bucket", "FlattenedTensorMetadata"),
    ("torch", "Size"),
    ("torch", "Tensor"),
    ("torch", "bfloat16"),
    ("torch", "float32"),
    ("torch", "uint8"),
    ("torch.multiprocessing.reductions", "rebuild_storage_filename"),
    ("torch.multiprocessing.reductions", "rebuild_tensor"),
    ("torch.multiprocessing.reductions", "rebuild_typed_storage"),
    ("torch.storage", "TypedStorage"),
    ("torch.storage", "UntypedStorage"),
}


class Unpickler(pickle.Unpickler):
    """As the server's, which knows the one class of its own."""

    def find_class(self, module: str, name: str) -> Any:
        assert (module, name) in ALLOWED
        return SimpleNamespace if module.startswith("sglang") else super().find_class(module, name)


def decode(payload: str) -> dict[str, torch.Tensor]:
    found = Unpickler(io.BytesIO(base64.b64decode(payload, validate=True))).load()
    flat = found["flattened_tensor"]
    assert all(meta.numel == meta.end_idx - meta.start_idx for meta in found["metadata"])
    return {
        meta.name: flat[meta.start_idx : meta.end_idx].view(meta.dtype).reshape(meta.shape).clone()
        for meta in found["metadata"]
    }


class StandIn(servers.StandIn):
    """Answers as the routes of sglang 0.5.23 do."""

    def __init__(self) -> None:
        super().__init__()
        self.is_open, self.tp, self.asleep = False, 2, set[str]()
        self.without: set[str] = set()
        self.finish = "stop"

    def respond(self, route: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if route in self.without:
            return 404, {"detail": "Not Found"}
        if route in ("server_info", "get_server_info"):
            return 200, {"model_path": "policy", "tp_size": self.tp, "dp_size": 1}
        if route in ("model_info", "get_model_info"):
            return 200, {"weight_version": self.version}
        if route in ("pause_generation", "continue_generation"):
            self.paused = route == "pause_generation"
        if route in ("begin_weight_update", "end_weight_update"):
            if self.is_open == (route == "begin_weight_update"):
                return 400, {"success": False, "message": "a weight-update session is already open"}
            self.is_open = not self.is_open
        if route == "update_weights_from_tensor":
            assert body["load_format"] == "flattened_bucket"
            assert self.is_open or "begin_weight_update" in self.without
            assert len(body["serialized_named_tensors"]) == self.tp
            for payload in body["serialized_named_tensors"]:
                self.weights |= decode(payload)
        if route == "update_weight_version":
            self.version = body["new_version"]
        if route in ("release_memory_occupation", "resume_memory_occupation"):
            # As the server's process ends where memory is paused or resumed twice.
            releases, tags = route.startswith("release"), set(body["tags"])
            assert self.paused or not releases or "pause_generation" in self.without
            assert tags <= {"weights", "kv_cache"} - self.asleep if releases else tags <= self.asleep
            self.asleep ^= tags
            self.weights = {} if "weights" in self.asleep else self.weights
        if route == "generate":
            assert not self.paused
            assert not self.asleep
            sampling = body["sampling_params"]
            assert (sampling["top_p"], sampling["top_k"], sampling["repetition_penalty"]) == (1.0, -1, 1.0)
            ids = [*body["input_ids"][:2], sampling["stop_token_ids"][0]]
            meta = {
                "finish_reason": {"type": self.finish},
                "output_token_logprobs": [[-0.5, token, None] for token in ids],
            }
            return 200, {"text": "", "output_ids": ids, "meta_info": meta}
        return 200, {}


@pytest.fixture
def server() -> Iterator[StandIn]:
    with servers.serving(StandIn()) as found:
        yield found


def engine_of(url: str, *, sleeps: bool = False, **options: Any) -> SGLangEngine:
    return SGLangEngine(RolloutConfig(engine="sglang", url=url, sleep=sleeps), **{**OPTIONS, **options})


def ask(engine: SGLangEngine) -> Any:
    return engine.generate([Request([11, 12], (0,))], max_new_tokens=4, temperature=1.0)


NEWER = {"pause_generation", "continue_generation", "begin_weight_update", "end_weight_update"}


@pytest.mark.parametrize("without", [set(), {*NEWER, "server_info", "model_info"}], ids=["0.5.23", "older"])
def test_weights_then_responses(without: set[str], server: StandIn) -> None:
    server.without = without
    engine = engine_of(server.url)
    assert engine.describe() == f"rollouts: SGLang at {server.url}, which serves 'policy'"
    update(engine, 3)
    check_weights(server)
    assert (server.version, server.paused, server.is_open) == ("a1:3", False, False)
    assert "flush_cache" in server.calls
    check_responses(engine)
    server.finish = "length"
    assert not ask(engine)[0].is_whole


def test_only_one_rank_sends(server: StandIn) -> None:
    other = engine_of(server.url, is_main=False)
    update(other, 3)
    assert (other.version, server.calls) == (3, ["server_info"])


@pytest.mark.parametrize(
    "route",
    [
        *("pause_generation", "update_weights_from_tensor"),
        *map(full, ("update_weight_version", "begin_weight_update", "end_weight_update")),
        *map(full, ("flush_cache", "continue_generation")),
    ],
)
def test_an_update_that_breaks_off_is_not_served_and_is_sent_again(route: str, server: StandIn) -> None:
    engine = engine_of(server.url)
    update(engine, 1)
    server.faults[route] = lambda: 500
    with pytest.raises(RunFailure, match=f"SGLang server {server.url}: /{route} failed with 500: .*as asked"):
        update(engine, 2)
    assert engine.version is None
    assert server.paused or route == "pause_generation"
    server.faults.clear()
    update(engine, 2)
    assert (engine.version, server.version, server.paused, server.is_open) == (2, "a1:2", False, False)
    assert ask(engine)


def test_a_server_that_restarts_or_is_written_to_is_noticed_and_sent_everything(server: StandIn) -> None:
    engine = engine_of(server.url)
    update(engine, 1)
    server.version = "default"
    with pytest.raises(RunFailure, match=r"no longer those it was sent .version 'default'.: it was restarted"):
        ask(engine)
    assert "generate" not in server.calls
    update(engine, 1)

    def written() -> int:
        server.version = "b2:9"
        return 200

    server.faults["generate"] = written
    with pytest.raises(RunFailure, match="another trainer uses it"):
        ask(engine)


def test_responses_that_are_aborted_or_make_no_sense_are_not_taken(server: StandIn) -> None:
    engine = engine_of(server.url)
    update(engine, 1)
    server.finish = "abort"
    with pytest.raises(RunFailure, match=r"a response ended with \{'type': 'abort'\}"):
        ask(engine)
    engine._ask = lambda *_, **__: {"weight_version": "a1:1", "meta_info": {}}
    with pytest.raises(RunFailure, match=r"gave an answer of another form .KeyError.'finish_reason'"):
        ask(engine)


def test_sleep_loses_the_weights(server: StandIn) -> None:
    engine = engine_of(server.url, sleeps=True)
    update(engine, 1)
    engine.sleep()
    assert server.asleep == {"weights", "kv_cache"}
    engine.wake("weights")
    assert server.asleep == {"kv_cache"}
    with pytest.raises(RunFailure, match="sync the weights"):
        engine.require(1)
    update(engine, 1)
    assert server.asleep == {"kv_cache"}
    engine.wake("cache")
    assert ask(engine)


@pytest.mark.parametrize("where", ["asleep", full("before the update"), "after the update", full("awake")])
@pytest.mark.parametrize("sleeps", [True, full(False)])
def test_a_run_finds_a_server_as_a_killed_one_left_it(sleeps: bool, where: str, server: StandIn) -> None:
    killed = engine_of(server.url, sleeps=True)
    update(killed, 1)
    killed.sleep()
    if where != "asleep":
        killed.wake("weights")
    if where in ("after the update", "awake"):
        update(killed, 2)
    if where == "awake":
        killed.wake("cache")
        assert ask(killed)
    engine = engine_of(server.url, sleeps=sleeps, run="b2")
    if sleeps:
        engine.sleep()
        engine.wake("weights")
    update(engine, 1)
    if sleeps:
        engine.wake("cache")
    assert ask(engine)


def test_what_is_no_server_of_this_kind(server: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_engine, "_RETRIES", 1)
    with pytest.raises(UserError, match=r"rollout\.url: .* does not answer .*; start the server first"):
        engine_of("http://127.0.0.1:9")
    server.without = {"server_info", "get_server_info"}
    with pytest.raises(UserError, match=r"/get_server_info failed with 404: .*no server of SGLang"):
        engine_of(server.url)


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
