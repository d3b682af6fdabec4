"""LoRA on experts that are one tensor: peft's parameters and scaling, with a forward of our own.

A layer's experts have two weights of shape ``[E, out, in]`` (or ``[E, in, out]``). peft puts a wrapper around the
experts for each, the outer one for ``down_proj``. A wrapper holds the factors of all experts: A ``[E·r, in]``, expert
after expert, and B ``[out, r·E]``, whose columns of one rank stand together. Both halves of a fused ``gate_up_proj``
share A.

peft's forward computes W + B·A of all experts and multiplies by that. It keeps this copy of the weights for backward,
and makes its whole gradient. Here each token's vector goes through its expert's factors instead:
x·Wᵀ + scaling · (x·Aᵀ)·Bᵀ.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import MethodType
from typing import Any

from torch import Tensor, nn

from fsdp2kit.errors import UserError
from fsdp2kit.model.grouped_experts import compute_experts, grouped_mm, multiply
from fsdp2kit.weights.adapters import ADAPTER, factors_of_experts
from fsdp2kit.weights.experts import expert_weights, find_experts, unlike_experts

ALL_EXPERTS = "experts"
"""In ``lora.target_modules`` it stands for the experts of all layers."""


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
    a, b = factors_of_experts(wrapper.lora_A[ADAPTER].weight, wrapper.lora_B[ADAPTER].weight, num_experts)
    low = grouped_mm(x, a.transpose(1, 2), ends)
    return wrapper.scaling[ADAPTER] * grouped_mm(low, b.transpose(1, 2).contiguous(), ends)
