"""Models on meta: computed buffers, config overrides, ties, layers."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, dynamic_module_utils

from fsdp2kit.config.schema import ModelConfig
from fsdp2kit.errors import UserError
from fsdp2kit.model.build import build_model, decoder_layers, materialize
from fsdp2kit.model.hf_config import load_hf_config
from fsdp2kit.weights.load import load_pretrained
from fsdp2kit.weights.record import find_ties
from tests.support.models import TINY, make_rows, tiny_model, tiny_model_dir

_ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 10_000.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "linear": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0},
    "yarn": {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 32},
}


@pytest.mark.parametrize("rope", _ROPES)
def test_buffers_equal_those_of_from_pretrained(rope: str, tmp_path: Path) -> None:
    config = tiny_model("smollm2").config
    config.rope_parameters = _ROPES[rope]
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    _assert_equal_after_loading(tmp_path)


@pytest.mark.parametrize("kind", TINY)
def test_every_architecture_equals_from_pretrained(kind: str, tmp_path: Path) -> None:
    _assert_equal_after_loading(tiny_model_dir(kind, tmp_path))


def _assert_equal_after_loading(path: Path) -> None:
    expected = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    model = build_model(ModelConfig(path=str(path)))
    assert model.training
    assert all(parameter.is_meta and parameter.dtype == torch.float32 for parameter in model.parameters())
    assert find_ties(model) == find_ties(expected)
    materialize(model, device=torch.device("cpu"))
    assert decoder_layers(model) == list(model.base_model.layers)
    load_pretrained(model, path)
    buffers, others = dict(model.named_buffers()), dict(expected.named_buffers())
    assert buffers.keys() == others.keys()
    assert all(torch.equal(buffers[name], others[name]) for name in others)
    rotary = [m for m in model.modules() if hasattr(m, "attention_scaling")]
    plain = [m for m in expected.modules() if hasattr(m, "attention_scaling")]
    assert [m.attention_scaling for m in rotary] == [m.attention_scaling for m in plain]
    assert find_ties(model) == find_ties(expected)
    assert model.config.tie_word_embeddings == (model.lm_head.weight is model.model.embed_tokens.weight)
    rows = make_rows(0)
    inputs = {"input_ids": rows.input_ids, "position_ids": rows.position_ids, "use_cache": False}
    with torch.no_grad():
        assert torch.equal(model(**inputs).logits, expected.train()(**inputs).logits)


def test_overrides_reach_the_config(tmp_path: Path) -> None:
    path, rope = str(tiny_model_dir("llama3", tmp_path)), _ROPES["linear"]
    config = load_hf_config(ModelConfig(path=path, config={"rms_norm_eps": 0.5, "rope_parameters": rope}))
    assert (config.rms_norm_eps, config.rope_parameters) == (0.5, rope), "rope_parameters are replaced whole"
    with pytest.raises(UserError, match=r"model\.config\.num_hidden_layer: .*did you mean num_hidden_layers\?"):
        load_hf_config(ModelConfig(path=path, config={"num_hidden_layer": 1}))


def test_layer_types_are_cut_with_the_depth(tmp_path: Path) -> None:
    overrides = {"model_type": "gemma3_text", "num_hidden_layers": 7}
    config = load_hf_config(ModelConfig(config=overrides, weights="random"))
    assert config.layer_types == AutoConfig.for_model("gemma3_text").layer_types[:7]
    path = tiny_model_dir("gemma3", tmp_path)
    section = ModelConfig(path=str(path), config={"num_hidden_layers": 1})
    assert load_hf_config(section).layer_types == ["sliding_attention"]
    model = build_model(section)
    materialize(model, device=torch.device("cpu"))
    with pytest.raises(UserError, match="unknown to Gemma3ForCausalLM"):
        load_pretrained(model, path)
    load_pretrained(model, path, allow_unexpected=True)


def test_a_key_that_the_model_reads_and_its_config_does_not_declare(tmp_path: Path) -> None:
    """``head_dim`` of Qwen3-MoE: published configs have it."""
    assert not hasattr(AutoConfig.for_model("qwen3_moe"), "head_dim")
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1}
    config = {"model_type": "qwen3_moe", **sizes, "head_dim": 32, "vocab_size": 100, "num_experts": 4}
    model = build_model(ModelConfig(config=config, weights="random"))
    assert model.get_parameter("model.layers.0.self_attn.q_proj.weight").shape == (4 * 32, 64)


ALIASES = {
    "qwen3_moe": ("num_experts", 4),
    "mixtral": ("num_experts", 4),
    "olmoe": ("num_local_experts", 4),
    "deepseek_v3": ("num_local_experts", 16),
    "gpt2": ("num_hidden_layers", 3),
}


@pytest.mark.parametrize("kind", ALIASES)
def test_an_override_by_another_name_of_the_key(kind: str, tmp_path: Path) -> None:
    """The config is the one whose attribute plain Python sets, whichever name a config.json has for it."""
    name, value = ALIASES[kind]
    expected = AutoConfig.for_model(kind)
    setattr(expected, name, value)
    own = expected.attribute_map[name]
    for key in (name, own):
        alone = load_hf_config(ModelConfig(config={"model_type": kind, key: value}, weights="random"))
        assert alone.to_dict() == expected.to_dict()
        for written in (name, own):
            folder = tmp_path / f"{key}-{written}"
            folder.mkdir()
            fields = AutoConfig.for_model(kind).to_dict()
            fields[written] = fields.pop(own)
            (folder / "config.json").write_text(json.dumps(fields, default=str))
            assert getattr(load_hf_config(ModelConfig(path=str(folder))), name) == fields[written]
            config = load_hf_config(ModelConfig(path=str(folder), config={key: value}))
            assert (getattr(config, name), getattr(config, own)) == (value, value)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"config": {"model_type": "lama"}}, r"model\.config\.model_type: 'lama' is not known"),
        ({"path": "/nowhere/at/all"}, r"model\.path: /nowhere/at/all is not a directory"),
        ({"path": str(Path(__file__).parent)}, r"model\.path: .* is not a model directory \(no config\.json\)"),
        ({"config": {"model_type": "vit"}}, r"model\.config\.model_type: vit is no language model"),
        (
            {"config": {"model_type": "llama", "num_attention_heads": 4, "num_key_value_heads": 3}},
            "num_key_value_heads 3 does not divide num_attention_heads 4; set model.config.num_key_value_heads",
        ),
        (
            {"config": {"model_type": "llama", "rope_scaling": {"factor": 2.0}}},
            r"model\.config\.rope_scaling: .*did you mean rope_parameters\?",
        ),
        (
            {"config": {"model_type": "llama"}, "attention": "flash"},
            'model: cannot be built: .*flash.*; choose another model.attention \\("eager" works',
        ),
        (
            {"config": {"model_type": "llama", "hidden_act": "nosuch"}},
            r"model\.config: transformers cannot build 'llama' from this config \(KeyError: 'nosuch', at "
            r"`self\.act_fn = ACT2FN\[config\.hidden_act\]`\); correct it \(\[model\.config\] sets",
        ),
        (
            {"config": {"model_type": "qwen3_moe", "num_experts": 4, "num_local_experts": 8}},
            r"model\.config\.num_local_experts: is another name of num_experts, which is given as well",
        ),
        ({"config": {"model_type": "qwen3_moe", "num_expert": 4}}, r"num_expert: .*; did you mean num_experts\?"),
        # keys within keys
        (
            {"config": {"model_type": "gemma3", "text_config": {"hiden_size": 8}}},
            r"text_config\.hiden_size: .*mean hidden_size",
        ),
        (
            {"config": {"model_type": "gemma3_text", "rope_parameters": {"full_atention": {"rope_type": "default"}}}},
            r"rope_parameters\.full_atention: .*did you mean full_attention",
        ),
        (
            {"config": {"model_type": "llama", "rope_parameters": {"rope_type": "default", "rope_thet": 5.0}}},
            r"model\.config\.rope_parameters: Unrecognized keys .*rope_thet",
        ),
        (
            {"config": {"model_type": "llama", "rope_parameters": {"rope_type": "linearr", "factor": 2.0}}},
            r"model\.config\.rope_parameters: .*linearr",
        ),
        (
            {"config": {"model_type": "llama", "rope_parameters": {"rope_type": "linear", "factr": 2.0}}},
            r"model\.config: .*factor",
        ),
    ],
)
def test_what_cannot_be_built_says_so(section: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        build_model(ModelConfig(**{"weights": "pretrained" if "path" in section else "random", **section}))


def test_no_layer_found_is_an_error() -> None:
    model = tiny_model("smollm2")
    model._no_split_modules = ["Nothing"]
    with pytest.raises(UserError, match=r"LlamaForCausalLM.*Nothing"):
        decoder_layers(model)


def test_a_model_that_transformers_warns_about_is_not_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = tiny_model("smollm2").config.to_dict()
    config["rope_parameters"]["its_own"] = 1
    (tmp_path / "config.json").write_text(json.dumps(config))
    load_hf_config(ModelConfig(path=str(tmp_path), config={"num_hidden_layers": 1}))
    assert "its_own" in caplog.text


def test_a_model_with_its_own_code_is_loaded_if_that_is_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    fields = {"model_type": "mine", "auto_map": {"AutoConfig": "configuration_mine.MineConfig"}, "hidden_size": 8}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    code = "from transformers import LlamaConfig\n\n\nclass MineConfig(LlamaConfig):\n    model_type = 'mine'\n"
    (tmp_path / "configuration_mine.py").write_text(code)
    section = ModelConfig(path=str(tmp_path), config={"hidden_size": 16})
    with pytest.raises(UserError, match="'mine' is not known to transformers"):
        load_hf_config(section)
    config = load_hf_config(section.model_copy(update={"trust_remote_code": True}))
    assert (type(config).__name__, config.hidden_size) == ("MineConfig", 16)


def test_frozen_parameters_are_those_of_the_patterns() -> None:
    config = tiny_model("smollm2").config.to_dict()
    names = ["model_type", "num_hidden_layers", "hidden_size", "intermediate_size", "tie_word_embeddings"]
    overrides = {name: config[name] for name in names} | {"num_attention_heads": 3, "num_key_value_heads": 3}
    patterns = ["lm_head.weight", "*.layers.0.*"]
    model = build_model(ModelConfig(config=overrides, weights="random", freeze=patterns))
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    first_layer = {name for name, _ in model.named_parameters() if ".layers.0." in name}
    assert frozen == first_layer | {"model.embed_tokens.weight"}, "the head is the embedding"
    for wrong, what in (("*.layer.0.*", "matches no parameter"), ("*", "nothing to train")):
        with pytest.raises(UserError, match=rf"model\.freeze: .*{what}"):
            build_model(ModelConfig(config=overrides, weights="random", freeze=[wrong]))


NOT_DECODERS = {
    "bert": ("BertForMaskedLM", "an encoder"),
    "modernbert": ("ModernBertForMaskedLM", "an encoder"),
    "t5": ("T5ForConditionalGeneration", "encoder-decoder"),
    "bart": ("BartForConditionalGeneration", "encoder-decoder"),
    "whisper": ("WhisperForConditionalGeneration", "encoder-decoder"),
    "wav2vec2": ("Wav2Vec2ForCTC", "an encoder"),
    "vit": ("ViTModel", "predicts the next token"),
    "clip": ("CLIPModel", "images"),
    "qwen2_vl": ("Qwen2VLForConditionalGeneration", "images"),
    "gemma3": ("Gemma3ForConditionalGeneration", "images"),
    "qwen2_audio": ("Qwen2AudioForConditionalGeneration", "audio"),
    "llama": ("LlamaForSequenceClassification", "classification head"),
    "unheard_of": ("UnheardOfForCausalLM", "not known to transformers"),
}


@pytest.mark.parametrize("kind", NOT_DECODERS)
def test_what_is_no_text_decoder_is_refused_in_one_line(kind: str, tmp_path: Path) -> None:
    architecture, what = NOT_DECODERS[kind]
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, "architectures": [architecture]}))
    with pytest.raises(UserError) as caught:
        build_model(ModelConfig(path=str(tmp_path), weights="random"))
    assert what in caught.value.what
    assert len(f"error: {caught.value}") <= 300


def test_a_default_config_that_transformers_refuses_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(model_type: str, **_: Any) -> Any:
        raise TypeError("a width is missing")

    monkeypatch.setattr(AutoConfig, "for_model", refuse)
    with pytest.raises(UserError, match=r"model_type: 'llama' has no default config: a width is missing; start from"):
        load_hf_config(ModelConfig(config={"model_type": "llama"}))


def test_a_model_that_was_untied_stays_untied_and_one_that_was_tied_tied(tmp_path: Path) -> None:
    model = build_model(ModelConfig(path=str(tiny_model_dir("smollm2", tmp_path))))
    model.lm_head.weight = nn.Parameter(torch.empty_like(model.lm_head.weight))
    materialize(model, device=torch.device("cpu"))
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    assert not find_ties(model)
    other = build_model(ModelConfig(path=str(tiny_model_dir("llama3", tmp_path))))
    other.lm_head.weight = other.model.embed_tokens.weight
    materialize(other, device=torch.device("cpu"))
    assert other.lm_head.weight is other.model.embed_tokens.weight
