"""The sections: strict types, documented fields, instances that do not change."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from fsdp2kit.config import TrainingConfig, load_config
from fsdp2kit.config.rl_schema import RLConfig
from fsdp2kit.config.schema import CheckpointConfig, EvalConfig
from fsdp2kit.config.section import Section
from fsdp2kit.errors import UserError


def sections_below(kind: type[Section]) -> list[type[Section]]:
    below = [one for one in kind.__subclasses__() if one.__module__.startswith("fsdp2kit.config.")]
    return [*below, *(one for each in below for one in sections_below(each))]


SECTIONS = [one for one in sections_below(Section) if not issubclass(one, TrainingConfig)]


def load(section: str, key: str, value: Any) -> TrainingConfig:
    return load_config(TrainingConfig, {"recipe": "sft", section: {key: value}}, source=Path("/x/run.toml"))


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.__name__)
def test_every_section_and_field_is_documented(section: type[BaseModel]) -> None:
    assert section.__doc__
    assert [name for name, field in section.model_fields.items() if not field.description] == []


def test_the_documentation_reaches_the_json_schema() -> None:
    made = RLConfig.model_json_schema()
    json.dumps(made)
    cp = made["$defs"]["MeshConfig"]["properties"]["cp"]
    assert cp["description"].startswith("Context-parallel ranks")
    assert made["$defs"]["MeshConfig"]["additionalProperties"] is False


def test_the_json_schema_has_each_variants_keys() -> None:
    import jsonschema

    made = TrainingConfig.model_json_schema()
    momentum = made["$defs"]["MuonConfig"]["properties"]["muon_momentum"]
    assert momentum["description"] == "Decay rate of Muon's Nesterov momentum."
    for section, fits in (
        ({"lr": 1e-3}, True),
        ({"name": "muon", "muon_momentum": 0.9}, True),
        ({"name": "adamw_8bit", "eps": 1e-7}, True),
        ({"muon_momentum": 0.9}, False),
        ({"name": "adamw", "muon_momentum": 0.9}, False),
        ({"name": "adamx"}, False),
    ):
        values = {"recipe": "sft", "optimizer": section}
        assert jsonschema.Draft202012Validator(made).is_valid(values) == fits, section


def test_a_config_does_not_change() -> None:
    config = TrainingConfig(recipe="sft")
    with pytest.raises(ValidationError, match="frozen"):
        config.train.steps = 3


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("run", "seed", "1"),
        ("run", "seed", 1.0),
        ("run", "seed", -1),
        ("run", "dir", ""),
        ("run", "deterministic", "true"),
        ("model", "path", ["a"]),
        ("model", "weights", ""),
        ("mesh", "dp_shard", 0),
        ("mesh", "dp_shard", "all"),
        ("fsdp", "strategy", "zero3"),
        ("fsdp", "class_dtypes", {"LlamaRMSNorm": "float16"}),
        ("checkpoint", "every", -1),
        ("checkpoint", "every", "30"),
        ("lr_schedule", "warmup_ratio", 1.0),
        ("fsdp", "reshard_after_forward", 0),
        ("data", "seq_len", 1),
        ("train", "global_batch_size", 1.5),
        ("optimizer", "lr", -1),
        ("optimizer", "lr", "2e-5"),
        ("optimizer", "lr", float("inf")),
        ("optimizer", "betas", [0.9]),
        ("optimizer", "betas", ["0.9", 0.95]),
        ("optimizer", "betas", [0.9, 1.0]),
        ("preflight", "allow", ["dropuot"]),
        ("wandb", "tags", [1]),
    ],
)
def test_a_wrong_value_is_refused_in_one_line_with_the_doc(section: str, key: str, value: Any) -> None:
    with pytest.raises(UserError) as caught:
        load(section, key, value)
    text = str(caught.value)
    assert text.startswith(f"/x/run.toml: {section}.{key}")
    assert "is not accepted" in text
    assert f"; {key}: " in text  # the field's documentation
    assert "\n" not in text
    assert "more)" not in text  # one mistake in a union is counted once


@pytest.mark.parametrize(
    ("section", "key", "value", "expected"),
    [
        ("optimizer", "lr", 1, 1.0),  # a TOML integer is a fine float
        ("optimizer", "betas", [0, 0.99], (0.0, 0.99)),
        ("mesh", "dp_shard", 4, 4),
        ("fsdp", "reshard_after_forward", False, False),
        ("train", "steps", 0, 0),
        ("model", "weights", "random", "random"),
        ("checkpoint", "every", "1.5h", "1.5h"),
    ],
)
def test_a_right_value_is_kept_as_it_is(section: str, key: str, value: Any, expected: Any) -> None:
    found = getattr(getattr(load(section, key, value), section), key)
    assert (found, type(found)) == (expected, type(expected))


def test_float16_is_refused_with_the_reason() -> None:
    for key in ("param_dtype", "reduce_dtype", "output_dtype", "storage_dtype"):
        with pytest.raises(UserError, match=r"loss scaler, and there is none: use 'bfloat16'"):
            load("fsdp", key, "float16")


@pytest.mark.parametrize(
    ("every", "seconds"), [(5, None), (0, None), ("30m", 1800.0), ("90s", 90.0), ("1.5h", 5400.0)]
)
def test_checkpoints_are_due_by_steps_or_by_time(every: int | str, seconds: float | None) -> None:
    assert CheckpointConfig(every=every).every_seconds == seconds
    assert CheckpointConfig().every_seconds == 1800


def test_the_best_is_kept_with_patience() -> None:
    found = [
        EvalConfig(patience=patience, keep_best=keep).keeps_best
        for patience in (None, 2)
        for keep in (None, True, False)
    ]
    assert found == [False, True, False, True, True, False]
