"""An engine has, after a sync, the very bits that transformers (and peft) would save of the trainer's weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from fsdp2kit.parity.reference import load_plain
from tests.parallel.jobs import Case
from tests.parallel.test_lora import write_adapter
from tests.reference import _SIZES, tiny_model_dir
from tests.rl.jobs import bits, change, synced
from tests.workers import WorkerPool

HYBRID = (("strategy", "hybrid_shard"),)
KIB = 2**-10
CASES = [
    Case("smollm2", 1, 1),
    Case("llama3", 2, 1),
    Case("smollm2", 1, 2),
    Case("mixtral", 2, 2),
    Case("cohere", 4, 1, fsdp=HYBRID, dp_replicate=2),
    Case("two_experts", 3, 1),  # uneven shards, and a rank with none
    Case("llama3", 2, 1, fsdp=(("strategy", "no_shard"), ("unit", "root"))),
    Case("llama3", 2, 1, fsdp=(("ignored_modules", ["model.embed_tokens"]),), frozen=("model.embed_tokens.*",)),
    Case("qwen3", 2, 1, fsdp=(("param_dtype", "bfloat16"),), adapter="lora"),
    Case("llama3", 3, 1, adapter="saved"),
    Case("qwen3_moe", 1, 2, adapter="dora"),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for kind in {case.kind for case in CASES} - {"two_experts"}:
        tiny_model_dir(kind, folder)
    for case in CASES:
        if case.adapter is not None:
            write_adapter(folder, case.kind, case.adapter)
    config = AutoConfig.for_model("qwen3_moe", **_SIZES, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=32)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "two_experts")
    return folder


def plain(models: Path, case: Case, out: Path, *, changed: bool = False) -> dict[str, Any]:
    """What transformers saves of the same weights in bfloat16, the adapter merged by peft, and which of it changes."""
    model: Any = load_plain(models / case.kind)
    for pattern in case.frozen:
        model.get_submodule(pattern.removesuffix(".*")).requires_grad_(False)
    if case.adapter is not None:
        model = PeftModel.from_pretrained(model, str(models / f"{case.kind}-{case.adapter}"), is_trainable=True)
    if changed:
        change(model)
    if case.adapter is not None:
        model = model.merge_and_unload()
    model.to(torch.bfloat16).save_pretrained(out)
    return {name: bits(tensor) for name, tensor in load_file(out / "model.safetensors").items()}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_an_engine_has_what_an_export_has(case: Case, models: Path, pool: WorkerPool, tmp_path: Path) -> None:
    buckets = (40 * KIB, 1 * KIB, 1, 64)
    ranks = pool.run(case.world, synced, models, case, torch.bfloat16, buckets)
    first = plain(models, case, tmp_path / "first")
    second = plain(models, case, tmp_path / "second", changed=True)
    differ = {name for name in first if not np.array_equal(first[name], second[name])}
    assert differ
    for *syncs, (again, _) in ranks:
        for (arrays, sizes), mib in zip(syncs, buckets, strict=True):
            assert arrays.keys() == first.keys()
            assert not [name for name in first if not np.array_equal(arrays[name], first[name])]
            assert (len(sizes) == 1) == (mib >= 1)
            assert max(sizes) <= max(mib * 2**20, *map(len, map(np.ravel, first.values())))
        assert differ <= again.keys() <= second.keys()
        assert not [name for name in again if not np.array_equal(again[name], second[name])]
        if case.frozen or case.adapter:
            assert again.keys() < second.keys(), "what is frozen is sent once"
