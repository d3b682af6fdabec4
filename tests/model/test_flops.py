"""Model FLOPs against counts done by hand, and the table of device peaks."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from fsdp2kit.model.flops import count_model_flops, device_peak_flops, flops_per_batch, peak_flops_of
from fsdp2kit.planner.devices import find_device
from fsdp2kit.weights import experts
from tests.planner.helpers.models import QWEN3_30B, config_of, planned, small
from tests.support.models import tiny_model

# 2 layers, hidden 32, 4 heads of 8, 2 key-value heads of 8, MLP 48, vocabulary 64.
TINY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
ATTENTION = 32 * 32 + 2 * 32 * 16 + 32 * 32  # q, k and v, o
MLP = 3 * 32 * 48
HEAD = 32 * 64
TOKENS, PAIRS = 10, 4**2 + 6**2  # two documents


def model_on_meta(model_type: str, **overrides: object) -> PreTrainedModel:
    config = AutoConfig.for_model(model_type, **{**TINY, **overrides})
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def estimate_flops(model: PreTrainedModel, *, tokens: int, attention_pairs: int) -> float:
    return flops_per_batch(count_model_flops(model), tokens=tokens, attention_pairs=attention_pairs)


@pytest.mark.parametrize(
    ("overrides", "attention", "channels"),
    [
        ({"tie_word_embeddings": False}, ATTENTION, 8 + 8),
        ({"tie_word_embeddings": True}, ATTENTION, 8 + 8),
        ({"head_dim": 16}, 32 * 64 + 2 * 32 * 32 + 64 * 32, 16 + 16),
    ],
)
def test_llama_counts_the_head_once_and_no_lookup(overrides: dict[str, Any], attention: int, channels: int) -> None:
    model = model_on_meta("llama", **overrides)
    pairs = 3 * 2 * channels * 4 * (PAIRS / 2) * 2  # QKᵀ and AV over half of the pairs, 4 heads, 2 layers
    expected = 6 * (2 * (attention + MLP) + HEAD) * TOKENS + pairs
    assert estimate_flops(model, tokens=TOKENS, attention_pairs=PAIRS) == expected


GEMMA4 = {
    "head_dim": 8,  # of windows; full attention has wider heads
    "layer_types": ["sliding_attention", "full_attention"],
    "vocab_size_per_layer_input": 64,
    "hidden_size_per_layer_input": 4,
}


# Not equal: some versions of transformers compute the angles of RoPE with a matmul (1e-4 of the whole for Llama).
@pytest.mark.parametrize(
    ("model_type", "overrides", "tolerance"), [("llama", {}, 1e-3), ("gemma4_text", GEMMA4, 1e-2)]
)
def test_torchs_own_counter_sees_the_same_matmuls(
    model_type: str, overrides: dict[str, Any], tolerance: float
) -> None:
    config = AutoConfig.for_model(model_type, **TINY, **overrides, attn_implementation="eager")
    model = AutoModelForCausalLM.from_config(config)
    with FlopCounterMode(display=False) as counter:
        model(torch.arange(TOKENS)[None], use_cache=False).logits.sum().backward()
    widths = [layer.self_attn.q_proj.weight.shape[0] // 4 for layer in model.model.layers]
    assert (widths[0] < widths[1]) is (model_type == "gemma4_text")
    assert count_model_flops(model).attention_per_pair == sum(2 * 2 * width * 4 for width in widths)
    ours = estimate_flops(model, tokens=TOKENS, attention_pairs=2 * TOKENS**2)  # eager attention skips no pair
    assert ours == pytest.approx(counter.get_total_flops(), rel=tolerance)


def test_latent_attention_has_two_widths() -> None:
    model = model_on_meta(
        "deepseek_v3",
        num_key_value_heads=4,
        q_lora_rank=None,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=6,
        first_k_dense_replace=2,
    )
    assert count_model_flops(model).attention_per_pair == 2 * (12 + 6) * 4 * 2


SPARSE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
ROUTED = 32 * 8 + 2 * (3 * 32 * 16)  # the router, and two experts


@pytest.mark.parametrize(
    ("model_type", "overrides", "parameters"),
    [
        ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}, 2 * (ATTENTION + 32 * 4 + 2 * MLP)),
        # its experts are not in a module of that name
        ("granitemoe", {"num_local_experts": 4, "num_experts_per_tok": 2}, 2 * (ATTENTION + 32 * 4 + 2 * MLP)),
        # sparse and dense layers mixed
        ("qwen3_moe", {**SPARSE, "head_dim": 8, "mlp_only_layers": [1]}, 2 * ATTENTION + ROUTED + MLP),
        # a shared expert, which counts in full, and its gate
        (
            "qwen2_moe",
            {**SPARSE, "shared_expert_intermediate_size": 24},
            2 * (ATTENTION + ROUTED + 3 * 32 * 24 + 32),
        ),
    ],
)
def test_experts_count_by_the_share_a_token_visits(
    model_type: str, overrides: dict[str, Any], parameters: int
) -> None:
    assert count_model_flops(model_on_meta(model_type, **overrides)).parameters == parameters + HEAD


@pytest.mark.full
def test_partitioning_experts_changes_no_flops() -> None:
    """The counts that MFU takes are the plan's, of the whole model."""
    found = [planned(config_of(small(QWEN3_30B), mesh={"ep": ep}), device=find_device("h100")) for ep in (1, 4)]
    mfus = [one.speed.low.mfu * one.speed.low.overlapped for one in found if one.speed is not None]
    assert len(mfus) == 2
    assert mfus[0] == pytest.approx(mfus[1], rel=1e-9)


def test_an_unknown_share_is_not_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    mixtral = model_on_meta("mixtral", num_local_experts=4)
    monkeypatch.setattr(experts, "_EXPERTS_PER_TOKEN", ("a_name_of_its_own",))
    assert math.isnan(estimate_flops(mixtral, tokens=TOKENS, attention_pairs=PAIRS))


@pytest.mark.parametrize(
    ("kind", "a_token"),
    [
        ("qwen3_5", 6 * 6 * 8 * 12),  # a state of 8 × 12 for each of 6 heads
        ("bamba", 4 * 6 * 24 * 8),
        ("nemotron_h", 4 * 6 * 24 * 8),
        ("falcon_h1", 2 * 4 * 6 * 24 * 8),  # in both layers
        ("lfm2", 0),
        ("llama3", 0),
    ],
)
def test_states_of_linear_attention(kind: str, a_token: int) -> None:
    model = tiny_model(kind)
    assert count_model_flops(model).states_per_token == a_token
    counts = replace(count_model_flops(model), states_per_token=0.0)
    without = flops_per_batch(counts, tokens=TOKENS, attention_pairs=PAIRS)
    assert estimate_flops(model, tokens=TOKENS, attention_pairs=PAIRS) == without + 3 * a_token * TOKENS


def test_layers_without_attention() -> None:
    model = model_on_meta("llama")
    model.config.layer_types = ["linear_attention", "sliding_attention"]
    assert count_model_flops(model).attention_per_pair == 2 * (8 + 8) * 4


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H200", 989.4),
        ("NVIDIA GH200 480GB", 989.4),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA L4", 121),
        ("NVIDIA L40S", 362),
        ("NVIDIA B200", 2250),
        ("NVIDIA GB200", 2500),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA RTX 6000 Ada Generation", 364.2),
        ("AMD Instinct MI300X", 1307.4),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA T4", None),
    ],
)
def test_device_peaks(name: str, teraflops: float | None) -> None:
    assert peak_flops_of(name) == (None if teraflops is None else teraflops * 1e12)
    assert device_peak_flops(torch.device("cpu")) is None
