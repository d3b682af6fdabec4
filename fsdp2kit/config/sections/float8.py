"""[float8]: linear layers that compute in float8."""

from __future__ import annotations

from typing import Any, Literal

from fsdp2kit.config.facts import MeshSizes
from fsdp2kit.config.section import Section
from fsdp2kit.errors import UserError, check_installed


class Float8Config(Section):
    """Float8 matmuls (torchao's) in the linear layers of the decoder layers; docs/float8.md. Extra `lowbit`."""

    recipe: Literal["none", "tensorwise", "rowwise", "rowwise_with_gw_hp"] = "none"
    """"tensorwise": one scale per tensor, the fastest. "rowwise": one per row, more accurate. "rowwise_with_gw_hp":
    rowwise, with weight gradients in `fsdp.param_dtype`; the only one whose results do not depend on the mesh."""
    exclude: list[str] = []
    """Name patterns of linear layers that are left out, e.g. `["*.down_proj", "model.layers.0.*"]`."""
    emulate: bool = False
    """Round to float8 and multiply in float32, on devices without float8 matmuls: for checking numerics; slower than
    bfloat16. A CPU run always does this."""

    def check(self, config: Any, sizes: MeshSizes) -> None:
        if self.recipe == "none":
            for name in self.changed():
                what = f"is set, but float8.recipe is {self.recipe!r}"
                raise UserError(f"float8.{name}", what, "set float8.recipe, or leave it out")
            return
        check_installed("torchao", where="float8.recipe")
        for key, names in (("class_dtypes", config.fsdp.class_dtypes), ("unit_classes", config.fsdp.unit_classes)):
            if "Linear" in names:
                what = "names Linear, whose modules get another class with float8"
                raise UserError(f"fsdp.{key}", what, "name the class of the module around them, or use float8.exclude")
