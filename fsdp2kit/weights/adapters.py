"""Adapters as stored tensors: their names in modules and in peft's files, what a run may not change, and merging.

peft decides what an adapter is and computes; `fsdp2kit.model.adapters` builds it into a model.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fsdp2kit.weights.whole import OWN_NAMES, FileNames

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
ADAPTER = "default"
"""peft's name for the one adapter of a model; it stands in the names of modules, and not in an adapter's file."""

_OWN = re.compile(rf"\.lora_\w+\.{ADAPTER}(?=\.|$)")
_AROUND = re.compile(rf"\.(base_layer|original_module|modules_to_save\.{ADAPTER})(?=\.)")


def base_name(name: str) -> str | None:
    """A tensor's name in the model without adapters; None for an adapter's own tensor.

    A module that peft trains whole is there twice; both copies' tensors have the same name here.
    """
    return None if _OWN.search(name) else _AROUND.sub("", name)


def holds_factors(names: Iterable[str]) -> bool:
    """Whether any of the tensors ``names`` is an adapter's own."""
    return any(_OWN.search(name) for name in names)


def is_of_adapter(name: str) -> bool:
    """Whether it names an adapter's own tensor, or one of a module that is trained whole beside it."""
    return _OWN.search(name) is not None or f".modules_to_save.{ADAPTER}." in name


def adapter_file_name(name: str, names: FileNames = OWN_NAMES) -> str:
    """A trained tensor's name in peft's ``adapter_model.safetensors``.

    Args:
        names: of the model's files.
    """
    inner = base_name(name) or _OWN.sub(lambda match: match[0].removesuffix(f".{ADAPTER}"), name)
    outer = names.outer(inner) or inner
    return f"base_model.model.{outer}".replace(".lora_magnitude_vector.weight", ".lora_magnitude_vector")


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
    names: FileNames = OWN_NAMES
    """Of the model's files; peft's config has them."""

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
        experts = {f"{name}{inner}" for name in self.experts for inner in ("", ".base_layer")}
        values = self.names.outer_config(values, [name for name in self.layers if name not in experts])
        if self.expert_leaves:  # peft makes `target_parameters` of these as it loads
            values |= {"target_modules": [*values["target_modules"], *self.expert_leaves], "target_parameters": None}
        text = json.dumps(values, indent=2, sort_keys=True, default=sorted)
        (directory / CONFIG_NAME).write_text(text + "\n", encoding="utf-8")


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
