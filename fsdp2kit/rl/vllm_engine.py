"""A vLLM server on this host as the rollout engine, over its HTTP routes.

It is started with one command, in an environment of its own (docs/grpo.md). A server that restarts has lost the
weights it was sent, and another trainer may have sent it its own: the version that the server keeps therefore names
this run, and responses are taken only if it had that version before and after them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import torch

from fsdp2kit.config.rl_schema import RolloutConfig
from fsdp2kit.errors import RunFailure, UserError
from fsdp2kit.rl.bucket import Bucket, SharedMemorySender
from fsdp2kit.rl.engine import Engine, Request, Response

_PAUSES = (0.5, 2.0, 8.0)
"""Seconds before a request that found no server is tried again."""


class VLLMEngine(Engine):
    """Generates on a server of vLLM. Every rank asks for its own responses; rank 0 sends the weights.

    Args:
        dtype: the one that it was started with.
        run: names this run, the same on every rank.
        is_main: whether this rank sends the weights.
        stops: tokens that end a response.
        timeout: seconds that a request may take.

    Raises:
        UserError: no server answers.
    """

    takes_parts = False  # vLLM loads a fused layer when all of its pieces have come

    def __init__(
        self,
        section: RolloutConfig,
        *,
        dtype: torch.dtype,
        run: str,
        is_main: bool,
        stops: Sequence[int],
        timeout: float = 600.0,
    ) -> None:
        self.dtype = dtype
        self._url, self._at_once = section.url.rstrip("/"), section.batch_size
        self._run, self._is_main, self._stops, self._timeout = run, is_main, tuple(stops), timeout
        # A connection is not used again: the server drops one on which it answered with an error.
        limits = httpx.Limits(max_keepalive_connections=0)
        self._client = httpx.Client(base_url=self._url, timeout=httpx.Timeout(timeout, connect=10.0), limits=limits)
        self._sender = SharedMemorySender(lambda path: self._update("update_weights", update_info={"path": path}))
        try:
            self._name = str(self._ask("GET", "/v1/models")["data"][0]["id"])
        except RunFailure as problem:
            raise UserError("rollout.url", str(problem), "start the server first (docs/grpo.md)") from None

    def describe(self) -> str:
        return f"rollouts: vLLM at {self._url}, which serves {self._name!r}"

    def generate(self, requests: Sequence[Request], *, max_new_tokens: int, temperature: float) -> list[Response]:
        """Sample a response to each request.

        Raises:
            RunFailure: the server does not answer, or has other weights than it was sent.
        """
        self._check_version()
        with ThreadPoolExecutor(self._at_once) as pool:
            found = list(pool.map(lambda request: self._complete(request, max_new_tokens, temperature), requests))
        self._check_version()
        return found

    def _complete(self, request: Request, max_new_tokens: int, temperature: float) -> Response:
        body = {
            "model": self._name,
            "prompt": list(request.ids),
            "max_tokens": max_new_tokens,
            "temperature": temperature,
            "seed": int(np.random.PCG64(request.seed).random_raw() >> 33),
            "stop_token_ids": list(self._stops),
            "ignore_eos": True,  # the tokens above are all that end a response
            "skip_special_tokens": False,
            "return_token_ids": True,
            "logprobs": 0,
        }
        [choice] = self._ask("POST", "/v1/completions", json=body)["choices"]
        ids, log_probs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
        return Response(ids, log_probs, is_whole=bool(ids) and ids[-1] in self._stops)

    def begin_update(self, version: int) -> None:
        super().begin_update(version)
        if self._is_main:
            self._ask("POST", "/pause")  # what another trainer's requests had begun is over
            self._update("init_weight_transfer_engine", init_info={})
            try:
                self._update("start_weight_update")
            except RunFailure:  # an update that broke off is open still: what came of it is closed and overwritten
                self._update("finish_weight_update", weight_version=self._label(None))
                self._update("start_weight_update")

    def load_weights(self, bucket: Bucket) -> None:
        if self._is_main:
            self._sender.load_weights(bucket)

    def finish_update(self, version: int) -> None:
        if self._is_main:
            self._update("finish_weight_update", weight_version=self._label(version))
            self._ask("POST", "/resume")
        super().finish_update(version)

    def flush_cache(self) -> None:
        """Nothing is left to forget: pausing cleared the cache."""

    def _label(self, version: int | None) -> str:
        return f"{self._run}:{version}"

    def _check_version(self) -> None:
        found = self._ask("GET", "/weight_info")["weight_version"]
        if found != self._label(self.version):
            self.version = None
            raise RunFailure(
                f"vLLM server {self._url}: its weights are no longer those it was sent (version {found!r}): it was "
                "restarted, or another trainer uses it; start this run again, which sends its weights first"
            )

    def _update(self, route: str, **body: Any) -> None:
        self._ask("POST", f"/{route}", json=body or None)

    def _ask(self, method: str, path: str, **options: Any) -> Any:
        """The answer's JSON.

        Raises:
            RunFailure: there is none in time, or it is an error.
        """
        where = f"vLLM server {self._url}"
        for pause in (*_PAUSES, None):
            try:
                answer = self._client.request(method, path, **options)
                break
            except httpx.ConnectError as error:
                if pause is None:
                    raise RunFailure(f"{where}: does not answer ({error})") from None
                time.sleep(pause)
            except httpx.TimeoutException:
                raise RunFailure(f"{where}: {path} took more than {self._timeout:g} seconds") from None
            except httpx.HTTPError as error:
                raise RunFailure(f"{where}: broke off in {path} ({error})") from None
        if answer.is_error:
            hint = ""
            if answer.status_code == 404:
                hint = (
                    '; start it with VLLM_SERVER_DEV_MODE=1 and --weight-transfer-config \'{"backend": "fsdp2kit"}\''
                )
            raise RunFailure(f"{where}: {path} failed with {answer.status_code}: {answer.text[:300]}{hint}")
        return answer.json() if answer.content else None
