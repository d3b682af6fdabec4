"""Two device meshes over the same ranks: one to shard parameters over, one to deal out batches and sequences.

    rank = (dp_replicate index · dp_shard + dp_shard index) · cp + cp index

Context-parallel ranks are neighbours, so that their traffic stays within a node; they hold different parameter
shards too, hence sharding runs over dp_shard × cp together.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from fsdp2kit.config.checks import MeshSizes, resolve_mesh
from fsdp2kit.config.schema import FSDPConfig, MeshConfig
from fsdp2kit.distributed import World
from fsdp2kit.torch_compat import timeout_of


@dataclass(frozen=True)
class Mesh:
    """The job's device mesh, and this rank's place in it."""

    sizes: MeshSizes
    shard: DeviceMesh
    """For `fully_shard`: ``("shard",)``, or ``("replicate", "shard")`` when the model is replicated."""
    batch: DeviceMesh
    """``("dp", "cp")``: along dp ranks see other sequences, along cp other parts of the same sequences."""

    @property
    def dp_rank(self) -> int:
        return self.batch.get_local_rank("dp")

    @property
    def cp_rank(self) -> int:
        return self.batch.get_local_rank("cp")

    @property
    def cp_group(self) -> ProcessGroup:
        return self.batch.get_group("cp")


def build_mesh(mesh: MeshConfig, fsdp: FSDPConfig, *, world: World) -> Mesh:
    """Create both device meshes. The process group must be up (`fsdp2kit.distributed.start`).

    Raises:
        UserError: the sizes do not fit the world or the strategy.
    """
    sizes = resolve_mesh(mesh, fsdp, world_size=world.size, local_world_size=world.local_size)
    replicate, shard = sizes.dp_replicate, sizes.dp_shard * sizes.cp
    if fsdp.strategy == "no_shard":
        replicate, shard = world.size, 1
    device_type = world.device.type
    if replicate > 1:
        shard_mesh = _device_mesh(device_type, {"replicate": replicate, "shard": shard})
    else:
        shard_mesh = _device_mesh(device_type, {"shard": shard})
    return Mesh(sizes, shard_mesh, _device_mesh(device_type, {"dp": sizes.dp, "cp": sizes.cp}))


def _device_mesh(device_type: str, dims: dict[str, int]) -> DeviceMesh:
    """`init_device_mesh`, whose groups would not keep to the job's timeout (`run.timeout_minutes`)."""
    ranks = torch.arange(math.prod(dims.values())).view(*dims.values())
    groups = [_group_along(ranks, dim) for dim in range(ranks.ndim)]
    return DeviceMesh.from_group(groups, device_type, ranks, mesh_dim_names=tuple(dims))


def _group_along(ranks: Tensor, dim: int) -> ProcessGroup:
    """This rank's group of those that differ along ``dim`` alone. Collective."""
    if ranks.shape[dim] == ranks.numel() and dist.group.WORLD is not None:
        return dist.group.WORLD
    lists = ranks.movedim(dim, -1).reshape(-1, ranks.shape[dim]).tolist()
    group, _ = dist.new_subgroups_by_enumeration(lists, timeout=timeout_of())
    assert isinstance(group, ProcessGroup), "every rank is in a group"
    return group
