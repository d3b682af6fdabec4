"""[lora]: adapters that are trained beside the frozen model."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt

from fsdp2kit.config.facts import MeshSizes
from fsdp2kit.config.section import Section
from fsdp2kit.errors import UserError, check_installed


class LoraConfig(Section):
    """Train low-rank adapters (peft's) beside the frozen model; docs/lora.md. Extra `lora`. On if `rank` is given."""

    rank: PositiveInt | None = None
    """Rank of the adapters. Without it there are none, unless `model.adapter` has some."""
    alpha: PositiveInt = 32
    """The adapters' output is multiplied by alpha / rank (rslora: by alpha / √rank)."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of an adapter's inputs that is dropped in training. Its masks depend on the mesh (`preflight.allow`)."""
    target_modules: str | list[str] = "all-linear"
    """Linear layers that get an adapter: "all-linear" (all but the output head), the ends of their names
    (`["q_proj", "v_proj"]`), or a regular expression for the whole name. "experts" in a list: experts in one tensor,
    which "all-linear" leaves out."""
    modules_to_save: list[str] = []
    """Modules that are trained in full and saved with the adapter: `["lm_head", "embed_tokens"]`."""
    rslora: bool = False
    """Scale by alpha / √rank (arXiv:2312.03732), which keeps high ranks from learning slowly."""
    quantize: Literal["none", "nf4"] = "none"
    """"nf4" (QLoRA): the frozen linear layers and experts of decoder layers are stored in
    4.5 bits a parameter, and quantised as they are read. "none": the frozen model is stored in `fsdp.param_dtype`."""
    dora: bool = False
    """Learn the length of each row of a weight apart from its direction (DoRA, arXiv:2402.09353); slower."""

    def check(self, config: Any, sizes: MeshSizes) -> None:
        model = config.model
        if not config.trains_adapter:
            for name in self.changed():
                raise UserError(f"lora.{name}", "is set, but lora.rank is not", "set lora.rank, or leave it out")
            return
        check_installed("peft", where="lora.rank" if model.adapter is None else "model.adapter")
        if model.adapter is not None and (given := sorted(self.model_fields_set - {"dropout", "quantize"})):
            what = "is given beside model.adapter, whose adapter_config.json says it"
            raise UserError(f"lora.{given[0]}", what, "leave one of the two out")
        if model.freeze:
            raise UserError("model.freeze", "is set with adapters, which freeze the whole model", "leave it out")
        if model.weights not in ("pretrained", "random"):
            what = "is a checkpoint: an adapter is kept by itself, and peft could not load the model it belongs to"
            todo = "convert it (fsdp2kit convert) and give the directory as model.path"
            raise UserError("model.weights", what, todo)
        if model.weights == "random" and config.checkpoint.export_hf != "never":
            what = "'random' with adapters, whose export would be of no use without those random weights"
            raise UserError("model.weights", what, "use 'pretrained', or set checkpoint.export_hf = 'never'")
        if config.float8.recipe != "none":
            what = f"{config.float8.recipe!r} with adapters is not supported"
            raise UserError("float8.recipe", what, "set it to 'none'")
