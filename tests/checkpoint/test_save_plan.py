"""Every part of every tensor is planned once among all ranks, about as many bytes on each, and DCP reads it back."""

from __future__ import annotations

import gc
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader

from fsdp2kit.checkpoint.save_plan import SharedSavePlanner, share_out
from fsdp2kit.checkpoint.state import model_tensors, optimizer_tensors, save_tensors
from fsdp2kit.distributed import gather_objects
from tests.checkpoint import jobs
from tests.workers import WorkerPool

Items = list[tuple[str, tuple[int, ...], int]]


def state(*, replicate: int) -> dict[str, dict[str, Tensor]]:
    """A trained model and its optimizer, and a table that is not sharded."""
    model = jobs.sharded(jobs.tiny_llama(), replicate=replicate)
    optimizer = jobs.adamw(model)
    jobs.train(model, optimizer, range(1))
    whole = {"table": torch.arange(40.0).view(8, 5)}
    return {"model": model_tensors(model) | whole, "optimizer": optimizer_tensors(model, optimizer)}


def plan_and_save(folder: Path, replicate: int) -> tuple[Items, Items, bool]:
    """What this rank plans to write, what DCP's own planner would, and whether a load gives back what was saved."""
    tensors, plans = state(replicate=replicate), []
    own = SharedSavePlanner(rank=dist.get_rank(), world_size=dist.get_world_size())
    for planner in (own, dcp.DefaultSavePlanner()):
        planner.set_up_planner(tensors, is_coordinator=dist.get_rank() == 0)
        items = planner.create_local_plan().items
        sizes = [(item, item.tensor_data) for item in items]
        assert all(data is not None for _, data in sizes)
        plans.append(
            [
                (item.index.fqn, tuple(item.index.offset or ()), data.chunk.sizes.numel())
                for item, data in sizes
                if data is not None
            ]
        )
    save_tensors(tensors, folder)
    read = {part: {name: torch.zeros_like(one) for name, one in named.items()} for part, named in tensors.items()}
    dcp.load(read, checkpoint_id=folder)
    same = [
        torch.equal(_local(one), _local(read[part][name])) for part in tensors for name, one in tensors[part].items()
    ]
    return *plans, all(same)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # pyright: ignore[reportCallIssue]


@pytest.mark.parametrize("replicate", [1, 2])
def test_each_part_is_planned_by_one_of_its_holders(replicate: int, pool: WorkerPool, tmp_path: Path) -> None:
    found = pool.run(4, plan_and_save, tmp_path / "saved", replicate)
    parts = Counter((name, offset) for own, _, _ in found for name, offset, _ in own)
    assert set(parts.values()) == {1}
    assert parts.keys() == {(name, offset) for _, whole, _ in found for name, offset, _ in whole}
    assert all(same for *_, same in found)
    for own, whole, _ in found:
        assert set(own) <= set(whole)
    written = [sum(size for *_, size in own) for own, _, _ in found]
    assert max(written) - min(written) <= max(size for _, whole, _ in found for *_, size in whole)
    metadata = FileSystemReader(tmp_path / "saved").read_metadata()
    assert metadata.planner_data.keys() == metadata.state_dict_metadata.keys()


def test_no_garbage_is_collected_while_the_plan_is_made_or_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []
    original = dcp.DefaultSavePlanner.create_global_plan

    def looking(planner: dcp.DefaultSavePlanner, plans: Any) -> Any:
        seen.append(gc.isenabled())
        return 1 / 0 if len(seen) > 1 else original(planner, plans)

    monkeypatch.setattr(dcp.DefaultSavePlanner, "create_global_plan", looking)
    save_tensors({"model": {"one": torch.ones(1)}}, tmp_path / "x", alone=True)
    assert gc.isenabled()
    with pytest.raises(dcp.CheckpointException):
        save_tensors({"model": {"one": torch.ones(1)}}, tmp_path / "y", alone=True)
    assert gc.isenabled()
    assert seen == [False, False]


def test_bytes_are_shared_out_evenly() -> None:
    """Into the least loaded, the largest first: the loads differ by no more than the last tensor of the fullest."""
    sizes = [(number * number, f"t{number}") for number in range(1, 60)]
    holders = share_out(reversed(sizes), 7)
    assert holders == share_out(sizes, 7), "in whatever order a rank lists them"
    loads = Counter({holders[name]: 0 for _, name in sizes})
    for size, name in sizes:
        loads[holders[name]] += size
    assert sum(loads.values()) == sum(size for size, _ in sizes)
    assert len(loads) == 7
    assert max(loads.values()) - min(loads.values()) < 0.1 * max(loads.values())


def _names_agree() -> bool:
    """A save within a group of some ranks is theirs alone."""
    group: Any = dist.new_group([0, 1])
    if dist.get_rank() > 1:
        return True
    planner = SharedSavePlanner(rank=dist.get_rank(group), world_size=dist.get_world_size(group))
    planner.set_up_planner({f"t{n}": torch.ones(n) for n in range(1, 9)}, is_coordinator=False)
    names = [item.index.fqn for item in planner.create_local_plan().items]
    return sorted(name for one in gather_objects(names, group=group) for name in one) == [f"t{n}" for n in range(1, 9)]


def test_tensors_that_are_not_sharded_are_dealt_out(pool: WorkerPool) -> None:
    assert all(pool.run(4, _names_agree))
