"""Tiny twins, and what is found out on them: causality and the separation of packed documents."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM

from fsdp2kit.model import probe as probe_module
from fsdp2kit.model.probe import is_causal, probe, separates_packed_documents
from fsdp2kit.model.twin import build_twin, shrink_config
from tests.reference import TINY, tiny_model


@pytest.mark.parametrize("kind", TINY)
def test_the_usual_models_are_causal_and_separate_documents(kind: str) -> None:
    assert probe(tiny_model(kind)) == {"causal": True, "separates_packed": True}


def test_a_bidirectional_model_is_recognised() -> None:
    model = AutoModelForCausalLM.from_config(shrink_config(AutoConfig.for_model("gemma3_text")))
    model.config.use_bidirectional_attention = True
    found = probe(model)
    assert found is not None
    assert not found["causal"]


def test_a_recurrent_model_does_not_separate_documents() -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("mamba", hidden_size=64, num_hidden_layers=2))
    found = probe(model)
    assert found is None or found == {"causal": True, "separates_packed": False}


def test_both_probes_can_say_no(monkeypatch: pytest.MonkeyPatch) -> None:
    twin = build_twin(tiny_model("smollm2"))
    assert isinstance(twin, LlamaForCausalLM)
    original = twin.forward

    def shuffled(input_ids: torch.Tensor, position_ids: Any = None, **options: Any) -> Any:
        return original(input_ids=input_ids.flip(1), **options)  # positions are ignored, order is turned

    monkeypatch.setattr(twin, "forward", shuffled)
    assert not is_causal(twin)
    assert not separates_packed_documents(twin)


def test_a_model_that_has_no_twin_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe_module, "build_twin", lambda model: None)
    assert probe(tiny_model("smollm2")) is None


@pytest.mark.parametrize(
    "model_type", ["llama", "qwen3", "qwen3_moe", "gemma2", "gemma3_text", "mixtral", "phi3", "olmo2", "gpt2"]
)
def test_a_twin_is_small_and_leaves_its_model_and_the_generator_alone(model_type: str) -> None:
    config = AutoConfig.for_model(model_type)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    before, state = model.config.to_dict(), torch.random.get_rng_state()
    twin = build_twin(model)
    assert twin is not None
    assert type(twin) is type(model)
    assert not twin.training
    assert sum(parameter.numel() for parameter in twin.parameters()) < 500_000
    assert model.config.to_dict() == before
    assert torch.equal(torch.random.get_rng_state(), state)


def test_every_kind_of_layer_is_in_the_twin() -> None:
    config = shrink_config(AutoConfig.for_model("gemma3_text"))
    assert sorted(config.layer_types) == ["full_attention", "sliding_attention"]
