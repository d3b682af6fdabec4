"""This rank's slice of a micro-batch, on the device, with what attention needs to know of the whole sequences."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
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

from fsdp2kit.job.distributed import to_device
from fsdp2kit.job.mesh import Mesh
from fsdp2kit.model.inspect import value_of
from fsdp2kit.model.loss_head import IGNORE
from fsdp2kit.parallel.context_parallel.borders import Borders
from fsdp2kit.parallel.context_parallel.layout import VARLEN, AttentionPath, chunks_of, take_chunks
from fsdp2kit.parallel.context_parallel.segments import (
    SegmentTables,
    cut_documents,
    document_starts,
    plan_segments,
)

CHUNKED = "chunked_attention"
"""transformers' name of layers that see documents in chunks of ``attention_chunk_size`` tokens."""
RECURRENT_KINDS = {"linear_attention", "conv", "hybrid"}
"""Layers that carry a state along the sequence, "hybrid" beside attention."""
TOKENWISE_KINDS = {"moe", "mlp"}
"""Layers that treat every token alone."""


def build_slice_batch(config: PretrainedConfig, *, path: AttentionPath, mesh: Mesh) -> Callable[[Any], dict[str, Any]]:
    """A function from a micro-batch of the loader, ``[B, S]``, to this rank's arguments of ``model.loss_sum``.

    Args:
        config: the model's.
        path: ``plan.attention``.
    """
    return partial(slice_batch, config=config, path=path, cp_rank=mesh.cp_rank, cp=mesh.sizes.cp, device=mesh.device)


def slice_batch(
    batch: Any, *, config: PretrainedConfig, path: AttentionPath, cp_rank: int, cp: int, device: torch.device
) -> dict[str, Any]:
    """Take this context-parallel rank's slice, S/cp tokens of each row of a micro-batch, and move it to the device.

    Args:
        batch: the loader's `Batch`, ``[B, S]`` on the host.
        config: the model's config, which says what its layers see.
        path: the one that the model's attention was made for.

    Returns:
        The keyword arguments of the model's ``loss_sum``: ``input_ids``, ``labels`` and ``position_ids`` ``[B, s]``
        int64; ``index`` ``[N]``, flat indices of the labels that are targets; for a mix ``groups`` ``[N]``, each
        target's source, and ``num_groups``; each of the batch's ``per_target`` values, ``[N]``, by name; with
        ``documents`` among these (preferences), ``num_documents``; and what the attention kernel needs
        (`attention_inputs`).
    """
    chunks = chunks_of(cp_rank, cp=cp, length=batch.input_ids.shape[1], method=path.method)
    labels = take_chunks(batch.labels, chunks)
    # On the host: finding the targets on a CUDA device would synchronise it.
    index = (labels.flatten() != IGNORE).nonzero().squeeze(1)
    local = {
        "input_ids": take_chunks(batch.input_ids, chunks),
        "labels": labels,
        "position_ids": take_chunks(batch.position_ids, chunks),
        "index": index,
    }
    mix = {}
    if batch.sources is not None:
        local["groups"] = batch.sources[index // labels.shape[1]]
        mix["num_groups"] = len(batch.tokens_by_source)
    for name, values in batch.per_target.items():
        local[name] = take_chunks(values, chunks).flatten()[index]
    if "documents" in batch.per_target:
        mix["num_documents"] = batch.num_documents
    attention = attention_inputs(batch.position_ids, config, path=path, cp_rank=cp_rank, cp=cp, device=device)
    return {**{name: to_device(tensor, device) for name, tensor in local.items()}, **mix, **attention}


def attention_inputs(
    position_ids: Tensor, config: PretrainedConfig, *, path: AttentionPath, cp_rank: int, cp: int, device: torch.device
) -> dict[str, Any]:
    """What attention needs beside its tensors: ``attention_mask`` of the whole sequence, ``segments`` of this rank's
    slice, or the documents' borders; nothing where the model's own mask is right. Recurrent layers get ``borders``.

    Args:
        position_ids: ``[B, S]`` on the host, restarting at 0 in every document.
    """
    attention = _attention_inputs(position_ids, config, path=path, cp_rank=cp_rank, cp=cp, device=device)
    if not path.recurrent_layers:
        return attention
    starts = document_starts(position_ids)
    return {**attention, "borders": Borders(starts=starts, device=device, method=path.method, rank=cp_rank, cp=cp)}


def _attention_inputs(
    position_ids: Tensor, config: PretrainedConfig, *, path: AttentionPath, cp_rank: int, cp: int, device: torch.device
) -> dict[str, Any]:
    if path.kernel == VARLEN:
        # With Ulysses each rank attends to whole sequences, with some of the heads.
        method = None if path.method == "ulysses" else path.method
        starts = document_starts(position_ids)
        windows = layer_windows(config)
        plan = partial(plan_segments, method=method, rank=cp_rank, cp=cp)
        tables = {w: plan(starts, window=w) for w in {windows[kind] for kind in windows.keys() - {CHUNKED}}}
        if (chunk := windows.get(CHUNKED)) is None:
            return {"segments": SegmentTables(tables)}
        kinds = enumerate(layer_kinds(config.get_text_config()))
        layers = frozenset(number for number, kind in kinds if kind == CHUNKED)
        return {"segments": SegmentTables(tables, plan(cut_documents(starts, chunk), window=None), layers)}
    if path.kernel.startswith("flash"):
        return document_borders(position_ids, device=device)
    # Some models with recurrent layers make attention's mask without position ids (Granite 4).
    if path.method is None and not path.masks_every_row and not path.recurrent_layers:
        return {}
    mask = _full_masks(position_ids, config, path=path, device=device)
    return {} if mask is None else {"attention_mask": mask}


def document_borders(position_ids: Tensor, *, device: torch.device) -> dict[str, Any]:
    """Where documents begin in the flattened rows, as the keyword arguments that transformers' flash attention takes.

    Without them it looks for borders in the positions, but only in a batch of one row: documents of larger batches
    would silently see each other. Under context parallelism it would also see only a slice of the positions.

    Args:
        position_ids: ``[B, S]`` on the host, restarting at 0 in every document.
    """
    starts = (position_ids.flatten() == 0).nonzero().squeeze(1)
    borders = torch.cat([starts, starts.new_tensor([position_ids.numel()])])
    longest = int(borders.diff().max())
    on_device = to_device(borders.to(torch.int32), device)
    return {"cu_seq_lens_q": on_device, "cu_seq_lens_k": on_device, "max_length_q": longest, "max_length_k": longest}


def _full_masks(position_ids: Tensor, config: PretrainedConfig, *, path: AttentionPath, device: torch.device) -> Any:
    """The whole sequence's mask as transformers makes it; where layers differ in kind, a dict of masks by kind.

    None: plain causal attention, which the implementation computes without a mask.
    """
    config = config.get_text_config()
    stand_in = copy.copy(config)
    stand_in._attn_implementation = path.kernel  # the one that runs on the whole sequence
    # Given positions, transformers looks for documents on the device, and makes the host wait for the answer.
    documents = find_packed_sequence_indices(position_ids)
    if documents is None and path.masks_every_row:
        documents = torch.zeros_like(position_ids)
    arguments = {
        "config": stand_in,
        # Mask functions read only the shape, dtype and device of the embeddings.
        "inputs_embeds": torch.empty((*position_ids.shape, 1), device=device),
        "attention_mask": None,
        "past_key_values": None,
    }

    def make(kind: str) -> Any:
        # Not given positions, transformers would count chunks from the row's beginning.
        visible = _chunk_numbers(position_ids, config.attention_chunk_size) if kind == CHUNKED else documents
        of_kind = create_sliding_window_causal_mask if kind == "sliding_attention" else create_causal_mask
        if visible is None:
            return of_kind(**arguments)
        return of_kind(**arguments, and_mask_function=packed_sequence_mask_function(to_device(visible, device)))

    kinds = set(layer_kinds(config))
    masks = {kind: make(kind) for kind in sorted(kinds - RECURRENT_KINDS - TOKENWISE_KINDS)}
    if kinds & RECURRENT_KINDS:
        # "hybrid" layers look up the mask of full attention. A recurrent layer's mask would be that of padding.
        whole = make("full_attention") if "hybrid" in kinds else masks.get("full_attention")
        return {"full_attention": whole, **masks, "linear_attention": None, "conv": None}
    return masks if len(masks) > 1 else masks[next(iter(masks))]


def _chunk_numbers(position_ids: Tensor, chunk: int) -> Tensor:
    """``[B, S]``: the number of each token's chunk in its row, where every document begins a chunk."""
    return (position_ids % chunk == 0).cumsum(1)


def layer_kinds(config: PretrainedConfig) -> list[str]:
    """The attention kind of each layer, in transformers' words: ``full_attention``, ``sliding_attention``, …"""
    layer_types = value_of(config, "layer_types")
    if layer_types:
        return list(layer_types)
    # Models without layer types (Mistral) use their window in every layer where it is set.
    is_off = hasattr(config, "use_sliding_window") and not config.use_sliding_window
    windowed = value_of(config, "sliding_window") is not None and not is_off
    return ["sliding_attention" if windowed else "full_attention"] * config.num_hidden_layers


def unknown_kinds(config: PretrainedConfig, *, recurrent: bool = False) -> set[str]:
    """Kinds of layer that are not plain attention: they carry a state along the sequence.

    Args:
        recurrent: whether kinds with a state are known, as `find_recurrent` found their functions.
    """
    known = {"full_attention", "sliding_attention", CHUNKED} | TOKENWISE_KINDS
    return set(layer_kinds(config.get_text_config())) - known - (RECURRENT_KINDS if recurrent else set())


def layer_windows(config: PretrainedConfig) -> dict[str, int | None]:
    """How many tokens a layer of each kind sees at most, itself included; None: all before it."""
    config = config.get_text_config()
    limits = {"sliding_attention": "sliding_window", CHUNKED: "attention_chunk_size"}
    kinds = sorted(set(layer_kinds(config)))
    return {kind: value_of(config, limits[kind]) if kind in limits else None for kind in kinds}
