"""[weight_sync]: how the trained weights reach the rollout engine."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import PositiveInt

from fsdp2kit.config.facts import MeshSizes
from fsdp2kit.config.section import Section
from fsdp2kit.errors import UserError


class WeightSyncConfig(Section):
    """How the trained weights reach the rollout engine."""

    bucket_mib: PositiveInt = 256
    """Weights are gathered and sent in pieces of this size."""
    transport: Literal["auto", "memory", "network"] = "auto"
    """A server only. "memory": through the memory of rank 0's host. "network": by broadcast to a server on any host
    (gloo on a CPU, NCCL on CUDA). "auto": "memory" for a server on rank 0's host."""
    verify: bool = True
    """vLLM only: compare checksums of some tensors that the server holds after each update with what was sent."""

    def check(self, config: Any, sizes: MeshSizes) -> None:
        engine = config.rollout.engine
        if self.transport != "auto" and config.rollout.embedded:
            what = (
                f"{self.transport!r} with rollout.engine = {engine!r}, which has the weights on the trainer's devices"
            )
            raise UserError("weight_sync.transport", what, "leave it out")
        if not self.verify and engine != "vllm":
            what = f"false with rollout.engine = {engine!r}, where nothing is compared"
            raise UserError("weight_sync.verify", what, "leave it out")
