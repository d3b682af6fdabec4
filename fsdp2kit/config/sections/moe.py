"""[moe]: how the experts of a mixture of experts are kept evenly loaded."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat

from fsdp2kit.config.facts import MeshSizes
from fsdp2kit.config.section import Section, untagged
from fsdp2kit.errors import UserError


class MoEConfig(Section):
    """How the experts of a mixture of experts are kept evenly loaded; docs/moe.md."""

    balance: str
    """"none", "aux" or "bias"."""

    def check(self, config: Any, sizes: MeshSizes) -> None:
        if self.balance != "none" and config.compile.enabled:
            what = f"{self.balance!r} with compile.enabled, which was not tried"
            raise UserError("moe.balance", what, "set compile.enabled = false, or moe.balance = 'none'")


class UnbalancedConfig(MoEConfig):
    """Nothing keeps experts evenly loaded; docs/moe.md."""

    balance: Literal["none"] = "none"
    """"none": routers learn from the loss alone."""


class AuxiliaryLossConfig(MoEConfig):
    """A loss keeps experts evenly loaded; docs/moe.md."""

    balance: Literal["aux"]
    """"aux": transformers' load-balancing loss of each row (pack) over its whole length, added to what is minimised.
    The logged `loss` is without it."""
    aux_weight: PositiveFloat = 0.001
    """Weight of that loss beside the loss of a target."""

    def check(self, config: Any, sizes: MeshSizes) -> None:
        super().check(config, sizes)
        if config.engine_needs is not None:
            what = "'aux' with rollouts: packs of rollouts depend on the mesh, and so would the loss of a pack"
            raise UserError("moe.balance", what, "use 'bias' or 'none'")


class RouterBiasConfig(MoEConfig):
    """Biases of the routers keep experts evenly loaded; docs/moe.md."""

    balance: Literal["bias"]
    """"bias" (arXiv:2408.15664, DeepSeek-V3): after each step the bias of an expert that got fewer tokens of the
    global batch than the mean goes up, that of one with more goes down. For models with `e_score_correction_bias`."""
    bias_update_rate: PositiveFloat = 0.001
    """By how much a bias moves in a step (DeepSeek-V3's γ)."""

    def check(self, config: Any, sizes: MeshSizes) -> None:
        super().check(config, sizes)
        if config.trains_adapter:
            what = "'bias' with adapters, whose export does not hold the routers' biases"
            raise UserError("moe.balance", what, "use 'none', or train the whole model")


AnyMoE = Annotated[
    UnbalancedConfig | AuxiliaryLossConfig | RouterBiasConfig,
    Field(discriminator="balance"),
    untagged("balance", "none"),
]
"""How experts are kept evenly loaded."""
