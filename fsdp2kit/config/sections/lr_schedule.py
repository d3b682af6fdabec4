"""[lr_schedule]: the learning rate over the steps."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from fsdp2kit.config.facts import MeshSizes
from fsdp2kit.config.section import Section, untagged
from fsdp2kit.errors import UserError


class LRScheduleConfig(Section):
    """What every learning-rate schedule has; they are transformers' own."""

    name: str
    """"constant", "linear", "cosine" or "wsd"."""
    warmup_steps: NonNegativeInt = 0
    """Steps of linear warm-up, fewer than the run has; the first step has lr = 0 (under "wsd" min_lr_ratio · lr)."""
    warmup_ratio: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """The warm-up as a share of the run's steps, instead of `warmup_steps`."""

    def warmup(self, total_steps: int) -> int:
        """Steps of the warm-up of a run of ``total_steps``; at least one step follows it, or the run is refused."""
        steps = self.warmup_steps
        ratio = self.warmup_ratio
        if steps and ratio:
            what = f"{steps} beside lr_schedule.warmup_ratio = {ratio}"
            raise UserError("lr_schedule.warmup_steps", what, "leave one of them out")
        if ratio:
            return min(math.ceil(ratio * total_steps), max(0, total_steps - 1))
        if steps >= total_steps > 0:
            what = f"{steps}, but the whole run has {total_steps} steps, so the rate would never be lr"
            todo = "use fewer, or a share of the run: lr_schedule.warmup_ratio = 0.03"
            raise UserError("lr_schedule.warmup_steps", what, todo)
        return steps

    def check(self, config: Any, sizes: MeshSizes) -> None:
        self.warmup(config.train.steps or 0)  # the data tell the steps of epochs


class PlainScheduleConfig(LRScheduleConfig):
    """The learning rate over the steps, constant or linear; transformers' schedules."""

    name: Literal["constant", "linear"]
    """"constant" after the warm-up, or "linear" to 0."""


class CosineScheduleConfig(LRScheduleConfig):
    """The learning rate over the steps, half a cosine; transformers' schedule."""

    name: Literal["cosine"] = "cosine"
    """"cosine": half a cosine after the warm-up."""
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Final learning rate ÷ peak."""


class WSDScheduleConfig(LRScheduleConfig):
    """The learning rate over the steps: warm-up, stable, decay; transformers' schedule."""

    name: Literal["wsd"]
    """"wsd": warm-up, stable, decay along half a cosine."""
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Final learning rate ÷ peak."""
    decay_steps: PositiveInt | None = None
    """Steps of the final decay. Default: a tenth of the run, or what the warm-up leaves of it."""

    def warmup(self, total_steps: int) -> int:
        steps = super().warmup(total_steps)
        if total_steps and steps + (self.decay_steps or 0) > total_steps:
            what = f"{self.decay_steps} after {steps} steps of warm-up, but the whole run has {total_steps} steps"
            raise UserError("lr_schedule.decay_steps", what, "make one of them shorter")
        return steps


AnySchedule = Annotated[
    PlainScheduleConfig | CosineScheduleConfig | WSDScheduleConfig,
    Field(discriminator="name"),
    untagged("name", "cosine"),
]
"""The learning-rate schedule."""
