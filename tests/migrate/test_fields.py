"""What the fields of an FSDP1 configuration mean, in the spellings that they come in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tomli
from torch.distributed.fsdp import ShardingStrategy

from fsdp2kit.migrate.draft import Draft
from fsdp2kit.migrate.translate import translate


def translated(values: dict[str, Any], folder: Path, **options: Any) -> tuple[dict[str, Any], Draft]:
    path = folder / "fsdp.json"
    path.write_text(json.dumps(values))
    found = translate(path, toml=str(folder / "x.toml"), **options)
    return tomli.loads(found.toml), found


@pytest.mark.parametrize("strategy", list(ShardingStrategy), ids=lambda strategy: strategy.name)
def test_a_strategy_in_every_spelling(strategy: ShardingStrategy, tmp_path: Path) -> None:
    name = strategy.name.removeprefix("_")
    for spelling in (name, name.lower(), str(strategy), strategy.value, str(strategy.value)):
        for key in ("sharding_strategy", "SHARDING_STRATEGY", "shardingStrategy", "fsdp_sharding_strategy"):
            values, _ = translated({"model_path": "m", key: spelling}, tmp_path)
            assert values["fsdp"]["strategy"] == name.lower(), (key, spelling)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {"strategy": "full_shard", "param_dtype": "float32"}),
        ({"dtype": "torch.bfloat16"}, {"param_dtype": "bfloat16", "reduce_dtype": "bfloat16"}),
        ({"mixed_precision": {"param_dtype": "bf16", "reduce_dtype": "fp32"}}, {"reduce_dtype": "float32"}),
        ({"mixed_precision": "no"}, {"param_dtype": "float32"}),
        ({"bf16": True}, {"param_dtype": "bfloat16"}),
        ({"fp16": True}, {"param_dtype": "bfloat16"}),
        ({"bf16": "auto", "fp16": ""}, {"param_dtype": "bfloat16"}),
        ({"backward_prefetch": "BACKWARD_PRE"}, {"backward_prefetch": 1}),
        ({"backward_prefetch": None}, {"backward_prefetch": 0}),
        ({"forward_prefetch": 3}, {"forward_prefetch": 3}),
        ({"cpu_offload": {"offload_params": True}}, {"offload": "params"}),
        ({"optimizer_offload": True}, {"offload": "optimizer"}),
        ({"fsdp": "hybrid_shard auto_wrap offload"}, {"strategy": "hybrid_shard", "offload": "params"}),
        ({"fsdp": ["full_shard", "auto_wrap"]}, {"strategy": "full_shard"}),
        ({"fsdp": True, "fsdp_config": {"reshard_after_forward": False}}, {"strategy": "shard_grad_op"}),
        ({"fsdp_config": {"reshard_after_forward": "full_shard"}}, {"strategy": "full_shard"}),
        ({"sharding_strategy": 1, "reshard_after_forward": 4}, {"reshard_after_forward": 4}),
        ({"fsdp_config": {"min_num_params": 1e8}}, {"unit": "size", "min_params": 100_000_000}),
        ({"wrap_policy": "NO_WRAP"}, {"unit": "root"}),
        (
            {"fsdp_transformer_layer_cls_to_wrap": "MixtralDecoderLayer,MixtralSparseMoeBlock"},
            {"unit_classes": ["MixtralSparseMoeBlock"]},
        ),
        ({"no_sync": False}, {"reduce_every_micro_batch": True}),
        ({"no_sync": True}, {"reduce_every_micro_batch": False}),
    ],
)
def test_what_the_fields_of_fsdp1_mean(fields: dict[str, Any], expected: dict[str, Any], tmp_path: Path) -> None:
    values, found = translated({"model_path": "m", **fields}, tmp_path)
    assert {key: values["fsdp"][key] for key in expected} == expected
    assert not found.unknown


@pytest.mark.parametrize(
    ("fields", "whole", "micro"),
    [
        ({"train_batch_size": 4}, 32, 4),
        ({"train_batch_size": 4, "gradient_accumulation_steps": 3}, 96, 4),
        ({"train_batch_size": 4, "micro_batch_size": 2}, 32, 2),
        ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4}, 64, 4),
        ({"global_batch_size": 128, "per_device_train_batch_size": 2}, 128, 2),
        ({"global_batch_size": 129, "per_device_train_batch_size": 2}, 128, 2),
        ({"train_batch_size": 4, "cp_size": 2}, 16, 4),
    ],
)
def test_batch_sizes(fields: dict[str, Any], whole: int, micro: int, tmp_path: Path) -> None:
    values, found = translated({"model_path": "m", **fields}, tmp_path, world_size=8)
    assert (values["train"]["global_batch_size"], values["train"]["micro_batch_size"]) == (whole, micro)
    assert bool(found.warnings) == (fields.get("global_batch_size") == 129)


def test_conversations_are_recognised_and_paths_are_the_tomls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": "a"}) + "\n")
    for name, recipe, form in (("rows", "sft", "chat"), ("text", "pretrain", "text")):
        (tmp_path / "fsdp.json").write_text(json.dumps({"model_path": "m", "train_file": f"{name}.jsonl"}))
        values = tomli.loads(translate(Path("fsdp.json"), toml="toml/x.toml").toml)
        assert (values["recipe"], values["data"]["format"]) == (recipe, form)
        assert values["data"]["path"] == f"../{name}.jsonl"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"eval_file": "org/b", "eval_steps": 20, "max_eval_steps": 4}, {"every": 20, "path": "org/b", "steps": 4}),
        ({"dataset_test_split": "test", "eval_steps": 20}, {"every": 20, "split": "test"}),
        ({"eval_file": "org/b", "eval_strategy": "no"}, None),
        ({"eval_file": "org/text", "eval_steps": 20}, None),
        ({"eval_steps": 20}, None),
    ],
)
def test_evaluation_wants_held_out_data(
    fields: dict[str, Any], expected: dict[str, Any] | None, tmp_path: Path
) -> None:
    values, found = translated({"model_path": "m", "data_path": "org/text", **fields}, tmp_path)
    assert values.get("eval") == expected
    assert not found.unknown


def test_offloaded_activations_are_those_of_checkpointed_layers(tmp_path: Path) -> None:
    values, found = translated({"model_path": "m", "enable_activation_offloading": True}, tmp_path)
    assert values["activation_checkpointing"] == {"mode": "full", "offload": True}
    assert any("enable_activation_offloading" in warning for warning in found.warnings)
    values, _ = translated({"model_path": "m", "selective_checkpointing": 3}, tmp_path)
    assert values["activation_checkpointing"] == {"mode": "full", "every": 3}
