"""What transformers computes in float32 under ``dtype=torch.bfloat16`` is computed in float32 here too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from transformers import AutoModelForCausalLM

from fsdp2kit.checkpoint.hf import dcp_to_hf
from fsdp2kit.job import distributed
from fsdp2kit.model.build import decoder_layers
from fsdp2kit.optim.build import build_optimizer
from fsdp2kit.parallel.ledger import assert_ledger
from fsdp2kit.parity.engine import Sharded
from tests.checkpoint.helpers import assert_equal, checkpoints_of, exported, progress_at
from tests.support.cases import Case, accumulate
from tests.support.kept_dtypes import BEYOND_5_17, kept_model
from tests.support.models import LENGTH, plain_batches
from tests.support.workers import WorkerPool

BF16 = (("param_dtype", "bfloat16"),)


def step_and_save(folder: Path, case: Case, out: Path) -> dict[str, Any]:
    """The logits of a row, then a step at lr 0 that the ledger watches, and a checkpoint of it."""
    config = case.config(folder, steps=1, rows=4)
    sharded = Sharded(config, world=distributed.start())
    batch = plain_batches(1)[0]
    logits, _ = sharded.forward(batch[:1], document=range(LENGTH))
    optimizer = build_optimizer(config.optimizer, sharded.model)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    with assert_ledger(sharded.plan.ledger, sharded.model, optimizer):
        accumulate(sharded, batch, [batch, batch])
        optimizer.step()
    checkpoint = checkpoints_of(out, sharded.model, optimizer, identity={"case": str(case)}).save(progress_at(1))
    return {"logits": logits, "plan": sharded.plan, "checkpoint": checkpoint}


def _rounded(_layer: object, args: Any, kwargs: Any) -> Any:
    def cast(value: Any) -> Any:
        return value.bfloat16() if isinstance(value, Tensor) and value.is_floating_point() else value

    return tree_map(cast, (args, kwargs))


@pytest.mark.parametrize(
    ("kind", "fsdp"),
    [
        ("glm4_moe", ()),
        pytest.param("ernie4_5_moe", (), marks=pytest.mark.full),
        pytest.param("ernie4_5_moe", (("storage_dtype", "bfloat16"),), marks=pytest.mark.full),
        pytest.param("ernie4_5_moe", (("unit", "size"), ("min_params", 1)), marks=pytest.mark.full),
        pytest.param("deepseek_v4", (), marks=[pytest.mark.full, BEYOND_5_17]),
        pytest.param("olmo_hybrid", (), marks=pytest.mark.full),
        pytest.param("ernie4_5_moe", (("unit", "root"),), marks=pytest.mark.slow),
        pytest.param("flint", (), marks=pytest.mark.slow),
        pytest.param("hy_v4", (), marks=pytest.mark.slow),
    ],
)
def test_a_step_computes_and_exports_what_transformers_does(
    kind: str, fsdp: tuple[Any, ...], pool: WorkerPool, tmp_path: Path
) -> None:
    kept_model(kind).save_pretrained(tmp_path / kind)
    plain: Any = AutoModelForCausalLM.from_pretrained(
        tmp_path / kind, dtype=torch.bfloat16, attn_implementation="eager"
    )
    plain.save_pretrained(tmp_path / "expected")
    for layer in decoder_layers(plain) if "unit" not in dict(fsdp) else ():
        layer.register_forward_pre_hook(_rounded, with_kwargs=True)  # a unit's inputs are cast (docs/fsdp.md)
    row = plain_batches(1)[0][:1]
    with torch.no_grad():
        expected = plain(input_ids=row.input_ids, position_ids=row.position_ids, use_cache=False).logits[0]
    case = Case(kind, 2, fsdp=(*BF16, *fsdp), attention="eager", pack=False)
    found = pool.run(2, step_and_save, tmp_path, case, tmp_path / "run")[0]
    assert np.array_equal(found["logits"], expected.float().numpy())
    dcp_to_hf(found["checkpoint"], tmp_path / "export", config_dir=tmp_path / kind)
    if "storage_dtype" not in dict(fsdp):
        assert_equal(exported(tmp_path / "export"), exported(tmp_path / "expected"))
    kept = found["plan"].ledger.kept
    assert kept
    assert f"float32 throughout, as transformers keeps them: {', '.join(kept)}" in "\n".join(found["plan"].describe())
