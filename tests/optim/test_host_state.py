"""State that is brought and taken away part by part gives the optimizer's own updates, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import get_constant_schedule_with_warmup

from fsdp2kit.job.distributed import local_part, sharded_like
from fsdp2kit.optim.host_state import HostState, in_batches, keep_state_on_host, largest_shard
from tests.support.lagging_copies import LaggingCopies


def _parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(size, 3, generator=generator)) for size in (5, 1, 7, 2)]


def _gradients(step: int) -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(step)
    gradients: list[Tensor | None] = [torch.randn(size, 3, generator=generator) for size in (5, 1, 7, 2)]
    if step == 1:
        gradients[1] = None  # not every parameter has one in every step
    return gradients


def updated(elements: int | None, steps: int = 4) -> tuple[list[nn.Parameter], list[dict[str, Tensor]]]:
    """Parameters and state after some steps, with so many elements on the device at once; None: whole steps."""
    parameters = _parameters()
    groups = [{"params": parameters[:2], "weight_decay": 0.1}, {"params": parameters[2:]}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, fused=True)
    if elements is not None:
        keep_state_on_host(optimizer, elements_at_once=elements)
    schedule = get_constant_schedule_with_warmup(optimizer, 2)
    for step in range(steps):
        for parameter, gradient in zip(parameters, _gradients(step), strict=True):
            parameter.grad = gradient
        optimizer.step()
        schedule.step()
        assert [p.grad is None for p in parameters] == [g is None for g in _gradients(step)]
    return parameters, [optimizer.state[parameter] for parameter in parameters]


def assert_equal(one: Any, other: Any) -> None:
    assert all(torch.equal(a, b) for a, b in zip(one[0], other[0], strict=True))
    for ours, theirs in zip(one[1], other[1], strict=True):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("elements", [1, 16, 21, 1000])
def test_updates_are_those_of_one_whole_step(elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    to_device = HostState.to_device

    def counting(self: HostState, batch: list[Tensor]) -> None:
        seen.extend(parameter.numel() for parameter in batch)
        to_device(self, batch)

    monkeypatch.setattr(HostState, "to_device", counting)
    assert_equal(updated(elements), updated(None))
    assert len(seen) == 15, "four parameters in four steps, but for one gradient"


def test_a_part_holds_no_more_than_asked_for() -> None:
    parameters = _parameters()
    for elements, sizes in ((1, [1, 1, 1, 1]), (18, [2, 1, 1]), (27, [2, 2]), (1000, [4])):
        batches = list(in_batches(parameters, largest_shard, largest=elements))
        assert [len(batch) for batch in batches] == sizes
        assert [id(parameter) for batch in batches for parameter in batch] == [id(p) for p in parameters]


def test_all_state_goes_to_the_host_and_comes_back() -> None:
    parameters = _parameters()
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    for parameter, gradient in zip(parameters, _gradients(0), strict=True):
        parameter.grad = gradient
    optimizer.step()
    before = [dict(optimizer.state[parameter]) for parameter in parameters]
    host = HostState(optimizer)
    for _ in range(2):
        host.to_host()
        host.wait()
        addresses = [optimizer.state[parameter]["exp_avg"].data_ptr() for parameter in parameters]
        assert not {state["exp_avg"].data_ptr() for state in before} & set(addresses)
        host.to_device()
        for parameter, state in zip(parameters, before, strict=True):
            assert all(torch.equal(optimizer.state[parameter][name], state[name]) for name in state)


def test_a_shard_stays_where_it_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a mesh of CUDA devices, `DTensor.from_local` moves what lies on the host to the device."""
    with _one_rank():
        whole = distribute_tensor(torch.ones(4, 3), init_device_mesh("cpu", (1,)), [Shard(0)])
        monkeypatch.setattr(DeviceMesh, "device_type", property(lambda mesh: "cuda"), raising=False)
        host = torch.zeros(4, 2)
        shard = sharded_like(whole, host, torch.Size((4, 2)))
    assert local_part(shard).data_ptr() == host.data_ptr()
    assert (shard.shape, shard.stride(), shard.placements) == (host.shape, host.stride(), whole.placements)


@contextmanager
def _one_rank() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def test_copies_may_lag_until_the_step_waits_once(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = updated(16)
    with monkeypatch.context() as patch:
        copies = LaggingCopies(patch)
        assert_equal(updated(16), expected)
        assert copies.waits == 4


def test_a_state_that_is_read_without_a_wait_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostState, "wait", lambda self: None)
    with monkeypatch.context() as patch:
        LaggingCopies(patch)
        _, state = updated(16, steps=1)
    assert all(values["exp_avg"].isnan().all() for values in state if values)


def test_a_buffer_that_the_host_writes_to_too_early_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        copies = LaggingCopies(patch)
        pinned = torch.ones(3)
        pinned.to("cuda", non_blocking=True)
        copies.wait()
        pinned.to("cuda", non_blocking=True)
        pinned[1] = 2.0
        with pytest.raises(AssertionError, match="still being copied"):
            copies.wait()
