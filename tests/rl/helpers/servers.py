"""Servers that stand in for those that generate, and what every client of one is tried with."""

from __future__ import annotations

import base64
import io
import json
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed import distributed_c10d
from torch.distributed.rendezvous import rendezvous

from fsdp2kit.config.sections.rollout import RolloutConfig
from fsdp2kit.config.sections.weight_sync import WeightSyncConfig
from fsdp2kit.rl.checksums import checksum
from fsdp2kit.rl.engines.engine import Bucket, Entry, Request, Response, VersionedWeights
from fsdp2kit.rl.engines.server import RolloutServer
from fsdp2kit.rl.engines.server_engine import ServerEngine
from fsdp2kit.rl.engines.sglang_server import SGLangServer
from fsdp2kit.rl.engines.vllm_server import VLLMServer
from fsdp2kit.rl.network_transport import LinkError, NetworkReceiver

WEIGHTS = {"a": torch.linspace(-3, 3, 12).view(3, 4).bfloat16(), "b": torch.arange(5.0)}
OPTIONS: dict[str, Any] = {"run": "a1", "is_main": True, "stops": [7], "timeout": 30.0}
OPTIONS["weight_sync"] = WeightSyncConfig()
"""Of a client, but for its server."""


class StandIn(ThreadingHTTPServer):
    """Keeps what it was sent, and fails where a test tells it to; `respond` answers as one kind of server does."""

    client: type[RolloutServer]
    looks: str
    """The route that a client asks first."""
    generates: str

    daemon_threads = True
    request_queue_size = 128  # with 5, as it is otherwise, some of 20 connections at once are reset

    def __init__(self, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.calls: list[str] = []
        self.weights: dict[str, torch.Tensor] = {}
        self.version = "default"
        self.paused, self.asleep = False, set[str]()
        self.faults: dict[str, Callable[[], int]] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    @property
    def is_linked(self) -> bool:
        """Whether it is in a process group with a trainer."""
        raise NotImplementedError

    def answer(self, route: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        self.calls.append(route)
        if route in self.faults and (status := self.faults[route]()) != 200:
            return status, {"error": "as asked"}
        return self.respond(route, body)

    def respond(self, route: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        raise NotImplementedError


class _Handler(BaseHTTPRequestHandler):
    server: StandIn

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        status, found = self.server.answer(self.path.strip("/"), json.loads(body) if body else {})
        text = json.dumps(found).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        with suppress(BrokenPipeError):  # a client that no longer waits
            self.wfile.write(text)

    do_GET = do_POST = _answer

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""


ServerT = TypeVar("ServerT", bound=StandIn)


@contextmanager
def serving(server: ServerT) -> Iterator[ServerT]:
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


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


class VLLMStandIn(StandIn):
    """Answers as vLLM's routes do."""

    client, looks, generates = VLLMServer, "v1/models", "v1/completions"

    def __init__(self, port: int = 0) -> None:
        super().__init__(port)
        self.link: NetworkReceiver | None = None
        self.sums: dict[str, Any] = {}
        self.received: list[int] = []
        self.spoils: Callable[[], object] = lambda: None

    @property
    def is_linked(self) -> bool:
        return self.link is not None

    def leave(self) -> None:
        """As a worker does, or its process's end."""
        link, self.link = self.link, None
        if link is not None:
            link.close()

    def receive(self, info: dict[str, Any]) -> None:
        """As the plugin does with a bucket that comes by network."""
        assert self.link is not None
        self.weights |= dict(self.link.receive(info["entries"], info["nbytes"]))
        self.received.append(info["nbytes"])

    def respond(self, route: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        try:
            return self.act(route, body)
        except (LinkError, ValueError) as error:
            return 500, {"error": str(error)}

    def act(self, route: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if route == "v1/models":
            return 200, {"data": [{"id": "policy"}]}
        if route == "weight_info":
            return 200, {"weight_version": self.version}
        if route == "init_weight_transfer_engine":
            self.leave()
            if place := body["init_info"].get("place"):
                self.link = NetworkReceiver(place, number=0, count=1, device=torch.device("cpu"))
        if route == "update_weights":
            info = body["update_info"]
            if "sums" in info:
                self.sums = info["sums"]
            elif "path" in info:
                self.weights |= load_file(info["path"])
            else:
                self.receive(info)
        if route == "finish_weight_update":
            self.leave()
            self.spoils()
            for name, wanted in self.sums.items():
                if checksum(self.weights[name]) != wanted:
                    raise ValueError(f"fsdp2kit: {name} does not hold what was sent")
            self.version = body["weight_version"]
        if route in ("pause", "resume"):
            self.paused = route == "pause"
        if route == "sleep?level=2":
            self.asleep, self.weights = {"weights", "kv_cache"}, {}
        if route.startswith("wake_up"):
            self.asleep -= {route.partition("=")[2]}
        if route == "v1/completions":
            assert not self.paused
            assert not self.asleep
            ids = [*body["prompt"][:2], body["stop_token_ids"][0]]
            return 200, {"choices": [{"token_ids": ids, "logprobs": {"token_logprobs": [-0.5] * 3}}]}
        return 200, {}


def torch_group(address: str, port: int, rank: int, size: int, name: str, backend: str) -> dist.ProcessGroup:
    """A group beside the default one, made as sglang's `init_custom_process_group` does."""
    limit = timedelta(seconds=60)
    store, _, _ = next(rendezvous(f"tcp://{address}:{port}", rank, size, timeout=limit))
    store.set_timeout(limit)
    store = dist.PrefixStore(name, store)
    found: Any = distributed_c10d._new_process_group_helper(
        size, rank, [], dist.Backend(backend), store, group_name=cast(Any, name), timeout=limit
    )
    distributed_c10d._world.pg_group_ranks[found[0]] = {rank: rank for rank in range(size)}
    return found[0]


class SGLangStandIn(StandIn):
    """Answers as the routes of sglang 0.5.23 do."""

    client, looks, generates = SGLangServer, "server_info", "generate"

    def __init__(self, tp: int = 2) -> None:
        super().__init__()
        self.is_open, self.tp = False, tp
        self.groups: dict[str, Any] = {}
        self.without: set[str] = set()
        self.finish = "stop"

    @property
    def is_linked(self) -> bool:
        return bool(self.groups)

    def respond(self, route: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if route in self.without:
            return 404, {"detail": "Not Found"}
        if route in ("server_info", "get_server_info"):
            return 200, {"model_path": "policy", "tp_size": self.tp, "dp_size": 1, "device": "cpu"}
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
        if route.endswith(("_weights_update_group", "_from_distributed")):
            try:
                self.act_by_network(route, body)
            except (RuntimeError, KeyError) as error:
                return 400, {"success": False, "message": str(error)}
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

    def act_by_network(self, route: str, body: dict[str, Any]) -> None:
        name = body["group_name"]
        if route == "init_weights_update_group":
            address, port, size = body["master_address"], body["master_port"], body["world_size"]
            self.groups[name] = torch_group(address, port, body["rank_offset"], size, name, body["backend"])
        elif route == "destroy_weights_update_group":
            dist.destroy_process_group(self.groups.pop(name))
        else:
            assert self.is_open
            received, works = {}, []
            for key, dtype, shape in zip(body["names"], body["dtypes"], body["shapes"], strict=True):
                received[key] = torch.empty(shape, dtype=getattr(torch, dtype))
                works.append(dist.broadcast(received[key], src=0, group=self.groups[name], async_op=True))
            for work in works:
                work.wait()
            self.weights |= received


def bucket(**tensors: torch.Tensor) -> Bucket:
    entries, offset = [], 0
    for name, tensor in tensors.items():
        entries.append(Entry(name, tuple(tensor.shape), tensor.dtype, offset))
        offset += tensor.nbytes
    return Bucket(tuple(entries), torch.cat([tensor.flatten().view(torch.uint8) for tensor in tensors.values()]))


def update(engine: VersionedWeights, version: int) -> None:
    engine.begin_update(version)
    for name, tensor in WEIGHTS.items():
        engine.load_weights(bucket(**{name: tensor}))
    engine.finish_update(version)


def check_weights(server: StandIn) -> None:
    assert server.weights.keys() == WEIGHTS.keys()
    assert all(torch.equal(server.weights[name], tensor) for name, tensor in WEIGHTS.items())


def check_responses(engine: ServerEngine) -> None:
    """Twenty requests at once; the stand-ins answer with a prompt's first two tokens and the one that ends it."""
    requests = [Request([11 + at, 12], (at,)) for at in range(20)]
    found = engine.generate(requests, max_new_tokens=4, temperature=1.0)
    assert [response.ids for response in found] == [[11 + at, 12, 7] for at in range(20)]
    assert all(response.is_whole and response.log_probs == [-0.5] * 3 for response in found)


def server_of(server: StandIn | str, *, sleeps: bool = False, kind: Any = None, **options: Any) -> Any:
    """A client of a stand-in, or of the server of a kind at a URL."""
    kind, url = (server.client, server.url) if isinstance(server, StandIn) else (kind, server)
    section = RolloutConfig(engine="vllm", url=url, sleep=sleeps)
    return kind(section, url, **{**OPTIONS, **options})


def engine_of(*servers: StandIn, at_once: int = 64, **options: Any) -> ServerEngine:
    """The engine of these stand-ins."""
    clients = [server_of(server, **options) for server in servers]
    return ServerEngine(clients, dtype=torch.bfloat16, stops=OPTIONS["stops"], at_once=at_once)


def hangs() -> int:
    """A fault: no answer while a test runs."""
    time.sleep(600)
    return 500


def ask(engine: ServerEngine) -> list[Response]:
    return engine.generate([Request([11, 12], (0,))], max_new_tokens=4, temperature=1.0)
