"""What `bench.py gpu` runs: shapes of well-known models, and the settings that each is trained with."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from pydantic import ValidationError

from fsdp2kit.bench.synthetic import DRY_RUN, Workload
from fsdp2kit.config import TrainingConfig

Shape = dict[str, Any]


def _llama3(**sizes: Any) -> Shape:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": sizes.pop("rope_factor"),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    shared = {"model_type": "llama", "vocab_size": 128256, "num_key_value_heads": 8, "max_position_embeddings": 131072}
    return {**shared, "rope_parameters": rope, **sizes}


# The published configs of HuggingFaceTB/SmolLM2-135M, meta-llama/Llama-3.2-1B, Llama-3.2-3B and Llama-3.1-8B.
SHAPES: dict[str, Shape] = {
    "SmolLM2-135M": {
        "model_type": "llama",
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
        "tie_word_embeddings": True,
    },
    "Llama-3.2-1B": _llama3(
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        head_dim=64,
        rope_factor=32.0,
        tie_word_embeddings=True,
    ),
    "Llama-3.2-3B": _llama3(
        hidden_size=3072,
        intermediate_size=8192,
        num_hidden_layers=28,
        num_attention_heads=24,
        head_dim=128,
        rope_factor=32.0,
        tie_word_embeddings=True,
    ),
    "Llama-3.1-8B": _llama3(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        head_dim=128,
        rope_factor=8.0,
        tie_word_embeddings=False,
    ),
}
_TINY = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
_TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}

Overrides = Mapping[str, Mapping[str, Any]]
_COMPILED: Overrides = {"compile": {"enabled": True}}
_FLOAT8: Overrides = {"float8": {"recipe": "rowwise"}}
_SELECTIVE: Overrides = {"activation_checkpointing": {"mode": "selective"}}
_FULL: Overrides = {"activation_checkpointing": {"mode": "full"}}


@dataclass(frozen=True)
class Variant:
    """A model and how it is trained."""

    shape: str
    """Of `SHAPES`."""
    name: str
    """What is special about it."""
    overrides: tuple[Overrides, ...] = ()
    """Sections of the config, the later over the earlier."""
    workload: Workload = field(default_factory=Workload)
    packages: tuple[str, ...] = ()
    """That it needs beside ours."""
    loop: Literal["fsdp2kit", "hf_trainer"] = "fsdp2kit"
    """Whose loop trains it; transformers' Trainer has only some of our settings."""

    def __str__(self) -> str:
        return f"{self.shape}, {self.name}"


def _speed(shape: str, workload: Workload) -> list[Variant]:
    """Eager and compiled, in bfloat16 beside transformers' Trainer, and in float8."""
    return [
        Variant(shape, "bfloat16", (), workload),
        Variant(shape, "Trainer, bfloat16", (), workload, ("accelerate",), "hf_trainer"),
        Variant(shape, "bfloat16, compiled", (_COMPILED,), workload),
        Variant(shape, "Trainer, bfloat16, compiled", (_COMPILED,), workload, ("accelerate",), "hf_trainer"),
        Variant(shape, "float8", (_FLOAT8,), workload, ("torchao",)),
        Variant(shape, "float8, compiled", (_FLOAT8, _COMPILED), workload, ("torchao",)),
    ]


_ROW, _TWO_ROWS = Workload(), Workload(rows=2)
_SMALL_ROWS = Workload(seq_len=2048, rows=4, steps=20)

# Without checkpointing where one H200 (139 GiB) has room: float32 parameters, gradients and moments are 16 bytes each.
GROUPS: dict[str, list[Variant]] = {
    "small": [
        Variant("SmolLM2-135M", "bfloat16", (), _SMALL_ROWS),
        Variant("SmolLM2-135M", "Trainer, bfloat16", (), _SMALL_ROWS, ("accelerate",), "hf_trainer"),
        Variant("SmolLM2-135M", "bfloat16, full recomputation", (_FULL,), _SMALL_ROWS),
    ],
    "1b": [
        *_speed("Llama-3.2-1B", _TWO_ROWS),
        Variant("Llama-3.2-1B", "bfloat16, selective recomputation", (_SELECTIVE,), _TWO_ROWS),
        Variant("Llama-3.2-1B", "bfloat16, full recomputation", (_FULL,), _TWO_ROWS),
    ],
    "3b": _speed("Llama-3.2-3B", _ROW),
    # 128 GB of state with AdamW in float32, which leaves no room: these are ways to make some.
    "8b": [
        Variant(
            "Llama-3.1-8B", "8-bit moments", (_SELECTIVE, {"optimizer": {"name": "adamw_8bit"}}), _ROW, ("torchao",)
        ),
        Variant(
            "Llama-3.1-8B",
            "bfloat16 parameters and moments",
            (_SELECTIVE, {"optimizer": {"name": "adamw_bf16"}, "fsdp": {"storage_dtype": "bfloat16"}}),
        ),
        Variant(
            "Llama-3.1-8B",
            "bfloat16 parameters, 4-bit moments",
            (_SELECTIVE, {"optimizer": {"name": "adamw_4bit"}, "fsdp": {"storage_dtype": "bfloat16"}}),
        ),
        Variant("Llama-3.1-8B", "moments on the host", (_SELECTIVE, {"fsdp": {"offload": "optimizer"}})),
    ],
}
"""Each fits in a run of nine minutes; what does not is left out, and named."""


def config_of(variant: Variant, *, attention: str | None, dry_run: bool) -> TrainingConfig:
    """The config of a run of this variant.

    Args:
        attention: None: as the config has it by default.
        dry_run: a tiny model of the same kind.

    Raises:
        ValidationError: this version does not know a setting.
    """
    workload = workload_of(variant, dry_run=dry_run)
    model: dict[str, Any] = {"config": SHAPES[variant.shape] | (_TINY if dry_run else {}), "weights": "random"}
    values: dict[str, Any] = {
        "recipe": "bench",
        "model": model if attention is None else {**model, "attention": attention},
        "data": {"seq_len": workload.seq_len},
        "train": {
            "steps": workload.steps,
            "global_batch_size": workload.rows * workload.micro_batches,
            "micro_batch_size": workload.rows,
        },
        "lr_schedule": {"name": "constant"},
    }
    for overrides in variant.overrides:
        for section, keys in overrides.items():
            values[section] = {**values.get(section, {}), **keys}
    return TrainingConfig.model_validate(values)


def workload_of(variant: Variant, *, dry_run: bool) -> Workload:
    """How much is run of it."""
    return DRY_RUN if dry_run else variant.workload


def obstacle(variant: Variant, *, device: torch.device) -> str | None:
    """Why it cannot be run here; None: it can be tried."""
    try:
        config_of(variant, attention=None, dry_run=False)
    except ValidationError as error:
        unknown = ", ".join(".".join(map(str, problem["loc"])) for problem in error.errors())
        return f"this version does not know {unknown} as asked for"
    for package in variant.packages:
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed"
    overrides = {section for part in variant.overrides for section in part}
    if device.type == "cpu" and "compile" in overrides:
        return "compiled variants are for a device"
    if device.type == "cuda" and "float8" in overrides and torch.cuda.get_device_capability(device) < (8, 9):
        return "the device has no float8 products"
    return None
