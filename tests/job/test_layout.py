"""Which groups cross nodes and how a mesh is drawn, against an enumeration of every rank's coordinates."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing._internal.distributed.fake_pg import FakeStore

from fsdp2kit.config.checks import MeshSizes
from fsdp2kit.config.schema import FSDPConfig, MeshConfig
from fsdp2kit.job.distributed import World, ranks_per_node
from fsdp2kit.job.layout import Layout, node_names
from fsdp2kit.job.mesh import build_mesh


def laid_out(hosts: tuple[str, ...], *, cp: int = 1, replicate: int = 1, strategy: str = "full_shard") -> Layout:
    sizes = MeshSizes(replicate, len(hosts) // cp // replicate, cp)
    return Layout(sizes, FSDPConfig(strategy=strategy), hosts)  # pyright: ignore[reportArgumentType]


def members(layout: Layout, dim: str) -> list[list[int]]:
    """The groups of a dimension, from the coordinates of all ranks: those that agree in all others are one group."""
    sizes, everything = layout.sizes, layout.fsdp.strategy == "no_shard"
    groups: dict[tuple[int, ...], list[int]] = {}
    order = itertools.product(range(sizes.dp_replicate), range(sizes.dp_shard), range(sizes.cp))
    for rank, (replica, shard, cp) in enumerate(order):
        if dim == "cp":
            key = (replica, shard)
        elif dim == "shard":
            key = (rank,) if everything else (replica,)
        else:
            key = () if everything else (shard, cp)
        groups.setdefault(key, []).append(rank)
    return list(groups.values())


@settings(deadline=None, max_examples=30)
@given(
    counts=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    cyclic=st.booleans(),
    data=st.data(),
)
def test_groups_cross_nodes_where_their_ranks_do(counts: list[int], cyclic: bool, data: st.DataObject) -> None:
    """Nodes of any size, their ranks neighbours or assigned in turns; cp and replicas of any size that divides."""
    hosts = [f"n{node}" for node, count in enumerate(counts) for _ in range(count)]
    if cyclic:
        rounds = itertools.zip_longest(*([f"n{node}"] * count for node, count in enumerate(counts)))
        hosts = [name for names in rounds for name in names if name]
    world = len(hosts)
    cp = data.draw(st.sampled_from([n for n in range(1, world + 1) if world % n == 0]))
    replicate = data.draw(st.sampled_from([n for n in range(1, world // cp + 1) if world // cp % n == 0]))
    strategy = data.draw(st.sampled_from(["hybrid_shard", "no_shard"] if replicate > 1 else ["full_shard"]))
    layout = laid_out(tuple(hosts), cp=cp, replicate=replicate, strategy=strategy)
    for dim in ("cp", "shard", "replicate"):
        groups = members(layout, dim)
        if len(groups[0]) == 1:
            assert dim not in layout.spans
            continue
        on_nodes = [[[hosts[r] for r in group].count(name) for name in {hosts[r] for r in group}] for group in groups]
        span = layout.spans[dim]
        assert span.groups == len(groups)
        assert span.crossing == sum(len(nodes) > 1 for nodes in on_nodes)
        assert span.nodes == max(len(nodes) for nodes in on_nodes)
        assert span.on_node == min(min(nodes) for nodes in on_nodes)
    if not cyclic:
        block = ranks_per_node(hosts)
        assert all(len({*hosts[first : first + block]}) == 1 for first in range(0, world, block))
        assert all(count % block == 0 for count in counts)


@pytest.mark.parametrize(
    ("world", "local", "cp", "strategy", "replicate", "placement", "warnings"),
    [
        (8, 8, 2, "full_shard", 1, None, []),
        (12, 6, 4, "full_shard", 1, "cp over 2 nodes in 1 of 3 groups, shards over 2 nodes",
         ["cp crosses nodes in 1 of 3 groups; mesh.cp = 2 stays within a node", "shards cross nodes"]),
        (16, 8, 16, "full_shard", 1, "cp over 2 nodes, shards over 2 nodes",
         ["cp crosses nodes; mesh.cp = 8 stays within a node", "shards cross nodes"]),
        (4, 1, 2, "full_shard", 1, "cp over 2 nodes, shards over 4 nodes",
         ["cp crosses nodes; no smaller mesh.cp stays within a node", "shards cross nodes"]),
        (16, 8, 2, "shard_grad_op", 1, "cp within a node, shards over 2 nodes",
         ["shards cross nodes; fsdp.strategy = 'hybrid_shard' with mesh.dp_replicate = 2 and mesh.dp_shard = 4 keeps "
          "them within a node"]),
        (16, 8, 2, "hybrid_shard", 2, "cp within a node, shards within a node, replicas over 2 nodes", []),
        (24, 8, 1, "hybrid_shard", 2, "shards over 2 nodes, replicas over 2 nodes",
         ["shards cross nodes; mesh.dp_replicate = 6 and mesh.dp_shard = 4 keep them within a node"]),
        (16, 8, 1, "no_shard", 1, "replicas over 2 nodes", []),
    ],
)  # fmt: skip
def test_what_is_said(
    world: int, local: int, cp: int, strategy: str, replicate: int, placement: str | None, warnings: list[str]
) -> None:
    layout = laid_out(node_names(world, local), cp=cp, strategy=strategy, replicate=replicate)
    assert layout.warnings() == warnings
    if placement is not None:
        assert f": {placement}; each rank" in layout.draw()[0]


def test_exchanges_of_experts_between_nodes_are_named() -> None:
    layout = replace(laid_out(node_names(16, 8), cp=1), sizes=MeshSizes(1, 16, 1, ep=16))
    assert layout.warnings({"expert": "1 GB"})[0] == "ep crosses nodes: 1 GB; mesh.ep = 8 stays within a node"
    assert "ep over 2 nodes" in layout.draw()[0]
    within = replace(layout, sizes=MeshSizes(1, 16, 1, ep=8))
    assert not within.spans["expert"].crossing
    assert "ep within a node" in within.draw()[0]


def test_prices_stand_where_the_fact_is() -> None:
    layout = laid_out(node_names(16, 4), cp=2)
    assert layout.warnings({"shard": "1 GB", "hybrid": ": 0.1 GB"}) == [
        "shards cross nodes: 1 GB; fsdp.strategy = 'hybrid_shard' with mesh.dp_replicate = 4 and mesh.dp_shard = 2 "
        "keeps them within a node: 0.1 GB"
    ]


def test_ranks_that_are_assigned_to_nodes_in_turns_are_told_how_to_be_numbered() -> None:
    layout = laid_out(("a", "b") * 4, cp=2)
    assert layout.warnings()[0] == (
        "cp crosses nodes; the ranks of a node are not neighbours: number them node by node "
        "(Slurm: --distribution=block)"
    )
    assert layout.hybrid() is None
    assert layout.ranks() == {"a": "0 2 4 6", "b": "1 3 5 7"}


def test_nodes_of_several_sizes_have_a_common_block() -> None:
    """Hybrid sharding within nodes of 4, 4 and 8 ranks: over 4 ranks each."""
    layout = laid_out(("a",) * 4 + ("b",) * 4 + ("c",) * 8, cp=2)
    assert layout.hybrid() == MeshSizes(4, 2, 2)
    assert layout.ranks() == {"a": "0-3", "b": "4-7", "c": "8-15"}


@pytest.mark.parametrize("local", [4, 8])
def test_ranks_of_uneven_nodes_build_one_mesh(local: int) -> None:
    """Whatever a rank's own node has: hybrid sharding's default is within the smallest common block."""
    hosts = ("a",) * 4 + ("b",) * 4 + ("c",) * 8
    dist.init_process_group("fake", rank=0, world_size=16, store=FakeStore())
    try:
        world = World(0, 16, 0, local, torch.device("cpu"), hosts)
        mesh = build_mesh(MeshConfig(cp=2), FSDPConfig(strategy="hybrid_shard"), world=world)
        layout = Layout(mesh.sizes, FSDPConfig(strategy="hybrid_shard"), hosts)
        assert mesh.sizes == MeshSizes(4, 2, 2)
        assert not layout.spans["shard"].crossing
        for name, groups in (("shard", mesh.shard), ("replicate", mesh.shard), ("cp", mesh.batch)):
            assert dist.get_process_group_ranks(groups.get_group(name)) == members(layout, name)[0]
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(("nodes", "local"), [(1, 2), (2, 4), (5, 8), (6, 8), (40, 3), (3, 17), (2, 72)])
def test_the_drawing_has_every_rank_or_the_first_and_the_last(nodes: int, local: int) -> None:
    """A cell's indices are the rank's coordinates; at most six lines."""
    layout = laid_out(node_names(nodes * local, local), cp=2 if local % 2 == 0 else 1)
    _, *rows = layout.draw()
    assert len(rows) == min(nodes, 5)
    cells = [tuple(map(int, cell)) for cell in re.findall(r"(\d+):(\d+)/(\d+)", "\n".join(rows))]
    world = list(itertools.product(range(layout.sizes.dp), range(layout.sizes.cp)))
    assert all(world[rank] == (dp, cp) for rank, dp, cp in cells)
    drawn = [rank for rank, *_ in cells]
    assert drawn == sorted(set(drawn))
    assert (drawn[0], drawn[-1]) == (0, nodes * local - 1)
    if nodes <= 5 and local <= 16:
        assert drawn == list(range(nodes * local))
    else:
        assert "…" in "".join(rows)
        assert all(len(row.split("  ")) <= 18 for row in rows)


def test_a_single_rank_is_not_drawn() -> None:
    assert laid_out(("a",)).draw() == []


def test_a_node_of_one_rank_has_a_number_and_no_range() -> None:
    assert laid_out(("a", "b", "b", "c", "c", "c")).ranks() == {"a": "0", "b": "1-2", "c": "3-5"}
