"""Where tokens are routed: counts of the experts' tokens and sums of the routers' probabilities, taken by hooks.

The sums are differentiable. They leave layers that are recomputed in backward as any result does: autograd recomputes
the layer when their gradient asks for it. By then FSDP has gathered the layer: autograd runs the newest of the nodes
that are ready, and those of the layer's output are newer. Hooks run in recomputation, too, and compute the same, but
what they find is kept only while `RoutingHooks.recording` is open.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from fsdp2kit.config.sections.moe import MoEConfig
from fsdp2kit.errors import RunFailure, UserError
from fsdp2kit.model.inspect import Traits, value_of
from fsdp2kit.weights.experts import find_experts

_BIAS = "e_score_correction_bias"  # DeepSeek-V3's name, which all such models use


@dataclass(frozen=True)
class Routed:
    """What was found in one forward pass, by the names of the modules."""

    counts: dict[str, Tensor] = field(default_factory=dict)
    """int64 ``[B, E]``: how many of a row's tokens go to each expert, by the module of a layer's experts."""
    probabilities: dict[str, Tensor] = field(default_factory=dict)
    """float32 ``[B, E]``: the router's probabilities, summed over a row's tokens, by router."""

    def over_layers(self) -> tuple[Tensor, Tensor]:
        """Counts and probabilities, summed over layers."""
        counts, probabilities = (torch.stack(list(found.values())) for found in (self.counts, self.probabilities))
        return counts.sum(0), probabilities.sum(0)


def balance_losses(counts: Tensor, probabilities: Tensor, tokens: Tensor) -> Tensor:
    """The load-balancing loss of each row as transformers' ``load_balancing_loss_func`` computes it, ``[B]``.

    With n tokens, all layers counted, it is E · Σₑ (counts ÷ n) · (probabilities ÷ n). It is linear in the
    probabilities, so each rank computes the part of its own tokens.

    Args:
        counts: ``[B, E]``, of whole rows, summed over layers.
        probabilities: float32 ``[B, E]``, summed over tokens and layers.
        tokens: ``[B]``, of whole rows, times the number of layers.
    """
    return counts.shape[1] * (counts * probabilities).sum(1) / tokens.clamp(min=1) ** 2


class RoutingHooks:
    """Hooks on a model's experts, and with ``probabilities`` on its routers, while it is entered."""

    def __init__(self, model: PreTrainedModel, *, probabilities: bool) -> None:
        # Of modules that peft trains whole, the originals never run with gradients.
        self.experts = {name: module for name, module in find_experts(model).items() if ".original_module" not in name}
        # peft's wrapper around experts with adapters computes in their place.
        self._called = {name: model.get_submodule(name.partition(".base_layer")[0]) for name in self.experts}
        self.routers = _find_routers(model) if probabilities else {}
        self._is_token: Tensor | None = None
        self._routed: Routed | None = None
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> RoutingHooks:
        for name, module in self._called.items():
            handle = module.register_forward_pre_hook(partial(self._count, name), with_kwargs=True)
            self._handles.append(handle)
        for name, (router, index) in self.routers.items():
            self._handles.append(router.register_forward_hook(partial(self._sum, name, index)))
        return self

    def __exit__(self, *exception: Any) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._is_token = None

    @contextlib.contextmanager
    def recording(self, is_token: Tensor) -> Iterator[Routed]:
        """Record the forward pass with gradients that is made while this is open.

        Args:
            is_token: bool ``[B, s]``, false for padding, which counts nowhere. Recomputation needs it again.

        Raises:
            RunFailure: there was no such pass of all layers, or more than one.
        """
        self._is_token = is_token
        self._routed = Routed()
        try:
            yield self._routed
            if self._routed.counts.keys() != self.experts.keys():
                raise RunFailure("moe.balance: the objective did not run all layers of the model once, with gradients")
        finally:
            self._routed = None

    def _count(self, name: str, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._is_token is None or not torch.is_grad_enabled():  # the latter: evaluation, generation, a reference
            return
        index = kwargs["top_k_index"] if "top_k_index" in kwargs else args[1]
        with torch.no_grad():
            visits = self._is_token.repeat_interleave(index.shape[-1], dim=1).long()
            counts = visits.new_zeros(len(visits), self.experts[name].num_experts)
            counts.scatter_add_(1, index.reshape(len(visits), -1), visits)
        if self._routed is not None:
            _put(self._routed.counts, name, counts)

    def _sum(self, name: str, index: int, _router: nn.Module, _args: Any, output: Any) -> None:
        if self._is_token is None or not torch.is_grad_enabled():
            return
        logits = output[index] if isinstance(output, (tuple, list)) else output
        of_tokens = logits.float().softmax(-1).view(*self._is_token.shape, -1)
        sums = (of_tokens * self._is_token.unsqueeze(-1)).sum(1)
        if self._routed is not None:
            _put(self._routed.probabilities, name, sums)


def _put(found: dict[str, Tensor], name: str, value: Tensor) -> None:
    if name in found:
        raise RunFailure(f"moe.balance: {name} ran twice before a backward; set moe.balance = 'none'")
    found[name] = value


def _find_routers(model: PreTrainedModel) -> dict[str, tuple[nn.Module, int]]:
    """The modules whose logits transformers records as ``router_logits``, and where in their output these are."""
    recorder = (model._can_record_outputs or {}).get("router_logits")
    kind = value_of(recorder, "target_class")
    within = value_of(recorder, "layer_name") or ""
    if kind is None:
        return {}
    modules = {name: module for name, module in model.named_modules() if isinstance(module, kind) and within in name}
    return {name: (module, recorder.index) for name, module in modules.items()}


def routing_biases(model: PreTrainedModel) -> dict[str, Tensor]:
    """Each layer's routing bias, float32 ``[E]``, by the name of the module with its experts, where there is one."""
    found = {}
    for name, buffer in model.named_buffers():
        owner, _, key = name.rpartition(".")
        for experts in find_experts(model) if key == _BIAS else ():
            block = experts.rpartition(".")[0]
            if f"{owner}.".startswith(f"{block}."):
                found[experts] = buffer
    return found


def check_balance(section: MoEConfig, model: PreTrainedModel, traits: Traits) -> None:
    """Refuse to balance a model's experts in a way that it was not made for.

    Raises:
        UserError: it has no experts; for "aux", transformers has no such loss for it, or another; for "bias", it has
            no biases that do nothing but choose experts.
    """
    where = "moe.balance"
    kind = type(model).__name__
    experts = find_experts(model)
    if section.balance == "none":
        return
    if not experts:
        what = f"{section.balance!r}, but {kind} has no experts that transformers' interface for experts knows"
        raise UserError(where, what, "use 'none'")
    if section.balance == "aux" and not traits.once("moe.balance aux", _has_this_loss):
        what = f"'aux', but transformers has no load-balancing loss for {kind}, or another one (tried on a small copy)"
        raise UserError(where, what, "use 'bias' if it has routing biases, or 'none'")
    if section.balance == "bias":
        biases = routing_biases(model)
        if [name for name, one in experts.items() if name not in biases or biases[name].shape != (one.num_experts,)]:
            what = f"'bias', but not every layer with experts of {kind} has a buffer {_BIAS} with a number for each"
            raise UserError(where, what, "use 'aux' or 'none'")


def _has_this_loss(small: PreTrainedModel | None) -> bool:
    """Whether a model's own load-balancing loss of a row is that of `balance_losses`."""
    if small is None:
        return False
    for name, bias in [*small.named_buffers(), *small.named_parameters()]:
        if name.endswith(_BIAS):  # transformers' formula does not know them
            bias.data.copy_(torch.linspace(0, 2, bias.numel()).view_as(bias))
    tokens = torch.arange(2, 26)[None]
    with contextlib.suppress(Exception):  # whatever an architecture raises
        expected = small(input_ids=tokens, use_cache=False, output_router_logits=True).aux_loss
        with RoutingHooks(small, probabilities=True) as hooks, hooks.recording(tokens >= 0) as routed:
            small(input_ids=tokens, use_cache=False)
        layers = len(routed.probabilities)
        own = balance_losses(*routed.over_layers(), torch.tensor([layers * tokens.numel()]))
        return len(routed.counts) == layers and torch.allclose(own, expected.float(), rtol=1e-5)
    return False
