"""A sharded model's values, streamed out of safetensors.

Every rank reads only the rows of its shards, through the files' memory maps, straight into the shards: nothing is
gathered or sent (`shards`). `conversion` says which stored tensors make a tensor of the model.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import PreTrainedModel

from fsdp2kit.console import progress_bar
from fsdp2kit.errors import UserError
from fsdp2kit.job.distributed import local_part
from fsdp2kit.weights.adapter_values import fill_adapter
from fsdp2kit.weights.conversion import TensorSource, find_sources
from fsdp2kit.weights.modules import base_tensors, build_skeleton, packed_weights
from fsdp2kit.weights.record import find_ties, source_of, weights_of
from fsdp2kit.weights.shards import copy_part, fill_vocabulary, grown_tensors, row_blocks, vocabulary_tensors
from fsdp2kit.weights.stored import open_safetensors, safetensors_files, some


def load_pretrained(
    model: PreTrainedModel, directory: str | Path | None = None, *, allow_unexpected: bool = False, seed: int = 0
) -> None:
    """Fill a materialised (sharded) model from the safetensors of a Hugging Face directory, in place.

    Adapters on it get the values of ``model.adapter``, or peft's first ones. Collective where there are adapters.

    Args:
        model: parameters and persistent buffers are DTensors or plain tensors of any floating-point dtype.
        directory: holds ``model.safetensors``, or several files with their index. Default: that of the ``model.path``
            from which `build_model` made it.
        allow_unexpected: accept tensors in the files that the model has no use for (a cut depth, say).
        seed: of the adapters' first values.

    Raises:
        UserError: no, missing, truncated or corrupt files; missing or unexpected tensors; wrong shapes.
    """
    if directory is None and (directory := source_of(model).directory) is None:
        raise UserError("load_pretrained", "the model comes from a config alone", "give a directory, or initialize it")
    directory = Path(directory)
    targets = base_tensors(model)  # they share storage with the parameters and buffers
    quantized = packed_weights(model)
    skeleton = build_skeleton(model)  # conversions look names up in it
    shapes = {name: tensor.shape for name, tensor in skeleton.state_dict().items()}
    grown, new = grown_tensors(model)
    size = sum(local_part(targets[name][0]).nbytes for name in targets.keys() - find_ties(model).keys())
    paths = safetensors_files(directory)
    with open_safetensors(paths) as slices, progress_bar("reading weights", total=size) as bar:
        for source in _checked_sources(model, directory, slices, allow_unexpected=allow_unexpected):
            for name, value in source.tensors(skeleton, slices):
                where = f"{directory}: {source.name}"
                stored = grown.get(name)
                _check_shape(value, shapes[name] if stored is None else stored, where=where)
                try:
                    for target in targets[name]:
                        if name in quantized:
                            quantized[name](value)
                        elif stored is None:
                            copy_part(target, value)
                        else:
                            fill_vocabulary(target, row_blocks(value, stored), new_tokens=new)
                except SafetensorError as error:
                    raise UserError(where, f"cannot be read ({error})", "fetch the file again") from None
                bar.advance(local_part(targets[name][0]).nbytes)
    fill_adapter(model, seed=seed)


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of the model that is stored in a Hugging Face directory, not yet read."""

    shape: torch.Size
    dtype: torch.dtype
    read: Callable[[], Tensor]


@contextlib.contextmanager
def open_pretrained(
    model: PreTrainedModel, directory: str | Path, *, allow_unexpected: bool = False, grow: bool = False
) -> Iterator[dict[str, StoredTensor]]:
    """Every tensor of the model by name, a tied one once, in the files' dtypes; readable while the context is open.

    Args:
        model: may be on meta.
        allow_unexpected: as for `load_pretrained`.
        grow: the model's embedding and head may have more rows than the files; these are the mean of the others.
    """
    directory = Path(directory)
    ends = vocabulary_tensors(model)
    with open_safetensors(safetensors_files(directory)) as slices:
        shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
        found = {}

        def read(source: TensorSource, name: str) -> Tensor:
            tensor = dict(source.tensors(model, slices))[name][...]
            if grow and name in ends and len(tensor) < (rows := shapes[name][0]):
                grown = tensor.new_empty(rows, *tensor.shape[1:])
                fill_vocabulary(grown, [tensor], new_tokens=range(len(tensor), rows))
                tensor = grown
            _check_shape(tensor, shapes[name], where=f"{directory}: {name}")
            return tensor

        for source in _checked_sources(model, directory, slices, allow_unexpected=allow_unexpected):
            piece = slices[source.stored[0][0]]
            dtype = piece[:0].dtype if piece.get_shape() else piece[...].dtype
            for name in sorted(source.targets(shapes)):
                found[name] = StoredTensor(shapes[name], dtype, partial(read, source, name))
        yield found


def _checked_sources(
    model: PreTrainedModel, directory: Path, stored: Mapping[str, Any], *, allow_unexpected: bool
) -> list[TensorSource]:
    """What `find_sources` gives; missing and unexpected tensors are refused, and tied ones that are stored apart.

    Args:
        stored: safetensors slices by name.
    """
    sources, unexpected = find_sources(model, stored)
    targets = base_tensors(model).keys()
    missing = targets - find_ties(model).keys()
    for source in sources:
        missing -= source.targets(targets)
    kind = type(model).__name__
    if missing:
        what = f"{some(sorted(missing))} not in its safetensors"
        raise UserError(str(directory), what, f"is it a checkpoint of {kind}, and whole?")
    ignored = [r"rotary_emb\.inv_freq", *(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or [])]
    unexpected = [name for name in unexpected if not any(re.search(pattern, name) for pattern in ignored)]
    # A text part's layers that are not run would be copied as they are.
    if unexpected and (not allow_unexpected or weights_of(model).whole is not None):
        what = f"{some(unexpected)} in its safetensors and unknown to {kind}"
        todo = "is it a checkpoint of this architecture? A shallower model needs model.config.num_hidden_layers"
        raise UserError(str(directory), what, todo)
    for source in sources:
        for copy in source.copies:
            _check_same(stored, source.stored[0][0], copy, where=str(directory))
    return sources


def _check_same(stored: Mapping[str, Any], one: str, other: str, *, where: str) -> None:
    """Refuse two tensors that differ and would become one. transformers then unties them, with a warning."""
    shapes = [torch.Size(stored[name].get_shape()) for name in (one, other)]
    pairs = zip(*(row_blocks(stored[name], shapes[0]) for name in (one, other)), strict=True)
    if shapes[0] != shapes[1] or not all(torch.equal(first.float(), second.float()) for first, second in pairs):
        what = f"{one} and {other} differ, and the model's config makes them one tensor"
        todo = "set model.config.tie_word_embeddings = false to train both, or drop the one that is not meant"
        raise UserError(where, what, todo)


def _check_shape(stored: Any, wanted: torch.Size, *, where: str) -> None:
    """`stored` is a tensor or a safetensors slice."""
    shape = list(stored.get_shape() if hasattr(stored, "get_shape") else stored.shape)
    if shape != list(wanted):
        what = f"stored with shape {shape}, but the model wants {list(wanted)}"
        raise UserError(where, what, "check model.config overrides against the model's config.json")
