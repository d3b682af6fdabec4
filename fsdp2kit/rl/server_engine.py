"""What rollout engines on a server of vLLM or SGLang have in common. The server is asked over HTTP.

The user starts it with one command, in an environment of its own (docs/grpo.md). A server that restarts has lost its
weights, and another trainer may have sent it others. The server's version therefore names this run, and responses
count only if it had that version before and after them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import numpy as np
import torch

from fsdp2kit.config.rl_schema import RolloutConfig, WeightSyncConfig
from fsdp2kit.errors import RunFailure, UserError
from fsdp2kit.rl.engine import Engine, EngineMemory, GoOn, Request, Response
from fsdp2kit.rl.network_transport import is_here

_RETRIES = 6
"""How often a request that finds no server is sent again: httpx waits 0, 0.5, 1, 2, 4 and 8 seconds before each."""

MEMORY_TAGS: dict[EngineMemory, str] = {"weights": "weights", "cache": "kv_cache"}
"""The servers' names for each kind of memory."""


class ServerEngine(Engine):
    """Generates on a server. Every rank asks for its own responses; rank 0 sends the weights and wakes the server.

    Args:
        dtype: the server's, from its start.
        run: a name of this run, the same on every rank.
        is_main: whether this rank sends the weights.
        stops: tokens that end a response.
        timeout: seconds that a request may take.
        weight_sync: how weights are sent.

    Raises:
        UserError: no server answers, or it cannot get weights where it is.
    """

    kind: str
    """The server's name in messages."""
    missing: str
    """What to do about a server that does not know a route."""
    takes_network = False
    """Whether it can be on another host than rank 0."""
    takes_parts = False  # servers load a fused layer once all its pieces have come

    def __init__(
        self,
        section: RolloutConfig,
        *,
        dtype: torch.dtype,
        run: str,
        is_main: bool,
        stops: Sequence[int],
        timeout: float,
        weight_sync: WeightSyncConfig,
    ) -> None:
        self.dtype = dtype
        self._url, self._at_once, self._sleeps = section.url.rstrip("/"), section.batch_size, section.sleep
        self._run, self._is_main, self._stops, self._timeout = run, is_main, tuple(stops), timeout
        # Connections are not reused: the server drops one after an error.
        transport = httpx.HTTPTransport(retries=_RETRIES, limits=httpx.Limits(max_keepalive_connections=0))
        patience = httpx.Timeout(timeout, connect=10.0)
        try:
            # trust_env=False: the environment's proxy is for other hosts.
            self._client = httpx.Client(base_url=self._url, timeout=patience, transport=transport, trust_env=False)
            self._host, self._verifies = self._client.base_url.host, weight_sync.verify
            self._by_network = is_main and self._crosses_network(weight_sync.transport)
            with self._understood():
                self._name = self._served_model()
        except httpx.InvalidURL as problem:
            todo = "give scheme, host and port, as http://127.0.0.1:8000"
            raise UserError("rollout.url", f"{section.url!r} is no address ({problem})", todo) from None
        except RunFailure as problem:
            raise UserError("rollout.url", str(problem), "start the server first (docs/grpo.md)") from None

    def _crosses_network(self, transport: str) -> bool:
        """Whether weights go by network."""
        crosses = not is_here(self._host) if transport == "auto" else transport == "network"
        if crosses and not self.takes_network:
            what = f"{self._url} is not on rank 0's host, whose memory {self.kind} gets weights through"
            raise UserError("rollout.url", what, f"start {self.kind} on that host, or use vLLM")
        return crosses

    def _served_model(self) -> str:
        """The name of its model."""
        raise NotImplementedError

    def _served_version(self) -> str:
        """The label of the weights that it has."""
        raise NotImplementedError

    def _respond(self, ids: list[int], max_new_tokens: int, seed: int, sampling: dict[str, Any]) -> Response:
        """Ask for one response to a prompt.

        Args:
            seed: of 31 bits.
            sampling: the temperature, and what turns every other rule of sampling off.
        """
        raise NotImplementedError

    def _open_update(self) -> None:
        """Pause the server, and close what an update that failed left open."""
        raise NotImplementedError

    def _close_update(self, label: str) -> None:
        """Resume the server, with weights of this label and an empty cache."""
        raise NotImplementedError

    def _release(self) -> None:
        """Free the server's memory on the device, with its content."""
        raise NotImplementedError

    def describe(self) -> str:
        return f"rollouts: {self.kind} at {self._url}, which serves {self._name!r}"

    def generate(self, requests: Sequence[Request], *, max_new_tokens: int, temperature: float) -> list[Response]:
        """Sample a response to each request."""
        found: dict[int, Response] = {}
        options = {"max_new_tokens": max_new_tokens, "temperature": temperature, "at_once": self._at_once}
        self.converse(requests, lambda at, response: found.update({at: response}), **options)
        return [found[at] for at in range(len(requests))]

    def converse(
        self, requests: Sequence[Request], go_on: GoOn, *, max_new_tokens: int, temperature: float, at_once: int
    ) -> None:
        """See `Engine.converse`; here no conversation waits for another's turn."""
        # A server's defaults may be those of the model's generation_config.json.
        sampling = {"temperature": temperature, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
        sampling |= {"stop_token_ids": list(self._stops), "skip_special_tokens": False}
        failed = threading.Event()

        def hold(at: int, request: Request | None) -> None:
            try:
                while request is not None and not failed.is_set():
                    most = min(request.room or max_new_tokens, max_new_tokens)
                    seed = int(np.random.PCG64(request.seed).random_raw() >> 33)
                    with self._understood():
                        response = self._respond(list(request.ids), most, seed, sampling)
                    request = go_on(at, response)
            except BaseException:
                failed.set()  # the others need not go on
                raise

        self._check_version()
        with ThreadPoolExecutor(at_once) as pool:
            for held in [pool.submit(hold, at, request) for at, request in enumerate(requests)]:
                held.result()
        self._check_version()

    def begin_update(self, version: int) -> None:
        super().begin_update(version)
        if self._is_main:
            if not self._sleeps:  # a run that ended or was killed may have left it asleep
                for what in MEMORY_TAGS:
                    self.wake(what)
            self._open_update()

    def finish_update(self, version: int) -> None:
        if self._is_main:
            self._close_update(self._label(version))
        super().finish_update(version)

    def sleep(self) -> None:
        """See `Engine.sleep`; its weights are lost, and the next update sends all of them."""
        self.version = None
        if self._is_main:
            self._release()

    def _label(self, version: int | None) -> str:
        return f"{self._run}:{version}"

    def _check_version(self) -> None:
        with self._understood():
            found = self._served_version()
        if found != self._label(self.version):
            self.version = None
            raise RunFailure(
                f"{self.kind} server {self._url}: its weights are no longer those it was sent (version {found!r}): it "
                "was restarted, or another trainer uses it; start this run again, which sends its weights first"
            )

    @contextmanager
    def _understood(self) -> Iterator[None]:
        """Turn an answer of an unexpected form into an error that names the server."""
        try:
            yield
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise RunFailure(f"{self.kind} server {self._url}: gave an answer of another form ({error!r})") from error

    def _post(self, route: str, *, optional: bool = False, **body: Any) -> Any:
        return self._ask("POST", f"/{route}", optional=optional, json=body)

    def _ask(self, method: str, path: str, *, optional: bool = False, **options: Any) -> Any:
        """The answer's JSON; None if it is something else.

        Args:
            optional: also None from a server that does not know the route.

        Raises:
            RunFailure: there is no answer in time, or it is an error.
        """
        where = f"{self.kind} server {self._url}"
        try:
            answer = self._client.request(method, path, **options)
        except httpx.ConnectError as error:
            raise RunFailure(f"{where}: does not answer ({error})") from None
        except httpx.TimeoutException:
            raise RunFailure(f"{where}: {path} took more than {self._timeout:g} seconds") from None
        except httpx.HTTPError as error:
            raise RunFailure(f"{where}: broke off in {path} ({error})") from None
        if answer.status_code == 404 and optional:
            return None
        if answer.is_error:
            hint = f"; {self.missing}" if answer.status_code == 404 else ""
            raise RunFailure(f"{where}: {path} failed with {answer.status_code}: {answer.text[:300]}{hint}")
        try:
            return answer.json()
        except ValueError:
            return None
