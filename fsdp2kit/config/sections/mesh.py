"""[mesh]: the sizes of the device mesh."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from fsdp2kit.config.section import Section

Size = Annotated[int, Field(ge=1)] | Literal["auto"]


class MeshConfig(Section):
    """The device mesh: dp_replicate × dp_shard × cp = world size. One size may be left to "auto"."""

    dp_replicate: Size = "auto"
    """Replicas of the sharded model (hybrid sharding). "auto": 1, or the number of nodes under a hybrid strategy."""
    dp_shard: Size = "auto"
    """Data-parallel ranks over which one replica is sharded. "auto": the remaining ranks."""
    cp: PositiveInt = 1
    """Context-parallel ranks: each sequence is split over this many."""
    ep: PositiveInt = 1
    """Expert-parallel ranks: each layer's experts are partitioned over this many neighbours among the dp_shard × cp
    ranks, and tokens travel to them. It adds no ranks; docs/moe.md."""
