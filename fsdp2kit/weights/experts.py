"""Which modules of a model hold a layer's experts, as transformers' interface for experts has them, and how many."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

UP = ("gate_up_proj", "up_proj")
DOWN = "down_proj"
"""Names of the weights, ``[E, out, in]`` or transposed: the first is fused with a gate, or has none."""

# transformers has no single name for these; the first that a config has is taken.
_EXPERT_COUNT = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_top_k", "moe_k")


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


def unlike_experts(experts: Any) -> list[str]:
    """What makes them more, or less, than two weights and their biases: names of parameters, or a norm."""
    known = set(expert_parameters(experts))
    found = {name for name, _ in experts.named_parameters()}
    norm = ["a norm"] if getattr(experts, "has_post_expert_norm", False) else []
    return sorted(found ^ known) or norm


def is_mixture(config: PreTrainedConfig) -> bool:
    """Whether a model's config names experts, and a token visits only some."""
    return (expert_count(config.get_text_config()) or 1) > 1


def expert_count(config: PreTrainedConfig) -> Any:
    """How many routed experts a layer has; None if a model's config does not say."""
    return _first(config, _EXPERT_COUNT)


def experts_per_token(config: PreTrainedConfig) -> int | None:
    """How many routed experts a token visits; None if a model's config does not say."""
    visited = _first(config.get_text_config(), _EXPERTS_PER_TOKEN)
    return visited if isinstance(visited, int) else None


def _first(config: PreTrainedConfig, names: tuple[str, ...]) -> Any:
    return next((value for name in names if (value := getattr(config, name, None)) is not None), None)
