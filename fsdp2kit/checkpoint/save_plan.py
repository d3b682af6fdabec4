"""Which rank writes what several ranks hold, and what rank 0 is told of it.

DCP's own planner sends rank 0 an item for every part of every tensor and gets all items back; at the end all ranks are
sent the whole metadata. Here one rule tells every rank which tensors it writes, and which tensors are of one kind. It
sends one item of each kind, and after the write three numbers a tensor. The checkpoint is a standard one.
"""

from __future__ import annotations

import hashlib
import heapq
import math
from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.futures import Future

from fsdp2kit.checkpoint.reader import no_garbage_collection
from fsdp2kit.errors import RunFailure
from fsdp2kit.job.distributed import host_of
from fsdp2kit.torch_compat import FsspecWriter, StorageInfo


class Kind(NamedTuple):
    """What two tensors share whose parts lie alike on all ranks, and are written by the same ranks."""

    shape: torch.Size
    dtype: torch.dtype
    placements: tuple[Placement, ...]
    """Empty: not sharded."""
    mesh: int
    """The number of the mesh, in the order of the tensors' names; −1: not sharded."""
    writer: int
    """Which of the ranks that hold the same part writes it."""


class SharedSavePlanner(dcp.DefaultSavePlanner):
    """DCP's planner for tensors: a rank writes what is its share, and tells rank 0 of one tensor of each kind.

    Args:
        rank: this rank's, among those that save together.
        world_size: how many these are; all hold the same values of a tensor that is not sharded.
    """

    def __init__(self, *, rank: int, world_size: int) -> None:
        super().__init__()
        self._rank, self._world_size = rank, world_size

    def create_local_plan(self) -> SavePlan:
        """What rank 0 must know. ``self.plan`` has an item for every tensor that this rank writes."""
        whole = super().create_local_plan()
        kinds = kinds_of(self.state_dict, world_size=self._world_size)

        def is_mine(name: str) -> bool:
            own, _ = _place(self.state_dict[name], rank=self._rank, world_size=self._world_size)
            return kinds[name].writer == own

        self.plan = replace(whole, items=[item for item in whole.items if is_mine(item.index.fqn)])
        first: dict[Kind, str] = {}
        self._examples = {name: first.setdefault(kind, name) for name, kind in kinds.items()}
        items = [item for item in self.plan.items if self._examples[item.index.fqn] == item.index.fqn]
        return replace(whole, items=items, planner_data=hashlib.sha256(repr(kinds).encode()).hexdigest())

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """DCP plans and checks one tensor of each kind; all tensors of a kind then share its metadata."""
        for number, plan in enumerate(all_plans):
            if plan.planner_data != all_plans[0].planner_data:
                raise RunFailure(f"rank {number} on {host_of(number)} has other tensors than rank 0, or other shards")
        plans = [replace(plan, planner_data={}) for plan in all_plans]
        plans[0] = replace(plans[0], planner_data=self.mappings)
        plans, metadata = super().create_global_plan(plans)
        # In the order of the state dict, which exports keep.
        found = {name: metadata.state_dict_metadata[self._examples[name]] for name in self.state_dict}
        return [replace(plan, planner_data=None) for plan in plans], replace(metadata, state_dict_metadata=found)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """This rank's own items, with what rank 0 added: where to write them."""
        return super().finish_plan(replace(new_plan, items=self.plan.items))


def kinds_of(tensors: Mapping[str, Tensor], *, world_size: int) -> dict[str, Kind]:
    """The kind of each tensor, in the order of their names; the same on every rank."""
    by_holders: dict[int, list[tuple[int, str]]] = {}
    for name, tensor in tensors.items():
        _, count = _place(tensor, rank=0, world_size=world_size)
        by_holders.setdefault(count, []).append((tensor.numel() * tensor.itemsize, name))
    writers = {name: writer for count, sizes in by_holders.items() for name, writer in share_out(sizes, count).items()}
    meshes: dict[DeviceMesh, int] = {}
    kinds = {}
    for name, tensor in sorted(tensors.items()):
        placements, mesh = (), -1
        if isinstance(tensor, DTensor):
            placements, mesh = tensor.placements, meshes.setdefault(tensor.device_mesh, len(meshes))
        kinds[name] = Kind(tensor.shape, tensor.dtype, placements, mesh, writers[name])
    return kinds


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


@dataclass
class Written:
    """What a rank wrote to one file of parts that begin at the same place of their tensors."""

    file: str
    start: torch.Size | None
    tensors: array[int] = field(default_factory=lambda: array("q"))
    """Numbers of the tensors, in the order of all names."""
    offsets: array[int] = field(default_factory=lambda: array("q"))
    """Bytes from the file's beginning on."""
    lengths: array[int] = field(default_factory=lambda: array("q"))
    """Bytes."""


class _WritesBriefly:
    """For a DCP writer: a rank sends `Written`, from which rank 0 makes DCP's objects; they stay on rank 0."""

    def write_data(self, plan: SavePlan, planner: Any) -> Future[Any]:
        """Write this rank's part; its result is a list of `Written`.

        Raises:
            OSError: the disk refused a write. torch.save sometimes hides it behind a `RuntimeError` of its own, and
                ranks tell each other the last error alone.
        """
        try:
            done = super().write_data(plan, planner)  # pyright: ignore[reportAttributeAccessIssue]
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise
        found: Future[Any] = Future()
        found.set_result(summarize(done.wait(), planner.state_dict))
        return found

    def finish(self, metadata: Metadata, results: list[list[Written]]) -> None:
        """Write the metadata file. ``metadata`` itself stays without the parts' places: DCP sends it to all ranks."""
        names = sorted(metadata.state_dict_metadata)
        expanded = (expand(of_rank, names) for of_rank in results)
        with no_garbage_collection():
            super().finish(replace(metadata), expanded)  # pyright: ignore[reportAttributeAccessIssue]


class BriefWriter(_WritesBriefly, dcp.FileSystemWriter):
    """Writes to a file system."""


class BriefFsspecWriter(_WritesBriefly, FsspecWriter):
    """Writes to a URL."""


def summarize(results: Iterable[WriteResult], names: Iterable[str]) -> list[Written]:
    """What a rank sends of its results.

    Args:
        names: of all tensors that are saved.
    """
    numbers, found = {name: number for number, name in enumerate(sorted(names))}, {}
    for result in results:
        place, start = result.storage_data, result.index.offset
        assert not place.transform_descriptors, "nothing is compressed"
        written = found.setdefault((place.relative_path, start), Written(place.relative_path, start))
        written.tensors.append(numbers[result.index.fqn])
        written.offsets.append(place.offset)
        written.lengths.append(place.length)
    return list(found.values())


def expand(of_rank: Iterable[Written], names: list[str]) -> Iterator[WriteResult]:
    """A rank's results as DCP has them, made when they are asked for.

    Args:
        names: of all tensors, in order.
    """
    for written in of_rank:
        for number, offset, length in zip(written.tensors, written.offsets, written.lengths, strict=True):
            index = MetadataIndex(names[number])
            # The constructor would copy the offset; one object is written to the file once.
            object.__setattr__(index, "offset", written.start)
            yield WriteResult(index, length, StorageInfo(written.file, offset, length))
