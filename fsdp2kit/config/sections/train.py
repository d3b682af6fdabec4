"""[train]: how long a run trains, and in which batches."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from fsdp2kit.config.facts import MeshSizes
from fsdp2kit.config.section import Section
from fsdp2kit.errors import UserError


class TrainConfig(Section):
    """How long and in which batches."""

    steps: NonNegativeInt | None = None
    """Optimizer steps; 0 only evaluates. Give `steps` or `epochs`."""
    epochs: PositiveInt | None = None
    """Passes over the data. Give `steps` or `epochs`."""
    global_batch_size: Annotated[PositiveInt, Field(lt=2**31)] = 8
    """Sequences (with packing: packs) in one optimizer step, over the whole job; it does not depend on the mesh."""
    micro_batch_size: PositiveInt = 1
    """Sequences in one forward pass of one data-parallel rank."""
    max_grad_norm: NonNegativeFloat = 1.0
    """Clip the global gradient norm to this; 0 does not clip."""
    log_every: PositiveInt = 1
    """Log every n steps. The loss is that of the logged step; speeds are averages over the n."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """On a non-finite loss or gradient: stop, naming step and rank, or skip that optimizer step."""
    max_nonfinite: PositiveInt = 5
    """on_nonfinite = "skip" only: stop at this many such steps in a row."""

    def total_steps(self, steps_per_epoch: int) -> int:
        """Optimizer steps of a whole run."""
        return self.steps if self.steps is not None else (self.epochs or 0) * steps_per_epoch

    def check(self, config: Any, sizes: MeshSizes) -> None:
        if (self.steps is None) == (self.epochs is None):
            what = "neither steps nor epochs is given" if self.steps is None else "both steps and epochs are given"
            raise UserError("train", what, "give exactly one of train.steps and train.epochs")
        if "max_nonfinite" in self.changed() and self.on_nonfinite == "stop":
            what = f"{self.max_nonfinite} with train.on_nonfinite = 'stop', which stops at the first"
            raise UserError("train.max_nonfinite", what, "leave it out, or set train.on_nonfinite = 'skip'")
