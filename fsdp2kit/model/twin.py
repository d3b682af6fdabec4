"""A tiny twin: the same architecture with a few small layers, real on the CPU, to try things on."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

# Sizes that make a twin small. What is not named here (head counts' ratios, norms, scalings, caps) is kept.
_SMALL = {
    "vocab_size": 128,
    "intermediate_size": 32,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "max_position_embeddings": 128,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 8,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
}
_TOKEN_IDS = ("pad_token_id", "bos_token_id", "eos_token_id")


def shrink_config(
    config: PretrainedConfig, *, layers: int = 2, head_dim: int = 16, narrow: bool = True, keep_heads: bool = False
) -> PretrainedConfig:
    """A copy of ``config`` with few, narrow layers; heads keep their number of groups where they can.

    Args:
        config: a decoder's config.
        layers: at most this many layers.
        head_dim: width of one attention head.
        narrow: shrink the width as well; otherwise heads and hidden size stay.
        keep_heads: as many heads as before, each narrower.
    """
    small = copy.deepcopy(config)
    for part in {id(part): part for part in (small, small.get_text_config())}.values():
        _shrink(part, layers=layers, head_dim=head_dim, narrow=narrow, keep_heads=keep_heads)
    return small


def _shrink(config: PretrainedConfig, *, layers: int, head_dim: int, narrow: bool, keep_heads: bool) -> None:
    for key, value in _SMALL.items():
        if isinstance(getattr(config, key, None), int) and getattr(config, key) > value:
            setattr(config, key, value)
    for key in _TOKEN_IDS:
        if getattr(config, key, None) is not None:
            setattr(config, key, None)
    depth = min(layers, config.num_hidden_layers)
    layer_types = getattr(config, "layer_types", None)
    config.num_hidden_layers = depth
    if layer_types:
        # Every kind of layer must be there: alternating local and global layers need one of each.
        kinds = list(dict.fromkeys(layer_types))
        config.num_hidden_layers = depth = max(depth, len(kinds))
        config.layer_types = (kinds + layer_types)[:depth]
    heads = getattr(config, "num_attention_heads", None)
    if isinstance(heads, int) and narrow:
        given_kv_heads = getattr(config, "num_key_value_heads", None) or heads
        groups = max(1, heads // given_kv_heads)
        kv_heads = given_kv_heads if keep_heads else 1 if groups > 1 else 2
        config.num_attention_heads = groups * kv_heads
        if getattr(config, "num_key_value_heads", None) is not None:
            config.num_key_value_heads = kv_heads
        if hasattr(config, "qk_rope_head_dim"):  # latent attention: what is rotated has a width of its own
            config.head_dim = config.qk_rope_head_dim
            config.qk_head_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
        elif getattr(config, "head_dim", None) is not None:
            config.head_dim = head_dim
        config.hidden_size = config.num_attention_heads * head_dim


def build_twin(model: PreTrainedModel) -> PreTrainedModel | None:
    """A small twin of ``model`` on the CPU in eval mode, or None where its architecture does not shrink.

    Few layers of small width; where the widths depend on one another in ways of the architecture's own, few layers
    of the model's width.
    """
    return _try_twin(shrink_config, model) or _try_twin(_shallow_config, model)


@torch.no_grad()
def _spread(twin: torch.nn.Module) -> None:
    """Weights under which every token matters to every score: at the usual 0.02, attention is all but uniform, and
    what leaks between documents drowns in rounding."""
    generator = torch.Generator().manual_seed(0)
    for parameter in twin.parameters():
        if parameter.dim() > 1:
            parameter.normal_(std=parameter.shape[-1] ** -0.5, generator=generator)


def _shallow_config(config: PretrainedConfig) -> PretrainedConfig:
    return shrink_config(config, narrow=False)


def _try_twin(shrink: Callable[[PretrainedConfig], PretrainedConfig], model: PreTrainedModel) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with torch.device("cpu"), torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                twin = AutoModelForCausalLM.from_config(
                    shrink(model.config), dtype=torch.float32, attn_implementation="eager"
                )
                _spread(twin)
                twin.eval()
                twin(input_ids=torch.zeros((1, 4), dtype=torch.int64), use_cache=False)
        except Exception:  # whatever an unforeseen architecture raises, the answer is: no twin
            return None
    return twin
