"""Two device meshes over the same ranks: one to shard parameters over, one to deal out batches and sequences.

    rank = (dp_replicate index · dp_shard + dp_shard index) · cp + cp index

Context-parallel ranks are neighbours, so that their traffic stays within a node; they hold different parameter
shards too, hence sharding runs over dp_shard × cp together.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp2kit.config.checks import MeshSizes, resolve_mesh
from fsdp2kit.config.schema import FSDPConfig, MeshConfig
from fsdp2kit.distributed import World


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
        shard_mesh = init_device_mesh(device_type, (replicate, shard), mesh_dim_names=("replicate", "shard"))
    else:
        shard_mesh = init_device_mesh(device_type, (shard,), mesh_dim_names=("shard",))
    batch_mesh = init_device_mesh(device_type, (sizes.dp, sizes.cp), mesh_dim_names=("dp", "cp"))
    return Mesh(sizes, shard_mesh, batch_mesh)
