"""What a run has besides its model and its data."""

from __future__ import annotations

from dataclasses import dataclass, field

from fsdp2kit.checkpoint.checkpoints import Checkpoints
from fsdp2kit.config.schema import TrainingConfig
from fsdp2kit.job.mesh import Mesh
from fsdp2kit.job.progress import Progress
from fsdp2kit.parallel.plan import ParallelPlan
from fsdp2kit.planner.estimate import MemoryPlan
from fsdp2kit.train.metrics import Metrics
from fsdp2kit.train.saving import NoCheckpoints


@dataclass
class Run:
    """What a run has besides its model and its data, as a recipe builds it."""

    config: TrainingConfig
    mesh: Mesh
    plan: ParallelPlan
    metrics: Metrics
    progress: Progress = field(default_factory=Progress)
    """Where the run stands, at first where it starts; `train_loop` moves it on."""
    checkpoints: Checkpoints | NoCheckpoints | None = None
    """None: nothing is saved, and signals do not wait for the end of a step."""
    total_steps: int | None = None
    """Steps of the whole run. None: `train.steps`; under `train.epochs` only the data tell."""
    memory: MemoryPlan | None = None
    """What was planned, to be shown beside what was measured."""

    @property
    def last_step(self) -> int:
        """The number of the run's last step, from 1; 0 if it only evaluates.

        Raises:
            ValueError: neither `total_steps` nor the config says it.
        """
        last = self.config.train.steps if self.total_steps is None else self.total_steps
        if last is None:
            raise ValueError("give total_steps: train.epochs does not say how many that is")
        return last

    @property
    def is_over(self) -> bool:
        """Whether the last step is done, or evaluations have not improved for ``eval.patience``."""
        return self.progress.is_over(self.last_step, patience=self.config.eval.patience)
