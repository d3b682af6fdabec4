"""Over one rank, gradients are copied once; the numbers are those of FSDP2's own reductions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from fsdp2kit.parallel.shared_buffer import SharedBuffer
from fsdp2kit.torch_compat import TorchDispatchMode
from tests.parallel.helpers.reductions import assert_equal_to_the_bit
from tests.support.cases import Case, accumulate, build, run_cases
from tests.support.kept_dtypes import kept_model
from tests.support.models import ROWS, full, make_batches
from tests.support.workers import WorkerPool

BFLOAT16 = ("param_dtype", "bfloat16")
EVERY = ("reduce_every_micro_batch", True)
HELD_BACK = ("reduce_every_micro_batch", False)
NO_SHARD = ("strategy", "no_shard")


def both(folder: Path, cases: Sequence[Case]) -> Any:
    """Curves of fsdp2kit, and with FSDP2's own reductions."""
    found = run_cases(folder, cases)
    with patch.object(FSDPModule, "set_custom_reduce_scatter", lambda *_: None):
        return found, run_cases(folder, cases)


@pytest.mark.parametrize(
    ("world", "cases"),
    [
        (1, [Case("llama3", micro=2, fsdp=(BFLOAT16,)), Case("smollm2", micro=1, fsdp=(BFLOAT16, HELD_BACK))]),
        (2, [Case("llama3", 2, fsdp=(NO_SHARD, BFLOAT16, EVERY))]),
        full(1, [Case("llama3", micro=ROWS), Case("llama3", micro=1, fsdp=(("storage_dtype", "bfloat16"), BFLOAT16))]),
        full(1, [Case("llama3", fsdp=(BFLOAT16,), adapter="lora"), Case("llama3", fsdp=(NO_SHARD, BFLOAT16))]),
        full(2, [Case("llama3", 2, fsdp=(NO_SHARD,)), Case("llama3", 2, fsdp=(NO_SHARD,), adapter="lora")]),
    ],
)
def test_numbers_are_those_of_two_buffers(world: int, cases: list[Case], pool: WorkerPool, models: Path) -> None:
    for found in pool.run(world, both, models, cases):
        assert_equal_to_the_bit(found)


@pytest.mark.full
def test_numbers_where_parameters_stay_in_float32(pool: WorkerPool, tmp_path: Path) -> None:
    kept_model("glm4_moe").save_pretrained(tmp_path / "glm4_moe")
    assert_equal_to_the_bit(pool.run(1, both, tmp_path, [Case("glm4_moe", fsdp=(BFLOAT16,))])[0])


class CopiedBytes(TorchDispatchMode):
    """Bytes that ``copy_`` writes in float32, from another memory than its own."""

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and args[0].dtype == args[1].dtype == torch.float32:
            self.total += args[0].nbytes if args[0].data_ptr() != args[1].data_ptr() else 0
        return func(*args, **(kwargs or {}))


def copied_per_gradient(folder: Path, fsdp: tuple[tuple[str, Any], ...], parts: int) -> tuple[float, float]:
    """Bytes copied in a step of ``parts`` micro-batches, by bytes of gradients: fsdp2kit's and FSDP2's own."""
    found = []
    for method in (FSDPModule.set_custom_reduce_scatter, lambda *_: None):
        with patch.object(FSDPModule, "set_custom_reduce_scatter", method):
            sharded = build(Case("llama3", fsdp=(BFLOAT16, *fsdp)).config(folder, steps=1, rows=ROWS))
        rows = make_batches(1)[0]
        with CopiedBytes() as copied:
            accumulate(sharded, rows, [rows] * parts)
        found.append(copied.total / sum(p.grad.to_local().nbytes for p in sharded.model.parameters()))
    return found[0], found[1]


@pytest.mark.parametrize(("fsdp", "parts", "reductions"), [((), 1, 1), ((EVERY,), 3, 3), ((NO_SHARD,), 3, 1)])
def test_gradients_are_not_copied_into_a_second_buffer(
    fsdp: tuple[tuple[str, Any], ...], parts: int, reductions: int, pool: WorkerPool, models: Path
) -> None:
    mine, its = pool.run(1, copied_per_gradient, models, fsdp, parts)[0]
    assert its - mine == pytest.approx(reductions)
    assert mine < 0.01


def ask(buffer: SharedBuffer, stream: Any, size: int = 8) -> Tensor:
    with torch.cpu.stream(stream):
        return buffer.allocate((size,), dtype=torch.float32, device=torch.device("cpu"))


def test_no_tensor_is_in_two_reductions() -> None:
    """Nor if an input has no output, or an output no input, or another size."""
    backward, reductions = torch.cpu.Stream(), torch.cpu.Stream()
    buffer = SharedBuffer()
    for _ in range(2):
        assert ask(buffer, backward) is ask(buffer, reductions)
    asked = (backward, backward, reductions, reductions, backward)
    tensors = [ask(buffer, stream) for stream in asked]
    assert tensors.pop(1) is tensors[1]
    tensors += [ask(buffer, reductions, 4), ask(buffer, backward, 4), ask(buffer, backward)]
    assert len({tensor.data_ptr() for tensor in tensors}) == len(tensors)


def test_calls_on_one_stream_are_no_pair() -> None:
    buffer, stream = SharedBuffer(), torch.cpu.Stream()
    tensors = [ask(buffer, stream) for _ in range(4)]
    assert len({tensor.data_ptr() for tensor in tensors}) == 4
