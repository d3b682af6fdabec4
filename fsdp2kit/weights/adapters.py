"""Adapters as stored tensors: their names in modules and in peft's files, what a run may not change, and merging.

peft decides what an adapter is and computes; `fsdp2kit.model.adapters` builds it into a model.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fsdp2kit.errors import UserError
from fsdp2kit.weights.whole import Whole

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
ADAPTER = "default"
"""peft's name for the one adapter of a model; it stands in the names of modules, and not in an adapter's file."""
_PATTERNS = ("rank_pattern", "alpha_pattern")  # fields of peft's config that map names of modules to values

_OWN = re.compile(rf"\.lora_\w+\.{ADAPTER}(?=\.|$)")
_AROUND = re.compile(rf"\.(base_layer|original_module|modules_to_save\.{ADAPTER})(?=\.)")


def base_name(name: str) -> str | None:
    """A tensor's name in the model without adapters; None for an adapter's own tensor.

    A module that peft trains whole is there twice; both copies' tensors have the same name here.
    """
    return None if _OWN.search(name) else _AROUND.sub("", name)


def is_of_adapter(name: str) -> bool:
    """Whether it names an adapter's own tensor, or one of a module that is trained whole beside it."""
    return _OWN.search(name) is not None or f".modules_to_save.{ADAPTER}." in name


def adapter_file_name(name: str, whole: Whole | None = None) -> str:
    """A trained tensor's name in peft's ``adapter_model.safetensors``.

    Args:
        whole: of a model that is a text part, whose tensors are named as in it.
    """
    inner = base_name(name) or _OWN.sub(lambda match: match[0].removesuffix(f".{ADAPTER}"), name)
    if whole is not None:
        inner = whole.outer(inner) or inner
    return f"base_model.model.{inner}".replace(".lora_magnitude_vector.weight", ".lora_magnitude_vector")


@dataclass(frozen=True)
class Adapter:
    """The adapters of a model; see `fsdp2kit.weights.record.Weights.adapter`."""

    config: Any
    """peft's ``LoraConfig``."""
    layers: tuple[str, ...]
    """Names of the linear layers that have an adapter, and of peft's wrappers around experts."""
    directory: Path | None
    """The directory of the adapter that is trained further; None: adapters start from peft's initialisation."""
    quantize: str = "none"
    """How the frozen model is stored: ``lora.quantize``."""
    experts: tuple[str, ...] = ()
    """Names of the modules of experts that have adapters."""
    expert_leaves: tuple[str, ...] = ()
    """The names by which the adapter's file has one expert's layers; () if it has all experts in one tensor."""
    whole: Whole | None = None
    """What the model is the text part of; peft's config names that one's modules."""

    def identity(self) -> dict[str, str]:
        """What may not change when a run is resumed, by the TOML's keys; dropout may."""
        config = self.config
        layers = json.dumps([self.layers, config.rank_pattern, config.alpha_pattern])
        return {
            "lora.rank": str(config.r),
            "lora.alpha": str(config.lora_alpha),
            "lora.rslora": str(config.use_rslora).lower(),
            "lora.dora": str(config.use_dora).lower(),
            "lora.modules_to_save": ", ".join(sorted(config.modules_to_save or ())),
            "lora.target_modules": f"{len(self.layers)} layers {hashlib.sha256(layers.encode()).hexdigest()[:8]}",
            **({"lora.quantize": self.quantize} if self.quantize != "none" else {}),
        }

    def save(self, directory: Path) -> None:
        """Write ``adapter_config.json`` as peft does, for inference."""
        values = {**self.config.to_dict(), "inference_mode": True}
        if self.whole is not None:
            experts = {f"{name}{inner}" for name in self.experts for inner in ("", ".base_layer")}
            values = _named_in_whole(values, [name for name in self.layers if name not in experts], self.whole)
        if self.expert_leaves:  # peft makes `target_parameters` of these as it loads
            values |= {"target_modules": [*values["target_modules"], *self.expert_leaves], "target_parameters": None}
        text = json.dumps(values, indent=2, sort_keys=True, default=sorted)
        (directory / CONFIG_NAME).write_text(text + "\n", encoding="utf-8")


def _named_in_whole(values: Mapping[str, Any], layers: Iterable[str], whole: Whole) -> dict[str, Any]:
    """The values of a text part's config, with the whole's names: each layer by its whole name there, since a short
    name or an expression might match another part's layers.

    Args:
        layers: that have adapters, without experts, by their names in the text part.
    """
    ends = tuple(values["modules_to_save"] or ())  # of the text part's names, as peft compares them
    saved = [name for name, _ in whole.model.named_modules() if (whole.inner(name) or "").endswith(ends)]
    patterns = {field: {whole.outer(key) or key: one for key, one in values[field].items()} for field in _PATTERNS}
    chosen = {"exclude_modules": None, "layers_to_transform": None, "layers_pattern": None}
    return {
        **values,
        **chosen,
        **patterns,
        "target_modules": [whole.outer(name) for name in layers],
        "modules_to_save": saved or None,
    }


def read_named_in_whole(config: Any, whole: Whole) -> None:
    """Turn names of a whole's modules in peft's config into those of its text part, in place.

    peft reads them on the whole: a regular expression matches whole names there. Other parts get no adapters.
    """
    target = config.target_modules
    key = "lora.target_modules"
    if isinstance(target, str):
        with contextlib.suppress(re.error):  # reported where the text part's names are matched
            found = [name for name, _ in whole.model.named_modules() if re.fullmatch(target, name)]
            if outside := [name for name in found if whole.inner(name) is None]:
                what = f"{target!r} matches {outside[0]}, which is no part of the text part"
                raise UserError(key, what, "begin it with the text part's name, as in model.language_model.")
            if found and target.lower() != "all-linear":
                config.target_modules = {whole.inner(name) for name in found}
    elif target:
        config.target_modules = {whole.inner(name) or name for name in target}
    if config.modules_to_save:
        config.modules_to_save = [whole.inner(name) or name for name in config.modules_to_save]
    for field in _PATTERNS:
        setattr(config, field, _by_module(getattr(config, field) or {}, whole))


def _by_module(pattern: Mapping[str, Any], whole: Whole) -> dict[str, Any]:
    """The values of a ``rank_pattern`` or ``alpha_pattern`` by the text part's names of the modules that get them.

    peft takes the first key that matches the end of a name, as an expression.
    """
    found = {}
    for name, _ in whole.model.named_modules() if pattern else ():
        key = next((one for one in pattern if re.match(rf"(.*\.)?({one})$", name)), None)
        if key is not None and (inner := whole.inner(name)) is not None:
            found[inner] = pattern[key]
    return found


def merged_weight(weight: Tensor, layer: Any, a: Tensor, b: Tensor, magnitude: Tensor | None = None) -> Tensor:
    """The weight of a layer with its adapter merged into it, in float32.

    Args:
        weight: the layer's own, ``[out, in]``; a Conv1D's is ``[in, out]``.
        layer: peft's, which has the scaling; it may be on meta.
        a, b: ``[rank, in]`` and ``[out, rank]``.
        magnitude: DoRA's length of each merged row, ``[out]``.
    """
    weight = weight.float()
    change = b.float() @ a.float() * layer.scaling[ADAPTER]
    merged = weight + (change.T if layer.fan_in_fan_out else change)
    if magnitude is None:
        return merged
    return merged * (magnitude.float() / torch.linalg.norm(merged, dim=1))[:, None]


def factors_of_experts(a: Tensor, b: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """peft's A ``[E·r, in]`` and B ``[out, r·E]`` as ``[E, r, in]`` and ``[E, out, r]``."""
    return factor_of_experts(a, "A", num_experts), factor_of_experts(b, "B", num_experts)


def factor_of_experts(factor: Tensor, letter: str, num_experts: int) -> Tensor:
    """One of `factors_of_experts`, by its letter."""
    if letter == "A":
        return factor.view(num_experts, -1, factor.shape[1])
    return factor.view(len(factor), -1, num_experts).permute(2, 0, 1)


@torch.no_grad()
def merge_experts(weight: Tensor, wrapper: Any, a: Tensor, b: Tensor) -> Tensor:
    """The weight of all experts with their adapters merged into it, in float32.

    Args:
        weight: ``[E, out, in]``, or transposed.
        wrapper: peft's, which has the scaling; it may be on meta.
        a, b: peft's factors.
    """
    experts = wrapper.get_base_layer()
    merged = weight.float().clone()
    for one, down, up in zip(merged, *factors_of_experts(a.float(), b.float(), experts.num_experts), strict=True):
        change = up @ down * wrapper.scaling[ADAPTER]
        one += change.T if experts.is_transposed else change
    return merged
