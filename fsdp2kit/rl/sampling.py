"""What makes and scores the rollouts of a run."""

from __future__ import annotations

from dataclasses import dataclass

from fsdp2kit.config.rl_schema import RLConfig
from fsdp2kit.job.mesh import Mesh
from fsdp2kit.rl.generation import Generation
from fsdp2kit.rl.phases import Phases
from fsdp2kit.rl.prompts import Prompts
from fsdp2kit.rl.scoring import Scoring
from fsdp2kit.train.metrics import Metrics


@dataclass(frozen=True)
class Sampling:
    """What a run makes rollouts with, as a recipe builds it; batches, evaluation and state share it."""

    config: RLConfig
    mesh: Mesh
    prompts: Prompts
    generation: Generation
    scoring: Scoring
    phases: Phases
    """Measures what a step does besides training."""
    metrics: Metrics
    """Get samples, and say warnings."""
