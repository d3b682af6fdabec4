"""A server of vLLM or SGLang that samples responses, as `ServerEngine` asks it over HTTP.

The user starts it with one command, in an environment of its own (docs/grpo.md). A server that restarts has lost its
weights, and another trainer may have sent it others. The label of the server's weights therefore names this run, and a
response counts only if the server had this label before and after it.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import httpx

from fsdp2kit.config.rl_schema import RolloutConfig, WeightSyncConfig
from fsdp2kit.errors import RunFailure, UserError
from fsdp2kit.files.redaction import without_secrets
from fsdp2kit.job import stop
from fsdp2kit.job.stop import Stopped
from fsdp2kit.rl.engine import EngineMemory, Response, VersionedWeights
from fsdp2kit.rl.network_transport import LinkError, NetworkSender, is_here

_RETRIES = 6
"""How often a request that finds no server is sent again: httpx waits 0, 0.5, 1, 2, 4 and 8 seconds before each."""
_QUICKLY = 5.0
"""Seconds that a server which was lost has to answer."""
# Shares of `run.timeout_minutes`, the limit of a collective, in which the other ranks wait meanwhile.
_USUAL, _LONG = 0.3, 0.6

MEMORY_TAGS: dict[EngineMemory, str] = {"weights": "weights", "cache": "kv_cache"}
"""The servers' names for each kind of memory."""


class Server(VersionedWeights):
    """One server. Every rank asks it for responses; rank 0 alone sends the weights and wakes it.

    Args:
        url: where it listens.
        run: a name of this run, the same on every rank.
        is_main: whether this rank sends the weights.
        stops: tokens that end a response.
        timeout: `run.timeout_minutes` in seconds. A response or a bucket may take 0.6 of it, another
            request 0.3.
        weight_sync: how weights are sent.

    Raises:
        UserError: no server answers, or it cannot get weights where it is.
    """

    kind: str
    """The server's name in messages."""
    missing: str
    """What to do about a server that does not know a route."""
    _sender: NetworkSender | None = None
    """While an update goes by network."""

    def __init__(
        self,
        section: RolloutConfig,
        url: str,
        *,
        run: str,
        is_main: bool,
        stops: Sequence[int],
        timeout: float,
        weight_sync: WeightSyncConfig,
    ) -> None:
        self._url, self._sleeps = url.rstrip("/"), section.sleep
        self._shown = without_secrets(self._url)
        self._run, self._is_main, self._stops, self._timeout = run, is_main, tuple(stops), timeout
        self._patience = _USUAL * timeout
        self._sockets, self._lock = set[socket.socket](), threading.Lock()
        stop.when_asked(self._break_off)
        try:
            self._client = self._connect(self._patience, retries=_RETRIES)
            self._host, self._verifies = self._client.base_url.host, weight_sync.verify
            way = weight_sync.transport
            self._by_network = is_main and (not is_here(self._host) if way == "auto" else way == "network")
            with self._understood():
                self._name = self._served_model()
        except httpx.InvalidURL as problem:
            todo = "give scheme, host and port, as http://127.0.0.1:8000"
            raise UserError("rollout.url", without_secrets(f"{url!r} is no address ({problem})"), todo) from None
        except RunFailure as problem:
            raise UserError("rollout.url", str(problem), "start the server first (`fsdp2kit docs grpo`)") from None

    def _connect(self, timeout: float, *, retries: int) -> httpx.Client:
        # Connections are not reused: the server drops one after an error.
        transport = httpx.HTTPTransport(retries=retries, limits=httpx.Limits(max_keepalive_connections=0))
        patience = httpx.Timeout(timeout, connect=min(timeout, 10.0))
        # trust_env=False: the environment's proxy is for other hosts.
        return httpx.Client(base_url=self._url, timeout=patience, transport=transport, trust_env=False)

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

    def _new_sender(self) -> NetworkSender:
        """The way to the server's workers by network, for one update.

        Its waits, and two of them one after the other, are shorter than the other ranks' in their collective.
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

    def _take(self, what: EngineMemory) -> None:
        """Take memory on the device again."""
        raise NotImplementedError

    def __str__(self) -> str:
        return f"{self.kind} server {self._shown}"

    def describe(self) -> str:
        """For the start of a run."""
        return f"{self.kind} at {self._shown}, which serves {self._name!r}"

    def answers(self) -> bool:
        """Whether it is there again; asked quickly."""
        usual = self._client
        try:
            with self._connect(_QUICKLY, retries=0) as self._client, self._understood():
                self._ask("GET", "/health")
                self._name = self._served_model()
        except (RunFailure, UserError):  # a UserError: it came back as one that could not be used at the start
            return False
        finally:
            self._client = usual
        return True

    def respond(self, ids: list[int], *, max_new_tokens: int, seed: int, sampling: dict[str, Any]) -> Response:
        """A response to a prompt, by the weights of the last update.

        Args:
            seed: of 31 bits.
            sampling: the temperature, and what turns every other rule of sampling off.

        Raises:
            RunFailure: there is none in time, or its weights are not those that it was sent.
        """
        with self._understood():
            found = self._respond(ids, max_new_tokens, seed, sampling)
        self.check_version()
        return found

    def check_version(self) -> None:
        """Raise a RunFailure if its weights are not those that it was sent."""
        with self._understood():
            found = self._served_version()
        if found != self._label(self.version):
            self.version = None
            why = "it was restarted, or another trainer uses it"
            raise RunFailure(f"{self}: its weights are no longer those it was sent (version {found!r}): {why}")

    def begin_update(self, version: int) -> None:
        super().begin_update(version)
        if self._is_main:
            if not self._sleeps:  # a run that ended or was killed may have left it asleep
                for what in MEMORY_TAGS:
                    self._take(what)
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

    def wake(self, what: EngineMemory) -> None:
        """See `Engine.wake`."""
        if self._is_main:
            self._take(what)

    def _label(self, version: int | None) -> str:
        return f"{self._run}:{version}"

    @contextmanager
    def _linked(self) -> Iterator[NetworkSender]:
        """The way to the server's workers, for as long as it holds."""
        self._sender = self._sender or self._new_sender()
        try:
            yield self._sender
        except LinkError as error:
            self._leave()
            raise RunFailure(f"{self}: the way of the weights to it broke ({error})") from None
        except BaseException:
            self._leave()
            raise

    def _leave(self) -> None:
        sender, self._sender = self._sender, None
        if sender is not None:
            sender.close()

    @contextmanager
    def _understood(self) -> Iterator[None]:
        """Turn an answer of an unexpected form into an error that names the server."""
        try:
            yield
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise RunFailure(f"{self}: gave an answer of another form ({error!r})") from error

    def _no_answer(self, error: httpx.HTTPError, path: str, patience: float | None) -> RunFailure:
        if isinstance(error, httpx.ConnectError):
            return RunFailure(f"{self}: does not answer ({error})")
        if isinstance(error, httpx.TimeoutException):
            return RunFailure(f"{self}: {path} took more than {patience:g} seconds")
        return RunFailure(f"{self}: broke off in {path} ({error})")

    def _note_socket(self, event: str, info: dict[str, Any]) -> None:
        """Called by httpx with what a request goes through; keep its socket, for `_break_off`."""
        # TLS takes the socket over.
        if event in ("connection.connect_tcp.complete", "connection.start_tls.complete"):
            with self._lock:
                self._sockets = {one for one in self._sockets if one.fileno() >= 0}  # others are closed
                self._sockets.add(info["return_value"].get_extra_info("socket"))
            if stop.requested():
                self._break_off()

    def _break_off(self) -> None:
        """End the requests that take long, from another thread: shut their sockets down."""
        with self._lock:
            for one in self._sockets:
                with suppress(OSError):  # closed by now
                    one.shutdown(socket.SHUT_RDWR)

    def _post(self, route: str, *, optional: bool = False, is_long: bool = False, **body: Any) -> Any:
        return self._ask("POST", f"/{route}", optional=optional, is_long=is_long, json=body)

    def _ask(self, method: str, path: str, *, optional: bool = False, is_long: bool = False, **options: Any) -> Any:
        """The answer's JSON; None if it is something else.

        Args:
            optional: also None from a server that does not know the route.
            is_long: it samples a response or loads a bucket of weights.

        Raises:
            RunFailure: there is no answer in time, or it is an error.
            Stopped: it is long, and the run is asked to stop. The server notices that nobody waits for it.
        """
        if is_long:
            stop.check()
            options["extensions"] = {"trace": self._note_socket}
        patience = _LONG * self._timeout if is_long else self._client.timeout.read
        limits = httpx.Timeout(patience, connect=self._client.timeout.connect)
        try:
            answer = self._client.request(method, path, timeout=limits, **options)
        except httpx.HTTPError as error:
            if is_long and stop.requested():
                raise Stopped(f"{self}: {path}") from error
            raise self._no_answer(error, path, patience) from None
        if answer.status_code == 404 and optional:
            return None
        if answer.is_error:
            hint = f"; {self.missing}" if answer.status_code == 404 else ""
            raise RunFailure(f"{self}: {path} failed with {answer.status_code}: {answer.text[:300]}{hint}")
        try:
            return answer.json()
        except ValueError:
            return None
