"""What grows with the number of ranks, by formula; 1,024 ranks of a fake group within a minute and 8 GB."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from fsdp2kit.bench import scale
from fsdp2kit.checkpoint.save_plan import SharedSavePlanner
from fsdp2kit.job import distributed
from fsdp2kit.job.distributed import World
from fsdp2kit.job.layout import node_names
from fsdp2kit.job.mesh import build_mesh
from fsdp2kit.model.build import build_model
from fsdp2kit.parallel.parallelize import parallelize_model
from fsdp2kit.parallel.plan import plan_parallel
from tests.support.workers import forget_groups

CP, PARAMETERS = 2, 2 * 9 + 3  # nine in a Llama's layer; embedding, final norm, head


def rows_of(**options: Any) -> list[dict[str, Any]]:
    (*_, result) = scale.bench_scale(World(0, 1, 0, 1, torch.device("cpu")), **options)
    return result["rows"]


@pytest.mark.full
def test_counts_follow_their_formulae() -> None:
    """With 16 ranks sharded over 8, 64 over 8, and 8 over all."""
    found = rows_of(ranks=(8, 16, 64), shards=8, cp=CP, model="tiny")
    for row in found:
        size, replicas = row["ranks"], row["ranks"] // 8
        # Every rank takes part in making all groups along cp, dp and, with replicas, the two of sharding.
        assert row["groups_made"] == size // CP + CP + (size // 8 + 8 if replicas > 1 else 0)
        assert row["own_groups"] == (4 if replicas > 1 else 2)
        # Parameters and two moments in 8 parts each, for any number of replicas, and a number of steps for each.
        assert row["parts"] == 3 * PARAMETERS * 8 + PARAMETERS
        # Rank 0 is sent one item for each shape, writer and part, whatever the number of layers.
        assert row["items_sent"] <= 6 * 8 * replicas + PARAMETERS
        assert row["object_collectives"] == 0
        assert row["files_opened"] == 0
    assert len({row["reductions"] for row in found}) == 1
    assert not dist.is_initialized()


@pytest.fixture
def forgets() -> Iterator[None]:
    """DTensor keeps group names by mesh, and here one mesh has other groups on another rank."""
    forget_groups()
    yield
    forget_groups()


@pytest.mark.usefixtures("forgets")
@pytest.mark.parametrize("rank", [0, 5, 13])
def test_made_up_plans_are_those_of_the_ranks(rank: int) -> None:
    """16 ranks in two replicas: what the bench takes for a rank's part is what the planner gives that rank."""
    config = scale._config(16, 8, CP, scale.TINY)
    dist.init_process_group("fake", rank=rank, world_size=16, store=FakeStore())
    try:
        world = World(rank, 16, rank % 8, 8, torch.device("cpu"), node_names(16, 8))
        mesh = build_mesh(config.mesh, config.fsdp, world=world)
        model: Any = build_model(config.model, lora=config.lora)
        plan = plan_parallel(model, config, mesh.sizes, "cpu")
        parallelize_model(model, plan, mesh=replace(mesh, device=torch.device("meta")))
        planner = SharedSavePlanner(rank=rank, world_size=16)
        planner.set_up_planner(scale._state(model), is_coordinator=rank == 0)
        own = planner.create_local_plan()
        plan, written = list(scale.sent_by_all(planner.state_dict, own, size=16, shards=8))[rank]
        assert {item.index.fqn: item for item in plan.items} == {item.index.fqn: item for item in own.items}
        names = sorted(planner.state_dict)
        made_up = {(names[number], one.start) for one in written for number in one.tensors}
        assert made_up == {(item.index.fqn, item.index.offset) for item in planner.plan.items}
    finally:
        distributed.stop()


def test_many_ranks_may_connect() -> None:
    """Groups of all ranks, of all for background saves and along dp: fewer than three connections to each rank."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
        distributed.allow_connections(8)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (1024, hard), "few ranks change nothing"
        distributed.allow_connections(1024)
        if hard != resource.RLIM_INFINITY:
            assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= min(hard, 5 * 1024)
            distributed.allow_connections(10**9)
            assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize(
    "shards", [pytest.param(64, marks=pytest.mark.full), pytest.param(1024, marks=pytest.mark.slow)]
)
def test_a_thousand_ranks_start_save_and_resume_70b_in_a_minute(shards: int) -> None:
    """But for the values."""
    (row,) = rows_of(ranks=(1024,), shards=shards)
    assert row["in_all_seconds"] < 60
    assert row["peak_bytes"] < 8e9
    assert row["resume_peak_bytes"] < 8e9
