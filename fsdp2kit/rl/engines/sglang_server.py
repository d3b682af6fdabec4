"""An SGLang server (docs/grpo.md). It gets weights as SGLang's own buckets on rank 0's host, else by broadcast."""

from __future__ import annotations

import base64
import io
import threading
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor

from fsdp2kit.errors import RunFailure, UserError
from fsdp2kit.rl.engines.engine import Bucket, EngineMemory, Response
from fsdp2kit.rl.engines.server import MEMORY_TAGS, RolloutServer
from fsdp2kit.rl.network_transport import NetworkSender, Place, in_background

_ASLEEP = " without "
_STRATEGY = threading.Lock()  # the process has one strategy, and several servers are sent to at the same time
_METADATA_MODULE = "sglang.srt.weight_sync.tensor_bucket"


class SGLangServer(RolloutServer):
    """See `RolloutServer`. Before 0.5.23 a server has no sessions of updates, and fewer routes."""

    kind = "SGLang"
    missing = "it is too old, or no server of SGLang (`fsdp2kit docs grpo`)"
    _group = ""
    """The update group that it may still have."""

    def _served_model(self) -> str:
        info = self._info("server_info")
        self._tp = int(info["tp_size"])
        self._on_cuda = info.get("device", "cuda") == "cuda"
        for size in ("dp_size", "pp_size"):
            if info.get(size, 1) != 1:
                server = f"the {self}"
                todo = f"start it with {size} 1; tp_size may be any"
                what = f"{server} has {size} {info[size]}, and not every copy would get the weights"
                raise UserError("rollout.url", what, todo)
        label = self._served_version() if self._is_main else ""
        self._resting: set[EngineMemory] = {what for what in MEMORY_TAGS if f"{_ASLEEP}{what}" in label}
        return str(info.get("served_model_name") or info["model_path"])

    def _served_version(self) -> str:
        return self._info("model_info")["weight_version"]

    def _info(self, route: str) -> Any:
        return self._ask("GET", f"/{route}", optional=True) or self._ask("GET", f"/get_{route}")

    def _respond(self, ids: list[int], max_new_tokens: int, seed: int, sampling: dict[str, Any]) -> Response:
        sampling = {**sampling, "max_new_tokens": max_new_tokens, "sampling_seed": seed}
        body = {"input_ids": ids, "sampling_params": sampling, "return_logprob": True}
        found = self._post("generate", is_long=True, **body)["meta_info"]
        reason = found["finish_reason"]["type"]
        if reason not in ("stop", "length"):
            raise RunFailure(f"{self}: a response ended with {found['finish_reason']}")
        tokens = found["output_token_logprobs"]
        return Response([token for _, token, *_ in tokens], [one for one, *_ in tokens], is_whole=reason == "stop")

    def _new_sender(self) -> NetworkSender:
        name = self._group = f"fsdp2kit {uuid4().hex}"

        def backend(device: torch.device) -> str:
            return "nccl" if self._on_cuda and device.type == "cuda" else "gloo"

        def invite(place: Place, device: torch.device) -> object:
            where = {"master_address": place["address"], "master_port": place["port"]}
            ranks = {"rank_offset": 1, "world_size": 1 + self._tp}
            body = {**where, **ranks, "group_name": name, "backend": backend(device)}
            return self._post("init_weights_update_group", **body)

        return NetworkSender(
            self._host,
            self._patience,
            invite=invite,
            announce=lambda told: self._post("update_weights_from_distributed", is_long=True, **told),
            join=lambda meeting, device, still: meeting.join_by_name(
                device, still, name=name, workers=self._tp, backend=backend(device)
            ),
        )

    def _destroy_group(self) -> None:
        name = self._group
        self._group = ""
        self._post("destroy_weights_update_group", group_name=name)

    def _open_update(self) -> None:
        if self._group:  # an update failed
            self._leave()
            with suppress(RunFailure):  # it was restarted, and has no group
                self._destroy_group()
        self._post("pause_generation", optional=True, mode="abort")
        # Until the update is complete, the server has a version that no run accepts.
        self._post("update_weight_version", new_version=self._label(None), abort_all_requests=True)
        try:
            self._post("begin_weight_update", optional=True)
        except RunFailure:  # an update that failed is still open: close it, and overwrite its weights
            with suppress(RunFailure):
                self._post("end_weight_update")
            self._post("begin_weight_update")

    def load_weights(self, bucket: Bucket) -> None:
        if not self._is_main:
            return
        if self._by_network:
            names, tensors = zip(*bucket.tensors(), strict=True)
            forms = {"dtypes": [str(one.dtype)[6:] for one in tensors], "shapes": [list(one.shape) for one in tensors]}
            with self._linked() as sender:
                sender.send(tensors, {"names": names, **forms, "group_name": self._group, "flush_cache": False})
            return
        flat = bucket.data.to("cpu", copy=True)  # serialize moves it to shared memory; the bucket's must stay
        # One for each of the server's processes: memory opened twice would be freed too early.
        payloads = [serialize(flat, bucket) for _ in range(self._tp)]
        body = {"serialized_named_tensors": payloads, "load_format": "flattened_bucket", "flush_cache": False}
        self._post("update_weights_from_tensor", is_long=True, **body)

    def _close_update(self, label: str) -> None:
        if self._sender is not None:
            with self._linked() as sender:
                sender.settle()
                # At once on both sides: SGLang answers before NCCL has received all, and its end waits for all ranks.
                answer = in_background(self._destroy_group)
                sender.end()
                answer.result()
            self._sender = None
        self._post("end_weight_update", optional=True)
        self._post("flush_cache")  # refused while a request runs; none runs yet
        self._post("update_weight_version", new_version=label, abort_all_requests=True)
        self._post("continue_generation", optional=True)

    def _release(self) -> None:
        self._post("pause_generation", optional=True, mode="abort")  # releasing memory while it generates kills it
        if tags := [MEMORY_TAGS[what] for what in MEMORY_TAGS if what not in self._resting]:
            self._post("release_memory_occupation", tags=tags)
            self._rest(set(MEMORY_TAGS))

    def _take(self, what: EngineMemory) -> None:
        if what in self._resting:
            self._post("resume_memory_occupation", tags=[MEMORY_TAGS[what]])
            self._rest(self._resting - {what})

    def _rest(self, resting: set[EngineMemory]) -> None:
        self._resting = resting
        self._post("update_weight_version", new_version=self._label(self.version), abort_all_requests=True)

    def _label(self, version: int | None) -> str:
        # The server dies if memory is released or taken twice, and does not say what is asleep: the label says it.
        resting = "".join(f"{_ASLEEP}{what}" for what in sorted(self._resting))
        return super()._label(version) + resting


@dataclass
class FlattenedTensorMetadata:
    """A tensor's place in a bucket, in bytes; SGLang has a class of the same name."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    start_idx: int
    end_idx: int
    numel: int


def serialize(flat: Tensor, bucket: Bucket) -> str:
    """A bucket in the form that SGLang's `MultiprocessingSerializer` reads: base64, with the tensor in shared memory.

    Args:
        flat: a copy of the bucket's data on the CPU. Keep it until one process has read the payload.
    """
    metadata = [
        FlattenedTensorMetadata(
            entry.name, torch.Size(entry.shape), entry.dtype, entry.offset, entry.offset + entry.nbytes, entry.nbytes
        )
        for entry in bucket.entries
    ]
    buffer = io.BytesIO()
    with _STRATEGY:
        strategy = torch.multiprocessing.get_sharing_strategy()
        torch.multiprocessing.set_sharing_strategy("file_system")  # memory with a name, which needs no common parent
        try:
            ForkingPickler(buffer, 3).dump({"flattened_tensor": flat, "metadata": metadata})
        finally:
            torch.multiprocessing.set_sharing_strategy(strategy)
    # Protocol 3 has a line for a class's module and one for its name: put SGLang's module in place of this one.
    ours, theirs = (f"c{module}\nFlattenedTensorMetadata\n".encode() for module in (__name__, _METADATA_MODULE))
    return base64.b64encode(buffer.getvalue().replace(ours, theirs)).decode("ascii")
