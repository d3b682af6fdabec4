"""The norm of sharded gradients is that of the whole ones, as it is summed on a CPU and as on CUDA."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from fsdp2kit.train import step as losses
from tests.optim import helpers
from tests.support.workers import WorkerPool


def norms_of_shards(replicate: int, shard: int, dtype: torch.dtype) -> dict[str, float]:
    """The gradients' norm in each way."""
    net = helpers.make_net().to(dtype)
    mesh = init_device_mesh("cpu", (replicate, shard), mesh_dim_names=("replicate", "shard"))
    fully_shard(net, mesh=mesh if replicate > 1 else mesh["shard"])
    for name, parameter in net.named_parameters():
        assert isinstance(parameter, DTensor)
        gradient = helpers.gradients(0)[name].to(dtype)
        parameter.grad = distribute_tensor(gradient, parameter.device_mesh, parameter.placements)
    found = {"cpu": losses.gradient_norm(net).item()}
    with mock.patch.object(losses, "any", return_value=False, create=True):  # "no gradient is on a CPU"
        found["cuda"] = losses.gradient_norm(net).item()
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("replicate", "shard"), [(1, 3), (2, 2)])
def test_the_norm_of_shards_is_that_of_whole_gradients(
    replicate: int, shard: int, dtype: torch.dtype, pool: WorkerPool
) -> None:
    """In float32 also where gradients are not, as those of `fsdp.storage_dtype` are."""
    gradients = [gradient.to(dtype) for gradient in helpers.gradients(0).values()]
    whole = float(torch.cat([gradient.flatten() for gradient in gradients]).double().norm())
    for found in pool.run(replicate * shard, norms_of_shards, replicate, shard, dtype):
        assert found == pytest.approx({"cpu": whole, "cuda": whole}, rel=1e-5)
