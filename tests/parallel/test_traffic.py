"""The collectives of one step are those of the formulae in docs/fsdp.md, in number and in bytes."""

from __future__ import annotations

import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from fsdp2kit import distributed
from fsdp2kit.bench.traffic import Traffic, count_traffic
from fsdp2kit.parallel.fsdp import reshards_after_forward
from fsdp2kit.parity.engine import Sharded
from fsdp2kit.parity.rows import DealtOut
from fsdp2kit.train.global_batch import next_batch
from fsdp2kit.train.loop import train_step
from fsdp2kit.train.optim import build_lr_schedule, build_optimizer
from fsdp2kit.train.plan import build_plan
from tests.parallel.jobs import Case
from tests.reference import make_batches, tiny_model, tiny_model_dir
from tests.workers import WorkerPool

WORLD = 4
STRATEGIES = {  # strategy: ranks that a parameter is sharded over, and whether a unit is freed after forward
    "full_shard": (4, True),
    "shard_grad_op": (4, False),
    "no_shard": (1, False),
    "hybrid_shard": (2, True),
    "hybrid_shard_zero2": (2, False),
}
BYTES = {"float32": 4, "bfloat16": 2}


def one_step(folder: Path, case: Case, *, torchs_own: bool = False) -> Traffic:
    """What this rank sends in the second of two steps, from reading the batch to the optimizer.

    Args:
        torchs_own: leave FSDP2 the collectives that it has on CUDA.
    """
    config = case.config(folder, steps=2, rows=8)
    with mock.patch("fsdp2kit.parallel.fsdp.exchange_directly") if torchs_own else nullcontext():
        sharded = Sharded(config, world=distributed.start())
    optimizer = build_optimizer(config.optimizer, sharded.model)
    schedule = build_lr_schedule(config.lr_schedule, optimizer, total_steps=2)
    batches = make_batches(2, rows=8)
    dealt = DealtOut(batches, case.micro, dp_rank=sharded.mesh.dp_rank, dp_size=sharded.mesh.sizes.dp)
    plan = build_plan(config, steps_per_epoch=2, mesh=sharded.mesh)
    for index in range(2):
        with count_traffic() as traffic:
            batch = next_batch(dealt, index, stop=False, cp_size=1)
            train_step(sharded.model, optimizer, schedule, batch, sharded.inputs, plan=plan, step=index + 1)
    return traffic


def expected(kind: str, strategy: str, *, micro_batches: int, reduces: int, dtypes: tuple[str, str]) -> Traffic:
    """docs/fsdp.md's formulae, from the shapes of the plain model's parameters."""
    shards, frees = STRATEGIES[strategy]
    replicas = WORLD // shards
    compute, reduction = (BYTES[dtype] for dtype in dtypes)
    traffic = Traffic()
    for unit, size in padded_units(kind, shards).items():
        gathers = micro_batches * (2 if unit.startswith("layer") else 1) if frees else 1
        for _ in range(gathers if shards > 1 else 0):
            traffic.add("all_gather", (shards - 1) * size // shards * compute)
        for _ in range(reduces):
            if shards > 1:
                traffic.add("reduce_scatter", (shards - 1) * size // shards * reduction)
            if replicas > 1:
                traffic.add("all_reduce", 2 * (replicas - 1) * (size // shards) * reduction // replicas)
    traffic.add("all_reduce", 2 * (WORLD - 1) * 7 * 8 // WORLD)  # seven host numbers: what the batch is made of
    traffic.add("all_reduce", 2 * (WORLD - 1) * 4 // WORLD)  # the loss
    if shards > 1:
        # one norm a parameter, in float64
        traffic.add("all_reduce", 2 * (shards - 1) * 8 * len(list(tiny_model(kind).parameters())) // shards)
    return traffic


def padded_units(kind: str, shards: int) -> dict[str, int]:
    """Elements of each unit's parameters, the first dimension of each padded to a multiple of ``shards``."""
    model = tiny_model(kind)
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    sizes: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        unit = "root"
        if ".layers." in name:
            unit = f"layer{name.split('.')[2]}"
        elif not tied and "norm" not in name:
            unit = "head" if name.startswith("lm_head") else "embedding"
        rows = math.ceil(parameter.shape[0] / shards) * shards
        sizes[unit] = sizes.get(unit, 0) + rows * math.prod(parameter.shape[1:])
    return sizes


@pytest.mark.parametrize("reduce_every", [False, True])
@pytest.mark.parametrize("kind", ["llama3", "smollm2"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_steps_collectives_are_those_of_the_formulae(
    strategy: str, kind: str, reduce_every: bool, pool: WorkerPool, tmp_path: Path
) -> None:
    tiny_model_dir(kind, tmp_path)
    dtypes = ("bfloat16", "float32") if kind == "llama3" else ("float32", "bfloat16")
    fsdp = (
        ("strategy", strategy),
        ("reduce_every_micro_batch", reduce_every),
        ("param_dtype", dtypes[0]),
        ("reduce_dtype", dtypes[1]),
    )
    case = Case(kind, WORLD, 1, 1, fsdp, dp_replicate=2 if strategy.startswith("hybrid") else "auto")
    assert (reshards_after_forward(case.config(tmp_path, steps=1, rows=8).fsdp) is True) == STRATEGIES[strategy][1]
    want = expected(kind, strategy, micro_batches=2, reduces=2 if reduce_every else 1, dtypes=dtypes)
    for rank in pool.run(WORLD, one_step, tmp_path, case):
        assert rank == want


@pytest.mark.parametrize(("strategy", "replicas"), [("full_shard", "auto"), ("hybrid_shard", 2)])
def test_on_cuda_the_same_travels(strategy: str, replicas: Any, pool: WorkerPool, tmp_path: Path) -> None:
    tiny_model_dir("llama3", tmp_path)
    case = Case("llama3", WORLD, 1, 1, (("strategy", strategy),), dp_replicate=replicas)
    want = expected("llama3", strategy, micro_batches=2, reduces=1, dtypes=("float32", "float32"))
    for rank in pool.run(WORLD, one_step, tmp_path, case, torchs_own=True):
        assert rank == want


def averaged(values: list[float], reduce_dtype: str) -> list[float]:
    """The gradient of four weights whose ranks' own gradients are ``values``, averaged by `fully_shard`."""
    from torch.distributed.fsdp import fully_shard

    from fsdp2kit.config.schema import FSDPConfig
    from fsdp2kit.parallel.fsdp import mixed_precision

    layer = torch.nn.Linear(1, 4, bias=False)
    fully_shard(layer, mp_policy=mixed_precision(FSDPConfig(param_dtype="bfloat16", reduce_dtype=reduce_dtype)))
    scale = values[torch.distributed.get_rank()]
    (layer(torch.ones(1, 1)).float() * scale).sum().backward()
    return layer.weight.grad.full_tensor().flatten().tolist()


def test_small_gradients_survive_a_float32_reduction_and_drown_in_bfloat16(pool: WorkerPool) -> None:
    """1e7 + 1 is 1e7 in bfloat16, whose significand has 8 bits, whichever way round the sum is taken."""
    values = [1e7, 1.0, -1e7, 1.0]
    assert pool.run(4, averaged, values, "float32") == [[0.5] * 4] * 4
    for found in pool.run(4, averaged, values, "bfloat16"):
        assert all(value in (0.0, 0.25) for value in found), found
