"""Plain facts: what sections are told of the mesh, and what a recipe's sections tell of their runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class MeshSizes:
    """Sizes of the device mesh; dp_replicate × dp_shard × cp is the world size."""

    dp_replicate: int
    dp_shard: int
    cp: int
    ep: int = 1
    """Ranks, among dp_shard × cp, over which experts are partitioned: no factor of the world size."""

    @property
    def dp(self) -> int:
        """Data-parallel ranks; each reads different sequences."""
        return self.dp_replicate * self.dp_shard

    def __str__(self) -> str:
        experts = f", ep {self.ep}" if self.ep > 1 else ""
        return f"mesh: dp_replicate {self.dp_replicate} × dp_shard {self.dp_shard} × cp {self.cp}{experts}"

    @property
    def world_size(self) -> int:
        return self.dp * self.cp


@dataclass(frozen=True)
class EngineNeeds:
    """What generates responses between steps. The planner turns this into bytes."""

    embedded: bool
    """Whether it runs on the trainer's devices; a server has its own."""
    dtype: str
    """The dtype of its weights."""
    tp: int
    """Neighbouring ranks that share a copy of the model."""
    batch_size: int
    """Most responses that a copy generates at once."""
    updates: int
    """Optimizer steps on each batch of responses."""
    longest_prompt: int
    """Most tokens that it reads before it samples."""
    sleeps: bool
    """Whether engine and trainer take turns with the device's memory."""
    bucket_bytes: int
    """Weights are sent in pieces of this size."""


@dataclass(frozen=True)
class Needs:
    """What a recipe's section adds to a run's memory."""

    log_probs: bool = False
    """Whether the loss is made of tokens' log-probabilities, whose backward computes the logits again."""
    reference: bool = False
    """Whether a frozen copy of the model is kept; beside new adapters that is the model without them."""
    engine: EngineNeeds | None = None
    beside: Mapping[str, int] = field(default_factory=dict)
    """Bytes of what else is on each rank's device throughout, by what it is for."""
    savings: Mapping[str, Any] = field(default_factory=dict)
    """Values of TOML keys of the section that would save memory without changing results."""

    def __or__(self, other: Needs) -> Needs:
        return Needs(
            log_probs=self.log_probs or other.log_probs,
            reference=self.reference or other.reference,
            engine=self.engine or other.engine,
            beside={**self.beside, **other.beside},
            savings={**self.savings, **other.savings},
        )
