"""A vLLM server (docs/grpo.md). `vllm_plugin` receives its weights there."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from fsdp2kit.errors import RunFailure
from fsdp2kit.rl.checksums import Sum, checksum, is_chosen
from fsdp2kit.rl.engines.engine import Bucket, EngineMemory, Response, SharedMemorySender
from fsdp2kit.rl.engines.server import MEMORY_TAGS, RolloutServer
from fsdp2kit.rl.network_transport import NetworkSender


class VLLMServer(RolloutServer):
    """See `RolloutServer`; pausing clears its cache."""

    kind = "vLLM"
    missing = 'start it with VLLM_SERVER_DEV_MODE=1 and --weight-transfer-config \'{"backend": "fsdp2kit"}\''
    _sums: dict[str, Sum]
    """Checksums of what the update under way has sent."""

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
        [choice] = self._post("v1/completions", is_long=True, **body)["choices"]
        found = choice["token_ids"]
        log_probs = choice["logprobs"]["token_logprobs"]
        return Response(found, log_probs, is_whole=bool(found) and found[-1] in self._stops)

    def _open_update(self) -> None:
        self._leave()
        self._sums = {}
        self._post("pause")  # ends another trainer's requests
        if not self._by_network:
            self._post("init_weight_transfer_engine", init_info={})
        try:
            self._post("start_weight_update")
        except RunFailure:  # an update that failed is still open: close it, and overwrite its weights
            self._post("finish_weight_update", weight_version=self._label(None))
            self._post("start_weight_update")

    def load_weights(self, bucket: Bucket) -> None:
        if not self._is_main:
            return
        if self._by_network:
            with self._linked() as sender:
                entries = [[one.name, one.shape, str(one.dtype)[6:], one.offset] for one in bucket.entries]
                sender.send([bucket.data], {"entries": entries, "nbytes": len(bucket.data)})
        else:
            send = SharedMemorySender(
                lambda path: self._post("update_weights", is_long=True, update_info={"path": path})
            )
            send.load_weights(bucket)
        if self._verifies and self._coming is not None:
            chosen = [pair for pair in bucket.tensors() if is_chosen(pair[0], self._coming)]
            self._sums |= {name: checksum(tensor) for name, tensor in chosen}

    def _new_sender(self) -> NetworkSender:
        return NetworkSender(
            self._host,
            self._patience,
            invite=lambda place, _: self._post("init_weight_transfer_engine", init_info={"place": place}),
            announce=lambda info: self._post("update_weights", is_long=True, update_info=info),
        )

    def _close_update(self, label: str) -> None:
        if self._sender is not None:
            with self._linked() as sender:
                sender.settle()
        if self._sums:
            self._post("update_weights", update_info={"sums": self._sums})
        self._post("finish_weight_update", weight_version=label)
        self._leave()
        self._post("resume")

    def _release(self) -> None:
        self._post("pause")
        with suppress(RunFailure):  # closes an update that failed, if there is one
            self._post("finish_weight_update", weight_version=self._label(None))
        self._post("sleep?level=2")

    def _take(self, what: EngineMemory) -> None:
        self._post(f"wake_up?tags={MEMORY_TAGS[what]}")
