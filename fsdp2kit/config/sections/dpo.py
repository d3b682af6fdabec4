"""[dpo]: the loss of recipe "dpo", which learns from pairs of answers."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat

from fsdp2kit.config.section import Section, untagged


class DPOConfig(Section):
    """What every loss of recipe "dpo" has, which learns from pairs of answers; docs/preferences.md."""

    loss: str
    """"dpo", "ipo", "simpo" or "orpo"."""
    beta: PositiveFloat
    """Strength of the loss."""

    @property
    def needs_reference(self) -> bool:
        """Whether the loss compares with a reference."""
        return self.loss in ("dpo", "ipo")

    @property
    def smoothing(self) -> float:
        """The share of pairs that are taken to be the wrong way round."""
        return 0.0

    @property
    def is_normalised(self) -> bool:
        """Whether an answer counts by the mean of its tokens' log-probabilities, not by their sum."""
        return self.loss != "dpo"

    def identity(self) -> dict[str, str]:
        return {"dpo.loss": self.loss}


class PlainDPOConfig(DPOConfig):
    """DPO, a loss of recipe "dpo"; docs/preferences.md."""

    loss: Literal["dpo"] = "dpo"
    """"dpo" (arXiv:2305.18290) compares with a frozen reference, the model as the run begins."""
    beta: PositiveFloat = 0.1
    """dpo: the larger, the closer the model stays to the reference."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """The share of pairs that are taken to be the wrong way round (conservative DPO)."""

    @property
    def smoothing(self) -> float:
        return self.label_smoothing


class IPOConfig(DPOConfig):
    """IPO or ORPO, losses of recipe "dpo"; docs/preferences.md."""

    loss: Literal["ipo", "orpo"]
    """"ipo" (arXiv:2310.12036) compares with a frozen reference, the model as the run begins; "orpo"
    (arXiv:2403.07691) has none."""
    beta: PositiveFloat = 0.1
    """ipo (its τ): the larger, the closer the model stays to the reference. orpo (its λ): weight of the odds ratio
    beside the likelihood."""


class SimPOConfig(DPOConfig):
    """SimPO, a loss of recipe "dpo"; docs/preferences.md."""

    loss: Literal["simpo"]
    """"simpo" (arXiv:2405.14734) has no reference."""
    beta: PositiveFloat = 2.0
    """simpo: scale of the rewards."""
    gamma: NonNegativeFloat | None = None
    """How far the better answer's reward should be above the other's. Default: half of `beta`."""

    @property
    def margin(self) -> float:
        """`gamma`, or its default."""
        return self.beta / 2 if self.gamma is None else self.gamma


AnyDPO = Annotated[PlainDPOConfig | IPOConfig | SimPOConfig, Field(discriminator="loss"), untagged("loss", "dpo")]
"""The loss of recipe "dpo"."""
