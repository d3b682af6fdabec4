"""A layer's experts as one operator: tokens go to the ranks that hold their experts, and the results come back.

Each token's vector is sent once for each expert it visits. The rank that holds the expert computes

    projected = x·W_upᵀ (+ b_up),     activated = gate(projected),     y = activated·W_downᵀ (+ b_down)

and sends y back; the sender adds its token's results up, times their weights. Backward sends the gradient of the sum
there without the weight. With u = grad·W_down the gradient of the weight is ⟨u, activated⟩ (+ ⟨grad, b_down⟩), so
results need not be kept (arXiv:2403.08245 does the same), and weight · u goes on.

Kept for backward are a rank's received vectors and their projections.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

from fsdp2kit.model.grouped_experts import ALIGNED
from fsdp2kit.parallel.expert_parallel.exchange import Routing, plan_exchange


@dataclass(frozen=True)
class ExpertKind:
    """How a layer's experts compute."""

    name: str
    """The operator is given this."""
    gate: Callable[[Tensor], Tensor]
    """From projected ``[R, P]`` to activated vectors ``[R, I]``, row by row."""
    is_transposed: bool
    """Whether weights are ``[E, in, out]``, not ``[E, out, in]``."""
    has_bias: bool


# An operator takes tensors, numbers and strings only: what computes the gate is given by name. Modules own the kinds.
_KINDS: WeakValueDictionary[str, ExpertKind] = WeakValueDictionary()


def register_kind(kind: ExpertKind) -> None:
    """Let `routed_experts` find ``kind`` by its name, as long as something else holds it."""
    _KINDS[kind.name] = kind


# An operator with its own backward hides routing and exchanges from selective checkpointing.
@torch.library.custom_op("fsdp2kit::routed_experts", mutates_args=())
def routed_experts(
    hidden: Tensor, index: Tensor, weights: Tensor, parameters: list[Tensor], num_experts: int, kind: str, group: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What a layer's experts add to each token.

    Args:
        hidden: this rank's tokens ``[T, H]``.
        index: the experts that each visits ``[T, K]``, below ``num_experts``.
        weights: of their results ``[T, K]``.
        parameters: of this rank's experts, ``up`` and ``down`` (``[E, out, in]``), each followed by its bias if any.
        kind: the name of an `ExpertKind`.
        group: name of the process group over which experts are partitioned, in order.

    Returns:
        ``[T, H]``; and for backward the vectors received ``[R, H]``, their projections ``[R, P]``, both sorted by
        expert, and how many tokens each rank sends to each expert, ``[ranks, E]`` on the host.
    """
    found = _KINDS[kind]
    routing = plan_exchange(index, num_experts=num_experts, group=group)
    up, up_bias, down, down_bias = _unpack(parameters, found)
    received = routing.to_experts(hidden[routing.order // index.shape[1]])
    projected = grouped_product(received, up, routing, transposed=found.is_transposed, bias=up_bias)
    activated = found.gate(projected)
    result = grouped_product(activated, down, routing, transposed=found.is_transposed, bias=down_bias)
    of_pairs = routing.to_tokens(result).view(*index.shape, -1)
    out = (of_pairs * weights.unsqueeze(-1)).sum(1).to(hidden.dtype)
    return out, received, projected, routing.counts


@torch.library.custom_op("fsdp2kit::routed_experts_backward", mutates_args=())
def routed_experts_backward(
    grad_out: Tensor,
    index: Tensor,
    weights: Tensor,
    saved: list[Tensor],
    parameters: list[Tensor],
    wanted: list[bool],
    num_experts: int,
    kind: str,
    group: str,
) -> list[Tensor]:
    """Gradients of ``hidden``, ``weights`` and each of ``parameters``; empty where ``wanted`` is false.

    Args:
        saved: received, projected and counts of `routed_experts`.
        wanted: for each of ``parameters``, whether it is trained.
    """
    found = _KINDS[kind]
    received, projected, counts = saved
    routing = plan_exchange(index, num_experts=num_experts, group=group, counts=counts)
    up, _, down, down_bias = _unpack(parameters, found)
    grad = routing.to_experts(grad_out[routing.order // index.shape[1]])
    weight = routing.to_experts(weights.reshape(-1)[routing.order]).unsqueeze(-1)
    activated, gate_backward, *_ = torch.func.vjp(found.gate, projected)
    into = grouped_product(grad, down, routing, transposed=not found.is_transposed)
    grad_weight = (into * activated).sum(-1, dtype=torch.float32)
    if down_bias is not None:
        grad_weight += (grad * _rows_of(down_bias, routing)).sum(-1, dtype=torch.float32)
    # What is not needed any more is freed at once: less is held, and the allocator has it for what follows.
    grad.mul_(weight)
    of_down = _gradients(activated, grad, routing, found, wanted[1 + found.has_bias :])
    del activated, grad
    with torch.no_grad():  # or the gate's gradient is made of operators that can be differentiated again
        (grad_projected,) = gate_backward(into.mul_(weight), retain_graph=False)
    del gate_backward, into
    of_up = _gradients(received, grad_projected, routing, found, wanted)
    grad_hidden = grouped_product(grad_projected, up, routing, transposed=not found.is_transposed)
    del grad_projected
    of_tokens = routing.to_tokens(grad_hidden).view(*index.shape, -1).sum(1)
    of_weights = routing.to_tokens(grad_weight).view(index.shape).to(weights.dtype)
    return [of_tokens, of_weights, *of_up, *of_down]


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _hidden, index, weights, parameters, ctx.num_experts, ctx.kind, ctx.group = inputs
    ctx.save_for_backward(index, weights, *output[1:], *parameters)
    ctx.wanted = [parameter.requires_grad for parameter in parameters]
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)  # or zeros would be made for what is only kept


def _backward(ctx: Any, grad_out: Tensor, *_: Any) -> tuple[Any, ...]:
    index, weights, received, projected, counts, *parameters = ctx.saved_tensors
    saved = [received, projected, counts]
    names = ctx.num_experts, ctx.kind, ctx.group
    hidden, of_weights, *rest = routed_experts_backward(
        grad_out.contiguous(), index, weights, saved, parameters, ctx.wanted, *names
    )
    of_parameters = [gradient if wanted else None for gradient, wanted in zip(rest, ctx.wanted, strict=True)]
    return hidden, None, of_weights, of_parameters, None, None, None


routed_experts.register_autograd(_backward, setup_context=_save_for_backward)


def grouped_product(
    x: Tensor, weight: Tensor, routing: Routing, *, transposed: bool, bias: Tensor | None = None
) -> Tensor:
    """Each expert's rows times its own matrix: ``[R, in]`` and ``[E, out, in]`` → ``[R, out]``.

    Args:
        routing: whose rows they are, sorted by expert.
        transposed: whether the matrices are ``[E, in, out]``.
        bias: ``[E, out]``.
    """
    matrices = weight if transposed else weight.transpose(1, 2)
    if _has_grouped_kernel(x, *matrices.shape[1:]):
        out = F.grouped_mm(x, matrices, offs=routing.ends)
    else:
        out = x.new_empty((x.shape[0], matrices.shape[2]))
        for rows, into, matrix in zip(x.split(routing.sizes), out.split(routing.sizes), matrices, strict=True):
            torch.mm(rows, matrix, out=into)
    return out if bias is None else out.add_(_rows_of(bias, routing))


def _has_grouped_kernel(x: Tensor, *sides: int) -> bool:
    """Whether torch multiplies groups in one kernel: in bfloat16 on a device, with sides that it takes."""
    return x.is_cuda and x.dtype == torch.bfloat16 and all(side * x.element_size() % ALIGNED == 0 for side in sides)


def _gradients(x: Tensor, grad: Tensor, routing: Routing, kind: ExpertKind, wanted: Sequence[bool]) -> list[Tensor]:
    """Gradients of a weight, and of its bias if there is one, from the rows that came in and their results'."""
    left, right = (x, grad) if kind.is_transposed else (grad, x)
    weight = _of_weight(left, right, routing) if wanted[0] else x.new_empty(0)
    if not kind.has_bias:
        return [weight]
    sums = [rows.sum(0) for rows in grad.split(routing.sizes)] if wanted[1] else []
    return [weight, torch.stack(sums) if sums else x.new_empty(0)]


def _of_weight(left: Tensor, right: Tensor, routing: Routing) -> Tensor:
    """leftᵀ·right of each expert's rows: ``[R, M]`` and ``[R, N]`` → ``[E, M, N]``."""
    if _has_grouped_kernel(left, left.shape[1], right.shape[1]):
        return F.grouped_mm(left.t(), right, offs=routing.ends)
    weight = left.new_empty((len(routing.sizes), left.shape[1], right.shape[1]))
    for into, one, other in zip(weight, left.split(routing.sizes), right.split(routing.sizes), strict=True):
        torch.mm(one.t(), other, out=into)
    return weight


def _rows_of(bias: Tensor, routing: Routing) -> Tensor:
    """``[R, out]``: each expert's bias for each of its rows."""
    return bias.repeat_interleave(torch.tensor(routing.sizes, device=bias.device), dim=0)


def _unpack(parameters: Sequence[Tensor], kind: ExpertKind) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    if kind.has_bias:
        up, up_bias, down, down_bias = parameters
        return up, up_bias, down, down_bias
    up, down = parameters
    return up, None, down, None
