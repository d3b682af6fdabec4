"""A sync and the embedded engine keep in float32 what transformers keeps so, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from fsdp2kit.model.tokenizer import build_tokenizer
from fsdp2kit.rl.engines.build import build_engine
from fsdp2kit.rl.weight_sync import sync_weights
from tests.checkpoint.helpers import exported
from tests.rl.helpers.engines import config_of
from tests.rl.helpers.jobs import Engine, bits
from tests.support.cases import Case, build
from tests.support.kept_dtypes import kept_model
from tests.support.models import full
from tests.support.workers import WorkerPool

Found = dict[str, tuple[torch.dtype, np.ndarray]]


def with_dtypes(tensors: Any) -> Found:
    return {name: (tensor.dtype, bits(tensor)) for name, tensor in tensors.items()}


def received(folder: Path, case: Case) -> tuple[Found, Found]:
    """What a server is sent, and what the embedded engine's model has after a sync."""
    config = config_of(folder, case)
    sharded = build(config)
    server = Engine()
    engine: Any = build_engine(
        config, sharded.model, tokenizer=build_tokenizer(config.model), device=sharded.mesh.device
    )
    for each in (server, engine):
        sync_weights(sharded.model, each, version=0, dtype=engine.dtype, bucket_mib=0.02)
    return with_dtypes(server.tensors), with_dtypes(engine._model.state_dict())


@pytest.mark.parametrize("kind", ["glm4_moe", full("ernie4_5_moe")])
def test_engines_get_what_transformers_loads(kind: str, pool: WorkerPool, tmp_path: Path) -> None:
    kept_model(kind).save_pretrained(tmp_path / kind)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / kind, dtype=torch.bfloat16)
    plain.save_pretrained(tmp_path / "expected")
    expected = with_dtypes(exported(tmp_path / "expected")), with_dtypes(plain.state_dict())
    assert torch.float32 in {dtype for dtype, _ in expected[0].values()}
    for ours in pool.run(2, received, tmp_path, Case(kind, 2, fsdp=(("param_dtype", "bfloat16"),))):
        for found, wanted in zip(ours, expected, strict=True):
            assert {name: dtype for name, (dtype, _) in found.items()} == {
                name: dtype for name, (dtype, _) in wanted.items()
            }
            assert not [name for name in found if not np.array_equal(found[name][1], wanted[name][1])]
