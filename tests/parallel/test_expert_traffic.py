"""What partitioned experts send and hold, counted on real ranks, is what the plan says."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from fsdp2kit.job import distributed
from fsdp2kit.job.distributed import local_part
from fsdp2kit.optim.build import build_optimizer
from fsdp2kit.parity.engine import Sharded
from tests.parallel.helpers.steps import watched_step
from tests.planner.helpers.models import planned
from tests.support.cases import Case
from tests.support.models import slow, tiny_model_dir
from tests.support.traffic import Traffic
from tests.support.workers import WorkerPool

HYBRID = (("strategy", "hybrid_shard"),)
CASES = [
    Case("qwen3_moe", 4, 1, 1, ep=4, checkpointing="full"),
    Case("qwen3_moe", 2, 2, 2, ep=2, checkpointing="selective"),
    Case("qwen3_moe", 4, 1, 1, HYBRID, dp_replicate=2, ep=2, checkpointing="full"),
]


_route = Qwen3MoeTopKRouter.forward


def route_evenly(self: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Send equally many tokens to each expert. The small copy keeps its router: its tokens' places must not matter."""
    if not self.training:
        return _route(self, hidden)
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
