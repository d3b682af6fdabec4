"""The prefetch depths are the number of units that are whole at once, at every point of a step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

# The number of gathered units is not public, and is what the depths are for.
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from transformers import LlamaForCausalLM

from fsdp2kit.job import distributed
from fsdp2kit.parity.engine import Sharded
from tests.support.cases import Case
from tests.support.models import make_batches, slow, tiny_model
from tests.support.workers import WorkerPool

LAYERS = 6


@contextmanager
def whole_layers() -> Iterator[list[int]]:
    """Layers whose gathered parameters are in memory or on their way, after every gather and every release."""
    unshard, reshard = FSDPParamGroup.unshard, FSDPParamGroup.reshard
    alive: set[str] = set()
    counts: list[int] = []

    def note(group: Any, *, is_whole: bool) -> None:
        if ".layers." in group._module_fqn:
            (alive.add if is_whole else alive.discard)(group._module_fqn)
            counts.append(len(alive))

    def counting_unshard(group: Any, *args: Any, **kwargs: Any) -> Any:
        result = unshard(group, *args, **kwargs)
        note(group, is_whole=True)
        return result

    def counting_reshard(group: Any, *args: Any, **kwargs: Any) -> Any:
        result = reshard(group, *args, **kwargs)
        note(group, is_whole=False)
        return result

    FSDPParamGroup.unshard, FSDPParamGroup.reshard = counting_unshard, counting_reshard
    try:
        yield counts
    finally:
        FSDPParamGroup.unshard, FSDPParamGroup.reshard = unshard, reshard


def most_at_once(folder: Path, case: Case) -> tuple[int, int]:
    """Whole layers at once in forward and in backward, at most, in the second step (the first finds the order)."""
    sharded = Sharded(case.config(folder, steps=1, rows=2), world=distributed.start())
    inputs = sharded.inputs(make_batches(1)[0][:1].as_batch())
    sharded.model.loss_sum(**inputs).backward()
    with whole_layers() as forward:
        loss = sharded.model.loss_sum(**inputs)
    with whole_layers() as backward:
        loss.backward()
    return max(forward), max(backward)


@pytest.mark.full
@pytest.mark.parametrize(
    ("checkpointing", "ahead", "whole"),
    [
        ("full", 1, 2),
        ("full", 4, 5),
        ("full", 9, LAYERS),
        (False, 0, 1),
        (False, 2, 3),
        slow("full", 0, 1),
        slow("full", 2, 3),
        slow(False, 1, 2),
        slow(False, 4, 5),
        slow(False, 9, LAYERS),
    ],
)
def test_a_depth_of_n_leaves_n_plus_one_layers_whole(
    checkpointing: bool | str, ahead: int, whole: int, pool: WorkerPool, tmp_path: Path
) -> None:
    config = tiny_model("llama3").config
    config.num_hidden_layers = LAYERS
    LlamaForCausalLM(config).save_pretrained(tmp_path / "deep")
    fsdp = (("forward_prefetch", ahead), ("backward_prefetch", ahead))
    case = Case("deep", 2, 1, 1, fsdp, checkpointing=checkpointing)
    assert pool.run(2, most_at_once, tmp_path, case) == [(whole, whole)] * 2
