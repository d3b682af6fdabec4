"""An export's config.json is the source's, with what was changed; transformers 4 and 5 read the same model in it."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GPTNeoXConfig, LlamaConfig

from fsdp2kit.config.schema import ModelConfig
from fsdp2kit.model.assets import save_assets
from fsdp2kit.model.build import build_model
from fsdp2kit.model.config_file import dtype_of, with_dtype
from fsdp2kit.weights.record import own_class, source_of
from tests.model.helpers import LLAMA3, OLD, YARN, old_python, write_old

IDS = torch.arange(120)[None] % 100 + 4
NEW_YARN = {**YARN, "rope_theta": 70_000.0}
LOCAL = {"rope_type": "default", "rope_theta": 30_000.0}
LONG = {"rope_type": "longrope", "short_factor": [2.0] * 8, "long_factor": [3.0] * 8, "rope_theta": 20_000.0}
LONG["original_max_position_embeddings"] = 64

# What a user overrides, in either form, and what of the source's JSON that changes.
CHANGES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    *((kind, {}, {}) for kind in OLD),
    ("llama", {"rope_theta": 3000.0}, {"rope_theta": 3000.0}),
    ("llama", {"rope_scaling": YARN}, {"rope_scaling": YARN}),
    ("llama", {"rope_parameters": NEW_YARN}, {"rope_theta": 70_000.0, "rope_scaling": YARN}),
    ("llama", {"rope_parameters": LOCAL}, {"rope_theta": 30_000.0, "rope_scaling": None}),
    ("qwen2", {"rope_parameters": NEW_YARN}, {"rope_theta": 70_000.0, "rope_scaling": YARN}),
    ("qwen3", {"rope_scaling": YARN, "num_hidden_layers": 1}, {"rope_scaling": YARN, "num_hidden_layers": 1}),
    (
        "gemma3_text",
        {"rope_parameters": {"full_attention": NEW_YARN, "sliding_attention": LOCAL}},
        {"rope_theta": 70_000.0, "rope_local_base_freq": 30_000.0, "rope_scaling": YARN},
    ),
    (
        "phi3",
        {"rope_parameters": LONG},
        {"rope_scaling": {"type": "longrope", "short_factor": [2.0] * 8, "long_factor": [3.0] * 8}},
    ),
    (
        "gpt_neox",
        {"rope_parameters": {**LOCAL, "partial_rotary_factor": 0.25}},
        {"rotary_emb_base": 30_000.0, "rotary_pct": 0.25},
    ),
    ("stablelm", {"hidden_size": 32}, {"hidden_size": 32}),
]


def export(source: Path, out: Path, overrides: dict[str, Any]) -> dict[str, Any]:
    """Write a model's export but for its weights, which come from elsewhere; return its config's fields."""
    model = build_model(ModelConfig(path=str(source), config=overrides))
    found = source_of(model)
    out.mkdir()
    options: dict[str, Any] = {"config": found.config, "source": found.directory, "tokenizer": None}
    assert save_assets(out, architecture=own_class(model).__name__, **options) == []
    return json.loads((out / "config.json").read_text())


def logits(path: Path) -> torch.Tensor:
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(IDS).logits


@pytest.mark.parametrize(("kind", "overrides", "changes"), CHANGES, ids=lambda one: str(one)[:40])
def test_a_config_in_the_old_form_keeps_it(
    kind: str, overrides: dict[str, Any], changes: dict[str, Any], tmp_path: Path
) -> None:
    fields = write_old(kind, tmp_path / "source")
    found = export(tmp_path / "source", tmp_path / "out", overrides)
    assert found == {**fields, **changes}
    assert list(found)[: len(fields)] == list(fields), "in the source's order"
    for name in ("config.json", "generation_config.json")[bool(changes) :]:
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "source" / name).read_bytes()
    # What transformers makes of the source's JSON changed by hand is the model that the export's JSON gives.
    write_old(kind, tmp_path / "by_hand", **changes)
    shutil.copy(tmp_path / "by_hand" / "model.safetensors", tmp_path / "out")
    assert torch.equal(logits(tmp_path / "out"), logits(tmp_path / "by_hand"))


def test_a_config_in_the_new_form_keeps_it(tmp_path: Path) -> None:
    LlamaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, dtype="float32").save_pretrained(
        tmp_path / "source"
    )
    fields = json.loads((tmp_path / "source" / "config.json").read_text())
    del fields["use_cache"]
    (tmp_path / "source" / "config.json").write_text(json.dumps({**fields, "of_the_user": [1, {"a": None}]}))
    (tmp_path / "source" / "model.safetensors").touch()
    found = export(tmp_path / "source", tmp_path / "plain", {})
    assert found == {**fields, "of_the_user": [1, {"a": None}], "architectures": ["LlamaForCausalLM"]}
    # A new RoPE is written for readers of both versions.
    found = export(tmp_path / "source", tmp_path / "scaled", {"rope_parameters": {**LLAMA3, "rope_theta": 9.0}})
    assert found["rope_parameters"] == {**LLAMA3, "rope_theta": 9.0}
    assert (found["rope_theta"], found["rope_scaling"]) == (9.0, LLAMA3)
    read = AutoConfig.from_pretrained(tmp_path / "scaled")
    assert read.rope_parameters == {**LLAMA3, "rope_theta": 9.0}


def test_a_base_models_class_becomes_that_of_the_model(tmp_path: Path) -> None:
    write_old("llama", tmp_path / "source", architectures=["LlamaModel"])
    assert export(tmp_path / "source", tmp_path / "out", {})["architectures"] == ["LlamaForCausalLM"]


def test_a_grown_vocabulary_is_written_and_other_keys_are_not(tmp_path: Path) -> None:
    fields = write_old("gpt_neox", tmp_path / "source")
    config = AutoConfig.from_pretrained(tmp_path / "source")
    config.vocab_size += 2
    save_assets(tmp_path, config=config, architecture="GPTNeoXForCausalLM", tokenizer=None, source=tmp_path / "source")
    assert json.loads((tmp_path / "config.json").read_text()) == {**fields, "vocab_size": 130}


@pytest.mark.parametrize("rope", [{"rope_type": "default"}, LLAMA3, YARN])
def test_without_a_source_old_readers_find_rope_too(rope: dict[str, Any], tmp_path: Path) -> None:
    config = LlamaConfig(rope_parameters={**rope, "rope_theta": 70_000.0})
    save_assets(tmp_path, config=config, architecture="LlamaForCausalLM", tokenizer=None, source=None)
    found = json.loads((tmp_path / "config.json").read_text())
    assert found["rope_theta"] == 70_000.0
    assert found.get("rope_scaling") == (rope if len(rope) > 1 else None)
    read = AutoConfig.from_pretrained(tmp_path)
    assert read.rope_parameters == config.rope_parameters
    assert AutoConfig.for_model(**found).rope_parameters == config.rope_parameters, "of the keys alone"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"torch_dtype": "float32"}, {"torch_dtype": "bfloat16"}),
        ({"dtype": "float32"}, {"dtype": "bfloat16"}),
        ({"torch_dtype": None}, {"torch_dtype": "bfloat16"}),
        ({"transformers_version": "4.40.0"}, {"transformers_version": "4.40.0", "torch_dtype": "bfloat16"}),
        ({}, {"dtype": "bfloat16"}),
    ],
)
def test_a_dtype_keeps_its_name(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    assert with_dtype(fields, "bfloat16") == expected
    assert dtype_of(expected) == "bfloat16"


_OLD_READER = """
import json, sys
from pathlib import Path
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
ids = torch.arange(120)[None] % 100 + 4
for path in map(Path, sys.argv[1:]):
    model = AutoModelForCausalLM.from_pretrained(path, torch_dtype=torch.float32).eval()
    with torch.no_grad():
        save_file({"logits": model(ids).logits.contiguous()}, path / "old_logits")
"""


@pytest.mark.timeout(900)
def test_transformers_4_reads_the_same_model(tmp_path: Path) -> None:
    """With a Python that has transformers 4 (4.57 was tried): its logits of the export are those of transformers 5."""
    from safetensors.torch import load_file

    python = old_python()
    paths = []
    for number, (kind, overrides, changes) in enumerate(CHANGES):
        write_old(kind, tmp_path / f"source{number}")
        export(tmp_path / f"source{number}", tmp_path / f"out{number}", overrides)
        write_old(kind, tmp_path / f"by_hand{number}", **changes)
        shutil.copy(tmp_path / f"by_hand{number}" / "model.safetensors", tmp_path / f"out{number}")
        paths += [tmp_path / f"out{number}", tmp_path / f"by_hand{number}"]
    for name, config in {
        "llama": LlamaConfig(rope_parameters={**LLAMA3, "rope_theta": 70_000.0}, **_TINY),
        "gpt_neox": GPTNeoXConfig(**_TINY),
    }.items():
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.save_pretrained(tmp_path / name)
        save_assets(tmp_path / name, config=config, architecture=type(model).__name__, tokenizer=None, source=None)
        paths.append(tmp_path / name)
    subprocess.run([python, "-c", _OLD_READER, *map(str, paths)], check=True)
    for path in paths:
        theirs = load_file(path / "old_logits")["logits"]
        torch.testing.assert_close(
            theirs, logits(path), rtol=1e-3, atol=1e-3, msg=lambda text, at=path: f"{at}: {text}"
        )


_TINY = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.2,
    "max_position_embeddings": 256,
}
