"""The device mesh with named dims, and the groups that follow: which ranks read, share or shard what.

    rank = (dp_replicate index · dp_shard + dp_shard index) · cp + cp index

Context-parallel ranks are neighbours, so that their traffic stays within a node; they hold different parameter
shards too, so sharding runs over dp_shard × cp together. Experts are partitioned over ep neighbours among these, and
each expert is sharded over the others:

    rank = (dp_replicate index · (dp_shard · cp / ep) + expert_shard index) · ep + expert index

All groups are computed here; another dimension is added here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from fsdp2kit.config.checks import MeshSizes, resolve_mesh, shard_ranks
from fsdp2kit.config.schema import FSDPConfig, MeshConfig
from fsdp2kit.job.distributed import World, reduce_numbers
from fsdp2kit.torch_compat import timeout_of

# Each job's groups by dimension and ranks: a job that builds many meshes (`fsdp2kit parity`) makes each group once.
_GROUPS: WeakKeyDictionary[ProcessGroup, dict[tuple[str, str], ProcessGroup]] = WeakKeyDictionary()


@dataclass(frozen=True)
class Mesh:
    """The job's device mesh, and this rank's coordinates in it."""

    sizes: MeshSizes
    rank: int
    """This rank's number in the job."""
    device: torch.device
    """This rank's device."""
    shard: DeviceMesh
    """For `fully_shard`: ``("shard",)``, or ``("replicate", "shard")`` when the model is replicated."""
    batch: DeviceMesh
    """``("dp", "cp")``: ranks along dp read different sequences, ranks along cp hold slices of the same ones."""
    experts: DeviceMesh | None = None
    """``("shard", "expert")``, or with ``"replicate"`` in front: ranks along "expert" hold different experts, ranks
    along "shard" different shards of the same ones. None: ep is 1."""

    @property
    def expert_shard(self) -> DeviceMesh | None:
        """As `shard`, of partitioned experts."""
        if self.experts is None:
            return None
        return self.experts["replicate", "shard"] if self.experts.ndim == 3 else self.experts["shard"]

    @property
    def dp_rank(self) -> int:
        """Which share of a global batch this rank reads."""
        return self.batch.get_local_rank("dp")

    @property
    def cp_rank(self) -> int:
        """Which slice of each sequence this rank holds."""
        return self.batch.get_local_rank("cp")

    @property
    def cp_group(self) -> ProcessGroup:
        """The ranks that share a row."""
        return self.batch.get_group("cp")

    @property
    def ranks_per_row(self) -> int:
        """How many ranks read the same rows; each computes its slice of them."""
        return self.sizes.cp

    @property
    def reads_first_share(self) -> bool:
        """Whether this is dp rank 0. When every rank holds the same row, only the first dp rank's result is used."""
        return self.dp_rank == 0

    def sum_loss(self, loss: Tensor) -> Tensor:
        """Sum a device tensor, in place, over all ranks, each of which holds a part of the loss. Collective."""
        if self.batch.size() > 1:
            dist.all_reduce(loss)
        return loss

    def sum_over_cp(self, local: Tensor) -> Tensor:
        """Sum a device tensor, such as each document's sum, over the ranks that share a row. Collective.

        These ranks then have the same loss. Each divides it by `sizes.cp`, so that the gradients add up to the loss's.
        """
        if self.sizes.cp == 1:
            return local
        total = local.detach().clone()
        dist.all_reduce(total, group=self.cp_group)
        # Each of the `cp` equal losses has a share of the gradient of every rank's part.
        return total + self.sizes.cp * (local - local.detach())

    def sum_over_rows(self, flags: list[float], counts: list[float]) -> tuple[list[float], list[int]]:
        """Sum host numbers over the job in one collective, counting every row once.

        Args:
            flags: summed over all ranks.
            counts: of this rank's rows, which all ranks of a `cp_group` read.
        """
        sums = reduce_numbers([*flags, *counts])
        return sums[: len(flags)], [round(value / self.ranks_per_row) for value in sums[len(flags) :]]


def build_mesh(mesh: MeshConfig, fsdp: FSDPConfig, *, world: World) -> Mesh:
    """Create the device meshes for sharding and for batches, and this rank's place in them. Collective.

    Args:
        world: what `start` returned.

    Raises:
        UserError: the sizes do not fit the world or the strategy.
    """
    sizes = resolve_mesh(mesh, fsdp, world_size=world.size, local_world_size=world.ranks_per_node)
    shard = shard_ranks(fsdp, sizes)
    replicate = world.size if fsdp.strategy == "no_shard" else sizes.dp_replicate
    assert replicate * shard == world.size, "every rank holds a shard"
    dims = {"replicate": replicate, "shard": shard} if replicate > 1 else {"shard": shard}
    shard_mesh = device_mesh(world.device.type, dims)
    batch_mesh = device_mesh(world.device.type, {"dp": sizes.dp, "cp": sizes.cp})
    experts = None
    if sizes.ep > 1:
        of_experts = {**dims, "shard": shard // sizes.ep, "expert": sizes.ep}
        experts = device_mesh(world.device.type, of_experts)
    return Mesh(sizes, world.rank, world.device, shard_mesh, batch_mesh, experts)


def device_mesh(device_type: str, dims: dict[str, int]) -> DeviceMesh:
    """Like `init_device_mesh`, but its groups have the job's timeout (`run.timeout_minutes`)."""
    ranks = torch.arange(math.prod(dims.values())).view(*dims.values())
    groups = [_group_along(ranks, dim, name) for dim, name in enumerate(dims)]
    return DeviceMesh.from_group(groups, device_type, ranks, mesh_dim_names=tuple(dims))


def _group_along(ranks: Tensor, dim: int, name: str) -> ProcessGroup:
    """The group of ranks that differ from this one only along ``dim``. Collective.

    What layers exchange has groups of its own, even where these have all ranks of the job: NCCL works off a group's
    messages one after the other, and an exchange would wait behind gathers of parameters.
    """
    job = dist.group.WORLD
    assert job is not None, "the process group is up"
    if ranks.shape[dim] == ranks.numel() and (ranks.numel() == 1 or name not in ("cp", "expert")):
        return job
    lists = ranks.movedim(dim, -1).reshape(-1, ranks.shape[dim]).tolist()
    made = _GROUPS.setdefault(job, {})
    key = (name, str(lists))
    if key not in made:
        group, _ = dist.new_subgroups_by_enumeration(lists, timeout=timeout_of())
        assert isinstance(group, ProcessGroup), "every rank is in a group"
        made[key] = group
    return made[key]
