"""What context parallelism keeps in memory and sends is what its docstrings say."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fsdp2kit import distributed
from fsdp2kit.bench.context_parallel import LAYERS, METHODS, expected_bytes, measure_costs
from fsdp2kit.parallel.context_parallel.ring import ring_forward
from fsdp2kit.parallel.context_parallel.segments import plan_segments, read_segments
from tests.workers import WorkerPool

LENGTH = 768


def costs(method: Any, cp: int) -> tuple[int, tuple[int, int], tuple[int, int]]:
    """Activation bytes, bytes sent per layer in forward and backward, and what the formulae say."""
    found = measure_costs(method, cp=cp, seq_len=LENGTH)
    sent = (found.forward.total // LAYERS, found.backward.total // LAYERS)
    dist.all_reduce(torch.ones(1))  # groups work as before
    rank = distributed.start().rank % cp
    return found.activation_bytes, sent, expected_bytes(method, cp=cp, rank=rank, tokens=LENGTH // cp)


def alone() -> int:
    return measure_costs(None, cp=1, seq_len=LENGTH).activation_bytes


@pytest.mark.parametrize("cp", [2, 3, 4])
@pytest.mark.parametrize("method", METHODS)
def test_memory_is_shared_out_and_traffic_is_as_planned(method: str, cp: int, pool: WorkerPool) -> None:
    whole = pool.run(1, alone)[0]
    for activations, sent, formula in pool.run(cp, costs, method, cp):
        assert sent == formula
        assert activations * cp == pytest.approx(whole, rel=0.15)


def most_blocks_alive(cp: int) -> int:
    """The most received tensors that a ring's forward pass holds at once, two to a block of keys and values."""
    alive: set[int] = set()
    most = 0
    original = torch.empty_like

    def counting(tensor: Tensor, **options: Any) -> Tensor:
        nonlocal most
        made = original(tensor, **options)
        alive.add(id(made))
        weakref.finalize(made, alive.discard, id(made))
        most = max(most, len(alive))
        return made

    group = dist.group.WORLD
    query, key = torch.randn(1, 4, 8, 16), torch.randn(1, 2, 8, 16)
    table = plan_segments([[0, 8 * cp]], method="ring", rank=dist.get_rank(), cp=cp, window=None)
    torch.empty_like = counting
    try:
        ring_forward(query, key, key.clone(), read_segments(table), scale=1.0, group=group)
    finally:
        torch.empty_like = original
    return most


def test_a_ring_holds_two_blocks_beside_its_own(pool: WorkerPool) -> None:
    assert pool.run(4, most_blocks_alive, 4) == [4] * 4
