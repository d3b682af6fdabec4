"""Tables of positions end where plain transformers fails, and nowhere else."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from fsdp2kit.config.schema import ModelConfig
from fsdp2kit.errors import UserError
from fsdp2kit.model.build import build_model
from fsdp2kit.model.limits import check_attention, check_positions, check_rope

SMALL = {
    "gpt2": {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 24},
    "gpt_bigcode": {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 24},
    "gptj": {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 24, "rotary_dim": 4},
    "opt": {
        "hidden_size": 16,
        "word_embed_proj_dim": 16,
        "ffn_dim": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": 24,
    },
    "llama": {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
              "max_position_embeddings": 24},
    "mistral": {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
                "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 24},
}  # fmt: skip


@pytest.mark.parametrize("kind", SMALL)
def test_what_is_refused_is_what_transformers_cannot_run(kind: str) -> None:
    config = AutoConfig.for_model(kind, vocab_size=32, **SMALL[kind])
    plain = AutoModelForCausalLM.from_config(config).eval()
    ours = build_model(ModelConfig(config={"model_type": kind}, weights="random", attention="eager"), hf_config=config)
    for length in (24, 25):
        positions = torch.arange(length)[None]
        try:
            plain(input_ids=torch.zeros_like(positions), position_ids=positions, use_cache=False)
        except (IndexError, RuntimeError):
            with pytest.raises(UserError, match=r"data\.seq_len: 25 is beyond the 24 positions of .*; use at most 24"):
                check_positions(ours, seq_len=length)
        else:
            check_positions(ours, seq_len=length)
            assert length == 24 or kind in ("llama", "mistral")


def test_flex_attention_trains_on_cuda_alone() -> None:
    check_attention("flex_attention", device=torch.device("cuda"))
    check_attention("sdpa", device=torch.device("cpu"))
    with pytest.raises(UserError, match=r"model\.attention: .* no backward on a CPU"):
        check_attention("flex_attention", device=torch.device("cpu"))


@pytest.mark.parametrize(
    ("parameters", "limit"),
    [
        ({"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}, 64),
        (
            {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.0] * 8,
                "long_factor": [2.0] * 8,
                "original_max_position_embeddings": 32,
            },
            32,
        ),
    ],
)
def test_frequencies_that_follow_the_longest_sequence_are_refused_beyond_their_limit(
    parameters: dict, limit: int
) -> None:
    config = LlamaConfig(hidden_size=64, num_attention_heads=4, max_position_embeddings=64, rope_parameters=parameters)
    check_rope(config, seq_len=limit)
    with pytest.raises(UserError, match=f"beyond {limit}.*use at most {limit}"):
        check_rope(config, seq_len=limit + 1)


def test_other_frequencies_have_no_limit() -> None:
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
    for parameters in (None, yarn):
        check_rope(LlamaConfig(max_position_embeddings=64, rope_parameters=parameters), seq_len=4096)
