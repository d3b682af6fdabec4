"""Runs within a vLLM server, and loads the weights that a trainer on the same host puts into shared memory.

vLLM finds `register` by this package's entry point ``vllm.general_plugins``; a server is then started with
``--weight-transfer-config '{"backend": "fsdp2kit"}'``. This module runs in the server's environment, and imports
nothing else of this package.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

from dataclasses import dataclass
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

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Nothing to prepare."""

    def start_weight_update(self) -> None:
        """All weights follow, layer by layer."""
        initialize_layerwise_reload(self.model)

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
        for module in self.model.modules():
            # A tied head shares the embedding's weight, but on a CPU it computes with a packed copy, now an old one.
            if isinstance(module, ParallelLMHead):
                module.quant_method.process_weights_after_loading(module)

    def shutdown(self) -> None:
        """Nothing to release."""


def register() -> None:
    """Make the backend known; vLLM calls it in each of its processes, in some more than once."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, SharedMemoryReceiver)
