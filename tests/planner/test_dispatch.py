"""What partitioned experts hold inside their operator: the forms against its code on real ranks."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fsdp2kit.config.checks import check_config
from fsdp2kit.job import distributed
from fsdp2kit.parallel.expert_parallel import exchange
from fsdp2kit.parallel.expert_parallel.experts import (
    ExpertKind,
    register_kind,
    routed_experts,
    routed_experts_backward,
)
from fsdp2kit.planner.allocations import Allocations
from fsdp2kit.planner.dispatch import IMBALANCE, Dispatch
from fsdp2kit.torch_compat import FakeTensorMode
from fsdp2kit.train.step import accumulate_gradients, cross_entropy
from tests.planner.helpers.models import QWEN3_30B, config_of, planned, small
from tests.planner.helpers.trace import trace_step
from tests.support.workers import WorkerPool

TOKENS, VISITED, EXPERTS, HIDDEN, WIDTH = 512, 2, 8, 64, 96


def gated(projected: Tensor) -> Tensor:
    """As Qwen3's experts."""
    gate, up = projected.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def peaks(ranks: int) -> tuple[int, int, int]:
    """Bytes that a rank's operator holds at most in forward and in backward, where routing is even, beside what it is
    given; and bytes of its experts."""
    distributed.start()
    group: Any = dist.group.WORLD
    kind = ExpertKind("of a test", gated, is_transposed=False, has_bias=False)
    register_kind(kind)
    held = exchange.shares(EXPERTS, ranks)[dist.get_rank()]
    parameters = [torch.randn(held, 2 * WIDTH, HIDDEN), torch.randn(held, HIDDEN, WIDTH)]
    hidden, weights = torch.randn(TOKENS, HIDDEN), torch.rand(TOKENS, VISITED)
    index = torch.arange(TOKENS * VISITED).view(TOKENS, VISITED) % EXPERTS
    with Allocations() as allocations:
        allocations.mark([hidden, index, weights, *parameters], "given")
        allocations.start()
        names = EXPERTS, kind.name, group.group_name
        _, *saved = routed_experts._init_fn(hidden, index, weights, parameters, *names)
        forward = sum(size for one, size in allocations.peak() if one.category != "given")
        allocations.mark(saved, "given")
        allocations.start()
        routed_experts_backward._init_fn(hidden, index, weights, saved, parameters, [True, True], *names)
        backward = sum(size for one, size in allocations.peak() if one.category != "given")
    of_experts = sum(parameter.nbytes for parameter in parameters)
    return forward, backward, of_experts


@pytest.mark.full
def test_the_operator_holds_what_the_plan_says_and_a_rank_its_share_of_experts(pool: WorkerPool) -> None:
    whole = EXPERTS * 3 * WIDTH * HIDDEN * 4
    for ranks in (1, 2, 4):
        held = -(-EXPERTS // ranks)
        planned = Dispatch(TOKENS * VISITED, EXPERTS, held, ranks, HIDDEN, 2 * WIDTH, WIDTH, 4)
        assert planned.rows() == TOKENS * VISITED
        for forward, backward, of_experts in pool.run(ranks, peaks, ranks):
            assert of_experts == whole // ranks
            if ranks > 1:  # alone it exchanges nothing
                assert planned.kept() + planned.forward() == pytest.approx(forward, rel=0.15)
                of_down = of_experts // 3  # the gradient that is there at the peak
                assert planned.backward() + of_down == pytest.approx(backward, rel=0.15)


def gathered_for(experts: int, ep: int) -> int:
    """Bytes at the peak of backward on one of 64 ranks, beside shards, their gradients and the optimizer's state."""
    model = {**small(QWEN3_30B), "num_experts": experts, "vocab_size": 64}
    config = config_of(model, ranks=64, mesh={"ep": ep}, data={"seq_len": 16}, fsdp={"param_dtype": "float32"})
    sizes = check_config(config, world_size=64, local_world_size=8)
    found = trace_step(config, sizes, accumulate=partial(accumulate_gradients, objective=cross_entropy))["backward"]
    return sum(size for name, size in found.items() if name not in ("parameters", "gradients", "optimizer"))


@pytest.mark.full
def test_what_a_rank_gathers_of_experts_is_divided_by_ep() -> None:
    """The real modules, traced: what more experts add to the peak while tokens visit as many as before."""
    added = {ep: gathered_for(128, ep) - gathered_for(64, ep) for ep in (1, 2, 4, 8)}
    layer = 64 * 3 * (QWEN3_30B["hidden_size"] // 16) * (QWEN3_30B["moe_intermediate_size"] // 16) * 4
    assert added[1] > 2 * layer, "a layer's experts and their gradients"
    for ep in (2, 4, 8):
        assert added[ep] * ep == pytest.approx(added[1], rel=0.15), added


def test_another_load() -> None:
    """A rank receives no more than all pairs of all ranks, however uneven the routing."""
    even = Dispatch(pairs=60, experts=6, held=2, ranks=4, hidden=8, projected=4, activated=2, item=2)
    assert even.rows() == 80  # two of six experts, of four ranks' pairs
    assert even.rows(IMBALANCE) == 160
    assert even.rows(10) == 240
    assert even.kept(IMBALANCE) == 2 * even.kept() == 2 * 80 * 12 * 2


def test_moments_hold_what_is_exchanged() -> None:
    plan = planned(config_of(small(QWEN3_30B), mesh={"ep": 4}, data={"seq_len": 4096}))
    assert plan.dispatch is not None
    held = max(moment.bytes.get("attention and exchange", 0) for moment in plan.moments)
    assert held == pytest.approx(plan.dispatch.exchanged, rel=0.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_grouped_product_of_fake_tensors_allocates_what_a_real_one_does(dtype: torch.dtype) -> None:
    def peak(fake: FakeTensorMode | None) -> int:
        rows, matrices = torch.randn(12, 16, dtype=dtype), torch.randn(3, 16, 24, dtype=dtype)
        rows.requires_grad_(), matrices.requires_grad_()
        with Allocations(fake) as allocations:
            ends = torch.tensor([2, 2, 12], dtype=torch.int32)
            torch.nn.functional.grouped_mm(rows, matrices, offs=ends).pow(2).sum().backward()
        assert rows.grad is not None
        assert matrices.grad is not None
        assert (rows.grad.shape, matrices.grad.shape) == (rows.shape, matrices.shape)
        return sum(size for _, size in allocations.peak())

    real = peak(None)
    with FakeTensorMode() as fake:
        assert peak(fake) == real
