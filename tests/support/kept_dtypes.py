"""Tiny models of the families in which transformers keeps some tensors in float32 under any dtype."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from fsdp2kit.model.inspect import shrink_config
from tests.support.models import IS_5_17

BEYOND_5_17 = pytest.mark.skipif(IS_5_17, reason="transformers 5.17 multiplies float32 by bfloat16 in DeepSeek-V4")

# Whole sizes of families that `shrink_config` does not know how to shrink, and what it needs first for another.
_SIZES: dict[str, dict[str, Any]] = {
    "deepseek_v4": {
        "vocab_size": 128,
        "hidden_size": 64,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
        "mlp_layer_types": ["hash_moe", "moe", "moe"],
        "num_attention_heads": 4,
        "head_dim": 16,
        "q_lora_rank": 16,
        "o_groups": 2,
        "o_lora_rank": 16,
        "index_n_heads": 2,
        "index_head_dim": 16,
        "index_topk": 4,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 128,
    },
    "dots1": {"n_shared_experts": 1, "n_routed_experts": 4, "num_experts_per_tok": 2},
    "rwkv": {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2},
    "zamba": {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 6,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "use_mamba_kernels": False,
    },
}


def kept_model(kind: str) -> PreTrainedModel:
    """A small model in float32 whose values bfloat16 cannot hold."""
    config = AutoConfig.for_model(kind, **_SIZES.get(kind, {}))
    if "hidden_size" not in _SIZES.get(kind, {}):
        config = shrink_config(config)
        if kinds := getattr(config, "mlp_layer_types", None):
            config.mlp_layer_types = [*dict.fromkeys(kinds), *kinds][: config.num_hidden_layers]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.normal_(std=0.3).add_(0.01)
        for name, tensor in model.state_dict().items():
            if name.endswith(".balancing_biases"):
                tensor[-1] = -1.0  # to which transformers sets it, whatever it loads
    return model
