"""The process group on a CUDA machine: NCCL for device tensors, gloo for host numbers, in one group."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from fsdp2kit.errors import UserError
from fsdp2kit.job.distributed import World
from fsdp2kit.torch_compat import nccl_error

pytestmark = pytest.mark.gpu


def test_a_run_is_bound_to_its_device(world: World) -> None:
    assert world.device == torch.device("cuda", 0)
    assert torch.cuda.current_device() == 0


def test_the_group_carries_host_and_device_tensors(world: World) -> None:
    on_device, on_host = torch.ones(4, device=world.device), torch.ones(4)

    dist.all_reduce(on_device)
    dist.all_reduce(on_host)

    assert dist.get_backend_config() == "cpu:gloo,cuda:nccl"
    assert nccl_error() is None
    assert on_device.tolist() == on_host.tolist() == [1.0] * 4


def test_objects_travel_on_gloo(world: World) -> None:
    """What ranks agree on must not wait for the device (`gather_objects` needs no collective in a world of one)."""
    found: list = [None]
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]

    dist.all_gather_object(found, {"rank": 0})

    assert found == [{"rank": 0}]
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def test_a_local_rank_without_a_device_is_a_users_mistake(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    from fsdp2kit.job import distributed

    monkeypatch.setenv("LOCAL_RANK", str(torch.cuda.device_count()))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(torch.cuda.device_count() + 1))
    with pytest.raises(UserError, match="has no CUDA device"):
        distributed.start()
