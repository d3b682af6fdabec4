"""A layer's experts as grouped products over tokens sorted by expert; their frozen weights may be stored in 4 bits.

transformers' own forwards read the experts' weights themselves. These take a product instead, so that an adapter, or
weights that are dequantised at each use, can stand in its place.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdp2kit.model.nf4 import NF4Layout, level_pairs
from fsdp2kit.weights.experts import expert_parameters, expert_weights
from fsdp2kit.weights.modules import PackedModule

Product = Callable[[str, Tensor, Tensor, Tensor], Tensor]
"""From a weight's name, vectors ``[S, in]`` sorted by expert, each one's expert ``[S]``, and where each expert's
vectors end ``[E]``, to their products ``[S, out]``."""
ALIGNED = 16
"""torch's grouped products want rows of a multiple of so many bytes."""


def compute_experts(experts: Any, hidden: Tensor, index: Tensor, weights: Tensor, product: Product) -> Tensor:
    """What a layer's experts add to each token, ``[T, H]``.

    Args:
        experts: the module; its gate is used.
        hidden: ``[T, H]``.
        index: the experts that each token visits, ``[T, K]``.
        weights: of their results, ``[T, K]``.
    """
    pairs = index.reshape(-1)
    order = pairs.argsort(stable=True)
    visited = pairs[order]
    # No count of a size that depends on values: the planner traces this without any.
    numbers = torch.arange(experts.num_experts, device=visited.device)
    ends = torch.searchsorted(visited, numbers, right=True, out_int32=True)
    up, down = expert_weights(experts)
    x = product(up, hidden[order // index.shape[1]], visited, ends)
    x = experts._apply_gate(x) if experts.has_gate else experts.act_fn(x)
    result = product(down, x, visited, ends)
    of_pairs = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    result = result[of_pairs].view(*index.shape, -1) * weights.unsqueeze(-1)
    return result.sum(1).to(hidden.dtype)


def multiply(experts: Any, name: str, x: Tensor, visited: Tensor, ends: Tensor) -> Tensor:
    """The `Product` of the experts' own weights and biases."""
    weight = experts.get_parameter(name)
    if isinstance(experts, NF4Experts):
        out = _Product.apply(x, weight, experts.pairs, ends, experts.layouts[name], experts.is_transposed)
    else:
        out = grouped_mm(x, weight if experts.is_transposed else weight.transpose(1, 2), ends)
    return out + experts.get_parameter(f"{name}_bias")[visited] if experts.has_bias else out


def grouped_mm(x: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """torch's, for matrices of any sides: ``[S, in]`` and ``[E, in, out]`` → ``[S, out]``.

    Args:
        ends: where the rows of each group end, ``[E]``.
    """
    before, after = matrices.shape[1:]
    multiple = ALIGNED // x.element_size()
    missing = -before % multiple, -after % multiple  # zeros, which add nothing
    if not any(missing):
        return F.grouped_mm(x, matrices, offs=ends)
    x = F.pad(x, (0, missing[0]))
    matrices = F.pad(matrices, (0, missing[1], 0, missing[0]))
    return F.grouped_mm(x, matrices, offs=ends)[:, :after]


class NF4Experts(PackedModule):
    """A layer's experts with frozen weights in 4 bits, which are dequantised at each use and not kept.

    Parameters have the names of the plain experts'; blocks of 64 do not cross from one expert to the next.
    """

    pairs: Tensor

    def __init__(self, experts: Any) -> None:
        """Take the sizes, device and biases of ``experts``; its weights are lost, and `fill` gives them values."""
        super().__init__()
        self.num_experts = experts.num_experts
        self.has_gate = experts.has_gate
        self.has_bias = experts.has_bias
        self.is_transposed = experts.is_transposed
        plain = dict(experts.named_parameters(recurse=False))
        self.layouts = {name: NF4Layout.of(plain[name]) for name in expert_weights(experts)}
        for name in expert_parameters(experts):
            layout = self.layouts.get(name)
            self.register_parameter(name, plain[name] if layout is None else layout.parameter(plain[name].device))
        vars(self)["original"] = experts.to("meta")  # no submodule: its weights are not there
        self.register_buffer("pairs", level_pairs(), persistent=False)

    @property
    def _apply_gate(self) -> Callable[[Tensor], Tensor]:
        return vars(self)["original"]._apply_gate

    @property
    def act_fn(self) -> Callable[[Tensor], Tensor]:
        """Of experts without a gate."""
        return vars(self)["original"].act_fn

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """As `compute_experts`."""
        return compute_experts(self, hidden, index, weights, partial(multiply, self))

    def plain(self) -> nn.Module:
        """The experts as they were, on meta."""
        return vars(self)["original"]

    def fills(self) -> dict[str, Callable[[Any], None]]:
        """See `PackedModule`."""
        return {name: partial(self.fill, name) for name in self.layouts}

    def fill(self, name: str, weight: Any) -> None:
        """Quantise this rank's share of the weight ``name``.

        Args:
            weight: sliceable, ``[E, out, in]`` or transposed, of any floating-point dtype.
        """
        stored = self.get_parameter(name)
        self.layouts[name].fill(stored, lambda expert, first, last: weight[expert : expert + 1, first:last][0])


class _Product(torch.autograd.Function):
    """Keeps the stored bytes for backward, and no input: the weight has no gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, stored: Tensor, pairs: Tensor, ends: Tensor, layout: NF4Layout, is_transposed: bool
    ) -> Tensor:
        ctx.save_for_backward(stored, pairs, ends)
        ctx.layout = layout
        ctx.is_transposed = is_transposed
        weight = layout.unpack(stored, pairs, x.dtype)
        return grouped_mm(x, weight if is_transposed else weight.transpose(1, 2), ends)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        stored, pairs, ends = ctx.saved_tensors
        weight = ctx.layout.unpack(stored, pairs, gradients[0].dtype)
        of_x = grouped_mm(gradients[0], weight.transpose(1, 2) if ctx.is_transposed else weight, ends)
        return of_x, None, None, None, None, None
