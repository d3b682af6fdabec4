"""FSDP's collectives over gloo, as messages, against torch's own and against numpy."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from fsdp2kit import distributed
from fsdp2kit.parallel.gloo import DirectAllGather, DirectReduceScatter, exchange_directly
from fsdp2kit.torch_compat import all_gather_single
from tests.workers import WorkerPool

PART = 1003


def of_rank(rank: int, dtype: torch.dtype, parts: int) -> Tensor:
    return torch.randn(parts * PART, generator=torch.Generator().manual_seed(rank)).to(dtype)


def everyone() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def gathered(dtype: torch.dtype, *, within: bool) -> tuple[Tensor, Tensor]:
    """What the messages gather and what torch gathers; ``within``: from the rank's place in the output, as FSDP2."""
    world = distributed.start()
    mine = of_rank(world.rank, dtype, 1)
    theirs, ours = (torch.empty(world.size * PART, dtype=dtype) for _ in range(2))
    all_gather_single(theirs, mine)
    if within:
        place = ours.view(world.size, -1)[world.rank]
        place.copy_(mine)
        mine = place
    assert DirectAllGather()(output_tensor=ours, input_tensor=mine, group=everyone()) is None
    return ours, theirs


@pytest.mark.parametrize("within", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_everything_is_gathered(ranks: int, dtype: torch.dtype, within: bool, pool: WorkerPool) -> None:
    for ours, theirs in pool.run(ranks, gathered, dtype, within=within):
        assert torch.equal(ours, theirs)


def reduced(dtype: torch.dtype, op: str) -> tuple[Tensor, Tensor]:
    """This rank's part, and everything that went in, unchanged."""
    world = distributed.start()
    whole = of_rank(world.rank, dtype, world.size)
    part = torch.empty(PART, dtype=dtype)
    DirectReduceScatter()(output_tensor=part, input_tensor=whole, group=everyone(), op=getattr(dist.ReduceOp, op))
    return part, whole


@pytest.mark.parametrize("op", ["SUM", "AVG"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_parts_are_summed_in_the_order_of_the_ranks(ranks: int, dtype: torch.dtype, op: str, pool: WorkerPool) -> None:
    given = [of_rank(rank, dtype, ranks) for rank in range(ranks)]
    for rank, (part, whole) in enumerate(pool.run(ranks, reduced, dtype, op)):
        assert torch.equal(whole, given[rank])
        values = [one.view(ranks, -1)[rank] for one in given]
        exact = np.sum([value.double().numpy() for value in values], axis=0) / (ranks if op == "AVG" else 1)
        bound = {torch.float32: 1e-6, torch.bfloat16: 0.05}[dtype]
        assert np.abs(part.double().numpy() - exact).max() < bound
        in_order = values[0]
        for value in values[1:]:
            in_order = in_order + value
        assert torch.equal(part, in_order / ranks if op == "AVG" else in_order)


def refused() -> str:
    world = distributed.start()
    scaled = dist._make_nccl_premul_sum(0.5)
    try:
        DirectReduceScatter()(torch.empty(PART), of_rank(0, torch.float32, world.size), everyone(), scaled)
    except RuntimeError as problem:
        return str(problem)
    return ""


def test_what_gloo_cannot_reduce_is_left_to_it(pool: WorkerPool) -> None:
    for message in pool.run(2, refused):
        assert message, "a scaled sum was taken for a plain one"


def gradients(mesh_shape: tuple[int, ...], *, direct: bool) -> dict[str, Tensor]:
    """This rank's shards after two micro-batches in bfloat16, reduced in float32."""
    world = distributed.start()
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(7, 7) for _ in range(3)))
    names = ("replicate", "shard")[-len(mesh_shape) :]
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in [*model, model]:
        fully_shard(module, mesh=mesh, mp_policy=policy)
    if direct:
        exchange_directly(model.modules(), mesh)
        assert isinstance(model, FSDPModule)
    for number in range(2):
        rows = torch.randn(5, 7, generator=torch.Generator().manual_seed(10 * number + world.rank))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch calls its own collective by an old name
            model(rows).square().sum().backward()
    return {name: parameter.grad.to_local() for name, parameter in model.named_parameters()}  # type: ignore[union-attr]


@pytest.mark.parametrize("mesh", [(2,), (2, 2), (1,), (2, 1)], ids=str)
def test_gradients_are_those_of_torchs_collectives(mesh: tuple[int, ...], pool: WorkerPool) -> None:
    ranks = int(np.prod(mesh))
    direct = pool.run(ranks, gradients, mesh, direct=True)
    own = pool.run(ranks, gradients, mesh, direct=False)
    for mine, theirs in zip(direct, own, strict=True):
        assert mine.keys() == theirs.keys()
        for name, gradient in mine.items():
            assert gradient.abs().max() > 0
            assert torch.equal(gradient, theirs[name]), "two addends have one order"
