"""What is known of a model's tensors, written down once: `weights_of(model)`.

`fsdp2kit.model.build.build_model` writes it into the one attribute in which fsdp2kit keeps what it knows of a model.
Whether a model has adapters, ties tensors, keeps some in float32 or is the text part of a checkpoint is asked here.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict

import torch
import transformers
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import PretrainedConfig, PreTrainedModel
from transformers.core_model_loading import build_glob_alternation

from fsdp2kit.weights.adapters import Adapter, base_name
from fsdp2kit.weights.whole import OWN_NAMES, FileNames

_ATTRIBUTE = "_fsdp2kit_weights"


@dataclass(frozen=True)
class ModelSource:
    """Where a model comes from."""

    path: str | None
    """``model.path``; None for a model from a config alone."""
    directory: Path | None
    """The Hugging Face directory on this machine; None for a model from a config alone, or if it was not looked up."""
    config: PretrainedConfig
    """With the user's overrides; transformers writes the dtype and attention of training into a copy."""
    new_tokens: tuple[int, ...] = ()
    """Ids of the tokens that the chat template, or the user, added: their rows begin as the mean of the others."""
    stored_vocab: int = 0
    """Rows of the stored embedding; 0 without new tokens."""
    trains_new: bool = True
    """Whether the rows of new tokens are trained; not in a frozen embedding."""
    has_adapter: bool = False
    """Whether adapters are trained, and exported, in place of the model."""
    whole: PretrainedConfig | None = None
    """The config of the checkpoint, if the model is the text part of it; `directory` has the others' weights."""

    @property
    def dtype(self) -> str:
        """An export's default dtype: the source model's; float32 for adapters, which are small, and for a model from a
        config alone."""
        if self.has_adapter:
            return "float32"
        dtype = getattr(self.config, "dtype", None)
        return str(dtype).removeprefix("torch.") if self.path is not None and dtype is not None else "float32"


class ManifestFields(TypedDict):
    """Fields of `fsdp2kit.checkpoint.manifest.Manifest`."""

    tied: dict[str, str]
    """`find_ties`."""
    kept_in_float32: dict[str, list[str]]
    """Dtype of an export → tensors that stay in float32 in it. Empty for a class of transformers', which an export can
    ask, and with adapters."""


@dataclass(eq=False)
class Weights:
    """What is known of a model's tensors beside their values; see `weights_of`."""

    kind: Any
    """The model's class, before `fully_shard` put its own in front."""
    config: Any
    """The model's own config."""
    source: ModelSource | None = None
    """Where the model comes from; None for one that `build_model` did not make."""
    names: FileNames = OWN_NAMES
    """How the files name what the model has; and, of a text part, what it is a part of."""
    adapter: Adapter | None = None
    """The adapters that were built into it; None where there are none."""
    asleep: dict[str, Any] = field(default_factory=dict)
    """What is on the host and not on the device, by tag; see `fsdp2kit.rl.sleep`."""
    asked_dtypes: dict[torch.dtype, dict[str, torch.dtype]] = field(default_factory=dict)
    """What `dtypes` found."""

    def dtypes(self, dtype: torch.dtype) -> dict[str, torch.dtype]:
        """The dtype that ``from_pretrained(dtype=dtype)`` gives each floating-point parameter and persistent buffer.

        Not every tensor of a bfloat16 model is bfloat16: a class names some that stay in float32
        (``_keep_in_fp32_modules_strict``: biases of routers, for one), and creates others in float32 itself.
        transformers is asked: the model's class is built once more in ``dtype``, on meta. Exports, weight syncs,
        engines and the computation ask here.

        Returns:
            By name in a model without adapters, every tied name included.
        """
        if dtype not in self.asked_dtypes:
            self.asked_dtypes[dtype] = _ask_dtypes(self.kind, self.config, dtype)
        return self.asked_dtypes[dtype]

    def dtype_of(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """The dtype of one tensor, by its name in the model with adapters; an adapter's own has ``dtype``."""
        return self.dtypes(dtype).get(base_name(name) or "", dtype)

    def kept_in_float32(self, dtype: torch.dtype, names: Iterable[str]) -> set[str]:
        """Those of ``names`` (the model's, with adapters) that stay in float32 where others are ``dtype``."""
        if dtype == torch.float32:
            return set()
        wanted = self.dtypes(dtype)
        return {name for name in names if wanted.get(base_name(name) or "") == torch.float32}

    def untold_in_float32(self, names: Iterable[str]) -> dict[str, list[str]]:
        """`ManifestFields.kept_in_float32` of the tensors ``names``."""
        is_asked = not issubclass(self.kind, PreTrainedModel) or hasattr(transformers, self.kind.__name__)
        if self.adapter is not None or is_asked:
            return {}
        narrow = {"bfloat16": torch.bfloat16, "float16": torch.float16}
        return {name: sorted(self.kept_in_float32(dtype, names)) for name, dtype in narrow.items()}


def weights_of(model: nn.Module) -> Weights:
    """What is known of a model's tensors; of one that `build_model` did not make, what its class and modules tell.

    A shallow copy of the model (`fsdp2kit.weights.modules.build_skeleton`) has the model's own.
    """
    found = vars(model).get(_ATTRIBUTE)
    if found is None:
        found = Weights(own_class(model), getattr(model, "config", None))
        vars(model)[_ATTRIBUTE] = found  # by `vars`, since a module types its attributes as tensors
    return found


def manifest_fields(model: nn.Module) -> ManifestFields:
    """What a manifest says of a model's tensors, since an export may not have the model's class."""
    names = model.state_dict()
    return {"tied": find_ties(model), "kept_in_float32": weights_of(model).untold_in_float32(names)}


def source_of(model: nn.Module) -> ModelSource:
    """The source of a model that `build_model` made."""
    source = weights_of(model).source
    assert source is not None, f"this {type(model).__name__} was not made by `build_model`"
    return source


def find_ties(model: nn.Module) -> dict[str, str]:
    """``{alias: canonical name}`` for every parameter that a model has under more than one name now."""
    canonical = {id(parameter): name for name, parameter in model.named_parameters()}
    everything = model.named_parameters(remove_duplicate=False)
    return {name: canonical[id(p)] for name, p in everything if canonical[id(p)] != name}


def own_class(module: nn.Module) -> Any:
    """The module's class before `fully_shard` put its own in front."""
    return next(kind for kind in type(module).__mro__ if not issubclass(kind, FSDPModule))


def _ask_dtypes(kind: Any, config: Any, dtype: torch.dtype) -> dict[str, torch.dtype]:
    with torch.device("meta"):
        built = kind._from_config(copy.deepcopy(config), dtype=dtype, attn_implementation="eager")
    tensors = {name: one for name, one in built.state_dict().items() if one.is_floating_point()}
    found = {name: tensor.dtype for name, tensor in tensors.items()}
    # As transformers matches names when it loads; float16 keeps more of them than bfloat16.
    if plan := built._get_dtype_plan(dtype):
        pattern, globs, _ = build_glob_alternation(list(plan))
        matches = {name: match for name in tensors if (match := pattern.search(name))}
        found |= {name: plan[globs[str(match.lastgroup)]] for name, match in matches.items()}
    return found
