"""Servers that stand in for those that generate, and what every client of one is tried with."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeVar

import torch

from fsdp2kit.rl.engine import Bucket, Entry, Request
from fsdp2kit.rl.server_engine import ServerEngine

WEIGHTS = {"a": torch.linspace(-3, 3, 12).view(3, 4).bfloat16(), "b": torch.arange(5.0)}
OPTIONS: dict[str, Any] = {"dtype": torch.bfloat16, "run": "a1", "is_main": True, "stops": [7], "timeout": 30.0}
"""Of a client, but for its server."""


class StandIn(ThreadingHTTPServer):
    """Keeps what it was sent, and fails where a test tells it to; `respond` answers as one kind of server does."""

    daemon_threads = True
    request_queue_size = 128  # with 5, as it is otherwise, some of 20 connections at once are reset

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.calls: list[str] = []
        self.weights: dict[str, torch.Tensor] = {}
        self.version = "default"
        self.paused = False
        self.faults: dict[str, Callable[[], int]] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

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
        self.wfile.write(text)

    do_GET = do_POST = _answer

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""


ServerT = TypeVar("ServerT", bound=StandIn)


@contextmanager
def serving(server: ServerT) -> Iterator[ServerT]:
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def bucket(**tensors: torch.Tensor) -> Bucket:
    entries, offset = [], 0
    for name, tensor in tensors.items():
        entries.append(Entry(name, tuple(tensor.shape), tensor.dtype, offset))
        offset += tensor.nbytes
    return Bucket(tuple(entries), torch.cat([tensor.flatten().view(torch.uint8) for tensor in tensors.values()]))


def update(engine: ServerEngine, version: int) -> None:
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
