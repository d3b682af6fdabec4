"""The device meshes' groups are those of `init_device_mesh`, and keep to the job's timeout."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from fsdp2kit.config.schema import FSDPConfig, MeshConfig
from fsdp2kit.job import distributed
from fsdp2kit.job.mesh import build_mesh
from fsdp2kit.torch_compat import timeout_of
from tests.support.workers import COLLECTIVE_TIMEOUT, WorkerPool

Groups = dict[str, list[int]]


def groups(mesh: dict, strategy: str) -> tuple[Groups, Groups, set[timedelta]]:
    """The ranks of each dimension's group, those of torch's own mesh, and all groups' timeouts."""
    built = build_mesh(MeshConfig(**mesh), FSDPConfig(strategy=strategy), world=distributed.start())
    ours, theirs, timeouts = {}, {}, set()
    for device_mesh in (built.shard, built.batch):
        names = device_mesh.mesh_dim_names
        assert names is not None
        reference = init_device_mesh("cpu", tuple(device_mesh.shape), mesh_dim_names=names)
        assert device_mesh.mesh.tolist() == reference.mesh.tolist()
        for name in names:
            group = device_mesh.get_group(name)
            timeouts.add(timeout_of(group))
            ours[name] = dist.get_process_group_ranks(group)
            theirs[name] = dist.get_process_group_ranks(reference.get_group(name))
            assert device_mesh.get_local_rank(name) == reference.get_local_rank(name) == group.rank()
    timeouts.add(timeout_of(distributed.background_group()))
    dist.barrier()
    return ours, theirs, timeouts


@pytest.mark.parametrize(
    ("mesh", "strategy"),
    [
        ({}, "full_shard"),
        ({"cp": 2}, "full_shard"),
        ({"cp": 4}, "full_shard"),
        ({"dp_replicate": 2}, "hybrid_shard"),
        ({"dp_replicate": 2, "cp": 2}, "hybrid_shard"),
        ({}, "no_shard"),
    ],
    ids=str,
)
def test_groups_are_torchs_and_time_out_with_the_job(mesh: dict, strategy: str, pool: WorkerPool) -> None:
    for ours, theirs, timeouts in pool.run(4, groups, mesh, strategy):
        assert ours == theirs
        assert timeouts == {COLLECTIVE_TIMEOUT}


def _shares_a_group(cp: int) -> bool:
    mesh = build_mesh(MeshConfig(cp=cp), FSDPConfig(), world=distributed.start())
    dist.barrier()  # or a rank that is done closes connections which the other is still making
    return mesh.cp_group is mesh.shard.get_group()


@pytest.mark.parametrize(("ranks", "shared"), [(2, False), (1, True)])
def test_layers_exchange_beside_gathers_not_behind_them(ranks: int, shared: bool, pool: WorkerPool) -> None:
    """NCCL orders the messages of a group; here the same ranks share sequences and hold shards."""
    assert pool.run(ranks, _shares_a_group, ranks) == [shared] * ranks


def _gradient_of_documents(cp: int) -> tuple[float, list[float]]:
    """A loss of the squared sums of two documents, whose halves are on two ranks; this rank's gradient."""
    mesh = build_mesh(MeshConfig(cp=cp), FSDPConfig(), world=distributed.start())
    tokens = torch.arange(1.0, 9.0).view(2, cp, 4 // cp)[:, mesh.cp_rank].clone().requires_grad_()
    documents = mesh.sum_over_cp(tokens.sum(dim=1))
    loss = documents.square().sum() / mesh.sizes.cp
    loss.backward()
    assert tokens.grad is not None
    return mesh.sum_loss(loss.detach()).item(), tokens.grad.flatten().tolist()


def test_sums_over_documents_whose_parts_are_on_several_ranks(pool: WorkerPool) -> None:
    found = pool.run(2, _gradient_of_documents, 2)
    assert [loss for loss, _ in found] == [10**2 + 26**2] * 2
    assert [gradient for _, gradient in found] == [[20.0, 20.0, 52.0, 52.0]] * 2


def hosts_of(names: list[str]) -> tuple[str, ...]:
    """`World.hosts` where torchrun numbers the machines 0, 1, … and this rank's has that name."""
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("GROUP_RANK", str(distributed.rank() // 2))
            patch.setattr("platform.node", lambda: names[distributed.rank()])
            return distributed.start().hosts
    finally:
        distributed.start()  # on one host again


@pytest.mark.parametrize("names", [["a", "a", "b", "b"], ["pod", "pod", "pod", "pod"]])
def test_machines_have_names(pool: WorkerPool, names: list[str]) -> None:
    """Two containers may have one host name."""
    same = len(set(names)) == 1
    wanted = tuple(f"{name} (node {rank // 2})" if same else name for rank, name in enumerate(names))
    assert pool.run(4, hosts_of, names) == [wanted] * 4
