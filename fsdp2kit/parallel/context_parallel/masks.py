"""What the layers of a model see of the whole sequences, in the forms that transformers' implementations take."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig
from transformers.masking_utils import (
    create_causal_mask,
    create_sliding_window_causal_mask,
    find_packed_sequence_indices,
    packed_sequence_mask_function,
)


def document_borders(position_ids: Tensor, *, device: torch.device) -> dict[str, Any]:
    """Where documents begin in the flattened rows, as the keyword arguments that transformers' flash attention takes.

    It would otherwise look for borders in the positions, but only for a batch of one row, and let the documents of
    larger batches see each other without a word; and under context parallelism it would see a part of the positions.

    Args:
        position_ids: ``[B, S]`` on the host, restarting at 0 in every document.
    """
    starts = (position_ids.flatten() == 0).nonzero().squeeze(1)
    borders = torch.cat([starts, starts.new_tensor([position_ids.numel()])])
    longest = int(borders.diff().max())
    on_device = to_device(borders.to(torch.int32), device)
    return {
        "cu_seq_lens_q": on_device,
        "cu_seq_lens_k": on_device,
        "max_length_q": longest,
        "max_length_k": longest,
    }


def full_masks(
    position_ids: Tensor,
    *,
    config: PretrainedConfig,
    attention: str,
    device: torch.device,
    every_row: bool = False,
) -> Any:
    """The whole sequence's mask as transformers makes it, for the kinds of layer that the model has.

    Args:
        position_ids: ``[B, S]`` on the host, restarting at 0 in every document.
        device: that the mask is made on.
        every_row: also where all rows are single documents; else transformers leaves out what an implementation
            does by itself.

    Returns:
        One mask (a tensor, a block mask, or None for plain causal attention) where all layers are alike, else a
        dict of them by layer type, as transformers' models take it.
    """
    config = config.get_text_config()
    stand_in = _StandInConfig(config, attention)
    # Given positions, transformers looks for documents on the device, and makes the host wait for the answer.
    documents = find_packed_sequence_indices(position_ids)
    if documents is None and every_row:
        documents = torch.zeros_like(position_ids)
    arguments = {
        "config": stand_in,
        # Mask functions read only the shape, dtype and device of the embeddings.
        "inputs_embeds": torch.empty((*position_ids.shape, 1), device=device),
        "attention_mask": None,
        "past_key_values": None,
    }
    if documents is not None:
        arguments["and_mask_function"] = packed_sequence_mask_function(to_device(documents, device))
    makers = {"full_attention": create_causal_mask, "sliding_attention": create_sliding_window_causal_mask}
    kinds = sorted(set(layer_kinds(config)))
    masks = {kind: makers[kind](**arguments) for kind in kinds}
    return masks if len(masks) > 1 else masks[kinds[0]]


def layer_kinds(config: PretrainedConfig) -> list[str]:
    """The attention kind of each layer, in transformers' words: ``full_attention``, ``sliding_attention``, …"""
    layer_types = getattr(config, "layer_types", None)
    if layer_types:
        return list(layer_types)
    # Models without layer types (Mistral) use their window in every layer where it is set.
    windowed = getattr(config, "sliding_window", None) is not None and getattr(config, "use_sliding_window", True)
    return ["sliding_attention" if windowed else "full_attention"] * config.num_hidden_layers


def unknown_kinds(config: PretrainedConfig) -> set[str]:
    """Kinds of layer that are not plain attention: they carry state along the sequence, or see it in chunks."""
    return set(layer_kinds(config.get_text_config())) - {"full_attention", "sliding_attention"}


def layer_windows(config: PretrainedConfig) -> dict[str, int | None]:
    """How many tokens a layer of each kind sees, itself included; None: all before it."""
    config = config.get_text_config()
    window = getattr(config, "sliding_window", None)
    return {kind: window if kind == "sliding_attention" else None for kind in sorted(set(layer_kinds(config)))}


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on the device; to CUDA from pinned memory, so that nobody waits for it."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.contiguous().pin_memory().to(device, non_blocking=True)


class _StandInConfig:
    """The model's config, but naming the attention implementation that runs on the whole sequence."""

    def __init__(self, config: PretrainedConfig, attention: str) -> None:
        self._config = config
        self._attn_implementation = attention

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)
