"""What a Hugging Face directory holds beside weights, and digests that say whether two are the same model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import huggingface_hub
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from transformers import AutoConfig, GenerationConfig

from fsdp2kit.config.schema import ModelConfig
from fsdp2kit.errors import UserError
from fsdp2kit.model.assets import config_digest, find_hf_dir, save_assets
from fsdp2kit.model.build import build_model
from fsdp2kit.model.tokenizer import build_tokenizer
from fsdp2kit.weights.record import source_of
from fsdp2kit.weights.stored import weights_digest
from tests.data.helpers.templates import CHATML, make_tokenizer
from tests.support.models import tiny_model, tiny_model_dir
from tests.support.workers import WorkerPool


def test_model_directories(tmp_path: Path) -> None:
    assert find_hf_dir(str(tmp_path), key="model.path", with_weights=True) == tmp_path
    model = build_model(ModelConfig(config={"model_type": "llama"}, weights="random"))
    assert source_of(model).directory is None
    with pytest.raises(UserError, match=r"model\.path: .*nowhere is not a directory"):
        find_hf_dir(str(tmp_path / "nowhere"), key="model.path", with_weights=True)


def _build_from_hub(folder: Path, name: str) -> tuple[int, list[tuple[int, bool]], str]:
    """Tokenizer, model and directory of a hub id, as a recipe asks for them; returns this rank, when each rank fetched
    something, with or without weights, and where the model lies."""
    section, log = ModelConfig(path=name), folder / "log"

    def fetch(path: str, *, allow_patterns: list[str]) -> str:
        assert path == name
        with log.open("a") as file:
            file.write(json.dumps([dist.get_rank(), "*.safetensors" in allow_patterns]) + "\n")
        return str(folder / "model")

    def local(load: Any) -> Any:
        return lambda path, **options: load(folder / "model", **options)

    from transformers import AutoTokenizer, PretrainedConfig

    with (
        mock.patch.object(huggingface_hub, "snapshot_download", fetch),
        mock.patch.object(AutoTokenizer, "from_pretrained", local(AutoTokenizer.from_pretrained)),
        mock.patch.object(PretrainedConfig, "get_config_dict", local(PretrainedConfig.get_config_dict)),
    ):
        build_tokenizer(section)
        found = str(source_of(build_model(section)).directory)
        build_tokenizer(section)
        dist.barrier()
    return dist.get_rank(), [tuple(json.loads(line)) for line in log.read_text().splitlines()], found


def test_a_hub_model_is_fetched_by_one_rank_of_a_machine_before_the_others(pool: WorkerPool, tmp_path: Path) -> None:
    make_tokenizer(CHATML).save_pretrained(tiny_model_dir("smollm2", tmp_path).rename(tmp_path / "model"))
    for _, fetched, found in pool.run(2, _build_from_hub, tmp_path, "fsdp2kit/fetched"):
        # The second rank finds everything in the cache that it asks.
        assert fetched == [(0, False), (1, False), (0, True), (1, True)]
        assert found == str(tmp_path / "model")


def test_assets_are_the_config_and_the_sources_generation_config(tmp_path: Path) -> None:
    GenerationConfig(temperature=0.25, do_sample=True).save_pretrained(tmp_path / "source")
    config = tiny_model("llama3").config
    architectures = config.architectures
    source = tmp_path / "source"
    save_assets(tmp_path, config=config, architecture="LlamaForCausalLM", tokenizer=None, source=source)
    found = AutoConfig.from_pretrained(tmp_path)
    assert found.architectures == ["LlamaForCausalLM"]
    assert config_digest(found) == config_digest(config)
    assert config.architectures == architectures, "the config that was given stays as it was"
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
    content = (copy / "model.safetensors").read_bytes()
    (copy / "model.safetensors").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert weights_digest(copy) != weights_digest(path)


@pytest.mark.parametrize("is_link", [True, False])
def test_weights_that_are_no_file_are_named(is_link: bool, tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    weights.symlink_to("/no/where") if is_link else weights.mkdir()
    with pytest.raises(UserError, match=rf"{weights}: is no file, or a link to one that is not there"):
        weights_digest(tmp_path)


def test_a_weights_digest_is_of_every_tensor(tmp_path: Path) -> None:
    """A merged adapter leaves the file's size, its header and its last tensor as they were."""
    one, other = tmp_path / "one", tmp_path / "other"
    tensors = {name: torch.zeros(64, 2048) for name in ("a", "b", "z")}
    for folder in (one, other):
        folder.mkdir()
        save_file(tensors, folder / "model.safetensors")
        tensors["b"] = tensors["b"] + 1e-3
    (first, sampled), (same, others) = (weights_digest(folder).split() for folder in (one, other))
    assert (first == same, sampled == others) == (True, False)
    (other / "model.safetensors").write_bytes(b"no safetensors")
    assert weights_digest(other) != weights_digest(one)


@pytest.mark.parametrize("place", [0, -1])
def test_a_weights_digest_is_of_both_ends_of_a_tensor(place: int, tmp_path: Path) -> None:
    tensors = {name: torch.zeros(64, 2048) for name in ("a", "b", "z")}
    save_file(tensors, tmp_path / "model.safetensors")
    before = weights_digest(tmp_path)
    tensors["b"].view(-1)[place] = 1.0
    save_file(tensors, tmp_path / "model.safetensors")
    assert weights_digest(tmp_path) != before
