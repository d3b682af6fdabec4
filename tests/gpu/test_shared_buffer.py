"""Reductions over one rank in one buffer, on a device: FSDP2's own numbers to the bit, in no more memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from fsdp2kit.job.distributed import World
from fsdp2kit.parity.reference import Curves
from tests.parallel.helpers.reductions import assert_equal_to_the_bit
from tests.support.cases import Case, run_case
from tests.support.models import make_batches, tiny_model_dir
from tools.benchmarks.harness import give_back_memory

pytestmark = pytest.mark.gpu

# On a device, reductions of several allocations' size, so that a second buffer shows in the reserved memory.
WIDE: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
}


@pytest.fixture(autouse=True)
def _deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch asks for it
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def curves_and_memory(folder: Path, case: Case) -> tuple[Curves, int]:
    """Five steps, and the most memory that the allocator had reserved."""
    give_back_memory()
    if not torch.cuda.is_available():
        return run_case(folder, case, make_batches()), 0
    torch.cuda.reset_peak_memory_stats()
    return run_case(folder, case, make_batches()), torch.cuda.max_memory_reserved()


@pytest.mark.parametrize("every", [False, True], ids=["", "each micro-batch"])
def test_numbers_are_fsdp2s_own_in_no_more_memory(every: bool, tmp_path: Path, world: World) -> None:
    tiny_model_dir("llama3", tmp_path, **(WIDE if world.device.type == "cuda" else {}))
    fsdp = (("param_dtype", "bfloat16"), ("reduce_every_micro_batch", every))
    case = Case("llama3", micro=2, fsdp=fsdp)
    with patch.object(FSDPModule, "set_custom_reduce_scatter", lambda *_: None):
        its, its_memory = curves_and_memory(tmp_path, case)
    own = FSDPModule.set_custom_reduce_scatter
    with patch.object(FSDPModule, "set_custom_reduce_scatter", autospec=True, side_effect=own) as used:
        mine, memory = curves_and_memory(tmp_path, case)
    assert used.called
    assert_equal_to_the_bit(([mine], [its]))
    assert memory <= its_memory
