"""Packed documents: their positions, and the mask that transformers makes of them."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.masking_utils import (
    create_causal_mask,
    create_chunked_causal_mask,
    create_sliding_window_causal_mask,
)


def positions_of(lengths: list[int]) -> Tensor:
    """``[S]`` of documents of those lengths."""
    return torch.cat([torch.arange(length) for length in lengths])


def transformers_mask(position_ids: Tensor, window: int | None, *, chunk: int | None = None) -> Tensor:
    """``[B, S, S]`` bool: which query sees which key."""
    config = LlamaConfig(hidden_size=8, num_attention_heads=1)
    config._attn_implementation = "sdpa"
    config.sliding_window, config.attention_chunk_size = window, chunk
    make = create_causal_mask if window is None else create_sliding_window_causal_mask
    make = make if chunk is None else create_chunked_causal_mask
    mask = make(
        config=config,
        inputs_embeds=torch.empty(*position_ids.shape, 1),
        attention_mask=None,
        past_key_values=None,
        position_ids=position_ids,
        or_mask_function=lambda batch, head, q, k: torch.zeros_like(q, dtype=torch.bool),  # so that it is not left out
    )
    return mask[:, 0]
