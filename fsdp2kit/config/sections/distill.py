"""[distill]: the loss of recipe "distill", which learns from a teacher."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat

from fsdp2kit.config.facts import MeshSizes
from fsdp2kit.config.section import InputPath, Section
from fsdp2kit.errors import UserError


class DistillConfig(Section):
    """The loss of recipe "distill", which learns a teacher's distribution; docs/recipes.md."""

    teacher: InputPath | None = None
    """The model to learn from: a Hugging Face model directory or hub id, with the same tokenizer. It is frozen."""
    direction: Literal["forward", "reverse"] = "forward"
    """"forward": KL(teacher ‖ model), which covers all that the teacher may say; "reverse": KL(model ‖ teacher), which
    keeps to what it says most."""
    temperature: PositiveFloat = 1.0
    """T: both distributions are those of logits ÷ T. The divergence is multiplied by T², which keeps the size of its
    gradients."""
    cross_entropy_weight: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Weight w of the plain cross-entropy of the targets; that of the divergence is 1 − w."""

    def check(self, config: Any, sizes: MeshSizes) -> None:
        if self.teacher is None:
            what = "is not given, and there is nothing to learn from"
            raise UserError("distill.teacher", what, "give a Hugging Face model directory or hub id")

    def models(self) -> dict[str, str]:
        return {"distill.teacher": self.teacher} if self.teacher else {}

    def identity(self) -> dict[str, str]:
        return {"distill.direction": self.direction}
