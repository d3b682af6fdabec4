"""Which rank writes what several ranks hold: a rule that every rank applies by itself.

DCP's own planner sends the plans of all ranks to rank 0, each with every tensor that the rank holds, and drops there
what is planned twice. With many replicas that is nearly all. Here a rank plans only what it writes, so rank 0 is sent
each part of each tensor once, for any number of replicas.
"""

from __future__ import annotations

import gc
import heapq
import math
from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.tensor import DTensor


class SharedSavePlanner(dcp.DefaultSavePlanner):
    """DCP's planner for tensors, without those that another rank writes.

    Args:
        rank: this rank's, among those that save together.
        world_size: how many these are; all hold the same values of a tensor that is not sharded.
    """

    def __init__(self, *, rank: int, world_size: int) -> None:
        super().__init__()
        self._rank, self._world_size = rank, world_size

    def create_local_plan(self) -> SavePlan:
        """This rank's part; the names of all tensors come from the coordinator alone."""
        plan = super().create_local_plan()
        mine = written_by(self.state_dict, rank=self._rank, world_size=self._world_size)
        items = [item for item in plan.items if item.index.fqn in mine]
        self.plan = replace(plan, items=items, planner_data=plan.planner_data if self.is_coordinator else {})
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """The plans of all ranks as one, on the coordinator.

        Python collects no garbage meanwhile: looking through all the parts again and again takes longer than planning.
        """
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            return super().create_global_plan(all_plans)
        finally:
            if was_enabled:
                gc.enable()


def written_by(tensors: Mapping[str, Tensor], *, rank: int, world_size: int) -> set[str]:
    """The names of the tensors that this rank writes: it writes its own part of each."""
    by_holders: dict[int, list[tuple[int, str]]] = {}
    place: dict[str, tuple[int, int]] = {}
    for name, tensor in tensors.items():
        place[name] = _place(tensor, rank=rank, world_size=world_size)
        by_holders.setdefault(place[name][1], []).append((tensor.numel() * tensor.itemsize, name))
    writers = {name: writer for count, sizes in by_holders.items() for name, writer in share_out(sizes, count).items()}
    return {name for name, (index, _) in place.items() if writers[name] == index}


def share_out(sizes: Iterable[tuple[int, str]], count: int) -> dict[str, int]:
    """One of ``count`` holders for each name, so that all write about as many bytes; the same on every rank.

    Args:
        sizes: bytes and name of each tensor.
    """
    loads = [(0, holder) for holder in range(count)]
    found = {}
    for size, name in sorted(sizes, key=lambda one: (-one[0], one[1])):
        load, found[name] = loads[0]
        heapq.heapreplace(loads, (load + size, found[name]))
    return found


def _place(tensor: Tensor, *, rank: int, world_size: int) -> tuple[int, int]:
    """The number of this rank among those that hold the same part of a tensor, and how many these are."""
    if not isinstance(tensor, DTensor):
        return rank, world_size
    mesh = tensor.device_mesh
    assert not any(placement.is_partial() for placement in tensor.placements), "what is saved is reduced"
    over = [dim for dim, placement in enumerate(tensor.placements) if placement.is_replicate()]
    index = 0
    for dim in over:
        index = index * mesh.size(dim) + mesh.get_local_rank(dim)
    return index, math.prod(mesh.size(dim) for dim in over)
