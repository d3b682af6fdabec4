"""Experts on a device: the operator against each expert's own product in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from fsdp2kit.job.distributed import World
from fsdp2kit.parallel.expert_parallel.experts import ExpertKind, register_kind, routed_experts

pytestmark = pytest.mark.gpu

EXPERTS, VISITED, TOKENS = 6, 2, 300


def gate(projected: Tensor) -> Tensor:
    left, right = projected.chunk(2, dim=-1)
    return F.silu(left) * right


def by_hand(
    hidden: Tensor, index: Tensor, weights: Tensor, parameters: list[Tensor], *, transposed: bool, has_bias: bool
) -> Tensor:
    """One token after the other, one expert after the other."""
    up, down = parameters[:: 1 + has_bias]
    if not transposed:
        up, down = up.transpose(1, 2), down.transpose(1, 2)
    out = torch.zeros_like(hidden)
    for expert in range(EXPERTS):
        token, place = (index == expert).nonzero(as_tuple=True)
        projected = hidden[token] @ up[expert] + (parameters[1][expert] if has_bias else 0)
        result = gate(projected) @ down[expert] + (parameters[3][expert] if has_bias else 0)
        out = out.index_add(0, token, result * weights[token, place, None])
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("transposed", [False, True], ids=["", "transposed"])
@pytest.mark.parametrize("has_bias", [False, True], ids=["", "biased"])
@pytest.mark.parametrize("hidden_size", [64, 60], ids=["aligned", "odd"])
def test_the_operator_equals_each_experts_own_product(
    world: World, hidden_size: int, has_bias: bool, transposed: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    width, options = 48, {"device": world.device, "dtype": dtype}
    shapes = [(EXPERTS, 2 * width, hidden_size), (EXPERTS, hidden_size, width)]
    sides = [(shape[0], *reversed(shape[1:])) if transposed else shape for shape in shapes]
    biases = [(EXPERTS, shape[1]) for shape in shapes]
    chosen = [each for pair in zip(sides, biases, strict=True) for each in pair[: 1 + has_bias]]
    leaves = [
        torch.randn(TOKENS, hidden_size, **options),
        torch.rand(TOKENS, VISITED, **options),
        *(torch.randn(shape, **options) / 8 for shape in chosen),
    ]
    choices = torch.tensor([0, 1, 3, 5])  # two experts are idle, one of them between others
    index = choices[torch.rand(TOKENS, 4).topk(VISITED).indices].to(world.device)
    slope = torch.randn(TOKENS, hidden_size, **options)
    kind = ExpertKind("gpu test", gate, transposed, has_bias)
    register_kind(kind)
    group: Any = dist.group.WORLD

    ours = [leaf.clone().requires_grad_() for leaf in leaves]
    out, *_ = routed_experts(ours[0], index, ours[1], ours[2:], EXPERTS, kind.name, group.group_name)
    found = [out.detach(), *torch.autograd.grad(out, ours, slope)]

    exact = [leaf.double().requires_grad_() for leaf in leaves]
    whole = by_hand(exact[0], index, exact[1], exact[2:], transposed=transposed, has_bias=has_bias)
    expected = [whole.detach(), *torch.autograd.grad(whole, exact, slope.double())]
    bound = 1e-5 if dtype == torch.float32 else 1e-2
    for one, other in zip(found, expected, strict=True):
        assert one.isfinite().all()
        assert (one.double() - other).norm() <= bound * other.norm()
    assert not any(gradient[[2, 4]].any() for gradient in found[3:]), "of the idle experts"
