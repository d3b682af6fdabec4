"""LoRA on experts that are one tensor: peft's parameters, scaling and names, with a forward of our own.

A layer's experts have two weights of shape ``[E, out, in]`` (or ``[E, in, out]``). peft puts a wrapper around the
experts for each, the outer one for ``down_proj``. A wrapper holds the factors of all experts: A ``[E·r, in]``, expert
after expert, and B ``[out, r·E]``, whose columns of one rank stand together. Both halves of a fused ``gate_up_proj``
share A.

peft's forward computes W + B·A of all experts and multiplies by that. It keeps this copy of the weights for backward,
and makes its whole gradient. Here each token's vector goes through its expert's factors instead:
x·Wᵀ + scaling · (x·Aᵀ)·Bᵀ.

Files name the factors by expert (``experts.3.up_proj.lora_A.weight``) where the model's weights are stored so and peft
reads it: vLLM reads these names alone. Elsewhere (gpt-oss) they are peft's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fsdp2kit.errors import UserError
from fsdp2kit.model.experts import are_experts, expert_weights, find_experts, unlike_experts
from fsdp2kit.model.grouped_experts import compute_experts, grouped_mm, multiply
from fsdp2kit.model.names import ADAPTER, adapter_file_name, to_file_names

ALL_EXPERTS = "experts"
"""In ``lora.target_modules`` it stands for the experts of all layers."""
_FACTOR = re.compile(rf"(?P<wrapper>.+)\.lora_(?P<letter>[AB])\.{ADAPTER}\.weight")


def target_parameters(model: nn.Module) -> list[str]:
    """peft's ``target_parameters`` that name the weights of all experts.

    Raises:
        UserError: the model has none, or experts that compute in another way.
    """
    found: dict[str, None] = {}
    key = "lora.target_modules"
    for name, module in find_experts(model).items():
        if unlike_experts(module):
            what = f"{name} is a {type(module).__name__}, which is more than two weights and biases"
            raise UserError(key, what, "leave the experts out")
        found |= dict.fromkeys(f"{name.rpartition('.')[2]}.{weight}" for weight in expert_weights(module))
    if not found:
        what = f"{type(model).__name__} has no experts that transformers' interface for experts knows"
        raise UserError(key, what, "leave them out")
    return list(found)


def matched_parameters(model: nn.Module, names: Iterable[str]) -> set[str]:
    """The parameters that peft's ``target_parameters`` select: whole names, or their last parts."""
    parameters = [f".{name}" for name, _ in model.named_parameters()]
    return {name for name in parameters if any(name.endswith(f".{end}") for end in names)}


def stored_leaves(model: PreTrainedModel) -> list[str]:
    """The names of one expert's layers in the model's files (``gate_proj``, …); none if all experts are one tensor."""
    for name, module in find_experts(model).items():
        tensors = {f"{name}.{key}": module.get_parameter(key).to("meta") for key in expert_weights(module)}
        files = to_file_names(model, tensors)
        if all(tensor.ndim == 2 for tensor in files.values()):
            return list(dict.fromkeys(file.removesuffix(".weight").rpartition(".")[2] for file in files))
    return []


def replace_forward(model: nn.Module, names: list[str]) -> None:
    """Let peft's wrappers around the experts ``names`` compute by `_forward`, in place."""
    for name in names:
        wrapper: Any = model.get_submodule(name)
        wrapper.forward = MethodType(_forward, wrapper)


def _forward(self: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """What a layer's experts with adapters add to each token.

    Args:
        self: peft's outer wrapper.
        hidden: ``[T, H]``.
        index: the experts that each token visits, ``[T, K]``.
        weights: of their results, ``[T, K]``.
    """
    experts = self.get_base_layer()
    if self.disable_adapters:
        return experts(hidden, index, weights)
    wrappers = {wrapper.parameter_name: wrapper for wrapper in (self, self.base_layer)}

    def product(name: str, x: Tensor, visited: Tensor, ends: Tensor) -> Tensor:
        return multiply(experts, name, x, visited, ends) + _of_adapter(x, wrappers[name], ends)

    return compute_experts(experts, hidden, index, weights, product)


def _of_adapter(x: Tensor, wrapper: Any, ends: Tensor) -> Tensor:
    """What an adapter adds to the products of ``[S, in]``, sorted by expert, ``[S, out]``.

    Args:
        ends: where each expert's rows end ``[E]``.
    """
    num_experts = wrapper.get_base_layer().num_experts
    a, b = _factors(wrapper.lora_A[ADAPTER].weight, wrapper.lora_B[ADAPTER].weight, num_experts)
    low = grouped_mm(x, a.transpose(1, 2), ends)
    return wrapper.scaling[ADAPTER] * grouped_mm(low, b.transpose(1, 2).contiguous(), ends)


def _factors(a: Tensor, b: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """peft's A ``[E·r, in]`` and B ``[out, r·E]`` as ``[E, r, in]`` and ``[E, out, r]``."""
    return _stack(a, "A", num_experts), _stack(b, "B", num_experts)


def _stack(factor: Tensor, letter: str, num_experts: int) -> Tensor:
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
    experts, merged = wrapper.get_base_layer(), weight.float().clone()
    for one, down, up in zip(merged, *_factors(a.float(), b.float(), experts.num_experts), strict=True):
        change = up @ down * wrapper.scaling[ADAPTER]
        one += change.T if experts.is_transposed else change
    return merged


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
            found[adapter_file_name(name, model)] = tensor
            continue
        owner, weight, letter = factor
        experts: Any = model.get_submodule(owner)
        stacked = _stack(tensor, letter, experts.num_experts)
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


def from_adapter_files(model: PreTrainedModel, name: str, shape: torch.Size, files: Mapping[str, Any]) -> Tensor:
    """The inverse of `adapter_files`: a factor of experts ``name`` from its file's tensors.

    Args:
        model: as there.
        shape: of the factor.
        files: what can be sliced, by name.

    Raises:
        UserError: gate and up have factors A of their own.
    """
    places = adapter_files(model, {name: torch.arange(shape.numel()).view(shape)})
    values = {file: files[file][...] for file in places}
    factor = torch.empty(shape, dtype=next(iter(values.values())).dtype)
    for file, place in places.items():
        factor.view(-1)[place.reshape(-1)] = values[file].reshape(-1)
    for file, part in adapter_files(model, {name: factor}).items():
        if not torch.equal(part, values[file]):
            what = f"{file}: gate and up of an expert have factors A of their own, and share one here"
            raise UserError("model.adapter", what, "merge that adapter into its model, and train another one")
    return factor
