"""`tools/migrate_fsdp1.py`: five real-world configurations, and the spellings that their fields come in.

The files in ``configs/`` have the fields that accelerate's usage guide, transformers' `TrainingArguments`,
llama-recipes' dataclasses and the plain FSDP1 scripts of their time document.
"""

from __future__ import annotations

import itertools
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tomli
import yaml

from fsdp2kit.migrate.draft import Draft
from fsdp2kit.migrate.fields import read_fields
from fsdp2kit.migrate.translate import translate
from fsdp2kit.run import main as run_main
from tests.migrate.helpers import translated
from tools import migrate_fsdp1

CONFIGS = sorted((Path(__file__).parent / "configs").iterdir())
# What each file means, by hand.
EXPECTED = {
    "plain": {
        "recipe": "pretrain",
        "model": {"path": "meta-llama/Llama-3.2-1B", "liger": True},
        "fsdp": {
            "strategy": "full_shard",
            "unit": "size",
            "min_params": 20_000_000,
            "param_dtype": "bfloat16",
            "reduce_dtype": "float32",
            "offload": "none",
            "backward_prefetch": 0,
            "forward_prefetch": 1,
        },
        "activation_checkpointing": {"mode": "full"},
        "data": {"format": "text", "seq_len": 4096},
        "train": {
            "steps": 500,
            "micro_batch_size": 4,
            "global_batch_size": 64,
            "max_grad_norm": 1.0,
            "log_every": 10,
        },
        "optimizer": {"lr": 3e-4, "weight_decay": 0.1, "betas": [0.9, 0.999]},
        "lr_schedule": {"name": "cosine", "warmup_steps": 50},
        "run": {"seed": 1234},
        "checkpoint": {"export_hf": "final"},
    },
    "accelerate_full_shard": {
        "fsdp": {"strategy": "full_shard", "unit": "layer", "param_dtype": "bfloat16", "reduce_dtype": "bfloat16"},
        "activation_checkpointing": {"mode": "full"},
        "train": {"global_batch_size": 8},
    },
    "accelerate_hybrid_offload": {
        "fsdp": {
            "strategy": "hybrid_shard_zero2",
            "unit": "size",
            "min_params": 100_000_000,
            "param_dtype": "bfloat16",
            "offload": "params",
            "backward_prefetch": 0,
            "forward_prefetch": 1,
        },
        "compile": {"enabled": True},
    },
    "training_arguments": {
        "recipe": "sft",
        "model": {"path": "Qwen/Qwen2.5-7B-Instruct"},
        "fsdp": {"strategy": "shard_grad_op", "offload": "params", "backward_prefetch": 1, "forward_prefetch": 0},
        "data": {"path": "HuggingFaceH4/ultrachat_200k", "split": "train_sft", "seq_len": 8192, "pack": True},
        "train": {"epochs": 3, "micro_batch_size": 2, "global_batch_size": 128, "max_grad_norm": 1.0, "log_every": 5},
        "optimizer": {"lr": 1e-5, "betas": [0.9, 0.95]},
        "checkpoint": {"every": 200, "keep": 3},
        "wandb": {"mode": "auto", "name": "qwen-sft"},
    },
    "llama_recipes": {
        "recipe": "sft",
        "model": {"freeze": ["*.layers.0.*", "*.layers.1.*"]},
        "mesh": {"dp_replicate": 2, "dp_shard": 4},
        "fsdp": {"strategy": "hybrid_shard", "param_dtype": "bfloat16", "storage_dtype": "bfloat16"},
        "train": {"epochs": 3, "micro_batch_size": 4, "global_batch_size": 32, "max_grad_norm": 0.0},
        "wandb": {"mode": "disabled"},
    },
}


def _translated(path: Path, **options: Any) -> Draft:
    return translate(path, toml="x.toml", **({"world_size": 8} if path.suffix == ".json" else {}), **options)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_real_configuration_becomes_a_toml_that_passes_the_check(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = _translated(path)
    monkeypatch.setenv("WORLD_SIZE", str(found.world_size))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(found.world_size // found.nodes))
    toml = tmp_path / "x.toml"
    toml.write_text(found.toml)
    assert run_main([str(toml), "--check"]) == 0, capsys.readouterr().err
    assert capsys.readouterr().out.startswith("ok: ")


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_values_are_those_of_the_file(path: Path) -> None:
    values = tomli.loads(_translated(path).toml)
    for section, expected in EXPECTED[path.stem].items():
        found = values[section]
        assert found if isinstance(expected, str) else {key: found[key] for key in expected} == expected, section


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_no_field_is_dropped_and_no_line_is_unexplained(path: Path) -> None:
    text = _translated(path).toml
    words = " ".join(text.replace("\n#", " ").split())
    for field in read_fields(path):
        assert field.value is None or f"{field.path} = " in words, field
    lines = text.splitlines()
    for above, line in itertools.pairwise(lines):
        if re.match(r"[\w.]+ = ", line):
            assert " # " in line or above.startswith("# "), line


@pytest.mark.parametrize(
    ("name", "start"),
    [
        ("plain.json", "fsdp2kit run x.toml --nproc 8"),
        (
            "accelerate_hybrid_offload.yaml",
            "torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint 192.168.20.1:8080 -m",
        ),
    ],
)
def test_the_first_line_is_the_command(name: str, start: str) -> None:
    found = translate(
        Path(__file__).parent / "configs" / name, toml="x.toml", world_size=16 if "--nnodes" in start else 8
    )
    first = found.toml.splitlines()[0]
    assert shlex.split(first.removeprefix("# "))[: len(start.split())] == start.split()


def test_a_nested_file_and_contradictions(tmp_path: Path) -> None:
    (tmp_path / "inner.json").write_text(json.dumps({"backward_prefetch": "backward_pre", "sharding_strategy": 2}))
    values, found = translated(
        {"model_path": "m", "sharding_strategy": "NO_SHARD", "fsdp_config": "inner.json", "odd": {"key": 1}}, tmp_path
    )
    assert values["fsdp"]["strategy"] == "no_shard"
    assert values["fsdp"]["backward_prefetch"] == 1
    assert any("contradicts" in warning for warning in found.warnings)
    assert found.unknown == ["odd.key = 1"]


def test_the_command_line(tmp_path: Path) -> None:
    source = CONFIGS[0]
    assert yaml.safe_load(source.read_text())["num_processes"] == 8
    with (tmp_path / "mine.toml").open("w") as out:
        command = [sys.executable, migrate_fsdp1.__file__, str(source), "--model", "HuggingFaceTB/SmolLM2-135M"]
        done = subprocess.run(command, stdout=out, stderr=subprocess.PIPE, text=True, cwd=tmp_path, check=True)
    text = (tmp_path / "mine.toml").read_text()
    assert text.startswith("# fsdp2kit run mine.toml --nproc 8 data.path=FILE\n")
    assert tomli.loads(text)["model"]["path"] == "HuggingFaceTB/SmolLM2-135M"
    assert "path" not in tomli.loads(text)["data"]
    assert "to be given, the file does not say it: data.path=FILE" in done.stderr.splitlines()
    assert "check it: WORLD_SIZE=8 LOCAL_WORLD_SIZE=8 fsdp2kit check mine.toml" in done.stderr


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"sharding_strategy": "ZERO_9"}', "sharding_strategy: 'ZERO_9' is not understood; known: full_shard"),
        ('{"train_batch_size": "many"}', "train_batch_size: 'many' is not understood; write a number"),
        ('{"betas": [0.9]}', "betas: [0.9] is not understood; write two numbers"),
        ('{"cpu_offload": "perhaps"}', "cpu_offload: 'perhaps' is not understood; write true or false"),
        # Also where no adapter is trained.
        ('{"lora_r": "many", "use_peft": false}', "lora_r: 'many' is not understood; write a number"),
        ('{"lora_alpha": "many"}', "lora_alpha: 'many' is not understood; write a number"),
        ('{"peft_method": "prefix", "load_in_4bit": "x"}', "load_in_4bit: 'x' is not understood; write true or"),
        ("[1, 2]", "is not a table of fields"),
        ("{", "cannot be parsed"),
    ],
)
def test_mistakes_are_one_line(text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "fsdp.json"
    path.write_text(text)
    assert migrate_fsdp1.main([str(path)]) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert len(printed.err.splitlines()) == 1
    assert not printed.out


def test_a_missing_file_and_a_bad_world_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert migrate_fsdp1.main([str(tmp_path / "none.json")]) == 2
    assert migrate_fsdp1.main([str(CONFIGS[0]), "--world-size", "0"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 2
