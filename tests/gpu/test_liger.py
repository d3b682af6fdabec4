"""Liger's norms, RoPE and gated MLPs on one CUDA device compute what transformers' own do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers.models.llama import modeling_llama
from transformers.models.qwen3 import modeling_qwen3

from fsdp2kit.config.schema import CompileConfig
from fsdp2kit.job.distributed import World
from fsdp2kit.parity.engine import Sharded
from fsdp2kit.parity.reference import errors, plain_forward, plain_loop
from tests.support.cases import Case, run_case
from tests.support.models import beyond, make_batches, tiny_model_dir

pytestmark = pytest.mark.gpu
pytest.importorskip("liger_kernel")

KINDS = ["smollm2", "llama3", "qwen3"]


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """RoPE is transformers' own again for the next test."""
    for module in (modeling_llama, modeling_qwen3):
        monkeypatch.setattr(module, "apply_rotary_pos_emb", module.apply_rotary_pos_emb)


def assert_is_ligers(sharded: Sharded) -> None:
    """Norms and MLPs have a forward of their own, in place of their class's."""
    names = ("input_layernorm", "mlp", "norm")
    modules = [module for name, module in sharded.model.named_modules() if name.rpartition(".")[2] in names]
    assert len(modules) == 2 * 2 + 1
    assert all("forward" in vars(module) for module in modules)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "ac"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_losses_and_norms_are_those_of_plain_transformers(
    kind: str, dtype: str, checkpointing: bool, compiled: bool, tmp_path: Path, world: World
) -> None:
    path, batches = tiny_model_dir(kind, tmp_path), make_batches()
    # First, while RoPE is transformers' own on this device.
    exact, narrow = (
        plain_loop(path, batches, micro_batch_size=2, lr=1e-3, dtype=each, device=str(world.device))
        for each in (torch.float32, torch.bfloat16)
    )
    case = Case(kind, micro=2, fsdp=(("param_dtype", dtype),), checkpointing=checkpointing, liger=True)
    config = case.config(tmp_path, steps=len(batches), rows=len(batches[0].input_ids))
    config = config.model_copy(update={"compile": CompileConfig(enabled=compiled)})

    sharded = Sharded(config, world=world)
    found = sharded.curves(batches)

    assert_is_ligers(sharded)
    # Its exponentials and reciprocal roots are Triton's, which float32 shows.
    control = errors(narrow if dtype == "bfloat16" else exact, exact)
    assert not beyond(errors(found, exact), control, floor=1e-4)


def test_selective_recomputation_after_a_run_with_liger(tmp_path: Path, world: World) -> None:
    """Its RoPE, in place for every model of the process, would write over what is kept."""
    tiny_model_dir("llama3", tmp_path)
    case, batches = Case("llama3", micro=2), make_batches()
    expected = run_case(tmp_path, case, batches)
    run_case(tmp_path, replace(case, liger=True), batches)

    found = run_case(tmp_path, replace(case, checkpointing="selective"), batches)

    assert max(errors(found, expected).values()) < 1e-5


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_plain_transformers(kind: str, dtype: str, tmp_path: Path, world: World) -> None:
    path, (rows,) = tiny_model_dir(kind, tmp_path), make_batches(1)
    row, document = rows[:1], range(rows.input_ids.shape[1])  # one document
    case = Case(kind, fsdp=(("param_dtype", dtype),), liger=True)
    expected, _ = plain_forward(path, row, document=document)
    plain = Sharded(replace(case, liger=False).config(tmp_path, steps=1, rows=1), world=world)
    without, _ = plain.forward(row, document=document)

    sharded = Sharded(case.config(tmp_path, steps=1, rows=1), world=world)
    found, _ = sharded.forward(row, document=document)

    def error(logits: np.ndarray) -> float:
        return float(np.linalg.norm(logits - expected) / np.linalg.norm(expected))

    assert error(found) < max(1e-5, 3 * error(without))
    assert_is_ligers(sharded)
