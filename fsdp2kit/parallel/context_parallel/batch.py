"""This rank's part of a micro-batch, on the device, with what its attention needs to know of the whole of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from fsdp2kit.parallel.context_parallel.layout import chunks_of, take_chunks
from fsdp2kit.parallel.context_parallel.masks import document_borders, full_masks, layer_windows, to_device
from fsdp2kit.parallel.context_parallel.path import VARLEN, AttentionPath
from fsdp2kit.parallel.context_parallel.segments import SegmentTables, document_starts, plan_segments
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
    groups: Tensor | None = None
    """``[N]`` int64: of a mix, the source of each of these targets."""
    num_groups: int = 0
    """Sources of the mix."""
    attention: dict[str, Any] = field(default_factory=dict)
    """What the attention kernel wants: ``attention_mask`` of the whole sequence, ``segments`` of this rank's part of
    it, or document borders; nothing where the model's own mask is right."""

    def inputs(self) -> dict[str, Any]:
        """Keyword arguments for ``loss_sum``."""
        mix = ("groups", "num_groups") if self.groups is None else ()
        named = {name: value for name, value in vars(self).items() if name not in ("attention", *mix)}
        return {**named, **self.attention}


def build_shard_batch(
    config: PretrainedConfig, *, path: AttentionPath, mesh: Mesh, device: torch.device
) -> Callable[[Any], dict[str, Any]]:
    """A function from a micro-batch of the loader to the arguments of ``model.loss_sum`` on this rank."""

    def shard(batch: Any) -> dict[str, Any]:
        return shard_batch(
            batch.input_ids,
            batch.labels,
            batch.position_ids,
            config=config,
            path=path,
            cp_rank=mesh.cp_rank,
            cp_size=mesh.sizes.cp,
            device=device,
            sources=batch.sources,
            num_sources=len(batch.tokens_by_source),
        ).inputs()

    return shard


def shard_batch(
    input_ids: Tensor,
    labels: Tensor,
    position_ids: Tensor,
    *,
    config: PretrainedConfig,
    path: AttentionPath,
    cp_rank: int,
    cp_size: int,
    device: torch.device,
    sources: Tensor | None = None,
    num_sources: int = 0,
) -> ShardedBatch:
    """Cut ``[B, S]`` host tensors to this context-parallel rank's S/cp tokens and move them over.

    Args:
        config: the model's config, which says what its layers see.
        path: the way that the model's attention goes.
        sources: int64 ``[B]``, the source of each row of a mix of ``num_sources``.
    """
    length = input_ids.shape[1]
    chunks = chunks_of(cp_rank, cp=cp_size, length=length, method=path.method) if path.method else [range(length)]
    local_labels = take_chunks(labels, chunks)
    # On the host: finding the targets on a CUDA device would synchronise it.
    index = (local_labels.flatten() != -100).nonzero().squeeze(1)
    attention: dict[str, Any] = {}
    if path.kernel == VARLEN:
        attention["segments"] = _segments(position_ids, config, path=path, cp_rank=cp_rank, cp_size=cp_size)
    elif path.kernel.startswith("flash"):
        attention = document_borders(position_ids, device=device)
    elif path.method or path.masks_every_row:
        mask = full_masks(
            position_ids, config=config, attention=path.kernel, device=device, every_row=path.masks_every_row
        )
        attention = {"attention_mask": mask} if mask is not None else {}
    return ShardedBatch(
        input_ids=to_device(take_chunks(input_ids, chunks), device),
        labels=to_device(local_labels, device),
        position_ids=to_device(take_chunks(position_ids, chunks), device),
        index=to_device(index, device),
        groups=None if sources is None else to_device(sources[index // local_labels.shape[1]], device),
        num_groups=num_sources,
        attention=attention,
    )


def _segments(
    position_ids: Tensor, config: PretrainedConfig, *, path: AttentionPath, cp_rank: int, cp_size: int
) -> SegmentTables:
    starts = document_starts(position_ids)
    # Ulysses' ranks attend to whole sequences, each with some of the heads.
    method = None if path.method == "ulysses" else path.method
    return SegmentTables(
        {
            window: plan_segments(starts, method=method, rank=cp_rank, cp=cp_size, window=window)
            for window in set(layer_windows(config).values())
        }
    )
