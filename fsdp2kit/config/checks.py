"""What several sections decide together: the mesh, batches and lengths. It needs no devices and no weights.

`check_config` is all checks of a config. What `[data]` and `[eval]` may be together is in `data_checks`.
"""

from __future__ import annotations

import math

from fsdp2kit.config.data_checks import check_data
from fsdp2kit.config.facts import MeshSizes as MeshSizes
from fsdp2kit.config.path_contents import INSTEAD_OF_MODEL, Contents, check_contents
from fsdp2kit.config.schema import FSDPConfig, MeshConfig, TrainingConfig
from fsdp2kit.errors import UserError

# What to do about what lies at the path of a model beside the trained one (`Section.models`).
_INSTEAD: dict[Contents, str] = {
    **INSTEAD_OF_MODEL,
    "checkpoint": "give '{path}/hf', or convert it: fsdp2kit convert",
    "run": "give its export, '{path}/hf'",
    "adapter": "merge it into its model first: fsdp2kit convert --merge",
}

HYBRID = ("hybrid_shard", "hybrid_shard_zero2")


def resolve_mesh(mesh: MeshConfig, fsdp: FSDPConfig, *, world_size: int, local_world_size: int) -> MeshSizes:
    """Fill in the "auto" sizes of ``[mesh]``; refuse sizes that the strategy forbids or the world does not have."""
    if world_size % mesh.cp:
        divisors = ", ".join(str(n) for n in range(1, world_size + 1) if world_size % n == 0)
        todo = f"use one of {divisors}, or start another number of processes"
        raise UserError("mesh.cp", f"{mesh.cp} does not divide the world size {world_size}", todo)
    dp = world_size // mesh.cp
    replicate = mesh.dp_replicate
    shard = mesh.dp_shard
    if fsdp.strategy == "no_shard":
        if shard not in ("auto", 1):
            what = f"{shard} with fsdp.strategy = 'no_shard', which shards nothing"
            raise UserError("mesh.dp_shard", what, "leave it out, or choose fsdp.strategy = 'full_shard'")
        shard = 1
    elif fsdp.strategy in HYBRID:
        if replicate == "auto" and shard == "auto":
            if local_world_size % mesh.cp:
                what = f"{mesh.cp} does not divide the {local_world_size} ranks of a node"
                todo = "set mesh.dp_shard yourself; hybrid sharding defaults to dp_shard × cp = LOCAL_WORLD_SIZE"
                raise UserError("mesh.cp", what, todo)
            shard = local_world_size // mesh.cp
    elif replicate not in ("auto", 1):
        what = f"{replicate} with fsdp.strategy = {fsdp.strategy!r}"
        raise UserError(
            "mesh.dp_replicate", what, "choose fsdp.strategy = 'hybrid_shard' to replicate a sharded model"
        )
    else:
        replicate = 1
    if replicate == "auto":
        replicate = dp // int(shard) if dp % int(shard) == 0 else 1
    if shard == "auto":
        shard = dp // int(replicate) if dp % int(replicate) == 0 else 1
    sizes = MeshSizes(int(replicate), int(shard), mesh.cp, mesh.ep)
    if sizes.world_size != world_size:
        product = f"dp_replicate {replicate} × dp_shard {shard} × cp {mesh.cp} = {sizes.world_size}"
        todo = "change one of them, leave it to 'auto', or start another number of processes"
        raise UserError("mesh", f"{product}, but the world size is {world_size}", todo)
    if (ranks := shard_ranks(fsdp, sizes)) % mesh.ep:
        divisors = ", ".join(str(n) for n in range(1, ranks + 1) if ranks % n == 0)
        what = f"{mesh.ep} does not divide the {ranks} ranks that one copy of the model is sharded over"
        raise UserError("mesh.ep", what, f"use one of {divisors}")
    return sizes


def smallest_world(config: TrainingConfig) -> int:
    """The fewest ranks that the sizes in ``[mesh]`` fit; where they do not fit its batches, no larger world does."""
    mesh = config.mesh
    strategy = config.fsdp.strategy
    sizes = [mesh.dp_shard] if strategy != "no_shard" else []
    sizes += [mesh.dp_replicate] if strategy in ("no_shard", *HYBRID) else []  # others have one replica
    # A copy of the model that is sharded over "auto" ranks needs as many as experts are partitioned over.
    copy = math.lcm(mesh.cp, mesh.ep) if "auto" in sizes[:1] and strategy != "no_shard" else mesh.cp
    ranks = copy * math.prod(size for size in sizes if isinstance(size, int))
    engine = config.engine_needs
    return math.lcm(ranks, engine.tp) if engine is not None and "auto" in sizes else ranks


def shard_ranks(fsdp: FSDPConfig, sizes: MeshSizes) -> int:
    """Ranks that one copy of the parameters is sharded over."""
    return 1 if fsdp.strategy == "no_shard" else sizes.dp_shard * sizes.cp


def resolve_accumulation(global_batch_size: int, micro_batch_size: int, *, dp: int, group: int = 1) -> int:
    """Micro-batches that one data-parallel rank runs in one step: global ÷ (dp × micro).

    Args:
        group: rows that belong together: the sizes that an error advises hold whole groups.
    """
    per_round = dp * micro_batch_size
    if global_batch_size % per_round:
        near = multiples_near(global_batch_size, math.lcm(per_round, group))
        what = f"{global_batch_size} is not a multiple of dp {dp} × micro_batch_size {micro_batch_size}"
        raise UserError("train.global_batch_size", what, f"use {near}, or another micro_batch_size")
    return global_batch_size // per_round


def check_seq_len(seq_len: int, cp: int, *, above: int = 0) -> None:
    """Refuse sequences that ``cp`` ranks do not divide; advise lengths that are longer than ``above``."""
    if seq_len % cp:
        what = f"{seq_len} is not divisible by mesh.cp {cp}"
        raise UserError("data.seq_len", what, f"use {multiples_near(seq_len, cp, above=above)}")


def multiples_near(number: int, divisor: int, *, above: int = 0) -> str:
    """The multiples of ``divisor`` around a number, in words; those that are larger than ``above``."""
    below = max(number, above) // divisor * divisor
    return " or ".join(str(multiple) for multiple in (below, below + divisor) if multiple > above)


def check_config(config: TrainingConfig, *, world_size: int, local_world_size: int) -> MeshSizes:
    """All checks of a training config, each section's own and those across sections; the first that fails raises."""
    sizes = resolve_mesh(config.mesh, config.fsdp, world_size=world_size, local_world_size=local_world_size)
    config.check(config, sizes)
    resolve_accumulation(config.train.global_batch_size, config.train.micro_batch_size, dp=sizes.dp)
    check_seq_len(config.data.seq_len, sizes.cp)
    for key, path in config.models().items():
        check_contents(key, path, _INSTEAD)
    check_data(config)
    return sizes
