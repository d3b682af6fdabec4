"""A sink: a model's shards. The part of a tensor that this rank holds is filled, and nothing is gathered or sent.

At most one tensor's rows live beside the shards. An embedding with new tokens is read whole, in blocks, for the mean
of its rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from fsdp2kit.job.distributed import local_part
from fsdp2kit.torch_compat import local_slices
from fsdp2kit.weights.modules import base_tensors, packed_weights
from fsdp2kit.weights.record import weights_of
from fsdp2kit.weights.transfer import Reader

_BLOCK = 1 << 22  # elements


def fill_shards(
    model: PreTrainedModel, forms: Iterable[str], reader: Reader, *, advance: Callable[[int], object]
) -> None:
    """Fill a model's tensors ``forms``, by their names without adapters; a module that is trained whole, twice.

    Args:
        reader: of whole tensors, of any floating-point dtype; with new tokens, of the stored rows.
        advance: called with the bytes of each shard that was filled.
    """
    tensors = base_tensors(model)  # they share storage with the parameters and buffers
    packed = packed_weights(model)
    stored, new = grown_tensors(model)
    for name in forms:
        value = reader.read(name)
        for target in () if name in packed else tensors[name]:
            if name in stored:
                fill_vocabulary(target, row_blocks(value, stored[name]), new_tokens=new)
            else:
                copy_part(target, value)
        if name in packed:
            packed[name](value)
        del value  # before the next one is read
        advance(local_part(tensors[name][0]).nbytes)


def copy_parts(targets: Mapping[str, Tensor], forms: Iterable[str], reader: Reader) -> None:
    """Fill the tensors ``forms`` of ``targets``."""
    for name in forms:
        copy_part(targets[name], reader.read(name))


@torch.no_grad()
def copy_part(target: Tensor, source: Any) -> None:
    """Copy into ``target`` the part of ``source`` (whole, sliceable) that this rank holds, converting its dtype."""
    local = local_part(target)
    if local.numel():
        part = local_slices(target)
        stored = source[part] if part else source[...]
        # `copy_` converts on the device: 16 bits that become float32 are half the bytes to send.
        local.copy_(stored.to(local.device))


def grown_tensors(model: PreTrainedModel) -> tuple[dict[str, torch.Size], tuple[int, ...]]:
    """Stored shapes of the embedding's and the head's tensors by name, and new tokens' ids; both empty without any."""
    source = weights_of(model).source
    if source is None or not source.new_tokens:
        return {}, ()
    tensors = vocabulary_tensors(model)
    shapes = {name: torch.Size((source.stored_vocab, *tensor.shape[1:])) for name, tensor in tensors.items()}
    return shapes, source.new_tokens


def vocabulary_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """The tensors of the embedding and the head by each of their names in the model without adapters."""
    ends = [id(module) for module in (model.get_input_embeddings(), model.get_output_embeddings())]
    return {
        f"{name}.{key}": tensor
        for name, module in model.named_modules(remove_duplicate=False)
        if id(module) in ends
        # Beside adapters a module may be wrapped, with a copy of it that is trained.
        for key, tensor in getattr(module, "original_module", module).named_parameters(recurse=False)
    }


@torch.no_grad()
def fill_vocabulary(target: Tensor, blocks: Iterable[Tensor], *, new_tokens: Sequence[int]) -> None:
    """Fill this rank's rows of an embedding or a head: stored ones as they are, new tokens' with the others' mean.

    A new token may have a stored row: vocabularies are padded. Every rank reads all blocks, one at a time.

    Args:
        target: ``[vocabulary, …]``.
        blocks: the stored tensor's rows, in order, some at a time.
        new_tokens: their ids; every row of the target that is not stored is one of them.
    """
    local = local_part(target)
    (rows, *others) = local_slices(target)
    total = torch.zeros(target.shape[1:], dtype=torch.float64)
    count = 0
    start = 0
    for block in blocks:
        stop = start + len(block)
        first = max(start, rows.start)
        last = min(stop, rows.stop)
        if first < last:
            local[first - rows.start : last - rows.start].copy_(block[(slice(first - start, last - start), *others)])
        excluded = [token - start for token in new_tokens if start <= token < stop]
        total += block.sum(0, dtype=torch.float64) - block[excluded].sum(0, dtype=torch.float64)
        count = count + len(block) - len(excluded)
        start = stop
    for token in new_tokens:
        if rows.start <= token < rows.stop:
            local[token - rows.start].copy_((total / count)[tuple(others)])


def row_blocks(source: Any, shape: torch.Size) -> Iterator[Tensor]:
    """The rows of something sliceable, at most 4 Mi elements at a time."""
    size = max(1, _BLOCK // max(1, math.prod(shape[1:])))
    return (source[start : start + size] for start in range(0, shape[0], size))
