"""[optimizer]: how parameters are updated."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat

from fsdp2kit.config.facts import MeshSizes
from fsdp2kit.config.section import Section, untagged
from fsdp2kit.errors import UserError, check_installed

Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimizerConfig(Section):
    """What every optimizer has; docs/optimizers.md compares them."""

    name: str
    """"adamw", "adamw_bf16", "adamw_8bit" or "muon"."""
    lr: NonNegativeFloat = 2e-5
    """Peak learning rate. Muon's updates are scaled to the size of AdamW's, so both use the same one."""
    betas: tuple[Beta, Beta] = Field(default=(0.9, 0.95), strict=False)
    """Decay rates of AdamW's first and second moments."""
    eps: PositiveFloat = 1e-8
    """Added to the denominator."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay; norms and biases (fewer than two dimensions, or named `…bias`) are exempt."""


class AdamWConfig(OptimizerConfig):
    """AdamW; docs/optimizers.md compares optimizers."""

    name: Literal["adamw", "adamw_bf16", "adamw_8bit"] = "adamw"
    """"adamw" (decoupled weight decay, arXiv:1711.05101), "adamw_bf16" (moments in bfloat16; they, and parameters that
    `fsdp.storage_dtype` stores in bfloat16, are rounded stochastically), "adamw_8bit" (torchao's; extra `lowbit`)."""

    def check(self, config: Any, sizes: MeshSizes) -> None:
        fsdp = config.fsdp
        name = self.name
        if name != "adamw_8bit":
            return
        if fsdp.offload != "none":
            what = f"{fsdp.offload!r} with optimizer.name = {name!r}, whose quantised moments stay on the device"
            raise UserError("fsdp.offload", what, "set it to 'none', or optimizer.name = 'adamw_bf16'")
        if fsdp.storage_dtype != "float32":
            what = f"{fsdp.storage_dtype!r} with optimizer.name = {name!r}, which updates float32 parameters"
            raise UserError("fsdp.storage_dtype", what, "leave it out, or set optimizer.name = 'adamw_bf16'")
        check_installed("torchao", where="optimizer.name")


class MuonConfig(OptimizerConfig):
    """Muon for weights of linear layers, AdamW for the others; docs/optimizers.md compares optimizers."""

    name: Literal["muon"]
    """"muon" (torch's, for weights of linear layers; AdamW for the others)."""
    muon_momentum: Beta = 0.95
    """Decay rate of Muon's Nesterov momentum."""

    def check(self, config: Any, sizes: MeshSizes) -> None:
        if config.fsdp.offload == "params":
            what = "'params' with optimizer.name = 'muon', whose matmuls of whole matrices would run on the host"
            raise UserError("fsdp.offload", what, "use 'optimizer' or 'none', or optimizer.name = 'adamw'")


AnyOptimizer = Annotated[AdamWConfig | MuonConfig, Field(discriminator="name"), untagged("name", "adamw")]
"""The optimizer."""
