"""What experts that are dealt out send and hold, counted on real ranks, is what the plan says."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from fsdp2kit import distributed
from fsdp2kit.config.schema import TrainingConfig
from fsdp2kit.distributed import local_part
from fsdp2kit.optim.build import build_optimizer
from fsdp2kit.parity.engine import Sharded
from tests.parallel.jobs import Case, accumulate
from tests.parallel.test_traffic import watched_step
from tests.planner.models import planned
from tests.planner.trace import StepAllocations
from tests.reference import VOCABULARY, make_rows, slow, tiny_model_dir
from tests.traffic import Traffic
from tests.workers import WorkerPool

HYBRID = (("strategy", "hybrid_shard"),)
CASES = [
    Case("qwen3_moe", 4, 1, 1, ep=4, checkpointing="full"),
    Case("qwen3_moe", 2, 2, 2, ep=2, checkpointing="selective"),
    Case("qwen3_moe", 4, 1, 1, HYBRID, dp_replicate=2, ep=2, checkpointing="full"),
]


def route_evenly(self: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Each expert is visited by as many tokens."""
    logits = torch.nn.functional.linear(hidden.reshape(-1, self.hidden_dim), self.weight)
    index = torch.arange(len(logits) * self.top_k).view(len(logits), -1) % self.num_experts
    return logits, logits.float().softmax(-1).gather(1, index).to(logits.dtype), index


def even_step(folder: Path, case: Case) -> Traffic:
    """What this rank sends in a step."""
    with patch.object(Qwen3MoeTopKRouter, "forward", route_evenly):
        return watched_step(folder, case, by_operators=False)[0]


def at_rest(folder: Path, case: Case) -> dict[str, int]:
    """Bytes of this rank's shards, gradients and optimizer state after a step."""
    config = case.config(folder, steps=1, rows=4)
    sharded = Sharded(config, world=distributed.start())
    optimizer = build_optimizer(config.optimizer, sharded.model)
    parameters = list(sharded.model.parameters())
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    kept = {"parameters": parameters, "gradients": [parameter.grad for parameter in parameters]}
    kept["optimizer"] = [value for state in optimizer.state.values() for value in state.values() if value.ndim]
    return {name: sum(local_part(tensor).nbytes for tensor in tensors) for name, tensors in kept.items()}


@pytest.mark.full
def test_a_rank_holds_what_the_plan_says(pool: WorkerPool, tmp_path: Path) -> None:
    """Whatever ep is, for the four experts of each layer divide evenly."""
    tiny_model_dir("qwen3_moe", tmp_path)
    for ep in (1, 2, 4):
        case = Case("qwen3_moe", 4, 1, 1, (("param_dtype", "bfloat16"),), ep=ep)
        plan = planned(case.config(tmp_path, steps=1, rows=4), ranks=4, device_type="cpu").peaks["optimizer"].bytes
        first = pool.run(4, at_rest, tmp_path, case)[0]
        assert first == {name: plan[name] for name in first}


def vjp_of_silu(gate: Any, projected: Tensor) -> tuple[Tensor, Any]:
    """`torch.func.vjp` of Qwen3's gate; that one's wrappers have no storage to follow."""
    one, other = projected.chunk(2, dim=-1)

    def backward(slope: Tensor) -> tuple[Tensor]:
        sigmoid = one.sigmoid()
        derivative = sigmoid * (1 + one * (1 - sigmoid))
        return (torch.cat([slope * other * derivative, slope * one * sigmoid], dim=-1),)

    return gate(projected), backward


def peak_of_step(ep: int) -> int:
    """A step's peak on this rank, in bytes beside the shards and their gradients, where experts are almost all."""
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes["num_key_value_heads"] = 2
    experts = {"num_experts": 16, "num_experts_per_tok": 1, "moe_intermediate_size": 256}
    config = TrainingConfig.model_validate(
        {
            "recipe": "none",
            "model": {"weights": "random", "config": {"model_type": "qwen3_moe", **sizes, **experts}},
            "mesh": {"ep": ep},
            "fsdp": {"param_dtype": "float32"},
            "data": {"format": "synthetic", "seq_len": 8},
            "train": {"steps": 1, "global_batch_size": 4},
        }
    )
    sharded = Sharded(config, world=distributed.start())
    parameters, rows = list(sharded.model.parameters()), make_rows(0, rows=1, length=8)
    accumulate(sharded, rows)  # the first step also makes what stays
    for parameter in parameters:
        parameter.grad = None
    with patch.object(torch.func, "vjp", vjp_of_silu), StepAllocations() as allocations:
        allocations.mark(parameters, "at rest")
        allocations.start()
        accumulate(sharded, rows)
        allocations.mark([parameter.grad for parameter in parameters], "at rest")
        return sum(size for one, size in allocations.peak() if one.category != "at rest")


@pytest.mark.full
def test_what_is_gathered_of_experts_at_the_peak_is_as_many_times_smaller(pool: WorkerPool) -> None:
    """Peaks are a sum of what is as large at any ep (a rank's shards and their copies) and of what ep divides."""
    peaks = {ep: max(pool.run(4, peak_of_step, ep)) for ep in (1, 2, 4)}
    divided = 2 * (peaks[1] - peaks[2])
    assert divided > 2 * 16 * 3 * 64 * 256 * 4, "all experts of a layer, and their gradients"
    assert 4 * (peaks[2] - peaks[4]) == pytest.approx(divided, rel=0.15), peaks


@pytest.mark.full
@pytest.mark.parametrize("case", [*CASES, slow(Case("qwen3_moe", 4, 1, 1, ep=2))], ids=str)
def test_calls_and_bytes_are_those_of_the_plan(case: Case, pool: WorkerPool, tmp_path: Path) -> None:
    tiny_model_dir(case.kind, tmp_path)
    found = Traffic()
    for one in planned(case.config(tmp_path, steps=2, rows=8), ranks=4, device_type="cpu").collectives:
        if one.kind == "all_reduce":  # DTensors send some of these
            continue
        found.calls[one.kind] = found.calls.get(one.kind, 0) + one.calls
        found.sent[one.kind] = found.sent.get(one.kind, 0) + one.sent
    for rank in pool.run(4, even_step, tmp_path, case):
        for kind in ("all_to_all", "all_gather", "reduce_scatter"):
            assert (rank.calls[kind], rank.sent[kind]) == (found.calls[kind], found.sent[kind]), kind
