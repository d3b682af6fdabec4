"""The collectives of one step are those of the formulae in docs/fsdp.md, in number and in bytes."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
import torch

from fsdp2kit.parallel.fsdp import reshards_after_forward
from tests.parallel.helpers.steps import BYTES, one_step, watched_step
from tests.planner.helpers.models import planned
from tests.support.cases import Case
from tests.support.models import full, slow, tiny_model
from tests.support.traffic import Traffic
from tests.support.workers import WorkerPool

WORLD = 4
MAIN = ("full_shard", "hybrid_shard")
STRATEGIES = {  # strategy: ranks that a parameter is sharded over, and whether a unit is freed after forward
    "full_shard": (4, True),
    "shard_grad_op": (4, False),
    "no_shard": (1, False),
    "hybrid_shard": (2, True),
    "hybrid_shard_zero2": (2, False),
}


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
        if replicas > 1:  # shards add up first
            traffic.add("all_reduce", 2 * (replicas - 1) * (size // shards) * reduction // replicas)
    traffic.add("all_reduce", 2 * (WORLD - 1) * 10 * 8 // WORLD)  # ten host numbers: what the batch is made of
    traffic.add("all_reduce", 2 * (WORLD - 1) * 4 // WORLD)  # the loss
    if shards > 1:
        traffic.add("all_reduce", 2 * (shards - 1) * 8 // shards)  # the norm's square, in float64
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


FULL = [(strategy, "llama3", "auto") for strategy in STRATEGIES if strategy != "full_shard"]
FULL += [(strategy, "smollm2", False) for strategy in (*MAIN, "no_shard")]
SLOW = {
    *itertools.product(STRATEGIES, ("llama3", "smollm2"), (True,)),
    *itertools.product(STRATEGIES, ("smollm2",), (False,)),
}


@pytest.mark.parametrize(
    ("strategy", "kind", "reduce_every"),
    [
        full("full_shard", "llama3", "auto"),
        *(full(*case) for case in FULL),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in sorted(SLOW - {*FULL})),
    ],
)
def test_a_steps_collectives_are_those_of_the_formulae(
    strategy: str, kind: str, reduce_every: bool | str, pool: WorkerPool, models: Path
) -> None:
    dtypes = ("bfloat16", "float32") if kind == "llama3" else ("float32", "bfloat16")
    fsdp = (
        ("strategy", strategy),
        ("reduce_every_micro_batch", reduce_every),
        ("param_dtype", dtypes[0]),
        ("reduce_dtype", dtypes[1]),
    )
    case = Case(kind, WORLD, 1, 1, fsdp, dp_replicate=2 if strategy.startswith("hybrid") else "auto")
    assert (reshards_after_forward(case.config(models, steps=1, rows=8).fsdp) is True) == STRATEGIES[strategy][1]
    reduces = 2 if reduce_every is True or (reduce_every == "auto" and strategy != "no_shard") else 1
    want = expected(kind, strategy, micro_batches=2, reduces=reduces, dtypes=dtypes)
    for rank in pool.run(WORLD, one_step, models, case):
        assert rank == want
    found = Traffic()
    for one in planned(case.config(models, steps=2, rows=8), ranks=WORLD, device_type="cpu").collectives:
        assert one.sent % one.calls == 0
        for _ in range(one.calls):
            found.add(one.kind, one.sent // one.calls)
    assert found == want  # the planner says so beforehand


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "strategy"),
    [
        ("llama3", "full_shard"),
        ("smollm2", "shard_grad_op"),
        slow("smollm2", "full_shard"),
        ("llama3", "no_shard"),
        pytest.param("llama3", "shard_grad_op", marks=pytest.mark.slow),
        pytest.param("smollm2", "no_shard", marks=pytest.mark.slow),
    ],
)
def test_a_step_waits_once_and_never_reduces_two_tables_at_once(
    kind: str, strategy: str, pool: WorkerPool, tmp_path: Path
) -> None:
    """With a vocabulary larger than a layer, as in models where it matters what travels with it."""
    model = tiny_model(kind)
    model.resize_token_embeddings(4096, mean_resizing=False)
    model.save_pretrained(tmp_path / kind)
    is_tied = model.lm_head.weight is model.model.embed_tokens.weight
    norm = model.config.hidden_size if is_tied else 0  # it travels with a tied table
    case = Case(kind, 2, 1, 1, (("strategy", strategy),), attention="varlen")

    for traffic, syncs in pool.run(2, watched_step, tmp_path, case):
        assert syncs is not None
        # Half of a table's float32 gradient goes to the other rank.
        expected = 0 if strategy == "no_shard" else (4096 * model.config.hidden_size + norm) * 4 // 2
        assert traffic.largest.get("reduce_scatter", 0) == expected
        assert syncs.count == 1, syncs.places


def averaged(values: list[float], reduce_dtype: str) -> list[float]:
    """The gradient of four weights whose ranks' own gradients are ``values``, averaged by `fully_shard`."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    layer = torch.nn.Linear(1, 4, bias=False)
    reduce = getattr(torch, reduce_dtype)
    fully_shard(layer, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce))
    scale = values[torch.distributed.get_rank()]
    (layer(torch.ones(1, 1)).float() * scale).sum().backward()
    return layer.weight.grad.full_tensor().flatten().tolist()


def test_small_gradients_survive_a_float32_reduction_and_drown_in_bfloat16(pool: WorkerPool) -> None:
    """1e7 + 1 is 1e7 in bfloat16, whose significand has 8 bits, whichever way round the sum is taken."""
    values = [1e7, 1.0, -1e7, 1.0]
    assert pool.run(4, averaged, values, "float32") == [[0.5] * 4] * 4
    for found in pool.run(4, averaged, values, "bfloat16"):
        assert all(value in (0.0, 0.25) for value in found), found
