"""Which modules of a model hold a layer's experts, as transformers' interface for experts has them."""

from __future__ import annotations

from typing import Any

from torch import nn

UP, DOWN = ("gate_up_proj", "up_proj"), "down_proj"
"""Names of the weights, ``[E, out, in]`` or transposed: the first is fused with a gate, or has none."""


def find_experts(model: nn.Module) -> dict[str, Any]:
    """The modules that hold a layer's experts, by name."""
    return {name: module for name, module in model.named_modules() if are_experts(module)}


def are_experts(module: Any) -> bool:
    """Whether a module's weights are those of all experts of a layer, and its forward takes their indices."""
    return hasattr(module, "is_transposed") and hasattr(module, "has_gate") and hasattr(module, "num_experts")


def expert_weights(experts: Any) -> tuple[str, str]:
    """The names of the two weights."""
    fused, plain = UP
    return (fused if experts.has_gate else plain), DOWN


def expert_parameters(experts: Any) -> list[str]:
    """The names of the weights, each followed by that of its bias ``[E, out]`` if there are biases."""
    return [name for weight in expert_weights(experts) for name in (weight, f"{weight}_bias")[: 1 + experts.has_bias]]
