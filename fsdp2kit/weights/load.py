"""A sharded model's values, streamed out of safetensors.

Every rank reads only the rows of its shards, through the files' memory maps, straight into the shards: nothing is
gathered or sent (`shards`). `conversion` matches the files' names with the model's.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
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
from fsdp2kit.weights.conversion import match_files
from fsdp2kit.weights.modules import base_tensors
from fsdp2kit.weights.record import find_ties, source_of, weights_of
from fsdp2kit.weights.shards import fill_shards, fill_vocabulary, grown_tensors, row_blocks, vocabulary_tensors
from fsdp2kit.weights.stored import meta_of, open_safetensors, safetensors_files, some
from fsdp2kit.weights.transfer import MappingReader, Reader, WeightEntry, forms_of, transfer


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
    ties = find_ties(model)
    size = sum(local_part(shard).nbytes for name, (shard, *_) in base_tensors(model).items() if name not in ties)
    with (
        open_pretrained(model, directory, allow_unexpected=allow_unexpected) as (entries, reader),
        progress_bar("reading weights", total=size) as bar,
    ):
        transfer(entries, reader, partial(fill_shards, model, advance=bar.advance))
    fill_adapter(model, seed=seed)


@contextlib.contextmanager
def open_pretrained(
    model: PreTrainedModel, directory: str | Path, *, allow_unexpected: bool = False, grow: bool = False
) -> Iterator[tuple[list[WeightEntry], Reader]]:
    """What a model's tensors are made of, a tied one once, and a reader of that. Missing and unexpected ones are
    refused.

    Args:
        model: on any device, sharded or not. With new tokens, forms of the embedding and the head have stored rows.
        directory: a Hugging Face directory.
        allow_unexpected: as for `load_pretrained`.
        grow: the model's embedding and head may have more rows than the files; these are the mean of the others.

    Raises:
        UserError: as for `load_pretrained`; a wrong shape of what is converted is an error when it is read.
    """
    directory = Path(directory)
    with open_safetensors(safetensors_files(directory)) as slices:
        found = _entries(model, directory, slices, allow_unexpected=allow_unexpected)
        stored, _ = grown_tensors(model)
        ends = vocabulary_tensors(model) if grow else {}
        yield [_checked(entry, directory, stored, ends) for entry in found], MappingReader(slices)


def _entries(
    model: PreTrainedModel, directory: Path, slices: Mapping[str, Any], *, allow_unexpected: bool
) -> list[WeightEntry]:
    """What `match_files` finds; missing and unexpected tensors are refused, and tied ones that are stored apart."""
    match = match_files(model, _Metas(directory, slices))
    names = base_tensors(model).keys()
    missing = names - find_ties(model).keys() - forms_of(match.entries).keys()
    kind = type(model).__name__
    if missing:
        what = f"{some(sorted(missing))} not in its safetensors"
        raise UserError(str(directory), what, f"is it a checkpoint of {kind}, and whole?")
    ignored = [r"rotary_emb\.inv_freq", *(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or [])]
    unexpected = [name for name in match.unexpected if not any(re.search(pattern, name) for pattern in ignored)]
    # A text part's layers that are not run would be copied as they are.
    if unexpected and (not allow_unexpected or weights_of(model).names.whole is not None):
        what = f"{some(unexpected)} in its safetensors and unknown to {kind}"
        todo = "is it a checkpoint of this architecture? A shallower model needs model.config.num_hidden_layers"
        raise UserError(str(directory), what, todo)
    for copy, first in match.copies.items():
        _check_same(slices, first, copy, where=str(directory))
    return match.entries


def _checked(
    entry: WeightEntry, directory: Path, stored: Mapping[str, torch.Size], ends: Collection[str]
) -> WeightEntry:
    """The entry with its shapes compared, of a conversion when it is done.

    Args:
        stored: shapes of the embedding's and the head's tensors in the files, by name, where the model has new tokens.
        ends: tensors that may be shorter than the model's: they are completed.
    """
    if entry.convert is not None:
        return replace(entry, convert=partial(_convert_checked, entry, directory))
    ((name, form),) = entry.forms.items()
    source = next(iter(entry.sources.values()))
    if name in ends and source.shape[1:] == form.shape[1:] and len(source) < len(form):
        return replace(entry, convert=partial(_complete, name, form))
    if name in stored:
        form = form.new_empty(stored[name])
    _check_shape(source, form, where=f"{directory}: {name}")
    return replace(entry, forms={name: form})


def _convert_checked(entry: WeightEntry, directory: Path, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    assert entry.convert is not None
    found = entry.convert(tensors)
    for name, form in entry.forms.items():
        _check_shape(found[name], form, where=f"{directory}: {name}")
    return found


def _complete(name: str, form: Tensor, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """A tensor with as many rows as ``form``; those that are not stored are the mean of the others."""
    (tensor,) = tensors.values()
    grown = tensor.new_empty(form.shape)
    fill_vocabulary(grown, [tensor], new_tokens=range(len(tensor), len(form)))
    return {name: grown}


class _Metas(Mapping[str, Tensor]):
    """Meta tensors like those in the files, each made when it is asked for: torch may lack the dtype of another."""

    def __init__(self, directory: Path, slices: Mapping[str, Any]) -> None:
        self._directory = directory
        self._slices = slices

    def __getitem__(self, name: str) -> Tensor:
        piece = self._slices[name]
        try:
            return meta_of(piece)
        except (SafetensorError, RuntimeError) as error:
            where = f"{self._directory}: {name}"
            what = f"cannot be read as {piece.get_dtype()} ({error})"
            raise UserError(where, what, "fetch the file again, or convert it to a dtype that torch has") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._slices)

    def __len__(self) -> int:
        return len(self._slices)


def _check_same(stored: Mapping[str, Any], one: str, other: str, *, where: str) -> None:
    """Refuse two tensors that differ and would become one. transformers then unties them, with a warning."""
    shapes = [torch.Size(stored[name].get_shape()) for name in (one, other)]
    pairs = zip(*(row_blocks(stored[name], shapes[0]) for name in (one, other)), strict=True)
    if shapes[0] != shapes[1] or not all(torch.equal(first.float(), second.float()) for first, second in pairs):
        what = f"{one} and {other} differ, and the model's config makes them one tensor"
        todo = "set model.config.tie_word_embeddings = false to train both, or drop the one that is not meant"
        raise UserError(where, what, todo)


def _check_shape(stored: Tensor, wanted: Tensor, *, where: str) -> None:
    if stored.shape != wanted.shape:
        what = f"stored with shape {list(stored.shape)}, but the model wants {list(wanted.shape)}"
        raise UserError(where, what, "check model.config overrides against the model's config.json")
