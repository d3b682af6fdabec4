"""Runs within a vLLM server, and loads the weights that a trainer sends: through shared memory, or by network.

vLLM finds `register` by this package's entry point ``vllm.general_plugins``; a server is then started with
``--weight-transfer-config '{"backend": "fsdp2kit"}'``. This module runs in the server's environment, and imports
only those modules of this package that import nothing else of it.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from safetensors import safe_open
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.logger import init_logger
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from fsdp2kit.rl.checksums import Sum, differing
from fsdp2kit.rl.network_transport import NetworkReceiver, Place

BACKEND = "fsdp2kit"

logger = init_logger(f"vllm.{__name__}")  # vLLM shows the loggers below its own


@dataclass
class InitInfo(WeightTransferInitInfo):
    """How weights come."""

    place: Place | None = None
    """Where to meet the trainer; None: weights come in files."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """A bucket of weights in a file, or by network, or what all of them were."""

    path: str | None = None
    """A safetensors file with Hugging Face names; it is gone after the request (`SharedMemorySender`)."""
    entries: list[list[Any]] = field(default_factory=list)
    """By network: what `NetworkReceiver.receive` takes."""
    nbytes: int = 0
    """By network: size of the bucket."""
    sums: dict[str, Sum] | None = None
    """Checksums of some of the tensors that came; the end of the update compares them."""


class Receiver(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Loads buckets of weights as vLLM's loader takes a checkpoint, on every worker."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._trainer: NetworkReceiver | None = None
        self._is_open = False
        self._sums: dict[str, Sum] = {}
        self._unprepared: dict[Any, Any] = {}
        """While weights come: by layer its experts, without those that vLLM has prepared for its kernel."""

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Join the trainer, if weights come by network."""
        self.shutdown()
        if init_info.place is not None:
            one = self.parallel_config
            ranks = self.parallel_config.world_size
            number = one.data_parallel_index * ranks + one.rank
            count = one.data_parallel_size * ranks
            self._trainer = NetworkReceiver(init_info.place, number=number, count=count, device=self.device)

    def start_weight_update(self) -> None:
        """All weights follow, layer by layer."""
        if self._is_open:  # a bucket failed, and vLLM has not ended that update: its tensors would count for this one
            finalize_layerwise_reload(self.model, self.model_config)
        self._is_open = True
        self._sums = {}
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
        """Load a bucket, or keep the checksums."""
        if update_info.sums is not None:
            self._sums = update_info.sums
        elif update_info.path is not None:
            # The file's mapping keeps tensors alive that vLLM holds until a layer is complete.
            with safe_open(update_info.path, "pt") as file:
                self.model.load_weights((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118
        elif self._trainer is None:
            raise RuntimeError("weights come by network, and no trainer was met")
        else:
            self.model.load_weights(self._trainer.receive(update_info.entries, update_info.nbytes))

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
        self.shutdown()
        self._is_open = False
        sums = self._sums
        self._sums = {}
        self._compare(sums)

    def _compare(self, sums: dict[str, Sum]) -> None:
        """Refuse an update after which the model does not hold what came.

        Raises:
            RuntimeError: it names a tensor.
        """
        wrong, compared = differing(self.model, sums)
        logger.info("fsdp2kit: compared %d of %d checksums", compared, len(sums))
        if wrong:
            more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
            raise RuntimeError(f"fsdp2kit: {wrong[0]}{more} does not hold what was sent")

    def shutdown(self) -> None:
        """Leave the trainer."""
        trainer = self._trainer
        self._trainer = None
        if trainer is not None:
            trainer.close()


def _experts(model: Any) -> Iterator[tuple[Any, Any]]:
    """The layers that hold a mixture's experts, and what computes these."""
    for layer in model.modules():
        kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
        if kernel is not None and hasattr(layer, "w13_weight"):
            yield layer, kernel.fused_experts


def register() -> None:
    """Make the backend known; vLLM calls it in each of its processes, in some more than once."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, Receiver)
