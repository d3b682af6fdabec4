"""small copies and the traits found on them; a model's limits are those where plain transformers fails."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from fsdp2kit.config.schema import ModelConfig
from fsdp2kit.errors import UserError
from fsdp2kit.model import inspect
from fsdp2kit.model.build import build_model
from fsdp2kit.model.inspect import (
    beyond_positions,
    build_small_copy,
    check_attention,
    check_positions,
    check_rope,
    inspect_model,
    is_causal,
    separates_packed_documents,
    shrink_config,
)
from tests.support.models import TINY, tiny_model


@pytest.mark.parametrize("kind", TINY)
def test_the_usual_models_are_causal_and_separate_documents(kind: str) -> None:
    traits = inspect_model(tiny_model(kind))
    assert (traits.causal, traits.separates_packed) == (True, True)


def test_a_bidirectional_model_is_recognised() -> None:
    model = AutoModelForCausalLM.from_config(shrink_config(AutoConfig.for_model("gemma3_text")))
    model.config.use_bidirectional_attention = True
    assert inspect_model(model).causal is False


def test_a_recurrent_model_does_not_separate_documents() -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("mamba", hidden_size=64, num_hidden_layers=2))
    assert inspect_model(model).separates_packed is not True


def test_both_probes_can_say_no(monkeypatch: pytest.MonkeyPatch) -> None:
    small = build_small_copy(tiny_model("smollm2"))
    assert isinstance(small, LlamaForCausalLM)
    original = small.forward

    def shuffled(input_ids: torch.Tensor, position_ids: Any = None, **options: Any) -> Any:
        return original(input_ids=input_ids.flip(1), **options)  # positions are ignored, order is turned

    monkeypatch.setattr(small, "forward", shuffled)
    assert not is_causal(small)
    assert not separates_packed_documents(small)


def test_a_model_that_has_no_small_copy_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(model: Any) -> Any:
        raise KeyError("width")

    monkeypatch.setattr(inspect, "build_small_copy", fail)
    traits = inspect_model(tiny_model("smollm2"))
    assert (traits.causal, traits.separates_packed, traits.linear_head) == (None, None, False)
    assert traits.small_copy() is None
    assert traits.no_small_copy == "a small copy of it does not run (KeyError: 'width')"


def test_a_model_whose_small_copy_does_not_run_says_why() -> None:
    """transformers' grouped products of experts want rows of 16 bytes."""
    config = AutoConfig.for_model("qwen3_moe", moe_intermediate_size=18, num_experts=4)
    with torch.device("meta"):
        traits = inspect_model(AutoModelForCausalLM.from_config(config))
    assert traits.separates_packed is None
    assert (
        traits.no_small_copy
        == "a small copy of it does not run (RuntimeError: strides should be multiple of 16 bytes)"
    )


def test_what_is_done_to_a_small_copy_stays_with_it() -> None:
    traits, tokens = inspect_model(tiny_model("llama3")), torch.arange(8)[None]
    small, other = traits.small_copy(), traits.small_copy()
    assert small is not None
    assert other is not None
    logits = small(input_ids=tokens, use_cache=False).logits
    small.config.eos_token_id = 5
    with torch.no_grad():
        for parameter in small.parameters():
            parameter.zero_()
    small.get_input_embeddings().register_forward_hook(lambda *_: pytest.fail("it is another's"))
    again = traits.small_copy()
    assert again is not None
    for each in (other, again):
        assert each.config.eos_token_id is None
        assert torch.equal(each(input_ids=tokens, use_cache=False).logits, logits)


@pytest.mark.parametrize(
    "model_type",
    [
        *("llama", "qwen3", "qwen3_moe", "gemma2", "gemma3_text", "mixtral", "phi3", "olmo2", "gpt2"),
        # Kinds of layer that are computed, not listed; layers that share keys; lists with an entry for every layer.
        *("falcon_h1", "bamba", "jamba", "gemma3n_text", "glm_moe_dsa", "llama4_text", "gpt_oss", "falcon_mamba"),
        # Four kinds; layers that are named by number.
        *("nemotron_h", "gemma4_text"),
    ],
)
def test_a_small_copy_is_small_and_leaves_its_model_and_the_generator_alone(model_type: str) -> None:
    config = AutoConfig.for_model(model_type)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    before, state = model.config.to_dict(), torch.random.get_rng_state()
    small = build_small_copy(model)
    assert small is not None
    assert type(small) is type(model)
    assert not small.training
    assert sum(parameter.numel() for parameter in small.parameters()) < 500_000
    whole, reduced = (_kinds(one.config) for one in (model, small))
    assert whole == reduced, "every kind of layer is there"
    assert model.config.to_dict() == before
    assert torch.equal(torch.random.get_rng_state(), state)


def _kinds(config: Any) -> set[tuple[str, object]]:
    """Each kind of layer, with the width of its heads where layers differ in it."""
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or []
    if not getattr(config, "is_heterogeneous", False):
        return {(kind, None) for kind in kinds}
    own = {int(at): str(values) for at, values in config.to_dict()["per_layer_config"].items()}
    return {(kind, own.get(at)) for at, kind in enumerate(kinds)}


# Limits

GPT = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 24}
SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 24}
SMALL = {
    "gpt2": GPT,
    "gpt_bigcode": GPT,
    "gptj": {**GPT, "rotary_dim": 4},
    "opt": {**SIZES, "word_embed_proj_dim": 16, "ffn_dim": 16},
    "llama": {**SIZES, "intermediate_size": 16},
    "mistral": {**SIZES, "intermediate_size": 16, "num_key_value_heads": 2, "head_dim": 8},
}


@pytest.mark.parametrize("kind", SMALL)
def test_what_is_refused_is_what_transformers_cannot_run(kind: str) -> None:
    sizes = {"model_type": kind, "vocab_size": 32, **SMALL[kind]}
    plain = AutoModelForCausalLM.from_config(AutoConfig.for_model(**sizes)).eval()
    ours = build_model(ModelConfig(config=sizes, weights="random", attention="eager"))
    traits = inspect_model(ours)
    for length in (24, 25):
        positions = torch.arange(length)[None]
        try:
            plain(input_ids=torch.zeros_like(positions), position_ids=positions, use_cache=False)
        except (IndexError, RuntimeError):
            with pytest.raises(UserError, match=r"data\.seq_len: 25 is beyond the 24 positions of .*; use at most 24"):
                check_positions(ours, traits, seq_len=length)
        else:
            check_positions(ours, traits, seq_len=length)
            assert length == 24 or kind in ("llama", "mistral")


def test_no_positions_in_a_config_are_no_table() -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shrink_config(AutoConfig.for_model("xlnet")))
    assert model.config.max_position_embeddings == -1
    check_positions(model, inspect_model(model), seq_len=4096)


def test_flex_attention_trains_on_cuda_alone() -> None:
    check_attention("flex_attention", device=torch.device("cuda"))
    check_attention("sdpa", device=torch.device("cpu"))
    with pytest.raises(UserError, match=r"model\.attention: .* no backward on a CPU"):
        check_attention("flex_attention", device=torch.device("cpu"))


LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8,
            "original_max_position_embeddings": 32}  # fmt: skip


@pytest.mark.parametrize(
    ("parameters", "limit"),
    [
        ({"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}, 64),
        (LONGROPE, 32),
        ({"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}, None),
        (None, None),
    ],
    ids=["dynamic", "longrope", "yarn", "default"],
)
def test_frequencies_that_follow_the_longest_sequence_are_refused_beyond_their_limit(
    parameters: dict | None, limit: int | None
) -> None:
    config = LlamaConfig(hidden_size=64, num_attention_heads=4, max_position_embeddings=64, rope_parameters=parameters)
    check_rope(config, seq_len=limit or 4096)
    if limit is not None:
        with pytest.raises(UserError, match=f"beyond {limit}.*use at most {limit}"):
            check_rope(config, seq_len=limit + 1)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
OF_LAYERS = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}


@pytest.mark.parametrize(
    ("model_type", "positions", "rope", "limit"),
    [
        ("llama", 2048, None, 2048),
        ("qwen3", 1024, YARN, 4096),  # as Qwen's: the length before the scaling
        ("qwen3", 4096, YARN, 4096),  # the length after it
        ("llama", 16384, {**LLAMA3, "original_max_position_embeddings": 1024}, 16384),  # as Llama 3.1's
        ("llama", 2048, {"rope_type": "linear", "factor": 4.0}, 8192),
        ("gemma3_text", 2048, OF_LAYERS, 2048),  # the layers whose RoPE is not scaled
    ],
)
def test_rows_beyond_what_a_model_was_made_for_are_said(
    model_type: str, positions: int, rope: dict[str, Any] | None, limit: int
) -> None:
    scaled = {"rope_parameters": rope} if rope else {}
    config = AutoConfig.for_model(model_type, max_position_embeddings=positions, **scaled)
    assert beyond_positions(config, seq_len=limit) is None
    said = beyond_positions(config, seq_len=limit + 1)
    assert said is not None
    assert said.startswith(f"data.seq_len {limit + 1:,} is beyond the {limit:,} positions")
    assert beyond_positions(AutoConfig.for_model("mamba"), seq_len=10**9) is None


def test_a_copy_of_a_model_whose_config_insists_on_padding_runs() -> None:
    model = AutoModelForCausalLM.from_config(shrink_config(AutoConfig.for_model("modernbert-decoder")))
    assert model(input_ids=torch.arange(2, 14)[None]).logits.isfinite().all()
