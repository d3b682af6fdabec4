"""Values for a sharded model: streamed out of safetensors, or drawn from (seed, name).

Every rank reads by itself just the rows that its shards hold, through the files' memory maps, straight into the
shards; nothing is gathered or sent, and no more than one tensor's rows live beside the shards at any time.
Which stored tensors make a tensor of the model is said in `names`.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from fsdp2kit.errors import UserError
from fsdp2kit.model.names import Source, find_sources, tied_names
from fsdp2kit.model.random_init import draw
from fsdp2kit.torch_compat import local_slices

INDEX_NAME = "model.safetensors.index.json"


def load_pretrained(model: PreTrainedModel, directory: Path, *, allow_unexpected: bool = False) -> None:
    """Fill a materialised (sharded) model from the safetensors of a Hugging Face directory, in place.

    Args:
        model: parameters and persistent buffers are DTensors or plain tensors of any floating-point dtype.
        directory: holds ``model.safetensors``, or several files with their index.
        allow_unexpected: accept tensors in the files that the model has no use for (a cut depth, say).

    Raises:
        UserError: no, missing, truncated or corrupt files; missing or unexpected tensors; wrong shapes.
    """
    targets = model.state_dict()  # aliases of the parameters and persistent buffers
    with _open_safetensors(directory) as slices:
        for source in _checked_sources(model, directory, slices, allow_unexpected=allow_unexpected):
            for name, value in source.tensors(model, slices):
                where = f"{directory}: {source.name}"
                _check_shape(value, targets[name].shape, where=where)
                try:
                    _copy_part(targets[name], value)
                except SafetensorError as error:
                    raise UserError(where, f"cannot be read ({error})", "fetch the file again") from None


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a Hugging Face directory as the model has it, not yet read."""

    shape: torch.Size
    dtype: torch.dtype
    read: Callable[[], Tensor]


@contextlib.contextmanager
def open_pretrained(model: PreTrainedModel, directory: Path) -> Iterator[dict[str, StoredTensor]]:
    """Every tensor of the model by name, a tied one once, in the files' dtypes; readable while this lasts.

    Args:
        model: may be on meta.

    Raises:
        UserError: as `load_pretrained`.
    """
    with _open_safetensors(directory) as slices:
        shapes, found = {name: tensor.shape for name, tensor in model.state_dict().items()}, {}

        def read(source: Source, name: str) -> Tensor:
            tensor = dict(source.tensors(model, slices))[name][...]
            _check_shape(tensor, shapes[name], where=f"{directory}: {name}")
            return tensor

        for source in _checked_sources(model, directory, slices, allow_unexpected=False):
            piece = slices[source.stored[0][0]]
            dtype = piece[:0].dtype if piece.get_shape() else piece[...].dtype
            for name in sorted(source.targets(shapes)):
                found[name] = StoredTensor(shapes[name], dtype, partial(read, source, name))
        yield found


def initialize(model: PreTrainedModel, *, seed: int) -> None:
    """Draw every parameter and persistent buffer of a materialised model from (seed, its module's name).

    The distribution is the model's own (transformers' ``_init_weights``); the values depend neither on the mesh
    nor on the device: each module is drawn whole on the CPU and every rank keeps its part.

    Raises:
        UserError: the architecture's initialisation leaves a parameter out.
    """
    targets = model.state_dict()
    for name, value in draw(model, seed=seed):
        _copy_part(targets[name], value)


@contextlib.contextmanager
def _open_safetensors(directory: Path) -> Iterator[dict[str, Any]]:
    """A slice object of every stored tensor by name: ``get_shape()``, and indexing reads just that part.

    Raises:
        UserError: no weights in the directory, a missing, truncated or corrupt file.
    """
    slices: dict[str, Any] = {}
    with contextlib.ExitStack() as files:
        for path in _safetensors_files(directory):
            try:
                file = files.enter_context(safe_open(str(path), framework="pt"))
            except FileNotFoundError:
                raise UserError(str(path), "is named in the index but missing", "fetch the model again") from None
            except (SafetensorError, OSError) as error:
                raise UserError(str(path), f"is not a whole safetensors file ({error})", "fetch it again") from None
            slices.update((name, file.get_slice(name)) for name in file.keys())  # noqa: SIM118 (not a dict)
        yield slices


def _safetensors_files(directory: Path) -> list[Path]:
    index, single = directory / INDEX_NAME, directory / "model.safetensors"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(str(index), f"is not a safetensors index ({error!r})", "fetch it again") from None
        return [directory / name for name in names]
    if not single.is_file():
        raise UserError(
            "model.path",
            f"{directory} has no model.safetensors and no {INDEX_NAME}",
            "convert its weights to safetensors, or set model.weights = 'random'",
        )
    return [single]


def _checked_sources(
    model: PreTrainedModel, directory: Path, stored: Collection[str], *, allow_unexpected: bool
) -> list[Source]:
    """`find_sources`, where nothing is missing and nothing is left over."""
    sources, unexpected = find_sources(model, stored)
    targets = model.state_dict().keys()
    missing = targets - tied_names(model).keys()
    for source in sources:
        missing -= source.targets(targets)
    kind = type(model).__name__
    if missing:
        what = f"{_some(sorted(missing))} of {kind} {_are(missing)} not in its safetensors"
        raise UserError(str(directory), what, "is it a checkpoint of this architecture, and whole?")
    ignored = [r"rotary_emb\.inv_freq", *(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or [])]
    unexpected = [name for name in unexpected if not any(re.search(pattern, name) for pattern in ignored)]
    if unexpected and not allow_unexpected:
        what = f"{_some(unexpected)} in its safetensors {_are(unexpected)} unknown to {kind}"
        todo = "is it a checkpoint of this architecture? A shallower model needs model.config.num_hidden_layers"
        raise UserError(str(directory), what, todo)
    return sources


def _check_shape(stored: Any, wanted: torch.Size, *, where: str) -> None:
    """
    Args:
        stored: a tensor, or a safetensors slice.
    """
    shape = list(stored.get_shape() if hasattr(stored, "get_shape") else stored.shape)
    if shape != list(wanted):
        what = f"stored with shape {shape}, but the model wants {list(wanted)}"
        raise UserError(where, what, "check model.config overrides against the model's config.json")


@torch.no_grad()
def _copy_part(target: Tensor, source: Any) -> None:
    """Copy into ``target`` the part of ``source`` (whole, sliceable) that this rank holds, converting its dtype."""
    local = target.to_local() if isinstance(target, DTensor) else target
    if local.numel():
        part = local_slices(target)
        local.copy_(source[part] if part else source[...])


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _are(names: Collection[str]) -> str:
    return "is" if len(names) == 1 else "are"
