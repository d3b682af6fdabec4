"""Runs within a vLLM server, and loads the weights that a trainer on the same host puts into shared memory.

vLLM finds `register` by this package's entry point ``vllm.general_plugins``; a server is then started with
``--weight-transfer-config '{"backend": "fsdp2kit"}'``. This module runs in the server's environment, and imports
nothing else of this package.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from safetensors import safe_open
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

BACKEND = "fsdp2kit"


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Nothing: files need no rendezvous."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """A bucket of weights."""

    path: str
    """A safetensors file with Hugging Face names; it is gone after the request (`SharedMemorySender`)."""


class SharedMemoryReceiver(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Loads buckets of weights as vLLM's loader takes a checkpoint, on every worker of the host."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._unprepared: dict[Any, Any] = {}
        """While weights come: by layer its experts, without those that vLLM has prepared for its kernel."""

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Nothing to prepare."""

    def start_weight_update(self) -> None:
        """All weights follow, layer by layer."""
        initialize_layerwise_reload(self.model)
        self._unprepared = dict(_experts(self.model))
        for experts in self._unprepared.values():
            vars(experts)["process_weights_after_loading"] = partial(self._prepare, experts)

    def _prepare(self, experts: Any, layer: Any) -> None:
        """What vLLM calls when a layer's experts have come, if it does."""
        self._unprepared.pop(layer, None)
        type(experts).process_weights_after_loading(experts, layer)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load a bucket; vLLM's own method would also wait for a device."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Load a bucket. The file's mapping keeps tensors alive that vLLM holds until a layer is complete."""
        with safe_open(update_info.path, "pt") as file:
            self.model.load_weights((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118

    def finish_weight_update(self) -> None:
        """All weights have come."""
        finalize_layerwise_reload(self.model, self.model_config)
        for layer, experts in _experts(self.model):
            vars(experts).pop("process_weights_after_loading", None)
            # vLLM 0.32 packs experts for a CPU when they come first, and computes with unpacked ones after an update.
            if self._unprepared.get(layer) is experts:
                experts.process_weights_after_loading(layer)
        for module in self.model.modules():
            # A tied head shares the embedding's weight, but on a CPU it computes with a packed copy, now an old one.
            if isinstance(module, ParallelLMHead):
                module.quant_method.process_weights_after_loading(module)

    def shutdown(self) -> None:
        """Nothing to release."""


def _experts(model: Any) -> Iterator[tuple[Any, Any]]:
    """The layers that hold a mixture's experts, and what computes these."""
    for layer in model.modules():
        kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
        if kernel is not None and hasattr(layer, "w13_weight"):
            yield layer, kernel.fused_experts


def register() -> None:
    """Make the backend known; vLLM calls it in each of its processes, in some more than once."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, SharedMemoryReceiver)
