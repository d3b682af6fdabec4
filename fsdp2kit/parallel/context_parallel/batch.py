"""This rank's part of a micro-batch, on the device, with the full-length mask that context parallelism needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from fsdp2kit.parallel.mesh import Mesh


@dataclass(frozen=True)
class ShardedBatch:
    """What the model's ``loss_sum`` is called with on this rank: ``model.loss_sum(**batch.inputs())``."""

    input_ids: Tensor
    """``[B, s]`` int64."""
    labels: Tensor
    """``[B, s]`` int64, shifted before the sequence was cut."""
    position_ids: Tensor
    """``[B, s]`` int64, restarting at 0 in every document."""
    index: Tensor
    """``[N]`` int64: flat places of the labels that are targets."""
    attention_mask: Any = None
    """None (the model makes its own from ``position_ids``), or the whole sequence's mask, or one a layer type."""

    borders: dict[str, Any] = field(default_factory=dict)
    """Document borders of the whole sequences, for flash attention; see `document_borders`."""

    def inputs(self) -> dict[str, Any]:
        """Keyword arguments for ``loss_sum``."""
        named = {name: value for name, value in vars(self).items() if name != "borders" and value is not None}
        return {**named, **self.borders}


def build_shard_batch(
    config: PretrainedConfig, *, attention: str, mesh: Mesh, device: torch.device
) -> Callable[[Any], dict[str, Any]]:
    """A function from a micro-batch of the loader to the arguments of ``model.loss_sum`` on this rank."""

    def to_device(batch: Any) -> dict[str, Any]:
        return shard_batch(
            batch.input_ids,
            batch.labels,
            batch.position_ids,
            config=config,
            attention=attention,
            cp_rank=mesh.cp_rank,
            cp_size=mesh.sizes.cp,
            device=device,
        ).inputs()

    return to_device


def shard_batch(
    input_ids: Tensor,
    labels: Tensor,
    position_ids: Tensor,
    *,
    config: PretrainedConfig,
    attention: str,
    cp_rank: int,
    cp_size: int,
    device: torch.device,
) -> ShardedBatch:
    """Cut ``[B, S]`` host tensors to this context-parallel rank's contiguous S/cp tokens and move them over.

    Args:
        config: the model's config, which says which masks its layers want.
        attention: the implementation that runs on the whole sequence.
    """
    length = input_ids.shape[1] // cp_size
    part = slice(cp_rank * length, (cp_rank + 1) * length)
    local_labels = labels[:, part]
    # On the host: finding the targets on a CUDA device would synchronise it.
    index = (local_labels.flatten() != -100).nonzero().squeeze(1)
    mask, borders = None, {}
    if attention.startswith("flash"):
        borders = document_borders(position_ids, device=device)
    elif cp_size > 1:
        mask = full_masks(_move(position_ids, device), config=config, attention=attention)
    return ShardedBatch(
        input_ids=_move(input_ids[:, part], device),
        labels=_move(local_labels, device),
        position_ids=_move(position_ids[:, part], device),
        index=_move(index, device),
        attention_mask=mask,
        borders=borders,
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
    on_device = _move(borders.to(torch.int32), device)
    return {
        "cu_seq_lens_q": on_device,
        "cu_seq_lens_k": on_device,
        "max_length_q": longest,
        "max_length_k": longest,
    }


def full_masks(position_ids: Tensor, *, config: PretrainedConfig, attention: str) -> Any:
    """The whole sequence's mask as transformers makes it, for the kinds of layer that the model has.

    Args:
        position_ids: ``[B, S]``, restarting at 0 in every document.

    Returns:
        One mask (a tensor, a block mask, or None for plain causal attention) where all layers are alike, else a
        dict of them by layer type, as transformers' models take it.
    """
    config = config.get_text_config()
    stand_in = _StandInConfig(config, attention)
    # Mask functions read only the shape, dtype and device of the embeddings.
    embeddings = torch.empty((*position_ids.shape, 1), device=position_ids.device)
    arguments = {
        "config": stand_in,
        "inputs_embeds": embeddings,
        "attention_mask": None,
        "past_key_values": None,
        "position_ids": position_ids,
    }
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


class _StandInConfig:
    """The model's config, but naming the attention implementation that runs on the whole sequence."""

    def __init__(self, config: PretrainedConfig, attention: str) -> None:
        self._config = config
        self._attn_implementation = attention

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)


def _move(tensor: Tensor, device: torch.device) -> Tensor:
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.contiguous().pin_memory().to(device, non_blocking=True)
