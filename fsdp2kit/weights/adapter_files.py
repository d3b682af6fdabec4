"""An adapter's tensors as peft's file has them, and back; those of experts in one tensor above all.

Files name the factors by expert (``experts.3.up_proj.lora_A.weight``) where the model's weights are stored so and peft
reads it: vLLM reads these names alone. Elsewhere (gpt-oss) they are peft's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fsdp2kit.errors import UserError
from fsdp2kit.weights.adapters import ADAPTER, adapter_file_name, factor_of_experts
from fsdp2kit.weights.conversion import to_file_names
from fsdp2kit.weights.experts import are_experts, expert_weights, find_experts
from fsdp2kit.weights.record import weights_of

_FACTOR = re.compile(rf"(?P<wrapper>.+)\.lora_(?P<letter>[AB])\.{ADAPTER}\.weight")


def stored_leaves(model: PreTrainedModel) -> list[str]:
    """The names of one expert's layers in the model's files (``gate_proj``, …); none if all experts are one tensor."""
    for name, module in find_experts(model).items():
        tensors = {f"{name}.{key}": module.get_parameter(key).to("meta") for key in expert_weights(module)}
        files = to_file_names(model, tensors)
        if all(tensor.ndim == 2 for tensor in files.values()):
            return list(dict.fromkeys(file.removesuffix(".weight").rpartition(".")[2] for file in files))
    return []


def adapter_files(
    model: PreTrainedModel, tensors: Mapping[str, Tensor], *, per_expert: bool = True
) -> dict[str, Tensor]:
    """An adapter's tensors as its file names them.

    Args:
        model: without adapters, of its own class; it may be on meta.
        tensors: by the names of a model with adapters.
        per_expert: whether factors of experts are one tensor for each layer of each expert.
    """
    found = {}
    for name, tensor in tensors.items():
        factor = _factor_of(name, model) if per_expert else None
        if factor is None:
            found[adapter_file_name(name, weights_of(model).names)] = tensor
            continue
        owner, weight, letter = factor
        experts: Any = model.get_submodule(owner)
        stacked = factor_of_experts(tensor, letter, experts.num_experts)
        if letter == "A" and experts.has_gate and weight != "down_proj":
            stacked = torch.cat([stacked, stacked], dim=1)  # gate and up share it
        # What cuts a weight into experts and halves cuts its factors alike.
        for file, part in to_file_names(model, {f"{owner}.{weight}": stacked}).items():
            found[f"base_model.model.{file.removesuffix('.weight')}.lora_{letter}.weight"] = part
    return found


def _factor_of(name: str, model: nn.Module) -> tuple[str, str, str] | None:
    """The experts' module, its weight and the letter of a factor on experts; None for another tensor."""
    match = _FACTOR.fullmatch(name)
    if match is None:
        return None
    owner = match["wrapper"].removesuffix(".base_layer")
    module = model.get_submodule(owner)
    if not are_experts(module):
        return None
    up, down = expert_weights(module)
    return owner, up if match["wrapper"].endswith(".base_layer") else down, match["letter"]


def from_adapter_files(
    model: PreTrainedModel, name: str, shape: torch.Size, files: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The inverse of `adapter_files`: a factor of experts ``name``, by this name, from its file's tensors.

    Args:
        model: as there.
        shape: of the factor.

    Raises:
        UserError: gate and up have factors A of their own.
    """
    places = adapter_files(model, {name: torch.arange(shape.numel()).view(shape)})
    factor = torch.empty(shape, dtype=next(iter(files.values())).dtype)
    for file, place in places.items():
        factor.view(-1)[place.reshape(-1)] = files[file].reshape(-1)
    for file, part in adapter_files(model, {name: factor}).items():
        if not torch.equal(part, files[file]):
            what = f"{file}: gate and up of an expert have factors A of their own, and share one here"
            raise UserError("model.adapter", what, "merge that adapter into its model, and train another one")
    return {name: factor}
