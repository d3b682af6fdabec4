"""A vLLM server on this host as the rollout engine (docs/grpo.md). `vllm_plugin` receives its weights there."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from fsdp2kit.errors import RunFailure
from fsdp2kit.rl.engine import Bucket, EngineMemory, Response, SharedMemorySender
from fsdp2kit.rl.server_engine import MEMORY_TAGS, ServerEngine


class VLLMEngine(ServerEngine):
    """See `ServerEngine`; pausing clears the server's cache."""

    kind = "vLLM"
    missing = 'start it with VLLM_SERVER_DEV_MODE=1 and --weight-transfer-config \'{"backend": "fsdp2kit"}\''

    def _served_model(self) -> str:
        return str(self._ask("GET", "/v1/models")["data"][0]["id"])

    def _served_version(self) -> str:
        return self._ask("GET", "/weight_info")["weight_version"]

    def _respond(self, ids: list[int], max_new_tokens: int, seed: int, sampling: dict[str, Any]) -> Response:
        body = {
            "model": self._name,
            "prompt": ids,
            "max_tokens": max_new_tokens,
            "seed": seed,
            "ignore_eos": True,  # the given tokens are all that end a response
            "return_token_ids": True,
            "logprobs": 0,
            **sampling,
        }
        [choice] = self._post("v1/completions", **body)["choices"]
        found, log_probs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
        return Response(found, log_probs, is_whole=bool(found) and found[-1] in self._stops)

    def _open_update(self) -> None:
        self._post("pause")  # ends another trainer's requests
        self._post("init_weight_transfer_engine", init_info={})
        try:
            self._post("start_weight_update")
        except RunFailure:  # an update that failed is still open: close it, and overwrite its weights
            self._post("finish_weight_update", weight_version=self._label(None))
            self._post("start_weight_update")

    def load_weights(self, bucket: Bucket) -> None:
        if self._is_main:
            send = SharedMemorySender(lambda path: self._post("update_weights", update_info={"path": path}))
            send.load_weights(bucket)

    def _close_update(self, label: str) -> None:
        self._post("finish_weight_update", weight_version=label)
        self._post("resume")

    def _release(self) -> None:
        self._post("pause")
        with suppress(RunFailure):  # closes an update that failed, if there is one
            self._post("finish_weight_update", weight_version=self._label(None))
        self._post("sleep?level=2")

    def wake(self, what: EngineMemory) -> None:
        if self._is_main:
            self._post(f"wake_up?tags={MEMORY_TAGS[what]}")
