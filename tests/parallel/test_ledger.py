"""The dtype ledger is checked on real tensors of a step, and looks on without getting in the compiler's way."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fsdp2kit.parallel.ledger import dtype_ledger
from fsdp2kit.torch_compat import accumulated_partial_sums
from tests.parallel.helpers.ledger import compiled_step, one_step
from tests.support.cases import Case
from tests.support.models import full
from tests.support.workers import WorkerPool


@pytest.mark.parametrize("kind", ["smollm2", pytest.param("llama3", marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", ["bfloat16", full("float32")])
def test_a_step_is_what_its_ledger_says(kind: str, dtype: str, pool: WorkerPool, models: Path) -> None:
    case = Case(kind, 2, 1, 1, (("param_dtype", dtype),))
    assert pool.run(2, one_step, models, case) == ["ok", "ok"]
    for wrong in ("storage", "compute", "accumulation", "gradients", "optimizer"):
        for said in pool.run(2, one_step, models, case, **{wrong: "float16"}):
            assert re.match(rf"dtype ledger: {wrong}( of \w+)? should be float16, but torch\.\w+ was found", said)


@pytest.mark.full
@pytest.mark.parametrize(
    ("fsdp", "dp", "accumulation"),
    [
        ({}, 2, "float32"),  # shards
        ({"reduce_every_micro_batch": False, "reduce_dtype": "bfloat16"}, 2, "bfloat16"),  # whole, as they are reduced
        ({"reduce_dtype": "bfloat16"}, 2, "float32"),
        ({"storage_dtype": "bfloat16"}, 2, "float32"),  # whole
        ({"storage_dtype": "bfloat16", "reduce_every_micro_batch": True}, 2, "bfloat16"),
        ({"strategy": "hybrid_shard", "reduce_dtype": "bfloat16"}, 4, "bfloat16"),  # before the replicas' reduction
        ({"strategy": "no_shard"}, 2, "float32"),
    ],
)
def test_gradients_add_up_in_what_the_ledger_says(
    fsdp: dict[str, Any], dp: int, accumulation: str, pool: WorkerPool, models: Path
) -> None:
    fsdp = {"param_dtype": "bfloat16", **fsdp}
    case = Case("smollm2", dp, fsdp=tuple(fsdp.items()), dp_replicate=2 if dp == 4 else "auto")
    assert pool.run(dp, one_step, models, case) == ["ok"] * dp
    wrong = "bfloat16" if accumulation == "float32" else "float32"
    for said in pool.run(dp, one_step, models, case, accumulation=wrong):
        assert said == f"dtype ledger: accumulation should be {wrong}, but torch.{accumulation} was found"


@pytest.mark.full
def test_exceptions_and_storage_are_in_the_ledger(pool: WorkerPool, models: Path) -> None:
    fsdp = (("param_dtype", "bfloat16"), ("class_dtypes", {"LlamaRMSNorm": "float32"}), ("storage_dtype", "bfloat16"))
    case = Case("llama3", 2, 1, 1, fsdp)
    assert pool.run(2, one_step, models, case) == ["ok", "ok"]
    wrong = {"compute_by_class": {"LlamaRMSNorm": "bfloat16"}}
    for said in pool.run(2, one_step, models, case, **wrong):
        assert said == "dtype ledger: compute of LlamaRMSNorm should be bfloat16, but torch.float32 was found"
    text = str(dtype_ledger(case.config(models, steps=1, rows=1), export="bfloat16"))
    assert "compute of LlamaRMSNorm float32" in text
    assert "WARNING: parameters and moments are stored in bfloat16" in text


@pytest.mark.full
@pytest.mark.parametrize("checkpointing", [False, True])
def test_layers_are_one_graph_while_the_ledger_watches(checkpointing: bool, pool: WorkerPool, models: Path) -> None:
    case = Case("llama3", checkpointing=checkpointing)
    ((watched,), (plain,)) = (pool.run(1, compiled_step, models, case, is_watched) for is_watched in (True, False))
    assert (watched["graphs"], watched["breaks"]) == (1, {})
    assert watched == plain, "the ledger's own functions are not traced"


def test_a_name_that_another_torch_lacks_ends_no_run() -> None:
    """The ledger then skips the sums that wait for the replicas, and reports no error."""
    unit = SimpleNamespace(_get_fsdp_state=lambda: SimpleNamespace(_fsdp_param_groups=[SimpleNamespace()]))
    assert accumulated_partial_sums(unit) == []
