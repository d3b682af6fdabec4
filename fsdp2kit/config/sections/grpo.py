"""[grpo]: the policy loss."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat

from fsdp2kit.config.section import Section


class GRPOConfig(Section):
    """The policy loss; docs/grpo.md has the formulae."""

    loss: Literal["grpo", "dr_grpo", "dapo"] = "grpo"
    """Mean over each response's tokens, then over responses ("grpo"); sum ÷ (responses × rollout.max_new_tokens),
    with advantages that are not divided by the group's deviation ("dr_grpo"); mean over all tokens ("dapo")."""
    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """Ratios below 1 − this have no gradient where the advantage is negative."""
    clip_high: PositiveFloat = 0.2
    """Ratios above 1 + this have no gradient where the advantage is positive. DAPO's paper has 0.28."""
    importance_cap: NonNegativeFloat = 2.0
    """Tokens are weighted by trainer's ÷ engine's probability, at most this; 0: they are not. Only with
    `rollout.updates = 1`: otherwise the ratio itself is that to the engine."""
    kl: NonNegativeFloat = 0.0
    """Weight of the KL divergence (k3) from the model that training started from; 0: no reference is kept."""
    truncated: Literal["keep", "mask"] = "keep"
    """Responses without an end: learn from them as from others, or give them no weight in the loss. Their rewards
    count for their group either way."""
    gap_warning: PositiveFloat = 0.1
    """Warn if trainer and engine differ by more than this in a token's log-probability, in the mean over the first
    step on a batch of rollouts."""

    def identity(self) -> dict[str, str]:
        return {"grpo.loss": self.loss}

    @property
    def needs_log_probs(self) -> bool:
        return True

    @property
    def needs_reference(self) -> bool:
        return self.kl > 0
