"""Whether an engine's model holds what it was sent: checksums that both sides compute.

vLLM's reload spoils some architectures (vllm#42821, vllm#48284), and no route says so. Each update compares the first
layer, a quarter of the others (another one each time), and all tensors outside of layers. A tensor that the engine
keeps in another form (packed, quantised, cut over workers) is not compared.

This module runs in the server's environment too, and imports nothing else of this package.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

Sum = list[Any]
"""``[dtype, shape, number, number]``, in JSON."""

_EVERY = 4
"""An update compares one of so many layers."""
_WIDTH = 64
_ODD = 0x9E3779B97F4A7C15 - 2**64


def is_chosen(name: str, version: int) -> bool:
    """Whether the update to a version compares a tensor."""
    layer = re.search(r"\.(\d+)\.", name)
    return layer is None or int(layer[1]) == 0 or (int(layer[1]) - version) % _EVERY == 0


def checksum(tensor: Tensor) -> Sum:
    """A checksum of a tensor's bits; it changes where two rows or columns change places.

    Integers of 64 bits are summed over the columns and over the rows of a matrix that the bytes are laid out in; the
    sums are weighted by place. It passes twice over memory, on the tensor's device.
    """
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    whole = data[: len(data) // (8 * _WIDTH) * 8 * _WIDTH]
    if whole.storage_offset() % 8:
        whole = whole.clone()
    rows = whole.view(torch.int64).view(-1, _WIDTH)
    rest = data[len(whole) :].to(torch.int64)
    columns = torch.cat([rows.sum(0), rest])
    numbers = [int(_weighted(columns)), int(_weighted(rows.sum(1)))]
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), *numbers]


def _weighted(sums: Tensor) -> Tensor:
    """The sum of 64-bit integers, each times an odd number that is its place's; it wraps around."""
    places = 2 * torch.arange(len(sums), device=sums.device) + 1
    return (sums * (places * _ODD)).sum()


def differing(model: Any, sums: Mapping[str, Sum]) -> tuple[list[str], int]:
    """The tensors that vLLM's model does not hold as they were sent, and how many were compared.

    Args:
        model: vLLM's.
        sums: by name in a Hugging Face file.
    """
    wrong = []
    compared = 0
    for name, held in _held(model, sums):
        compared += 1
        if checksum(held) != sums[name]:
            wrong.append(name)
    return wrong, compared


def _held(model: Any, sums: Mapping[str, Sum]) -> Iterator[tuple[str, Tensor]]:
    """What the model holds for each of the sums, where that has the form in which it was sent."""
    tensors = dict(_unchanged(model))
    for name, (dtype, shape, *_) in sums.items():
        for place, before, others in _places(model, name):
            tensor = tensors.get(place)
            known = [sums[other][1][0] for other in others if other in sums]
            if tensor is None or str(tensor.dtype) != f"torch.{dtype}" or len(known) != len(others):
                continue
            first = sum(sums[other][1][0] for other in before)
            # The rows of a vocabulary may be padded; those of a fused tensor must be all there, or it is cut.
            is_whole = sum(known) == len(tensor) if others else list(tensor.shape) == shape
            is_whole = is_whole or (_is_vocabulary(model, place) and len(tensor) >= shape[0])
            if is_whole and list(tensor.shape[1:]) == shape[1:]:
                yield name, tensor[first : first + shape[0]] if tensor.ndim else tensor
                break


def _places(model: Any, name: str) -> Iterator[tuple[str, list[str], list[str]]]:
    """Names under which a model may hold a tensor: the name, tensors that lie before it there, and all that do."""
    yield name, [], []
    for fused, parts in (getattr(model, "packed_modules_mapping", None) or {}).items():
        for at, part in enumerate(parts):
            head, found, tail = name.rpartition(f".{part}.")
            if found:
                names = [f"{head}.{other}.{tail}" for other in parts]
                yield f"{head}.{fused}.{tail}", names[:at], names


def _unchanged(model: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors of those modules that vLLM computes with as they were loaded."""
    turns = hasattr(model, "permute_qk_weight_for_rotary")  # as it loads Llama 4's queries and keys
    for path, module in model.named_modules(remove_duplicate=False):
        method = getattr(module, "quant_method", None)
        if method is not None and not type(method).__name__.startswith("Unquantized"):
            continue
        own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        for leaf, tensor in own:
            is_packed = tensor.device.type == "cpu" and tensor.ndim > 2  # convolutions, in place
            if not is_packed and not (turns and path.endswith(("qkv_proj", "q_proj", "k_proj"))):
                yield f"{path}.{leaf}" if path else leaf, tensor


def _is_vocabulary(model: Any, name: str) -> bool:
    """Whether a tensor is a whole embedding or head, whose rows vLLM may pad."""
    module = model.get_submodule(name.rpartition(".")[0])
    return hasattr(module, "org_vocab_size") and getattr(module, "tp_size", 1) == 1
