"""Where a mesh lies: which of its groups cross nodes, and a drawing of it. Pure: no process group is needed.

A node is a machine, by the name that it has in `World.hosts`.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from fsdp2kit.config.checks import HYBRID, MeshSizes, shard_ranks
from fsdp2kit.config.schema import FSDPConfig
from fsdp2kit.console import counted
from fsdp2kit.job.distributed import ranks_per_node

_MOST_ROWS, _MOST_CELLS = 5, 16  # of the drawing


@dataclass(frozen=True)
class Span:
    """How the groups of one kind lie over nodes."""

    groups: int
    crossing: int
    """Groups whose ranks are on several nodes."""
    nodes: int
    """Most nodes that a group is on."""
    on_node: int
    """Fewest ranks that a group has on one of its nodes."""


@dataclass(frozen=True)
class Layout:
    """A mesh and the node of each of its ranks."""

    sizes: MeshSizes
    fsdp: FSDPConfig
    hosts: tuple[str, ...]
    """The node of each rank, by name."""

    @property
    def shards(self) -> int:
        """Ranks that share one copy of the parameters."""
        return shard_ranks(self.fsdp, self.sizes)

    @functools.cached_property
    def nodes(self) -> dict[str, list[int]]:
        """The ranks of each node, in the order of the nodes' first ranks."""
        found: dict[str, list[int]] = {}
        for rank, host in enumerate(self.hosts):
            found.setdefault(host, []).append(rank)
        return found

    @functools.cached_property
    def spans(self) -> dict[str, Span]:
        """How the groups "cp", "expert", "shard" and "replicate" lie; those of one rank are left out."""
        ranks = {"cp": self.sizes.cp, "expert": self.sizes.ep, "shard": self.shards}
        ranks["replicate"] = len(self.hosts) // self.shards
        apart = {"replicate": self.shards}
        return {dim: self.span(size, apart=apart.get(dim, 1)) for dim, size in ranks.items() if size > 1}

    def span(self, ranks: int, *, apart: int = 1) -> Span:
        """How groups of ``ranks`` ranks lie.

        Args:
            ranks: in each group.
            apart: the distance from one rank of a group to the next, in ranks of the job.
        """
        block, counts = ranks * apart, []
        for start in range(0, len(self.hosts), block):
            counts += [Counter(self.hosts[first : start + block : apart]) for first in range(start, start + apart)]
        return Span(
            groups=len(counts),
            crossing=sum(len(nodes) > 1 for nodes in counts),
            nodes=max(map(len, counts)),
            on_node=min(min(nodes.values()) for nodes in counts),
        )

    def ranks(self) -> dict[str, str]:
        """The ranks of each node, e.g. ``{"gpu-a": "0-7"}``, or all of them where they are not neighbours."""
        return {
            name: f"{ranks[0]}-{ranks[-1]}"
            if ranks[-1] - ranks[0] == len(ranks) - 1 > 0
            else " ".join(map(str, ranks))
            for name, ranks in self.nodes.items()
        }

    def draw(self) -> list[str]:
        """At most six lines: how groups lie, then a node a line with its ranks; empty for a single rank.

        A rank's cell is its number, its dp index and its cp index, as ``5:2/1``.
        """
        if len(self.hosts) == 1:
            return []
        rows = [f"  {name}: {'  '.join(self._cells(ranks))}" for name, ranks in self.nodes.items()]
        where = ", ".join(self._placement()) if len(self.nodes) > 1 else "all groups within it"
        return [
            f"mesh on {counted(len(self.nodes), 'node')}: {where}; each rank as rank:dp/cp",
            *_few(rows, _MOST_ROWS, "  …"),
        ]

    def _cells(self, ranks: Sequence[int]) -> list[str]:
        return _few([f"{rank}:{rank // self.sizes.cp}/{rank % self.sizes.cp}" for rank in ranks], _MOST_CELLS, "…")

    def _placement(self) -> Iterator[str]:
        names = {"cp": "cp", "expert": "ep", "shard": "shards", "replicate": "replicas"}
        for dim, name in names.items():
            if (span := self.spans.get(dim)) is not None:
                some = f" in {span.crossing} of {span.groups} groups" if span.crossing < span.groups else ""
                yield f"{name} over {span.nodes} nodes{some}" if span.crossing else f"{name} within a node"

    def warnings(self, prices: Mapping[str, str] | None = None) -> list[str]:
        """A line each for cp, ep and shards, where they cross nodes: what it costs, and what would not cross.

        Args:
            prices: by "cp", "expert" and "shard", the cost; by "hybrid", the cost of hybrid sharding instead.
        """
        prices, lines = prices or {}, []
        subjects = {"cp": "cp crosses nodes", "expert": "ep crosses nodes", "shard": "shards cross nodes"}
        smaller = {"cp": ("mesh.cp", self.sizes.cp), "expert": ("mesh.ep", self.sizes.ep)}
        for dim, subject in subjects.items():
            if (span := self.spans.get(dim)) is not None and span.crossing:
                some = f" in {span.crossing} of {span.groups} groups" if span.crossing < span.groups else ""
                is_shard = dim == "shard"
                todo = self._instead_of_shards(prices.get("hybrid", "")) if is_shard else self._smaller(*smaller[dim])
                price = f": {prices[dim]}" if dim in prices else ""
                lines.append("; ".join(part for part in (f"{subject}{some}{price}", todo) if part))
        return lines

    def _smaller(self, key: str, size: int) -> str:
        if any(ranks[-1] - ranks[0] + 1 > len(ranks) for ranks in self.nodes.values()):
            return "the ranks of a node are not neighbours: number them node by node (Slurm: --distribution=block)"
        fitting = [ranks for ranks in range(2, size) if size % ranks == 0 and not self.span(ranks).crossing]
        return f"{key} = {fitting[-1]} stays within a node" if fitting else f"no smaller {key} stays within a node"

    def _instead_of_shards(self, price: str) -> str:
        cp, shard = self.sizes.cp, self.sizes.dp_shard
        if self.fsdp.strategy in HYBRID:
            fitting = [n for n in range(1, shard) if shard % n == 0 and not self.span(n * cp).crossing]
            todo = self._mesh_keys(self.sizes.world_size // (fitting[-1] * cp), fitting[-1]) if fitting else ""
            return f"{todo} keep them within a node" if fitting else ""
        if (sizes := self.hybrid()) is None:
            return ""
        keys = self._mesh_keys(sizes.dp_replicate, sizes.dp_shard)
        return f"fsdp.strategy = 'hybrid_shard' with {keys} keeps them within a node{price}"

    @staticmethod
    def _mesh_keys(replicate: int, shard: int) -> str:
        """Both sizes, since the TOML may give either of today's."""
        return f"mesh.dp_replicate = {replicate} and mesh.dp_shard = {shard}"

    def hybrid(self) -> MeshSizes | None:
        """The mesh of hybrid sharding within nodes, with the same cp; None if nodes have no place for it."""
        ranks, cp = ranks_per_node(self.hosts), self.sizes.cp
        if ranks % cp or ranks == 1 or self.span(ranks).crossing:
            return None
        return MeshSizes(len(self.hosts) // ranks, ranks // cp, cp)


def node_names(world_size: int, local_world_size: int) -> tuple[str, ...]:
    """The node of each rank where none has started: "node 0", "node 1", …"""
    return tuple(f"node {rank // local_world_size}" for rank in range(world_size))


def _few(items: list[str], most: int, instead: str) -> list[str]:
    """All items, or the first ones, ``instead`` of those between, and the last."""
    return items if len(items) <= most else [*items[: most - 2], instead, items[-1]]
