"""What partitioned experts take on a rank: vectors that come, their projections, exchanges.

The load of a rank is the number of vectors that its experts receive, over that of an even routing. docs/dev/memory.md
derives the forms from `expert_parallel.experts`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from fsdp2kit.errors import UserError
from fsdp2kit.model.build import decoder_layers
from fsdp2kit.parallel.expert_parallel.exchange import shares
from fsdp2kit.parallel.plan import ParallelPlan
from fsdp2kit.planner.activations import BackwardMemory, LayerMemory, item_bytes
from fsdp2kit.weights.experts import expert_weights, experts_per_token, find_experts

IMBALANCE = 2
"""The load, beside that of an even routing, for which every plan says the memory."""
COUNT_BYTES = 8
"""What an exchange sends for each expert's count of pairs."""
WEIGHT_BYTES = 4
"""What an exchange sends for a pair's weight, or its gradient."""
_NAME = "fsdp2kit_planned"  # in transformers' table of expert functions


@dataclass(frozen=True)
class Dispatch:
    """A layer's experts on the rank with the most of them, in one micro-batch."""

    pairs: int
    """A rank's tokens, times the experts that each visits."""
    experts: int
    held: int
    """Experts on this rank."""
    ranks: int
    hidden: int
    projected: int
    """Width of what the first matrix makes."""
    activated: int
    """Width of what goes into the second."""
    item: int

    def rows(self, load: float = 1) -> int:
        """Vectors that this rank's experts receive; at most all pairs of all ranks."""
        everything = self.pairs * self.ranks
        return min(everything, -int(-load * everything * self.held // self.experts))

    def kept(self, load: float = 1) -> int:
        """Bytes kept for backward: vectors received, and their projections."""
        return self.rows(load) * (self.hidden + self.projected) * self.item

    def forward(self, load: float = 1) -> int:
        """Bytes beside ``kept`` while results travel back."""
        rows = self.rows(load)
        return self.item * (rows * (self.activated + 2 * self.hidden) + 2 * self.pairs * self.hidden)

    def backward(self, load: float = 1) -> int:
        """Bytes beside ``kept`` and the gradients of parameters: inside the experts, or while the gradients of vectors
        travel back."""
        rows = self.rows(load)
        inside = rows * (4 * self.activated + max(self.hidden, self.projected))
        return self.item * max(inside, 2 * (rows + self.pairs) * self.hidden)

    def exchanges(self) -> tuple[list[int], list[int]]:
        """Bytes that this rank sends in each all-to-all of forward and of backward, where routing is even.

        Forward: how many, the vectors, the results. Backward: gradients of the results, the pairs' weights; gradients
        of the vectors, and of the weights.
        """
        there = self.pairs - self.pairs * self.held // self.experts
        back = self.rows() - self.rows() // self.ranks
        vector = self.hidden * self.item
        forward = [COUNT_BYTES * (self.experts - self.held), there * vector, back * vector]
        return forward, [there * vector, there * WEIGHT_BYTES, back * vector, back * WEIGHT_BYTES]


def dispatches(model: PreTrainedModel, plan: ParallelPlan, *, tokens: int) -> dict[str, Dispatch]:
    """The experts of each decoder layer that has some, by the layer's name; {} where none are partitioned.

    Args:
        tokens: of a micro-batch on this rank.
    """
    if plan.experts is None:
        return {}
    visited = experts_per_token(model.config)
    if visited is None:
        what = (
            f"{plan.sizes.ep}, but the config of {type(model).__name__} does not say how many experts a token visits"
        )
        raise UserError("mesh.ep", f"{what}: its memory is not planned", "plan with mesh.ep = 1: an upper bound")
    names = {layer: name for name, layer in model.named_modules()}
    found = {}
    for layer in decoder_layers(model):
        for module in find_experts(layer).values():
            up, down = _matrices(module)
            inside, outside = (1, 2) if module.is_transposed else (2, 1)
            found[names[layer]] = Dispatch(
                pairs=tokens * visited,
                experts=module.num_experts,
                held=shares(module.num_experts, plan.sizes.ep)[0],
                ranks=plan.sizes.ep,
                hidden=up.shape[inside],
                projected=up.shape[outside],
                activated=down.shape[inside],
                item=item_bytes(plan.fsdp.param_dtype),
            )
    return found


def keeps_received(layer: LayerMemory, dispatch: Dispatch) -> bool:
    """Whether what its experts receive is kept for backward, and not recomputed."""
    return not layer.recomputed or layer.kept > dispatch.kept()


def with_load(layer: LayerMemory, dispatch: Dispatch, load: float = 1) -> LayerMemory:
    """A layer that was counted at an even routing, with what the operator holds inside, and under another load."""
    more = dispatch.kept(load) - dispatch.kept()
    is_kept = keeps_received(layer, dispatch)
    inside = BackwardMemory("experts", layer.kept + layer.kept_on_host + layer.recomputed, 0, dispatch.backward(load))
    return replace(
        layer,
        kept=layer.kept + more * is_kept,
        recomputed=layer.recomputed + more * (not is_kept),
        forward=layer.forward + more * (not is_kept),
        backward=tuple(moment._replace(held=moment.held + more) for moment in (*layer.backward, inside)),
        attention_forward=max(layer.attention_forward, dispatch.forward(load)),
    )


def partition_on_one_rank(model: PreTrainedModel, plan: ParallelPlan) -> None:
    """Leave a model on meta the experts of the rank with the most, which then take an even routing's memory."""
    for module in find_experts(model).values():
        held = shares(module.num_experts, plan.sizes.ep)[0]
        for key, parameter in list(module.named_parameters()):
            own = parameter.detach().new_empty((held, *parameter.shape[1:]))
            setattr(module, key, nn.Parameter(own, requires_grad=parameter.requires_grad))
        module.config._experts_implementation = _NAME  # a layer that was copied has a config of its own

    def compute(module: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        up, _ = _matrices(module)
        width = up.shape[2 if module.is_transposed else 1]
        return planned_routed_experts(hidden, index, weights, list(module.parameters()), module.num_experts, width)[0]

    ALL_EXPERTS_FUNCTIONS.register(_NAME, compute)


def even_rows(index: Tensor, held: int, num_experts: int) -> int:
    """Vectors that the rank with the most experts receives where every rank routes ``index`` evenly."""
    ranks = -(-num_experts // held)
    return -(-index.numel() * ranks * held // num_experts)


# An operator of its own, as `routed_experts` is: selective checkpointing keeps its results by its name.
@torch.library.custom_op("fsdp2kit::planned_routed_experts", mutates_args=())
def planned_routed_experts(
    hidden: Tensor, index: Tensor, weights: Tensor, parameters: list[Tensor], num_experts: int, width: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The memory of `routed_experts` on fake tensors: its result, the vectors received and their projections."""
    raise NotImplementedError("it computes nothing")


@planned_routed_experts.register_fake
def _(hidden: Tensor, index: Tensor, weights: Tensor, parameters: list[Tensor], num_experts: int, width: int) -> Any:
    rows = even_rows(index, len(parameters[0]), num_experts)
    return torch.empty_like(hidden), hidden.new_empty(rows, hidden.shape[1]), hidden.new_empty(rows, width)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _hidden, index, weights, parameters, *_ = inputs
    ctx.save_for_backward(index, weights, *output[1:], *parameters)
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_out: Tensor, *_: Any) -> tuple[Any, ...]:
    _index, weights, _received, _projected, *parameters = ctx.saved_tensors
    gradients = [torch.empty_like(one) if one.requires_grad else None for one in parameters]
    return torch.empty_like(grad_out), None, torch.empty_like(weights), gradients, None, None


planned_routed_experts.register_autograd(_backward, setup_context=_save_for_backward)


def _matrices(module: Any) -> Iterator[nn.Parameter]:
    """The first and the second matrix of all experts of a layer."""
    yield from (module.get_parameter(name) for name in expert_weights(module))
