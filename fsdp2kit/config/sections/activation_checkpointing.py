"""[activation_checkpointing]: which activations are recomputed in backward."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import PositiveInt

from fsdp2kit.config.facts import MeshSizes
from fsdp2kit.config.section import Section
from fsdp2kit.errors import UserError


class ActivationCheckpointingConfig(Section):
    """Which activations are recomputed in backward instead of kept."""

    mode: Literal["none", "full", "selective"] = "none"
    """"full": keep only each decoder layer's input and recompute the rest: about a third more computation.
    "selective": keep the results of attention and of matmuls with weights, about half of all activations, and
    recompute the others, which are cheap."""
    every: PositiveInt = 1
    """Checkpoint every n-th decoder layer."""
    offload: bool = False
    """mode = "full" only: keep the layers' inputs in pinned host memory. No effect on a CPU run."""

    def check(self, config: Any, sizes: MeshSizes) -> None:
        if self.offload and self.mode != "full":
            what = f"with mode = {self.mode!r}, which keeps more than the layers' inputs"
            raise UserError("activation_checkpointing.offload", what, 'set activation_checkpointing.mode = "full"')
        if self.every != 1 and self.mode == "none":
            what = f"{self.every} with mode = 'none', which checkpoints no layer"
            todo = 'leave it out, or set activation_checkpointing.mode = "full" or "selective"'
            raise UserError("activation_checkpointing.every", what, todo)
