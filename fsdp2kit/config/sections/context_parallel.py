"""[context_parallel]: how attention sees a sequence that is split over ranks."""

from __future__ import annotations

from typing import Literal

from fsdp2kit.config.section import Section


class ContextParallelConfig(Section):
    """How attention sees the whole sequence when `mesh.cp` > 1."""

    method: Literal["auto", "ulysses", "ring", "allgather"] = "auto"
    """"ulysses": all-to-all between sequence shards and heads, around any attention implementation. "ring": keys and
    values are sent round the ranks during the computation. "allgather": every rank gathers all keys and values.
    "auto" picks one by heads, packing, sequence length and mesh, and says why at the start."""
