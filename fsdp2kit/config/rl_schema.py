"""The sections of a recipe that learns from rewards: those of every recipe, and its own."""

from __future__ import annotations

from typing import Any

from pydantic import model_validator

from fsdp2kit.config.schema import TrainingConfig
from fsdp2kit.config.sections.data import PromptDataConfig
from fsdp2kit.config.sections.grpo import GRPOConfig
from fsdp2kit.config.sections.reward import RewardConfig
from fsdp2kit.config.sections.rollout import RolloutConfig
from fsdp2kit.config.sections.weight_sync import WeightSyncConfig


class RLConfig(TrainingConfig):
    """The sections of a recipe that learns from rewards."""

    data: PromptDataConfig = PromptDataConfig()
    rollout: RolloutConfig = RolloutConfig()
    weight_sync: WeightSyncConfig = WeightSyncConfig()
    grpo: GRPOConfig = GRPOConfig()
    reward: list[RewardConfig] = []
    """At least one, or `rollout.environment`, whose rewards are added."""

    @model_validator(mode="before")
    @classmethod
    def _read_rows(cls, values: Any) -> Any:
        """With an environment, rows are what it reads."""
        if not isinstance(values, dict):  # a config that was checked before
            return values
        rollout, data = (values.get(name, {}) for name in ("rollout", "data"))
        if isinstance(rollout, dict) and rollout.get("environment") and isinstance(data, dict):
            return {**values, "data": {"format": "rows", **data}}
        return values

    @property
    def engine_dtype(self) -> str:
        """Dtype of the engine's weights."""
        return self.rollout.dtype or self.fsdp.param_dtype
