"""How far a run has come: what the loop moves along and a checkpoint keeps beside tensors."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Progress:
    """A run's position. The defaults are those of a fresh run.

    Nothing here depends on the mesh: the next global batch, its random streams and the learning rate are functions
    of the step.
    """

    step: int = 0
    """Optimizer steps taken; also the index of the next global batch."""
    tokens_total: int = 0
    """Supervised tokens seen by the whole job."""
    input_tokens_total: int = 0
    """Tokens seen by the whole job, without padding."""
    wandb_id: str | None = None
    """Weights & Biases run to continue."""
