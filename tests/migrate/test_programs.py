"""What a file leaves out means what its program takes: transformers' TrainingArguments, axolotl."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainingArguments

from tests.migrate.test_fields import translated

DEFAULTS = {field.name: field.default for field in dataclasses.fields(TrainingArguments)}
AXOLOTL = {"base_model": "m", "datasets": [{"path": "org/x", "type": "chat_template"}], "learning_rate": 2e-5}


@pytest.mark.parametrize(
    "telling",
    [
        {"num_train_epochs": 2},
        {"lr_scheduler_type": "linear"},
        {"per_device_eval_batch_size": 4},
        {"output_dir": "out", "bf16": True, "gradient_accumulation_steps": 1},
        {"fsdp": "full_shard auto_wrap", "fsdp_config": {"backward_prefetch": "backward_pre"}},
    ],
)
def test_training_arguments_are_recognised_by_any_telling_field(telling: dict[str, Any], tmp_path: Path) -> None:
    values, found = translated({"model_path": "m", "dataset_name": "org/wiki", **telling}, tmp_path, world_size=2)
    train, optimizer = values["train"], values["optimizer"]
    assert train["max_grad_norm"] == DEFAULTS["max_grad_norm"]
    assert train["micro_batch_size"] == DEFAULTS["per_device_train_batch_size"]
    assert train["global_batch_size"] == 2 * train["micro_batch_size"]
    assert train["epochs"] == telling.get("num_train_epochs", DEFAULTS["num_train_epochs"])
    assert optimizer["lr"] == DEFAULTS["learning_rate"]
    assert optimizer["weight_decay"] == DEFAULTS["weight_decay"]
    assert values["lr_schedule"]["name"] == DEFAULTS["lr_scheduler_type"]
    assert "the default of transformers" in found.toml


def test_a_plain_loop_clips_nothing(tmp_path: Path) -> None:
    plain = {"model_path": "m", "batch_size": 4, "output_dir": "out", "learning_rate": 1e-4, "warmup_steps": 3}
    values, _ = translated(plain, tmp_path)
    assert values["train"]["max_grad_norm"] == 0
    assert values["lr_schedule"]["name"] == "constant"


def test_axolotl_clips_and_warms_up(tmp_path: Path) -> None:
    values, _ = translated({**AXOLOTL, "micro_batch_size": 2, "max_steps": 1000}, tmp_path)
    assert values["train"]["max_grad_norm"] == 1
    assert values["train"]["micro_batch_size"] == 2
    assert values["lr_schedule"] == {"name": "cosine", "warmup_steps": 30}
    values, _ = translated(AXOLOTL, tmp_path)
    assert values["train"]["epochs"] == 1
    assert values["lr_schedule"] == {"name": "cosine", "warmup_ratio": 0.03}


@pytest.mark.parametrize(
    ("fields", "warned"),
    [
        ({"optim": "adamw_8bit"}, "another implementation"),
        ({"optim": "paged_adamw_32bit"}, "AdamW"),
        ({"optim": "adafactor"}, "AdamW"),
        ({"optim": "adamw_torch_fused"}, ""),
        ({"optimizer": "torch.optim.AdamW"}, ""),
        ({"lr_scheduler_type": "cosine_with_restarts"}, "half cosine"),
        ({"lr_scheduler_type": "SchedulerType.COSINE"}, ""),
        ({"lr_scheduler": "get_cosine_schedule_with_warmup"}, ""),
        ({"lr_scheduler_type": "polynomial"}, "constant was written"),
    ],
)
def test_what_is_not_offered_is_warned_of(fields: dict[str, Any], warned: str, tmp_path: Path) -> None:
    _, found = translated({"model_path": "m", **fields}, tmp_path, world_size=1)
    assert len(found.warnings) == bool(warned)
    assert warned in "".join(found.warnings)


@pytest.mark.parametrize(
    ("optim", "name"),
    [("adamw_bnb_8bit", "adamw_8bit"), ("adamw_torch_4bit", "adamw"), ("muon", "muon"), ("adafactor", "adamw")],
)
def test_optimizers_that_are_offered_are_named(optim: str, name: str, tmp_path: Path) -> None:
    values, _ = translated({"model_path": "m", "optim": optim}, tmp_path)
    assert values["optimizer"]["name"] == name


@pytest.mark.parametrize(("spelling", "strategy"), [("ZeRO-3", "full_shard"), ("zero-2", "shard_grad_op")])
def test_a_dash_in_a_strategys_name(spelling: str, strategy: str, tmp_path: Path) -> None:
    values, _ = translated({"model_path": "m", "sharding_strategy": spelling}, tmp_path)
    assert values["fsdp"]["strategy"] == strategy


@pytest.mark.parametrize(
    ("fields", "pack"),
    [
        ({"num_train_epochs": 1}, False),
        ({"num_train_epochs": 1, "packing": True}, True),
        ({"num_train_epochs": 1, "block_size": 512}, True),
        ({**AXOLOTL, "sample_packing": True}, True),
        (AXOLOTL, False),
        ({"dataset": {"_component_": "torchtune.datasets.x", "source": "org/chats"}}, False),
        ({"batching_strategy": "padding"}, False),
        ({}, True),
    ],
)
def test_rows_are_packed_where_the_program_packs(fields: dict[str, Any], pack: bool, tmp_path: Path) -> None:
    path = {} if {"datasets", "dataset"} & set(fields) else {"dataset_name": "org/wiki"}
    values, found = translated({"model_path": "m", **path, **fields}, tmp_path)
    assert values["data"]["pack"] is pack
    assert values["data"]["seq_len"] == fields.get("block_size", 2048)
    assert ("seq_len = 2048 # not in the file: our default" in found.toml) == ("block_size" not in fields)
    assert not pack or "counts packs" in " ".join(found.toml.replace("\n#", "").split())


@pytest.mark.parametrize(
    ("kind", "recipe", "data"),
    [
        (
            "alpaca",
            "sft",
            {"format": "prompt_completion", "columns": {"prompt": "instruction", "completion": "output"}},
        ),
        ("chat_template", "sft", {"format": "chat"}),
        ("sharegpt", "sft", {"format": "chat"}),
        ("completion", "pretrain", {"format": "text"}),
        ("completion:body", "pretrain", {"format": "text", "columns": {"text": "body"}}),
        ({"field_instruction": "q", "field_output": "a"}, "sft", {"columns": {"prompt": "q", "completion": "a"}}),
        ("gpteacher", "sft", {"format": "prompt_completion"}),
    ],
)
def test_axolotls_types_of_rows(kind: Any, recipe: str, data: dict[str, Any], tmp_path: Path) -> None:
    for learnt in ({}, {"train_on_inputs": False}, {"train_on_inputs": True}):
        datasets = [{"path": "org/x", "type": kind, "split": "part"}]
        values, found = translated({**AXOLOTL, "datasets": datasets, "warmup_steps": 0, **learnt}, tmp_path)
        assert values["recipe"] == recipe
        assert {key: values["data"][key] for key in data} == data
        assert values["data"]["split"] == "part"
        expected = None if recipe == "pretrain" else "all" if learnt.get("train_on_inputs") else "assistant"
        assert values["data"].get("train_on") == expected
        assert not found.unknown
        assert any('"gpteacher": not known' in warning for warning in found.warnings) == (kind == "gpteacher")


def test_what_axolotl_says_of_a_data_set_is_read_or_named(tmp_path: Path) -> None:
    entry = {"path": "org/x", "type": "chat_template", "field_messages": "dialog", "shards": 4, "train_on_eos": "none"}
    values, found = translated({**AXOLOTL, "datasets": [entry]}, tmp_path)
    assert values["data"]["columns"] == {"messages": "dialog"}
    for named in ("shards", "train_on_eos"):
        assert any(named in one for one in [*found.warnings, *found.unknown])


@pytest.mark.parametrize(("share", "expected"), [(0.05, 0.05), (200, 200), (0.0, None), (0, None)])
def test_rows_that_are_held_out(share: float, expected: float | None, tmp_path: Path) -> None:
    fields = {"val_set_size": share, "evals_per_epoch": 4, "saves_per_epoch": 1, "pad_to_sequence_len": True}
    values, found = translated({**AXOLOTL, "warmup_steps": 0, **fields}, tmp_path)
    assert values.get("eval", {}).get("split") == expected
    assert not any("val_set_size" in warning for warning in found.warnings)
    assert not found.unknown
