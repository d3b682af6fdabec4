"""Adapters of mixtures of experts: on experts, and on other layers beside experts that are dealt out."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model

from fsdp2kit.parity.reference import Curves, errors, load_plain, plain_loop
from tests.parallel.jobs import Case, run_cases
from tests.reference import add_adapter, beyond, full, make_batches, plain_batches, tiny_model_dir, write_adapter
from tests.workers import WorkerPool

HYBRID = (("strategy", "hybrid_shard"),)
DEFAULT = [
    Case("qwen3_moe", 2, 1, 1, adapter="experts", checkpointing="full"),
    Case("qwen3_moe", 2, 1, 2, ep=2, adapter="lora"),
]
FULL = [
    Case("qwen3_moe", 1, 2, 1, adapter="experts"),
    Case("qwen3_moe", 2, 2, 1, HYBRID, dp_replicate=2, adapter="experts", checkpointing="selective"),
    Case("qwen3_moe", 1, 3, 1, (("unit", "size"), ("min_params", 2_000)), adapter="experts"),
    Case("mixtral", 2, 1, 2, adapter="experts", pack=False),
    Case("mixtral", 4, 1, 1, (("reduce_every_micro_batch", False),), adapter="experts"),
    Case("qwen3_moe", 2, 2, 1, ep=4, adapter="lora", checkpointing="selective"),
    Case("qwen3_moe", 4, 1, 1, HYBRID, dp_replicate=2, ep=2, adapter="dora", checkpointing="full"),
    Case("qwen3_moe", 2, 1, 1, ep=2, adapter="saved"),
    Case("qwen3_moe", 2, 1, 1, ep=2, adapter="layer", checkpointing="full"),
]


def write_expert_adapter(folder: Path, kind: str) -> None:
    """Write an adapter of two layers of attention and of experts, saved by peft, to ``folder / kind-experts``."""
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(5)
        experts = ["experts.gate_up_proj", "experts.down_proj"]
        config = LoraConfig(r=4, lora_alpha=6, target_modules=["q_proj", "o_proj"], target_parameters=experts)
        model = get_peft_model(load_plain(folder / kind), config)
        for parameter in (p for p in model.parameters() if p.requires_grad):
            parameter.data += 0.05 * torch.randn_like(parameter)
        model.save_pretrained(str(folder / f"{kind}-experts"))


@pytest.mark.parametrize("case", [*DEFAULT, *map(full, FULL)], ids=str)
def test_training_equals_pefts(case: Case, pool: WorkerPool, tmp_path: Path) -> None:
    """Gradients of every factor, and five steps with clipping, against transformers and peft in one process."""
    tiny_model_dir(case.kind, tmp_path)
    if case.adapter == "experts":
        write_expert_adapter(tmp_path, case.kind)
    else:
        write_adapter(tmp_path, case.kind, case.adapter or "")
    trained: list[str] = []

    def prepare(model: Any) -> None:
        add_adapter(model, tmp_path / f"{case.kind}-{case.adapter}")
        trained.extend(name for name, parameter in model.named_parameters() if parameter.requires_grad)

    batches = make_batches() if case.pack else plain_batches()
    loop = partial(plain_loop, tmp_path / case.kind, batches, lr=1e-3, prepare=prepare)
    exact, other = (loop(micro_batch_size=size) for size in (4, 1))
    exact, other = (
        Curves({name: one.gradients[name] for name in trained}, one.loss, one.grad_norm, one.lr)
        for one in (exact, other)
    )
    found = pool.run(case.world, run_cases, tmp_path, [case])[0][0]
    assert found.gradients.keys() == exact.gradients.keys()
    assert not beyond(errors(found, exact), errors(other, exact))
    assert min(np.abs(gradient).max() for gradient in found.gradients.values()) > 0
