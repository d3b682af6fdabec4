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
        self._rank, self._world_size, self._paused = rank, world_size, False

    def create_local_plan(self) -> SavePlan:
        """This rank's part; the names of all tensors come from the coordinator alone.

        The coordinator collects no garbage until `finish_plan`: looking through the parts of all ranks again and again
        takes longer than planning them.
        """
        plan = super().create_local_plan()
        mine = written_by(self.state_dict, rank=self._rank, world_size=self._world_size)
        items = [item for item in plan.items if item.index.fqn in mine]
        self.plan = replace(plan, items=items, planner_data=plan.planner_data if self.is_coordinator else {})
        if self.is_coordinator and gc.isenabled():
            self._paused = True
            gc.disable()
        return self.plan

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Called when the global plan is made."""
        self.collect_again()
        return super().finish_plan(new_plan)

    def collect_again(self) -> None:
        """Switch garbage collection on, if this planner switched it off."""
        if self._paused:
            self._paused = False
            gc.enable()


def written_by(tensors: Mapping[str, Tensor], *, rank: int, world_size: int) -> set[str]:
    """The names of the tensors of which this rank writes the part that it holds."""
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
    over = [dim for dim, placement in enumerate(tensor.placements) if placement.is_replicate()]
    index = 0
    for dim in over:
        index = index * mesh.size(dim) + mesh.get_local_rank(dim)
    return index, math.prod(mesh.size(dim) for dim in over)
