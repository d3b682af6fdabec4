"""Muon on a layer's experts, however they are sharded, equals torch's own on each expert alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

from fsdp2kit.job import distributed
from fsdp2kit.optim.muon import MuonAdamW, hidden_matrices
from tests.support.models import full
from tests.support.workers import WorkerPool

SHAPES = {"experts.gate_up_proj": (5, 24, 10), "experts.down_proj": (5, 10, 12)}
STEPS, IDLE = 3, 4
# A mesh's shape, and over what it shards experts: FSDP alone, unevenly; ep alone; both; slices alone; replicas.
LAYOUTS: list[Any] = [
    ((2,), [Shard(0)]),
    full((2, 2), [Shard(1), Shard(0)]),
    full((2,), [Shard(2)]),
    full((2, 2), [Replicate(), Shard(1)]),
    full((1,), [Shard(0)]),
]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Module()
        generator = torch.Generator().manual_seed(0)
        for name, shape in SHAPES.items():
            setattr(self.experts, name.rpartition(".")[2], nn.Parameter(torch.randn(shape, generator=generator)))


def gradients(step: int) -> dict[str, Tensor]:
    """No token visits the last expert."""
    generator = torch.Generator().manual_seed(1 + step)
    found = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    for gradient in found.values():
        gradient[IDLE] = 0
    return found


def updated(shape: tuple[int, ...], placements: list[Placement]) -> dict[str, np.ndarray]:
    """The parameters after `STEPS` steps of our optimizer, which saves and loads its state in between."""
    distributed.start()
    net, mesh = Net(), init_device_mesh("cpu", shape)
    for name, parameter in list(net.named_parameters()):
        setattr(net.experts, name.rpartition(".")[2], nn.Parameter(distribute_tensor(parameter, mesh, placements)))
    matrices = hidden_matrices(net)
    assert len(matrices) == len(SHAPES)
    state: dict[str, Any] | None = None
    for step in range(STEPS):
        groups = [{"params": matrices, "weight_decay": 0.1}]
        optimizer = MuonAdamW(groups, [], lr=0.01, momentum=0.95, betas=(0.9, 0.95), eps=1e-8)
        if state is not None:
            optimizer.load_state_dict(state)
        for name, gradient in gradients(step).items():
            net.get_parameter(name).grad = distribute_tensor(gradient, mesh, placements)
        optimizer.step()
        state = optimizer.state_dict()
    return {name: parameter.full_tensor().numpy(force=True) for name, parameter in net.named_parameters()}


def of_torch() -> dict[str, np.ndarray]:
    """The same by torch's Muon, with a parameter for each expert."""
    experts = {name: [nn.Parameter(one.clone()) for one in whole] for name, whole in Net().named_parameters()}
    each = [parameter for parameters in experts.values() for parameter in parameters]
    optimizer = torch.optim.Muon(each, lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for step in range(STEPS):
        for name, gradient in gradients(step).items():
            for parameter, one in zip(experts[name], gradient, strict=True):
                parameter.grad = one
        with torch.compiler.set_stance("force_eager"):
            optimizer.step()
    return {name: torch.stack(list(parameters)).numpy(force=True) for name, parameters in experts.items()}


@pytest.mark.parametrize(("shape", "placements"), LAYOUTS)
def test_each_expert_is_updated_as_by_torch(
    shape: tuple[int, ...], placements: list[Placement], pool: WorkerPool
) -> None:
    """But for a unit in the last place of what the iteration gives, in bfloat16: a processor's kernels may round their
    sums in another way for a matrix that lies elsewhere in memory."""
    expected, start = of_torch(), dict(Net().named_parameters())
    for found in pool.run(int(np.prod(shape)), updated, shape, placements):
        for name, values in expected.items():
            moved = np.abs(values - start[name].numpy(force=True))
            unit = moved.max() * 2**-8
            np.testing.assert_allclose(found[name], values, rtol=0, atol=unit, err_msg=name)
            assert np.mean(np.abs(found[name] - values) < 1e-6) > 0.9
            assert moved[:IDLE].max() > 1e-2
            np.testing.assert_allclose(
                values[IDLE], start[name][IDLE].numpy(force=True) * (1 - 1e-3) ** STEPS, rtol=1e-5
            )
