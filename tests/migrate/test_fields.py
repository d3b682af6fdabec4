"""What the fields of a configuration mean, in the spellings that they come in, and what its program leaves out."""

from __future__ import annotations

import dataclasses
import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import tomli
import torch
from torch.distributed.fsdp import ShardingStrategy
from transformers import TrainingArguments

from fsdp2kit.migrate.draft import Draft
from fsdp2kit.migrate.translate import translate
from fsdp2kit.run import main as run_main
from tests.migrate.helpers import translated

DEFAULTS = {field.name: field.default for field in dataclasses.fields(TrainingArguments)}
AXOLOTL = {"base_model": "m", "datasets": [{"path": "org/x", "type": "chat_template"}], "learning_rate": 2e-5}
TUNE = {"dataset": {"_component_": "torchtune.datasets.x", "source": "org/chats"}}


def passes_the_check(found: Draft, folder: Path, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setenv("WORLD_SIZE", "1")
    (folder / "x.toml").write_text(found.toml)
    return run_main([str(folder / "x.toml"), "--check"]) == 0


def words(found: Draft) -> str:
    """The TOML in one line, without the marks of comments that are broken."""
    return " ".join(found.toml.replace("\n#", "").split())


@pytest.mark.parametrize("strategy", list(ShardingStrategy), ids=lambda strategy: strategy.name)
def test_a_strategy_in_every_spelling(strategy: ShardingStrategy, tmp_path: Path) -> None:
    name = strategy.name.removeprefix("_")
    for spelling in (name, name.lower(), str(strategy), strategy.value, str(strategy.value)):
        for key in ("sharding_strategy", "SHARDING_STRATEGY", "shardingStrategy", "fsdp_sharding_strategy"):
            values, _ = translated({"model_path": "m", key: spelling}, tmp_path)
            assert values["fsdp"]["strategy"] == name.lower(), (key, spelling)


# Fields, keys of the TOML (None: not there), and a part of the one warning, if any.
CASES: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {"fsdp.strategy": "full_shard", "fsdp.param_dtype": "float32"}, ""),
    ({"dtype": "torch.bfloat16"}, {"fsdp.param_dtype": "bfloat16", "fsdp.reduce_dtype": "bfloat16"}, ""),
    ({"mixed_precision": {"param_dtype": "bf16", "reduce_dtype": "fp32"}}, {"fsdp.reduce_dtype": "float32"}, ""),
    ({"mixed_precision": "no"}, {"fsdp.param_dtype": "float32"}, ""),
    ({"bf16": True}, {"fsdp.param_dtype": "bfloat16"}, ""),
    ({"fp16": True}, {"fsdp.param_dtype": "bfloat16"}, "gradient scaler"),
    ({"bf16": "auto", "fp16": ""}, {"fsdp.param_dtype": "bfloat16"}, ""),
    ({"backward_prefetch": "BACKWARD_PRE"}, {"fsdp.backward_prefetch": 1}, ""),
    ({"backward_prefetch": None}, {"fsdp.backward_prefetch": 0}, ""),
    ({"forward_prefetch": 3}, {"fsdp.forward_prefetch": 3}, ""),
    ({"cpu_offload": {"offload_params": True}}, {"fsdp.offload": "params"}, ""),
    ({"optimizer_offload": True}, {"fsdp.offload": "optimizer"}, ""),
    ({"sharding_strategy": "ZeRO-3"}, {"fsdp.strategy": "full_shard"}, ""),
    ({"sharding_strategy": "zero-2"}, {"fsdp.strategy": "shard_grad_op"}, ""),
    ({"fsdp": "hybrid_shard auto_wrap offload"}, {"fsdp.strategy": "hybrid_shard", "fsdp.offload": "params"}, ""),
    ({"fsdp": ["full_shard", "auto_wrap"]}, {"fsdp.strategy": "full_shard"}, ""),
    ({"fsdp": True, "fsdp_config": {"reshard_after_forward": False}}, {"fsdp.strategy": "shard_grad_op"}, ""),
    ({"fsdp_config": {"reshard_after_forward": "full_shard"}}, {"fsdp.strategy": "full_shard"}, ""),
    ({"sharding_strategy": 1, "reshard_after_forward": 4}, {"fsdp.reshard_after_forward": 4}, ""),
    ({"fsdp_config": {"min_num_params": 1e8}}, {"fsdp.unit": "size", "fsdp.min_params": 100_000_000}, ""),
    ({"wrap_policy": "NO_WRAP"}, {"fsdp.unit": "root"}, ""),
    (
        {"fsdp_transformer_layer_cls_to_wrap": "MixtralDecoderLayer,MixtralSparseMoeBlock"},
        {"fsdp.unit_classes": ["MixtralSparseMoeBlock"]},
        "",
    ),
    ({"no_sync": False}, {"fsdp.reduce_every_micro_batch": True}, ""),
    ({"no_sync": True}, {"fsdp.reduce_every_micro_batch": False}, ""),
    ({"ignored_modules": r"model\.layers\.[0-3]\..+"}, {"fsdp.ignored_modules": None}, "not translated"),
    ({"ignored_modules": None}, {"fsdp.ignored_modules": None}, ""),
    ({"sequence_parallel_degree": 2, "tensor_parallel_dim": 1}, {"mesh.cp": 2}, ""),
    ({"unfrozen_parameters": ["lm_head.weight"]}, {"model.freeze": None}, "model.freeze"),
    # Offloaded activations are those of checkpointed layers.
    (
        {"enable_activation_offloading": True},
        {"activation_checkpointing": {"mode": "full", "offload": True}},
        "enable_activation_offloading",
    ),
    ({"selective_checkpointing": 3}, {"activation_checkpointing": {"mode": "full", "every": 3}}, ""),
    # On eight ranks.
    ({"train_batch_size": 4}, {"train.global_batch_size": 32, "train.micro_batch_size": 4}, ""),
    ({"train_batch_size": 4, "gradient_accumulation_steps": 3}, {"train.global_batch_size": 96}, ""),
    (
        {"train_batch_size": 4, "micro_batch_size": 2},
        {"train.global_batch_size": 32, "train.micro_batch_size": 2},
        "",
    ),
    (
        {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4},
        {"train.global_batch_size": 64, "train.micro_batch_size": 4},
        "",
    ),
    ({"global_batch_size": 128, "per_device_train_batch_size": 2}, {"train.global_batch_size": 128}, ""),
    ({"global_batch_size": 129, "per_device_train_batch_size": 2}, {"train.global_batch_size": 128}, "made 128"),
    ({"train_batch_size": 4, "cp_size": 2}, {"train.global_batch_size": 16, "train.micro_batch_size": 4}, ""),
    # A plain loop clips nothing.
    (
        {"batch_size": 4, "output_dir": "out", "learning_rate": 1e-4, "warmup_steps": 3},
        {"train.max_grad_norm": 0, "lr_schedule.name": "constant"},
        "",
    ),
    # Evaluation wants held-out data.
    (
        {"data_path": "org/text", "eval_file": "org/b", "eval_steps": 20, "max_eval_steps": 4},
        {"eval": {"every": 20, "path": "org/b", "steps": 4}},
        "",
    ),
    (
        {"data_path": "org/text", "dataset_test_split": "test", "eval_steps": 20},
        {"eval": {"every": 20, "split": "test"}},
        "",
    ),
    ({"data_path": "org/text", "eval_file": "org/b", "eval_strategy": "no"}, {"eval": None}, ""),
    ({"data_path": "org/text", "eval_file": "org/text", "eval_steps": 20}, {"eval": None}, ""),
    ({"data_path": "org/text", "eval_steps": 20}, {"eval": None}, ""),
    ({**AXOLOTL, "val_set_size": 0.05, "evals_per_epoch": 4, "saves_per_epoch": 1}, {"eval.split": 0.05}, ""),
    ({**AXOLOTL, "val_set_size": 200, "pad_to_sequence_len": True}, {"eval.split": 200}, ""),
    ({**AXOLOTL, "val_set_size": 0.0}, {"eval": None}, ""),
    ({**AXOLOTL, "val_set_size": 0}, {"eval": None}, ""),
    # What the program takes where the file says nothing.
    (
        {**AXOLOTL, "micro_batch_size": 2, "max_steps": 1000},
        {
            "train.max_grad_norm": 1,
            "train.micro_batch_size": 2,
            "lr_schedule": {"name": "cosine", "warmup_steps": 30},
        },
        "",
    ),
    (AXOLOTL, {"train.epochs": 1, "lr_schedule": {"name": "cosine", "warmup_ratio": 0.03}}, ""),
    # What is not offered.
    ({"optim": "adamw_8bit"}, {"optimizer.name": "adamw_8bit"}, "another implementation"),
    ({"optim": "adamw_bnb_8bit"}, {"optimizer.name": "adamw_8bit"}, "another implementation"),
    ({"optim": "paged_adamw_32bit"}, {"optimizer.name": "adamw"}, "AdamW"),
    ({"optim": "adamw_torch_4bit"}, {"optimizer.name": "adamw"}, "AdamW"),
    ({"optim": "adafactor"}, {"optimizer.name": "adamw"}, "AdamW"),
    ({"optim": "muon"}, {"optimizer.name": "muon"}, "another implementation"),
    ({"optim": "adamw_torch_fused"}, {"optimizer.name": "adamw"}, ""),
    ({"optimizer": "torch.optim.AdamW"}, {"optimizer.name": "adamw"}, ""),
    ({"lr_scheduler_type": "cosine_with_restarts"}, {"lr_schedule.name": "cosine"}, "half cosine"),
    ({"lr_scheduler_type": "SchedulerType.COSINE"}, {"lr_schedule.name": "cosine"}, ""),
    ({"lr_scheduler": "get_cosine_schedule_with_warmup"}, {"lr_schedule.name": "cosine"}, ""),
    ({"lr_scheduler_type": "polynomial"}, {"lr_schedule.name": "constant"}, "constant was written"),
    # Adapters: TRL's, axolotl's, llama-factory's.
    (
        {"use_peft": True, "lora_r": 16, "lora_alpha": 32, "lora_target_modules": "all-linear"},
        {"lora": {"rank": 16, "alpha": 32, "target_modules": "all-linear"}},
        "",
    ),
    ({"use_peft": False, "lora_r": 16}, {"lora": None}, ""),
    (
        {"adapter": "qlora", "lora_r": 8, "lora_dropout": 0.05, "lora_target_linear": True, "load_in_4bit": True},
        {"lora": {"rank": 8, "dropout": 0.05, "target_modules": "all-linear", "quantize": "nf4"}},
        "",
    ),
    ({"use_peft": True, "lora_r": 16, "load_in_4bit": True}, {"lora": {"rank": 16, "quantize": "nf4"}}, ""),
    ({"load_in_4bit": True}, {"lora": None}, "unquantised"),
    ({"use_peft": True, "lora_r": 4, "load_in_8bit": True}, {"lora": {"rank": 4}}, "quantised"),
    (
        {"finetuning_type": "lora", "lora_target": "q_proj,v_proj"},
        {"lora": {"rank": 8, "target_modules": ["q_proj", "v_proj"]}},
        "",
    ),
    ({"finetuning_type": "full"}, {"lora": None}, ""),
    ({"use_peft": True, "peft_method": "prefix"}, {"lora": None}, "the whole model would be trained"),
]


@pytest.mark.parametrize(("fields", "expected", "warned"), CASES, ids=lambda one: str(one)[:60])
def test_what_fields_mean(fields: dict[str, Any], expected: dict[str, Any], warned: str, tmp_path: Path) -> None:
    values, found = translated({"model_path": "m", **fields}, tmp_path, world_size=8)
    for key, value in expected.items():
        section, _, name = key.partition(".")
        there = values.get(section)
        assert (there.get(name) if name and there else there) == value, key
    assert not found.unknown
    # The cases that name the model twice, as axolotl's do, are told which one was used.
    warnings = [warning for warning in found.warnings if "contradicts" not in warning]
    assert len(warnings) == bool(warned), warnings
    assert warned in "".join(warnings)


@pytest.mark.parametrize(
    ("value", "modules", "frozen"),
    [
        (["model.embed_tokens"], ["model.embed_tokens"], ["model.embed_tokens.*"]),
        ("model.visual,model.norm", ["model.visual", "model.norm"], ["model.visual.*", "model.norm.*"]),
        (r"model\.visual.*|lm_head", ["model.visual*", "lm_head"], ["model.visual*", "lm_head.*"]),
        (["lm_head.weight"], ["lm_head"], ["lm_head.*"]),
    ],
)
def test_ignored_modules_are_ignored_and_frozen(
    value: Any, modules: list[str], frozen: list[str], tmp_path: Path
) -> None:
    for key in ("ignored_modules", "fsdp_ignored_modules", "ignoredModules", "ignored_states"):
        values, found = translated({"model_path": "m", key: value, "freeze": ["a.*"]}, tmp_path, world_size=2)
        assert values["fsdp"]["ignored_modules"] == modules
        assert values["model"]["freeze"] == ["a.*", *frozen]
        assert any("frozen" in warning for warning in found.warnings)
        assert not found.unknown


@pytest.mark.parametrize(
    ("name", "table"),
    [
        ("mixed_precision", {"param_dtype": "bf16", "reduce_dtype": "fp32"}),
        ("mixedPrecision", {"paramDtype": "bf16", "reduceDtype": "fp32"}),
        ("MixedPrecisionPolicy", {"ParamDtype": "torch.bfloat16", "ReduceDtype": "torch.float32"}),
    ],
)
def test_nested_mixed_precision_is_read_whole(name: str, table: dict[str, Any], tmp_path: Path) -> None:
    more = {"castForwardInputs": True, "cast_root_forward_inputs": True, "buffer_dtype": "bf16"}
    more |= {"keep_low_precision_grads": False, "_module_classes_to_ignore": ["LlamaRMSNorm"]}
    values, found = translated({"model_path": "m", name: table | more}, tmp_path)
    assert values["fsdp"]["param_dtype"] == "bfloat16"
    assert values["fsdp"]["reduce_dtype"] == "float32"
    assert found.unknown == [f'{name}._module_classes_to_ignore = ["LlamaRMSNorm"]']
    assert found.toml.count("floating-point inputs") == 2


def test_a_field_that_another_overrules_names_it(tmp_path: Path) -> None:
    _, found = translated({"lora_r": 4, "lora_target_linear": True, "lora_target_modules": ["q_proj"]}, tmp_path)
    said = "another field decides: lora.target_modules was lora_target_linear = true"
    assert f'lora_target_modules = ["q_proj"]: {said}' in words(found)


@pytest.mark.parametrize(
    ("named", "units"),
    [
        ("LlamaDecoderLayer,MistralDecoderLayer", None),
        ("GPT2Block, LlamaDecoderLayer", None),
        ("BertLayer,T5Layer", None),
        ("LlamaDecoderLayer,LlamaMLP", ["LlamaMLP"]),
    ],
)
def test_decoder_layers_of_many_models_are_no_further_classes(
    named: str, units: list[str] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
              "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64}  # fmt: skip
    values, found = translated({"model_config": config, "fsdp_transformer_layer_cls_to_wrap": named}, tmp_path)
    assert values["fsdp"].get("unit_classes") == units
    assert "found by themselves" in words(found)
    assert passes_the_check(found, tmp_path, monkeypatch)


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


DEEPSPEED = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3}}


def default_of(kind: Any, name: str) -> Any:
    return inspect.signature(kind).parameters[name].default


@pytest.mark.parametrize(
    ("fields", "decay"),
    [
        ({"sharding_strategy": 1}, default_of(torch.optim.AdamW, "weight_decay")),
        ({"learning_rate": 1e-5, "optim": "torch.optim.AdamW"}, default_of(torch.optim.AdamW, "weight_decay")),
        ({"fsdp_config": {"fsdp_version": 1}}, default_of(torch.optim.AdamW, "weight_decay")),  # accelerate's
        ({"optim": "torch.optim.Adam"}, default_of(torch.optim.Adam, "weight_decay")),
        ({"optimizer": "sgd"}, default_of(torch.optim.SGD, "weight_decay")),
        ({"optim": "muon"}, default_of(torch.optim.Muon, "weight_decay")),
        ({"num_train_epochs": 1}, DEFAULTS["weight_decay"]),
        ({"num_train_epochs": 1, "optim": "adamw_torch"}, DEFAULTS["weight_decay"]),
        (TUNE, default_of(torch.optim.AdamW, "weight_decay")),
        ({"batch_size_training": 4}, 0.0),  # llama-recipes' train_config
        (DEEPSPEED, 0.0),  # FusedAdam's
        ({"sharding_strategy": 1, "weight_decay": 0.3}, 0.3),
    ],
)
def test_weight_decay_and_betas_are_those_of_the_source(fields: dict[str, Any], decay: float, tmp_path: Path) -> None:
    values, _ = translated({"model_path": "m", **fields}, tmp_path)
    assert values["optimizer"]["weight_decay"] == decay
    assert tuple(values["optimizer"]["betas"]) == default_of(torch.optim.AdamW, "betas")


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


@pytest.mark.parametrize(
    ("fields", "pack"),
    [
        ({"num_train_epochs": 1}, False),
        ({"num_train_epochs": 1, "packing": True}, True),
        ({"num_train_epochs": 1, "block_size": 512}, True),
        ({**AXOLOTL, "sample_packing": True}, True),
        (AXOLOTL, False),
        (TUNE, False),
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
    assert not pack or "counts packs" in words(found)


CHATS = "your-org/your-chats"


@pytest.mark.parametrize(
    ("fields", "recipe", "data"),
    [
        ({}, "pretrain", {"format": "text"}),
        ({"data_format": "synthetic"}, "fsdp1_baseline", {"format": "synthetic"}),
        ({"dataset": "org/x", "dataset_config_name": "main"}, "pretrain", {"path": "org/x", "name": "main"}),
        ({"dataset": "org/ultrachat"}, "sft", {"format": "chat", "path": "org/ultrachat"}),
        ({"dataset_name": "org/wiki"}, "pretrain", {"format": "text", "path": "org/wiki"}),
        ({"dataset_name": "org/x", "dataset_text_field": "messages"}, "sft", {"columns": {"messages": "messages"}}),
        ({"dataset_name": "org/x", "dataset_text_field": "body"}, "pretrain", {"columns": {"text": "body"}}),
        ({"datasets": [{"path": "org/x", "type": "chat_template"}]}, "sft", {"format": "chat", "path": "org/x"}),
        ({"dataset": "tatsu-lab/alpaca"}, "sft", {"format": "prompt_completion"}),
        ({"dataset": "samsum_dataset"}, "sft", {"path": CHATS}),
        ({"dataset": {"_component_": "torchtune.datasets.x"}}, "sft", {"path": CHATS}),
        ({"dataset": {"_component_": "x", "source": "org/chats"}}, "sft", {"path": "org/chats"}),
    ],
)
def test_data_and_the_recipe_that_fits(
    fields: dict[str, Any], recipe: str, data: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values, found = translated({"model_path": "m", "max_steps": 3, **fields}, tmp_path)
    assert values["recipe"] == recipe
    assert {key: values["data"][key] for key in data} == data
    assert not found.unknown
    is_left = values["data"]["format"] != "synthetic" and values["data"].get("path") in (None, CHATS)
    assert ("data.path=" in found.toml.splitlines()[0]) == is_left
    assert passes_the_check(found, tmp_path, monkeypatch)


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
