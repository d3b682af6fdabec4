"""What a Hugging Face directory holds beside weights, and digests that say whether two are the same model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, GenerationConfig

from fsdp2kit.model.assets import config_digest, save_assets, source_dtype, weights_digest
from tests.reference import tiny_model, tiny_model_dir


def test_the_config_loads_as_the_same_model(tmp_path: Path) -> None:
    config = tiny_model("llama3").config
    architectures = config.architectures
    save_assets(tmp_path, config=config, architecture="LlamaForCausalLM", tokenizer=None, source=None)
    found = AutoConfig.from_pretrained(tmp_path)
    assert found.architectures == ["LlamaForCausalLM"]
    assert config_digest(found) == config_digest(config)
    assert config.architectures == architectures, "the config that was given stays as it was"


def test_the_sources_generation_config_is_kept(tmp_path: Path) -> None:
    GenerationConfig(temperature=0.25, do_sample=True).save_pretrained(tmp_path / "source")
    config = tiny_model("smollm2").config
    save_assets(tmp_path, config=config, architecture="L", tokenizer=None, source=tmp_path / "source")
    assert json.loads((tmp_path / "generation_config.json").read_text())["temperature"] == 0.25


@pytest.mark.parametrize(
    ("changes", "same"),
    [
        ({"_name_or_path": "elsewhere", "use_cache": False}, True),
        ({"dtype": torch.bfloat16}, True),
        ({"rms_norm_eps": 0.5}, False),
        ({"tie_word_embeddings": False}, False),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1.0}}, False),
    ],
)
def test_a_config_digest_sees_what_matters(changes: dict[str, Any], same: bool) -> None:
    config, changed = tiny_model("smollm2").config, tiny_model("smollm2").config
    for name, value in changes.items():
        setattr(changed, name, value)
    assert (config_digest(config) == config_digest(changed)) is same


def test_a_weights_digest_is_of_the_content_not_the_place(tmp_path: Path) -> None:
    path = tiny_model_dir("smollm2", tmp_path)
    copy = shutil.copytree(path, tmp_path / "copy")
    assert weights_digest(copy) == weights_digest(path)
    file = copy / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert weights_digest(copy) != weights_digest(path)


def test_the_dtype_of_an_export(tmp_path: Path) -> None:
    path = tiny_model_dir("smollm2", tmp_path, dtype=torch.bfloat16)
    config = AutoConfig.from_pretrained(path)
    assert source_dtype(config, path) == "bfloat16"
    assert source_dtype(config, None) == "float32"
    config.dtype = None
    assert source_dtype(config, path) == "float32"
