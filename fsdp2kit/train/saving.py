"""When a run was saved last, and what a save takes along; and checkpoints that save nothing."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from fsdp2kit.checkpoint.checkpoints import Checkpoints
from fsdp2kit.config.schema import CheckpointConfig
from fsdp2kit.job import status
from fsdp2kit.job.progress import Progress
from fsdp2kit.train.metrics import Metrics
from fsdp2kit.train.step import Batches


class NoCheckpoints:
    """Same interface as `Checkpoints`; saves nothing. For benchmarks and comparisons."""

    left_an_export = False

    def __enter__(self) -> None: ...
    def __exit__(self, *exception: Any) -> None: ...
    def save(self, progress: Progress, *, is_over: bool) -> None: ...
    def export_resumed(self, progress: Progress, *, is_over: bool) -> None: ...
    def wait_until_staged(self) -> None: ...
    def finish_save(self) -> None: ...

    def has_failed(self) -> bool:
        return False

    def describe_end(self, *, is_over: bool, maximizes: str | None) -> list[str]:
        return []


class Saves:
    """The saves of one call of `fsdp2kit.train.loop.train_loop`.

    Args:
        section: ``[checkpoint]``.
        batches: their state is saved, too.
        metrics: the time of a save is none of training's; the id of the wandb run is saved.
        step: where the run starts; it counts as saved.
    """

    def __init__(
        self,
        checkpoints: Checkpoints | NoCheckpoints,
        section: CheckpointConfig,
        batches: Batches,
        *,
        metrics: Metrics,
        step: int,
    ) -> None:
        self._checkpoints = checkpoints
        self._every_seconds = section.every_seconds
        self._batches = batches
        self._metrics = metrics
        self._saved_step = step
        self._saved_time = time.monotonic()

    def is_time(self) -> bool:
        """Whether ``checkpoint.every``, as a time, has passed since the last save, by this rank's clock."""
        return self._every_seconds is not None and time.monotonic() - self._saved_time >= self._every_seconds

    def save(self, progress: Progress, *, is_over: bool) -> None:
        """Save the run where it stands. Collective."""
        status.begin("saving a checkpoint")
        state = self._batches.state(progress.step)
        position = replace(progress, wandb_id=self._metrics.wandb_id, data=state)
        self._checkpoints.save(position, is_over=is_over)
        self._saved_step = progress.step
        self._saved_time = time.monotonic()
        self._metrics.throughput.restart()

    def save_unless_saved(self, progress: Progress, *, is_over: bool) -> None:
        """`save`, if the run has made a step since the last save. Collective."""
        if self._saved_step != progress.step:
            self.save(progress, is_over=is_over)
