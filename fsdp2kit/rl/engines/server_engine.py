"""Servers as the rollout engine: each has the weights of the last update, or is left out until it has taken some."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import torch

from fsdp2kit.console import counted, say
from fsdp2kit.errors import RunFailure
from fsdp2kit.rl.engines.engine import Bucket, EngineMemory, GoOn, Request, Response, RolloutEngine
from fsdp2kit.rl.engines.server import RolloutServer
from fsdp2kit.rl.network_transport import in_background


class ServerEngine(RolloutEngine):
    """Generates on servers. Every rank asks for its own responses; rank 0 sends the weights.

    A server that fails is left out, and the others get its requests. It takes part again once it has taken the
    weights of a later update. When none is left, what the last one raised ends the run.

    Args:
        dtype: the servers', from their start.
        stops: tokens that end a response.
        at_once: requests that this rank asks a server at once.
    """

    takes_parts = False  # servers load a fused layer once all its pieces have come

    def __init__(
        self, servers: Sequence[RolloutServer], *, dtype: torch.dtype, stops: Sequence[int], at_once: int
    ) -> None:
        self.dtype = dtype
        self._stops = tuple(stops)
        self._at_once = at_once
        self._present = list(servers)
        self._back: list[RolloutServer] = []
        self._lost: dict[RolloutServer, int] = {}
        """Those left out, each with the number of updates that pass before it is tried again."""
        self._waits = dict.fromkeys(servers, 0)
        """That number for its next failure: 0, and about twice as many after each failure as it comes back."""
        self._under_way = dict.fromkeys(servers, 0)
        self._homes: dict[tuple[int, ...], RolloutServer] = {}
        self._lock = threading.Lock()

    def describe(self) -> str:
        return "rollouts: " + "; ".join(server.describe() for server in self._present)

    def generate(self, requests: Sequence[Request], *, max_new_tokens: int, temperature: float) -> list[Response]:
        """Sample a response to each request."""
        found: dict[int, Response] = {}
        options = {"max_new_tokens": max_new_tokens, "temperature": temperature, "at_once": self._at_once}
        self.converse(requests, lambda at, response: found.update({at: response}), **options)
        return [found[at] for at in range(len(requests))]

    def converse(
        self, requests: Sequence[Request], go_on: GoOn, *, max_new_tokens: int, temperature: float, at_once: int
    ) -> None:
        """See `RolloutEngine.converse`; here no conversation waits for another's turn, and ``at_once`` is a server's.

        A conversation stays with the server that has it in its cache, as do responses to the same prompt.
        """
        # A server's defaults may be those of the model's generation_config.json.
        sampling = {"temperature": temperature, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
        sampling |= {"stop_token_ids": list(self._stops), "skip_special_tokens": False}
        failed = threading.Event()
        self._homes.clear()

        def hold(at: int, request: Request | None) -> None:
            server: RolloutServer | None = None
            try:
                while request is not None and not failed.is_set():
                    most = min(request.room or max_new_tokens, max_new_tokens)
                    server, response = self._respond(request, server, max_new_tokens=most, sampling=sampling)
                    request = go_on(at, response)
            except BaseException:
                failed.set()  # the others need not go on
                raise

        self._on_each(RolloutServer.check_version)
        with ThreadPoolExecutor(at_once * len(self._present)) as pool:
            for held in [pool.submit(hold, at, request) for at, request in enumerate(requests)]:
                held.result()

    def _respond(
        self, request: Request, server: RolloutServer | None, **options: Any
    ) -> tuple[RolloutServer, Response]:
        """A response, and which server gave it: ``server`` if it still takes part, else one that `_choose` gives."""
        seed = int(np.random.PCG64(request.seed).random_raw() >> 33)
        while True:
            with self._lock:
                if server not in self._present:
                    server = self._choose(tuple(request.ids))
                self._under_way[server] += 1
            try:
                return server, server.respond(list(request.ids), seed=seed, **options)
            except RunFailure as error:
                self._leave_out(server, error)
            finally:
                with self._lock:
                    self._under_way[server] -= 1

    def _choose(self, prompt: tuple[int, ...]) -> RolloutServer:
        """The server that was asked the same prompt; if it has ``at_once`` under way, the one with the fewest."""
        home = self._homes.get(prompt)
        if home not in self._present or self._under_way[home] >= self._at_once:
            home = self._homes[prompt] = min(self._present, key=self._under_way.__getitem__)
        return home

    def begin_update(self, version: int) -> None:
        super().begin_update(version)
        self._lost = {server: left - 1 for server, left in self._lost.items()}
        self._back = [server for server, left in self._lost.items() if left < 0 and server.answers()]
        self._present += self._back
        for server in self._back:
            del self._lost[server]

        def begin(server: RolloutServer) -> None:
            if server in self._back:  # with `rollout.sleep` it was not woken with the others
                server.wake("weights")
            server.begin_update(version)

        self._on_each(begin)

    def load_weights(self, bucket: Bucket) -> None:
        self._on_each(lambda server: server.load_weights(bucket))

    def finish_update(self, version: int) -> None:
        self._on_each(lambda server: server.finish_update(version))
        super().finish_update(version)
        self._waits.update(dict.fromkeys(self._present, 0))
        say(*(f"rollouts: {server} takes part again" for server in self._back if server in self._present))

    def sleep(self) -> None:
        """See `RolloutEngine.sleep`; the weights are lost, and the next update sends all of them."""
        self.version = None
        self._on_each(RolloutServer.sleep)
        for server in self._lost:  # it may have memory of a device that the trainer needs
            with suppress(RunFailure):
                if server.answers():
                    server.sleep()

    def wake(self, what: EngineMemory) -> None:
        self._on_each(lambda server: server.wake(what))

    def _on_each(self, work: Callable[[RolloutServer], object]) -> None:
        """Have all servers that take part do something at the same time, and leave out those that fail."""

        def attempt(server: RolloutServer) -> RunFailure | None:
            try:
                work(server)
            except RunFailure as error:
                return error
            return None

        first, *others = [*self._present]
        answers = [in_background(partial(attempt, server)) for server in others]
        errors = [attempt(first), *(answer.result() for answer in answers)]
        for server, error in zip([first, *others], errors, strict=True):
            if error is not None:
                self._leave_out(server, error)

    def _leave_out(self, server: RolloutServer, error: RunFailure) -> None:
        """Ask a server nothing more until it has taken weights again; raise ``error`` if no other one is left."""
        with self._lock:
            if server not in self._present:  # another thread was first
                return
            if len(self._present) == 1:
                self.version = None
                raise error
            self._present.remove(server)
            self._lost[server] = self._waits[server]
            self._waits[server] = 2 * self._waits[server] + 1
            others = counted(len(self._present), "other")
        say(f"warning: rollouts: {error}; left out until it takes weights again; its requests go to {others}")
